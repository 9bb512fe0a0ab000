//! A GPU fully occupied by another program's kernel, which waits for a transfer of ours.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, GpuJob, GpuSetup, Options, Placement};
use onehop_gpu::{Gpu, Place, Region};
use onehop_os::{DmaMemory, Marks};

use crate::raw::{self, Kernel, Stream};
use crate::{Bench, bench, bytes_of, random, report};

/// All threads wait for a word to be non-zero, at most 20 seconds.
const SPIN: &str = r"
.version 8.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 flag)
{
    .reg .pred %p<3>;
    .reg .u32 %word;
    .reg .u64 %flag, %now, %end;
    ld.param.u64 %flag, [flag];
    mov.u64 %end, %globaltimer;
    add.u64 %end, %end, 20000000000;
AGAIN:
    ld.volatile.global.u32 %word, [%flag];
    setp.ne.u32 %p1, %word, 0;
    mov.u64 %now, %globaltimer;
    setp.gt.u64 %p2, %now, %end;
    @%p1 bra DONE;
    @%p2 bra DONE;
    bra AGAIN;
DONE:
    ret;
}
";

/// A kernel of other code that fills the GPU, and waits for a word.
struct Filler {
    kernel: Kernel,
    stream: Stream,
    flag: Region,
    blocks: u32,
}

impl Filler {
    /// Loads it: the driver loads no kernel while a persistent one runs.
    fn new(bench: &Bench) -> Self {
        raw::enter();
        let flag = bench.gpu.alloc(Place::PinnedHost, 4096).unwrap();
        // Small blocks, so that they also fit next to others: no room is left for blocks of any size.
        let blocks = 64 * bench.gpu.capabilities().multiprocessors as u32;
        let filler = Self { kernel: Kernel::load(SPIN, "spin"), stream: Stream::new(), flag, blocks };
        filler.run(|| ());
        filler
    }

    /// Runs `f` while the GPU is full.
    fn run<R>(&self, f: impl FnOnce() -> R) -> R {
        self.flag.write(0, &0u32.to_le_bytes()).unwrap();
        self.stream.start(&self.kernel, (self.blocks, 32), &mut [self.flag.addr().0]);
        std::thread::sleep(Duration::from_millis(500));
        assert!(!self.stream.is_over().unwrap());
        let result = f();
        assert!(!self.stream.is_over().unwrap(), "the GPU was not full all the time");
        self.flag.write(0, &1u32.to_le_bytes()).unwrap();
        self.stream.wait().unwrap();
        result
    }
}

