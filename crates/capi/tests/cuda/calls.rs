//! Every function of the header on a GPU, and faults of the drive.

use std::time::{Duration, Instant};

use onehop_gpu::cuda::Arg;
use onehop_gpu::{Gpu, Place};
use onehop_proto::kernel::Answer;

use crate::{BLOCK, Bed, DATA, Machine, all_said, answers_of, media, report};

const READ: u32 = 0;
const WRITE: u32 = 1;
const SUBMIT_WAIT: u32 = 2;
const SUBMIT_TEST: u32 = 3;
const SPENT: u32 = 4;
const NO_QUEUE: u32 = 5;
const FACTS: u32 = 6;

/// `struct test_call`.
#[derive(Clone, Copy)]
struct Call {
    kind: u32,
    operation: u32,
    lba: u64,
    blocks: u32,
    offset: u64,
}

fn call(kind: u32, lba: u64, blocks: u32, offset: u64) -> Call {
    Call { kind, operation: 0, lba, blocks, offset }
}

impl Call {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = [self.lba.to_le_bytes(), self.offset.to_le_bytes()].concat();
        for word in [self.blocks, self.operation, self.kind, 0] {
            bytes.extend(word.to_le_bytes());
        }
        bytes
    }
}

#[test]
fn every_call_is_answered() {
    let test = "every_call_is_answered";
    let Some(machine) = Machine::open(test) else { return };
    let Some(code) = machine.cpp(test, "calls.ptx") else { return };
    let bed = machine.bed("?mdts=9", 63);
    bed.inject("media@lba=9000-9003");
    let all = DATA as u64 / BLOCK;
    let (done, media_error) = (Answer::Done.code(), 0x281);
    let cases: Vec<(Call, i32)> = vec![
        (call(READ, 0, 1, 0), done),
        (call(READ, 5, 17, 1 << 20), done),
        (call(READ, 5, 2048, (2 << 20) + 4), done),
        (call(SUBMIT_WAIT, 3, 2048, 8 << 20), done),
        (call(SUBMIT_TEST, 3, 9, (4 << 20) + 4092), done),
        (call(SPENT, 3, 9, 5 << 20), Answer::Spent.code()),
        (call(WRITE, 60_000, 8, 6 << 20), done),
        (call(READ, 0, 0, 0), Answer::Length.code()),
        (call(READ, 0, 2049, 0), Answer::Length.code()),
        (call(READ, all, 1, 0), Answer::Range.code()),
        (call(WRITE, u64::MAX, 1, 0), Answer::Range.code()),
        (call(READ, 0, 1, DATA as u64 - 508), Answer::Buffer.code()),
        (call(READ, 0, 1, u64::MAX), Answer::Buffer.code()),
        (call(READ, 0, 1, 2), Answer::Alignment.code()),
        (call(NO_QUEUE, 0, 1, 0), Answer::NoHandle.code()),
        (Call { operation: 2, ..call(SUBMIT_WAIT, 0, 1, 0) }, Answer::NoOperation.code()),
        (Call { operation: 1, ..call(SUBMIT_WAIT, 61_000, 1, 7 << 20) }, done),
        (call(READ, 9001, 1, 12 << 20), media_error),
        (Call { operation: 512, ..call(FACTS, all, 2048, DATA as u64) }, done),
    ];
    let exported = bed.export();
    let list = machine.gpu.alloc(Place::PinnedHost, 4096).unwrap();
    let bytes: Vec<u8> = cases.iter().flat_map(|(call, _)| call.bytes()).collect();
    list.write(0, &bytes).unwrap();
    let count = cases.len() as u32;
    let answers = bed.answers(count);
    let at = [exported.handle(), list.addr(), answers.addr()].map(|addr| Arg::U64(addr.0));
    let [queue, list, to] = at;
    bed.start(&code, "calls", (1, 64), &[queue, list, Arg::U32(count), to]).wait().unwrap();
    for ((case, want), got) in cases.iter().zip(answers_of(&answers, count)) {
        // A status has more bits than its code.
        let got = if got > 0 { got & 0x7ff } else { got };
        let Call { kind, operation, lba, blocks, offset } = case;
        assert_eq!(got, *want, "kind {kind}, operation {operation}: {blocks} blocks at {lba} to {offset}");
    }
    for (lba, blocks, offset) in
        [(5, 17, 1 << 20), (5, 2048, (2 << 20) + 4), (3, 2048, 8 << 20), (3, 9, (4 << 20) + 4092)]
    {
        assert!(bed.holds(lba, blocks, offset), "{blocks} blocks at {lba}");
    }
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

impl Bed {
    fn holds(&self, lba: usize, blocks: usize, offset: usize) -> bool {
        let mut got = vec![0; blocks * BLOCK as usize];
        self.data.read(offset, &mut got).unwrap();
        got == media()[lba * BLOCK as usize..][..got.len()]
    }
}

#[test]
fn kernels_survive_faults_of_the_drive() {
    let test = "kernels_survive_faults_of_the_drive";
    let Some(machine) = Machine::open(test) else { return };
    let Some(code) = machine.cpp(test, "calls.ptx") else { return };
    let (blocks, threads, rounds, each) = (8, 64, 40, 3);
    for (fault, recoveries) in [
        ("", 0),
        ("late@op=read,every=500,delay=20ms", 0),
        ("reorder@op=read,every=7,by=3", 0),
        ("fail-once@op=read,every=300", 0),
        ("stale-phase@op=read,every=900", 0),
        ("sqhd-lag@op=read,every=5", 0),
        ("lost@op=read,n=3000", 1),
        ("cfs@op=read,n=3000", 1),
        ("wrong-cid@op=read,n=3000", 1),
        ("dup@op=read,n=3000", 1),
    ] {
        for depth in [7, 1023] {
            let bed = machine.bed("", depth);
            let exported = bed.export();
            if !fault.is_empty() {
                bed.inject(fault);
            }
            let answers = bed.answers(blocks * threads);
            let args =
                [Arg::U64(exported.handle().0), Arg::U32(rounds), Arg::U32(each), Arg::U64(answers.addr().0)];
            let start = Instant::now();
            bed.start(&code, "hammer", (blocks, threads), &args).wait().unwrap();
            let took = start.elapsed();
            exported.check().unwrap();
            all_said(&answers, blocks * threads, 0, &format!("{fault}, depth {depth}"));
            let all = (blocks * threads * rounds * each) as usize;
            assert!(bed.holds(0, all, 0), "{fault}, depth {depth}: wrong bytes");
            let count = exported.recoveries();
            exported.revoke().unwrap();
            report(&format!(
                "{:?}, depth {depth}: {} reads in {took:?}, {count} recoveries",
                fault,
                blocks * threads * rounds
            ));
            // An unexpected completion may be found only when the queue is closed.
            assert!(
                count <= recoveries && (recoveries == 0 || !bed.drive.incidents().is_empty()),
                "{fault}: {count}"
            );
            if recoveries == 0 || fault.starts_with("lost") {
                assert_eq!(bed.sim.violations(), [], "{fault}");
            }
        }
    }
}

#[test]
fn running_kernels_see_stops_resets_and_the_end() {
    let test = "running_kernels_see_stops_resets_and_the_end";
    let Some(machine) = Machine::open(test) else { return };
    let Some(code) = machine.cpp(test, "calls.ptx") else { return };
    let (blocks, threads) = (4, 64);
    let begin = |bed: &Bed, exported: &onehop_drive::ExportedQueue| {
        let answers = bed.answers(blocks * threads);
        let args = [Arg::U64(exported.handle().0), Arg::U64(answers.addr().0)];
        (bed.start(&code, "forever", (blocks, threads), &args), answers)
    };
    let stopped = Answer::Stopped.code();

    // Stopped by the host, after a few resets in between.
    let bed = machine.bed("", 255);
    let exported = bed.export();
    let (running, answers) = begin(&bed, &exported);
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(30));
        bed.drive.reset().unwrap();
        assert!(!running.is_over());
    }
    std::thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    exported.stop();
    running.wait().unwrap();
    report(&format!("from the stop to the end of the kernel: {:?}", start.elapsed()));
    assert!(start.elapsed() < Duration::from_millis(500));
    exported.check().unwrap();
    all_said(&answers, blocks * threads, stopped, "stopped");
    assert_eq!(exported.recoveries(), 2);
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);

    // The drive is removed.
    let bed = machine.bed("", 255);
    let exported = bed.export();
    let (running, answers) = begin(&bed, &exported);
    std::thread::sleep(Duration::from_millis(30));
    bed.inject("gone@op=read,n=1");
    running.wait().unwrap();
    all_said(&answers, blocks * threads, stopped, "gone");
    let error = exported.revoke().unwrap_err();
    report(&format!("{error}"));
}

