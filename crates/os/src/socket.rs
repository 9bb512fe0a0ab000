//! Sends and receives host memory through sockets, copied only by the kernel.

use std::os::fd::{AsFd, AsRawFd};

use crate::{Error, HostMem, Result};

/// A message of these buffers.
fn message(parts: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: a msghdr of zeroes is one without an address, parts or control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    message
}

fn counted(call: &'static str, count: libc::ssize_t) -> Result<usize> {
    usize::try_from(count).map_err(|_| Error::system(call, std::io::Error::last_os_error()))
}

impl HostMem {
    /// Sends `front`, followed by `bytes` bytes of this memory from `offset` on, without waiting; returns how many of
    /// all these bytes the socket accepted.
    ///
    /// # Errors
    /// When the range does not lie within the memory, or the socket accepts nothing: `EAGAIN` if it has no room now.
    pub fn send(&self, socket: impl AsFd, front: &[u8], offset: usize, bytes: usize) -> Result<usize> {
        let part = self.slice(offset..offset.saturating_add(bytes))?;
        let mut parts = [
            libc::iovec { iov_base: front.as_ptr().cast_mut().cast(), iov_len: front.len() },
            libc::iovec { iov_base: part.host_ptr().cast(), iov_len: part.len() },
        ];
        let message = message(&mut parts);
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: both buffers and their list outlive the call; the kernel reads them, the memory as a device does.
        let sent = unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, flags) };
        counted("sendmsg", sent)
    }

    /// Receives at most `bytes` bytes into this memory at `offset`, without waiting; returns 0 when the other side has
    /// closed.
    ///
    /// # Errors
    /// When the range does not lie within the memory, it cannot be written, or nothing can be received: `EAGAIN` if
    /// nothing has arrived.
    pub fn receive(&self, socket: impl AsFd, offset: usize, bytes: usize) -> Result<usize> {
        self.receive_with_rest(socket, offset, bytes, &mut [])
    }

    /// The same, and receives further bytes into `rest`. The count includes both.
    ///
    /// # Errors
    /// Those of [`Self::receive`].
    pub fn receive_with_rest(
        &self,
        socket: impl AsFd,
        offset: usize,
        bytes: usize,
        rest: &mut [u8],
    ) -> Result<usize> {
        self.check_writable_range(offset, bytes)?;
        let to = self.host_ptr().wrapping_add(offset);
        let mut parts = [
            libc::iovec { iov_base: to.cast(), iov_len: bytes },
            libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() },
        ];
        let mut message = message(&mut parts);
        // SAFETY: both buffers and their list outlive the call. The first lies within the mapping, which is writable
        // and outlives &self; the kernel writes it as a device does, and references to its bytes are only to atomics.
        // The second is borrowed for writing.
        let came = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        counted("recvmsg", came)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn bytes_go_and_come_as_they_are() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let mem = HostMem::anonymous(8192).unwrap();
        let bytes: Vec<u8> = (0..5000).map(|i: u32| ((i * 7) >> 3) as u8).collect();
        mem.write(100, &bytes).unwrap();
        assert_eq!(mem.send(&near, b"front", 100, 5000).unwrap(), 5005);
        let mut seen = vec![0; 5005];
        (&far).read_exact(&mut seen).unwrap();
        assert!(seen[..5] == *b"front" && seen[5..] == bytes);
        near.write_all(&bytes).unwrap();
        let other = HostMem::anonymous(8192).unwrap();
        assert_eq!(other.receive(&far, 3, 5000).unwrap(), 5000);
        assert_eq!(other.to_vec(3, 5000).unwrap(), bytes);
        assert_eq!((other.to_vec(0, 3).unwrap(), other.to_vec(5003, 2).unwrap()), (vec![0; 3], vec![0; 2]));
        near.write_all(&bytes).unwrap();
        let mut rest = [0; 100];
        let fresh = HostMem::anonymous(8192).unwrap();
        assert_eq!(fresh.receive_with_rest(&far, 3, 4950, &mut rest).unwrap(), 5000);
        assert_eq!(fresh.to_vec(3, 4950).unwrap(), bytes[..4950]);
        assert_eq!((fresh.to_vec(4953, 2).unwrap(), &rest[..50]), (vec![0; 2], &bytes[4950..]));
        assert_eq!(rest[50..], [0; 50]);
    }

    #[test]
    fn nothing_is_waited_for_and_ranges_are_checked() {
        let (near, far) = UnixStream::pair().unwrap();
        let mem = HostMem::anonymous(4096).unwrap();
        assert_eq!(mem.receive(&far, 0, 1).unwrap_err().errno(), Some(libc::EAGAIN));
        let full =
            std::iter::repeat_with(|| mem.send(&near, b"", 0, 4096)).find_map(std::result::Result::err);
        assert_eq!(full.unwrap().errno(), Some(libc::EAGAIN));
        assert!(mem.send(&near, b"", 1, 4096).is_err() && mem.send(&near, b"", usize::MAX, 2).is_err());
        assert!(mem.receive(&far, 4096, 1).is_err() && mem.receive(&far, usize::MAX, 2).is_err());
        drop(near);
        while mem.receive(&far, 0, 4096).unwrap() > 0 {}
        assert_eq!(mem.send(&far, b"x", 0, 1).unwrap_err().errno(), Some(libc::EPIPE));
    }
}
