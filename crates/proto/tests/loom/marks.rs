//! A kernel that marks memory under loom, while its host cancels it and gives the memory to another user.

use loom::sync::atomic::{Ordering, fence};
use loom::thread;
use onehop_proto::kernel::{Marking, Permit, Seat, run_mark};
use onehop_proto::queue::{Address, Memory};

use crate::{At, Fences, Mem, explore};

const PERMIT: At = At(0);
const WORD: At = At(8);
const OTHERS: u32 = 7;

fn cancelled(fences: Fences) {
    let mem = Mem::new(16, fences);
    mem.store(PERMIT.plus(Permit::LAUNCH), 1);
    let kernel = {
        let mem = mem.clone();
        let marking = Marking { first: WORD, count: 1, word: 0x1234_5678, permit: PERMIT, launch: 1 };
        let seat = Seat { block: (0, 1), thread: (0, 1) };
        thread::spawn(move || run_mark(&mem, &marking, seat, || ()))
    };
    mem.store(PERMIT.plus(Permit::LAUNCH), 0);
    fence(Ordering::SeqCst);
    while mem.load_acquire(PERMIT.plus(Permit::block(0))) != 0 {
        mem.pause();
    }
    mem.store(WORD, OTHERS);
    kernel.join().unwrap();
    assert_eq!(mem.load(WORD), OTHERS, "memory was marked that others have again");
}

#[test]
fn a_cancelled_kernel_marks_nothing() {
    explore(3, || cancelled(Fences::All));
}

#[test]
#[should_panic(expected = "memory was marked")]
fn without_the_fence_it_is_caught() {
    explore(3, || cancelled(Fences::ButTheFirst));
}
