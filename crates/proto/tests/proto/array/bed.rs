//! Memory of this machine, and what an array lies on.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use onehop_proto::GpuAddr;
use onehop_proto::array::{ArrayHandle, Backing, Flushed, PageCache, counter, directory_words, flush_slots};
use onehop_proto::kernel::{Answer, Command, DeviceOp, Lanes};
use onehop_proto::queue::Memory;

pub const LANES: u32 = 8;
pub const PAGE: u64 = 1024;
/// Half a page more than whole pages.
const BLOCKS: u64 = 255;
const BLOCK_SHIFT: u32 = 9;
pub const LIMIT: u64 = 60_000_000_000;

const HANDLE: u64 = 0x1000;
const COUNTERS: u64 = 0x1100;
pub const ITEMS: u64 = 0x2000;
pub const ANSWERS: u64 = 0x8000;
pub const OUT: u64 = 0x1_0000;
pub const MISSES: u64 = 0x1c_0000;
const DIRECTORY: u64 = 0x20_0000;
const DATA: u64 = 0x40_0000;
const WORDS: usize = 0x100_0000 / 4;

/// The word of this number in the array, before any write.
pub fn word(index: u64) -> u32 {
    (index as u32).wrapping_mul(0x9e37_79b9) ^ 0x1234
}

/// Pseudo-random numbers.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// The behaviour of the array.
#[derive(Clone, Copy)]
pub struct Disk {
    /// Every how many commands one fails, and how.
    pub fails: Option<(u32, Answer)>,
    /// Writes of this block fail, and how.
    pub unwritable: Option<(u64, Answer)>,
    /// A command ends after up to this many polls, sooner or later than those before it.
    pub late: u32,
    /// The array's limit.
    pub patience: u64,
    /// Nanoseconds of a command, by a clock that only commands advance; if 0, time is this machine's.
    pub ticks: u64,
}

impl Default for Disk {
    fn default() -> Self {
        Self { fails: None, unwritable: None, late: 0, patience: LIMIT, ticks: 0 }
    }
}

pub struct Bed {
    words: Vec<AtomicU32>,
    media: Vec<AtomicU32>,
    /// Blocks with a command under way: no two are for one block.
    busy: Mutex<Vec<u64>>,
    disk: Disk,
    calm: AtomicBool,
    commands: AtomicU32,
    life: AtomicU32,
    start: Instant,
    /// What happens between two steps of a thread, and after how many acquiring loads and looks at the life.
    between: Mutex<Option<(u32, Meanwhile)>>,
}

/// What other threads do in the middle of an operation.
pub type Meanwhile = fn(&Bed);

impl Bed {
    /// An array with a cache of this many pages.
    pub fn new(slots: u32, disk: Disk) -> Self {
        let bed = Self {
            words: (0..WORDS).map(|_| AtomicU32::new(0)).collect(),
            media: (0..BLOCKS << (BLOCK_SHIFT - 2)).map(|i| AtomicU32::new(word(i))).collect(),
            busy: Mutex::default(),
            disk,
            calm: AtomicBool::new(false),
            commands: AtomicU32::new(0),
            life: AtomicU32::new(0),
            start: Instant::now(),
            between: Mutex::default(),
        };
        let handle = ArrayHandle {
            directory: DIRECTORY,
            data: DATA,
            blocks: BLOCKS,
            limit: disk.patience,
            counters: COUNTERS,
            pages: slots,
            page_shift: PAGE.trailing_zeros(),
            block_shift: BLOCK_SHIFT,
            writable: 1,
            ..ArrayHandle::default()
        };
        bed.put(HANDLE, handle.words());
        bed.put(DIRECTORY, directory_words(slots));
        bed
    }

