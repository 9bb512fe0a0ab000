//! The engine for calls, with the emulated GPU.

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;

use onehop_gpu::Emulated;
use onehop_os::file_writes::WriteRoutes;
use rustix::fs::{Advice, fadvise};

use super::*;
use crate::engine::silent_gpu::SilentGpu;

const BYTES: usize = 5 * SLOT + 12345;

pub(super) fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

pub(super) fn file(name: &str, bytes: usize) -> std::fs::File {
    let path = std::env::temp_dir().join(format!("onehop-calls-{}-{name}", std::process::id()));
    let mut file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.write_all(&(0..bytes as u64).map(byte).collect::<Vec<_>>()).unwrap();
    file
}

fn call_file(file: std::fs::File) -> CallFile {
    CallFile::new(file, Arc::new(WriteRoutes::unshared())).unwrap()
}

pub(super) struct CallFixture {
    pub(super) engine: CallEngine,
    target: Target,
    memory: Region,
}

impl CallFixture {
    pub(super) fn new(threads: usize) -> Self {
        let gpu = Emulated::new();
        let engine = CallEngine::with_threads(threads).unwrap();
        let target = engine.add_gpu(Arc::new(gpu.clone()), gpu.all_memory()).unwrap();
        let memory = gpu.alloc(Place::Vram, 2 * BYTES).unwrap();
        Self { engine, target, memory }
    }

    pub(super) fn to(&self, offset: usize) -> Destination {
        let at = self.memory.addr().0 as usize + offset;
        Destination { target: self.target.clone(), at, is_there: None }
    }

    pub(super) fn get(&self, offset: usize, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.memory.read(offset, &mut out).unwrap();
        out
    }
}

/// A GPU that does not answer before `has_ended`.
struct Silent {
    has_ended: Arc<AtomicBool>,
    target: Target,
    memory: Region,
}

impl Silent {
    fn new(bench: &CallFixture, goes_on: bool) -> Self {
        let has_ended = Arc::new(AtomicBool::new(false));
        let gpu = Arc::new(SilentGpu { gpu: Emulated::new(), has_ended: has_ended.clone(), goes_on });
        let target = bench.engine.add_gpu(gpu.clone(), gpu.gpu.all_memory()).unwrap();
        Self { has_ended, target, memory: gpu.alloc(Place::Vram, SLOT).unwrap() }
    }
}

fn expected(at: u64, bytes: usize) -> Vec<u8> {
    (at..at + bytes as u64).map(byte).collect()
}

#[test]
fn chunks_cover_a_call_and_begin_aligned() {
    let file = Arc::new(call_file(file("cover", 1)));
    let bench = CallFixture::new(1);
    for at in [0, 1, 4095, ALIGN - 1, ALIGN, 3 * SLOT as u64 + 7] {
        for bytes in [1, 4096, LEAST_CHUNK, LEAST_CHUNK + 1, SLOT - 1, SLOT, 3 * SLOT + 5] {
            for chunk in [LEAST_CHUNK, SLOT] {
                let call = Call::new(CallSource::File(file.clone()), at, bytes, chunk, bench.to(0));
                let mut end = at;
                for index in 0..call.chunks() {
                    let (start, bytes) = call.range(index);
                    assert!(start == end && bytes > 0 && bytes <= chunk, "{at} {index}");
                    assert!(index == 0 || start.is_multiple_of(ALIGN));
                    end = start + bytes as u64;
                }
                assert_eq!(end, at + bytes as u64);
            }
        }
    }
}

#[test]
fn every_byte_arrives_from_any_offset() {
    for threads in [1, 4] {
        let bench = CallFixture::new(threads);
        let file = Arc::new(call_file(file(&format!("read-{threads}"), BYTES)));
        for (at, bytes, to) in
            [(0, BYTES, 0), (1, 4096, 3), (4097, 3 * SLOT, 77), (BYTES - 10, 10, 0), (0, 1, BYTES)]
        {
            bench.memory.fill(0, 2 * BYTES, 0xee).unwrap();
            assert_eq!(bench.engine.read(&file, at as u64, bytes, bench.to(to)).unwrap(), bytes);
            assert_eq!(bench.get(to, bytes), expected(at as u64, bytes));
            assert!(bench.get(to + bytes, 64).iter().all(|byte| *byte == 0xee), "{at} {bytes}");
        }
        // Past the end, at it, and across it.
        assert_eq!(bench.engine.read(&file, BYTES as u64, 9, bench.to(0)).unwrap(), 0);
        assert_eq!(bench.engine.read(&file, u64::MAX / 2, 9, bench.to(0)).unwrap(), 0);
        assert_eq!(bench.engine.read(&file, BYTES as u64 - 5, 4096, bench.to(0)).unwrap(), 5);
    }
}

