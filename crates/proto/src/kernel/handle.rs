//! The description of a queue that is exported to other people's kernels, as the host writes it to GPU memory.

use crate::GpuAddr;
use crate::queue::{Memory, Rings};

/// A queue pair in shared mode, a namespace, and the memory that its commands may name. Constant while it is exported.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Handle {
    /// The submission queue.
    pub sq: u64,
    /// The completion queue.
    pub cq: u64,
    /// The submission queue's doorbell.
    pub sq_door: u64,
    /// The completion queue's doorbell.
    pub cq_door: u64,
    /// The control block.
    pub control: u64,
    /// Entries of the submission queue.
    pub sq_entries: u32,
    /// Entries of the completion queue.
    pub cq_entries: u32,
    /// The words of [`signal`]: host memory, so that the host can always read and write them.
    pub signals: u64,
    /// The words of [`tally`], zeroed before. In the GPU's memory: every call changes them.
    pub inside: u64,
    /// The bus address of each page of the data memory, eight bytes each.
    pub pages: u64,
    /// The bus address of each page of the prebuilt lists ([`crate::prp::PrebuiltPrpLists`]) for it.
    pub lists: u64,
    /// Bytes of the data memory.
    pub bytes: u64,
    /// Blocks of the namespace.
    pub blocks: u64,
    /// The namespace.
    pub nsid: u32,
    /// Bytes that a block takes in memory.
    pub block_bytes: u32,
    /// The most blocks of one command.
    pub most_blocks: u32,
    /// The controller's page size.
    pub page_shift: u32,
    /// How often a command is retried: after a status that allows it, and after a recovery.
    pub retries: u32,
    /// 1 if blocks may be written, else 0.
    pub writable: u32,
    /// Nanoseconds to wait before a retry, by CRD.
    pub retry_delay: [u64; 4],
    /// Nanoseconds after which an uncompleted command counts as lost.
    pub stall: u64,
    /// Nanoseconds that a command may take with all its tries.
    pub limit: u64,
}

/// Words by which host and threads signal each other, each on a line of its own. They lie where the host can reach them
/// without the GPU's help: a busy GPU must not keep the host from ending its kernels.
pub mod signal {
    /// Not zero: threads inside leave.
    pub const POISON: u32 = 0;
    /// A [`super::Gate`]: whether threads may enter, and the epoch of the queue.
    pub const GATE: u32 = 128;
    /// The epoch in which a thread has lost a command; the host then recovers the controller.
    pub const LOST: u32 = 256;
}

/// Counters of threads, all on one line.
pub mod tally {
    /// The threads that are inside.
    pub const INSIDE: u32 = 0;
    /// Stands for leaving, and is never written.
    pub(crate) const OUT: u32 = 4;
    /// Acknowledged writes. A thread counts its own before it leaves and reports that it is done.
    pub const WRITES: u32 = 8;
}

/// Whether threads may enter, and how often the queue has been created: from 1 on. When that changes, the controller has
/// released all commands of the epoch before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gate(pub u32);

impl Gate {
    /// Open, in this epoch.
    #[must_use]
    pub const fn open(epoch: u32) -> Self {
        Self(epoch << 2)
    }

    /// Closed for a while.
    #[must_use]
    pub const fn closed(epoch: u32) -> Self {
        Self(epoch << 2 | 1)
    }

    /// Closed for good.
    #[must_use]
    pub const fn shut(epoch: u32) -> Self {
        Self(epoch << 2 | 2)
    }

    /// Whether threads may enter.
    #[inline(always)]
    #[must_use]
    pub const fn is_open(self) -> bool {
        self.0 & 3 == 0
    }

    /// Whether it is closed for good.
    #[inline(always)]
    #[must_use]
    pub const fn is_shut(self) -> bool {
        self.0 & 2 != 0
    }

    /// The epoch of the queue; the count wraps at 2³⁰.
    #[inline(always)]
    #[must_use]
    pub const fn epoch(self) -> u32 {
        self.0 >> 2
    }
}

/// Distinguishes a handle of this layout from other memory.
const MARK: u32 = 0x4f48_0001;

impl Handle {
    /// Words of a handle in memory.
    pub const WORDS: usize = 44;
    /// Bytes of a handle in memory.
    pub const BYTES: u32 = Self::WORDS as u32 * 4;

    /// The words as they lie in memory, on a multiple of 16.
    #[must_use]
    pub const fn words(&self) -> [u32; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        words[0] = MARK;
        words[1] = Self::BYTES;
        let longs = self.longs();
        let mut i = 0;
        while i < longs.len() {
            words[2 + 2 * i] = longs[i] as u32;
            words[3 + 2 * i] = (longs[i] >> 32) as u32;
            i += 1;
        }
        let shorts = self.shorts();
        let mut i = 0;
        while i < shorts.len() {
            words[36 + i] = shorts[i];
            i += 1;
        }
        words
    }

