//! A healthy drive: valid requests are executed, invalid ones refused.

use std::time::Duration;

use onehop_drive::{Error, GpuMode, GpuSetup, Placement};
use onehop_gpu::{EmulatedThread, Gpu, Place};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::{Answer, Command, DeviceOp, DeviceQueue, Handle};
use std::sync::Arc;

use super::{BLOCK, BLOCKS, Bed, DATA, bed, bed_with, done, media, patient_bed, setup};

fn read(bed: &Bed, lba: u64, blocks: u32, offset: u64) -> Answer {
    let exported = bed.export(false);
    bed.run(&exported, 1, move |mem, queue, _| queue.run(mem, DeviceOp::Read, lba, blocks, offset))[0]
}

#[test]
fn every_length_at_every_kind_of_offset() {
    let bed = patient_bed("?mdts=9");
    let exported = bed.export(true);
    let most = bed.run(&exported, 1, |mem, queue, _| queue.most_blocks(mem))[0];
    assert_eq!(u64::from(most) * BLOCK, 1 << 20);
    for (lba, blocks, offset) in [
        (0, 1, 0),
        (7, 1, 4096 - 512),
        (7, 1, 4096 - 4),
        (100, 8, 4),
        (100, 9, 8192),
        (1, 17, 4092),
        (5, 2048, 0),
        (5, most, 4),
        (BLOCKS - 2048, 2048, (1 << 20) + 1024 * 255 + 12),
        (9, 2048, DATA as u64 - (1 << 20)),
        (BLOCKS - 1, 1, DATA as u64 - BLOCK),
    ] {
        bed.region.fill(0, DATA, 0xee).unwrap();
        let answer =
            bed.run(&exported, 1, move |mem, queue, _| queue.run(mem, DeviceOp::Read, lba, blocks, offset));
        assert_eq!(answer, [Answer::Done], "{blocks} blocks at {lba} to {offset}");
        let len = u64::from(blocks) * BLOCK;
        assert!(bed.holds(lba, blocks.into(), offset), "{blocks} blocks at {lba} to {offset}");
        let around = [bed.data(0, offset), bed.data(offset + len, DATA as u64 - offset - len)].concat();
        assert!(around.iter().all(|byte| *byte == 0xee), "{blocks} blocks at {lba} to {offset}");
    }
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
    assert!(bed.drive.incidents().is_empty());
}

