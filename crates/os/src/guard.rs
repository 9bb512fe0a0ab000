//! Guards mappings of files that others may truncate, and of devices that may be removed.
//!
//! Accessing a mapped page past the end of its file raises SIGBUS, so truncating a file would end processes that map
//! it. A [`Guard`] replaces the rest of the mapping with zeroed memory instead, and reports whether that has happened.
//! The registers of a device that is unbound or unplugged are lost in the same way; they are replaced with ones, as
//! reads return on a bus without an answer.

use std::ffi::c_void;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};

use crate::mem::is_of_parent;
use crate::{Error, HostMem, Result};

const MOST: usize = Guard::MOST;
const PAGE: usize = 4096;

/// A guarded range, and how it is guarded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct GuardedRange {
    start: usize,
    end: usize,
    /// Whether ones replace it instead of zeroes.
    ones: bool,
    /// The process that has the range, if its children do not; otherwise 0.
    process: u32,
}

/// A slot for a guarded range. No range starts at 0 or 1: those mean free, and reserved.
struct GuardSlot {
    /// Odd while the range is being changed: fields read under different versions belong to different uses.
    version: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    ones: AtomicBool,
    process: AtomicU32,
    /// The version of the last use that lost a part of its range.
    lost: AtomicUsize,
}

// A signal handler can only read statics.
static SLOTS: [GuardSlot; MOST] = [const { GuardSlot::new() }; MOST];

impl GuardSlot {
    const fn new() -> Self {
        Self {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            ones: AtomicBool::new(false),
            process: AtomicU32::new(0),
            lost: AtomicUsize::new(0),
        }
    }

    /// The range that is guarded now, if any, and the version of this use of the slot. A range that is being changed
    /// does not count: its memory cannot be accessed yet, or any more.
    fn range(&self) -> Option<(usize, GuardedRange)> {
        let version = self.version.load(Ordering::Acquire);
        let range = GuardedRange {
            start: self.start.load(Ordering::Relaxed),
            end: self.end.load(Ordering::Relaxed),
            ones: self.ones.load(Ordering::Relaxed),
            process: self.process.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        let is_one = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (is_one && range.start > 1).then_some((version, range))
    }

    /// Starts or ends a use with a range; only for the slot's owner.
    fn set(&self, range: Option<GuardedRange>) {
        self.version.fetch_add(1, Ordering::Relaxed);
        // A reader that sees one of the following stores also sees the odd version.
        fence(Ordering::Release);
        if let Some(range) = range {
            self.start.store(range.start, Ordering::Relaxed);
            self.ones.store(range.ones, Ordering::Relaxed);
            self.process.store(range.process, Ordering::Relaxed);
        }
        self.end.store(range.map_or(0, |range| range.end), Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// A part of the range read with this version is lost. Later uses, and their losses, are unaffected: versions only
    /// grow.
    fn lose(&self, version: usize) {
        self.lost.fetch_max(version, Ordering::Release);
    }

    /// The same, and then replaces the part: a thread that reads the new pages without a fault finds them lost.
    /// If that fails, the fault ends the process.
    fn lose_and(&self, version: usize, replace: impl FnOnce() -> bool) -> bool {
        self.lose(version);
        replace()
    }

    /// Whether a part of the range is lost; only for the slot's owner.
    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire) == self.version.load(Ordering::Relaxed)
    }
}

/// Slots from this one on have never been used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Keeps a mapping guarded until it is dropped.
pub struct Guard {
    slot: usize,
    /// Keeps the address range from being reused while it is in the table.
    _mem: HostMem,
}

impl Guard {
    /// Maximum guarded mappings of a process.
    pub const MOST: usize = 20_480;

    /// Guards the pages of some memory from now on.
    ///
    /// # Errors
    /// When the maximum is reached, or the system refuses a handler for SIGBUS.
    pub fn new(mem: &HostMem) -> Result<Self> {
        Self::with(mem, false)
    }

    /// Guards a device's registers: when the device is removed they read as all ones.
    ///
    /// # Errors
    /// As for [`Guard::new`].
    pub fn of_device(mem: &HostMem) -> Result<Self> {
        Self::with(mem, true)
    }

    fn with(mem: &HostMem, ones: bool) -> Result<Self> {
        install()?;
        let start = mem.host_ptr() as usize / PAGE * PAGE;
        let end = (mem.host_ptr() as usize + mem.len()).next_multiple_of(PAGE);
        let free =
            |slot: &GuardSlot| slot.start.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let slot = SLOTS.iter().position(free).ok_or_else(|| {
            let why = format!("{MOST} mappings are guarded already");
            Error::system("guarding shared memory", std::io::Error::other(why))
        })?;
        USED.fetch_max(slot + 1, Ordering::AcqRel);
        SLOTS[slot].set(Some(GuardedRange { start, end, ones, process: mem.process() }));
        Ok(Self { slot, _mem: mem.clone() })
    }

