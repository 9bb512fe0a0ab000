//! What only a process of its own can show: handlers of signals are the process's.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use onehop_os::{Guard, HostMem, Reads};

static FOREIGN: AtomicUsize = AtomicUsize::new(0);

extern "C" fn foreign(_: i32) {
    FOREIGN.fetch_add(1, Ordering::SeqCst);
}

/// A signal with a value, as the kernel lays it out: the value lies where a fault has its address.
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
    // SAFETY: the handler uses an atomic and nothing else.
    unsafe { libc::signal(libc::SIGBUS, foreign as *const () as usize) };
    let fd = rustix::fs::memfd_create("guarded", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    for round in 1..=3 {
        file.set_len(2 * 4096).unwrap();
        let mem = HostMem::of_file(&file, 2 * 4096).unwrap();
        let guard = Guard::new(&mem).unwrap();
        mem.fill(0, 2 * 4096, 7).unwrap();
        // SAFETY: a signal of somebody else's, to this thread.
        unsafe { libc::raise(libc::SIGBUS) };
        // What is sent takes no memory away, whatever its value.
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
