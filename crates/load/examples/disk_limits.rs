//! Measures a disk with threads that only read past the page cache: `disk_limits ROUNDS SETTINGS FILE...`. A setting is
//! THREADSxKIB or THREADSxKIBxBUFFERS: the number of threads, the size of each read, and the buffers that a thread uses
//! in turn, as in `disk_limits 8 16x512,8x512,8x512x4 model.safetensors`. The settings take turns. Memory is in huge
//! pages. Files are read sequentially; the rest of each is read at its end. Also reports how many reads complete
//! together: virtual disks may complete all at once.
#![allow(clippy::unwrap_used, reason = "an example may fail")]

use std::fs::File;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use onehop_os::page_cache::open_direct;

/// Reads that complete further apart do not count as together.
const APART: Duration = Duration::from_micros(100);

fn main() {
    let mut args = std::env::args().skip(1);
    let rounds: usize = args.next().unwrap().parse().unwrap();
    let settings = args.next().unwrap();
    let settings: Vec<&str> = settings.split(',').collect();
    let files: Vec<File> =
        args.map(|path| open_direct(&File::open(path).unwrap()).unwrap().unwrap().0).collect();
    let mut rates = vec![Vec::new(); settings.len()];
    let mut groups = vec![Vec::new(); settings.len()];
    for round in 0..rounds {
        // The first setting of a round finds the disk in another state, so it changes.
        for turn in 0..settings.len() {
            let which = (round + turn) % settings.len();
            let (rate, together) = read(settings[which], &files);
            rates[which].push(rate);
            groups[which].extend(together);
        }
    }
    for ((setting, rates), groups) in settings.iter().zip(&rates).zip(groups) {
        let each: Vec<_> = rates.iter().map(|rate| format!("{rate:.2}")).collect();
        let (middle, together) = (median(rates.clone()), median(groups));
        println!(
            "{setting:<12} median of {rounds} {middle:.2} GB/s, {together:.0} end together: {}",
            each.join(" ")
        );
    }
}

/// The median, of an even count the mean of the middle two; 0 if there are none.
fn median(mut of: Vec<f64>) -> f64 {
    of.sort_unstable_by(f64::total_cmp);
    let at = |i: usize| of.get(i).copied().unwrap_or(0.0);
    f64::midpoint(at(of.len().saturating_sub(1) / 2), at(of.len() / 2))
}

/// GB/s by this setting, and for each read how many ended together with it, itself among them.
fn read(setting: &str, files: &[File]) -> (f64, Vec<f64>) {
    let numbers: Vec<usize> = setting.split('x').map(|n| n.parse().unwrap()).collect();
    let (threads, bytes, buffers) = (numbers[0], numbers[1] << 10, numbers.get(2).copied().unwrap_or(1));
    let memory = HostMem::touched(threads * buffers * bytes).unwrap();
    let whole = |file: &File| file.metadata().unwrap().len() as usize / bytes;
    let blocks: Vec<_> =
        files.iter().flat_map(|file| (0..whole(file)).map(move |i| (file, i * bytes))).collect();
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    let mut ends = std::thread::scope(|scope| {
        let reader = |thread| {
            let (memory, blocks, next) = (&memory, &blocks, &next);
            scope.spawn(move || {
                let mut ends = Vec::new();
                for turn in 0.. {
                    let Some((file, at)) = blocks.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                    let to = (thread * buffers + turn % buffers) * bytes;
                    assert_eq!(memory.read_file(to, bytes, file, *at as u64).unwrap(), bytes);
                    ends.push(start.elapsed());
                }
                ends
            })
        };
        let readers: Vec<_> = (0..threads).map(reader).collect();
        readers.into_iter().flat_map(|reader| reader.join().unwrap()).collect::<Vec<_>>()
    });
    let rate = (blocks.len() * bytes) as f64 / 1e9 / start.elapsed().as_secs_f64();
    ends.sort_unstable();
    let together = ends.chunk_by(|a, b| *b - *a < APART);
    (rate, together.flat_map(|group| vec![group.len() as f64; group.len()]).collect())
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn of_an_even_count_the_mean_of_the_middle_two() {
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(Vec::new()), 0.0);
    }
}