    /// Whether a part of the memory is lost: it reads as zeroes or ones, and writes have no effect.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        SLOTS[self.slot].is_lost()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        SLOTS[self.slot].set(None);
        // From here on others may use the slot.
        SLOTS[self.slot].start.store(0, Ordering::Release);
    }
}

/// The previous SIGBUS action, for faults that are not ours.
static mut BEFORE: std::mem::MaybeUninit<libc::sigaction> = std::mem::MaybeUninit::uninit();

fn install() -> Result<()> {
    static ONCE: Once = Once::new();
    static FAILED: AtomicBool = AtomicBool::new(false);
    if cfg!(miri) {
        // Miri has no signals.
        return Ok(());
    }
    ONCE.call_once(|| {
        // SAFETY: all zeroes is a valid sigaction; the handler is one for SA_SIGINFO, and `BEFORE` is written only
        // here, once, by a separate call: a call that also installed the handler might write it while the handler runs
        // in another thread; the library that contains the handler is never unloaded (nodelete).
        let done = unsafe {
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), (&raw mut BEFORE).cast()) != 0 {
                FAILED.store(true, Ordering::Release);
                return;
            }
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut())
        };
        FAILED.store(done != 0, Ordering::Release);
    });
    if FAILED.load(Ordering::Acquire) {
        return Err(Error::system("sigaction for SIGBUS", std::io::Error::other("refused")));
    }
    Ok(())
}

/// Runs at the fault: it may only use atomics and system calls.
extern "C" fn on_bus_error(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a siginfo with every SIGBUS. A signal that was sent has the sender's data in place of
    // the address, so the address is only read for a fault. Broken memory that no thread has accessed (action optional)
    // is not a fault: no thread keeps its mapping meanwhile.
    let at = unsafe {
        match (*info).si_code {
            libc::BUS_MCEERR_AO => None,
            code if code > 0 => Some((*info).si_addr() as usize),
            _ => None,
        }
    };
    let Some(at) = at else {
        // SAFETY: the kernel's arguments are forwarded.
        return unsafe { pass_on(signal, info, context) };
    };
    let used = USED.load(Ordering::Acquire).min(MOST);
    for slot in &SLOTS[..used] {
        if let Some((version, range)) = slot.range()
            && (range.start..range.end).contains(&at)
            && !is_of_parent(range.process)
        {
            let from = at / PAGE * PAGE;
            // SAFETY: the pages from here to the end belong to a live mapping of this process: the thread that accessed
            // it holds a clone of its memory, even if the guard is dropped meanwhile. Anonymous memory replaces them,
            // as every reader of memory that others write must expect.
            let replace = || unsafe { replace(from, range.end - from, range.ones) };
            if slot.lose_and(version, replace) {
                return;
            }
        }
    }
    // SAFETY: the kernel's arguments are forwarded.
    unsafe { pass_on(signal, info, context) };
}

/// Replaces mapped pages with anonymous memory of zeroes or ones; returns whether that succeeded. Other threads see
/// either the old pages or all of the new ones: never zeroes in place of ones.
///
/// # Safety
/// The pages belong to a live mapping, whose bytes may change at any moment. Uses only system calls.
unsafe fn replace(from: usize, bytes: usize, ones: bool) -> bool {
    let map = |at: usize, fixed: i32| {
        let how = fixed | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: with a fixed address the caller vouches for the pages; otherwise nothing is replaced.
        unsafe { libc::mmap(at as *mut c_void, bytes, libc::PROT_READ | libc::PROT_WRITE, how, -1, 0) }
    };
    if !ones {
        return map(from, libc::MAP_FIXED) != libc::MAP_FAILED;
    }
    let aside = map(0, 0);
    if aside == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: these pages have just been mapped, to be written, and nobody else has their address. They are moved over the
    // caller's, or unmapped again.
    unsafe {
        std::ptr::write_bytes(aside.cast::<u8>(), 0xff, bytes);
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let moved = libc::mremap(aside, bytes, bytes, how, from as *mut c_void) != libc::MAP_FAILED;
        if !moved {
            libc::munmap(aside, bytes);
        }
        moved
    }
}

