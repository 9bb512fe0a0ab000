//! Completions under another command's identifier, together with a second fault of that other command.

use std::sync::Arc;
use std::time::Duration;

use onehop_drive::{Drive, Error, GpuJob, GpuMode, GpuSetup, Io, Op, Options, Placement};
use onehop_gpu::{Emulated, Gpu};
use onehop_sim::Sim;

use super::{inject, options};

const BYTES: usize = 256 << 10;
/// Commands of eight blocks.
const COMMAND: u64 = 4096;
const BLOCKS: u64 = BYTES as u64 / 512;

fn open() -> (Sim, Drive) {
    let sim = onehop_sim::open(&format!("mem:{BYTES}?lba=512")).unwrap();
    let options = Options { max_transfer: COMMAND, timeout: Duration::from_millis(100), ..options() };
    let drive = Drive::open(sim.port(), options).unwrap();
    (sim, drive)
}

fn bytes(seed: u32) -> Vec<u8> {
    (0..BYTES as u32 / 4).flat_map(|i| (i.wrapping_mul(0x9e37_79b9) ^ seed).to_le_bytes()).collect()
}

/// In owner mode, and in shared mode.
fn gpu_queues(drive: &Drive, gpu: &Arc<dyn Gpu>) -> Vec<onehop_drive::GpuQueues> {
    let modes = [GpuMode::Owner, GpuMode::Shared { threads: 8 }];
    let setup = |mode| GpuSetup { mode, depth: 16, ..GpuSetup::new(Placement::TIER1) };
    modes.into_iter().map(|mode| drive.gpu_queues(gpu.clone(), setup(mode)).unwrap()).collect()
}

/// The garbled try has overwritten the nonces when the other command's success arrives.
#[test]
fn a_read_is_not_believed_that_another_command_s_success_ended() {
    let (sim, drive) = open();
    let ns = drive.namespace(1).unwrap();
    let media = bytes(1);
    sim.write_media(1, 0, &media).unwrap();
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let (region, on_gpu) = drive.gpu_buffer(&*gpu, onehop_gpu::Place::PinnedHost, BYTES).unwrap();
    let job = [GpuJob { lba: 0, blocks: BLOCKS, offset: 0 }];
    let mut got = vec![0; BYTES];
    for round in 0..2 {
        for queues in gpu_queues(&drive, &gpu) {
            inject(&sim, "other-cid@op=read,n=16");
            inject(&sim, "garbled@op=read,n=17");
            queues.read(ns, &job, &on_gpu).unwrap();
            region.read(0, &mut got).unwrap();
            assert!(got == media, "round {round}, GPU");
        }
        let (queue, buffer) = (drive.queue().unwrap(), drive.buffer(BYTES).unwrap());
        inject(&sim, "other-cid@op=read,n=16");
        inject(&sim, "garbled@op=read,n=17");
        queue.read(ns, 0, BLOCKS, &buffer, 0).unwrap();
        buffer.host().unwrap().read(0, &mut got).unwrap();
        assert!(got == media, "round {round}, CPU");
    }
}

/// No completion is unexpected here: the command that was completed under the wrong identifier looks lost, and the lost
/// one looks completed.
#[test]
fn a_write_is_not_believed_that_another_command_s_success_ended() {
    let (sim, drive) = open();
    let ns = drive.namespace(1).unwrap();
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let (region, on_gpu) = drive.gpu_buffer(&*gpu, onehop_gpu::Place::PinnedHost, BYTES).unwrap();
    let job = [GpuJob { lba: 0, blocks: BLOCKS, offset: 0 }];
    let mut there = vec![0; BYTES];
    for round in 0..2 {
        for (which, queues) in gpu_queues(&drive, &gpu).iter().enumerate() {
            let data = bytes(round * 8 + which as u32);
            region.write(0, &data).unwrap();
            inject(&sim, "other-cid@op=write,n=3");
            inject(&sim, "lost@op=write,n=2");
            queues.write(ns, &job, &on_gpu).unwrap();
            sim.read_media(1, 0, &mut there).unwrap();
            assert!(there == data, "round {round}, GPU");
        }
        let (queue, buffer) = (drive.queue().unwrap(), drive.buffer(BYTES).unwrap());
        let data = bytes(round * 8 + 7);
        buffer.host().unwrap().write(0, &data).unwrap();
        inject(&sim, "other-cid@op=write,n=3");
        inject(&sim, "lost@op=write,n=2");
        queue.write(ns, 0, BLOCKS, &buffer, 0).unwrap();
        sim.read_media(1, 0, &mut there).unwrap();
        assert!(there == data, "round {round}, CPU");
    }
}

