//! Entries before their doorbell, data before its completion: with the fence that the queues have, and with less.

use std::time::Duration;

use onehop_controller::layout::{Litmus, Tally, control};
use onehop_controller::litmus::strength;
use onehop_gpu::cuda::Rig as Kernel;
use onehop_gpu::{Gpu, Place};

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
    let reader = rig.gpu.start_rig(&rig.code, kernels.1, lists[1].addr(), pairs, LIMIT).unwrap();
    let writer = rig.gpu.start_rig(&rig.code, kernels.0, lists[0].addr(), pairs, LIMIT).unwrap();
    writer.wait().unwrap();
    reader.wait().unwrap();
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

#[test]
fn entries_are_there_before_their_doorbell() {
    let Some(rig) = Rig::open("entries_are_there_before_their_doorbell") else { return };
    sweep(&rig, "entry before doorbell", (Kernel::Submit, Kernel::Fetch), 16);
}

#[test]
fn data_is_there_before_its_completion() {
    let Some(rig) = Rig::open("data_is_there_before_its_completion") else { return };
    sweep(&rig, "data before completion", (Kernel::Complete, Kernel::Consume), 1024);
}
