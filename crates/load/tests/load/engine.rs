//! The engine against real files and the emulated GPU: every path, every byte, files that shrink, cancelled loads.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use onehop_gpu::{Emulated, Region};
use onehop_load::engine::{Arena, Options, Prepared, RingCache, RingEngine, Route};
use onehop_load::stream::{Engine, Stream};
use onehop_load::{Error, Local, Model, Plan, Selection, plan};
use onehop_os::page_cache::cached_bytes;
use rustix::fs::{Advice, fadvise};

/// A folder that is removed with the test. Not in /tmp, which may be in memory: O_DIRECT is needed.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::current_dir().unwrap().join(format!("target-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        })
        .collect()
}

/// Makes a model with tensors of these sizes; returns their contents.
pub fn model(path: &Path, sizes: &[usize]) -> Vec<(String, Vec<u8>)> {
    let names: Vec<_> = (0..sizes.len()).map(|i| format!("t{i}")).collect();
    let shapes: Vec<_> = names.iter().zip(sizes).map(|(name, size)| (&**name, vec![*size])).collect();
    write(path, &shapes)
}

/// The same with names, rows and columns.
pub fn matrices(path: &Path, shapes: &[(&str, usize, usize)]) -> Vec<(String, Vec<u8>)> {
    write(
        path,
        &shapes.iter().map(|(name, rows, columns)| (*name, vec![*rows, *columns])).collect::<Vec<_>>(),
    )
}

fn write(path: &Path, shapes: &[(&str, Vec<usize>)]) -> Vec<(String, Vec<u8>)> {
    let mut header = String::from("{");
    let (mut at, mut tensors) = (0, Vec::new());
    for (i, (name, shape)) in shapes.iter().enumerate() {
        let data = random(i as u64 * 77 + 5, shape.iter().product());
        let end = at + data.len();
        header += &format!(r#""{name}":{{"dtype":"U8","shape":{shape:?},"data_offsets":[{at},{end}]}},"#);
        at = end;
        tensors.push(((*name).to_owned(), data));
    }
    header.pop();
    header.push('}');
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    tensors.iter().for_each(|(_, data)| file.write_all(data).unwrap());
    file.sync_all().unwrap();
    tensors
}

const SIZES: [usize; 9] = [1 << 20, 1, 4096, 777, 3 << 20, 0, 12_345, 5 << 20 | 3, 256];

pub fn bytes_of(region: &Region, tensor: &plan::Placed) -> Vec<u8> {
    let mut bytes = vec![0; tensor.bytes as usize];
    region.read(tensor.at as usize, &mut bytes).unwrap();
    bytes
}

fn start(model: &Model, options: Options) -> Result<Stream<RingEngine>, Error> {
    let plan = Plan::new(model, &Selection::default(), plan::PlanOptions::default()).unwrap();
    let prepared = Prepared::new(&plan, &model.files, &options)?;
    let engine = RingEngine::start(&Emulated::new(), &plan, prepared)?;
    Ok(Stream::new(plan, engine))
}

#[test]
fn every_byte_by_every_route() {
    let folder = Folder::new("ways");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &SIZES);
    let total: usize = SIZES.iter().sum();
    for route in [Route::Auto, Route::Cached, Route::Pinned] {
        for (threads, slot) in
            [(None, None), (Some(1), Some(4096)), (Some(3), Some(1 << 20)), (Some(40), Some(12_288))]
        {
            let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
            let mut stream = match start(&opened, Options { route, threads, slot }) {
                Err(Error::NotDirect { why, .. }) if route == Route::Pinned => {
                    println!("SKIP: {why}");
                    continue;
                }
                other => other.unwrap(),
            };
            let mut seen = 0;
            while let Some(streamed) = stream.next().unwrap() {
                let (_, data) = tensors.iter().find(|(name, _)| *name == streamed.tensor.name).unwrap();
                assert!(
                    bytes_of(streamed.arena, streamed.tensor) == *data,
                    "{} by {route:?}",
                    streamed.tensor.name
                );
                seen += 1;
            }
            assert_eq!((seen, stream.bytes()), (tensors.len(), total as u64));
            let account = stream.engine().account();
            assert!(account.read_bytes() >= total as u64, "{account:?}");
            // On the automatic route, the page cache's contents are up to the machine.
            if route != Route::Auto {
                assert_eq!(account.direct_bytes > 0, route == Route::Pinned);
            }
            let (plan, arena) = stream.finish().unwrap();
            for tensor in &plan.tensors {
                let (_, data) = tensors.iter().find(|(name, _)| *name == tensor.name).unwrap();
                assert!(bytes_of(&arena, tensor) == *data, "{} by {route:?}, at the end", tensor.name);
            }
            opened.still_same().unwrap();
        }
    }
}

