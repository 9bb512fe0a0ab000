//! A connection between two ranks of a group: messages over a Unix socket, some with a descriptor.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recv, recvmsg, sendmsg,
};
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};
use rustix::time::Timespec;

/// Longest message: the plan of a model with millions of tensors.
const MOST: usize = 256 << 20;
/// Time limit for a rank to take what is sent to it: it has a thread for that.
const SEND: Duration = Duration::from_secs(10);
/// How long a receiver sleeps before it looks at its other conditions.
const POLL: Duration = Duration::from_millis(20);
const HEAD: usize = 8;
/// Most descriptors that wait for their message.
const MOST_FDS: usize = 2;
/// Bytes received at a time.
const READ: usize = 64 << 10;

/// What a message says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Who this is.
    Hello = 1,
    /// Why a newcomer is turned away, as text.
    Refused,
    /// What this rank loads.
    Terms,
    /// Its arena, with a descriptor if it has one; as text, why it cannot be shared.
    Arena,
    NoArena,
    /// Whether this rank reaches all arenas; as text, why not.
    Reached,
    NotReached,
    /// Bytes that have arrived in the receiver's arena.
    Arrived,
    /// This rank is at work: something has moved since it last said so.
    Alive,
    /// This rank has passed on all that it reads.
    Done,
    /// As text, why this rank's load ends early.
    Failed,
    /// This rank no longer writes to the receiver's arena.
    Closed,
}

impl Kind {
    const ALL: [Self; 12] = [
        Self::Hello,
        Self::Refused,
        Self::Terms,
        Self::Arena,
        Self::NoArena,
        Self::Reached,
        Self::NotReached,
        Self::Arrived,
        Self::Alive,
        Self::Done,
        Self::Failed,
        Self::Closed,
    ];
}

/// A message.
#[derive(Debug)]
pub(crate) struct RankMessage {
    pub(crate) kind: Kind,
    pub(crate) bytes: Vec<u8>,
    pub(crate) fd: Option<OwnedFd>,
}

impl RankMessage {
    /// Its bytes as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// What came of waiting for a message.
#[derive(Debug)]
pub(crate) enum Received {
    Message(RankMessage),
    /// The other process has closed its end, or is gone.
    End,
    /// Nothing within the limit.
    Nothing,
}

/// A connection to another process of the same user.
pub(crate) struct RankLink {
    socket: UnixStream,
    pid: Pid,
    /// Its process, if it can be seen from here.
    process: Option<OwnedFd>,
    sending: Mutex<()>,
    received: Mutex<Incoming>,
}

#[derive(Default)]
struct Incoming {
    bytes: Vec<u8>,
    fds: VecDeque<OwnedFd>,
}

impl Incoming {
    /// The first whole message, if there is one.
    fn take(&mut self) -> io::Result<Option<RankMessage>> {
        let Some((head, rest)) = self.bytes.split_first_chunk::<HEAD>() else { return Ok(None) };
        let [a, b, c, d, kind, has_fd, _, _] = *head;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        let Some(kind) = Kind::ALL.into_iter().find(|known| *known as u8 == kind) else {
            return Err(broken("an unknown message"));
        };
        if length > MOST {
            return Err(broken("a message that is too long"));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let rest = self.bytes.split_off(HEAD + length);
        let bytes = std::mem::replace(&mut self.bytes, rest).split_off(HEAD);
        let fd = if has_fd == 0 { None } else { self.fds.pop_front() };
        Ok(Some(RankMessage { kind, bytes, fd }))
    }
}

fn slow() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, format!("it has taken no message for {SEND:?}"))
}

fn broken(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("it sent {what}"))
}

