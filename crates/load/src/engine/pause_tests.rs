//! How long a load waits: for a disk or a GPU up to a limit, for its caller's memory as long as it takes.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use onehop_gpu::Emulated;

use super::silent_gpu::SilentGpu;
use super::*;
use crate::plan::PlanOptions;
use crate::{Local, Model, Selection};

const LIMIT: Duration = Duration::from_secs(1);
const SEGMENT: usize = 64 << 10;
const SLOT_BYTES: usize = 16 << 10;

/// Memory of a segment, this many times.
struct LimitedMemory {
    memory: Region,
    free: Mutex<usize>,
}

impl SegmentMemory for LimitedMemory {
    fn take(&self, _: usize, _: usize) -> Result<Option<Placement>> {
        let mut free = self.free.lock().unwrap();
        if *free == 0 {
            return Ok(None);
        }
        *free -= 1;
        Ok(Some(Placement { memory: self.memory.clone(), name: 0, at: 0 }))
    }
}

/// A file with eight tensors, each of which fills a segment.
fn file(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("onehop-{name}-{}.safetensors", std::process::id()));
    let entry = |i: usize| {
        format!(
            r#""t{i}":{{"dtype":"U8","shape":[{SEGMENT}],"data_offsets":[{},{}]}}"#,
            i * SEGMENT,
            (i + 1) * SEGMENT
        )
    };
    let header = format!("{{{}}}", (0..8).map(entry).collect::<Vec<_>>().join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.resize(bytes.len() + 8 * SEGMENT, 7);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A load of it, its chunks, and the memory that it gets.
fn start(gpu: &Arc<dyn Gpu>, path: PathBuf) -> (RingEngine<Arc<Segments>>, Plan, Arc<LimitedMemory>) {
    let opened = Model::open(&Local, &[path]).unwrap();
    let plan = Plan::new(&opened, &Selection::default(), PlanOptions::in_segments(SEGMENT as u64)).unwrap();
    let options = Options { route: Route::Cached, threads: Some(2), slot: Some(SLOT_BYTES) };
    let memory =
        Arc::new(LimitedMemory { memory: gpu.alloc(Place::Vram, SEGMENT).unwrap(), free: Mutex::new(1) });
    let prepared = Prepared::new(&plan, &opened.files, &options).unwrap();
    (RingEngine::start_in_segments(gpu, &plan, prepared, memory.clone()).unwrap(), plan, memory)
}

#[test]
fn a_caller_that_keeps_its_memory_is_waited_for() {
    let path = file("caller");
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let (mut engine, plan, memory) = start(&gpu, path.clone());
    let giver = std::thread::spawn(move || {
        std::thread::sleep(LIMIT * 2);
        *memory.free.lock().unwrap() = usize::MAX;
    });
    let begun = Instant::now();
    let mut arrived = 0;
    while engine.arrived_within(LIMIT).unwrap().is_some() {
        arrived += 1;
    }
    assert!(begun.elapsed() > LIMIT * 2, "chunks came without memory");
    assert_eq!(arrived, plan.chunks(SLOT_BYTES as u64).unwrap().count());
    giver.join().unwrap();
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_gpu_that_is_silent_is_not() {
    let path = file("gpu");
    let has_ended = Arc::new(AtomicBool::new(false));
    let gpu: Arc<dyn Gpu> =
        Arc::new(SilentGpu { gpu: Emulated::new(), has_ended: has_ended.clone(), goes_on: true });
    let (mut engine, ..) = start(&gpu, path.clone());
    let error = engine.arrived_within(LIMIT).unwrap_err();
    assert!(matches!(error, Error::Stalled { .. }), "{error}");
    assert!(engine.pool.shared.without_memory() > 0, "no thread waited for memory");
    has_ended.store(true, Ordering::Release);
    drop(engine);
    std::fs::remove_file(path).unwrap();
}
