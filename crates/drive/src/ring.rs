//! The memory operations of a CPU that drives a queue pair, and the memory of pairs and lists.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Instant;

use onehop_os::{ControllerBackend, HostMem, Mapped, Mapper, Registers, Words};
use onehop_proto::kernel::{has_unseen, scratch_init};
use onehop_proto::queue::{Address, Memory, Rings, Shared};
use onehop_proto::{BusAddr, Cqe, Sqe, regs};

use crate::{Error, Result};

/// A word of one of a pair's two rings.
#[derive(Clone, Copy)]
pub(crate) struct RingWord {
    in_cq: bool,
    word: u32,
}

impl Address for RingWord {
    #[inline(always)]
    fn plus(self, bytes: u32) -> Self {
        Self { word: self.word + bytes / 4, ..self }
    }
}

/// A pair's rings in host memory, and its doorbells.
pub(crate) struct PairMemory {
    sq: Words,
    cq: Words,
    regs: Arc<dyn Registers>,
    start: Instant,
}

impl PairMemory {
    #[inline(always)]
    fn ring_of(&self, at: RingWord) -> &Words {
        if at.in_cq { &self.cq } else { &self.sq }
    }

    #[inline(always)]
    fn word(&self, at: RingWord) -> Option<&AtomicU32> {
        self.ring_of(at).get(at.word)
    }

    /// A doorbell value of a queue without completions.
    pub(crate) fn idle(&self, doorbell: u32) {
        self.regs.idle(doorbell);
    }

    /// Initialises the control memory of a GPU's queue for a new pair, from `bytes`, its content after the last life. A
    /// queue in shared mode has the sizes of its rings.
    pub(crate) fn initialise(
        regs: Arc<dyn Registers>,
        shared: Option<(u32, u32)>,
        bytes: &mut [u8],
    ) -> Result<()> {
        let control = HostMem::anonymous(bytes.len())?;
        control.write(0, bytes)?;
        let words = || Words::new(control.clone());
        let memory = Self { sq: words()?, cq: words()?, regs, start: Instant::now() };
        let at = RingWord { in_cq: false, word: 0 };
        // Only the control memory is written.
        match shared {
            None => scratch_init(&memory, at),
            Some((sq_entries, cq_entries)) => {
                let rings = Rings { sq: at, cq: at, sq_door: 0, cq_door: 0, sq_entries, cq_entries };
                if let Some(queue) = Shared::new(rings, at) {
                    queue.initialise(&memory);
                }
            }
        }
        Ok(control.read(0, bytes)?)
    }

    /// Whether a GPU's queue holds completions that no thread has taken, by its control memory and its completion ring.
    pub(crate) fn has_unseen(
        regs: Arc<dyn Registers>,
        is_shared: bool,
        (sq_entries, cq_entries): (u32, u32),
        control: &[u8],
        ring: &[u8],
    ) -> Result<bool> {
        let words = |bytes: &[u8]| {
            let mem = HostMem::anonymous(bytes.len())?;
            mem.write(0, bytes)?;
            Words::new(mem)
        };
        let memory = Self { sq: words(control)?, cq: words(ring)?, regs, start: Instant::now() };
        let (control, cq) = (RingWord { in_cq: false, word: 0 }, RingWord { in_cq: true, word: 0 });
        // Only control memory and completions are read.
        let rings = Rings { sq: control, cq, sq_door: 0, cq_door: 0, sq_entries, cq_entries };
        Ok(has_unseen(&memory, &rings, control, is_shared))
    }
}

/// Ring offsets come from sizes that the rings were allocated for; a wrong one is a defect of this crate.
macro_rules! on_word {
    ($self:ident, $at:ident, $f:expr, $else:expr) => {
        match $self.word($at) {
            Some(word) => $f(word),
            None => {
                debug_assert!(false, "an offset outside its ring");
                $else
            }
        }
    };
}

impl Memory for PairMemory {
    type Addr = RingWord;
    type Door = u32;

