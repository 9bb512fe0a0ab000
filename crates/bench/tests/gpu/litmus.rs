//! Entries before their doorbell, data before its completion: with the fence that the queues have, and with less.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use onehop_controller::layout::{Litmus, Tally, control};
use onehop_controller::litmus::{pattern, strength};
use onehop_gpu::cuda::Rig as Kernel;
use onehop_gpu::{Gpu, Place, Region};
use onehop_os::{DmaMemory, HostMem};

use crate::{Rig, get, number, put};

const LIMIT: Duration = Duration::from_secs(30);
const SLOTS: u32 = 64;

/// What the reader of each pair saw, summed up: good, stale, torn, alien.
fn experiment(
    rig: &Rig,
    kernels: (Kernel, Kernel),
    payload: Place,
    words: u32,
    fence: u32,
    pairs: u32,
    messages: u32,
) -> [u64; 4] {
    let (count, slots) = (pairs as usize, SLOTS as usize);
    let payload_bytes = slots * words as usize * 4;
    let payloads = rig.gpu.alloc(payload, count * payload_bytes).unwrap();
    let flags = rig.vram(count * slots * 16);
    let (taken, tallies, word) = (rig.vram(count * 128), rig.vram(count * 2 * 128), rig.vram(4096));
    let lists = [rig.vram(count * Litmus::BYTES as usize), rig.vram(count * Litmus::BYTES as usize)];
    for region in [&payloads, &flags, &taken, &tallies] {
        region.fill(0, region.len(), 0).unwrap();
    }
    word.signal(0, control::RUN).unwrap();
    for (side, list) in lists.iter().enumerate() {
        for i in 0..count {
            let setup = Litmus {
                payload: payloads.addr().plus((i * payload_bytes) as u64),
                flags: flags.addr().plus((i * slots * 16) as u64),
                taken: taken.addr().plus(i as u64 * 128),
                tally: tallies.addr().plus((i * 2 + side) as u64 * 128),
                control: word.addr(),
                limit: LIMIT.as_nanos() as u64,
                slots: SLOTS,
                words,
                batch: 32,
                messages,
                fence,
                relaxed: 0,
                checks: side as u32,
                ..Litmus::default()
            };
            put(list, i * Litmus::BYTES as usize, &setup.words());
        }
    }
    let start = |kernel, list: &Region| rig.gpu.start_rig(&rig.code, kernel, list, pairs, LIMIT).unwrap();
    if messages < SLOTS {
        // Nothing has to wait for room: one after the other, as under a tool that never runs two kernels at once.
        start(kernels.0, &lists[0]).wait().unwrap();
        start(kernels.1, &lists[1]).wait().unwrap();
    } else {
        let reader = start(kernels.1, &lists[1]);
        start(kernels.0, &lists[0]).wait().unwrap();
        reader.wait().unwrap();
    }
    let mut sums = [0; 4];
    for i in 0..count {
        let tally = Tally::from_words(&get::<8>(&tallies, (i * 2 + 1) * 128));
        assert_eq!(tally.messages, messages, "pair {i}: {tally:?}");
        for (sum, seen) in sums.iter_mut().zip([tally.good, tally.stale, tally.torn, tally.alien]) {
            *sum += u64::from(seen);
        }
    }
    sums
}

fn sweep(rig: &Rig, name: &str, kernels: (Kernel, Kernel), words: u32) {
    let messages = number("ONEHOP_LITMUS_MESSAGES", 200_000) as u32;
    let mut caught = 0;
    for (place, place_name) in [(Place::Vram, "vram"), (Place::PinnedHost, "host")] {
        for (fence, fence_name) in
            [(strength::SYSTEM, "system"), (strength::GPU, "gpu"), (strength::NONE, "none")]
        {
            for pairs in [1, 16, 64] {
                let [good, stale, torn, alien] =
                    experiment(rig, kernels, place, words, fence, pairs, messages / pairs.min(16));
                println!(
                    "{name}: payload in {place_name}, fence {fence_name}, {pairs} pairs: {good} good, {stale} stale, \
                     {torn} torn, {alien} alien"
                );
                if fence == strength::SYSTEM {
                    assert_eq!((stale, torn, alien), (0, 0, 0), "{name} with the queues' own fence");
                } else if fence == strength::NONE {
                    caught += stale + torn + alien;
                }
            }
        }
    }
    assert!(caught > 0, "{name}: nothing was seen without the fence, so nothing is shown with it");
}

/// The same as the rig's `fetch`, by a CPU thread: what the GPU wrote to host memory is seen from the other side of the
/// bus there. Gives good, stale and torn entries.
fn fetch_on_cpu(mem: &HostMem, messages: u32, limit: Duration) -> [u64; 3] {
    let (start, mut done, mut seen) = (Instant::now(), 0u32, [0; 3]);
    while done != messages {
        let tail = mem.word(DOOR).unwrap().load(Ordering::Acquire);
        if tail == done {
            assert!(start.elapsed() < limit, "the writer stopped at {done} of {messages}");
            std::hint::spin_loop();
            continue;
        }
        for message in done..tail {
            let at = (message % SLOTS) as usize * 64;
            let words = (0..16).map(|i| mem.word(at + i * 4).unwrap().load(Ordering::Relaxed));
            let new = words.zip(0..).filter(|(word, i)| *word == pattern(message, *i)).count();
            seen[match new {
                16 => 0,
                0 => 1,
                _ => 2,
            }] += 1;
        }
        done = tail;
        mem.word(TAKEN).unwrap().store(done, Ordering::Release);
    }
    seen
}

