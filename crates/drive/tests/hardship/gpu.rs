//! GPU-driven queues under hardship.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, GpuJob, GpuSetup, Options, Placement};
use onehop_gpu::{Copier, Doorbells, Emulated, Gpu, KernelJob, Launch, Place, Region, Running};
use onehop_os::{HostMem, Registers};
use onehop_proto::kernel::Exit;

use crate::{inject, open};

fn emulated() -> Arc<dyn Gpu> {
    Arc::new(Emulated::new())
}

#[test]
fn two_threads_share_one_set_of_queues() {
    let sim = onehop_sim::open("mem:16M").unwrap();
    let len = 1usize << 18;
    let data: Vec<u8> = (0..2 * len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    sim.write_media(1, 0, &data).unwrap();
    let drive = Drive::open(sim.port(), Options { max_transfer: 4096, ..Options::default() }).unwrap();
    let (ns, gpu) = (drive.namespace(1).unwrap(), emulated());
    let queues = drive.gpu_queues(gpu.clone(), GpuSetup::new(Placement::TIER1)).unwrap();
    std::thread::scope(|scope| {
        for part in 0..2 {
            let (queues, drive, gpu, data) = (&queues, &drive, &gpu, &data);
            scope.spawn(move || {
                let (region, buffer) = drive.gpu_buffer(&**gpu, Place::PinnedHost, len).unwrap();
                let job = GpuJob { lba: (part * len / 512) as u64, blocks: len as u64 / 512, offset: 0 };
                for _ in 0..5 {
                    queues.read(ns, &[job], &buffer).unwrap();
                    let mut got = vec![0; len];
                    region.read(0, &mut got).unwrap();
                    assert!(got == data[part * len..][..len]);
                }
            });
        }
    });
    assert!(drive.incidents().is_empty());
    assert_eq!(sim.violations(), []);
}

#[test]
fn absurd_jobs_are_refused_before_anything_is_allocated() {
    let (_sim, drive) = open("mem:1M");
    let (ns, gpu) = (drive.namespace(1).unwrap(), emulated());
    let queues = drive.gpu_queues(gpu.clone(), GpuSetup::new(Placement::TIER1)).unwrap();
    let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
    let read = |lba, blocks, offset| queues.read(ns, &[GpuJob { lba, blocks, offset }], &buffer);
    assert!(matches!(read(0, u64::MAX, 0), Err(Error::Range { .. })));
    assert!(matches!(read(u64::MAX, 1, 0), Err(Error::Range { .. })));
    assert!(matches!(read(0, 9, 0), Err(Error::Buffer { .. })));
    assert!(matches!(read(0, 1, u64::MAX), Err(Error::Buffer { .. })));
    assert_eq!(read(0, 8, 0).unwrap().commands, 1);
}

/// A GPU whose launches end in an error, after they have begun.
struct Failing(Emulated);

struct Killed(Box<dyn Running>);

impl Running for Killed {
    fn is_done(&self) -> bool {
        self.0.is_done()
    }
    fn join(self: Box<Self>) -> onehop_gpu::Result<Vec<Exit>> {
        let _ = self.0.join();
        Err(onehop_gpu::Error::Launch("the context was killed".into()))
    }
}

impl Gpu for Failing {
    fn name(&self) -> &str {
        "failing"
    }
    fn simulated(&self) -> bool {
        true
    }
    fn alloc(&self, place: Place, bytes: usize) -> onehop_gpu::Result<Region> {
        self.0.alloc(place, bytes)
    }
    fn adopt(&self, place: Place, mem: HostMem) -> onehop_gpu::Result<Region> {
        self.0.adopt(place, mem)
    }
    fn copier(&self, from: &Region, to: &Region) -> onehop_gpu::Result<Box<dyn Copier>> {
        self.0.copier(from, to)
    }
    fn map_registers(&self, regs: Arc<dyn Registers>) -> onehop_gpu::Result<Doorbells> {
        self.0.map_registers(regs)
    }
    fn prepare(&self, launch: &Launch) -> onehop_gpu::Result<()> {
        self.0.prepare(launch)
    }
    fn launch(&self, launch: &Launch, job: &KernelJob) -> onehop_gpu::Result<Box<dyn Running>> {
        Ok(Box::new(Killed(self.0.launch(launch, job)?)))
    }
}

#[test]
fn a_launch_that_fails_leaves_nothing_in_flight() {
    let (sim, drive) = open("mem:1M?fault=late@every=1,delay=400ms");
    let gpu: Arc<dyn Gpu> = Arc::new(Failing(Emulated::new()));
    let setup = GpuSetup { limit: Duration::from_millis(50), ..GpuSetup::new(Placement::TIER1) };
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    {
        let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 65536).unwrap();
        let job = GpuJob { lba: 0, blocks: 64, offset: 0 };
        let end = queues.read(drive.namespace(1).unwrap(), &[job], &buffer);
        assert!(matches!(end, Err(Error::Gpu(_))), "{end:?}");
    }
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(sim.violations(), []);
}

#[test]
fn a_job_ends_with_its_time() {
    let sim = onehop_sim::open("mem:16M?latency=2ms").unwrap();
    let drive = Drive::open(sim.port(), Options { max_transfer: 4096, ..Options::default() }).unwrap();
    let gpu = emulated();
    let setup =
        GpuSetup { limit: Duration::from_millis(50), queues: 1, depth: 4, ..GpuSetup::new(Placement::TIER1) };
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4 << 20).unwrap();
    let start = Instant::now();
    let end =
        queues.read(drive.namespace(1).unwrap(), &[GpuJob { lba: 0, blocks: 8192, offset: 0 }], &buffer);
    // All of it would take half a second.
    assert!(matches!(end, Err(Error::Launch { done: 1..1024, count: 1024, .. })), "{end:?}");
    assert!(start.elapsed() < Duration::from_millis(400));
    assert_eq!(drive.incidents().len(), 1);
}

#[test]
fn queues_created_in_part_are_taken_back() {
    let (sim, drive) = open("mem:1M?to=1");
    let (ns, gpu) = (drive.namespace(1).unwrap(), emulated());
    let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
    inject(&sim, "lost@op=create-cq,n=2");
    {
        let queues = drive.gpu_queues(gpu.clone(), GpuSetup::new(Placement::TIER1)).unwrap();
        let job = [GpuJob { lba: 0, blocks: 8, offset: 0 }];
        assert!(matches!(queues.read(ns, &job, &buffer), Err(Error::NoAnswer { .. })));
        queues.read(ns, &job, &buffer).unwrap();
    }
    drive.queue().unwrap();
    assert_eq!(sim.violations(), []);
}
