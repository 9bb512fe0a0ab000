//! One queue of a controller behind an NVMe/TCP connection, without the connection: the caller moves its bytes, and
//! holds the memory of the commands.
//!
//! The queue never requests a byte past the header of a PDU before it knows where the byte belongs. So the caller can
//! receive data straight into its place. A [`ProtocolViolation`] ends the connection: nothing that the queue returns afterwards
//! may be used.

mod command;
mod receive;
mod send;

use std::collections::VecDeque;

use onehop_proto::{Cqe, Sqe};

use crate::pdu::{self, Digests};
pub use command::Data;
use command::{CommandSlot, Progress};
use receive::Receiver;
pub use send::Send;
use send::{Item, Sender};

/// Maximum commands in flight on a connection.
pub const MAX_DEPTH: u16 = 1 << command::SLOT_BITS;

/// A part of the data of the command in a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataPart {
    /// The command.
    pub slot: u16,
    /// Where the part starts within the command's data.
    pub offset: u32,
    /// Bytes of the part.
    pub bytes: u32,
}

/// What to receive next.
#[derive(PartialEq, Eq, Debug)]
pub enum Want<'a> {
    /// Bytes for the queue itself.
    Bytes(&'a mut [u8]),
    /// Data of a command, for the caller's memory.
    Data(DataPart),
}

/// An event of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueEvent {
    /// The connection is open: commands may be submitted.
    Opened,
    /// A command has ended, and its slot is free. The completion's identifier has no meaning.
    Done {
        /// Its slot.
        slot: u16,
        /// Its completion.
        cqe: Cqe,
    },
}

/// How the other side violated the protocol, or why it ended the connection.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProtocolViolation {
    /// A PDU that a host does not receive, or not in this state.
    #[error("an unexpected PDU of type {0:#04x} came")]
    Kind(u8),
    /// A header's length does not match its type.
    #[error("the header of a PDU of type {kind:#04x} has {hlen} bytes instead of {want}")]
    HeaderLength {
        /// The PDU's type.
        kind: u8,
        /// Its length.
        hlen: u8,
        /// The correct length.
        want: u8,
    },
    /// A PDU's length differs from the sum of its parts.
    #[error("a PDU of type {kind:#04x} claims {plen} bytes, its parts have {want}")]
    Length {
        /// The PDU's type.
        kind: u8,
        /// Its stated length.
        plen: u32,
        /// The sum of its parts.
        want: u64,
    },
    /// Flags that contradict the connection, or each other.
    #[error(
        "a PDU of type {kind:#04x} has flags {flags:#04x}, which contradict each other or the connection"
    )]
    Flags {
        /// The PDU's type.
        kind: u8,
        /// Its flags.
        flags: u8,
    },
    /// Data starts inside the header.
    #[error("data of a PDU starts at byte {pdo}, within its header")]
    DataStart {
        /// Where it starts.
        pdo: u8,
    },
    /// A header does not match its digest.
    #[error("a header's digest is wrong")]
    HeaderDigest,
    /// The connection's parameters are invalid.
    #[error("the answer to the connection request is unusable: {0}")]
    Parameters(String),
    /// No command in flight has this identifier.
    #[error("a PDU of type {kind:#04x} is for command {cid:#06x}, which is not in flight")]
    UnknownCommand {
        /// The PDU's type.
        kind: u8,
        /// The identifier.
        cid: u16,
    },
    /// Data, or a request for data, outside what the command expects.
    #[error(
        "command {cid:#06x} has {have} of {all} bytes, and bytes {offset} to {} came or were asked for",
        u64::from(*offset) + u64::from(*len)
    )]
    Range {
        /// The command.
        cid: u16,
        /// Bytes moved so far.
        have: u32,
        /// Total bytes of the command.
        all: u32,
        /// Where the PDU's bytes start.
        offset: u32,
        /// Their number.
        len: u32,
    },
    /// A PDU came before its predecessor.
    #[error("command {cid:#06x}: {what}")]
    Order {
        /// The command.
        cid: u16,
        /// What is wrong.
        what: &'static str,
    },
    /// The other side ended the connection because of a violation.
    #[error("the target ended the connection: {} (code {reason}, information {info:#x})", reason_text(*reason))]
    Terminated {
        /// Its reason (FES).
        reason: u16,
        /// Its details (FEI).
        info: u32,
    },
}