/// A read of a drive on CPU threads by queues in host memory: prepared by an earlier read, or not.
fn a_transfer_that_finds_no_room(bench: &Bench, filler: &Filler, prepared: bool) {
    let gpu: Arc<dyn Gpu> = Arc::new(bench.gpu.clone());
    let sim = onehop_sim::open("mem:1M").unwrap();
    let data = random(7, 4096);
    sim.write_media(1, 0, &data).unwrap();
    let drive = Drive::open(sim.port(), Options::default()).unwrap();
    let ns = drive.namespace(1).unwrap();
    let setup = setup(Placement::TIER1);
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    let (region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
    let job = [GpuJob { lba: 0, blocks: 8, offset: 0 }];
    if prepared {
        queues.read(ns, &job, &buffer).unwrap();
    }
    filler.run(|| {
        let start = Instant::now();
        let end = queues.read(ns, &job, &buffer);
        let took = start.elapsed();
        // The CPU continues to drive the drive, resets included, while the kernel runs.
        drive.reset().unwrap();
        let host = drive.buffer(4096).unwrap();
        drive.queue().unwrap().read(ns, 0, 8, &host, 0).unwrap();
        assert!(matches!(&end, Err(Error::Gpu(why)) if why.contains("occupy")), "{end:?}");
        assert!(took < Duration::from_secs(8), "{took:?}");
        let error = end.unwrap_err();
        report(&format!("with a kernel that fills the GPU a read ended after {took:?}: {error}"));
    });
    // The kernel left behind finds its poison word set, and its memory unchanged.
    std::thread::sleep(Duration::from_secs(1));
    assert!(queues.read(ns, &job, &buffer).is_err());
    drop(queues);
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    region.write(0, &[0; 4096]).unwrap();
    queues.read(ns, &job, &buffer).unwrap();
    assert!(bytes_of(&region)[..4096] == data);
}

fn setup(placement: Placement) -> GpuSetup {
    let (stall, limit) = (Duration::from_millis(500), Duration::from_secs(1));
    GpuSetup { queues: 1, stall, limit, ..GpuSetup::new(placement) }
}

#[test]
fn a_transfer_that_finds_no_room_ends_with_an_error() {
    let Some(bench) = bench("a_transfer_that_finds_no_room_ends_with_an_error") else { return };
    let filler = Filler::new(&bench);
    for prepared in [true, false] {
        a_transfer_that_finds_no_room(&bench, &filler, prepared);
    }
}

/// The GPU is full, and by the time there is room the memory belongs to other code.
#[test]
fn a_kernel_that_comes_late_writes_nothing() {
    const LIMIT: Duration = Duration::from_millis(300);
    let Some(bench) = bench("a_kernel_that_comes_late_writes_nothing") else { return };
    let filler = Filler::new(&bench);
    let region = bench.gpu.alloc(Place::Vram, 8 << 20).unwrap();
    let marks = Marks { first: 0, count: 1 << 20, word: 0x0123_4567_89ab_cdef };
    region.mark(&marks, 10 * LIMIT).unwrap();
    let others = random(11, 8 << 20);
    for _ in 0..3 {
        let took = filler.run(|| {
            let start = Instant::now();
            let why = region.mark(&marks, LIMIT).unwrap_err().to_string();
            assert!(why.contains("was cancelled"), "{why}");
            assert!(region.marks_left(&marks, LIMIT).is_err());
            let took = start.elapsed();
            region.write(0, &others).unwrap();
            took
        });
        report(&format!("marks were cancelled, and a question given up, after {took:?}"));
        assert!(took < Duration::from_secs(2), "{took:?}");
        std::thread::sleep(Duration::from_millis(500));
        assert!(bytes_of(&region) == others, "memory was marked that others have again");
        region.mark(&marks, 10 * LIMIT).unwrap();
        assert_eq!(region.marks_left(&marks, 10 * LIMIT).unwrap(), marks.count);
    }
}

/// Everything is in GPU memory, the drive included, and the queues are unused.
#[test]
fn a_read_that_finds_no_room_leaves_gpu_memory_alone() {
    let Some(bench) = bench("a_read_that_finds_no_room_leaves_gpu_memory_alone") else { return };
    let gpu: Arc<dyn Gpu> = Arc::new(bench.gpu.clone());
    let filler = Filler::new(&bench);
    gpu.load_kernels().unwrap();
    let resident = onehop_resident::open("mem:1M?queues=4", gpu.clone()).unwrap();
    let data = random(7, 65536);
    resident.sim().write_media(1, 0, &data).unwrap();
    let drive = Drive::open(resident.port(), Options::default()).unwrap();
    let ns = drive.namespace(1).unwrap();
    // The drive's warps start with its first queue, and keep their places.
    let _queue = drive.queue().unwrap();
    let queues = drive.gpu_queues(gpu.clone(), setup(Placement::TIER3)).unwrap();
    let (region, buffer) = drive.gpu_buffer(&*gpu, Place::Vram, 65536).unwrap();
    let job = [GpuJob { lba: 0, blocks: 128, offset: 0 }];
    let others = random(11, region.len());
    filler.run(|| {
        let start = Instant::now();
        let end = queues.read(ns, &job, &buffer);
        let took = start.elapsed();
        region.write(0, &others).unwrap();
        assert!(
            matches!(&end, Err(Error::Gpu(why)) if why.contains("cancelled") && why.contains("occupy")),
            "{end:?}"
        );
        assert!(took < Duration::from_secs(5), "{took:?}");
        report(&format!("a read into GPU memory ended after {took:?}: {}", end.unwrap_err()));
    });
    std::thread::sleep(Duration::from_millis(500));
    assert!(bytes_of(&region) == others, "memory was written that others have again");
    queues.read(ns, &job, &buffer).unwrap();
    assert!(bytes_of(&region)[..65536] == data);
}