    #[inline(always)]
    fn load(&self, at: RingWord) -> u32 {
        on_word!(self, at, |w: &AtomicU32| w.load(Ordering::Relaxed), u32::MAX)
    }
    #[inline(always)]
    fn load_acquire(&self, at: RingWord) -> u32 {
        on_word!(self, at, |w: &AtomicU32| w.load(Ordering::Acquire), u32::MAX)
    }
    #[inline(always)]
    fn store(&self, at: RingWord, value: u32) {
        on_word!(self, at, |w: &AtomicU32| w.store(value, Ordering::Relaxed), ());
    }
    #[inline(always)]
    fn store_release(&self, at: RingWord, value: u32) {
        on_word!(self, at, |w: &AtomicU32| w.store(value, Ordering::Release), ());
    }
    #[inline(always)]
    fn store_entry(&self, at: RingWord, entry: &[u32; 16]) {
        let is_stored = self.sq.store_entry(at.word, entry);
        debug_assert!(is_stored && !at.in_cq, "an entry outside its ring");
    }
    #[inline(always)]
    fn load_completion(&self, at: RingWord, phase: bool) -> Option<[u32; 4]> {
        let words = self.cq.load_four_acquire(at.word);
        debug_assert!(words.is_some() && at.in_cq, "an entry outside its ring");
        words.filter(|words| words[3] >> 16 & 1 == u32::from(phase))
    }
    fn fetch_add(&self, at: RingWord, value: u32) -> u32 {
        on_word!(self, at, |w: &AtomicU32| w.fetch_add(value, Ordering::AcqRel), u32::MAX)
    }
    fn fetch_or(&self, at: RingWord, bits: u32) -> u32 {
        on_word!(self, at, |w: &AtomicU32| w.fetch_or(bits, Ordering::AcqRel), u32::MAX)
    }
    fn fetch_and(&self, at: RingWord, mask: u32) -> u32 {
        on_word!(self, at, |w: &AtomicU32| w.fetch_and(mask, Ordering::AcqRel), u32::MAX)
    }
    fn compare_exchange(&self, at: RingWord, old: u32, new: u32) -> u32 {
        on_word!(
            self,
            at,
            |w: &AtomicU32| w
                .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
                .unwrap_or_else(|seen| seen),
            u32::MAX
        )
    }
    #[inline(always)]
    fn fence(&self) {
        // The rings are in ordinary memory, and a doorbell store follows. A release costs nothing on x86; other CPUs
        // need a barrier for it.
        fence(Ordering::Release);
    }
    #[inline(always)]
    fn ring(&self, door: u32, value: u32) {
        self.regs.write32(door, value);
    }
    #[inline(always)]
    fn pause(&self) {
        std::hint::spin_loop();
    }
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

/// Host memory with its bus addresses.
pub(crate) struct Dma {
    // The mapping is dropped before the memory.
    pub(crate) map: Mapped,
    pub(crate) mem: HostMem,
}

impl Dma {
    /// Zeroed memory that starts on a page of `1 << page_shift` bytes, and is one run on the bus if asked for.
    pub(crate) fn alloc(mapper: &dyn Mapper, bytes: usize, page_shift: u32) -> Result<Self> {
        let page = 1usize << page_shift;
        // The mapper aligns to 4 KiB only. For a larger page, allocate more and start at the first aligned byte.
        let spare = if page_shift > 12 { page } else { 0 };
        let mem = mapper.alloc(bytes.next_multiple_of(page) + spare)?;
        let map = mapper.map(&mem)?;
        let first = map.at(0).map_or(0, |run| run.addr.0);
        let skip = (first.next_multiple_of(page as u64) - first) as usize;
        if skip == 0 {
            return Ok(Self { mem, map });
        }
        let part = mem.slice(skip..skip + bytes.next_multiple_of(page))?;
        let map = mapper.map(&part)?;
        Ok(Self { mem: part, map })
    }

    pub(crate) fn bus(&self) -> Result<BusAddr> {
        Ok(self.map.contiguous()?)
    }
}

/// One ring of a pair, as the command that creates it describes it.
#[derive(Clone, Copy)]
pub(crate) struct PairHalf {
    pub(crate) bus: BusAddr,
    pub(crate) entries: u32,
}

/// A CPU-driven pair: its memory and the offsets of its rings.
pub(crate) struct CpuPair {
    pub(crate) memory: PairMemory,
    pub(crate) rings: Rings<PairMemory>,
    pub(crate) sq: PairHalf,
    pub(crate) cq: PairHalf,
    /// The rings' memory; `None` once the pair was given up.
    pub(crate) keep: Option<(Dma, Dma)>,
}

/// Refuses a queue whose doorbells are not in the mapped part of the BAR.
pub(crate) fn check_doorbells(port: &ControllerBackend, qid: u16, dstrd: u8) -> Result<()> {
    let last_door = regs::doorbell(qid, true, dstrd);
    if last_door.checked_add(4).is_none_or(|end| end > port.regs.size()) {
        let why = format!("its BAR of {} bytes ends before the doorbells of queue {qid}", port.regs.size());
        return Err(Error::Unsupported { drive: port.name.clone(), why });
    }
    Ok(())
}

impl CpuPair {
    /// A pair of up to `entries` entries. If bus-contiguous memory comes in single pages, a ring must fit into one.
    pub(crate) fn alloc(
        port: &ControllerBackend,
        qid: u16,
        entries: u32,
        page_shift: u32,
        dstrd: u8,
    ) -> Result<Self> {
        check_doorbells(port, qid, dstrd)?;
        let one_page = (1u32 << page_shift) / Sqe::BYTES as u32;
        let sq = Dma::alloc(&*port.mapper, entries as usize * Sqe::BYTES, page_shift)?;
        let cq = Dma::alloc(&*port.mapper, entries as usize * Cqe::BYTES, page_shift)?;
        if entries > one_page && (sq.bus().is_err() || cq.bus().is_err()) {
            return Self::alloc(port, qid, one_page, page_shift, dstrd);
        }
        let (sq_entries, cq_entries) = (entries, entries);
        let rings = Rings {
            sq: RingWord { in_cq: false, word: 0 },
            cq: RingWord { in_cq: true, word: 0 },
            sq_door: regs::doorbell(qid, false, dstrd),
            cq_door: regs::doorbell(qid, true, dstrd),
            sq_entries,
            cq_entries,
        };
        let memory = PairMemory {
            sq: Words::new(sq.mem.clone())?,
            cq: Words::new(cq.mem.clone())?,
            regs: port.regs.clone(),
            start: Instant::now(),
        };
        Ok(Self {
            memory,
            rings,
            sq: PairHalf { bus: sq.bus()?, entries: sq_entries },
            cq: PairHalf { bus: cq.bus()?, entries: cq_entries },
            keep: Some((sq, cq)),
        })
    }

    /// Zeroes the rings for a new pair: no completion of an earlier life is left.
    pub(crate) fn zero(&self) -> Result<()> {
        for ring in self.keep.iter().flat_map(|(sq, cq)| [sq, cq]) {
            ring.mem.fill(0, ring.mem.len(), 0)?;
        }
        Ok(())
    }
}