    pub fn array<'a>(&self, mem: &Mem<'a>) -> PageCache<Mem<'a>, Toy<'a>> {
        PageCache::open(mem, GpuAddr(HANDLE)).unwrap()
    }

    pub fn bytes(&self) -> u64 {
        BLOCKS << BLOCK_SHIFT
    }

    pub fn media(&self) -> Vec<u32> {
        self.media.iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }

    pub fn put(&self, at: u64, words: impl IntoIterator<Item = u32>) {
        for (to, word) in self.words[at as usize / 4..].iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
    }

    pub fn get(&self, at: u64, count: usize) -> Vec<u32> {
        self.words[at as usize / 4..][..count].iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// Pages that were read.
    pub fn reads(&self) -> u32 {
        self.get(COUNTERS + u64::from(counter::READS), 1)[0]
    }

    pub fn commands(&self) -> u32 {
        self.commands.load(Ordering::Relaxed)
    }

    /// Whether no command fails.
    pub fn calm(&self, calm: bool) {
        self.calm.store(calm, Ordering::Relaxed);
    }

    pub fn next_life(&self) {
        self.life.fetch_add(1, Ordering::Relaxed);
    }

    /// Before the next acquiring load or look at the life but `steps`, `f` runs.
    pub fn meanwhile(&self, steps: u32, f: Meanwhile) {
        *self.between.lock().unwrap() = Some((steps, f));
    }

    pub fn is_over(&self) -> bool {
        self.between.lock().unwrap().is_none()
    }

    fn step(&self) {
        let mut between = self.between.lock().unwrap();
        match &mut *between {
            Some((0, f)) => {
                let f = *f;
                *between = None;
                drop(between);
                f(self);
            }
            Some((steps, _)) => *steps -= 1,
            None => {}
        }
    }

    /// A thread's view.
    pub fn mem(&self) -> Mem<'_> {
        Mem { bed: self, local: Vec::new() }
    }

    /// Runs threads to their end.
    pub fn run(&self, threads: u32, kernel: impl Fn(&Mem, u32) + Sync) {
        std::thread::scope(|scope| {
            for index in 0..threads {
                let kernel = &kernel;
                scope.spawn(move || kernel(&self.mem(), index));
            }
        });
    }

    pub fn flush(&self) -> Flushed {
        let mem = self.mem();
        flush_slots(&mem, &self.array(&mem), (0, 1), u64::MAX)
    }
}

/// A thread's view, or that of a warp whose lanes take turns.
pub struct Mem<'a> {
    bed: &'a Bed,
    local: Vec<Cell<u32>>,
}

impl Mem<'_> {
    pub fn warp(&self, words: u32) -> Self {
        Self { bed: self.bed, local: (0..words).map(|_| Cell::new(0xdead)).collect() }
    }

    fn word(&self, at: GpuAddr) -> &AtomicU32 {
        assert!(at.0.is_multiple_of(4), "{at}");
        &self.bed.words[at.0 as usize / 4]
    }
}

impl Memory for Mem<'_> {
    type Addr = GpuAddr;
    type Door = GpuAddr;

    fn load(&self, at: GpuAddr) -> u32 {
        self.word(at).load(Ordering::Relaxed)
    }
    fn load_acquire(&self, at: GpuAddr) -> u32 {
        self.bed.step();
        self.word(at).load(Ordering::Acquire)
    }
    fn store(&self, at: GpuAddr, value: u32) {
        self.word(at).store(value, Ordering::Relaxed);
    }
    fn store_release(&self, at: GpuAddr, value: u32) {
        self.word(at).store(value, Ordering::Release);
    }
    fn store_entry(&self, _: GpuAddr, _: &[u32; 16]) {}
    fn fetch_add(&self, at: GpuAddr, value: u32) -> u32 {
        self.word(at).fetch_add(value, Ordering::AcqRel)
    }
    fn fetch_or(&self, at: GpuAddr, bits: u32) -> u32 {
        self.word(at).fetch_or(bits, Ordering::AcqRel)
    }
    fn fetch_and(&self, at: GpuAddr, mask: u32) -> u32 {
        self.word(at).fetch_and(mask, Ordering::AcqRel)
    }
    fn compare_exchange(&self, at: GpuAddr, old: u32, new: u32) -> u32 {
        let done = self.word(at).compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        done.unwrap_or_else(|seen| seen)
    }
    fn fence(&self) {}
    fn ring(&self, _: GpuAddr, _: u32) {}
    fn pause(&self) {
        std::thread::yield_now();
    }
    fn now(&self) -> u64 {
        match self.bed.disk.ticks {
            0 => self.bed.start.elapsed().as_nanos() as u64,
            ticks => u64::from(self.bed.commands()) * ticks,
        }
    }
}

