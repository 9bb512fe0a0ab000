//! How many blocks of a file in the page cache go through one ring in a second, beside one thread that only calls `preadv2`:
//! `cargo run --release -p onehop-serve --example ring_rate -- [BLOCK [DEPTH [SECONDS [ROUNDS]]]]`
//!
//! Both read the same blocks in the same order, in turns, so that what else the machine does concerns both. Of the ring's blocks the
//! first and the last word are compared with the file's, and all words of every 64th block, by the program's thread. Daemon and
//! program are one process here, which makes no difference to what is shared: a ring, a buffer, two semaphores.
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
/// Of so many blocks one is compared in full.
const EACH: u64 = 64;

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

/// What a word of the file is, by where it is.
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

/// Where the next read goes.
struct Places {
    seed: u64,
    block: u64,
}

impl Places {
    fn next(&mut self) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 16) % (FILE / self.block) * self.block
    }
}

/// Whether a block that was read is the file's, as the `count`-th.
fn check(count: u64, at: u64, block: u64, read: impl Fn(u64) -> Outcome<u64>) -> Outcome<()> {
    let step = if count.is_multiple_of(EACH) { WORD } else { (block - WORD).max(WORD) };
    for offset in (0..block).step_by(step as usize) {
        let (found, wanted) = (read(offset)?, word(at + offset));
        if found != wanted {
            return Err(format!("at {}: {found:#x} was read, {wanted:#x} is there", at + offset).into());
        }
    }
    Ok(())
}

/// One thread that reads by calls; gives its rate.
fn by_calls(path: &Path, block: u64, time: Duration) -> Outcome<f64> {
    let (file, mut bytes) = (File::open(path)?, vec![0; block as usize]);
    let (mut places, mut count, start) = (Places { seed: 1, block }, 0_u64, Instant::now());
    // A look at the clock costs something, too: as often as the ring has one.
    while !count.is_multiple_of(64) || start.elapsed() < time {
        let at = places.next();
        let read =
            rustix::io::preadv2(&file, &mut [IoSliceMut::new(&mut bytes)], at, ReadWriteFlags::empty())?;
        if read != bytes.len() {
            return Err(format!("a call read {read} bytes").into());
        }
        // Not each: this thread would do it instead of reading.
        if count.is_multiple_of(EACH) {
            check(count, at, block, |offset| {
                let offset = offset as usize;
                Ok(u64::from_le_bytes(bytes[offset..offset + WORD as usize].try_into()?))
            })?;
        }
        count += 1;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

/// A ring; gives its rate.
fn by_ring(point: &Path, block: u64, depth: i32, time: Duration) -> Outcome<f64> {
    // Registered rings are kept apart by the file that their program has open.
    let file = File::open(point.join("file"))?;
    let inode = file.metadata()?.ino();
    let mount = Arc::new(Mount::open(point)?);
    let buffer = Buffer::create(&mount, block as usize * depth as usize, 0, None)?;
    let name =
        RingName { read: true, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };
    let ring = Ring::create(&mount, depth, name, None)?;
    let mut done = Vec::new();
    let (mut places, mut count, mut under_way) = (Places { seed: 1, block }, 0_u64, 0);
    // Where in the buffer nobody reads to, and which block each place has.
    let mut free: Vec<u64> = (0..depth as u64).collect();
    let mut blocks = vec![0; depth as usize];
    let start = Instant::now();
    while start.elapsed() < time || under_way > 0 {
        let over = start.elapsed() >= time;
        while !over && let Some(place) = free.pop() {
            let at = places.next();
            blocks[place as usize] = at;
            let (buffer, offset) = (buffer.id(), place * block);
            ring.prepare(&Request { buffer, offset, inode, at, len: block, userdata: place })?;
            under_way += 1;
        }
        ring.submit();
        done.clear();
        let least = if over { under_way } else { (depth as usize / 4).max(1) };
        under_way -= ring.wait(&mut done, (least, depth as usize), None, Duration::from_millis(1))?;
        for one in &done {
            if one.result != block as i64 {
                return Err(format!("a read gave {}", one.result).into());
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