/// Cached parts of a file come from memory, and the rest past the page cache, at the same time. A mostly cached chunk
/// is read through the cache, without readahead.
#[test]
fn uncached_bytes_are_read_past_the_page_cache() {
    const MIB: u64 = 1 << 20;
    let folder = Folder::new("part");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &[2 << 20; 12]);
    let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
    let (file, there, all) = (File::open(&path).unwrap(), 10 * MIB - (MIB >> 2), 24 * MIB);
    let of = |range: std::ops::Range<u64>| cached_bytes(&file, range.start, range.end - range.start).unwrap();
    for (threads, slot) in [(1, MIB), (3, MIB >> 2), (3, 4 * MIB)] {
        file.read_exact_at(&mut vec![0; all as usize], 0).unwrap();
        fadvise(&file, there, None, Advice::DontNeed).unwrap();
        if of(0..there) < there || of(there + MIB..all) > 0 {
            println!(
                "SKIP: this file system keeps pages that it should drop, or drops pages that it should keep"
            );
            return;
        }
        let options = Options { threads: Some(threads), slot: Some(slot as usize), ..Options::default() };
        let mut stream = start(&opened, options).unwrap();
        if let Some(why) = stream.engine().account().why_cached {
            println!("SKIP: {why}");
            return;
        }
        while let Some(streamed) = stream.next().unwrap() {
            let (_, data) = tensors.iter().find(|(name, _)| *name == streamed.tensor.name).unwrap();
            assert!(bytes_of(streamed.arena, streamed.tensor) == *data, "{}", streamed.tensor.name);
        }
        let account = stream.engine().account();
        let near = |wanted: u64| wanted - slot..=wanted + slot + MIB;
        assert!(near(there).contains(&account.cached_bytes), "{account:?}");
        assert!(near(all - there).contains(&account.direct_bytes), "{account:?}");
        let both = threads + 1..=2 * threads;
        assert!(both.contains(&account.threads), "those of both: {account:?}");
    }
}

