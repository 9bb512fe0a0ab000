//! Loads by cuFile, with a stand-in that returns short reads and fails on purpose.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use onehop_gpu::{
    Copier, Doorbells, Emulated, Gpu, GpuFile, GpuFiles, KernelJob, Launch, Place, Region, Running,
};
use onehop_load::engine::{Options, Prepared, RingEngine, Route};
use onehop_load::outcome::Outcome;
use onehop_load::stream::Stream;
use onehop_load::{Error, Local, Model, Plan, Selection, plan};
use onehop_os::{HostMem, Registers};

use crate::engine::{Folder, bytes_of, model};

/// A GPU with a file library, which it also implements.
#[derive(Clone)]
struct WithFiles {
    gpu: Emulated,
    /// Number of open files and registered buffers.
    open: Arc<AtomicUsize>,
    reads: Arc<AtomicUsize>,
    /// Index of the read that fails.
    fails: usize,
}

/// What is open, counted until dropped.
struct Opened {
    file: Arc<File>,
    of: WithFiles,
}

impl Drop for WithFiles {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl WithFiles {
    fn new(fails: usize) -> Self {
        let count = || Arc::new(AtomicUsize::new(0));
        let (open, reads) = (count(), count());
        open.store(1, Ordering::Relaxed);
        Self { gpu: Emulated::new(), open, reads, fails }
    }

    /// Counts one more.
    fn another(&self) -> Self {
        self.open.fetch_add(1, Ordering::Relaxed);
        self.clone()
    }
}

impl GpuFiles for WithFiles {
    fn open(&self, file: Arc<File>) -> onehop_gpu::Result<Box<dyn GpuFile>> {
        Ok(Box::new(Opened { file, of: self.another() }))
    }
    fn register(&self, _: &Region) -> onehop_gpu::Result<Box<dyn Send + Sync>> {
        Ok(Box::new(self.another()))
    }
    fn how(&self) -> &'static str {
        "by a stand-in"
    }
}

impl GpuFile for Opened {
    fn read(&self, into: &Region, at: u64) -> onehop_gpu::Result<usize> {
        if self.of.reads.fetch_add(1, Ordering::Relaxed) + 1 == self.of.fails {
            return Err(onehop_gpu::Error::NotSupported { what: "reading".into(), why: "it broke".into() });
        }
        // O_DIRECT requires aligned memory and offsets, the caller any; cuFile handles that.
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&*self.file));
        let plain = File::open(path).unwrap();
        let mut bytes = vec![0; into.len().min(100_003)];
        let got = plain.read_at(&mut bytes, at).unwrap();
        into.write(0, &bytes[..got])?;
        Ok(got)
    }
    fn write(&self, _: &Region, _: u64) -> onehop_gpu::Result<usize> {
        unreachable!("a load writes no file")
    }
}

