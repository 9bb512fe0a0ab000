//! Pointer chases, in CUDA C++ and in Rust.

use std::time::{Duration, Instant};

use onehop_gpu::cuda::{Arg, Code};
use onehop_gpu::{Gpu, Place};

use crate::{Machine, all_said, report, unfair};

const RUST: &str = include_str!("../../../device/ptx/pointer_chase.ptx");

const LENGTH: u64 = 4096;
const HOPS: u32 = 50;
/// Bytes of `struct chase_end`.
const END: usize = 24;

/// Writes a chain and follows it with `kernel`; each thread follows `chains`.
fn follow(
    machine: &Machine,
    what: &str,
    code: &Code,
    kernel: &str,
    (shape, chains): ((u32, u32), u32),
    depth: u32,
) {
    let bed = machine.bed("", depth);
    let exported = bed.export();
    let threads = shape.0 * shape.1;
    let answers = bed.answers(threads);
    let (queue, data) = (Arg::U64(exported.handle().0), Arg::U64(bed.data.addr().0));
    let args = [queue.clone(), data.clone(), Arg::U64(LENGTH), Arg::U64(answers.addr().0)];
    bed.start(code, "lay", shape, &args).wait().unwrap();
    exported.check().unwrap();
    all_said(&answers, threads, 0, what);

    let count = threads * chains;
    let ends = bed.gpu.alloc(Place::PinnedHost, END * count as usize).unwrap();
    let start = Instant::now();
    let args = [queue, data, Arg::U32(HOPS), Arg::U64(ends.addr().0)];
    bed.start(code, kernel, shape, &args).wait().unwrap();
    let took = start.elapsed();
    exported.check().unwrap();
    let word = |at| ends.word(at).unwrap();
    let long = |at| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    for first in 0..count {
        let one = |(sum, lba): (u64, u64), _| (sum.wrapping_add(lba * lba), (lba * 5 + 7) % LENGTH);
        let want = (0..HOPS).fold((0, u64::from(first)), one);
        let at = first as usize * END;
        let got = (long(at), long(at + 8));
        let (hops, answer) = (word(at + 16), word(at + 20) as i32);
        assert!(got == want && hops == HOPS && answer == 0, "{what}, {first}: {got:?} {hops} {answer}");
    }
    assert_eq!(exported.recoveries(), 0, "{what}: {:?}", bed.drive.incidents());
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), [], "{what}");
    let each = Duration::from_secs_f64(took.as_secs_f64() / f64::from(HOPS));
    let rate = f64::from(count * HOPS) / took.as_secs_f64();
    report(&format!(
        "{what}, depth {depth}: {count} chains of {HOPS} blocks in {took:?}, {each:?} a hop, {rate:.0} reads/s"
    ));
}

/// This shape, or, if threads of a warp starve each other, one thread in each of at most 32 warps.
fn shaped((blocks, threads): (u32, u32)) -> (u32, u32) {
    if unfair() { ((blocks * threads).min(32), 1) } else { (blocks, threads) }
}

#[test]
fn pointers_are_chased_in_rust() {
    let Some(machine) = Machine::open("pointers_are_chased_in_rust") else { return };
    let code = machine.gpu.link_code(RUST).unwrap();
    let shapes =
        [((1, 1), 31), ((1, 32), 31), ((8, 64), 7), ((8, 64), 1023), ((128, 4), 1023), ((16, 64), 1023)];
    for (shape, depth) in shapes.map(|(shape, depth)| (shaped(shape), depth)) {
        follow(&machine, &format!("Rust, {shape:?}"), &code, "chase", (shape, 1), depth);
    }
}

#[test]
fn pointers_are_chased_in_cpp() {
    let test = "pointers_are_chased_in_cpp";
    let Some(machine) = Machine::open(test) else { return };
    let Some(code) = machine.cpp(test, "pointer_chase.ptx") else { return };
    let shapes = [((1, 1), 31), ((1, 32), 31), ((8, 64), 7), ((8, 64), 1023)];
    for (shape, depth) in shapes.map(|(shape, depth)| (shaped(shape), depth)) {
        follow(&machine, &format!("C++, {shape:?}"), &code, "chase", (shape, 1), depth);
    }
    for (shape, depth) in [((1, 1), 31), ((2, 64), 1023)].map(|(shape, depth)| (shaped(shape), depth)) {
        follow(&machine, &format!("C++, four at once, {shape:?}"), &code, "chase_many", (shape, 4), depth);
    }
}

#[test]
fn what_does_not_link_says_why() {
    let Some(machine) = Machine::open("what_does_not_link_says_why") else { return };
    let broken = RUST.replace("onehop_read", "onehop_rebd");
    let error = machine.gpu.link_code(&broken).err().unwrap().to_string();
    report(&error);
    assert!(error.contains("onehop_rebd"), "{error}");
    assert!(machine.gpu.link_code("nonsense").is_err());
}
