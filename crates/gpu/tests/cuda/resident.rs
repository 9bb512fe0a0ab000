//! Kernels that stay: everything else goes on beside them, and memory that is given back goes when they end.

use std::time::{Duration, Instant};

use onehop_controller::Pair;
use onehop_controller::layout::{REPORT_BYTES, control};
use onehop_gpu::{Gpu, KernelQueue, Launch, Place, Region, Rings};
use onehop_os::HostMem;
use onehop_proto::GpuAddr;

use crate::{bench, tell};

/// They end by themselves after this, so that a call that waits for them shows up as one that took so long.
const LIMIT: Duration = Duration::from_secs(10);
const COUNT: u32 = 16;

/// Controllers that rest from the start.
struct Resting {
    list: Region,
    rest: Region,
}

impl Resting {
    fn new(gpu: &dyn Gpu) -> Self {
        let list = gpu.alloc(Place::Vram, (COUNT * Pair::BYTES) as usize).unwrap();
        let rest = gpu.alloc(Place::Vram, 4096 + (COUNT * REPORT_BYTES) as usize).unwrap();
        rest.signal(0, control::REST).unwrap();
        for i in 0..COUNT {
            let pair = Pair {
                control: rest.addr(),
                report: rest.addr().plus(4096 + u64::from(i * REPORT_BYTES)),
                limit: LIMIT.as_nanos() as u64,
                sq_entries: 2,
                cq_entries: 2,
                lba_shift: 9,
                page_shift: 12,
                ..Pair::default()
            };
            let words: Vec<u8> = pair.words().iter().flat_map(|word| word.to_le_bytes()).collect();
            list.write((i * Pair::BYTES) as usize, &words).unwrap();
        }
        Self { list, rest }
    }

    fn rests(&self) -> bool {
        (0..COUNT).all(|i| self.rest.word(4096 + (i * REPORT_BYTES) as usize + 4).unwrap() == 1)
    }
}

fn timed<R>(what: &str, f: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = f();
    let took = start.elapsed();
    tell(&format!("beside a kernel that stays, {what}: {took:.1?}"));
    assert!(took < LIMIT / 4, "{what} waited for a kernel that stays: {took:?}");
    result
}

#[test]
fn all_goes_on_beside_kernels_that_stay() {
    let Some(bench) = bench("all_goes_on_beside_kernels_that_stay") else { return };
    let gpu = &bench.gpu;
    let resting = Resting::new(gpu);
    let (free, _) = gpu.memory_info().unwrap();
    let started = Instant::now();
    let staying = gpu.serve(resting.list.addr(), COUNT, LIMIT).unwrap();
    timed("seeing that it rests", || while !resting.rests() {});
    let vram = timed("allocating GPU memory", || gpu.alloc(Place::Vram, 64 << 20).unwrap());
    let pinned = timed("allocating pinned memory", || gpu.alloc(Place::PinnedHost, 16 << 20).unwrap());
    let own = HostMem::anonymous(8 << 20).unwrap();
    let adopted = timed("registering host memory", || gpu.adopt(Place::PinnedHost, own.clone()).unwrap());
    timed("filling", || vram.fill(0, vram.len(), 7).unwrap());
    let mut bytes = vec![0; 1 << 20];
    timed("copying", || vram.read(5 << 20, &mut bytes).unwrap());
    assert!(bytes.iter().all(|byte| *byte == 7));
    let scratch = gpu.alloc(Place::Vram, 64 << 10).unwrap();
    let rings = Rings {
        sq: GpuAddr(0),
        cq: GpuAddr(0),
        sq_door: GpuAddr(0),
        cq_door: GpuAddr(0),
        sq_entries: 16,
        cq_entries: 16,
    };
    let queue = KernelQueue { rings, control: scratch.addr(), window: 15 };
    timed("100 kernels", || (0..100).for_each(|_| gpu.prepare(&Launch::Owner(vec![queue])).unwrap()));
    timed("giving GPU memory back", || drop(vram));
    timed("giving pinned memory back", || drop(pinned));
    timed("giving host memory back", || drop(adopted));
    let again = timed("registering it again", || gpu.adopt(Place::PinnedHost, own).unwrap());
    drop(again);
    assert!(started.elapsed() < LIMIT && !staying.is_over());
    resting.rest.signal(0, control::STOP).unwrap();
    timed("ending it", || drop(staying));
    drop(scratch);
    let (after, _) = gpu.memory_info().unwrap();
    assert!(after + (32 << 20) > free, "{free} bytes were free before, {after} are after");
}
