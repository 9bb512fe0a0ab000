//! Messages between a program and our daemon over a Unix socket. They register GPU memory, which a link cannot name.
//!
//! A connection carries one message of fixed length in each direction, with descriptors. The daemon gets the program's
//! credentials from the kernel.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use onehop_gpu::cuda::Ticket;
use onehop_os::DmaBuf;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg,
    socket_with, sockopt,
};

use crate::gpu::Offer;
use crate::{Error, Id, Result};

/// The length of every message in bytes.
pub const BYTES: usize = 256;
/// The most descriptors with a message.
const MAX_FDS: usize = 2;
const MAGIC: [u8; 8] = *b"onehopU1";
/// The time limit for the other side.
pub const TIMEOUT: Duration = Duration::from_secs(20);

const TICKET: usize = 64;
const TEXT: usize = 64;

/// A program's request.
#[derive(Debug)]
pub enum Ask {
    /// Registers GPU memory as a buffer.
    Register {
        /// The id.
        id: Id,
        /// The program's number for the GPU.
        device: u32,
        /// The block size in bytes; 0 for none.
        block: u64,
        /// The memory.
        offer: Offer,
    },
    /// Imports the memory of a registered buffer, of which the program has the secret, as a buffer of its own.
    Import {
        /// The buffer.
        id: Id,
        /// The secret.
        secret: [u8; 16],
        /// The ID of the program's own buffer.
        new: Id,
    },
    /// Opens the memory of a buffer of the same user. Its rings may use the buffer by its ID.
    Open {
        /// The buffer.
        id: Id,
    },
}

/// The daemon's answer.
#[derive(Debug)]
pub enum Answer {
    /// Success.
    Registered {
        /// A secret with which other programs may import the buffer.
        secret: [u8; 16],
    },
    /// The memory of a buffer.
    Memory {
        /// A secret with which other programs may import the buffer.
        secret: [u8; 16],
        /// The GPU's number in the program that registered it.
        device: u32,
        /// The memory.
        offer: Offer,
    },
    /// Failure.
    Refused {
        /// The error number.
        errno: i32,
        /// Why.
        why: String,
    },
}

/// An encoded message.
pub struct Packet {
    /// The bytes.
    pub bytes: [u8; BYTES],
    /// The descriptors.
    pub fds: Vec<OwnedFd>,
}

impl Packet {
    fn new(kind: u32) -> Self {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&kind.to_le_bytes());
        Self { bytes, fds: Vec::new() }
    }

    fn put(&mut self, at: usize, what: &[u8]) {
        self.bytes[at..at + what.len()].copy_from_slice(what);
    }

    fn number(&self, at: usize) -> u64 {
        crate::wire::word(&self.bytes[at..])
    }

    fn sixteen(&self, at: usize) -> [u8; 16] {
        let mut out = [0; 16];
        out.copy_from_slice(&self.bytes[at..at + 16]);
        out
    }

    fn kind(&self) -> Result<u32> {
        if self.bytes[..8] != MAGIC {
            return Err(Error::Broken(
                "this is not a message of onehop, or it is one of another version".into(),
            ));
        }
        Ok(self.number(8) as u32)
    }

    /// Encodes the ticket, the range in the dma-buf, and which of the two descriptors are present.
    fn put_offer(&mut self, offer: Offer) {
        self.put(TICKET, &offer.ticket.to_bytes());
        let mut which = 0u32;
        if let Some(fd) = offer.fd {
            which |= 1;
            self.fds.push(fd);
        }
        if let Some(buf) = offer.dma_buf {
            which |= 2;
            self.fds.push(buf.fd);
            self.put(TICKET + Ticket::BYTES, &buf.offset.to_le_bytes());
            self.put(TICKET + Ticket::BYTES + 8, &buf.bytes.to_le_bytes());
        }
        self.put(12, &which.to_le_bytes());
    }

    fn offer(&mut self) -> Result<Offer> {
        let ticket = Ticket::from_bytes(&self.bytes[TICKET..TICKET + Ticket::BYTES])?;
        let which = self.number(12) as u32;
        let mut fds = std::mem::take(&mut self.fds).into_iter();
        let mut next = |bit: u32| {
            let missing = || Error::Broken("a descriptor is missing from a message".into());
            if which & bit == 0 { Ok(None) } else { fds.next().map(Some).ok_or_else(missing) }
        };
        let (fd, buf) = (next(1)?, next(2)?);
        let (offset, bytes) = (self.number(TICKET + Ticket::BYTES), self.number(TICKET + Ticket::BYTES + 8));
        Ok(Offer { ticket, fd, dma_buf: buf.map(|fd| DmaBuf { fd, offset, bytes }) })
    }
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(word)
}

impl Ask {
    /// Encodes the request.
    #[must_use]
    pub fn pack(self) -> Packet {
        match self {
            Self::Register { id, device, block, offer } => {
                let mut packet = Packet::new(1);
                packet.put(16, &id.0);
                packet.put(32, &device.to_le_bytes());
                packet.put(40, &block.to_le_bytes());
                packet.put_offer(offer);
                packet
            }
            Self::Import { id, secret, new } => {
                let mut packet = Packet::new(2);
                packet.put(16, &id.0);
                packet.put(32, &secret);
                packet.put(48, &new.0);
                packet
            }
            Self::Open { id } => {
                let mut packet = Packet::new(3);
                packet.put(16, &id.0);
                packet
            }
        }
    }

