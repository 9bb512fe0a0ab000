//! Tests that need a separate process: signal handlers are per process.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use onehop_os::{ForkLocks, Guard, HeldInFork, HostMem, Reads, watch_forks};

static FOREIGN: AtomicUsize = AtomicUsize::new(0);

extern "C" fn foreign(_: i32) {
    FOREIGN.fetch_add(1, Ordering::SeqCst);
}

/// A signal with a value, as the kernel lays it out: the value is where a fault has its address.
#[repr(C)]
struct Sent {
    signo: i32,
    errno: i32,
    code: i32,
    pad: i32,
    value: u64,
    rest: [u64; 13],
}

fn send(code: i32, value: u64) {
    let mut info = Sent { signo: libc::SIGBUS, errno: 0, code, pad: 0, value, rest: [0; 13] };
    // SAFETY: to this thread, by its own process; the structure has the size of the kernel's.
    let done = unsafe {
        let (process, thread) = (libc::getpid(), libc::gettid());
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, libc::SIGBUS, &raw mut info)
    };
    assert_eq!(done, 0);
}

#[test]
fn signals_of_others_go_to_their_handler_and_the_guard_stays() {
    // SAFETY: the handler only uses an atomic.
    unsafe { libc::signal(libc::SIGBUS, foreign as *const () as usize) };
    let fd = rustix::fs::memfd_create("guarded", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    for round in 1..=3 {
        file.set_len(2 * 4096).unwrap();
        let mem = HostMem::of_file(&file, 2 * 4096).unwrap();
        let guard = Guard::new(&mem).unwrap();
        mem.fill(0, 2 * 4096, 7).unwrap();
        // SAFETY: a signal that is not ours, to this thread.
        unsafe { libc::raise(libc::SIGBUS) };
        // A sent signal removes no memory, with any code.
        for code in [-1, -2, -6] {
            send(code, mem.host_ptr() as u64);
        }
        assert_eq!(FOREIGN.load(Ordering::SeqCst), 4 * round);
        assert!(!guard.is_lost() && mem.to_vec(0, 4).unwrap() == [7; 4]);
        file.set_len(4096).unwrap();
        assert_eq!(mem.to_vec(4095, 2).unwrap(), [7, 0]);
        assert!(guard.is_lost());
    }
}

/// Runs `f` in a forked child; returns its result, or 100 plus the signal that ended the child.
fn in_a_child(seconds: u32, f: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child uses memory that is its own, and ends by its own exit or by the alarm.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::alarm(seconds);
            libc::_exit(f());
        }
    }
    let mut status = 0;
    // SAFETY: `status` lives across the call, and the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 100 + libc::WTERMSIG(status) }
}

/// A file in memory, and a page of it mapped at an unused address; false if the address is in use.
fn map_page(at: *mut u8) -> (File, bool) {
    let file = File::from(rustix::fs::memfd_create("of_child", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(4096).unwrap();
    let (access, how) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE);
    // SAFETY: it fails where something is mapped.
    let mapped = unsafe { libc::mmap(at.cast(), 4096, access, how, file.as_raw_fd(), 0) };
    (file, mapped.cast() == at)
}

fn device() -> HostMem {
    let fd = rustix::fs::memfd_create("device", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 2 * 4096).unwrap();
    HostMem::of_device(&fd, 0, 2 * 4096).unwrap()
}

#[test]
fn the_childs_own_mapping_is_not_unmapped() {
    for mem in [HostMem::touched(4096).unwrap(), device()] {
        let at = mem.host_ptr();
        let seen = in_a_child(20, || {
            let (_file, true) = map_page(at) else { return 1 };
            // As a garbage collector does with the child's copy.
            drop(mem);
            // SAFETY: it was mapped above.
            unsafe {
                at.write_volatile(7);
                i32::from(at.read_volatile())
            }
        });
        assert_eq!(seen, 7, "the child's mapping went with its parent's memory");
    }
}

#[test]
fn the_childs_own_mapping_is_not_guarded() {
    let mem = device();
    let guard = Guard::of_device(&mem).unwrap();
    // SIGBUS ends the child; or the alarm does, if another test's handler was installed first and returns.
    let ended = in_a_child(1, || {
        let (file, true) = map_page(mem.host_ptr()) else { return 1 };
        file.set_len(0).unwrap();
        // SAFETY: it was mapped above.
        unsafe { i32::from(mem.host_ptr().read_volatile()) }
    });
    assert!([100 + libc::SIGBUS, 100 + libc::SIGALRM].contains(&ended), "{ended}");
    assert!(!guard.is_lost() && mem.to_vec(0, 1).unwrap() == [0]);
}

#[test]
fn a_read_that_is_too_long_takes_no_room() {
    let memory = HostMem::anonymous(5 << 30).unwrap();
    let mut reads = Reads::new(memory, 2).unwrap();
    let file = Arc::new(File::open("/dev/zero").unwrap());
    for _ in 0..4 {
        assert!(reads.begin(1, &file, 0, 0, 5 << 30).is_err());
        assert_eq!((reads.room(), reads.under_way()), (2, 0));
    }
    reads.begin(1, &file, 0, 0, 4096).unwrap();
}

static OFTEN_LOCKED: Mutex<()> = Mutex::new(());
static HELD: HeldInFork<LockedInFork> = HeldInFork::new();
static DISOWNED: AtomicI32 = AtomicI32::new(0);
static SEEN_AT_END: AtomicI32 = AtomicI32::new(0);

struct LockedInFork(#[allow(dead_code, reason = "held and not read")] MutexGuard<'static, ()>);

impl ForkLocks for LockedInFork {
    fn place() -> &'static HeldInFork<Self> {
        &HELD
    }

    fn take() -> Self {
        Self(OFTEN_LOCKED.lock().unwrap())
    }

    fn disown(&mut self) {
        DISOWNED.fetch_add(1, Ordering::SeqCst);
    }
}

/// 1 if a child finds the lock free and is notified once that it is a child; else 2.
fn forked() -> i32 {
    in_a_child(60, || {
        if OFTEN_LOCKED.try_lock().is_ok() && DISOWNED.load(Ordering::SeqCst) == 1 { 1 } else { 2 }
    })
}

extern "C" fn fork_at_the_end(_: *mut libc::c_void) {
    let seen = (0..200).map(|_| forked()).find(|seen| *seen != 1);
    SEEN_AT_END.store(seen.unwrap_or(1), Ordering::SeqCst);
}

/// Its thread-local values are gone by then, including those that its first fork made.
#[test]
fn a_thread_that_forks_at_its_end_holds_the_locks() {
    watch_forks::<LockedInFork>().unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    let _locked = OFTEN_LOCKED.lock().unwrap();
                    std::hint::black_box(vec![0_u8; 4096]);
                }
            });
        }
        let thread = scope.spawn(|| {
            assert_eq!(forked(), 1);
            let mut key = 0;
            // SAFETY: the destructor ignores its argument, which only may not be null.
            unsafe {
                assert_eq!(libc::pthread_key_create(&raw mut key, Some(fork_at_the_end)), 0);
                assert_eq!(libc::pthread_setspecific(key, std::ptr::dangling()), 0);
            }
        });
        let joined = thread.join();
        over.store(true, Ordering::SeqCst);
        joined.unwrap();
    });
    assert_eq!(SEEN_AT_END.load(Ordering::SeqCst), 1);
}
