//! How many blocks of a file in the page cache go through one ring in a second:
//! `cargo run --release -p onehop-serve --example ring_rate -- [BLOCK [DEPTH [SECONDS]]]`
//!
//! Daemon and program are one process here, which makes no difference to what is shared: a ring, a buffer, two semaphores.
#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_serve::{Daemon, Options};
use onehop_usrbio::buffer::{Buffer, Ring};
use onehop_usrbio::mount::Mount;
use onehop_usrbio::ring::Request;
use onehop_usrbio::{Priority, RingName};

const FILE: u64 = 256 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let mut next = |otherwise| numbers.next().unwrap_or(Ok(otherwise));
    let (block, depth, seconds) = (next(4096)?, next(256)?, next(3)?);

    let dir = std::env::temp_dir().join(format!("onehop-ring-rate-{}", std::process::id()));
    let (root, point) = (dir.join("root"), dir.join("mnt"));
    std::fs::create_dir_all(&root)?;
    std::fs::create_dir_all(&point)?;
    std::fs::write(root.join("file"), vec![1; FILE as usize])?;
    let daemon = Daemon::start(Options::new(&point, &root))?;
    let rate = measure(&point, block, depth as i32, Duration::from_secs(seconds));
    daemon.end()?;
    std::fs::remove_dir_all(&dir)?;
    let rate = rate?;
    println!("{block} bytes, {depth} at once: {rate:.0} reads/s, {:.2} GB/s", rate * block as f64 / 1e9);
    Ok(())
}

fn measure(point: &std::path::Path, block: u64, depth: i32, time: Duration) -> Result<f64, Box<dyn Error>> {
    use std::os::unix::fs::MetadataExt;
    // Registered rings are kept apart by the file that their program has open.
    let file = std::fs::File::open(point.join("file"))?;
    let inode = file.metadata()?.ino();
    let mount = Arc::new(Mount::open(point)?);
    let buffer = Buffer::create(&mount, block as usize * depth as usize, 0, None)?;
    let name =
        RingName { read: true, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };
    let ring = Ring::create(&mount, depth, name, None)?;
    let mut done = Vec::new();
    let (mut seed, mut count, mut under_way) = (1_u64, 0_u64, 0);
    // Where in the buffer nobody reads to.
    let mut places: Vec<u64> = (0..depth as u64).collect();
    let start = Instant::now();
    while start.elapsed() < time || under_way > 0 {
        let over = start.elapsed() >= time;
        while !over && let Some(place) = places.pop() {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (seed >> 16) % (FILE / block) * block;
            ring.prepare(&Request {
                buffer: buffer.id(),
                offset: place * block,
                inode,
                at,
                len: block,
                userdata: place,
            })?;
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
            count += 1;
            places.push(one.userdata);
        }
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}