    /// The handle of these words; none if they are not those of a queue.
    #[must_use]
    pub fn from_words(words: &[u32; Self::WORDS]) -> Option<Self> {
        let long = |i: usize| u64::from(words[2 + 2 * i]) | u64::from(words[3 + 2 * i]) << 32;
        let handle = Self {
            sq: long(0),
            cq: long(1),
            sq_door: long(2),
            cq_door: long(3),
            control: long(4),
            signals: long(5),
            inside: long(6),
            pages: long(7),
            lists: long(8),
            bytes: long(9),
            blocks: long(10),
            retry_delay: [long(11), long(12), long(13), long(14)],
            stall: long(15),
            limit: long(16),
            sq_entries: words[36],
            cq_entries: words[37],
            nsid: words[38],
            block_bytes: words[39],
            most_blocks: words[40],
            page_shift: words[41],
            retries: words[42],
            writable: words[43],
        };
        (handle.words() == *words).then_some(handle)
    }

    const fn longs(&self) -> [u64; 17] {
        let [none, first, second, third] = self.retry_delay;
        [
            self.sq,
            self.cq,
            self.sq_door,
            self.cq_door,
            self.control,
            self.signals,
            self.inside,
            self.pages,
            self.lists,
            self.bytes,
            self.blocks,
            none,
            first,
            second,
            third,
            self.stall,
            self.limit,
        ]
    }

    const fn shorts(&self) -> [u32; 8] {
        [
            self.sq_entries,
            self.cq_entries,
            self.nsid,
            self.block_bytes,
            self.most_blocks,
            self.page_shift,
            self.retries,
            self.writable,
        ]
    }
}

/// A handle in memory. A thread reads each field when it needs it, because all of them would fill its registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct HandleAt(GpuAddr);

/// Reads a field that is the first or the second long of a line of 16 bytes.
macro_rules! long {
    ($($name:ident = $line:literal, $half:literal;)*) => {
        $(
            #[inline(always)]
            pub(super) fn $name<M: Memory<Addr = GpuAddr>>(&self, mem: &M) -> u64 {
                self.line(mem, $line)[$half]
            }
        )*
    };
}

/// Reads a field that is one of the words of a line.
macro_rules! short {
    ($($name:ident = $line:literal, $word:literal;)*) => {
        $(
            #[inline(always)]
            pub(super) fn $name<M: Memory<Addr = GpuAddr>>(&self, mem: &M) -> u32 {
                mem.load_constant(self.0.plus($line * 16))[$word]
            }
        )*
    };
}

impl HandleAt {
    /// The handle at `at`; none if there is none.
    #[inline(always)]
    pub(super) fn new<M: Memory<Addr = GpuAddr>>(mem: &M, at: GpuAddr) -> Option<Self> {
        if at.0 == 0 || !at.0.is_multiple_of(16) {
            return None;
        }
        let [mark, bytes, ..] = mem.load_constant(at);
        if mark == MARK && bytes == Handle::BYTES { Some(Self(at)) } else { None }
    }

    #[inline(always)]
    fn line<M: Memory<Addr = GpuAddr>>(&self, mem: &M, line: u64) -> [u64; 2] {
        let [a, b, c, d] = mem.load_constant(self.0.plus(line * 16));
        [a as u64 | (b as u64) << 32, c as u64 | (d as u64) << 32]
    }

    #[inline(always)]
    pub(super) fn rings<M: Memory<Addr = GpuAddr, Door = GpuAddr>>(&self, mem: &M) -> Rings<M> {
        let [cq, sq_door] = self.line(mem, 1);
        Rings {
            sq: GpuAddr(self.line(mem, 0)[1]),
            cq: GpuAddr(cq),
            sq_door: GpuAddr(sq_door),
            cq_door: GpuAddr(self.line(mem, 2)[0]),
            sq_entries: self.sq_entries(mem),
            cq_entries: self.cq_entries(mem),
        }
    }

    #[inline(always)]
    pub(super) fn retry_delay<M: Memory<Addr = GpuAddr>>(&self, mem: &M) -> [u64; 4] {
        let ([none, first], [second, third]) = (self.line(mem, 6), self.line(mem, 7));
        [none, first, second, third]
    }

    long! {
        control = 2, 1;
        signals = 3, 0;
        inside = 3, 1;
        pages = 4, 0;
        lists = 4, 1;
        bytes = 5, 0;
        blocks = 5, 1;
        stall = 8, 0;
        limit = 8, 1;
    }

    short! {
        sq_entries = 9, 0;
        cq_entries = 9, 1;
        nsid = 9, 2;
        block_bytes = 9, 3;
        most_blocks = 10, 0;
        page_shift = 10, 1;
        retries = 10, 2;
        writable = 10, 3;
    }
}
