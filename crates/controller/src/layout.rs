//! Structures in memory shared by host and controller: descriptors that the host writes, a report that it reads.
//!
//! All consist of little-endian words at fixed offsets, 8-byte aligned.

use onehop_proto::GpuAddr;
use onehop_proto::queue::{Address, Memory};

/// A value that is one or two words in memory.
trait Word: Copy {
    fn put(self, words: &mut [u32], at: usize);
    fn get(word: impl Fn(usize) -> u32, at: usize) -> Self;
}

impl Word for u32 {
    fn put(self, words: &mut [u32], at: usize) {
        if let Some(word) = words.get_mut(at) {
            *word = self;
        }
    }

    #[inline(always)]
    fn get(word: impl Fn(usize) -> u32, at: usize) -> Self {
        word(at)
    }
}

impl Word for u64 {
    fn put(self, words: &mut [u32], at: usize) {
        (self as u32).put(words, at);
        ((self >> 32) as u32).put(words, at + 1);
    }

    #[inline(always)]
    fn get(word: impl Fn(usize) -> u32, at: usize) -> Self {
        u64::from(word(at)) | u64::from(word(at + 1)) << 32
    }
}

impl Word for GpuAddr {
    fn put(self, words: &mut [u32], at: usize) {
        self.0.put(words, at);
    }

    #[inline(always)]
    fn get(word: impl Fn(usize) -> u32, at: usize) -> Self {
        GpuAddr(u64::get(word, at))
    }
}

