//! GPU-driven queues under hardship.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, GpuJob, GpuMode, GpuSetup, Options, Placement, Recovery};
use onehop_gpu::{Copier, Doorbells, Emulated, Gpu, KernelJob, Launch, Place, Region, Running};
use onehop_os::{ControllerBackend, DmaMemory, HostMem, Mapped, Mapper, Registers};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::Exit;
use onehop_proto::regs::{Cc, offset};
use onehop_sim::Sim;

use super::{open, options};

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
fn memory_of_a_launch_is_used_again() {
    let sim = onehop_sim::open("mem:4M?fault=fail@lba=4000-4000").unwrap();
    let drive = Drive::open(sim.port(), Options { max_transfer: 16384, ..options() }).unwrap();
    let (ns, gpu) = (drive.namespace(1).unwrap(), emulated());
    let queues = drive.gpu_queues(gpu.clone(), GpuSetup::new(Placement::TIER1)).unwrap();
    let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 2 << 20).unwrap();
    let read = |blocks, lba| queues.read(ns, &[GpuJob { lba, blocks, offset: 0 }], &buffer);
    let allocations = |blocks| read(blocks, 0).unwrap().allocations;
    // Lists and the launch itself; then longer lists alone, as launches have whole pages.
    assert_eq!((allocations(1024), allocations(1024), allocations(8)), (2, 0, 0));
    assert_eq!((allocations(3072), allocations(2048)), (1, 0));
    // The memory of a failed job is not reused before the job is known to be over.
    read(64, 3968).unwrap_err();
    assert!(allocations(1024) > 0 && allocations(1024) == 0);
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
    let (sim, drive) = open("mem:1M?fault=late@every=1,delay=3s");
    let gpu: Arc<dyn Gpu> = Arc::new(Failing(Emulated::new()));
    let setup = GpuSetup { limit: Duration::from_secs(1), ..GpuSetup::new(Placement::TIER1) };
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    {
        let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 65536).unwrap();
        let job = GpuJob { lba: 0, blocks: 64, offset: 0 };
        let end = queues.read(drive.namespace(1).unwrap(), &[job], &buffer);
        assert!(matches!(end, Err(Error::Gpu(_))), "{end:?}");
    }
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(sim.violations(), []);
}

/// A killed kernel may have left half an entry or a doorbell behind, even if its outcomes look complete.
#[test]
fn a_killed_kernel_is_recovered_by_a_reset() {
    let (sim, drive) = open("mem:1M");
    let gpu: Arc<dyn Gpu> = Arc::new(Failing(Emulated::new()));
    let queues = drive.gpu_queues(gpu.clone(), GpuSetup::new(Placement::TIER1)).unwrap();
    let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
    let job = [GpuJob { lba: 0, blocks: 8, offset: 0 }];
    let end = queues.read(drive.namespace(1).unwrap(), &job, &buffer);
    assert!(matches!(end, Err(Error::Gpu(_))), "{end:?}");
    assert_eq!(recoveries(&drive), [Recovery::ControllerReset]);
    assert_eq!(sim.violations(), []);
}

fn recoveries(drive: &Drive) -> Vec<Recovery> {
    drive.incidents().iter().map(|incident| incident.recovery).collect()
}

/// The address of memory whose owner orders other devices' writes.
const ORDERED: GpuAddr = GpuAddr(0xfee0_0000);

/// The emulated GPU with other launches, for which only memory at [`ORDERED`] is ordered.
struct Launching<F> {
    gpu: Emulated,
    start: F,
}

/// A launch that does not begin before another program's kernel ends, which fills the GPU.
struct Queued {
    occupied: Arc<AtomicBool>,
}

impl Running for Queued {
    fn is_done(&self) -> bool {
        !self.occupied.load(Ordering::Relaxed)
    }
    fn join(self: Box<Self>) -> onehop_gpu::Result<Vec<Exit>> {
        panic!("waited for a kernel that does not end");
    }
}

