//! Loads in segments: a limited amount of memory that is reused.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use onehop_gpu::{Emulated, Gpu, Place, Region};
use onehop_load::engine::{Options, Placement, Prepared, RingEngine, Route, SegmentMemory, Segments};
use onehop_load::stream::Stream;
use onehop_load::{Error, Local, Model, Plan, Selection, plan};
use onehop_os::page_cache::cached_bytes;
use rustix::fs::{Advice, fadvise};

use crate::engine::{Folder, model};

/// A number of places of one length; a filled one is returned when it was read.
struct Places {
    memory: Region,
    bytes: usize,
    free: Mutex<VecDeque<usize>>,
    taken: Mutex<Vec<usize>>,
    refused: AtomicUsize,
}

impl Places {
    fn new(gpu: &dyn Gpu, bytes: usize, count: usize) -> Arc<Self> {
        Arc::new(Self {
            memory: gpu.alloc(Place::Vram, bytes * count).unwrap(),
            bytes,
            free: Mutex::new((0..count).collect()),
            taken: Mutex::default(),
            refused: AtomicUsize::new(0),
        })
    }

    fn give_back(&self, segment: usize) {
        let place = self.taken.lock().unwrap()[segment];
        self.free.lock().unwrap().push_back(place);
    }
}

impl SegmentMemory for Places {
    fn take(&self, segment: usize, bytes: usize) -> onehop_load::Result<Option<Placement>> {
        assert!(bytes <= self.bytes, "segment {segment} has {bytes} bytes");
        let Some(place) = self.free.lock().unwrap().pop_front() else {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        };
        let mut taken = self.taken.lock().unwrap();
        assert_eq!(segment, taken.len(), "segments come in their order");
        taken.push(place);
        Ok(Some(Placement { memory: self.memory.clone(), name: 0, at: place * self.bytes }))
    }
}

fn sizes() -> Vec<usize> {
    (0..300).map(|i| [4096, 1, 20_000, 777, 60_000, 0, 12_345][i % 7]).collect()
}

const SEGMENT: usize = 64 << 10;

fn start(
    opened: &Model,
    route: Route,
    memory: Arc<dyn SegmentMemory>,
) -> Result<Stream<RingEngine<Arc<Segments>>>, Error> {
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let options = plan::PlanOptions::in_segments(SEGMENT as u64);
    let plan = Plan::new(opened, &Selection::default(), options).unwrap();
    let options = Options { route, threads: Some(3), slot: Some(8192) };
    let prepared = Prepared::new(&plan, &opened.files, &options)?;
    Ok(Stream::new(plan.clone(), RingEngine::start_in_segments(&gpu, &plan, prepared, memory)?))
}

/// Reads every tensor, and returns the memory of each segment after its last one.
fn read_all(stream: &mut Stream<RingEngine<Arc<Segments>>>, places: &Places, tensors: &[(String, Vec<u8>)]) {
    let plan = stream.plan().clone();
    let mut left = vec![0; plan.segments.len()];
    plan.tensors.iter().filter(|t| t.bytes > 0).for_each(|t| left[plan.segment_of(t.at)] += 1);
    let mut seen = 0;
    while let Some(streamed) = stream.next().unwrap() {
        seen += 1;
        let placed = streamed.tensor;
        if placed.bytes == 0 {
            continue;
        }
        let region = streamed.arena.region(placed.at, placed.bytes).unwrap();
        let mut bytes = vec![0; placed.bytes as usize];
        region.read(0, &mut bytes).unwrap();
        let (_, data) = tensors.iter().find(|(name, _)| *name == placed.name).unwrap();
        assert!(bytes == *data, "{}", placed.name);
        let segment = plan.segment_of(placed.at);
        left[segment] -= 1;
        if left[segment] == 0 {
            places.give_back(segment);
        }
    }
    assert_eq!(seen, tensors.len());
}

