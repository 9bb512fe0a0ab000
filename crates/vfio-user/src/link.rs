//! A socket of either side: sends and receives whole messages, with time limits.

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg,
    socket_with,
};

use crate::error::Broken;
use crate::wire::{HEADER, MAX_FDS, MessageHeader};

/// Time limit for the rest of a message that has begun, and for sending one.
pub(crate) const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between checks of `stop`.
const STOP_POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Connects without waiting: `EAGAIN` if the server's backlog is full.
pub(crate) fn connect_at_once(path: &Path) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

/// A received message.
pub(crate) struct Message {
    pub header: MessageHeader,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// The socket.
pub(crate) struct MessageSocket<S> {
    stream: UnixStream,
    stop: S,
}

impl<S: Fn() -> bool> MessageSocket<S> {
    /// `stop` is called regularly; it returns whether to end.
    pub(crate) fn new(stream: UnixStream, stop: S) -> Self {
        Self { stream, stop }
    }

    /// Waits for the next message; `None` when the peer has closed, or `stop` says so.
    pub(crate) fn receive(&self) -> Result<Option<Message>, Broken> {
        self.receive_by(None)
    }

    /// Waits for the next message, at most until `due`.
    pub(crate) fn receive_by(&self, due: Option<Instant>) -> Result<Option<Message>, Broken> {
        let (mut raw, mut fds) = ([0; HEADER], Vec::new());
        if !self.fill(&mut raw, &mut fds, due, true)? {
            return Ok(None);
        }
        let header = MessageHeader::decode(&raw);
        let mut payload = vec![0; header.payload().map_err(Broken::Protocol)?];
        let due = Instant::now() + MESSAGE_TIMEOUT;
        if !self.fill(&mut payload, &mut fds, Some(due), false)? {
            return Ok(None);
        }
        Ok(Some(Message { header, payload, fds }))
    }

    /// Fills a buffer and collects file descriptors. Returns false on `stop`, or if the stream ended before its first
    /// byte where that is allowed. There is a time limit from the first byte on, or if `due` is set.
    fn fill(
        &self,
        buffer: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        due: Option<Instant>,
        may_end: bool,
    ) -> Result<bool, Broken> {
        let (mut done, mut due) = (0, due);
        while done < buffer.len() {
            if !self.wait(PollFlags::IN, due, "send a whole message")? {
                return Ok(false);
            }
            match self.receive_some(&mut buffer[done..], fds)? {
                None => {}
                Some(0) if done == 0 && may_end => return Ok(false),
                Some(0) => {
                    return Err(Broken::Protocol("the stream ended in the middle of a message".into()));
                }
                Some(more) => done += more,
            }
            due = due.or_else(|| Some(Instant::now() + MESSAGE_TIMEOUT));
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
            // The peer was killed with messages unread: the same as closed.
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

    /// Sends a message, optionally with a file.
    pub(crate) fn send(
        &self,
        header: &MessageHeader,
        payload: &[u8],
        file: Option<&File>,
    ) -> Result<(), Broken> {
        let message = [header.encode().as_slice(), payload].concat();
        let (mut left, due) = (message.as_slice(), Instant::now() + MESSAGE_TIMEOUT);
        let fds = file.map(AsFd::as_fd);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(fd) = &fds {
            control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
        }
        while !left.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.stream, &[IoSlice::new(left)], &mut control, flags) {
                Ok(sent) => {
                    left = &left[sent..];
                    control.clear();
                }
                Err(Errno::AGAIN | Errno::INTR) => {
                    if !self.wait(PollFlags::OUT, Some(due), "take a message")? {
                        return Ok(());
                    }
                }
                // The peer is gone; the next receive reports it.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(error) => return Err(Broken::Socket("sendmsg", error)),
            }
        }
        Ok(())
    }

    /// Waits until the socket is ready; false on `stop`.
    fn wait(&self, ready: PollFlags, due: Option<Instant>, what: &'static str) -> Result<bool, Broken> {
        loop {
            if (self.stop)() {
                return Ok(false);
            }
            let mut polled = [PollFd::new(&self.stream, ready)];
            match poll(&mut polled, Some(&STOP_POLL_INTERVAL)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(true),
                Err(error) => return Err(Broken::Socket("poll", error)),
            }
            if due.is_some_and(|due| Instant::now() >= due) {
                return Err(Broken::Slow(what, MESSAGE_TIMEOUT.as_secs()));
            }
        }
    }
}
