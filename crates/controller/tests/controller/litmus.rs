//! The litmus experiments on threads: with its fence each sees only whole messages. (What they see without it depends
//! on the machine; the loom model in `tests/loom.rs` shows that they fail.)

use onehop_controller::Exit;
use onehop_controller::layout::{Litmus, Tally, control};
use onehop_controller::litmus::{LITMUS_LOCAL_WORDS, complete, consume, fetch, pattern, strength, submit};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::Lanes as _;
use onehop_proto::queue::Memory;

use crate::memory::Mem;
use crate::warp::LaneThreads;

type Run = fn(&LaneThreads, GpuAddr) -> Exit;

/// Runs both sides; returns their exits, and what the reader saw.
fn run(writer: Run, reader: Run, setup: Litmus, spoil: Option<u32>) -> (Exit, Exit, Tally) {
    let mem = Mem::new(4 << 20);
    let setup = Litmus {
        payload: mem.alloc(u64::from(setup.slots * setup.words) * 4),
        flags: mem.alloc(u64::from(setup.slots) * 16),
        taken: mem.alloc(4),
        control: mem.alloc(4),
        limit: u64::MAX,
        ..setup
    };
    if let Some(stop) = spoil {
        mem.store(setup.control, stop);
    }
    let side = |checks| {
        let side = Litmus { tally: mem.alloc(u64::from(Tally::BYTES)), checks, ..setup };
        let at = mem.alloc(u64::from(Litmus::BYTES));
        mem.put(at, &side.words());
        (at, side.tally)
    };
    let ((written, _), (read, tally)) = (side(0), side(1));
    let theirs = mem.clone();
    let thread =
        std::thread::spawn(move || writer(&LaneThreads::new(&theirs, 32, LITMUS_LOCAL_WORDS, None), written));
    let checked = reader(&LaneThreads::new(&mem, 32, LITMUS_LOCAL_WORDS, None), read);
    (thread.join().unwrap(), checked, Tally::from_words(&mem.take(tally)))
}

#[test]
fn whole_messages_are_good() {
    let setup = Litmus { slots: 64, words: 16, batch: 32, messages: 20_000, ..Litmus::default() };
    for (slots, batch, relaxed) in [(64, 32, 0), (7, 5, 0), (100, 1, 1)] {
        let setup = Litmus { slots, batch, relaxed, ..setup };
        let (wrote, read, tally) = run(submit, fetch, setup, None);
        assert_eq!((wrote, read), (Exit::Stopped, Exit::Stopped));
        assert_eq!((tally.good, tally.messages), (20_000, 20_000), "{tally:?}");
        let (_, _, tally) = run(complete, consume, Litmus { words: 128, ..setup }, None);
        assert_eq!((tally.good, tally.messages), (20_000, 20_000), "{tally:?}");
    }
}

#[test]
fn an_experiment_can_be_stopped() {
    let setup = Litmus { slots: 8, words: 16, batch: 8, messages: u32::MAX, ..Litmus::default() };
    let (wrote, read, _) = run(submit, consume, setup, Some(control::STOP));
    assert_eq!((wrote, read), (Exit::Stopped, Exit::Stopped));
}

/// A writer that fences too late: it announces messages before it writes them.
fn too_early(warp: &LaneThreads, at: GpuAddr) -> Exit {
    let setup = Litmus::load(warp, at);
    for message in 0..setup.messages {
        while message.wrapping_sub(warp.load_acquire(setup.taken)) + 1 > setup.slots {
            warp.pause();
        }
        let slot = setup.payload.plus(u64::from(message % setup.slots) * 64);
        let entry: [u32; 16] = std::array::from_fn(|i| pattern(message, i as u32));
        // Of three, one is right, one late, and one in two parts.
        if message % 3 != 1 {
            let upto = if message % 3 == 2 { 8 } else { 16 };
            (0..upto).for_each(|i| warp.store(slot.plus(4 * i), entry[i as usize]));
        }
        warp.store_release(setup.flags, message + 1);
        while warp.load_acquire(setup.taken) != message + 1 {
            warp.pause();
        }
        warp.store_entry(slot, &entry);
    }
    assert_eq!(warp.lanes(), 32);
    Exit::Stopped
}

#[test]
fn broken_messages_are_distinguished() {
    let setup = Litmus { slots: 4, words: 16, messages: 300, fence: strength::NONE, ..Litmus::default() };
    let (_, _, tally) = run(too_early, fetch, setup, None);
    assert_eq!((tally.good, tally.stale, tally.torn, tally.alien), (100, 100, 100, 0));
}
