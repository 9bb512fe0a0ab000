//! Failures other than wrong bytes: who gets the error, how soon, and what the load reports afterwards.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use onehop_gpu::{
    Copier, Doorbells, Emulated, Error as GpuError, Gpu, KernelJob, Launch, Place, Region, Running,
};
use onehop_load::engine::{Options, Prepared, RingEngine, Route};
use onehop_load::outcome::Outcome;
use onehop_load::stream::Stream;
use onehop_load::{Error, Local, Model, Plan, Selection, plan};
use onehop_os::page_cache::cached_bytes;
use onehop_os::{HostMem, Registers};
use rustix::fs::{Advice, fadvise};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::engine::{Folder, model};

fn ring_plan(model: &Model, selection: &Selection) -> Plan {
    Plan::new(model, selection, plan::PlanOptions::ring()).unwrap()
}

/// The first GPU has received everything when the other's part fails.
#[test]
fn a_gpu_s_failure_is_reported_to_its_waiting_caller() {
    let folder = Folder::new("rank-fails");
    let path = folder.0.join("m.safetensors");
    model(&path, &[4 << 20]);
    let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
    let length = path.metadata().unwrap().len();
    File::options().write(true).open(&path).unwrap().set_len(length - 4096).unwrap();
    let half = |rank| ring_plan(&opened, &Selection::default().cut("*", 0).rank(rank, 2).unwrap());
    let plans = [half(0), half(1)];
    let plans: Vec<_> = plans.iter().collect();
    let gpus = [Emulated::new(), Emulated::new()];
    let gpus: Vec<&dyn Gpu> = gpus.iter().map(|gpu| gpu as _).collect();
    for _ in 0..20 {
        let options = Options { route: Route::Cached, slot: Some(1 << 20), threads: Some(1) };
        let prepared = Prepared::for_all(&plans, &opened.files, &options).unwrap();
        let engines = RingEngine::start_all(&gpus, &plans, prepared).unwrap();
        let mut streams = engines.into_iter().zip(&plans).map(|(e, plan)| Stream::new((*plan).clone(), e));
        let (mut first, mut other) = (streams.next().unwrap(), streams.next().unwrap());
        // The first GPU either has its half, or gets the other's error.
        let error = first.next().and_then(|_| other.next().map(|_| ()));
        assert!(matches!(error, Err(Error::Ended { .. })), "{error:?}");
    }
}

#[test]
fn a_watcher_may_end_a_load_within_a_tensor() {
    let folder = Folder::new("watched");
    let path = folder.0.join("m.safetensors");
    model(&path, &[64 << 20]);
    let opened = Model::open(&Local, &[path]).unwrap();
    let plan = ring_plan(&opened, &Selection::default());
    let begin = |look: fn(u64) -> bool| {
        let options = Options { threads: Some(1), ..Options::default() };
        let prepared = Prepared::new(&plan, &opened.files, &options).unwrap();
        let mut engine = RingEngine::start(&Emulated::new(), &plan, prepared).unwrap();
        engine.watch(look);
        Stream::new(plan.clone(), engine)
    };
    assert!(matches!(begin(|_| false).next(), Err(Error::Cancelled)));
    // Reported progress never exceeds the total.
    assert!(begin(|read| read <= 65 << 20).next().unwrap().is_some());
}

/// A GPU without room for more than the given memory.
struct FullGpu(Emulated);

impl Gpu for FullGpu {
    fn name(&self) -> &str {
        "full"
    }
    fn simulated(&self) -> bool {
        false
    }
    fn alloc(&self, place: Place, bytes: usize) -> onehop_gpu::Result<Region> {
        if place == Place::Vram && bytes == 8 << 20 {
            return self.0.alloc(place, bytes);
        }
        let (name, text) = ("CUDA_ERROR_OUT_OF_MEMORY".into(), "out of memory".into());
        let what = format!("allocating {bytes} bytes");
        Err(GpuError::Driver { what, call: "cuMemAlloc", name, code: 2, text, hint: String::new() })
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
        self.0.launch(launch, job)
    }
}