macro_rules! layout {
    ($(#[$doc:meta])* $name:ident $bytes:literal; $($(#[$fdoc:meta])* $field:ident $at:literal $t:ty;)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[repr(C)]
        pub struct $name {
            $($(#[$fdoc])* pub $field: $t,)*
        }

        const _: () = assert!(size_of::<$name>() == $bytes);
        $(const _: () = assert!(core::mem::offset_of!($name, $field) == $at);)*

        impl $name {
            /// Bytes in memory.
            pub const BYTES: u32 = $bytes;

            /// The words as in memory.
            #[must_use]
            pub fn words(&self) -> [u32; $bytes / 4] {
                let mut words = [0; $bytes / 4];
                $(self.$field.put(&mut words, $at / 4);)*
                words
            }

            /// The value of these words.
            #[must_use]
            pub fn from_words(words: &[u32; $bytes / 4]) -> Self {
                let word = |i: usize| words.get(i).copied().unwrap_or(0);
                Self { $($field: <$t>::get(word, $at / 4),)* }
            }

            /// Reads it.
            #[inline(always)]
            pub fn load<M: Memory>(mem: &M, at: M::Addr) -> Self {
                let word = |i: usize| mem.load(at.plus(4 * i as u32));
                Self { $($field: <$t>::get(word, $at / 4),)* }
            }
        }
    };
}

/// Bits of [`Pair::flags`].
pub mod flag {
    /// The completions of a batch are posted last command first.
    pub const REVERSE: u32 = 1 << 0;
    /// Each command waits for [`Pair::delay`](super::Pair::delay) times 0 to 3 before it is executed.
    pub const DELAY: u32 = 1 << 1;
    /// Null: reports an identifier that occurs twice in a batch.
    pub const CHECK_CIDS: u32 = 1 << 2;
    /// Null: processes a full batch every turn and ignores the doorbells. Measures its own maximum rate.
    pub const FEED: u32 = 1 << 3;
    /// Null: a system fence before the completions of a turn.
    pub const FENCE: u32 = 1 << 4;
}

/// Values of the word at [`Pair::control`].
pub mod control {
    /// Run.
    pub const RUN: u32 = 0;
    /// End.
    pub const STOP: u32 = 1;
    /// Abandon every command, set [`Report::resting`](super::Report::resting), and wait. At the next `RUN` the
    /// descriptor is read again, and the queues are new ones. It has the effect of deleting and creating a queue pair.
    /// Data of reads that were completed before still arrives when due, as it may from a drive; only `STOP` ends that.
    pub const REST: u32 = 2;
}

layout! {
    /// A queue pair, its namespace and its faults.
    Pair 168;
    /// The submission queue.
    sq 0 GpuAddr;
    /// The completion queue, zeroed.
    cq 8 GpuAddr;
    /// The word that is the submission queue's tail doorbell, zero.
    sq_door 16 GpuAddr;
    /// The word that is the completion queue's head doorbell, zero.
    cq_door 24 GpuAddr;
    /// The blocks of the namespace, 16-byte aligned.
    namespace 32 GpuAddr;
    /// How many there are.
    blocks 40 u64;
    /// Bus addresses that are mapped: [`BusMapping`]s in ascending order that do not overlap.
    ranges 48 GpuAddr;
    /// Faults to inject: [`Fault`]s.
    faults 56 GpuAddr;
    /// Room for [`Pair::parked_count`] waiting commands, [`PARKED_BYTES`] each.
    parked 64 GpuAddr;
    /// Room for [`Pair::span_count`] extents of a transfer, [`SPAN_BYTES`] each, 16-byte aligned.
    spans 72 GpuAddr;
    /// The [`Report`], zeroed, with room for [`Violation`]s after it: [`REPORT_BYTES`] in all.
    report 80 GpuAddr;
    /// The word by which the host controls it: see [`control`].
    control 88 GpuAddr;
    /// Nanoseconds after which it ends.
    limit 96 u64;
    /// Nanoseconds; see [`flag::DELAY`].
    delay 104 u64;
    /// Entries of the submission queue, 2 to 65 536.
    sq_entries 112 u32;
    /// Entries of the completion queue, 2 to 65 536.
    cq_entries 116 u32;
    /// The number of the submission queue.
    sqid 120 u32;
    /// The number of the namespace.
    nsid 124 u32;
    /// Power of two of the bytes of a block, 9 to 16.
    lba_shift 128 u32;
    /// Power of two of the bytes of a page, 12 to 27.
    page_shift 132 u32;
    /// Bytes of the longest transfer.
    max_bytes 136 u32;
    /// How many ranges are mapped.
    range_count 140 u32;
    /// How many faults there are, [`MAX_FAULTS`] at most.
    fault_count 144 u32;
    /// How many commands can wait.
    parked_count 148 u32;
    /// How many extents beyond the first [`LOCAL_SPANS`] a transfer can have.
    span_count 152 u32;
    /// See [`flag`].
    flags 156 u32;
    /// Null: maximum number of commands per turn; 0 for no limit.
    batch 160 u32;
    /// Zero.
    reserved 164 u32;
}

layout! {
    /// A range of bus addresses, and the memory behind it.
    BusMapping 24;
    /// The first bus address.
    bus 0 u64;
    /// Bytes.
    bytes 8 u64;
    /// The same memory as the controller addresses it; congruent to `bus` modulo 16.
    target 16 GpuAddr;
}

layout! {
    /// A fault. If several match a command, only the first of the table applies.
    Fault 64;
    /// See [`FaultKind`].
    kind 0 u32;
    /// Strikes the n-th matching command, counted from 1; 0 for any.
    n 4 u32;
    /// Strikes every n-th matching command; 0 for any.
    every 8 u32;
    /// Maximum number of strikes; 0 for no limit.
    count 12 u32;
    /// Matches only commands that touch blocks from this one …
    first 16 u64;
    /// … to this one.
    last 24 u64;
    /// Nanoseconds, if the kind has a time.
    delay 32 u64;
    /// A status, or a number of entries, depending on the kind.
    value 40 u32;
    /// Matches only opcodes whose bit is set; 0 for all.
    opcodes 44 u32;
    /// The number of commands matched so far: the controller continues from it, and updates it now and then …
    seen 48 u32;
    /// … and the number struck, likewise.
    fired 52 u32;
    /// Zero.
    reserved 56 u64;
}

impl Fault {
    /// A fault that strikes every command.
    #[must_use]
    pub fn new(kind: FaultKind) -> Self {
        Self { kind: kind as u32, last: u64::MAX, ..Self::default() }
    }
}

/// The kinds of [`Fault`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum FaultKind {
    /// The command is executed and completed only after `delay`.
    Late = 1,
    /// The completion is held until `value` others were posted, `delay` at most.
    Reorder = 2,
    /// The command is neither executed nor completed.
    Lost = 3,
    /// A read's completion is posted before its data, which follows after `delay`.
    Torn = 4,
    /// The command fails with status `value`.
    Fail = 5,
    /// The completion carries an identifier that is not outstanding; the command itself never completes.
    WrongCid = 6,
    /// The same completion is posted twice.
    Dup = 7,
    /// The completion is written with the old phase, and corrected after `delay`.
    StalePhase = 8,
    /// SQHD in the completion is `value` entries behind, never going back.
    SqhdLag = 9,
    /// The controller stops.
    Dead = 10,
    /// As [`FaultKind::WrongCid`], with the identifier of another command that is outstanding, if there is one.
    OtherCid = 11,
    /// A read returns the first blocks of the namespace instead of its own, and fails with status `value`.
    Garbled = 12,
}

impl FaultKind {
    /// Every kind.
    pub const ALL: [Self; 12] = [
        Self::Late,
        Self::Reorder,
        Self::Lost,
        Self::Torn,
        Self::Fail,
        Self::WrongCid,
        Self::Dup,
        Self::StalePhase,
        Self::SqhdLag,
        Self::Dead,
        Self::OtherCid,
        Self::Garbled,
    ];

    pub(crate) const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::Late,
            2 => Self::Reorder,
            3 => Self::Lost,
            4 => Self::Torn,
            5 => Self::Fail,
            6 => Self::WrongCid,
            7 => Self::Dup,
            8 => Self::StalePhase,
            9 => Self::SqhdLag,
            10 => Self::Dead,
            11 => Self::OtherCid,
            12 => Self::Garbled,
            _ => return None,
        })
    }
}