#[test]
fn what_is_written_is_on_the_drive() {
    let bed = bed("");
    let exported = bed.export(true);
    bed.region.fill(0, DATA, 0xa5).unwrap();
    let answers = bed.run(&exported, 16, |mem, queue, i| {
        queue.run(mem, DeviceOp::Write, u64::from(i) * 40, 40, u64::from(i) * 40 * BLOCK + 4)
    });
    assert!(done(&answers), "{answers:?}");
    let mut blocks = vec![0; 16 * 40 * 512];
    bed.sim.read_media(1, 0, &mut blocks).unwrap();
    assert!(blocks.iter().all(|byte| *byte == 0xa5));
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let bed = bed("?mdts=3");
    let most = (4096 << 3) / 512;
    assert_eq!(read(&bed, 0, 0, 0), Answer::Length);
    assert_eq!(read(&bed, 0, most, 0), Answer::Done);
    assert_eq!(read(&bed, 0, most + 1, 0), Answer::Length);
    assert_eq!(read(&bed, 0, u32::MAX, 0), Answer::Length);
    assert_eq!(read(&bed, BLOCKS - 1, 2, 0), Answer::Range);
    assert_eq!(read(&bed, BLOCKS, 1, 0), Answer::Range);
    assert_eq!(read(&bed, u64::MAX, 1, 0), Answer::Range);
    assert_eq!(read(&bed, 0, 1, DATA as u64 - 508), Answer::Buffer);
    assert_eq!(read(&bed, 0, 1, u64::MAX), Answer::Buffer);
    assert_eq!(read(&bed, 0, 1, 2), Answer::Alignment);
    let exported = bed.export(false);
    let answers = bed.run(&exported, 1, |mem, queue, _| {
        let mut command = Command::NONE;
        [
            queue.run(mem, DeviceOp::Write, 0, 1, 0),
            queue.wait(mem, &mut command),
            queue.test(mem, &mut command),
            queue.submit(mem, DeviceOp::Read, u64::MAX, 1, 0, &mut command),
            queue.wait(mem, &mut command),
        ]
    });
    use Answer::{Range, ReadOnly, Spent};
    assert_eq!(answers, [[ReadOnly, Spent, Spent, Range, Spent]]);
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn only_a_handle_is_a_handle() {
    let bed = bed("");
    let memory = bed.gpu.alloc(Place::Vram, 4096).unwrap();
    let at = memory.addr();
    let none = move |thread: &EmulatedThread, at: GpuAddr| DeviceQueue::open(thread, at).is_none();
    let exported = bed.export(false);
    let mut words = Handle::default().words();
    words[1] += 4;
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    memory.write(256, &bytes).unwrap();
    let all = bed.run(&exported, 1, move |thread, _, _| {
        none(thread, GpuAddr(0)) && none(thread, at) && none(thread, at.plus(256)) && none(thread, at.plus(4))
    });
    assert_eq!(all, [true]);
}

#[test]
fn many_threads_chase_what_they_read() {
    // Each block says which is the next; each thread follows one chain.
    let bed = bed_with("?latency=20us", GpuSetup { depth: 7, ..setup() });
    let (threads, hops) = (24u64, 60u64);
    let mut blocks = vec![0u8; (threads * hops * BLOCK) as usize];
    let next = |lba: u64| (lba * 677 + 13) % (threads * hops);
    for lba in 0..threads * hops {
        blocks[(lba * BLOCK) as usize..][..8].copy_from_slice(&next(lba).to_le_bytes());
    }
    bed.sim.write_media(1, 0, &blocks).unwrap();
    let exported = bed.export(false);
    let base = bed.region.addr();
    let ends = bed.run(&exported, threads as u32, move |mem, queue, index| {
        use onehop_proto::queue::Memory;
        let offset = u64::from(index) * BLOCK;
        let mut lba = u64::from(index);
        for _ in 0..hops {
            let answer = queue.run(mem, DeviceOp::Read, lba, 1, offset);
            assert_eq!(answer, Answer::Done);
            let at = base.plus(offset);
            lba = u64::from(mem.load(at)) | u64::from(mem.load(at.plus(4))) << 32;
        }
        lba
    });
    let want: Vec<u64> = (0..threads).map(|first| (0..hops).fold(first, |lba, _| next(lba))).collect();
    assert_eq!(ends, want);
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn commands_overlap_and_are_told_of_in_any_order() {
    let bed = bed_with("?latency=1ms", GpuSetup { depth: 63, ..setup() });
    let exported = bed.export(false);
    let start = std::time::Instant::now();
    let answers = bed.run(&exported, 3, |mem, queue, index| {
        let mut commands = [Command::NONE; 16];
        for (i, command) in commands.iter_mut().enumerate() {
            let at = u64::from(index) * 16 + i as u64;
            let answer = queue.submit(mem, DeviceOp::Read, at * 3, 3, at * 3 * BLOCK, command);
            assert_eq!(answer, Answer::Pending);
        }
        let mut ends = Vec::new();
        for (i, command) in commands.iter_mut().enumerate().rev() {
            let end = if i % 2 == 0 {
                queue.wait(mem, command)
            } else {
                loop {
                    match queue.test(mem, command) {
                        Answer::Pending => std::thread::yield_now(),
                        end => break end,
                    }
                }
            };
            ends.push(end);
            ends.push(if queue.test(mem, command) == Answer::Spent { Answer::Done } else { Answer::Spent });
        }
        ends
    });
    assert!(answers.iter().all(|ends| ends.len() == 32 && done(ends)), "{answers:?}");
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(bed.holds(0, 48 * 3, 0));
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn a_queue_that_its_own_threads_fill_says_so() {
    let bed = bed_with("", GpuSetup { depth: 3, limit: Duration::from_millis(150), ..setup() });
    let exported = bed.export(false);
    let answers = bed.run(&exported, 1, |mem, queue, _| {
        let mut commands = [Command::NONE; 4];
        let mut said: Vec<Answer> =
            commands.iter_mut().map(|command| queue.submit(mem, DeviceOp::Read, 0, 1, 0, command)).collect();
        said.extend(commands.iter_mut().map(|command| queue.wait(mem, command)));
        said
    });
    use Answer::{Done, Full, Pending, Spent};
    assert_eq!(answers, [[Pending, Pending, Pending, Full, Done, Done, Done, Spent]]);
    assert_eq!(exported.recoveries(), 0);
    exported.revoke().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn queues_lie_wherever_a_placement_says() {
    for placement in [Placement::TIER2, Placement::TIER3, Placement::POSTED] {
        let bed = bed_with("", GpuSetup { placement, ..setup() });
        for _ in 0..3 {
            let exported = bed.export(false);
            let answers = bed.run(&exported, 32, |mem, queue, i| {
                queue.run(mem, DeviceOp::Read, u64::from(i) * 9, 9, u64::from(i) * 9 * BLOCK)
            });
            assert!(done(&answers), "{placement:?}: {answers:?}");
            assert!(bed.holds(0, 32 * 9, 0));
            exported.revoke().unwrap();
        }
        assert_eq!(bed.sim.violations(), []);
    }
}

#[test]
fn what_cannot_be_lent_is_said() {
    let bed = bed("");
    let gpu: Arc<dyn Gpu> = Arc::new(bed.gpu.clone());
    let ns = bed.drive.namespace(1).unwrap();
    let owner = bed.drive.gpu_queues(gpu.clone(), GpuSetup { mode: GpuMode::Owner, ..setup() }).unwrap();
    assert!(matches!(owner.export(ns, &bed.buffer, false), Err(Error::Unsupported { .. })));
    let other = super::bed("");
    let queues = bed.drive.gpu_queues(gpu.clone(), setup()).unwrap();
    assert!(matches!(queues.export(ns, &other.buffer, false), Err(Error::Foreign { .. })));
    let queues = bed.drive.gpu_queues(gpu, setup()).unwrap();
    assert!(matches!(
        queues.export(other.drive.namespace(1).unwrap(), &bed.buffer, false),
        Err(Error::Foreign { .. })
    ));
    // Their numbers are free again.
    for _ in 0..20 {
        bed.export(false).revoke().unwrap();
    }
    assert_eq!(media().len() as u64, BLOCKS * BLOCK);
    assert_eq!(bed.sim.violations(), []);
}
