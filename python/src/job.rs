//! `onehop._native.Job`: a load under way. A thread of its own does it, so that Python goes on, and Ctrl-C is answered at
//! once, whatever the disk or the GPU do.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use onehop_gpu::Region;
use onehop_load::check::{BY_FILES, Verdict};
use onehop_load::engine::{self, Arena, Prepared, RingEngine, Stopper};
use onehop_load::model::Tensor as Entry;
use onehop_load::plan::{Options, Placed};
use onehop_load::stream::Stream;
use onehop_load::{LocalFile, Manifest, Model, Part, Plan, Selection, TensorInfo, check};
use onehop_transfer::{Chosen, Progress};
use pyo3::prelude::*;

use crate::descriptors;
use crate::device::{Device, DeviceSpec};
use crate::dlpack;
use crate::drive::OpenDrive;
use crate::dtype::{carried, data_type};
use crate::error::{Error, Result};
use crate::model::Dim;
use crate::outcome::{Outcome, Start};
use crate::tensor::{Tensor, packed_strides};

/// How long Python is not asked whether somebody pressed Ctrl-C.
pub(crate) const SIGNAL_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long a load that is cancelled is waited for: its memory is given back then, in all likelihood.
const END: Duration = Duration::from_secs(1);

/// What every tensor's address is a multiple of, if it has as many bytes: XLA and others want it of scalars too.
const ALIGN: u64 = 64;

/// What is to be loaded, and how.
pub(crate) struct Request {
    pub model: Arc<Model>,
    pub device: DeviceSpec,
    pub wanted: Wanted,
    pub origin: Origin,
    pub verify: bool,
    pub manifest: Option<PathBuf>,
    pub measure_limit: bool,
}

/// Where the bytes come from, and how.
pub(crate) enum Origin {
    /// Files of this machine.
    Files(engine::Options),
    /// A drive that onehop drives by itself.
    Drive(Arc<OpenDrive>, onehop_transfer::Options),
}

/// What of the model.
pub(crate) enum Wanted {
    Selection(Selection),
    /// A part of one tensor, and how it is looked at.
    Part {
        tensor: Entry,
        part: Part,
        view: View,
    },
}

/// The elements of a part that are given away.
pub(crate) struct View {
    pub dims: Vec<Dim>,
}

enum Event {
    Tensor(Box<Tensor>),
    Done(Result<Box<Outcome>>),
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Ends the engine, once there is one.
    stopper: Mutex<Option<Stopper>>,
    bytes: AtomicU64,
    total: AtomicU64,
}

