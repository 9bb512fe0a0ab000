//! Copies of many ranges, by the copy engine and by the kernel.

use onehop_gpu::{CopyRange, Gpu, Place, Region};

use crate::{bench, bytes_of, memory::memfd, random, report};

const BYTES: usize = 24 << 20;

/// Ranges of many lengths from one memory to another, at places that do not overlap, and what the other then has.
fn ranges(seed: u64, from: &[u8], to: &mut [u8]) -> Vec<CopyRange> {
    let dice = random(seed, 8192);
    let (mut ranges, mut at) = (Vec::new(), 0);
    for dice in dice.chunks(4) {
        let bytes =
            [0, 1, 16, 48, 100, 512, 4096, 4112, 8192, 65_536, 300_000, 1 << 20][dice[0] as usize % 12];
        let gap = [0, 16, 5, 4096][dice[1] as usize % 4];
        if at + gap + bytes > to.len() {
            break;
        }
        let start = (dice[2] as usize * 91_000 + dice[3] as usize * 16) % (from.len() - bytes);
        let start = if dice[1] & 4 == 0 { start / 16 * 16 } else { start };
        at += gap;
        to[at..at + bytes].copy_from_slice(&from[start..start + bytes]);
        ranges.push(CopyRange { from: (0, start), to: (1, at), bytes });
        at += bytes;
    }
    ranges
}

#[test]
fn ranges_arrive_in_every_kind_of_memory() {
    let Some(bench) = bench("ranges_arrive_in_every_kind_of_memory") else { return };
    let gpu = &bench.gpu;
    let host = |region: &Region| region.place() == Place::PinnedHost;
    let kinds = [
        gpu.alloc(Place::Vram, BYTES).unwrap(),
        gpu.arena(BYTES).unwrap(),
        gpu.alloc(Place::PinnedHost, BYTES).unwrap(),
        gpu.adopt(Place::PinnedHost, memfd(BYTES)).unwrap(),
    ];
    let mut seed = 0;
    for kernel_below in [0, 32 << 10, 2 << 20] {
        let mut copier = gpu.range_copier(kernel_below).unwrap();
        for from in &kinds {
            for to in kinds.iter().filter(|to| to.addr() != from.addr() && !(host(from) && host(to))) {
                seed += 1;
                let data = random(seed, BYTES);
                from.write(0, &data).unwrap();
                to.fill(0, BYTES, 0).unwrap();
                let mut expected = vec![0; BYTES];
                let ranges = ranges(seed, &data, &mut expected);
                assert!(ranges.len() > 50, "{}", ranges.len());
                let memories = [from.clone(), to.clone()];
                let (first, second) = ranges.split_at(ranges.len() / 3);
                copier.start(&memories, first).unwrap();
                copier.start(&memories, second).unwrap();
                copier.wait().unwrap();
                assert!(bytes_of(to) == expected, "{kernel_below}: {from:?} to {to:?}");
            }
        }
        let memories = [kinds[0].clone(), kinds[2].clone()];
        let outside = CopyRange { from: (0, BYTES - 8), to: (1, 0), bytes: 16 };
        assert!(copier.start(&memories, &[outside]).is_err());
    }
    // Every entry of the lists is used: more than fit into the first.
    let mut copier = gpu.range_copier(1 << 20).unwrap();
    let data = random(99, BYTES);
    kinds[2].write(0, &data).unwrap();
    let page = |n: usize| CopyRange { from: (0, n * 4096), to: (1, BYTES - (n + 1) * 4096), bytes: 4096 };
    let pages: Vec<CopyRange> = (0..BYTES / 4096).map(page).collect();
    copier.start(&[kinds[2].clone(), kinds[1].clone()], &pages).unwrap();
    copier.start(&[kinds[2].clone(), kinds[0].clone()], &pages).unwrap();
    copier.wait().unwrap();
    let backwards: Vec<u8> = data.chunks(4096).rev().flatten().copied().collect();
    assert!(bytes_of(&kinds[1]) == backwards && bytes_of(&kinds[0]) == backwards);
}

/// Rates are printed, not judged: they belong to the machine.
#[test]
fn rates_of_short_ranges() {
    let Some(bench) = bench("rates_of_short_ranges") else { return };
    let gpu = &bench.gpu;
    let vram = gpu.alloc(Place::Vram, 64 << 20).unwrap();
    let hosts = [
        ("pinned", gpu.alloc(Place::PinnedHost, 64 << 20).unwrap()),
        ("memfd", gpu.adopt(Place::PinnedHost, memfd(64 << 20)).unwrap()),
    ];
    for (name, host) in hosts {
        for bytes in [4 << 10, 64 << 10, 1 << 20] {
            for (way, memories) in
                [("in", [host.clone(), vram.clone()]), ("out", [vram.clone(), host.clone()])]
            {
                let mut rates = Vec::new();
                for kernel_below in [0, usize::MAX] {
                    let mut copier = gpu.range_copier(kernel_below).unwrap();
                    let count = (32 << 20) / bytes;
                    let page = |n: usize| CopyRange {
                        from: (0, n * 7919 % count * 2 * bytes),
                        to: (1, n * 104_729 % count * 2 * bytes),
                        bytes,
                    };
                    let pages: Vec<CopyRange> = (0..count).map(page).collect();
                    let mut best = 0.0_f64;
                    for _ in 0..4 {
                        let begun = std::time::Instant::now();
                        copier.start(&memories, &pages).unwrap();
                        copier.wait().unwrap();
                        best = best.max((count * bytes) as f64 / begun.elapsed().as_secs_f64() / 1e9);
                    }
                    rates.push(best);
                }
                report(&format!(
                    "{name} {way}, {bytes} bytes: copy engine {:.1} GB/s, kernel {:.1}",
                    rates[0], rates[1]
                ));
            }
        }
    }
}