layout! {
    /// The controller's progress. Counters are updated now and then while it runs, and at the end.
    Report 128;
    /// The [`Exit`](crate::Exit); zero while it runs.
    exit 0 u32;
    /// Non-zero while it rests.
    resting 4 u32;
    /// Commands fetched.
    commands 8 u64;
    /// Completions posted.
    completions 16 u64;
    /// Completions with a status other than success.
    errors 24 u64;
    /// Bytes read from the namespace for the host.
    bytes_read 32 u64;
    /// Bytes written to it.
    bytes_written 40 u64;
    /// Loop iterations.
    turns 48 u64;
    /// Turns without anything to fetch.
    idle 56 u64;
    /// Nanoseconds since the start.
    elapsed 64 u64;
    /// Violations, including those that found no room.
    violations 72 u32;
    /// Commands that a fault struck.
    fired 76 u32;
    /// Commands that should have waited, but found no room.
    crowded 80 u32;
    /// Null: identifiers that could not be checked, because another shared their slot.
    unchecked 84 u32;
    /// The next submission queue entry to be fetched.
    sq_head 88 u32;
    /// The next completion queue entry to be posted.
    cq_tail 92 u32;
    /// Commands, and data of completed reads, that wait for their time. While it rests, only data.
    waiting 96 u32;
    /// Zero once a new queue pair has been set up.
    unread 100 u32;
    /// Zero.
    reserved3 104 u64;
    /// Zero.
    reserved1 112 u64;
    /// Zero.
    reserved2 120 u64;
}

layout! {
    /// A violation of a rule.
    Violation 16;
    /// The [`Rule`](crate::Rule)'s number.
    rule 0 u32;
    /// The command's identifier; all ones where there is none.
    cid 4 u32;
    /// As the rule defines it.
    detail 8 u64;
}