impl Shared {
    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        if let Some(stopper) = &*self.stopper.lock().unwrap_or_else(PoisonError::into_inner) {
            stopper.stop();
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// A drive's load counts whole blocks, of which there may be more than bytes of tensors, or fewer.
impl Progress for Shared {
    fn moved(&self, bytes: u64) {
        let most = self.total.load(Ordering::Acquire);
        let add = |now: u64| Some(now.saturating_add(bytes).min(most));
        let _ = self.bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
    }

    fn is_cancelled(&self) -> bool {
        self.is_stopped()
    }
}

/// A load under way. Dropping it ends it.
#[pyclass(frozen, module = "onehop")]
pub(crate) struct Job {
    /// None once it was dropped in a forked child.
    events: Mutex<Option<Receiver<Event>>>,
    process: u32,
    shared: Arc<Shared>,
    /// Whether there is nothing more to come: it was said how the load ended.
    over: AtomicBool,
    outcome: Mutex<Option<Outcome>>,
}

impl Job {
    pub(crate) fn start(request: Request) -> Result<Self> {
        let (sender, events) = channel();
        let shared = Arc::<Shared>::default();
        let work = LoadTask { request, shared: shared.clone(), sender, start: Instant::now() };
        let thread = std::thread::Builder::new().name("onehop load".into());
        thread.spawn(move || work.run()).map_err(Error::Thread)?;
        Ok(Self {
            events: Mutex::new(Some(events)),
            process: std::process::id(),
            shared,
            over: AtomicBool::new(false),
            outcome: Mutex::default(),
        })
    }

    /// Whether this is a child of the process that began the load. The thread that loads is not there, and whatever it or
    /// another thread had locked when the process forked stays locked.
    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// What comes next. Whoever takes the end says so before another can look.
    fn receive(&self, limit: Duration) -> std::result::Result<Event, RecvTimeoutError> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let event = events.as_ref().ok_or(RecvTimeoutError::Disconnected)?.recv_timeout(limit);
        if matches!(event, Ok(Event::Done(_))) {
            self.over.store(true, Ordering::Release);
        }
        event
    }

    fn wait(&self, py: Python<'_>) -> PyResult<Option<Event>> {
        if self.is_forked() {
            let why =
                "this load was begun before a fork, by the parent, which goes on with it: load in the child";
            return Err(Error::Asked(why.into()).into());
        }
        loop {
            py.check_signals().inspect_err(|_| self.cancel(py))?;
            if self.shared.is_stopped() {
                return Err(Error::from(onehop_load::Error::Cancelled).into());
            }
            if self.over.load(Ordering::Acquire) {
                return Ok(None);
            }
            match py.detach(|| self.receive(SIGNAL_POLL_INTERVAL)) {
                Ok(event) => return Ok(Some(event)),
                Err(RecvTimeoutError::Timeout) => {}
                // Another thread of Python may have been told of the end.
                Err(RecvTimeoutError::Disconnected) if self.over.load(Ordering::Acquire) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => return Err(Error::Lost.into()),
            }
        }
    }
}

#[pymethods]
impl Job {
    /// The next tensor whose bytes are all there; None when there are no more.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Tensor>> {
        match self.wait(py)? {
            None => Ok(None),
            Some(Event::Tensor(tensor)) => Ok(Some(*tensor)),
            Some(Event::Done(outcome)) => {
                *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(*outcome?);
                Ok(None)
            }
        }
    }

    /// How the load went, once it is over.
    #[getter]
    fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes of tensors that have arrived so far, and all that are to come.
    #[getter]
    fn progress(&self) -> (u64, u64) {
        (self.shared.bytes.load(Ordering::Acquire), self.shared.total.load(Ordering::Acquire))
    }

    /// Has the load end as soon as what is under way allows, and waits a second for that. What the disk or the GPU never
    /// answer goes on alone.
    fn cancel(&self, py: Python<'_>) {
        if self.over.load(Ordering::Acquire) || self.is_forked() {
            return;
        }
        self.shared.stop();
        py.detach(|| {
            let start = Instant::now();
            while start.elapsed() < END
                && !matches!(self.receive(SIGNAL_POLL_INTERVAL), Err(RecvTimeoutError::Disconnected))
            {
            }
        });
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.is_forked() {
            // Dropping it might wait for a thread that was sending when the process forked.
            std::mem::forget(self.events.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            return;
        }
        self.shared.stop();
    }
}

/// What the thread does.
struct LoadTask {
    request: Request,
    shared: Arc<Shared>,
    sender: Sender<Event>,
    start: Instant,
}

impl LoadTask {
    fn run(self) {
        let outcome = match &self.request.origin {
            Origin::Files(options) => self.load(options),
            Origin::Drive(drive, options) => self.load_from_drive(drive, options),
        };
        let Self { sender, request, .. } = self;
        // Closes the drive, if nothing else has it open: who hears of the end may open it again.
        drop(request);
        // Whoever waited may have gone.
        let _ = sender.send(Event::Done(outcome.map(Box::new)));
    }

    fn go_on(&self) -> bool {
        !self.shared.is_stopped()
    }

    fn check(&self) -> Result<()> {
        if self.go_on() { Ok(()) } else { Err(onehop_load::Error::Cancelled.into()) }
    }

    fn manifest(&self) -> Result<Option<Manifest>> {
        let manifest = self.request.manifest.as_deref().map(|path| Manifest::read(&LocalFile::open(path)?));
        Ok(manifest.transpose()?)
    }

