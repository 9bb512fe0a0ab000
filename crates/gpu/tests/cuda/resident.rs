//! Persistent kernels: everything else works while they run, and released memory is freed when they end.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_controller::BusMapping;
use onehop_gpu::controllers::{Begin, Common, Pairs, Table};
use onehop_gpu::{Emulated, Error, Gpu, KernelQueue, Launch, Place};
use onehop_os::HostMem;
use onehop_proto::GpuAddr;

use crate::{bench, report};

/// They end after this, so that a call that waits for them takes this long.
const LIMIT: Duration = Duration::from_secs(10);
const COUNT: u16 = 16;

/// Controllers at rest from the start.
fn resting(gpu: &Arc<dyn Gpu>) -> Pairs {
    let table = Arc::new(Mutex::new(Table::new(gpu, 1).unwrap()));
    let namespace = gpu.alloc(Place::Vram, 4096).unwrap();
    let common = Common { namespace, blocks: 8, lba_shift: 9, max_bytes: 4096, limit: LIMIT, flags: 0 };
    Pairs::new(gpu, common, &table, COUNT, 4096).unwrap()
}

fn timed<R>(what: &str, f: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = f();
    let took = start.elapsed();
    report(&format!("during a persistent kernel, {what}: {took:.1?}"));
    assert!(took < LIMIT / 4, "{what} waited for a kernel that stays: {took:?}");
    result
}

#[test]
fn everything_works_during_persistent_kernels() {
    let Some(bench) = bench("everything_works_during_persistent_kernels") else { return };
    let gpu = &bench.gpu;
    let resting = resting(&(Arc::new(gpu.clone()) as Arc<dyn Gpu>));
    let (free, _) = gpu.memory_info().unwrap();
    let started = Instant::now();
    resting.start().unwrap();
    assert!(matches!(resting.start(), Err(Error::Launch(_))), "they run already");
    let rests = || resting.numbers().all(|qid| resting.wait(qid, 1).unwrap());
    assert!(timed("seeing that it rests", rests));
    let vram = timed("allocating GPU memory", || gpu.alloc(Place::Vram, 64 << 20).unwrap());
    let pinned = timed("allocating pinned memory", || gpu.alloc(Place::PinnedHost, 16 << 20).unwrap());
    let own = HostMem::anonymous(8 << 20).unwrap();
    let adopted = timed("registering host memory", || gpu.adopt(Place::PinnedHost, own.clone()).unwrap());
    timed("filling", || vram.fill(0, vram.len(), 7).unwrap());
    let mut bytes = vec![0; 1 << 20];
    timed("copying", || vram.read(5 << 20, &mut bytes).unwrap());
    assert!(bytes.iter().all(|byte| *byte == 7));
    let scratch = gpu.alloc(Place::Vram, 64 << 10).unwrap();
    let (control, entries) = (scratch.addr(), 16);
    let queue = KernelQueue {
        control,
        sq_entries: entries,
        cq_entries: entries,
        window: entries - 1,
        ..KernelQueue::default()
    };
    timed("100 kernels", || (0..100).for_each(|_| gpu.prepare(&Launch::Owner(vec![queue])).unwrap()));
    timed("giving GPU memory back", || drop(vram));
    timed("giving pinned memory back", || drop(pinned));
    timed("giving host memory back", || drop(adopted));
    let again = timed("registering it again", || gpu.adopt(Place::PinnedHost, own).unwrap());
    drop(again);
    assert!(started.elapsed() < LIMIT && !resting.is_over());
    timed("ending it", || resting.stop().unwrap());
    drop(scratch);
    let (after, _) = gpu.memory_info().unwrap();
    assert!(after + (32 << 20) > free, "{free} bytes were free before, {after} are after");
}

#[test]
fn controllers_get_only_live_memory() {
    let Some(bench) = bench("controllers_get_only_live_memory") else { return };
    let gpu: Arc<dyn Gpu> = Arc::new(bench.gpu.clone());
    let (pairs, mut table) = (resting(&gpu), Table::new(&gpu, 8).unwrap());
    let emulated = Emulated::new().alloc(Place::Vram, 4096).unwrap();
    let rings = gpu.alloc(Place::Vram, 4096).unwrap();
    let begin = |sq: GpuAddr, cq: GpuAddr| {
        let (sq_entries, cq_entries, faults) = (16, 16, &[] as &[_]);
        pairs.begin(1, &Begin { sq, cq, sq_entries, cq_entries, cqid: 1, page_shift: 12, faults })
    };
    let good = rings.addr();
    for bad in [GpuAddr(0), GpuAddr(4096), good.plus(1 << 40), emulated.addr(), good.plus((64 << 10) - 6)] {
        assert!(matches!(begin(bad, good), Err(Error::Launch(_))), "{bad}");
        assert!(matches!(begin(good, bad), Err(Error::Launch(_))), "{bad}");
        let range = BusMapping { bus: 1 << 44, bytes: 4096, target: bad };
        assert!(matches!(table.add(range), Err(Error::Launch(_))), "{bad}");
    }
    table.add(BusMapping { bus: 1 << 44, bytes: 4096, target: good }).unwrap();
}