impl RankLink {
    /// Takes a connection, if the other process is one of the same user.
    pub(crate) fn new(socket: UnixStream) -> io::Result<Self> {
        let other = socket_peercred(&socket)?;
        let me = geteuid();
        if other.uid != me {
            let why = format!(
                "process {} of user {} answers in place of one of user {}",
                other.pid.as_raw_nonzero(),
                other.uid.as_raw(),
                me.as_raw()
            );
            return Err(io::Error::new(ErrorKind::PermissionDenied, why));
        }
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(POLL))?;
        socket.set_write_timeout(Some(SEND))?;
        let process = pidfd_open(other.pid, PidfdFlags::empty()).ok();
        let (sending, received) = (Mutex::default(), Mutex::default());
        Ok(Self { socket, pid: other.pid, process, sending, received })
    }

    /// The other process.
    pub(crate) fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    pub(crate) fn send(&self, kind: Kind, bytes: &[u8]) -> io::Result<()> {
        self.send_with(kind, bytes, None)
    }

    pub(crate) fn send_with(&self, kind: Kind, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let length = u32::try_from(bytes.len()).ok().filter(|length| *length as usize <= MOST);
        let length =
            length.ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, "the message is too long"))?;
        let [a, b, c, d] = length.to_le_bytes();
        let head = [a, b, c, d, kind as u8, fd.is_some().into(), 0, 0];
        let _one = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        let (mut sent, start) = (0, Instant::now());
        while sent < HEAD + bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut beside = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(io::Error::from(ErrorKind::OutOfMemory));
            }
            let head = head.get(sent..).unwrap_or_default();
            let rest = bytes.get(sent.saturating_sub(HEAD)..).unwrap_or_default();
            let parts = [IoSlice::new(head), IoSlice::new(rest)];
            sent += match sendmsg(&self.socket, &parts, &mut beside, SendFlags::NOSIGNAL) {
                Err(rustix::io::Errno::INTR) => 0,
                Err(rustix::io::Errno::AGAIN) => return Err(slow()),
                sent => sent?,
            };
            if start.elapsed() > SEND {
                return Err(slow());
            }
        }
        Ok(())
    }

    /// Waits for a message. One thread at a time does.
    pub(crate) fn receive(&self, limit: Duration) -> io::Result<Received> {
        let start = Instant::now();
        let mut incoming = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let mut buffer = vec![0; READ];
        loop {
            if let Some(message) = incoming.take()? {
                return Ok(Received::Message(message));
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut beside = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut buffer)];
            match recvmsg(&self.socket, &mut parts, &mut beside, RecvFlags::CMSG_CLOEXEC) {
                Ok(got) => {
                    for message in beside.drain() {
                        if let RecvAncillaryMessage::ScmRights(fds) = message {
                            incoming.fds.extend(fds);
                        }
                    }
                    if incoming.fds.len() > MOST_FDS {
                        return Err(broken("descriptors without a message"));
                    }
                    if got.bytes == 0 {
                        return Ok(Received::End);
                    }
                    incoming.bytes.extend_from_slice(buffer.get(..got.bytes).unwrap_or_default());
                }
                // A child of its may have the connection too, and keep it open.
                Err(rustix::io::Errno::AGAIN) if self.has_ended() => {
                    return Ok(Received::End);
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) if start.elapsed() >= limit => {
                    return Ok(Received::Nothing);
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::CONNRESET) => return Ok(Received::End),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whether the other process has closed its end, or is gone, or has sent first of all that it failed.
    pub(crate) fn is_over(&self) -> bool {
        let mut head = [0; HEAD];
        if let Ok((HEAD.., _)) = recv(&self.socket, &mut head, RecvFlags::PEEK | RecvFlags::DONTWAIT)
            && head.get(4) == Some(&(Kind::Failed as u8))
        {
            return true;
        }
        let mut end = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let is_closed = matches!(poll(&mut end, Some(&Timespec::default())), Ok(1..));
        is_closed || self.has_ended()
    }

    /// Whether the other process has ended, as far as that can be seen from here.
    fn has_ended(&self) -> bool {
        self.wait_for_end(Duration::ZERO)
    }

    /// Ends the connection: pending receives on both sides return [`Received::End`].
    pub(crate) fn shut_down(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    /// Waits until the other process has ended, for a limited time: its GPU may still work on what it had begun when its
    /// connection broke. False if that cannot be seen from here.
    pub(crate) fn wait_for_end(&self, limit: Duration) -> bool {
        let Some(process) = &self.process else { return false };
        let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
        let mut ended = [PollFd::new(process, PollFlags::IN)];
        matches!(poll(&mut ended, Some(&limit)), Ok(1..))
    }
}