    fn load(&self, options: &engine::Options) -> Result<Outcome> {
        let Request { model, device, .. } = &self.request;
        let manifest = self.manifest()?;
        let plan = self.plan()?;
        descriptors::make_room(model.files.len());
        let (prepared, device, begin) = std::thread::scope(|scope| {
            // CUDA takes a while to start, and some milliseconds for its first call after a pause: what needs no GPU is done
            // meanwhile.
            let gpu = scope.spawn(|| {
                let device = device.open()?;
                let begin = Instant::now();
                fits(&plan, &device)?;
                let arena = Arena::new(&*device.gpu, &plan)?;
                Ok::<_, Error>((device, arena, begin))
            });
            let prepared = Prepared::with_ring_cache(&plan, &model.files, options, device.ring_cache())?;
            let (device, arena, begin) = gpu.join().map_err(|_| Error::Lost)??;
            Ok::<_, Error>((prepared.into_arenas(vec![arena]), device, begin))
        })?;
        self.shared.total.store(plan.tensor_bytes, Ordering::Release);
        let engine = RingEngine::start(&*device.gpu, &plan, prepared)?;
        *self.shared.stopper.lock().unwrap_or_else(PoisonError::into_inner) = Some(engine.stopper());
        // Whoever cancelled before there was a stopper has left word.
        self.check()?;
        let stream = self.arrive(Stream::new(plan, engine), &device)?;
        let took = begin.elapsed();
        let warnings = model.still_same()?;
        let account = stream.engine().account();
        let rate = if self.request.measure_limit { stream.engine().copy_rate(&*device.gpu)? } else { None };
        let (plan, arena) = stream.finish()?;
        let verdict = self.verify(&plan, &device, &arena, manifest.as_ref())?;
        let start = Start { begun: self.start, gpu: begin - self.start };
        let went = onehop_load::outcome::Outcome {
            warnings,
            ..onehop_load::outcome::Outcome::new(&[&plan], &account, took, rate)
        };
        Ok(Outcome::new(model, &device, account, went, &start, verdict))
    }

    /// The tensors come when all of them are there.
    fn load_from_drive(&self, drive: &OpenDrive, options: &onehop_transfer::Options) -> Result<Outcome> {
        let Wanted::Selection(selection) = &self.request.wanted else { return Err(Error::Lost) };
        let manifest = self.manifest()?;
        let plan = drive.plan(selection, ALIGN)?;
        self.shared.total.store(plan.tensor_bytes, Ordering::Release);
        let device = self.request.device.open()?;
        let begin = Instant::now();
        fits(&plan, &device)?;
        let gpu = Chosen { gpu: device.gpu.clone(), why: device.why.clone() };
        let loaded = drive.load(&gpu, options, &plan, &*self.shared)?;
        for placed in &plan.tensors {
            let tensor = whole(placed, &loaded.arena, device.dlpack)?;
            let _ = self.sender.send(Event::Tensor(Box::new(tensor)));
        }
        self.shared.bytes.store(plan.tensor_bytes, Ordering::Release);
        if self.request.verify
            && let Some(changed) = drive.on_drive.check_maps(&*self.shared)?
        {
            return Err(changed.into());
        }
        let verdict = self.verify(&plan, &device, &loaded.arena, manifest.as_ref())?;
        let start = Start { begun: self.start, gpu: begin - self.start };
        Ok(Outcome::of_drive(drive, loaded, plan.gpu_bytes, &start, verdict))
    }

    fn plan(&self) -> Result<Plan> {
        let options = Options { small: ALIGN, ..Options::ring() };
        let model = &self.request.model;
        let plan = match &self.request.wanted {
            Wanted::Selection(selection) => Plan::new(model, selection, options),
            Wanted::Part { tensor, part, .. } => Plan::of_part(model, tensor, part.clone(), options),
        };
        Ok(plan.map_err(onehop_load::Error::from)?)
    }

    /// Hands tensors out as they arrive.
    fn arrive(&self, mut stream: Stream<RingEngine>, device: &Device) -> Result<Stream<RingEngine>> {
        while let Some(lent) = stream.next()? {
            let tensor = match &self.request.wanted {
                Wanted::Selection(_) => whole(lent.tensor, lent.arena, device.dlpack)?,
                Wanted::Part { tensor, part, view } => {
                    view.tensor(&tensor.info, part, lent.arena, lent.tensor.at, device.dlpack)?
                }
            };
            self.shared.bytes.store(stream.bytes(), Ordering::Release);
            let _ = self.sender.send(Event::Tensor(Box::new(tensor)));
        }
        Ok(stream)
    }

