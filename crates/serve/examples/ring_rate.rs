//! Measures how many cached blocks of a file one ring reads per second, compared with a single thread that calls
//! `preadv2`:
//! `cargo run --release -p onehop-serve --example ring_rate -- [BLOCK [DEPTH [SECONDS [ROUNDS]]]]`
//!
//! Both read the same blocks in the same order, alternately, so that other load on the machine affects both. The
//! program's thread compares the first and last word of each block that the ring read, and every word of every 64th
//! block. Daemon and program run in one process; they share a ring, a buffer and two semaphores, as two processes
//! would.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fs::File;
use std::io::{IoSliceMut, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_serve::{Daemon, MountOptions};
use onehop_usrbio::buffer::{Buffer, Ring};
use onehop_usrbio::mount::Mount;
use onehop_usrbio::ring::Request;
use onehop_usrbio::{Priority, RingName};
use rustix::io::ReadWriteFlags;

const FILE: u64 = 256 << 20;
const WORD: u64 = 8;
/// One block in this many is compared in full.
const CHECK_EVERY: u64 = 64;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let mut next = |otherwise| numbers.next().unwrap_or(Ok(otherwise));
    let (block, depth, seconds, rounds) = (next(4096)?, next(256)?, next(3)?, next(1)?);
    if block == 0 || !block.is_multiple_of(WORD) || block > FILE || depth == 0 || depth > 1 << 16 {
        return Err("BLOCK is a multiple of 8 up to 256 MiB, DEPTH from 1 to 65536".into());
    }

    let dir = std::env::temp_dir().join(format!("onehop-ring-rate-{}", std::process::id()));
    let (root, point) = (dir.join("root"), dir.join("mnt"));
    std::fs::create_dir_all(&root)?;
    std::fs::create_dir_all(&point)?;
    let measured = fill(&root.join("file")).and_then(|()| {
        let daemon = Daemon::start(MountOptions::new(&point, &root))?;
        let time = Duration::from_secs(seconds);
        let measured: Outcome<()> = (0..rounds.max(1)).try_for_each(|_| {
            let bare = by_calls(&root.join("file"), block, time)?;
            let ring = by_ring(&point, block, depth as i32, time)?;
            let (of, rate) = (ring / bare, ring * block as f64 / 1e9);
            println!(
                "{block} bytes, {depth} at once: {ring:.0} reads/s, {rate:.2} GB/s; preadv2 {bare:.0}; ratio {of:.3}"
            );
            Ok(())
        });
        daemon.end()?;
        measured
    });
    std::fs::remove_dir_all(&dir)?;
    measured
}

/// The file's word at an offset.
fn word(at: u64) -> u64 {
    (at / WORD).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at
}

fn fill(path: &Path) -> Outcome<()> {
    let mut file = std::io::BufWriter::with_capacity(1 << 20, File::create(path)?);
    for at in (0..FILE).step_by(WORD as usize) {
        file.write_all(&word(at).to_le_bytes())?;
    }
    Ok(file.flush()?)
}

/// Pseudo-random block offsets.
struct Offsets {
    seed: u64,
    block: u64,
}

impl Offsets {
    fn next(&mut self) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 16) % (FILE / self.block) * self.block
    }
}

/// Compares a block that was read with the file. `count` is its number.
fn check(count: u64, at: u64, block: u64, read: impl Fn(u64) -> Outcome<u64>) -> Outcome<()> {
    let step = if count.is_multiple_of(CHECK_EVERY) { WORD } else { (block - WORD).max(WORD) };
    for offset in (0..block).step_by(step as usize) {
        let (found, wanted) = (read(offset)?, word(at + offset));
        if found != wanted {
            return Err(format!("at {}: read {found:#x}, expected {wanted:#x}", at + offset).into());
        }
    }
    Ok(())
}

/// Reads with `preadv2` from one thread. Returns reads per second.
fn by_calls(path: &Path, block: u64, time: Duration) -> Outcome<f64> {
    let (file, mut bytes) = (File::open(path)?, vec![0; block as usize]);
    let (mut offsets, mut count, start) = (Offsets { seed: 1, block }, 0_u64, Instant::now());
    // Reading the clock has a cost too: do it as often as the ring does.
    while !count.is_multiple_of(64) || start.elapsed() < time {
        let at = offsets.next();
        let read =
            rustix::io::preadv2(&file, &mut [IoSliceMut::new(&mut bytes)], at, ReadWriteFlags::empty())?;
        if read != bytes.len() {
            return Err(format!("a call read {read} bytes").into());
        }
        // Checking every block would take this thread's time from reading.
        if count.is_multiple_of(CHECK_EVERY) {
            check(count, at, block, |offset| {
                let offset = offset as usize;
                Ok(u64::from_le_bytes(bytes[offset..offset + WORD as usize].try_into()?))
            })?;
        }
        count += 1;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

/// Reads through a ring. Returns reads per second.
fn by_ring(point: &Path, block: u64, depth: i32, time: Duration) -> Outcome<f64> {
    // A registered ring may only use files that its user has open.
    let file = File::open(point.join("file"))?;
    let inode = file.metadata()?.ino();
    let mount = Arc::new(Mount::open(point)?);
    let buffer = Buffer::create(&mount, block as usize * depth as usize, 0, None)?;
    let name =
        RingName { read: true, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };
    let ring = Ring::create(&mount, depth, name, None)?;
    let mut done = Vec::new();
    let (mut offsets, mut count, mut in_flight) = (Offsets { seed: 1, block }, 0_u64, 0);
    // Free blocks of the buffer, and the file offset that each block is read from.
    let mut free: Vec<u64> = (0..depth as u64).collect();
    let mut blocks = vec![0; depth as usize];
    let start = Instant::now();
    while start.elapsed() < time || in_flight > 0 {
        let over = start.elapsed() >= time;
        while !over && let Some(place) = free.pop() {
            let at = offsets.next();
            blocks[place as usize] = at;
            let (buffer, offset) = (buffer.id(), place * block);
            ring.prepare(&Request { buffer, offset, inode, at, len: block, userdata: place })?;
            in_flight += 1;
        }
        ring.submit();
        done.clear();
        let least = if over { in_flight } else { (depth as usize / 4).max(1) };
        in_flight -= ring.wait(&mut done, (least, depth as usize), None, Duration::from_millis(1))?;
        for one in &done {
            if one.result != block as i64 {
                return Err(format!("a read returned {}", one.result).into());
            }
            check(count, blocks[one.userdata as usize], block, |offset| {
                let mut bytes = [0; WORD as usize];
                buffer.memory().read((one.userdata * block + offset) as usize, &mut bytes)?;
                Ok(u64::from_le_bytes(bytes))
            })?;
            count += 1;
            free.push(one.userdata);
        }
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}