    /// Decodes a request.
    ///
    /// # Errors
    /// When it is not a valid request.
    pub fn unpack(mut packet: Packet) -> Result<Self> {
        let id = Id(packet.sixteen(16));
        match packet.kind()? {
            1 => Ok(Self::Register {
                id,
                device: packet.number(32) as u32,
                block: packet.number(40),
                offer: packet.offer()?,
            }),
            2 => Ok(Self::Import { id, secret: packet.sixteen(32), new: Id(packet.sixteen(48)) }),
            3 => Ok(Self::Open { id }),
            kind => Err(Error::Broken(format!("there is no request with the number {kind}"))),
        }
    }
}

impl Answer {
    /// Encodes the answer.
    #[must_use]
    pub fn pack(self) -> Packet {
        match self {
            Self::Registered { secret } => {
                let mut packet = Packet::new(101);
                packet.put(16, &secret);
                packet
            }
            Self::Memory { secret, device, offer } => {
                let mut packet = Packet::new(102);
                packet.put(16, &secret);
                packet.put(32, &device.to_le_bytes());
                packet.put_offer(offer);
                packet
            }
            Self::Refused { errno, why } => {
                let mut packet = Packet::new(103);
                packet.put(16, &errno.to_le_bytes());
                let mut end = why.len().min(BYTES - TEXT - 1);
                while !why.is_char_boundary(end) {
                    end -= 1;
                }
                packet.put(TEXT, &why.as_bytes()[..end]);
                packet
            }
        }
    }

    /// Decodes an answer.
    ///
    /// # Errors
    /// When it is invalid, or is a refusal.
    pub fn unpack(mut packet: Packet) -> Result<Self> {
        match packet.kind()? {
            101 => Ok(Self::Registered { secret: packet.sixteen(16) }),
            102 => Ok(Self::Memory {
                secret: packet.sixteen(16),
                device: packet.number(32) as u32,
                offer: packet.offer()?,
            }),
            103 => {
                let text: Vec<u8> = packet.bytes[TEXT..].iter().copied().take_while(|b| *b != 0).collect();
                let errno = (packet.number(16) as i32).clamp(1, 4095);
                Err(Error::Refused { errno, why: String::from_utf8_lossy(&text).into_owned() })
            }
            kind => Err(Error::Broken(format!("there is no answer with the number {kind}"))),
        }
    }
}

/// Sends a request to the daemon at a path, and returns its answer.
///
/// # Errors
/// When nothing answers, or the daemon refuses.
pub fn ask(path: &Path, ask: Ask) -> Result<Answer> {
    let failed = |call| move |e: rustix::io::Errno| Error::file(call, path, e);
    let address = SocketAddrUnix::new(path).map_err(failed("address of"))?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let socket = socket.map_err(failed("socket for"))?;
    set_timeouts(&socket).map_err(failed("setsockopt of"))?;
    connect(&socket, &address).map_err(failed("connect to"))?;
    send(&socket, &ask.pack()).map_err(failed("sendmsg to"))?;
    let packet = receive(&socket).map_err(failed("recvmsg from"))?;
    Answer::unpack(packet.ok_or_else(|| Error::Broken("the daemon ended before it had answered".into()))?)
}

/// Limits the wait of each call on the socket to [`TIMEOUT`].
///
/// # Errors
/// When the system call fails.
pub fn set_timeouts(socket: impl AsFd) -> rustix::io::Result<()> {
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(TIMEOUT))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(TIMEOUT))
}

/// Sends a message.
///
/// # Errors
/// When the other side is gone.
pub fn send(socket: impl AsFd, packet: &Packet) -> rustix::io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = packet.fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(rustix::io::Errno::INVAL);
    }
    sendmsg(socket, &[IoSlice::new(&packet.bytes)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// Receives a message; `None` if the other side has ended, or the length is wrong.
///
/// # Errors
/// When nothing arrives in time.
pub fn receive(socket: impl AsFd) -> rustix::io::Result<Option<Packet>> {
    let mut packet = Packet { bytes: [0; BYTES], fds: Vec::new() };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut packet.bytes)];
    let got = recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            packet.fds.extend(fds);
        }
    }
    Ok((got.bytes == BYTES).then_some(packet))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{GpuChoice, Gpus, SharedGpuMemory};

    #[test]
    fn memory_is_sent_over_a_socket() {
        let gpus = Gpus::new(GpuChoice::Emulated);
        let memory = SharedGpuMemory::create(&gpus.open(0).unwrap(), 4096).unwrap();
        let (a, b) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let id = Id::random().unwrap();
        let register = Ask::Register { id, device: 3, block: 512, offer: memory.offer().unwrap() };
        send(&a, &register.pack()).unwrap();
        let Ask::Register { id: got, device: 3, block: 512, offer } =
            Ask::unpack(receive(&b).unwrap().unwrap()).unwrap()
        else {
            panic!("another message")
        };
        assert_eq!(got, id);
        let (_, region) = gpus.accept(&offer).unwrap();
        region.write(0, b"x").unwrap();
        send(&b, &Answer::Memory { secret: [7; 16], device: 1, offer }.pack()).unwrap();
        let answer = Answer::unpack(receive(&a).unwrap().unwrap()).unwrap();
        assert!(matches!(answer, Answer::Memory { secret: [7, ..], device: 1, .. }));
        send(&b, &Answer::Refused { errno: 13, why: "é".repeat(300) }.pack()).unwrap();
        let refused = Answer::unpack(receive(&a).unwrap().unwrap());
        assert!(matches!(refused, Err(Error::Refused { errno: 13, .. })));
        // A message without its descriptor.
        let mut lonely = Ask::Register { id, device: 0, block: 0, offer: memory.offer().unwrap() }.pack();
        lonely.fds.clear();
        assert!(Ask::unpack(lonely).is_err());
    }
}