impl<F> Gpu for Launching<F>
where
    F: Fn(&Emulated, &Launch, &KernelJob) -> onehop_gpu::Result<Box<dyn Running>> + Send + Sync,
{
    fn name(&self) -> &str {
        "launching"
    }
    fn simulated(&self) -> bool {
        true
    }
    fn own_memory(&self) -> bool {
        true
    }
    fn orders_device_writes(&self, at: GpuAddr) -> onehop_gpu::Result<()> {
        if at == ORDERED {
            return Ok(());
        }
        let why = "it does not order them".to_owned();
        Err(onehop_gpu::Error::NotSupported { what: "seeing another device's writes".into(), why })
    }
    fn alloc(&self, place: Place, bytes: usize) -> onehop_gpu::Result<Region> {
        self.gpu.alloc(place, bytes)
    }
    fn adopt(&self, place: Place, mem: HostMem) -> onehop_gpu::Result<Region> {
        self.gpu.adopt(place, mem)
    }
    fn copier(&self, from: &Region, to: &Region) -> onehop_gpu::Result<Box<dyn Copier>> {
        self.gpu.copier(from, to)
    }
    fn map_registers(&self, regs: Arc<dyn Registers>) -> onehop_gpu::Result<Doorbells> {
        self.gpu.map_registers(regs)
    }
    fn prepare(&self, launch: &Launch) -> onehop_gpu::Result<()> {
        self.gpu.prepare(launch)
    }
    fn launch(&self, launch: &Launch, job: &KernelJob) -> onehop_gpu::Result<Box<dyn Running>> {
        (self.start)(&self.gpu, launch, job)
    }
}

#[test]
fn a_kernel_that_never_begins_is_left_behind() {
    let (sim, drive) = open("mem:1M");
    let occupied = Arc::new(AtomicBool::new(true));
    let other = occupied.clone();
    let (keep, late) = std::sync::mpsc::channel();
    let start = move |gpu: &Emulated, launch: &Launch, job: &KernelJob| match other.load(Ordering::Relaxed) {
        true => {
            keep.send((gpu.clone(), launch.clone(), *job)).unwrap();
            Ok(Box::new(Queued { occupied: other.clone() }) as Box<dyn Running>)
        }
        false => gpu.launch(launch, job),
    };
    let gpu: Arc<dyn Gpu> = Arc::new(Launching { gpu: Emulated::new(), start });
    let setup = GpuSetup {
        queues: 1,
        limit: Duration::from_millis(100),
        stall: Duration::from_millis(100),
        ..GpuSetup::new(Placement::TIER1)
    };
    let (ns, job) = (drive.namespace(1).unwrap(), [GpuJob { lba: 0, blocks: 8, offset: 0 }]);
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
    let start = Instant::now();
    let end = queues.read(ns, &job, &buffer);
    assert!(matches!(&end, Err(Error::Gpu(why)) if why.contains("occupy")), "{end:?}");
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    // The rest of the drive works, resets included. These queues do not, and no other queue gets their number.
    drive.reset().unwrap();
    let other = drive.queue().unwrap();
    other.read(ns, 0, 8, &drive.buffer(4096).unwrap(), 0).unwrap();
    assert_eq!(other.id(), 2);
    assert!(matches!(queues.read(ns, &job, &buffer), Err(Error::Gpu(_))));
    drop(queues);
    // When it begins at last, it rings no doorbell.
    let (emulated, launch, late) = late.recv().unwrap();
    let exits = emulated.launch(&launch, &late).unwrap().join().unwrap();
    assert!(matches!(exits[..], [Exit::Poisoned(_)]), "{exits:?}");
    assert_eq!(sim.violations(), []);
    occupied.store(false, Ordering::Relaxed);
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    queues.read(ns, &job, &buffer).unwrap();
    assert_eq!(drive.queue().unwrap().id(), 4);
    assert_eq!(sim.violations(), []);
}

/// The controller's next driver would give the kernel's queue numbers to others.
#[test]
fn a_drive_stays_open_as_long_as_a_kernel_may_ring_its_doorbells() {
    let (sim, drive) = open("mem:1M");
    let start = |_: &Emulated, _: &Launch, _: &KernelJob| {
        Ok(Box::new(Queued { occupied: Arc::new(AtomicBool::new(true)) }) as Box<dyn Running>)
    };
    let gpu: Arc<dyn Gpu> = Arc::new(Launching { gpu: Emulated::new(), start });
    let (limit, stall) = (Duration::from_millis(50), Duration::from_millis(50));
    let queues = drive.gpu_queues(gpu.clone(), GpuSetup { limit, stall, ..GpuSetup::new(Placement::TIER1) });
    let queues = queues.unwrap();
    let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
    let job = [GpuJob { lba: 0, blocks: 8, offset: 0 }];
    queues.read(drive.namespace(1).unwrap(), &job, &buffer).unwrap_err();
    drop((queues, buffer, drive));
    assert!(Cc(sim.registers().read32(offset::CC)).en());
}

