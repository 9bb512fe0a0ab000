//! Queues exported to kernels that onehop did not write: what their functions answer, with healthy and faulty drives.

mod answers;
mod faults;
mod flushes;
mod qemu;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_drive::{Buffer, Drive, ExportedQueue, GpuMode, GpuSetup, Options, Placement};
use onehop_gpu::{Emulated, EmulatedThread, Region};
use onehop_proto::kernel::{Answer, DeviceQueue};
use onehop_sim::{Fault, Sim};

/// Blocks of the simulated drive.
const BLOCKS: u64 = 32768;
const BLOCK: u64 = 512;
const DATA: usize = 3 << 20;

/// A drive whose queues are exported to the emulated GPU.
struct Bed {
    sim: Sim,
    drive: Drive,
    gpu: Emulated,
    region: Region,
    buffer: Buffer,
    setup: GpuSetup,
}

fn setup() -> GpuSetup {
    GpuSetup {
        mode: GpuMode::Shared { threads: 1 },
        stall: Duration::from_millis(250),
        limit: Duration::from_secs(10),
        ..GpuSetup::new(Placement::TIER1)
    }
}

fn bed_with(options: &str, setup: GpuSetup) -> Bed {
    bed_of(options, setup, Duration::from_millis(500))
}

/// A bed whose host waits this long for an admin command.
fn bed_waiting(admin_timeout: Duration) -> Bed {
    bed_of("?to=1", setup(), admin_timeout)
}

fn bed_of(options: &str, setup: GpuSetup, admin_timeout: Duration) -> Bed {
    let sim = onehop_sim::open(&format!("mem:16M{options}")).unwrap();
    sim.write_media(1, 0, &media()).unwrap();
    let times = Options {
        writable: true,
        timeout: Duration::from_millis(60),
        abort_wait: Duration::from_millis(40),
        admin_timeout,
        ready_limit: Duration::from_millis(600),
        retries: 2,
        ..Options::default()
    };
    let drive = Drive::open(sim.port(), times).unwrap();
    let gpu = Emulated::new();
    let (region, buffer) = drive.gpu_buffer(&gpu, setup.placement.data, DATA).unwrap();
    Bed { sim, drive, gpu, region, buffer, setup }
}

fn bed(options: &str) -> Bed {
    bed_with(options, setup())
}

/// A bed whose drive loses nothing: a stall of the machine must not count as a fault.
fn patient_bed(options: &str) -> Bed {
    bed_with(options, GpuSetup { stall: Duration::from_secs(5), ..setup() })
}

/// The drive's content: no two blocks are equal.
fn media() -> Vec<u8> {
    (0..BLOCKS * BLOCK / 4)
        .flat_map(|i| ((i as u32).wrapping_mul(0x9e37_79b9) ^ (i >> 7) as u32).to_le_bytes())
        .collect()
}

impl Bed {
    fn export(&self, writable: bool) -> ExportedQueue {
        let queues = self.drive.gpu_queues(Arc::new(self.gpu.clone()), self.setup).unwrap();
        queues.export(self.drive.namespace(1).unwrap(), &self.buffer, writable).unwrap()
    }

    /// Runs a kernel of so many threads to its end; returns the result of each.
    fn run<R: Send + 'static>(
        &self,
        exported: &ExportedQueue,
        threads: u32,
        kernel: impl Fn(&EmulatedThread, &DeviceQueue<EmulatedThread>, u32) -> R + Send + Sync + 'static,
    ) -> Vec<R> {
        let handle = exported.handle();
        let said: Arc<Mutex<Vec<(u32, R)>>> = Arc::default();
        let answers = said.clone();
        let running = self.gpu.start(threads, move |thread, index| {
            let queue = DeviceQueue::open(thread, handle).unwrap();
            let answer = kernel(thread, &queue, index);
            answers.lock().unwrap().push((index, answer));
        });
        running.unwrap().join().unwrap();
        let mut said = std::mem::take(&mut *said.lock().unwrap());
        said.sort_by_key(|(index, _)| *index);
        said.into_iter().map(|(_, answer)| answer).collect()
    }

    fn inject(&self, fault: &str) {
        self.sim.inject(Fault::parse(fault).unwrap());
    }

    fn data(&self, offset: u64, bytes: u64) -> Vec<u8> {
        let mut data = vec![0; bytes as usize];
        self.region.read(offset as usize, &mut data).unwrap();
        data
    }

    /// Whether these blocks lie at an offset of the data memory.
    fn holds(&self, lba: u64, blocks: u64, offset: u64) -> bool {
        let (at, len) = ((lba * BLOCK) as usize, blocks * BLOCK);
        self.data(offset, len) == media()[at..at + len as usize]
    }
}

/// Waits until a condition holds.
fn until(what: &str, f: impl Fn() -> bool) {
    let start = Instant::now();
    while !f() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn done(answers: &[Answer]) -> bool {
    answers.iter().all(|answer| *answer == Answer::Done)
}