#[test]
fn memory_file_systems_are_read_by_the_cache_and_say_so() {
    let Ok(()) = std::fs::create_dir_all("/dev/shm") else { return };
    let path = PathBuf::from(format!("/dev/shm/onehop-load-{}.safetensors", std::process::id()));
    model(&path, &[100_000]);
    let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
    let stream = start(&opened, Options::default()).unwrap();
    assert!(stream.engine().account().why_cached.unwrap().contains("memory"));
    let refused = start(&opened, Options { route: Route::Pinned, ..Options::default() });
    assert!(matches!(refused, Err(Error::NotDirect { .. })));
    drop(stream);
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_file_that_shrinks_is_noticed_by_every_route() {
    let folder = Folder::new("shrinks");
    for route in [Route::Cached, Route::Pinned] {
        let path = folder.0.join("m.safetensors");
        model(&path, &[1 << 20, 4 << 20]);
        let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(2 << 20 | 100).unwrap();
        let mut stream = match start(&opened, Options { route, slot: Some(1 << 20), ..Options::default() }) {
            Err(Error::NotDirect { .. }) => continue,
            other => other.unwrap(),
        };
        let end = loop {
            match stream.next() {
                Ok(Some(_)) => {}
                other => break other.map(|_| ()),
            }
        };
        assert!(matches!(end, Err(Error::Ended { .. })), "{route:?}: {end:?}");
        assert!(matches!(opened.still_same(), Err(Error::Changed { .. })));
    }
}

#[test]
fn a_cancelled_load_ends() {
    let folder = Folder::new("given-up");
    let path = folder.0.join("m.safetensors");
    model(&path, &[64 << 20]);
    for route in [Route::Cached, Route::Auto, Route::Pinned] {
        let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
        let Ok(stream) = start(&opened, Options { route, slot: Some(1 << 20), threads: Some(2) }) else {
            continue;
        };
        drop(stream);
        let plan = Plan::new(&opened, &Selection::default(), plan::PlanOptions::default()).unwrap();
        let Ok(prepared) = Prepared::new(&plan, &opened.files, &Options { route, ..Options::default() })
        else {
            continue;
        };
        let engine = RingEngine::start(&Emulated::new(), &plan, prepared).unwrap();
        engine.finish().unwrap();
    }
}

#[test]
fn several_gpus_share_a_ring() {
    let folder = Folder::new("several");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &[1 << 20, 4096, 3 << 20, 8, 0, 5 << 20]);
    let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
    let gpus = [Emulated::new(), Emulated::new()];
    let gpus: Vec<&dyn onehop_gpu::Gpu> = gpus.iter().map(|gpu| gpu as _).collect();
    for route in [Route::Cached, Route::Pinned] {
        // The same data for both, which is read once; and half for each.
        for halves in [false, true] {
            let plan = |rank| {
                let selection = Selection::default().rank(rank, 2).unwrap();
                let selection = if halves { selection.cut("*", 0) } else { selection };
                Plan::new(&opened, &selection, plan::PlanOptions::ring()).unwrap()
            };
            let plans = [plan(0), plan(1)];
            let plans: Vec<_> = plans.iter().collect();
            let options = Options { route, slot: Some(256 << 10), threads: Some(3) };
            let prepared = match Prepared::for_all(&plans, &opened.files, &options) {
                Err(Error::NotDirect { .. }) => continue,
                other => other.unwrap(),
            };
            let engines = RingEngine::start_all(&gpus, &plans, prepared).unwrap();
            let ring = engines[0].account().ring_bytes;
            // Memory larger than a huge page uses huge pages. Past the page cache, one slot more than threads.
            let expected = if route == Route::Cached { 4 << 20 } else { 4 * (256 << 10) };
            assert_eq!(ring, expected, "one ring for both");
            let streams = engines.into_iter().zip(&plans).map(|(e, plan)| Stream::new((*plan).clone(), e));
            let mut read = 0;
            for (rank, stream) in streams.collect::<Vec<_>>().into_iter().enumerate() {
                let (plan, arena) = {
                    let mut stream = stream;
                    while stream.next().unwrap().is_some() {}
                    let account = stream.engine().account();
                    read = account.read_bytes();
                    stream.finish().unwrap()
                };
                assert_eq!(plan.tensors.len(), tensors.len());
                for tensor in &plan.tensors {
                    let (_, data) = tensors.iter().find(|(name, _)| *name == tensor.name).unwrap();
                    let ranks = if halves { 2 } else { 1 };
                    let part = data.len() / ranks;
                    let wanted = &data[part * (rank % ranks)..][..part];
                    assert!(bytes_of(&arena, tensor) == wanted, "{} on {rank} by {route:?}", tensor.name);
                }
            }
            let total: u64 = tensors.iter().map(|(_, data)| data.len() as u64).sum();
            assert!((total..total + (64 << 10)).contains(&read), "{read} of {total}: each byte once");
        }
    }
}

#[test]
fn failures_are_reported_and_the_other_gpus_end() {
    let folder = Folder::new("several-fail");
    let path = folder.0.join("m.safetensors");
    model(&path, &[1 << 20, 4 << 20]);
    let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(2 << 20 | 100).unwrap();
    let gpus = [Emulated::new(), Emulated::new()];
    let gpus: Vec<&dyn onehop_gpu::Gpu> = gpus.iter().map(|gpu| gpu as _).collect();
    let plan = Plan::new(&opened, &Selection::default(), plan::PlanOptions::ring()).unwrap();
    let options = Options { route: Route::Cached, slot: Some(1 << 20), threads: Some(2) };
    let prepared = Prepared::for_all(&[&plan, &plan], &opened.files, &options).unwrap();
    let engines = RingEngine::start_all(&gpus, &[&plan, &plan], prepared).unwrap();
    let ends: Vec<_> = engines
        .into_iter()
        .map(|engine| {
            let mut stream = Stream::new(plan.clone(), engine);
            loop {
                match stream.next() {
                    Ok(Some(_)) => {}
                    other => break other.map(|_| ()),
                }
            }
        })
        .collect();
    assert!(matches!(&ends[..], [Err(Error::Ended { .. }), Err(Error::Cancelled)]), "{ends:?}");
}