#[test]
fn written_bytes_are_read_back() {
    let bench = CallFixture::new(3);
    let file = Arc::new(call_file(file("write", 0)));
    bench.memory.write(0, &expected(0, BYTES)).unwrap();
    assert_eq!(bench.engine.write(&file, 4097, BYTES, bench.to(0)).unwrap(), BYTES);
    assert_eq!(bench.engine.read(&file, 4097, BYTES, bench.to(BYTES)).unwrap(), BYTES);
    assert_eq!(bench.get(BYTES, BYTES), expected(0, BYTES));
    assert_eq!(bench.engine.moved().written, BYTES as u64);
}

#[test]
fn calls_of_many_threads_do_not_mix() {
    const CALLERS: usize = 12;
    let bench = CallFixture::new(4);
    let file = Arc::new(call_file(file("many", BYTES)));
    let share = BYTES / CALLERS;
    std::thread::scope(|scope| {
        for caller in 0..CALLERS {
            let (bench, file) = (&bench, &file);
            scope.spawn(move || {
                for _ in 0..5 {
                    let at = caller * share;
                    assert_eq!(bench.engine.read(file, at as u64, share, bench.to(at)).unwrap(), share);
                }
            });
        }
    });
    assert_eq!(bench.get(0, CALLERS * share), expected(0, CALLERS * share));
}

#[test]
fn a_call_to_invalid_memory_fails_alone() {
    let bench = CallFixture::new(2);
    let file = Arc::new(call_file(file("none", BYTES)));
    std::thread::scope(|scope| {
        let good = scope.spawn(|| bench.engine.read(&file, 0, BYTES, bench.to(0)));
        let nowhere = Destination { target: bench.target.clone(), at: 64, is_there: None };
        assert!(matches!(bench.engine.read(&file, 0, BYTES, nowhere), Err(CallError::Gpu(_))));
        assert_eq!(good.join().unwrap().unwrap(), BYTES);
    });
    assert_eq!(bench.get(0, BYTES), expected(0, BYTES));
    // No slot was lost: as many calls again as there are slots.
    for _ in 0..MOST_SLOTS {
        assert!(bench.engine.read(&file, 0, SLOT, bench.to(usize::MAX / 4)).is_err());
    }
    assert_eq!(bench.engine.read(&file, 0, BYTES, bench.to(0)).unwrap(), BYTES);
}

#[test]
fn memory_freed_during_a_call_gets_no_more_bytes() {
    let bench = CallFixture::new(1);
    let file = Arc::new(call_file(file("gone", BYTES)));
    bench.memory.fill(0, BYTES, 0xee).unwrap();
    let is_there: Option<Box<dyn Fn() -> bool + Send + Sync>> = Some(Box::new(|| false));
    let to = Destination { is_there, ..bench.to(0) };
    assert!(matches!(bench.engine.read(&file, 0, BYTES, to), Err(CallError::Gone)));
    assert!(bench.get(2 * SLOT, BYTES - 2 * SLOT).iter().all(|byte| *byte == 0xee));
}

#[test]
fn a_write_that_failed_writes_nothing_further() {
    let bench = CallFixture::new(1);
    let file = Arc::new(call_file(file("failed", BYTES)));
    let asked = Arc::<AtomicUsize>::default();
    let count = asked.clone();
    // Gone for one chunk, and back for those after it.
    let is_there: Option<Box<dyn Fn() -> bool + Send + Sync>> =
        Some(Box::new(move || count.fetch_add(1, Ordering::AcqRel) > 0));
    let from = Destination { is_there, ..bench.to(0) };
    assert!(matches!(bench.engine.write(&file, 0, BYTES, from), Err(CallError::Gone)));
    assert_eq!(asked.load(Ordering::Acquire), 1);
}

#[test]
fn a_call_that_is_given_up_waits_for_what_is_being_written_and_writes_no_more() {
    let bench = CallFixture::new(1);
    let file = Arc::new(call_file(file("given up", BYTES)));
    let call = Call::new(CallSource::FileToWrite(file.clone()), 0, BYTES, SLOT, bench.to(0));
    let (begin, begun) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (call, is_over) = (&call, &is_over);
        scope.spawn(move || {
            let stored = call.store(|| {
                begin.send(()).unwrap();
                ended.recv().unwrap();
                is_over.store(true, Ordering::Release);
                Ok(1)
            });
            assert_eq!(stored.unwrap(), 1);
        });
        begun.recv().unwrap();
        let other = scope.spawn(move || {
            super::give_up(call);
            assert!(is_over.load(Ordering::Acquire), "its caller may write while this one does");
        });
        while !call.has_failed() {
            std::thread::yield_now();
        }
        assert_eq!(call.store(|| panic!("it was given up")).unwrap(), 0);
        std::thread::sleep(std::time::Duration::from_millis(20));
        end.send(()).unwrap();
        other.join().unwrap();
    });
    assert!(!call.is_storing());
}