#[test]
fn a_model_that_fills_the_memory_is_loaded() {
    let folder = Folder::new("full");
    let path = folder.0.join("m.safetensors");
    model(&path, &[8 << 20]);
    let opened = Model::open(&Local, &[path]).unwrap();
    let plan = ring_plan(&opened, &Selection::default());
    let prepared = Prepared::new(&plan, &opened.files, &Options::default()).unwrap();
    let gpu = FullGpu(Emulated::new());
    let mut stream = Stream::new(plan.clone(), RingEngine::start(&gpu, &plan, prepared).unwrap());
    while stream.next().unwrap().is_some() {}
    assert_eq!(stream.engine().copy_rate(&gpu).unwrap(), None, "the rate of its copy engine is not known");
}

#[test]
fn bytes_that_the_page_cache_fetched_do_not_count_as_cached() {
    let folder = Folder::new("through");
    let path = folder.0.join("m.safetensors");
    model(&path, &[24 << 20]);
    let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
    let (file, plan) = (File::open(&path).unwrap(), ring_plan(&opened, &Selection::default()));
    fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    if cached_bytes(&file, 0, 24 << 20).unwrap() > 0 {
        println!("SKIP: this file system keeps pages that it should drop");
        return;
    }
    let load = || {
        let options = Options { route: Route::Cached, threads: Some(1), slot: None };
        let prepared = Prepared::new(&plan, &opened.files, &options).unwrap();
        let mut stream =
            Stream::new(plan.clone(), RingEngine::start(&Emulated::new(), &plan, prepared).unwrap());
        while stream.next().unwrap().is_some() {}
        let account = stream.engine().account();
        let outcome = Outcome::new(&[&plan], &account, Duration::from_secs(1), None);
        (account, outcome)
    };
    let (cold, outcome) = load();
    // The kernel reads ahead.
    assert!(cold.cache_miss_bytes > 1 << 20 && cold.read_bytes() >= 24 << 20, "{cold:?}");
    assert!(outcome.route_why.contains("requested"), "{}", outcome.route_why);
    let (warm, outcome) = load();
    assert_eq!((warm.cache_miss_bytes, warm.asked), (0, true), "{warm:?}");
    assert_eq!((outcome.limit.what, outcome.route), ("the copy engine", "cpu/cached"));
}

/// A folder shown elsewhere by overlayfs, as with container images.
struct Overlay(Folder);

impl Overlay {
    fn new(sizes: &[usize]) -> Result<Self, rustix::io::Errno> {
        let overlay = Self(Folder::new("overlay"));
        let [one, other, at] = ["one", "other", "at"].map(|name| overlay.0.0.join(name));
        [&one, &other, &at].into_iter().for_each(|dir| std::fs::create_dir_all(dir).unwrap());
        model(&one.join("m.safetensors"), sizes);
        let layers = CString::new(format!("lowerdir={}:{}", one.display(), other.display())).unwrap();
        rustix::mount::mount("overlay", &at, "overlay", MountFlags::RDONLY, &*layers)?;
        Ok(overlay)
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.0.join("at"), UnmountFlags::DETACH);
    }
}

#[test]
fn cached_files_of_a_container_s_image_come_out_of_the_page_cache() {
    let overlay = match Overlay::new(&[8 << 20]) {
        Ok(overlay) => overlay,
        Err(why) => {
            let message = format!("SKIPPED: an overlay cannot be mounted here: {why}\n");
            let _ = std::io::stderr().write_all(message.as_bytes());
            return;
        }
    };
    let opened = Model::open(&Local, &[overlay.0.0.join("at/m.safetensors")]).unwrap();
    let plan = ring_plan(&opened, &Selection::default());
    let prepared = Prepared::new(&plan, &opened.files, &Options::default()).unwrap();
    let mut stream = Stream::new(plan.clone(), RingEngine::start(&Emulated::new(), &plan, prepared).unwrap());
    while stream.next().unwrap().is_some() {}
    let account = stream.engine().account();
    assert!(account.cached_bytes >= 8 << 20 && account.read_bytes() == account.cached_bytes, "{account:?}");
    assert_eq!(Outcome::new(&[&plan], &account, Duration::from_secs(1), None).route, "cpu/cached");
}