impl Gpu for WithFiles {
    fn name(&self) -> &str {
        "with-files"
    }
    fn simulated(&self) -> bool {
        true
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
    fn files(&self) -> onehop_gpu::Result<Arc<dyn GpuFiles>> {
        Ok(Arc::new(self.another()))
    }
    fn map_registers(&self, regs: Arc<dyn Registers>) -> onehop_gpu::Result<Doorbells> {
        self.gpu.map_registers(regs)
    }
    fn prepare(&self, launch: &Launch) -> onehop_gpu::Result<()> {
        self.gpu.prepare(launch)
    }
    fn launch(&self, launch: &Launch, job: &KernelJob) -> onehop_gpu::Result<Box<dyn Running>> {
        self.gpu.launch(launch, job)
    }
}

const SIZES: [usize; 6] = [1 << 20, 1, 777, 5 << 20 | 3, 0, 12_345];
const OPTIONS: Options = Options { route: Route::CuFile, threads: Some(3), slot: Some(1 << 20) };

fn begin(gpu: &dyn Gpu, model: &Model, selection: &Selection) -> Result<Stream<RingEngine>, Error> {
    let plan = Plan::new(model, selection, plan::PlanOptions::ring()).unwrap();
    let prepared = Prepared::new(&plan, &model.files, &OPTIONS)?;
    Ok(Stream::new(plan.clone(), RingEngine::start(gpu, &plan, prepared)?))
}

#[test]
fn every_byte_lands_and_everything_is_released() {
    let (folder, gpu) = (Folder::new("cufile"), WithFiles::new(0));
    let path = folder.0.join("m.safetensors");
    let tensors = model(&path, &SIZES);
    let opened = Model::open(&Local, &[path]).unwrap();
    let mut stream = begin(&gpu, &opened, &Selection::default()).unwrap();
    while let Some(streamed) = stream.next().unwrap() {
        let (_, data) = tensors.iter().find(|(name, _)| *name == streamed.tensor.name).unwrap();
        assert!(bytes_of(streamed.arena, streamed.tensor) == *data, "{}", streamed.tensor.name);
    }
    let account = stream.engine().account();
    let total = SIZES.iter().sum::<usize>() as u64;
    assert_eq!((account.cufile_bytes, account.cached_bytes + account.direct_bytes), (total, 0));
    assert_eq!((account.ring_bytes, account.cufile_way), (0, Some("by a stand-in")));
    let (plan, arena) = stream.finish().unwrap();
    let outcome = Outcome::new(&[&plan], &account, std::time::Duration::from_secs(1), None);
    assert_eq!((outcome.route, outcome.read_bytes), ("cufile", total));
    assert!(outcome.route_why.contains("stand-in"));
    for tensor in &plan.tensors {
        let (_, data) = tensors.iter().find(|(name, _)| *name == tensor.name).unwrap();
        assert!(bytes_of(&arena, tensor) == *data, "{}, at the end", tensor.name);
    }
    assert_eq!(gpu.open.load(Ordering::Relaxed), 1, "files or memory are still registered");
}

#[test]
fn a_rank_s_columns_land_packed() {
    let folder = Folder::new("cufile-rank");
    let path = folder.0.join("m.safetensors");
    let data: Vec<u8> = (0..64 * 9000).map(|i: u32| ((i * 31) >> 3) as u8).collect();
    let header = r#"{"w":{"dtype":"U8","shape":[64,9000],"data_offsets":[0,576000]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    std::fs::write(&path, file).unwrap();
    let opened = Model::open(&Local, &[path]).unwrap();
    let selection = Selection::default().cut("w", 1).rank(1, 3).unwrap();
    let mut stream = begin(&WithFiles::new(0), &opened, &selection).unwrap();
    while stream.next().unwrap().is_some() {}
    let (plan, arena) = stream.finish().unwrap();
    let want: Vec<u8> = data.chunks(9000).flat_map(|row| row[3000..6000].iter().copied()).collect();
    assert!(bytes_of(&arena, &plan.tensors[0]) == want);
}

#[test]
fn refusals_and_failures_are_reported() {
    let folder = Folder::new("cufile-refuses");
    let path = folder.0.join("m.safetensors");
    model(&path, &SIZES);
    let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
    let refused = begin(&Emulated::new(), &opened, &Selection::default()).err().unwrap().to_string();
    assert!(refused.contains("cuFile cannot be used for GPU emu"), "{refused}");

    let gpu = WithFiles::new(5);
    let mut stream = begin(&gpu, &opened, &Selection::default()).unwrap();
    let error = loop {
        match stream.next() {
            Ok(next) => assert!(next.is_some(), "a broken read went unnoticed"),
            Err(error) => break error,
        }
    };
    assert!(matches!(&error, Error::Read { source, .. } if source.to_string().contains("broke")), "{error}");
    drop(stream);
    assert_eq!(gpu.open.load(Ordering::Relaxed), 1);

    let (gpu, plan) =
        (WithFiles::new(0), Plan::new(&opened, &Selection::default(), plan::PlanOptions::ring()));
    let (plan, gpus): (_, [&dyn Gpu; 2]) = (plan.unwrap(), [&gpu, &gpu]);
    let prepared = Prepared::for_all(&[&plan, &plan], &opened.files, &OPTIONS).unwrap();
    let error = RingEngine::start_all(&gpus, &[&plan, &plan], prepared).err().unwrap();
    assert!(matches!(error, Error::NotByCuFile { .. }), "{error}");

    let stream = begin(&gpu, &opened, &Selection::default());
    File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    let mut stream = stream.unwrap();
    let ended = loop {
        match stream.next() {
            Ok(Some(_)) => {}
            // All bytes may have arrived before; then the recheck of the file detects the change.
            Ok(None) => break opened.still_same().err().unwrap(),
            Err(error) => break error,
        }
    };
    assert!(matches!(ended, Error::Ended { .. } | Error::Changed { .. }), "{ended}");
}
