//! Arrays in kernels of CUDA C++: every function of array.h, with hits, misses, evictions, writes and faults.

use std::sync::Arc;
use std::time::Instant;

use onehop_array::{Array, ArrayOptions};
use onehop_drive::Placement;
use onehop_gpu::cuda::{Arg, Code, CudaGpu, Shape};
use onehop_gpu::{Gpu, Place, Region};
use onehop_proto::array::ArrayError;

use crate::{Bed, DATA, LIMIT, Machine, answers_of, media, report};

/// Numbers that differ from run to run.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        report(&format!("seed {}", now.as_nanos() as u64));
        Self(now.as_nanos() as u64)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((u128::from(self.0 >> 11) * u128::from(end)) >> 53) as u64
    }
}

fn ids_in(gpu: &CudaGpu, ids: &[u64]) -> Region {
    let region = gpu.alloc(Place::PinnedHost, ids.len() * 8).unwrap();
    region.write(0, &ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    region
}

fn open(bed: &Bed, cache_bytes: u64, writable: bool) -> Array {
    let ns = bed.drive.namespace(1).unwrap();
    let options = ArrayOptions {
        writable,
        stall: bed.setup.stall,
        limit: bed.setup.limit,
        ..ArrayOptions::new(Placement::TIER1, cache_bytes)
    };
    Array::open(&bed.drive, Arc::new(bed.gpu.clone()), ns, 0..ns.blocks, options).unwrap()
}

#[test]
fn rows_are_right() {
    let test = "rows_are_right";
    let Some(machine) = Machine::open(test) else { return };
    let Some(code) = machine.cpp(test, "arrays.ptx") else { return };
    let (media, mut random) = (media(), Random::new());
    // Everything has room, an eighth has, or next to nothing.
    for cache in [2 * DATA as u64, DATA as u64 / 8, 64 << 12] {
        let bed = machine.bed("", 255);
        bed.inject("reorder@op=read,every=7,by=3");
        let array = open(&bed, cache, false);
        for (name, row, threads) in [
            ("gather64", 256, 256),
            ("gather66", 264, 256),
            ("gather66", 264, 96),
            ("gather66", 264, 50),
            ("gather66_by_tiles", 264, 64),
            ("read66", 264, 64),
        ] {
            let count = (DATA / row) as u64;
            for n in [1, 48, 1536, 5000] {
                let ids: Vec<u64> = (0..n).map(|_| random.below(count)).collect();
                let list = ids_in(&machine.gpu, &ids);
                let out = machine.gpu.alloc(Place::PinnedHost, ids.len() * row).unwrap();
                out.fill(0, ids.len() * row, 0xee).unwrap();
                let answers = bed.answers(n);
                answers.fill(0, n as usize * 4, 0xee).unwrap();
                let blocks = if name == "read66" { n.div_ceil(threads) } else { n.div_ceil(256) };
                let args = [
                    Arg::U64(array.handle().0),
                    Arg::U64(list.addr().0),
                    Arg::U32(n),
                    Arg::U64(out.addr().0),
                    Arg::U64(answers.addr().0),
                ];
                bed.start(&code, name, (blocks, threads), &args).wait().unwrap();
                let what = format!("{name}, cache {cache}, {n} rows by {blocks} × {threads}");
                assert!(answers_of(&answers, n).iter().all(|answer| *answer == 0), "{what}");
                let mut got = vec![0; ids.len() * row];
                out.read(0, &mut got).unwrap();
                for (row_got, id) in got.chunks_exact(row).zip(&ids) {
                    assert!(row_got == &media[*id as usize * row..][..row], "{what}: row {id}");
                }
            }
        }
        let stats = array.stats().unwrap();
        report(&format!("cache of {cache} bytes: {stats:?}"));
        array.close().unwrap();
        assert_eq!(bed.sim.violations(), []);
    }
}

#[test]
fn writes_arrive() {
    let test = "writes_arrive";
    let Some(machine) = Machine::open(test) else { return };
    let Some(code) = machine.cpp(test, "arrays.ptx") else { return };
    let mut random = Random::new();
    for cache in [2 * DATA as u64, DATA as u64 / 64] {
        let bed = machine.bed("", 255);
        let mut expected = media();
        let array = open(&bed, cache, true);
        // All words, inverted in their pages.
        let (words, blocks, threads) = (DATA as u32 / 4, 64, 256);
        let answers = bed.answers(blocks * threads);
        let each = words.div_ceil(blocks * threads);
        let args = [Arg::U64(array.handle().0), Arg::U32(words), Arg::U32(each), Arg::U64(answers.addr().0)];
        bed.start(&code, "invert", (blocks, threads), &args).wait().unwrap();
        assert!(answers_of(&answers, blocks * threads).iter().all(|answer| *answer == 0));
        expected.iter_mut().for_each(|byte| *byte = !*byte);
        // Rows that are in two pages. Each once: of two writers the last would be unknown.
        let (row, n) = (264, 4000);
        let mut ids: Vec<u64> = (0..n).map(|_| random.below((DATA / row) as u64)).collect();
        ids.sort_unstable();
        ids.dedup();
        let n = ids.len() as u32;
        let from: Vec<u8> = (0..ids.len() * row).map(|_| random.below(256) as u8).collect();
        let region = machine.gpu.alloc(Place::PinnedHost, from.len()).unwrap();
        region.write(0, &from).unwrap();
        let (list, answers) = (ids_in(&machine.gpu, &ids), bed.answers(n));
        let [handle, list, region, to] =
            [array.handle(), list.addr(), region.addr(), answers.addr()].map(|addr| Arg::U64(addr.0));
        bed.start(&code, "write66", (n.div_ceil(64), 64), &[handle, list, Arg::U32(n), region, to])
            .wait()
            .unwrap();
        assert!(answers_of(&answers, n).iter().all(|answer| *answer == 0));
        for (id, row_from) in ids.iter().zip(from.chunks_exact(row)) {
            expected[*id as usize * row..][..row].copy_from_slice(row_from);
        }
        let flushed = array.flush().unwrap();
        report(&format!("cache of {cache} bytes: {flushed:?}, {:?}", array.stats().unwrap()));
        array.close().unwrap();
        let mut got = vec![0; DATA];
        bed.sim.read_media(1, 0, &mut got).unwrap();
        let wrong = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
        assert_eq!(wrong, 0, "cache of {cache} bytes");
        assert_eq!(bed.sim.violations(), []);
    }
}

#[test]
fn what_cannot_be_is_answered() {
    let test = "what_cannot_be_is_answered";
    let Some(machine) = Machine::open(test) else { return };
    let Some(code) = machine.cpp(test, "arrays.ptx") else { return };
    let bed = machine.bed("", 63);
    let array = open(&bed, 1 << 20, false);
    let (answers, none) = (bed.answers(9), machine.gpu.alloc(Place::PinnedHost, 4096).unwrap());
    none.fill(0, 4096, 0).unwrap();
    let args = [array.handle(), none.addr(), answers.addr()].map(|addr| Arg::U64(addr.0));
    bed.start(&code, "refusals", (1, 1), &args).wait().unwrap();
    let [end, no_array, read_only] =
        [ArrayError::Range, ArrayError::NoArray, ArrayError::ReadOnly].map(ArrayError::code);
    assert_eq!(answers_of(&answers, 9), [end, end, no_array, no_array, end, -57, read_only, -56, no_array]);
    array.close().unwrap();

    // Pages that the drive cannot read, and a drive that goes away: errors for these rows, and for no others.
    bed.inject("media@lba=800-815");
    let array = open(&bed, 1 << 20, false);
    let ids: Vec<u64> = (0..4096).collect();
    let (list, answers) = (ids_in(&machine.gpu, &ids), bed.answers(4096));
    let out = machine.gpu.alloc(Place::PinnedHost, 4096 * 256).unwrap();
    let [handle, list, to, at] =
        [array.handle(), list.addr(), out.addr(), answers.addr()].map(|addr| Arg::U64(addr.0));
    bed.start(&code, "gather64", (16, 256), &[handle, list, Arg::U32(4096), to, at]).wait().unwrap();
    let (media, mut got) = (media(), vec![0; 4096 * 256]);
    out.read(0, &mut got).unwrap();
    for (i, answer) in answers_of(&answers, 4096).into_iter().enumerate() {
        // Blocks 800 to 815 are pages 100 and 101: rows 1600 to 1631.
        if (1600..1632).contains(&i) {
            assert_eq!(answer & 0x7ff, 0x281, "row {i}");
        } else {
            assert_eq!(answer, 0, "row {i}");
            assert!(got[i * 256..][..256] == media[i * 256..][..256], "row {i}");
        }
    }
    array.close().unwrap();
}

#[test]
fn pins_hold_their_pages() {
    let test = "pins_hold_their_pages";
    let Some(machine) = Machine::open(test) else { return };
    let Some(code) = machine.cpp(test, "arrays.ptx") else { return };
    let (media, mut random) = (media(), Random::new());
    // In a small cache, threads that hold one page while they wait for another may hold all of them: then there is an
    // error, and no hang.
    for (cache, may_fail) in [(2 * DATA as u64, false), (DATA as u64 / 64, true)] {
        let bed = machine.bed("", 255);
        let ns = bed.drive.namespace(1).unwrap();
        let options = ArrayOptions {
            patience: std::time::Duration::from_secs(if may_fail { 1 } else { 20 }),
            ..ArrayOptions::new(Placement::TIER1, cache)
        };
        let array = Array::open(&bed.drive, Arc::new(bed.gpu.clone()), ns, 0..ns.blocks, options).unwrap();
        let n = 4096;
        let ids: Vec<u64> = (0..2 * n).map(|_| random.below(DATA as u64 / 256)).collect();
        let (list, answers) = (ids_in(&machine.gpu, &ids), bed.answers(n));
        let out = bed.answers(n);
        let [handle, list, to, at] =
            [array.handle(), list.addr(), out.addr(), answers.addr()].map(|addr| Arg::U64(addr.0));
        let start = Instant::now();
        bed.start(&code, "two_pins", (n / 64, 64), &[handle, list, Arg::U32(n), to, at]).wait().unwrap();
        let word = |row: u64, word: usize| {
            let at = row as usize * 256 + word * 4;
            i32::from_le_bytes(media[at..at + 4].try_into().unwrap())
        };
        let pairs = ids.chunks_exact(2);
        let mut failed = 0;
        for ((pair, answer), got) in pairs.zip(answers_of(&answers, n)).zip(answers_of(&out, n)) {
            if may_fail && [ArrayError::NoRoom.code(), ArrayError::TimedOut.code()].contains(&answer) {
                failed += 1;
                continue;
            }
            assert_eq!(answer, 0, "rows {pair:?}");
            assert_eq!(got, word(pair[0], 5) ^ word(pair[1], 63), "rows {pair:?}");
        }
        report(&format!("{n} threads with two pins each: {:?}, {failed} without room", start.elapsed()));
        array.close().unwrap();
        assert_eq!(bed.sim.violations(), []);
    }
}

/// Prints how fast hits are, with pages in the GPU's memory, on a drive that the GPU serves.
#[test]
fn hits_are_timed() {
    let test = "hits_are_timed";
    let Some(machine) = Machine::open(test) else { return };
    let Some(code) = machine.cpp(test, "arrays.ptx") else { return };
    let (gpu, mut random) = (&machine.gpu, Random::new());
    let any: Arc<dyn Gpu> = Arc::new(gpu.clone());
    // Before the drive occupies the GPU.
    any.array_kernels().unwrap();
    for name in ["gather64", "read66", "time64", "words"] {
        report(&format!("{name}: {} registers", code.registers(name).unwrap()));
    }
    let drive = onehop_resident::open("mem:64M", any.clone()).unwrap();
    drive.sim().write_media(1, 0, &media()).unwrap();
    let options = onehop_drive::Options { max_transfer: 4096, ..onehop_drive::Options::default() };
    let opened = onehop_drive::Drive::open(drive.port(), options).unwrap();
    let ns = opened.namespace(1).unwrap();
    let options = ArrayOptions::new(Placement::TIER3, 2 * DATA as u64);
    let array = Array::open(&opened, any, ns, 0..ns.blocks, options).unwrap();
    // All pages are read once.
    let rows = array.rows(256, 256);
    let everything: Vec<u64> = (0..rows.count).step_by(16).collect();
    let out = gpu.alloc(Place::Vram, (1 << 20) * 256).unwrap();
    let warm = array.gather(rows, &everything, &out).unwrap();
    assert_eq!(warm.failed, []);
    let handle = || Arg::U64(array.handle().0);
    let run = |code: &Code, name: &str, (blocks, threads): (u32, u32), args: &[Arg]| {
        let shape = Shape { blocks, threads, shared: 0 };
        // SAFETY: the kernel's own arguments; all rows are in the cache, so it ends.
        let started = unsafe { gpu.start_kernel(code, name, shape, args, LIMIT) }.unwrap();
        let begun = Instant::now();
        started.wait().unwrap();
        begun.elapsed()
    };
    for (n, threads) in [(48, 64), (48, 256), (48, 512), (1536, 512)] {
        let rounds = 200;
        let ids: Vec<u64> = (0..n * rounds).map(|_| random.below(rows.count)).collect();
        let on_gpu = gpu.alloc(Place::Vram, ids.len() * 8).unwrap();
        on_gpu.write(0, &ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
        let cycles = gpu.alloc(Place::Vram, rounds as usize * 8).unwrap();
        let [ids, to, at] = [on_gpu.addr(), out.addr(), cycles.addr()].map(|addr| Arg::U64(addr.0));
        run(&code, "time64", (1, threads), &[handle(), ids, Arg::U32(n), Arg::U32(rounds), to, at]);
        let mut taken = vec![0; rounds as usize * 8];
        cycles.read(0, &mut taken).unwrap();
        let mut taken: Vec<u64> =
            taken.chunks_exact(8).map(|eight| u64::from_le_bytes(eight.try_into().unwrap())).collect();
        taken.sort_unstable();
        report(&format!(
            "{n} rows of 256 bytes by one block of {threads}: {} cycles, 99th hundredth {}",
            taken[taken.len() / 2],
            taken[taken.len() * 99 / 100]
        ));
    }
    for (blocks, threads) in [(132, 512), (528, 512), (1024, 256)] {
        let (each, total) = (200, blocks * threads);
        let sums = gpu.alloc(Place::Vram, total as usize * 4).unwrap();
        let mut best = f64::MAX;
        for seed in 0..4 {
            let args = [handle(), Arg::U32(each), Arg::U32(seed), Arg::U64(sums.addr().0)];
            best = best.min(run(&code, "words", (blocks, threads), &args).as_secs_f64());
        }
        let rate = f64::from(total * each) / best / 1e9;
        report(&format!("random words by pins of {blocks} × {threads} threads: {rate:.2} G/s"));
    }
    let ids: Vec<u64> = (0..1 << 20).map(|_| random.below(rows.count)).collect();
    let on_gpu = gpu.alloc(Place::Vram, ids.len() * 8).unwrap();
    on_gpu.write(0, &ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    let answers = gpu.alloc(Place::Vram, ids.len() * 4).unwrap();
    for (blocks, threads) in [(264, 512), (1024, 256), (4096, 256)] {
        let mut best = f64::MAX;
        for _ in 0..5 {
            let [ids, to, at] = [on_gpu.addr(), out.addr(), answers.addr()].map(|addr| Arg::U64(addr.0));
            let args = [handle(), ids, Arg::U32(1 << 20), to, at];
            best = best.min(run(&code, "gather64", (blocks, threads), &args).as_secs_f64());
        }
        report(&format!(
            "2^20 rows of 256 bytes by {blocks} × {threads} threads: {:.2} G rows/s, launch included",
            f64::from(1 << 20) / best / 1e9
        ));
    }
    let mut got = vec![0; ids.len() * 256];
    out.read(0, &mut got).unwrap();
    let media = media();
    for (row, id) in got.chunks_exact(256).zip(&ids) {
        assert!(row == &media[*id as usize * 256..][..256], "row {id}");
    }
    array.close().unwrap();
}
