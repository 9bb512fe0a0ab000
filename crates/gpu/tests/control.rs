//! A queue's control memory belongs to the caller: with any content, a launch stays within its rings.

#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

use std::sync::Arc;
use std::time::Duration;

use onehop_gpu::{Emulated, Gpu, KernelJob, KernelQueue, Launch, Place};
use onehop_proto::kernel::Exit;

/// Registers that accept all writes and read as nothing.
struct Silent;

impl onehop_os::Registers for Silent {
    fn read32(&self, _: u32) -> u32 {
        0
    }

    fn write32(&self, _: u32, _: u32) {}

    fn size(&self) -> u32 {
        16 << 10
    }
}

const ENTRIES: u32 = 16;
const CONTROL: usize = 12 << 10;
const OUTCOMES: usize = 20 << 10;
const BYTES: usize = 256 << 10;

#[test]
fn places_beyond_the_rings_are_refused() {
    let gpu = Emulated::new();
    let memory = gpu.alloc(Place::PinnedHost, BYTES).unwrap();
    let at = |offset: usize| memory.addr().plus(offset as u64);
    let doors = gpu.map_registers(Arc::new(Silent)).unwrap();
    let queue = KernelQueue {
        sq: at(0),
        cq: at(4 << 10),
        sq_door: doors.at(0x1008),
        cq_door: doors.at(0x100c),
        control: at(CONTROL),
        sq_entries: ENTRIES,
        cq_entries: ENTRIES,
        ..KernelQueue::default()
    };
    let limit = KernelJob::nanos(Duration::from_millis(50));
    let job = KernelJob {
        works: at(16 << 10),
        outcomes: at(OUTCOMES),
        count: 1,
        nsid: 1,
        stall: limit,
        limit,
        poison: at(24 << 10),
        ..KernelJob::default()
    };
    let mut before = vec![0; BYTES];
    let mut after = vec![0; BYTES];
    for window in [1, 4] {
        let launch = Launch::Owner(vec![KernelQueue { window, ..queue }]);
        // Tail, submission head and completion head. The first tail lies within the caller's memory, past the ring.
        for (word, value) in [(0, 512), (0, 1 << 20), (4, ENTRIES), (8, 1 << 20)] {
            gpu.prepare(&launch).unwrap();
            memory.write(CONTROL + word, &u32::to_le_bytes(value)).unwrap();
            memory.read(0, &mut before).unwrap();
            let exits = gpu.launch(&launch, &job).unwrap().join().unwrap();
            assert_eq!(exits, [Exit::InvalidControl], "{value} at {word}, a window of {window}");
            memory.read(0, &mut after).unwrap();
            assert!(before == after, "{value} at {word}, a window of {window}: memory has changed");
        }
        gpu.prepare(&launch).unwrap();
        assert_eq!(gpu.launch(&launch, &job).unwrap().join().unwrap(), [Exit::TimedOut]);
    }
}