/// Does what the previous action would have done, and keeps this handler installed.
///
/// # Safety
/// The arguments are those of a handler of SIGBUS.
unsafe fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: `BEFORE` was written when the handler was installed; the kernel gives a siginfo.
    let (before, is_sent) =
        unsafe { ((&raw const BEFORE).cast::<libc::sigaction>().read(), (*info).si_code <= 0) };
    match before.sa_sigaction {
        libc::SIG_IGN if is_sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // Ends the process, by raising the signal again; a fault cannot be ignored.
            // SAFETY: these calls may be made in a handler; all zeroes is the default action.
            unsafe {
                let action: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, &raw const action, std::ptr::null_mut());
                libc::raise(signal);
            }
        }
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: its installer promised a function of this type.
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: as above.
            let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Barrier;

    use super::*;

    /// The `number`th use of a slot: its version, and a range that differs in every field from the previous use's.
    fn of_use(number: usize) -> (usize, GuardedRange) {
        let (start, ones) = (number * PAGE, number.is_multiple_of(2));
        (2 * number, GuardedRange { start, end: start + PAGE, ones, process: number as u32 })
    }

    #[test]
    fn a_range_is_never_of_two_uses() {
        let rounds = if cfg!(miri) { 100 } else { 1 << 20 };
        let (slot, together, over) = (GuardSlot::new(), Barrier::new(2), AtomicBool::new(false));
        let torn = std::thread::scope(|scope| {
            scope.spawn(|| {
                together.wait();
                // While the other thread reads.
                let uses = (1..).take_while(|_| !over.load(Ordering::Relaxed));
                uses.for_each(|number| slot.set(Some(of_use(number).1)));
            });
            together.wait();
            let mut seen = (0..rounds).filter_map(|_| slot.range());
            let torn = seen.find(|(version, range)| of_use(range.start / PAGE) != (*version, *range));
            over.store(true, Ordering::Relaxed);
            torn
        });
        assert_eq!(torn, None);
    }

    /// A thread reports a loss late, when the slot already belongs to another mapping.
    #[test]
    fn a_loss_does_not_affect_the_next_use() {
        let slot = GuardSlot::new();
        let begin = |number| {
            slot.set(Some(of_use(number).1));
            slot.range().unwrap().0
        };
        let first = begin(1);
        assert!(!slot.is_lost());
        slot.set(None);
        let second = begin(2);
        slot.lose(first);
        assert!(!slot.is_lost());
        slot.lose(second);
        slot.lose(first);
        assert!(slot.is_lost());
    }

    #[test]
    fn memory_is_lost_before_it_is_replaced() {
        let slot = GuardSlot::new();
        slot.set(Some(of_use(1).1));
        let version = slot.range().unwrap().0;
        assert!(slot.lose_and(version, || slot.is_lost()));
    }

    #[test]
    fn memory_that_is_cut_off_reads_as_zeroes() {
        let fd = rustix::fs::memfd_create("guarded", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(5 * 4096).unwrap();
        let mem = HostMem::of_file(&file, 5 * 4096).unwrap();
        let guard = Guard::new(&mem).unwrap();
        mem.fill(0, 5 * 4096, 7).unwrap();
        assert!(!guard.is_lost());
        file.set_len(2 * 4096).unwrap();
        assert_eq!(mem.to_vec(2 * 4096 - 1, 2).unwrap(), [7, 0]);
        assert!(guard.is_lost());
        mem.write(4 * 4096, &[1, 2]).unwrap();
        assert_eq!(mem.to_vec(4 * 4096, 2).unwrap(), [1, 2]);
        // System calls on such memory return an error instead of a signal.
        file.set_len(0).unwrap();
        drop(guard);
        let zero = File::open("/dev/zero").unwrap();
        assert!(mem.read_file(0, 4096, &zero, 0).is_err());
    }

    #[test]
    fn a_device_that_is_taken_away_reads_as_ones() {
        let fd = rustix::fs::memfd_create("device", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(2 * 4096).unwrap();
        let mem = HostMem::of_file(&file, 2 * 4096).unwrap();
        let guard = Guard::of_device(&mem).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(mem.word(28).unwrap().load(Ordering::Relaxed), u32::MAX);
        assert_eq!(mem.to_vec(2 * 4096 - 1, 1).unwrap(), [0xff]);
        assert!(guard.is_lost());
    }

    /// All replaced bytes appear at once: filling them takes many times longer than the second thread waits.
    #[test]
    fn registers_that_go_never_read_as_zeroes() {
        const BYTES: usize = 64 << 20;
        let fd = rustix::fs::memfd_create("device", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(BYTES as u64).unwrap();
        let mem = HostMem::of_file(&file, BYTES).unwrap();
        let _guard = Guard::of_device(&mem).unwrap();
        mem.fill(0, BYTES, 7).unwrap();
        file.set_len(0).unwrap();
        let word = |at: usize| mem.word(at).unwrap().load(Ordering::Relaxed);
        let begun = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                begun.store(true, Ordering::Release);
                word(0)
            });
            while !begun.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert_eq!(word(BYTES - 4), u32::MAX);
            assert_eq!(first.join().unwrap(), u32::MAX);
        });
    }
}