/// A launch whose end is noticed only when a number of commands have been completed.
struct Unseeing {
    running: Box<dyn Running>,
    sim: Sim,
    completions: u64,
}

impl Running for Unseeing {
    fn is_done(&self) -> bool {
        self.running.is_done()
    }
    fn join(self: Box<Self>) -> onehop_gpu::Result<Vec<Exit>> {
        let exits = self.running.join();
        let start = Instant::now();
        while self.sim.stats().completions < self.completions {
            assert!(start.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
        exits
    }
}

#[test]
fn data_of_reads_that_completed_unseen_never_reaches_memory_that_the_caller_has_back() {
    for mode in [GpuMode::Owner, GpuMode::Shared { threads: 8 }, GpuMode::Shared { threads: 32 }] {
        let sim = onehop_sim::open("mem:1M?to=1&latency=1s&fault=torn@op=read,n=1,delay=1s").unwrap();
        let drive = Drive::open(sim.port(), Options { retries: 0, ..options() }).unwrap();
        let watched = sim.clone();
        let start = move |gpu: &Emulated, launch: &Launch, job: &KernelJob| {
            let completions = watched.stats().completions + 1;
            let running = gpu.launch(launch, job)?;
            Ok(Box::new(Unseeing { running, sim: watched.clone(), completions }) as Box<dyn Running>)
        };
        let gpu: Arc<dyn Gpu> = Arc::new(Launching { gpu: Emulated::new(), start });
        let stall = Duration::from_millis(50);
        let setup = GpuSetup { mode, queues: 1, stall, ..GpuSetup::new(Placement::TIER1) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        let (region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        let job = [GpuJob { lba: 0, blocks: 8, offset: 0 }];
        let end = queues.read(drive.namespace(1).unwrap(), &job, &buffer);
        assert!(matches!(end, Err(Error::TimedOut { .. })), "{mode:?}: {end:?}");
        assert_eq!(recoveries(&drive), [Recovery::ControllerReset], "{mode:?}");
        region.fill(0, 4096, 0xa5).unwrap();
        std::thread::sleep(Duration::from_millis(1500));
        let mut got = [0; 4096];
        region.read(0, &mut got).unwrap();
        assert!(got.iter().all(|byte| *byte == 0xa5), "{mode:?}");
    }
}

/// A GPU on which no kernel that prepares queues finds room.
struct Full(Emulated);

impl Gpu for Full {
    fn name(&self) -> &str {
        "full"
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
    fn prepare(&self, _: &Launch) -> onehop_gpu::Result<()> {
        Err(onehop_gpu::Error::Unended { what: "preparing queues".into(), seconds: 15 })
    }
    fn launch(&self, launch: &Launch, job: &KernelJob) -> onehop_gpu::Result<Box<dyn Running>> {
        self.0.launch(launch, job)
    }
}

#[test]
fn queues_are_prepared_without_a_kernel() {
    for mode in [GpuMode::Owner, GpuMode::Shared { threads: 8 }] {
        let (sim, drive) = open("mem:1M");
        let data: Vec<u8> = (0..4096u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        sim.write_media(1, 0, &data).unwrap();
        let gpu: Arc<dyn Gpu> = Arc::new(Full(Emulated::new()));
        let setup = GpuSetup { mode, queues: 2, ..GpuSetup::new(Placement::TIER1) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        let (region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        // New queues, and those that a reset took.
        for _ in 0..3 {
            region.fill(0, 4096, 0).unwrap();
            let job = [GpuJob { lba: 0, blocks: 8, offset: 0 }];
            queues.read(drive.namespace(1).unwrap(), &job, &buffer).unwrap();
            let mut got = vec![0; 4096];
            region.read(0, &mut got).unwrap();
            assert!(got == data, "{mode:?}");
            drive.reset().unwrap();
        }
        assert_eq!(sim.violations(), []);
    }
}

/// A GPU that reports that a kernel did not end, or that it does not know.
#[test]
fn queues_of_a_kernel_that_did_not_end_are_left_to_it() {
    type Start = fn(&Emulated, &Launch, &KernelJob) -> onehop_gpu::Result<Box<dyn Running>>;
    fn unended() -> onehop_gpu::Error {
        onehop_gpu::Error::Unended { what: "a launch".into(), seconds: 1 }
    }
    fn unknown() -> onehop_gpu::Error {
        let cause = Box::new(onehop_gpu::Error::Launch("the driver does not say why".into()));
        onehop_gpu::Error::OutcomeUnknown { cause }
    }
    struct Unended(fn() -> onehop_gpu::Error);
    impl Running for Unended {
        fn is_done(&self) -> bool {
            true
        }
        fn join(self: Box<Self>) -> onehop_gpu::Result<Vec<Exit>> {
            Err(self.0())
        }
    }
    // The last one fails when it is launched, after it was submitted.
    let starts: [Start; 3] = [
        |_, _, _| Ok(Box::new(Unended(unended))),
        |_, _, _| Ok(Box::new(Unended(unknown))),
        |_, _, _| Err(unknown()),
    ];
    for start in starts {
        let (sim, drive) = open("mem:1M");
        let gpu: Arc<dyn Gpu> = Arc::new(Launching { gpu: Emulated::new(), start });
        let setup = GpuSetup { queues: 1, ..GpuSetup::new(Placement::TIER1) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        let (ns, job) = (drive.namespace(1).unwrap(), [GpuJob { lba: 0, blocks: 8, offset: 0 }]);
        for _ in 0..2 {
            assert!(matches!(queues.read(ns, &job, &buffer), Err(Error::Gpu(_))));
        }
        drop(queues);
        assert_eq!(drive.queue().unwrap().id(), 2);
        assert_eq!(sim.violations(), []);
    }
}

/// A GPU whose running kernels may see a completion before the data that it stands for.
#[test]
fn a_queue_is_not_exported_where_device_writes_are_not_ordered() {
    let (_sim, drive) = open("mem:1M");
    let start = |gpu: &Emulated, launch: &Launch, job: &KernelJob| gpu.launch(launch, job);
    let gpu: Arc<dyn Gpu> = Arc::new(Launching { gpu: Emulated::new(), start });
    let export = |placement: Placement| {
        let setup = GpuSetup { mode: GpuMode::Shared { threads: 1 }, ..GpuSetup::new(placement) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        queues.export(drive.namespace(1).unwrap(), &buffer, false).map(|queue| queue.revoke())
    };
    let refused = export(Placement::POSTED).map(|_| ());
    assert!(matches!(&refused, Err(Error::Gpu(why)) if why.contains("order")), "{refused:?}");
    export(Placement::TIER1).unwrap().unwrap();
}

/// The same for data alone, with the completions in host memory. The owner of the data decides, perhaps another GPU.
#[test]
fn nor_is_one_whose_data_alone_lies_in_gpu_memory() {
    /// GPU memory that the CPU does not reach, and its address.
    struct Far(Option<GpuAddr>);
    impl DmaMemory for Far {
        fn bytes(&self) -> usize {
            4096
        }
        fn gpu_addr(&self) -> Option<GpuAddr> {
            self.0
        }
        fn host(&self) -> Option<&HostMem> {
            None
        }
    }
    /// Gives such memory a bus address.
    struct Reaching(Arc<dyn Mapper>);
    impl Mapper for Reaching {
        fn name(&self) -> &str {
            "reaching"
        }
        fn alloc(&self, bytes: usize) -> onehop_os::Result<HostMem> {
            self.0.alloc(bytes)
        }
        fn map(&self, memory: &dyn DmaMemory) -> onehop_os::Result<Mapped> {
            match memory.host() {
                Some(_) => self.0.map(memory),
                None => self.0.map(&self.0.alloc(memory.bytes())?),
            }
        }
    }
    let port = onehop_sim::open("mem:1M").unwrap().port();
    let mapper = Arc::new(Reaching(port.mapper.clone()));
    let drive = Drive::open(ControllerBackend { mapper, ..port }, options()).unwrap();
    let start = |gpu: &Emulated, launch: &Launch, job: &KernelJob| gpu.launch(launch, job);
    let gpu: Arc<dyn Gpu> = Arc::new(Launching { gpu: Emulated::new(), start });
    let setup = GpuSetup { mode: GpuMode::Shared { threads: 1 }, ..GpuSetup::new(Placement::TIER1) };
    let export = |at| {
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        let buffer = drive.map(Far(at)).unwrap();
        queues.export(drive.namespace(1).unwrap(), &buffer, false).map(|queue| queue.revoke())
    };
    let refused = export(Some(GpuAddr(ORDERED.0 + 4096))).map(|_| ());
    assert!(matches!(&refused, Err(Error::Gpu(why)) if why.contains("order")), "{refused:?}");
    let refused = export(None).map(|_| ());
    assert!(matches!(&refused, Err(Error::Unsupported { why, .. }) if why.contains("owns")), "{refused:?}");
    export(Some(ORDERED)).unwrap().unwrap();
}

#[test]
fn a_failed_read_does_not_keep_its_memory() {
    let (sim, drive) = open("mem:1M?fault=media@lba=9-9");
    let gpu = emulated();
    let queues = drive.gpu_queues(gpu.clone(), GpuSetup::new(Placement::TIER1)).unwrap();
    let before = sim.mapper().mappings();
    for _ in 0..10 {
        let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 65536).unwrap();
        let end =
            queues.read(drive.namespace(1).unwrap(), &[GpuJob { lba: 0, blocks: 64, offset: 0 }], &buffer);
        assert!(matches!(end, Err(Error::Command { .. })), "{end:?}");
    }
    // The queues' own memory is mapped by the first job.
    assert!(sim.mapper().mappings() <= before + 2, "{} were {before}", sim.mapper().mappings());
}

#[test]
fn late_data_never_reaches_memory_that_the_caller_has_back() {
    for order in ["whole", "random"] {
        let (_sim, drive) = open(&format!("mem:1M?fault=torn@n=1,delay=400ms,order={order}"));
        let gpu = emulated();
        let setup = GpuSetup { stall: Duration::from_millis(80), ..GpuSetup::new(Placement::TIER1) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        let (region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        let job = GpuJob { lba: 0, blocks: 8, offset: 0 };
        queues.read(drive.namespace(1).unwrap(), &[job], &buffer).unwrap();
        assert_eq!(drive.incidents().len(), 1);
        region.write(0, &[0xa5; 4096]).unwrap();
        std::thread::sleep(Duration::from_millis(1700));
        let mut got = [0; 4096];
        region.read(0, &mut got).unwrap();
        assert!(got.iter().all(|byte| *byte == 0xa5), "{order}");
    }
}

#[test]
fn gpu_queues_beyond_the_bar_are_refused() {
    struct Short(Arc<dyn Registers>);
    impl Registers for Short {
        fn read32(&self, at: u32) -> u32 {
            self.0.read32(at)
        }
        fn write32(&self, at: u32, value: u32) {
            assert!(at < self.size(), "a register beyond the BAR");
            self.0.write32(at, value);
        }
        fn size(&self) -> u32 {
            // Doorbells of the admin queue and of two others.
            0x1000 + 3 * 8
        }
    }
    let sim = onehop_sim::open("mem:1M").unwrap();
    let port = sim.port();
    let port = ControllerBackend { regs: Arc::new(Short(port.regs.clone())), ..port };
    let drive = Drive::open(port, options()).unwrap();
    let gpu = emulated();
    let setup = |queues| GpuSetup { queues, ..GpuSetup::new(Placement::TIER1) };
    let refused = drive.gpu_queues(gpu.clone(), setup(3)).map(|_| ());
    assert!(
        matches!(&refused, Err(Error::Unsupported { why, .. }) if why.contains("doorbells")),
        "{refused:?}"
    );
    let queues = drive.gpu_queues(gpu.clone(), setup(2)).unwrap();
    let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
    queues.read(drive.namespace(1).unwrap(), &[GpuJob { lba: 0, blocks: 8, offset: 0 }], &buffer).unwrap();
}

#[test]
fn a_job_ends_with_its_time() {
    // One command is lost, so that there always is one in flight when the time is over.
    let sim = onehop_sim::open("mem:16M?latency=20ms&fault=lost@op=read,n=3").unwrap();
    let drive = Drive::open(sim.port(), Options { max_transfer: 4096, ..Options::default() }).unwrap();
    let gpu = emulated();
    let setup = GpuSetup {
        limit: Duration::from_millis(500),
        queues: 1,
        depth: 4,
        ..GpuSetup::new(Placement::TIER1)
    };
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    let (_region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4 << 20).unwrap();
    let start = Instant::now();
    let end =
        queues.read(drive.namespace(1).unwrap(), &[GpuJob { lba: 0, blocks: 8192, offset: 0 }], &buffer);
    // All of it would take five seconds.
    assert!(matches!(end, Err(Error::Launch { done: 1..1024, count: 1024, .. })), "{end:?}");
    assert!(start.elapsed() < Duration::from_secs(4));
    assert_eq!(drive.incidents().len(), 1);
}
