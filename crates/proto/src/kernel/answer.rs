//! The answers of an exported queue's functions, and their numbers.

use crate::Status;

/// The answer of an exported queue's function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The command was executed: its data is there.
    Done,
    /// The controller ended the command with this status, and retries did not help.
    Failed(Status),
    /// The command has not ended yet.
    Pending,
    /// The command timed out. The controller no longer uses its memory.
    TimedOut,
    /// The command timed out, and the controller may still write its memory until the queue is revoked.
    OutcomeUnknown,
    /// The host stopped the queue for good. The outcome of commands in flight is unknown until the queue is revoked.
    Stopped,
    /// The queue had no room until the command's time was over: it was not submitted.
    Full,
    /// Blocks that the namespace does not have.
    Range,
    /// No blocks at all, or more than one command moves.
    Length,
    /// The data memory ends before the transfer does.
    Buffer,
    /// The data does not begin on a multiple of four bytes.
    Alignment,
    /// The queue was exported for reading only.
    ReadOnly,
    /// This is not a handle, or one of another version.
    NoHandle,
    /// This command was never submitted, or its end was already reported.
    Spent,
    /// The operation is neither a read nor a write.
    NoOperation,
}

impl Answer {
    /// The number: 0 for success, an NVMe status field if positive, else one of ours.
    #[inline(always)]
    #[must_use]
    pub const fn code(self) -> i32 {
        match self {
            Self::Done => 0,
            Self::Failed(status) => status.0 as i32,
            Self::Pending => -1,
            Self::TimedOut => -2,
            Self::OutcomeUnknown => -3,
            Self::Stopped => -4,
            Self::Full => -5,
            Self::Range => -6,
            Self::Length => -7,
            Self::Buffer => -8,
            Self::Alignment => -9,
            Self::ReadOnly => -10,
            Self::NoHandle => -11,
            Self::Spent => -12,
            Self::NoOperation => -13,
        }
    }

    /// The answer with this number, if it is one of these.
    #[must_use]
    pub const fn from_code(code: i32) -> Option<Self> {
        Some(match code {
            0 => Self::Done,
            1..=0x7fff => Self::Failed(Status(code as u16)),
            -1 => Self::Pending,
            -2 => Self::TimedOut,
            -3 => Self::OutcomeUnknown,
            -4 => Self::Stopped,
            -5 => Self::Full,
            -6 => Self::Range,
            -7 => Self::Length,
            -8 => Self::Buffer,
            -9 => Self::Alignment,
            -10 => Self::ReadOnly,
            -11 => Self::NoHandle,
            -12 => Self::Spent,
            -13 => Self::NoOperation,
            _ => return None,
        })
    }
}

impl core::fmt::Display for Answer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Done => "done",
            Self::Failed(status) => return write!(f, "the drive ended it with {status}"),
            Self::Pending => "it has not ended yet",
            Self::TimedOut => "it was not completed in time or by any of its tries, and the drive has let go of it",
            Self::OutcomeUnknown => "it was not completed in time or by any of its tries, and the drive may still write its memory",
            Self::Stopped => "the queue was stopped by the host",
            Self::Full => "the queue had no room for too long",
            Self::Range => "the namespace does not have these blocks",
            Self::Length => "no blocks, or more than one command moves",
            Self::Buffer => "the data memory ends before the transfer does",
            Self::Alignment => "the data does not begin on a multiple of four bytes",
            Self::ReadOnly => "the queue was exported read-only",
            Self::NoHandle => "this is not a handle of a queue, or one of another version",
            Self::Spent => "there is no such command in flight",
            Self::NoOperation => "neither a read nor a write was asked for",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn every_answer_has_a_number_and_words_of_its_own() {
        let all: std::vec::Vec<Answer> = (-20..=0x8000)
            .filter_map(|code| Answer::from_code(code).inspect(|a| assert_eq!(a.code(), code)))
            .collect();
        assert_eq!(all.len(), 0x8000 + 13);
        let words: std::collections::BTreeSet<_> =
            (-13..=1).filter_map(Answer::from_code).map(|a| a.to_string()).collect();
        assert_eq!(words.len(), 15);
    }
}