#[test]
fn a_load_that_another_thread_stops_says_so() {
    let folder = Folder::new("stopped");
    let path = folder.0.join("model.safetensors");
    model(&path, &[64 << 20]);
    let model = Model::open(&Local, &[path]).unwrap();
    let mut stream = start(&model, Options { threads: Some(1), ..Options::default() }).unwrap();
    let stopper = stream.engine().stopper();
    std::thread::spawn(move || stopper.stop()).join().unwrap();
    assert!(matches!(stream.next(), Err(Error::Cancelled)));
}

#[test]
fn an_arena_takes_load_after_load() {
    let folder = Folder::new("arena");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &SIZES);
    let opened = Model::open(&Local, &[path]).unwrap();
    let plan = Plan::new(&opened, &Selection::default(), plan::PlanOptions::ring()).unwrap();
    let gpu = Emulated::new();
    let load = |arena: Arena| {
        let prepared = Prepared::new(&plan, &opened.files, &Options::default()).unwrap();
        let engine = RingEngine::start(&gpu, &plan, prepared.into_arenas(vec![arena])).unwrap();
        Stream::new(plan.clone(), engine).finish().unwrap().1
    };
    let first = load(Arena::new(&gpu, &plan).unwrap());
    let (place, all) = (first.addr(), first.len());
    first.fill(0, all, 0xab).unwrap();
    let again = load(Arena::again(first, &plan).unwrap());
    assert_eq!((again.addr(), again.len()), (place, all));
    for tensor in &plan.tensors {
        let (_, data) = tensors.iter().find(|(name, _)| *name == tensor.name).unwrap();
        assert!(bytes_of(&again, tensor) == *data, "{}", tensor.name);
    }
    for gap in plan.gaps() {
        let mut bytes = vec![1; (gap.end.min(all as u64) - gap.start) as usize];
        again.read(gap.start as usize, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "{gap:?}");
    }
    let half = again.slice(0..all / 2).unwrap();
    assert!(matches!(Arena::again(half, &plan), Err(Error::Arena { .. })));
    // An arena that was made for less.
    let part =
        Plan::new(&opened, &Selection::default().only(&tensors[0].0), plan::PlanOptions::ring()).unwrap();
    assert!(part.gpu_bytes < plan.gpu_bytes);
    let prepared = Prepared::new(&plan, &opened.files, &Options::default()).unwrap();
    let small = prepared.into_arenas(vec![Arena::new(&gpu, &part).unwrap()]);
    assert!(matches!(RingEngine::start(&gpu, &plan, small), Err(Error::Arena { .. })));
}

#[test]
fn a_ring_is_kept_for_the_next_load() {
    let folder = Folder::new("shelf");
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &SIZES);
    let opened = Model::open(&Local, &[path]).unwrap();
    let ring_cache = Arc::new(RingCache::default());
    let plan = Plan::new(&opened, &Selection::default(), plan::PlanOptions::ring()).unwrap();
    let options = |threads, slot| Options { threads: Some(threads), slot: Some(slot), ..Options::default() };
    let load = |options: Options| {
        let prepared = Prepared::with_ring_cache(&plan, &opened.files, &options, ring_cache.clone()).unwrap();
        Stream::new(plan.clone(), RingEngine::start(&Emulated::new(), &plan, prepared).unwrap())
    };
    let mut sizes = Vec::new();
    // The third load reuses the second's larger ring; the fourth needs a larger one.
    for options in [options(1, 65536), options(2, 1 << 20), options(1, 65536), options(3, 1 << 20)] {
        let stream = load(options);
        sizes.push(stream.engine().account().ring_bytes);
        let (plan, arena) = stream.finish().unwrap();
        for tensor in &plan.tensors {
            let (_, data) = tensors.iter().find(|(name, _)| *name == tensor.name).unwrap();
            assert!(bytes_of(&arena, tensor) == *data, "{}", tensor.name);
        }
    }
    assert!(sizes[0] < sizes[1] && sizes[1] == sizes[2] && sizes[2] < sizes[3], "{sizes:?}");
    // A cancelled load caches no ring, because threads may still use it; the next one works without.
    drop(load(options(3, 1 << 20)));
    let alone = load(options(1, 65536));
    assert_eq!(alone.engine().account().ring_bytes, sizes[0]);
}
