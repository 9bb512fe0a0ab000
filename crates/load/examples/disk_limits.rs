//! What a disk gives to threads that do nothing but read past the page cache: `disk_limits ROUNDS SETTINGS FILE...`, where a
//! setting is THREADSxKIB or THREADSxKIBxBUFFERS: so many threads, each reading so much at a time into so many buffers in turn, as in
//! `disk_limits 8 16x512,8x512,8x512x4 model.safetensors`. The settings take turns; memory is in huge pages; files are read in
//! order, but for what is left of each at its end.
#![allow(clippy::unwrap_used, reason = "an example may fail")]

use std::fs::File;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use onehop_os::HostMem;
use onehop_os::page_cache::open_direct;

fn main() {
    let mut args = std::env::args().skip(1);
    let rounds: usize = args.next().unwrap().parse().unwrap();
    let settings = args.next().unwrap();
    let settings: Vec<&str> = settings.split(',').collect();
    let files: Vec<File> =
        args.map(|path| open_direct(&File::open(path).unwrap()).unwrap().unwrap().0).collect();
    let mut rates = vec![Vec::new(); settings.len()];
    for round in 0..rounds {
        // Whoever goes first finds the disk as nobody else does.
        for turn in 0..settings.len() {
            let which = (round + turn) % settings.len();
            rates[which].push(rate(settings[which], &files));
        }
    }
    for (setting, rates) in settings.iter().zip(&rates) {
        let mut sorted = rates.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let each: Vec<_> = rates.iter().map(|rate| format!("{rate:.2}")).collect();
        println!("{setting:<12} median {:.2} GB/s: {}", sorted[sorted.len() / 2], each.join(" "));
    }
}

/// GB/s by this setting.
fn rate(setting: &str, files: &[File]) -> f64 {
    let numbers: Vec<usize> = setting.split('x').map(|n| n.parse().unwrap()).collect();
    let (threads, bytes, buffers) = (numbers[0], numbers[1] << 10, numbers.get(2).copied().unwrap_or(1));
    let memory = HostMem::touched(threads * buffers * bytes).unwrap();
    let whole = |file: &File| file.metadata().unwrap().len() as usize / bytes;
    let pieces: Vec<_> =
        files.iter().flat_map(|file| (0..whole(file)).map(move |i| (file, i * bytes))).collect();
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (memory, pieces, next) = (&memory, &pieces, &next);
            scope.spawn(move || {
                for turn in 0.. {
                    let Some((file, at)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                    let to = (thread * buffers + turn % buffers) * bytes;
                    assert_eq!(memory.read_file(to, bytes, file, *at as u64).unwrap(), bytes);
                }
            });
        }
    });
    (pieces.len() * bytes) as f64 / 1e9 / start.elapsed().as_secs_f64()
}