/// Where a pair's doorbell and acknowledgement lie, behind its entries.
const DOOR: usize = SLOTS as usize * 64;
const TAKEN: usize = DOOR + 128;
const PAIR: usize = 8192;

fn entries_to_cpu(rig: &Rig, fence: u32, pairs: usize, messages: u32) -> [u64; 3] {
    let memory = rig.gpu.alloc(Place::PinnedHost, pairs * PAIR).unwrap();
    let (tallies, word) = (rig.vram(pairs * 128), rig.vram(4096));
    let list = rig.vram(pairs * Litmus::BYTES as usize);
    memory.fill(0, memory.len(), 0).unwrap();
    tallies.fill(0, tallies.len(), 0).unwrap();
    word.signal(0, control::RUN).unwrap();
    for i in 0..pairs {
        let at = memory.addr().plus((i * PAIR) as u64);
        let setup = Litmus {
            payload: at,
            flags: at.plus(DOOR as u64),
            taken: at.plus(TAKEN as u64),
            tally: tallies.addr().plus(i as u64 * 128),
            control: word.addr(),
            limit: LIMIT.as_nanos() as u64,
            slots: SLOTS,
            words: 16,
            batch: 32,
            messages,
            fence,
            ..Litmus::default()
        };
        put(&list, i * Litmus::BYTES as usize, &setup.words());
    }
    let writer = rig.gpu.start_rig(&rig.code, Kernel::Submit, &list, pairs as u32, LIMIT).unwrap();
    let host = memory.host().unwrap().clone();
    let mut sums = [0; 3];
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..pairs)
            .map(|i| {
                let mem = host.slice(i * PAIR..(i + 1) * PAIR).unwrap();
                scope.spawn(move || fetch_on_cpu(&mem, messages, LIMIT))
            })
            .collect();
        for reader in readers {
            for (sum, seen) in sums.iter_mut().zip(reader.join().unwrap()) {
                *sum += seen;
            }
        }
    });
    writer.wait().unwrap();
    sums
}

/// Rounds in which a weaker fence must show an error.
const MOST_ROUNDS: u32 = 12;

/// Entries in host memory, read by the CPU, where a weak fence shows errors. Within the GPU's own memory none was ever seen.
#[test]
fn entries_are_there_before_their_doorbell() {
    let Some(rig) = Rig::open("entries_are_there_before_their_doorbell") else { return };
    let kernels = (Kernel::Submit, Kernel::Fetch);
    let messages = number("ONEHOP_LITMUS_MESSAGES", 200_000) as u32;
    for pairs in [1, 16, 64] {
        let seen = experiment(&rig, kernels, Place::Vram, 16, strength::SYSTEM, pairs, messages);
        println!("entry before doorbell: in vram, read by the GPU, fence system, {pairs} pairs: {seen:?}");
        assert_eq!(seen[1..], [0, 0, 0]);
    }
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let pairs = cores.saturating_sub(2).clamp(1, 16);
    // Some runs of a weaker fence show nothing. The right one is then tried as often as it takes to catch one.
    for round in 0..MOST_ROUNDS {
        let mut caught = 0;
        for (fence, name) in [(strength::SYSTEM, "system"), (strength::GPU, "gpu"), (strength::NONE, "none")]
        {
            let [good, stale, torn] = entries_to_cpu(&rig, fence, pairs, messages);
            println!(
                "entry before doorbell: in host memory, read by the CPU, fence {name}, {pairs} pairs, round {round}: {good} \
                 good, {stale} stale, {torn} torn"
            );
            if fence == strength::SYSTEM {
                assert_eq!((stale, torn), (0, 0), "with the queues' own fence");
            } else {
                caught += stale + torn;
            }
        }
        if caught > 0 {
            return;
        }
    }
    panic!("nothing was seen with weaker fences, so nothing is shown with the right one");
}

#[test]
fn data_is_there_before_its_completion() {
    let Some(rig) = Rig::open("data_is_there_before_its_completion") else { return };
    sweep(&rig, "data before completion", (Kernel::Complete, Kernel::Consume), 1024);
}

/// All four kernels alone, in an order in which none waits for another: for compute-sanitizer.
#[test]
fn each_of_the_kernels_ends_by_itself() {
    let Some(rig) = Rig::open("each_of_the_kernels_ends_by_itself") else { return };
    for (kernels, words) in
        [((Kernel::Submit, Kernel::Fetch), 16), ((Kernel::Complete, Kernel::Consume), 1024)]
    {
        let seen = experiment(&rig, kernels, Place::Vram, words, strength::SYSTEM, 2, SLOTS - 1);
        assert_eq!(seen, [2 * u64::from(SLOTS - 1), 0, 0, 0]);
    }
}