/// Its late copies get the bytes that were read for them, not those that calls to another GPU have read since.
#[test]
fn slots_of_an_unresponsive_gpu_are_left_to_it_and_other_gpus_go_on() {
    let bench = CallFixture::new(1);
    let file = Arc::new(call_file(file("silent", BYTES)));
    let Silent { has_ended, target, memory } = Silent::new(&bench, false);
    let to = Destination { target: target.clone(), at: memory.addr().0 as usize, is_there: None };
    let error = bench.engine.read(&file, 0, SLOT, to).unwrap_err();
    assert!(matches!(&error, CallError::Gpu(error) if error.is_under_way()), "{error}");
    // More of them than there are slots, with other bytes.
    for round in 0..2 * MOST_SLOTS {
        let at = SLOT as u64 + round as u64;
        assert_eq!(bench.engine.read(&file, at, SLOT, bench.to(0)).unwrap(), SLOT);
        assert!(bench.get(0, SLOT) == expected(at, SLOT), "round {round}");
    }
    has_ended.store(true, Ordering::Release);
    let to = Destination { target, at: memory.addr().0 as usize, is_there: None };
    // Another call has the late copy made before its own, of other bytes.
    let some = bench.engine.read(&file, SLOT as u64, SHORT_READ, to).unwrap();
    assert_eq!(some, SHORT_READ);
    let mut bytes = vec![0; SLOT];
    memory.read(0, &mut bytes).unwrap();
    assert!(
        bytes[SHORT_READ..] == expected(0, SLOT)[SHORT_READ..],
        "the GPU read a slot that was filled again"
    );
}

/// The same where callers copy by themselves.
#[test]
fn slots_of_short_reads_and_of_writes_are_left_to_an_unresponsive_gpu() {
    const SHORT: usize = SHORT_READ - 1;
    let bench = CallFixture::new(1);
    let file = Arc::new(call_file(file("silent and short", BYTES)));
    let Silent { has_ended, target, memory } = Silent::new(&bench, false);
    let to = || Destination { target: target.clone(), at: memory.addr().0 as usize, is_there: None };
    let free = || bench.engine.0.slots.free_slots();
    let (all, mut results) = (free(), Vec::new());
    results.push(bench.engine.read(&file, 0, SHORT, to()).map(drop));
    results.push(bench.engine.write(&file, 0, SHORT, to()).map(drop));
    assert!(
        results.iter().all(|result| { matches!(result, Err(CallError::Gpu(error)) if error.is_under_way()) })
    );
    assert_eq!(free(), all - 2);
    for at in SLOT as u64..SLOT as u64 + 2 * MOST_SLOTS as u64 {
        assert_eq!(bench.engine.read(&file, at, SHORT, bench.to(0)).unwrap(), SHORT);
        assert!(bench.get(0, SHORT) == expected(at, SHORT));
    }
    has_ended.store(true, Ordering::Release);
    let begun = Instant::now();
    while free() < all && begun.elapsed() < STALL {
        bench.engine.0.slots.try_attend().unwrap();
    }
    assert_eq!(free(), all, "the slots have come back");
    let mut bytes = vec![0; SHORT];
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes == expected(0, SHORT), "the GPU read a slot that was filled again");
    file.own().read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == expected(0, SHORT), "a write that failed has changed the file");
}

