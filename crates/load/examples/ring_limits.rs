//! Measures a machine part by part: `ring_limits FILE [THREADS…]` lets threads read memory and copy it, and read a file
//! into slots of pinned memory, with and without copies to the GPU.
#![allow(clippy::unwrap_used, reason = "an example may fail")]

use std::fs::File;
use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use onehop_gpu::cuda::Cuda;
use onehop_gpu::{Gpu, Place, Rows};
use onehop_os::{DmaMemory, HostMem};

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap();
    let threads: Vec<usize> = args.map(|n| n.parse().unwrap()).collect();
    let file = File::open(&path).unwrap();
    let bytes = file.metadata().unwrap().len();
    let gpu = Cuda::load().and_then(|cuda| cuda.open("0")).ok();
    let memory = vec![1_u64; 2 << 27];
    for &count in &threads {
        let looked = through(&memory, count, |part, _| part.iter().fold(0, |sum, word| sum ^ word));
        let copied = through(&memory, count, |part, slot| {
            let slot = &mut slot[..part.len()];
            slot.copy_from_slice(part);
            black_box(slot)[0]
        });
        println!(
            "memory {count:>2} threads: looked at {looked:>6.2} GB/s, copied to a slot {copied:>6.2} GB/s"
        );
    }
    drop(memory);
    for slot in [1_usize << 20, 2 << 20, 4 << 20] {
        for &count in &threads {
            for mode in ["read", "read and copy", "copy", "one stream: read and copy", "one stream: copy"] {
                if mode != "read" && gpu.is_none() {
                    continue;
                }
                let (rate, [fill, wait]) =
                    run(&file, bytes, slot, count, mode, gpu.as_ref().map(|g| g as &dyn Gpu));
                println!(
                    "{mode:<26} slot {:>2} MiB {count:>2} threads {rate:>6.2} GB/s; a thread: filling {fill:.3} s, waiting {wait:.3} s",
                    slot >> 20
                );
            }
        }
    }
}

/// GB/s of threads that process memory in units of 2 MiB, each with its own slot.
fn through(memory: &[u64], count: usize, work: impl Fn(&[u64], &mut [u64]) -> u64 + Sync) -> f64 {
    const WORDS: usize = 1 << 18;
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| {
                let mut slot = vec![0; WORDS];
                while let Some(part) = memory.chunks(WORDS).nth(next.fetch_add(1, Ordering::Relaxed)) {
                    black_box(work(part, &mut slot));
                }
            });
        }
    });
    size_of_val(memory) as f64 / 1e9 / start.elapsed().as_secs_f64()
}

fn run(
    file: &File,
    bytes: u64,
    slot: usize,
    count: usize,
    mode: &str,
    gpu: Option<&dyn Gpu>,
) -> (f64, [f64; 2]) {
    let ring = HostMem::touched(2 * slot * count).unwrap();
    let pinned =
        gpu.filter(|_| mode != "read").map(|gpu| gpu.adopt(Place::PinnedHost, ring.clone()).unwrap());
    let arena = gpu.filter(|_| mode.contains("copy")).map(|gpu| gpu.arena(4 << 30).unwrap());
    let next = AtomicU64::new(0);
    let one = arena
        .as_ref()
        .filter(|_| mode.starts_with("one"))
        .map(|arena| Mutex::new(gpu.unwrap().copier(pinned.as_ref().unwrap(), arena).unwrap()));
    let (fills, waits) = (AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for i in 0..count {
            let (ring, next, fills, waits, one) = (&ring, &next, &fills, &waits, &one);
            let copier = arena.as_ref().filter(|_| one.is_none()).map(|arena| {
                let part = pinned.as_ref().unwrap().slice(i * 2 * slot..(i + 1) * 2 * slot).unwrap();
                assert!(part.host().is_some());
                gpu.unwrap().copier(&part, arena).unwrap()
            });
            scope.spawn(move || {
                let mut copier = copier;
                let (mut marks, mut turn) = ([None, None], 0);
                let (mut fill, mut wait) = (Duration::ZERO, Duration::ZERO);
                loop {
                    let at = next.fetch_add(slot as u64, Ordering::Relaxed);
                    if at >= bytes {
                        break;
                    }
                    let begin = Instant::now();
                    if let (Some(copier), Some(mark)) = (&mut copier, marks[turn]) {
                        copier.wait(mark).unwrap();
                    }
                    if let (Some(one), Some(mark)) = (&one, marks[turn]) {
                        while !one.lock().unwrap().is_over(mark).unwrap() {
                            std::thread::sleep(Duration::from_micros(5));
                        }
                    }
                    wait += begin.elapsed();
                    let begin = Instant::now();
                    if mode.contains("read") {
                        ring.read_file((2 * i + turn) * slot, slot, file, at).unwrap();
                    }
                    fill += begin.elapsed();
                    if let Some(copier) = &mut copier {
                        let to = (at % (4 << 30)) as usize;
                        copier.copy(&Rows { from: turn * slot, to, row: slot, rows: 1, step: slot }).unwrap();
                        marks[turn] = Some(copier.mark().unwrap());
                    }
                    if let Some(one) = &one {
                        let to = (at % (4 << 30)) as usize;
                        let mut one = one.lock().unwrap();
                        let from = (2 * i + turn) * slot;
                        one.copy(&Rows { from, to, row: slot, rows: 1, step: slot }).unwrap();
                        marks[turn] = Some(one.mark().unwrap());
                    }
                    turn ^= 1;
                }
                drop(copier);
                fills.fetch_add(fill.as_micros() as u64, Ordering::Relaxed);
                waits.fetch_add(wait.as_micros() as u64, Ordering::Relaxed);
            });
        }
    });
    if let Some(one) = &one {
        let mut one = one.lock().unwrap();
        let mark = one.mark().unwrap();
        one.wait(mark).unwrap();
    }
    let rate = bytes as f64 / 1e9 / start.elapsed().as_secs_f64();
    let each = |sum: AtomicU64| sum.load(Ordering::Relaxed) as f64 / 1e6 / count as f64;
    (rate, [each(fills), each(waits)])
}