impl ProtocolViolation {
    /// The reason (FES) for ending the connection; `None` if the other side has ended it.
    #[must_use]
    pub fn reason(&self) -> Option<u16> {
        Some(match self {
            Self::Kind(_)
            | Self::HeaderLength { .. }
            | Self::Length { .. }
            | Self::Flags { .. }
            | Self::DataStart { .. } => 1,
            Self::Order { .. } | Self::UnknownCommand { .. } => 2,
            Self::HeaderDigest => 3,
            Self::Range { .. } => 4,
            Self::Parameters(_) => 6,
            Self::Terminated { .. } => return None,
        })
    }
}

fn reason_text(reason: u16) -> &'static str {
    match reason {
        1 => "a header has an invalid field",
        2 => "PDUs came in a wrong order",
        3 => "a header digest was wrong",
        4 => "data was out of range",
        5 => "a limit was exceeded",
        6 => "a parameter is not supported",
        _ => "for an unknown reason",
    }
}

/// A queue.
pub struct CapsuleQueue {
    is_open: bool,
    asked: Digests,
    digests: Digests,
    /// Alignment of data to the controller.
    unit: usize,
    max_h2c: u32,
    commands: Vec<CommandSlot>,
    free: Vec<u16>,
    receiver: Receiver,
    sender: Sender,
}

impl CapsuleQueue {
    /// A queue of up to `depth` commands in flight (at most [`MAX_DEPTH`]) on a new connection with these digests
    /// requested.
    #[must_use]
    pub fn new(depth: u16, digests: Digests) -> Self {
        let depth = depth.clamp(1, MAX_DEPTH);
        Self {
            is_open: false,
            asked: digests,
            digests: Digests::default(),
            unit: 4,
            max_h2c: 0,
            commands: (0..depth).map(|_| CommandSlot::default()).collect(),
            free: (0..depth).rev().collect(),
            receiver: Receiver::new(),
            sender: Sender::new(),
        }
    }

    /// Whether commands may be submitted.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// The digests of an open connection.
    #[must_use]
    pub fn digests(&self) -> Digests {
        self.digests
    }

    /// Number of commands in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.commands.len() - self.free.len()
    }

    /// Submits a command and returns its slot; `None` if the connection is not open or no slot is free. Fills in
    /// identifier and data pointer.
    pub fn submit(&mut self, sqe: &Sqe, data: Data) -> Option<u16> {
        if !self.is_open {
            return None;
        }
        let slot = self.free.pop()?;
        self.commands.get_mut(usize::from(slot))?.begin(slot, sqe, data);
        self.sender.queue(Item::Command(slot));
        Some(slot)
    }

    /// The identifier on the wire of the command in a slot.
    #[must_use]
    pub fn cid(&self, slot: u16) -> Option<u16> {
        let command = self.commands.get(usize::from(slot))?;
        (command.progress != Progress::Free).then(|| command.cid(slot))
    }

    /// The last PDU to send after this violation. `None` if a PDU is partly sent, or the other side has ended the
    /// connection.
    #[must_use]
    pub fn last_words(&self, violation: &ProtocolViolation) -> Option<Vec<u8>> {
        let reason = violation.reason().filter(|_| !self.sender.is_within_pdu())?;
        Some(pdu::terminate(reason, 0, self.receiver.header()))
    }

    /// The command in flight with this identifier.
    fn find(&self, kind: u8, cid: u16) -> Result<u16, ProtocolViolation> {
        let slot = cid & (MAX_DEPTH - 1);
        match self.commands.get(usize::from(slot)) {
            Some(command) if command.progress == Progress::Sent && command.cid(slot) == cid => Ok(slot),
            _ => Err(ProtocolViolation::UnknownCommand { kind, cid }),
        }
    }

    fn finish(&mut self, slot: u16, cqe: Cqe) -> Option<QueueEvent> {
        let cqe = self.commands.get_mut(usize::from(slot))?.end(cqe);
        self.free.push(slot);
        Some(QueueEvent::Done { slot, cqe })
    }
}

/// PDUs to be sent.
type Waiting = VecDeque<Item>;