#[test]
fn every_byte_through_little_memory() {
    let folder = Folder::new("segments");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &sizes());
    let opened = Model::open(&Local, &[path]).unwrap();
    for route in [Route::Auto, Route::Cached, Route::Pinned] {
        for count in [1, 2, 5] {
            let places = Places::new(&Emulated::new(), SEGMENT, count);
            let mut stream = match start(&opened, route, places.clone()) {
                Err(Error::NotDirect { why, .. }) if route == Route::Pinned => {
                    let _ = writeln!(std::io::stderr(), "SKIPPED: the page cache was used: {why}");
                    continue;
                }
                other => other.unwrap(),
            };
            read_all(&mut stream, &places, &tensors);
            assert!(places.refused.load(Ordering::Relaxed) > 0 || count > 1, "no thread ever waited");
        }
    }
}

/// One reader at a time waits for the next chunk. The others have read what the caller needs before it frees memory for that.
#[test]
fn copied_bytes_arrive_while_another_reader_waits_for_memory() {
    let folder = Folder::new("segments-disk");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &sizes());
    let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
    let file = File::open(&path).unwrap();
    for count in [1, 2, 5] {
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        if cached_bytes(&file, 0, file.metadata().unwrap().len()).unwrap() > 0 {
            let _ =
                std::io::stderr().write_all(b"SKIPPED: this file system keeps pages that it should drop\n");
            return;
        }
        let places = Places::new(&Emulated::new(), SEGMENT, count);
        let mut stream = start(&opened, Route::Auto, places.clone()).unwrap();
        if let Some(why) = stream.engine().account().why_cached {
            let _ = writeln!(std::io::stderr(), "SKIPPED: the page cache was used: {why}");
            return;
        }
        read_all(&mut stream, &places, &tensors);
        let account = stream.engine().account();
        assert!(account.direct_bytes > account.cached_bytes, "{account:?}");
    }
}

#[test]
fn a_load_without_memory_can_be_cancelled() {
    let folder = Folder::new("segments-stop");
    let path = folder.0.join("m.safetensors");
    model(&path, &sizes());
    let opened = Model::open(&Local, &[path]).unwrap();
    let places = Places::new(&Emulated::new(), SEGMENT, 0);
    let mut stream = start(&opened, Route::Cached, places).unwrap();
    let stopper = stream.engine().stopper();
    let stops = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        stopper.stop();
    });
    let ended = loop {
        match stream.next() {
            // Those without bytes need no memory.
            Ok(Some(streamed)) => assert_eq!(streamed.tensor.bytes, 0),
            Ok(None) => panic!("all came without memory"),
            Err(error) => break error,
        }
    };
    assert!(matches!(ended, Error::Cancelled), "{ended}");
    stops.join().unwrap();
}

#[test]
fn segments_hold_whole_tensors_and_a_longer_one_has_its_own() {
    let folder = Folder::new("segments-plan");
    let path = folder.0.join("m.safetensors");
    model(&path, &sizes());
    let opened = Model::open(&Local, &[path]).unwrap();
    for most in [1, 4096, 50_000, 1 << 30] {
        let options = plan::PlanOptions::in_segments(most);
        let plan = Plan::new(&opened, &Selection::default(), options).unwrap();
        assert!(plan.segments.windows(2).all(|two| two[0].end < two[1].start));
        let filled = |segment: usize| {
            let plan = &plan;
            let has_bytes = |t: &&plan::Placed| t.bytes > 0;
            plan.tensors.iter().filter(has_bytes).filter(move |t| plan.segment_of(t.at) == segment)
        };
        for (i, segment) in plan.segments.iter().enumerate() {
            assert!(filled(i).all(|t| segment.start <= t.at && t.at + t.bytes <= segment.end));
            let bytes = segment.end - segment.start;
            assert!(filled(i).count() == 1 || bytes <= most, "{bytes} of {most}");
        }
        let count = (0..plan.segments.len()).map(|i| filled(i).count()).sum::<usize>();
        assert_eq!(count, plan.tensors.iter().filter(|t| t.bytes > 0).count());
        for chunk in plan.chunks(8192).unwrap() {
            let segments: Vec<_> = chunk.copies.iter().map(|copy| plan.segment_of(copy.to)).collect();
            assert!(segments.windows(2).all(|two| two[0] == two[1]), "{segments:?}");
        }
    }
}