layout! {
    /// An experiment of [`litmus`](crate::litmus), for one of its sides. Both sides' descriptions differ only in
    /// `tally`.
    Litmus 88;
    /// The messages: `slots` times `words` words, zeroed, 64-byte aligned. Entries have 16 words.
    payload 0 GpuAddr;
    /// The doorbell; or the completions, `slots` times 16 bytes, zeroed.
    flags 8 GpuAddr;
    /// The word in which the reader reports how many messages it has checked; zero.
    taken 16 GpuAddr;
    /// This side's [`Tally`], zeroed.
    tally 24 GpuAddr;
    /// A word: see [`control`].
    control 32 GpuAddr;
    /// Nanoseconds after which it ends.
    limit 40 u64;
    /// Slots for messages.
    slots 48 u32;
    /// Words of a message, a multiple of 4.
    words 52 u32;
    /// Messages sent at once, at most as many as there are lanes.
    batch 56 u32;
    /// Messages in all.
    messages 60 u32;
    /// The writer's fence: see [`strength`](crate::litmus::strength).
    fence 64 u32;
    /// Non-zero: the reader polls without acquire.
    relaxed 68 u32;
    /// Non-zero on the side that checks messages: it keeps the tally.
    checks 72 u32;
    /// Zero.
    reserved0 76 u32;
    /// Zero.
    reserved1 80 u64;
}

layout! {
    /// Memory to be compared with the blocks that should have been read into it.
    DataCheck 40;
    /// Where item 0 of the job was read to; 16-byte aligned.
    data 0 GpuAddr;
    /// Two counters of eight bytes, zero: words that differ, items checked.
    result 8 GpuAddr;
    /// The first item.
    first 16 u32;
    /// How many.
    count 20 u32;
    /// Blocks of the namespace, a power of two.
    blocks 24 u32;
    /// Words of a block, a multiple of 4.
    block_words 28 u32;
    /// See [`content`](crate::content).
    seed 32 u32;
    /// Zero.
    reserved 36 u32;
}

layout! {
    /// What one side of an experiment saw.
    Tally 32;
    /// The [`Exit`](crate::Exit); zero while it runs.
    exit 0 u32;
    /// Complete messages.
    good 4 u32;
    /// Slots that still held the previous message.
    stale 8 u32;
    /// Mixtures of the two.
    torn 12 u32;
    /// Messages with a word of neither.
    alien 16 u32;
    /// Messages sent or checked.
    messages 20 u32;
    /// Nanoseconds.
    elapsed 24 u64;
}

impl Violation {
    /// The rule.
    #[must_use]
    pub const fn rule(&self) -> Option<crate::Rule> {
        crate::Rule::from_code(self.rule)
    }
}

/// How many violations are kept.
pub const KEPT: u32 = 32;
/// Bytes of a report and the violations after it.
pub const REPORT_BYTES: u32 = Report::BYTES + KEPT * Violation::BYTES;
/// Faults of a pair.
pub const MAX_FAULTS: u32 = 8;
/// Bytes of a waiting command.
pub const PARKED_BYTES: u32 = 96;
/// Offset of the word that says what the record waits for; 0 if it is free.
pub const PARKED_KIND: u32 = 64;
/// Bytes of an extent of a transfer.
pub const SPAN_BYTES: u32 = 16;
/// Extents of a transfer that need no room in memory.
pub const LOCAL_SPANS: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_values_agree() {
        let mut words = [0; 42];
        for (i, word) in words.iter_mut().enumerate() {
            *word = 0x0101_0101 * (i as u32 + 1);
        }
        assert_eq!(Pair::from_words(&words).words(), words);
        let pair = Pair { cq: GpuAddr(0x1_0000_0002), flags: 7, ..Pair::default() };
        assert_eq!((pair.words()[2], pair.words()[3], pair.words()[39]), (2, 1, 7));
        for kind in FaultKind::ALL {
            assert_eq!(FaultKind::from_code(Fault::new(kind).kind), Some(kind));
        }
    }
}
