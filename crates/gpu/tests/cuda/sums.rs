//! Checksums by the kernel and by the CPU, over the same random bytes.

use std::time::Instant;

use onehop_gpu::{Gpu, Place, Sums};

use crate::{bench, random, report};

const MIB: usize = 1 << 20;

/// A sanitizer makes kernels about a thousand times slower.
fn number(name: &str, otherwise: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn memory_has_the_sums_that_a_cpu_computes() {
    let Some(bench) = bench("memory_has_the_sums_that_a_cpu_computes") else { return };
    let gpu = &bench.gpu;
    // Each run has other bytes and ranges.
    let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    report(&format!("seed {seed}"));
    let (count, large) = (number("ONEHOP_GPU_RANGES", 2000), number("ONEHOP_GPU_MIB", 4096) * MIB);
    let data = random(seed, large.min(64 * MIB));
    let region = gpu.alloc(Place::Vram, data.len()).unwrap();
    region.write(0, &data).unwrap();
    let mut state = seed | 1;
    let mut ranges = vec![(0, data.len() as u64), (1, 0), (3, 5)];
    for _ in 0..count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (at, most) = ((state >> 8) % data.len() as u64, 1 << (state % 24));
        ranges.push((at, (state >> 40 & (most - 1)).min(data.len() as u64 - at)));
    }
    let mut sums = Sums::new(gpu).unwrap();
    let found = sums.crc32c(gpu, &region, &ranges, &|| true).unwrap().unwrap();
    for ((at, bytes), sum) in ranges.into_iter().zip(found) {
        assert_eq!(sum, crc32c::crc32c(&data[at as usize..(at + bytes) as usize]), "{bytes} bytes at {at}");
    }
    let large = gpu.alloc(Place::Vram, large).unwrap();
    for _ in 0..3 {
        let begun = Instant::now();
        sums.crc32c(gpu, &large, &[(0, large.len() as u64)], &|| true).unwrap().unwrap();
        let rate = large.len() as f64 / begun.elapsed().as_secs_f64() / 1e9;
        report(&format!("CRC32C of {} MiB of GPU memory: {rate:.0} GB/s", large.len() / MIB));
    }
}