/// A controller that does it every time is not trusted in the end.
#[test]
fn a_controller_that_goes_on_mixing_up_commands_is_an_error() {
    let (sim, drive) = open();
    let ns = drive.namespace(1).unwrap();
    let (queue, buffer) = (drive.queue().unwrap(), drive.buffer(BYTES).unwrap());
    inject(&sim, "wrong-cid@op=read,every=30");
    let error = queue.read(ns, 0, BLOCKS, &buffer, 0).unwrap_err();
    // As its own time-outs happen to come first or last.
    assert!(matches!(error, Error::WrongCompletions { times: 3, .. } | Error::TimedOut { .. }), "{error}");
    queue.read(ns, 0, 8, &buffer, 0).unwrap();
}

/// A write that was acknowledged, then another one and a flush that are handed over together: the write is completed under
/// the flush's identifier, and the flush is lost.
fn mixed_up_flush(beside: impl FnOnce(&Sim, &onehop_drive::IoQueue)) -> Result<u8, Error> {
    let sim = onehop_sim::open("mem:1M?vwc=1&to=1").unwrap();
    let drive = Drive::open(sim.port(), options()).unwrap();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(512).unwrap();
    buffer.host().unwrap().fill(0, 512, 7).unwrap();
    queue.write(ns, 0, 1, &buffer, 0).unwrap();
    inject(&sim, "other-cid@op=write,n=1");
    inject(&sim, "lost@op=flush,n=1");
    let (write, flush) = {
        let mut batch = queue.batch().unwrap();
        let write = batch.submit(ns, &Io::new(Op::Write, 8, 1, &buffer, 0)).unwrap();
        (write, batch.submit(ns, &Io::flush()).unwrap())
    };
    beside(&sim, &queue);
    queue.wait(flush)?;
    // Late as it seemed, the write was aborted, or sent again.
    let _ = queue.wait(write);
    sim.power_cycle();
    queue.read(ns, 0, 1, &buffer, 0).unwrap();
    Ok(buffer.host().unwrap().to_vec(0, 1).unwrap()[0])
}

#[test]
fn a_flush_is_not_believed_that_another_command_s_success_ended() {
    assert_eq!(mixed_up_flush(|_, _| ()).unwrap(), 7);
}

/// The power goes when the flush seems to have ended.
#[test]
fn nor_does_it_count_as_durable_what_is_lost_then() {
    let lost = mixed_up_flush(|sim, queue| {
        while queue.poll().unwrap() == 0 {
            std::thread::yield_now();
        }
        sim.power_cycle();
    });
    assert!(matches!(lost, Err(Error::WritesLost { .. })), "{lost:?}");
}

#[test]
fn a_flush_waits_for_the_commands_beside_it() {
    let sim = onehop_sim::open("mem:1M?vwc=1&fault=late@op=write,n=2,delay=300ms").unwrap();
    let drive = Drive::open(sim.port(), Options { timeout: Duration::from_secs(60), ..options() }).unwrap();
    let (ns, queue, buffer) =
        (drive.namespace(1).unwrap(), drive.queue().unwrap(), drive.buffer(512).unwrap());
    queue.write(ns, 0, 1, &buffer, 0).unwrap();
    let write = queue.submit(ns, &Io::new(Op::Write, 8, 1, &buffer, 0)).unwrap();
    queue.flush(ns).unwrap();
    assert!(queue.test(write).is_some_and(|end| end.is_ok()));
    assert!(drive.incidents().is_empty());
    assert_eq!(sim.violations(), []);
}
