//! The client's socket: whole messages in, whole messages out, each within a time.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendFlags,
    recvmsg, sendmsg,
};

use crate::error::Broken;
use crate::wire::{HEADER, Header, MAX_FDS};

/// A message that has begun has to be whole within this time, and a reply has to be taken.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is looked whether to stop.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A request as it came.
pub(crate) struct Message {
    pub header: Header,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// The socket.
pub(crate) struct Link<'a> {
    stream: UnixStream,
    stop: &'a dyn Fn() -> bool,
}

impl<'a> Link<'a> {
    /// `stop` is asked now and then whether to end.
    pub(crate) fn new(stream: UnixStream, stop: &'a dyn Fn() -> bool) -> Self {
        Self { stream, stop }
    }

    /// Waits for the next message; none when the client has closed, or it is time to stop.
    pub(crate) fn receive(&self) -> Result<Option<Message>, Broken> {
        let (mut raw, mut fds) = ([0; HEADER], Vec::new());
        if !self.fill(&mut raw, &mut fds, None)? {
            return Ok(None);
        }
        let header = Header::decode(&raw);
        let mut payload = vec![0; header.payload().map_err(Broken::Protocol)?];
        let due = Instant::now() + PATIENCE;
        if !self.fill(&mut payload, &mut fds, Some(due))? {
            return Ok(None);
        }
        Ok(Some(Message { header, payload, fds }))
    }

    /// Fills a buffer, collecting what file descriptors come along; false when the stream ended before its first byte
    /// or it is time to stop. Once a byte has come, or if there is a time already, it waits only so long.
    fn fill(&self, buffer: &mut [u8], fds: &mut Vec<OwnedFd>, due: Option<Instant>) -> Result<bool, Broken> {
        let (mut done, mut due) = (0, due);
        while done < buffer.len() {
            if !self.wait(PollFlags::IN, due, "send the rest of a message")? {
                return Ok(false);
            }
            match self.receive_some(&mut buffer[done..], fds)? {
                None => {}
                Some(0) if done == 0 && due.is_none() => return Ok(false),
                Some(0) => {
                    return Err(Broken::Protocol("the stream ended in the middle of a message".into()));
                }
                Some(more) => done += more,
            }
            due = due.or_else(|| Some(Instant::now() + PATIENCE));
        }
        Ok(true)
    }

    fn receive_some(&self, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<Option<usize>, Broken> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = match recvmsg(&self.stream, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            // A client that was killed with replies unread: the same as closed.
            Err(Errno::CONNRESET) => return Ok(Some(0)),
            Err(error) => return Err(Broken::Socket("recvmsg", error)),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
            return Err(Broken::Protocol(format!("more than {MAX_FDS} file descriptors in a message")));
        }
        Ok(Some(got.bytes))
    }

    /// Sends a reply.
    pub(crate) fn send(&self, header: &Header, payload: &[u8]) -> Result<(), Broken> {
        let message = [header.encode().as_slice(), payload].concat();
        let (mut left, due) = (message.as_slice(), Instant::now() + PATIENCE);
        while !left.is_empty() {
            let mut control = SendAncillaryBuffer::default();
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.stream, &[IoSlice::new(left)], &mut control, flags) {
                Ok(sent) => left = &left[sent..],
                Err(Errno::AGAIN | Errno::INTR) => {
                    if !self.wait(PollFlags::OUT, Some(due), "take a reply")? {
                        return Ok(());
                    }
                }
                // The client is gone; the next receive says so.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(error) => return Err(Broken::Socket("sendmsg", error)),
            }
        }
        Ok(())
    }

    /// Waits until the socket is ready; false when it is time to stop.
    fn wait(&self, ready: PollFlags, due: Option<Instant>, what: &'static str) -> Result<bool, Broken> {
        loop {
            if (self.stop)() {
                return Ok(false);
            }
            let mut polled = [PollFd::new(&self.stream, ready)];
            match poll(&mut polled, Some(&TICK)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(true),
                Err(error) => return Err(Broken::Socket("poll", error)),
            }
            if due.is_some_and(|due| Instant::now() >= due) {
                return Err(Broken::Slow(what, PATIENCE.as_secs()));
            }
        }
    }
}
