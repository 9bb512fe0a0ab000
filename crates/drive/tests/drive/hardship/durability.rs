//! A flush that succeeds has made durable what was acknowledged before it, even if something was lost in between.

use std::sync::Arc;
use std::time::Duration;

use onehop_drive::{Buffer, Drive, Error, GpuJob, GpuMode, GpuSetup, IoQueue, Options, Placement};
use onehop_gpu::{Emulated, Gpu};
use onehop_sim::Sim;

use super::options;

/// Reproducible pseudo-random numbers (xorshift).
struct Rng(u64);

impl Rng {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % limit
    }
}

const BLOCKS: u64 = 8;
const BYTES: usize = 512;

struct Host {
    sim: Sim,
    drive: Drive,
    queues: [IoQueue; 2],
    buffer: Buffer,
    /// For each namespace and block what was acknowledged last.
    written: [[u8; BLOCKS as usize]; 2],
}

impl Host {
    fn new(spec: &str) -> Self {
        let sim = onehop_sim::open(spec).unwrap();
        // Each loss of power costs one time-out.
        let options = Options { timeout: Duration::from_millis(20), ..options() };
        let drive = Drive::open(sim.port(), options).unwrap();
        let queues = [drive.queue().unwrap(), drive.queue().unwrap()];
        let buffer = drive.buffer(BYTES).unwrap();
        Self { sim, drive, queues, buffer, written: [[0; 8]; 2] }
    }

    fn write(&mut self, queue: usize, nsid: u32, lba: u64, value: u8) {
        self.buffer.host().unwrap().fill(0, BYTES, value).unwrap();
        self.queues[queue].write(self.drive.namespace(nsid).unwrap(), lba, 1, &self.buffer, 0).unwrap();
        self.written[nsid as usize - 1][lba as usize] = value;
    }

    fn flush(&self, queue: usize, nsid: u32) -> bool {
        match self.queues[queue].flush(self.drive.namespace(nsid).unwrap()) {
            Ok(()) => true,
            Err(Error::WritesLost { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }

    /// The content of a namespace after a power loss.
    fn medium(&self, nsid: u32) -> Vec<u8> {
        self.sim.power_cycle();
        let ns = self.drive.namespace(nsid).unwrap();
        let value = |lba| {
            self.queues[0].read(ns, lba, 1, &self.buffer, 0).unwrap();
            self.buffer.host().unwrap().to_vec(0, 1).unwrap()[0]
        };
        (0..BLOCKS).map(value).collect()
    }
}

#[test]
fn a_flush_of_one_namespace_does_not_vouch_for_another() {
    let mut host = Host::new("mem:1M?vwc=1&ns=2&to=2");
    host.write(0, 1, 0, 7);
    assert!(host.flush(0, 2));
    host.sim.power_cycle();
    assert!(host.flush(0, 2));
    assert!(!host.flush(0, 1));
    assert!(host.flush(0, 1));
}

#[test]
fn every_queue_reports_what_was_lost() {
    let mut host = Host::new("mem:1M?vwc=1&ns=2&to=2");
    host.write(0, 1, 0, 7);
    host.sim.power_cycle();
    assert!(!host.flush(0, 1) && !host.flush(1, 1));
    assert!(host.flush(0, 1) && host.flush(1, 1));
}

#[test]
fn reads_after_a_flush_lose_nothing() {
    let mut host = Host::new("mem:1M?vwc=1&ns=2&to=2");
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let setup = GpuSetup { queues: 1, ..GpuSetup::new(Placement::TIER1) };
    let queues = host.drive.gpu_queues(gpu.clone(), setup).unwrap();
    let (_region, data) = host.drive.gpu_buffer(&*gpu, Placement::TIER1.data, BYTES).unwrap();
    let jobs = [GpuJob { lba: 0, blocks: 1, offset: 0 }];
    host.write(0, 1, 0, 7);
    queues.write(host.drive.namespace(1).unwrap(), &jobs, &data).unwrap();
    assert!(host.flush(0, 1));
    host.queues[0].read(host.drive.namespace(1).unwrap(), 0, 1, &host.buffer, 0).unwrap();
    queues.read(host.drive.namespace(1).unwrap(), &jobs, &data).unwrap();
    host.sim.power_cycle();
    assert!(host.flush(0, 1) && host.flush(1, 1));
}

/// Random writes, flushes and power losses on two namespaces by two queues.
#[test]
fn a_flush_that_succeeds_is_true_wherever_the_power_was_lost() {
    for seed in 1..=12 {
        let mut host = Host::new("mem:1M?vwc=1&ns=2&to=2");
        let mut rng = Rng(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed));
        // Whether a loss was reported since the namespace was last flushed, so that its content is unknown.
        let mut unknown = [false; 2];
        for step in 1..=40u8 {
            let (queue, nsid) = (rng.below(2) as usize, 1 + rng.below(2) as u32);
            match rng.below(8) {
                0..=3 => host.write(queue, nsid, rng.below(BLOCKS), step),
                4 => host.sim.power_cycle(),
                5 => host.drive.reset().unwrap(),
                _ if host.flush(queue, nsid) => {
                    let index = nsid as usize - 1;
                    let medium = host.medium(nsid);
                    if !std::mem::take(&mut unknown[index]) {
                        assert_eq!(medium, host.written[index], "seed {seed}, step {step}");
                    }
                    host.written[index].copy_from_slice(&medium);
                }
                _ => unknown[nsid as usize - 1] = true,
            }
        }
    }
}

#[test]
fn a_flush_in_the_middle_of_a_gpu_job_does_not_vouch_for_its_end() {
    let sim = onehop_sim::open("mem:1M?vwc=1&to=2&fault=late@op=write,delay=30ms").unwrap();
    let options = Options { timeout: Duration::from_millis(300), ..options() };
    let drive = Drive::open(sim.port(), options).unwrap();
    let ns = drive.namespace(1).unwrap();
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let setup = GpuSetup {
        mode: GpuMode::Owner,
        queues: 1,
        depth: 1,
        stall: Duration::from_millis(300),
        ..GpuSetup::new(Placement::TIER1)
    };
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    let (region, data) = drive.gpu_buffer(&*gpu, Placement::TIER1.data, BYTES).unwrap();
    region.write(0, &[9; BYTES]).unwrap();
    let queue = drive.queue().unwrap();
    let jobs: Vec<_> = (0..10).map(|lba| GpuJob { lba, blocks: 1, offset: 0 }).collect();
    std::thread::scope(|scope| {
        let job = scope.spawn(|| queues.write(ns, &jobs, &data).unwrap());
        // Some writes are acknowledged before the flush and some after it, and then the power is lost.
        std::thread::sleep(Duration::from_millis(100));
        queue.flush(ns).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        sim.power_cycle();
        job.join().unwrap();
    });
    let flushed = queue.flush(ns);
    assert!(matches!(flushed, Err(Error::WritesLost { .. })), "{flushed:?}");
    queue.flush(ns).unwrap();
}