#[test]
fn a_block_that_is_never_read_is_given_up() {
    let test = "a_block_that_is_never_read_is_given_up";
    let Some(machine) = Machine::open(test) else { return };
    let Some(code) = machine.cpp(test, "calls.ptx") else { return };
    let bed = machine.bed("", 63);
    let exported = bed.export();
    bed.inject("lost@op=read,lba=40-40");
    let cases = [call(READ, 40, 1, 0), call(SUBMIT_TEST, 41, 1, 4096), call(SUBMIT_WAIT, 40, 1, 8192)];
    let list = machine.gpu.alloc(Place::PinnedHost, 4096).unwrap();
    let bytes: Vec<u8> = cases.iter().flat_map(Call::bytes).collect();
    list.write(0, &bytes).unwrap();
    let answers = bed.answers(3);
    let args =
        [Arg::U64(exported.handle().0), Arg::U64(list.addr().0), Arg::U32(3), Arg::U64(answers.addr().0)];
    let start = Instant::now();
    bed.start(&code, "calls", (1, 32), &args).wait().unwrap();
    report(&format!("a read that got lost three times was given up after {:?}", start.elapsed()));
    let timed_out = Answer::TimedOut.code();
    assert_eq!(answers_of(&answers, 3), [timed_out, 0, timed_out]);
    assert!(exported.recoveries() >= 3);
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}
