//! A command in flight: how much of it was sent, and of its data moved.

use onehop_proto::fabrics::{fctype_of, with_capsule_data, with_transport_data};
use onehop_proto::{Cqe, Sqe, Status};

use crate::pdu::made_completion;

/// Bits of an identifier for the slot. The others count the slot's uses, so that a late answer is not mistaken for its
/// successor's.
pub(super) const SLOT_BITS: u32 = 10;
/// Uses of a slot before its count restarts. One less than the bits allow: identifier FFFFh is never used.
const USES: u8 = (1 << (16 - SLOT_BITS)) - 1;

/// The data of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Data {
    /// No data.
    #[default]
    None,
    /// From the controller.
    In(u32),
    /// To the controller, on request.
    Out(u32),
    /// To the controller, in the command's capsule.
    InCapsule(u32),
}

/// A command's progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Progress {
    #[default]
    Free,
    /// Its capsule was not sent completely: it cannot have an answer yet.
    Submitted,
    Sent,
}

/// A slot, and the command in it.
#[derive(Default)]
pub(super) struct CommandSlot {
    pub(super) progress: Progress,
    pub(super) sqe: Sqe,
    pub(super) data: Data,
    /// Bytes received, or sent.
    pub(super) moved: u32,
    /// No more will be received.
    pub(super) is_last: bool,
    /// A Ready to Transfer is not yet satisfied.
    pub(super) is_sending: bool,
    /// Data had a wrong digest.
    pub(super) is_damaged: bool,
    uses: u8,
}

impl CommandSlot {
    pub(super) fn cid(&self, slot: u16) -> u16 {
        slot | u16::from(self.uses) << SLOT_BITS
    }

    pub(super) fn begin(&mut self, slot: u16, sqe: &Sqe, data: Data) {
        let sqe = sqe.with_cid(self.cid(slot));
        self.sqe = match data {
            // A Fabrics command without data has no data pointer.
            Data::None if fctype_of(&sqe).is_some() => sqe,
            Data::None => with_transport_data(sqe, 0),
            Data::In(len) | Data::Out(len) => with_transport_data(sqe, len),
            Data::InCapsule(len) => with_capsule_data(sqe, len),
        };
        self.progress = Progress::Submitted;
        self.data = data;
        self.moved = 0;
        self.is_last = false;
        self.is_sending = false;
        self.is_damaged = false;
    }

    /// Total bytes to move.
    pub(super) fn all(&self) -> u32 {
        match self.data {
            Data::None => 0,
            Data::In(len) | Data::Out(len) | Data::InCapsule(len) => len,
        }
    }

    /// Ends the command. A success without all data, or with damaged data, becomes a failure.
    pub(super) fn end(&mut self, cqe: Cqe) -> Cqe {
        self.progress = Progress::Free;
        self.uses = (self.uses + 1) % USES;
        if cqe.status().is_ok() && (self.is_damaged || self.moved != self.all()) {
            return made_completion(cqe.cid(), Status::DATA_TRANSFER_ERROR);
        }
        cqe
    }
}