impl Lanes for Mem<'_> {
    fn lanes(&self) -> u32 {
        LANES
    }
    fn each(&self, f: impl FnMut(u32)) {
        (0..LANES).for_each(f);
    }
    fn once(&self, mut f: impl FnMut()) {
        f();
    }
    fn local(&self, index: u32) -> u32 {
        self.local[index as usize].get()
    }
    fn set_local(&self, index: u32, value: u32) {
        self.local[index as usize].set(value);
    }
    fn add_local(&self, index: u32, value: u32) -> u32 {
        self.local[index as usize].replace(self.local(index).wrapping_add(value))
    }
}

/// The array's backing. Its commands are kept as words: block, offset and blocks, whether it writes, how many polls
/// remain, and how it ends.
pub struct Toy<'a>(&'a Bed);

impl<'a> Backing<Mem<'a>> for Toy<'a> {
    fn open(mem: &Mem<'a>, _: GpuAddr) -> Option<Self> {
        Some(Self(mem.bed))
    }

    fn begin(
        &self,
        _: &Mem<'a>,
        op: DeviceOp,
        lba: u64,
        blocks: u32,
        offset: u64,
        command: &mut Command,
    ) -> Answer {
        let bed = self.0;
        let number = bed.commands.fetch_add(1, Ordering::Relaxed) + 1;
        let unwritable = bed.disk.unwritable.filter(|(at, _)| op == DeviceOp::Write && *at == lba);
        let answer = match bed.disk.fails {
            _ if unwritable.is_some() => unwritable.map_or(Answer::Done, |(_, answer)| answer),
            Some((every, answer)) if number.is_multiple_of(every) && !bed.calm.load(Ordering::Relaxed) => {
                answer
            }
            _ => Answer::Done,
        };
        let mut busy = bed.busy.lock().unwrap();
        assert!(!busy.contains(&lba), "two commands for block {lba} at one time");
        busy.push(lba);
        let late = number.wrapping_mul(7) % (bed.disk.late + 1);
        let mut words = [0; Command::WORDS];
        words[0] = lba as u32;
        words[2] = offset as u32;
        words[8] = blocks;
        words[9] = op as u32;
        words[12] = bed.life.load(Ordering::Relaxed);
        words[13] = late;
        words[14] = answer.code() as u32;
        *command = Command::from_words(words);
        Answer::Pending
    }

    fn test(&self, mem: &Mem<'a>, command: &mut Command) -> Answer {
        let mut words = command.words();
        let (lba, offset, blocks) = (words[0], words[2], words[8]);
        if words[13] > 0 {
            words[13] -= 1;
            *command = Command::from_words(words);
            return Answer::Pending;
        }
        let answer = Answer::from_code(words[14] as i32).unwrap();
        let count = u64::from(blocks) << (BLOCK_SHIFT - 2);
        // One that fails has moved a part.
        let count = if answer == Answer::Done { count } else { count / 2 };
        for i in 0..count {
            let at = GpuAddr(DATA + u64::from(offset) + i * 4);
            let medium = &self.0.media[((u64::from(lba) << (BLOCK_SHIFT - 2)) + i) as usize];
            if words[9] == DeviceOp::Read as u32 {
                mem.store(at, medium.load(Ordering::Relaxed));
            } else {
                medium.store(mem.load(at), Ordering::Relaxed);
            }
        }
        self.0.busy.lock().unwrap().retain(|busy| *busy != u64::from(lba));
        answer
    }

    fn life(&self, _: &Mem<'a>) -> u32 {
        self.0.step();
        self.0.life.load(Ordering::Relaxed)
    }

    fn is_stopped(&self, _: &Mem<'a>) -> bool {
        false
    }
}