    fn verify(
        &self,
        plan: &Plan,
        device: &Device,
        arena: &Region,
        manifest: Option<&Manifest>,
    ) -> Result<(bool, Option<String>)> {
        let (model, go_on) = (&self.request.model, || self.go_on());
        let mut verdict: Verdict<Error> = Verdict { compared: None, compared_by: BY_FILES, manifest: None };
        if let Origin::Drive(drive, _) = &self.request.origin {
            verdict.compared_by = drive.on_drive.compared_by();
        }
        if self.request.verify {
            let differs = check::compare(plan, &model.files, arena, &go_on)?;
            let differs = differs.map(|differs| Error::Differs { at: differs.at, tensor: differs.tensor });
            verdict.compared = Some(differs.map_or(Ok(()), Err));
        }
        if let (Some(manifest), Some(path)) = (manifest, &self.request.manifest) {
            let sums = check::check_sums(plan, &*device.gpu, arena, &go_on)?;
            let file = path.display().to_string();
            let compared = check::against(manifest, model, plan, &sums);
            verdict.manifest =
                Some(compared.map_err(|why| onehop_load::Error::Manifest { file, why }.into()));
        }
        let (verified, by) = (verdict.verified().unwrap_or(false), verdict.by());
        verdict.failure().map_or(Ok((verified, by)), Err)
    }
}

fn fits(plan: &Plan, device: &Device) -> Result<()> {
    match plan.fit_on(&*device.gpu)?.filter(|fit| !fit.fits) {
        Some(fit) => Err(Error::Fit {
            needed: fit.peak_gpu_bytes,
            free: fit.free_gpu_bytes,
            missing: fit.missing_bytes,
        }),
        None => Ok(()),
    }
}

/// Bytes of the arena.
fn memory(arena: &Region, at: u64, bytes: u64) -> Result<Region> {
    Ok(arena.slice(at as usize..(at + bytes) as usize)?)
}

fn whole(placed: &Placed, arena: &Region, device: dlpack::Device) -> Result<Tensor> {
    let Placed { name, dtype, shape, at, bytes, .. } = placed;
    let info =
        TensorInfo { name: name.clone(), dtype: *dtype, shape: shape.clone(), offset: 0, bytes: *bytes };
    let given: Vec<i64> = carried(&info).shape.iter().map(|n| *n as i64).collect();
    Ok(Tensor {
        strides: packed_strides(&given),
        shape: given,
        carrier: data_type(*dtype),
        memory: memory(arena, *at, *bytes)?,
        name: info.name,
        dtype: *dtype,
        logical: info.shape,
        device,
    })
}

impl View {
    /// The tensor of these elements, of a part that lies at `at`.
    fn tensor(
        &self,
        info: &TensorInfo,
        part: &Part,
        arena: &Region,
        at: u64,
        device: dlpack::Device,
    ) -> Result<Tensor> {
        let carrier = data_type(info.dtype);
        let held: Vec<i64> = part.shape.iter().map(|n| *n as i64).collect();
        let (mut shape, mut strides, mut first, mut last) = (Vec::new(), Vec::new(), 0, 0);
        for ((dim, held), stride) in self.dims.iter().zip(&part.shape).zip(packed_strides(&held)) {
            let stride = stride as u64;
            // A dimension that the part has more of than was asked for, it has all of.
            let start = if *held == dim.end() - dim.first { 0 } else { dim.first };
            first += start * stride;
            last += (start + dim.count.saturating_sub(1) * dim.step) * stride;
            if !dim.single {
                shape.push(dim.count as i64);
                strides.push((stride * dim.step) as i64);
            }
        }
        let is_whole = shape.iter().map(|n| *n as u64).eq(carried(info).shape);
        let width = u64::from(carrier.bits / 8);
        let elements = if self.dims.iter().any(|dim| dim.count == 0) { 0 } else { last + 1 - first };
        let first = if elements == 0 { 0 } else { first };
        Ok(Tensor {
            name: info.name.clone(),
            dtype: info.dtype,
            carrier,
            logical: if is_whole { info.shape.clone() } else { shape.iter().map(|n| *n as u64).collect() },
            memory: memory(arena, at + first * width, elements * width)?,
            shape,
            strides,
            device,
        })
    }
}