/// Without a limit its calls take every slot, and the calls to the other GPU end as stalled.
#[test]
fn a_gpu_whose_calls_never_end_leaves_slots_to_others_and_refuses_by_name() {
    let bench = CallFixture::new(2);
    let file = Arc::new(call_file(file("held", BYTES)));
    let Silent { has_ended, target, memory } = Silent::new(&bench, false);
    let read = || {
        let to = Destination { target: target.clone(), at: memory.addr().0 as usize, is_there: None };
        bench.engine.read(&file, 0, SLOT, to)
    };
    let errors: Vec<CallError> = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..64).map(|_| scope.spawn(read)).collect();
        callers.into_iter().map(|caller| caller.join().unwrap().unwrap_err()).collect()
    });
    let refused = |error: &&CallError| matches!(error, CallError::HeldSlots { .. });
    let (refused, failed): (Vec<_>, Vec<_>) = errors.iter().partition(refused);
    assert!(!refused.is_empty() && !failed.is_empty());
    assert!(failed.iter().all(|error| matches!(error, CallError::Gpu(_))));
    assert_eq!(bench.engine.0.slots.free_slots(), 2, "it has the slots of two threads");
    assert!(refused.iter().all(|error| error.to_string().starts_with("silent has not ended")));
    for at in 0..2 * MOST_SLOTS as u64 {
        assert_eq!(bench.engine.read(&file, at, SLOT, bench.to(0)).unwrap(), SLOT);
        assert!(bench.get(0, SLOT) == expected(at, SLOT));
    }
    has_ended.store(true, Ordering::Release);
    let begun = Instant::now();
    while begun.elapsed() < STALL && matches!(read(), Err(CallError::HeldSlots { .. })) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(read().unwrap(), SLOT, "its slots have come back");
}

#[test]
fn callers_who_wait_for_a_gpu_hold_up_no_call_to_another() {
    let bench = CallFixture::new(2);
    let file = Arc::new(call_file(file("pending", BYTES)));
    let Silent { has_ended, target, memory } = Silent::new(&bench, true);
    std::thread::scope(|scope| {
        let begin = || {
            let to = Destination { target: target.clone(), at: memory.addr().0 as usize, is_there: None };
            let (engine, file) = (&bench.engine, &file);
            scope.spawn(move || engine.read(file, 0, SLOT, to))
        };
        let callers: Vec<_> = (0..64).map(|_| begin()).collect();
        // Until they have all slots that they may.
        let begun = Instant::now();
        while bench.engine.0.slots.free_slots() > 2 && begun.elapsed() < STALL {
            std::thread::sleep(Duration::from_millis(1));
        }
        let reads: Vec<_> = (0..32).map(|at| bench.engine.read(&file, at, SLOT, bench.to(0))).collect();
        has_ended.store(true, Ordering::Release);
        assert!(reads.into_iter().all(|read| read.is_ok_and(|bytes| bytes == SLOT)));
        for caller in callers {
            assert_eq!(caller.join().unwrap().unwrap(), SLOT);
        }
    });
    assert_eq!(bench.engine.0.slots.free_slots(), 2 * SLOTS + 2);
}

/// Into host memory: bytes are where they are wanted, or less than a block behind, and nothing is written after them.
#[test]
fn host_memory_is_read_and_written_without_a_gpu() {
    let bench = CallFixture::new(1);
    let file = call_file(file("host", BYTES));
    let memory = HostMem::touched(BYTES + 2 * CallEngine::HOST_BLOCK).unwrap();
    for (at, bytes, shift) in [(0, BYTES, 0), (7, 4096, 5), (4096, SLOT, 15), (BYTES as u64 - 9, 100, 3)] {
        // Out of the disk, and out of the page cache.
        fadvise(file.own(), 0, None, Advice::DontNeed).unwrap();
        for _ in 0..2 {
            memory.fill(0, memory.len(), 0xee).unwrap();
            let to = (&memory, CallEngine::HOST_BLOCK, shift);
            let filled = bench.engine.read_to_host(&file, at, bytes, to).unwrap();
            assert_eq!(filled.bytes, bytes.min((BYTES as u64 - at) as usize));
            assert!(filled.skip == shift || filled.skip < CallEngine::HOST_BLOCK);
            let mut out = vec![0; filled.bytes];
            memory.read(CallEngine::HOST_BLOCK + filled.skip, &mut out).unwrap();
            assert!(out == expected(at, filled.bytes), "{at} {bytes}");
        }
    }
    assert_eq!(bench.engine.read_to_host(&file, BYTES as u64 + 5, 10, (&memory, 0, 0)).unwrap().bytes, 0);
    // The memory is longer than what was asked for; this is the first block from which the bytes do not fit.
    let beyond = (memory.len() - BYTES + 1).next_multiple_of(CallEngine::HOST_BLOCK);
    assert!(bench.engine.read_to_host(&file, 0, BYTES, (&memory, beyond, 0)).is_err());
    memory.write(0, &expected(99, 5000)).unwrap();
    assert_eq!(bench.engine.write_from_host(&file, 11, 5000, (&memory, 0)).unwrap(), 5000);
    let mut out = vec![0; 5000];
    file.own().read_exact_at(&mut out, 11).unwrap();
    assert!(out == expected(99, 5000));
    assert_eq!(bench.engine.moved().written, 5000);
}
