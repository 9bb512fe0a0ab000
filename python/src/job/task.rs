//! The loading thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use onehop_gpu::{Emulated, Gpu, Place, Region};
use onehop_load::check::{BY_FILES, Verdict};
use onehop_load::engine::{self, Arena, Prepared, RingEngine, Segments, Stopper};
use onehop_load::group::Met;
use onehop_load::plan::{Placed, PlanOptions};
use onehop_load::stream::Stream;
use onehop_load::{LocalFile, Manifest, Model, Plan, check};
use onehop_transfer::Chosen;

use super::placed::{fits, memory, whole};
use super::{JobShared, LoadEvent, LoadOrigin, LoadRequest, LoadScope, SIGNAL_POLL_INTERVAL, TensorMemory};
use crate::borrowed::BorrowedMemory;
use crate::descriptors;
use crate::device::GpuDevice;
use crate::drive::OpenDrive;
use crate::error::{Error, Result};
use crate::outcome::{LoadStart, Outcome};
use crate::pool::Pool;
use crate::tensor::Tensor;
use crate::views;

/// The number of segments in a bounded stream's memory, and the least bytes of one.
const SEGMENTS: u64 = 8;
const LEAST_SEGMENT: u64 = 64 << 10;

/// Memory that Python allocates is a multiple of this: frameworks view all of it as any type.
const ARENA_UNIT: u64 = 512;

/// The alignment of every tensor that has as many bytes: XLA and others require it even for scalars.
const ALIGN: u64 = 64;

/// The thread's task.
pub(super) struct LoadTask {
    pub(super) request: LoadRequest,
    pub(super) shared: Arc<JobShared>,
    pub(super) sender: Sender<LoadEvent>,
    pub(super) brought: Receiver<BorrowedMemory>,
    pub(super) start: Instant,
    /// Whether connecting to the group has begun: from then on it notifies the other processes.
    pub(super) has_met: AtomicBool,
}

impl LoadTask {
    pub(super) fn run(self) {
        let outcome = match &self.request.origin {
            LoadOrigin::Files(options) => self.load(options).inspect_err(|error| self.decline(error)),
            LoadOrigin::Drive(drive, options) => self.load_from_drive(drive, options),
        };
        let Self { sender, request, .. } = self;
        // Closes the drive, if nothing else has it open: after the end, Python may reopen it.
        drop(request);
        // The waiting thread may have ended.
        let _ = sender.send(LoadEvent::Done(outcome.map(Box::new)));
    }

    /// Reports an error to the group's other processes before this one met them.
    fn decline(&self, error: &Error) {
        if let Some((group, _)) =
            self.request.group.as_ref().filter(|_| !self.has_met.load(Ordering::Acquire))
        {
            group.decline(&error.to_string());
        }
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
        let LoadRequest { model, device, memory, .. } = &self.request;
        let manifest = self.manifest()?;
        let plan = self.plan()?;
        descriptors::make_room(model.files.len());
        let is_shared = self.request.group.is_some();
        let (prepared, device, begin, arena) = std::thread::scope(|scope| {
            // CUDA takes a while to start, and some milliseconds for its first call after a pause. Other work is done
            // meanwhile.
            let gpu = scope.spawn(|| {
                let device = device.open()?;
                let begin = Instant::now();
                let own = *memory == TensorMemory::Own;
                let new = if is_shared { Arena::shared } else { Arena::new };
                let arena = own.then(|| fits(&plan, &device).and_then(|()| Ok(new(&*device.gpu, &plan)?)));
                Ok::<_, Error>((device, arena.transpose()?, begin))
            });
            let met = self.meet(&plan, options)?;
            let met_at = Instant::now();
            let ring_cache = device.ring_cache();
            let prepared = match met {
                Some(met) => Prepared::for_group(&plan, &model.files, options, ring_cache, met)?,
                None => Prepared::with_ring_cache(&plan, &model.files, options, ring_cache)?,
            };
            let (device, arena, begin) = gpu.join().map_err(|_| Error::Lost)??;
            // A rank that waits for others has not begun.
            let begin = if is_shared { begin.max(met_at) } else { begin };
            Ok::<_, Error>((prepared, device, begin, arena))
        })?;
        self.shared.total.store(plan.tensor_bytes, Ordering::Release);
        match memory {
            TensorMemory::Own => {
                let arena = arena.ok_or(Error::Lost)?;
                self.fill_arena(plan, &device, begin, prepared, arena, manifest.as_ref())
            }
            TensorMemory::Arena => self.fill_given_arena(plan, &device, begin, prepared, manifest.as_ref()),
            TensorMemory::Bounded(most) => self.fill_pool(plan, &device, begin, prepared, *most),
        }
    }

    /// Connects to the group, if there is one.
    fn meet(&self, plan: &Plan, options: &engine::Options) -> Result<Option<Met>> {
        let LoadRequest { model, group, .. } = &self.request;
        let Some((group, cuts)) = group else { return Ok(None) };
        self.has_met.store(true, Ordering::Release);
        let slot = engine::slot_in_group(plan, &model.files, options, group.size());
        Ok(Some(group.meet(plan, &model.files, cuts, slot, &|| self.go_on())?))
    }

    fn fill_arena(
        &self,
        plan: Plan,
        device: &GpuDevice,
        begin: Instant,
        prepared: Prepared,
        arena: Arena,
        manifest: Option<&Manifest>,
    ) -> Result<Outcome> {
        let prepared = prepared.into_arenas(vec![arena]);
        let engine = RingEngine::start_in_group(&device.gpu, &plan, prepared)?;
        self.stop_by(engine.stopper())?;
        let stream = self.arrive(Stream::new(plan, engine), device)?;
        let (ended, arena) = self.end(stream, device, begin)?;
        let verdict = self.verify(&ended.plan, device, &arena, manifest)?;
        Ok(ended.outcome(&self.request.model, device, self.start, verdict))
    }

    /// On a GPU, Python allocates the arena.
    fn fill_given_arena(
        &self,
        plan: Plan,
        device: &GpuDevice,
        begin: Instant,
        prepared: Prepared,
        manifest: Option<&Manifest>,
    ) -> Result<Outcome> {
        let bytes = plan.gpu_bytes.max(1).next_multiple_of(ARENA_UNIT) as usize;
        *self.shared.layout.lock().unwrap_or_else(PoisonError::into_inner) = Some(views::layout(&plan));
        let Some(gpu) = &device.cuda else {
            let region = match &self.request.group {
                Some(_) => device.gpu.peers()?.alloc_shared(bytes, &[])?,
                None => device.gpu.arena(bytes)?,
            };
            let arena = Tensor::of_bytes(region.clone(), device.dlpack);
            let _ = self.sender.send(LoadEvent::Arena(Box::new(arena)));
            let arena = Arena::again(region, &plan)?;
            return self.fill_arena(plan, device, begin, prepared, arena, manifest);
        };
        let arena = Arena::again(self.request_memory(bytes)?.into_region(gpu)?, &plan)?;
        self.fill_arena(plan, device, begin, prepared, arena, manifest)
    }

    /// Reuses the memory as tensors are freed.
    fn fill_pool(
        &self,
        plan: Plan,
        device: &GpuDevice,
        begin: Instant,
        prepared: Prepared,
        most: u64,
    ) -> Result<Outcome> {
        let bytes = most.min(plan.gpu_bytes).max(1).next_multiple_of(ARENA_UNIT) as usize;
        let pool = match &device.cuda {
            Some(gpu) => Pool::of_borrowed(self.request_memory(bytes)?.into_region(gpu)?),
            None => Pool::of_cpu(device.gpu.clone(), device.gpu.arena(bytes)?),
        };
        let _ = self.shared.pool.set((pool.clone(), device.cuda.clone()));
        let loaded = self.fill_segments(plan, device, begin, prepared, &pool);
        pool.close();
        let grown = pool.grown();
        let (mut ended, _) = loaded?;
        if grown > 0 {
            ended.warnings.push(format!(
                "the memory of the stream grew by {grown} bytes beyond max_bytes: tensors were kept, or one is longer"
            ));
        }
        Ok(ended.outcome(&self.request.model, device, self.start, (false, None)))
    }

    fn fill_segments(
        &self,
        plan: Plan,
        device: &GpuDevice,
        begin: Instant,
        prepared: Prepared,
        pool: &Arc<Pool>,
    ) -> Result<(Ended, Arc<Segments>)> {
        let mut left = vec![0usize; plan.segments.len()];
        let segment_of =
            |plan: &Plan, tensor: &Placed| (tensor.bytes > 0).then(|| plan.segment_of(tensor.at));
        for segment in plan.tensors.iter().filter_map(|tensor| segment_of(&plan, tensor)) {
            left.get_mut(segment).into_iter().for_each(|left| *left += 1);
        }
        let engine = RingEngine::start_in_segments(&device.gpu, &plan, prepared, pool.clone())?;
        self.stop_by(engine.stopper())?;
        let mut stream = Stream::new(plan.clone(), engine);
        while let Some(streamed) = stream.next()? {
            let placed = streamed.tensor;
            let Some(segment) = segment_of(&plan, placed) else {
                let nothing = device.gpu.alloc(Place::Vram, 1)?.slice(0..0)?;
                self.hand_out(whole(placed, nothing, None, device.dlpack));
                continue;
            };
            let region = streamed.arena.region(placed.at, placed.bytes)?;
            let tensor = whole(placed, region, pool.lease(segment), device.dlpack);
            self.shared.bytes.store(stream.bytes(), Ordering::Release);
            // Before the last one is handed out: its drop frees the segment.
            if let Some(left) = left.get_mut(segment) {
                *left -= 1;
                if *left == 0 {
                    pool.filled(segment);
                }
            }
            self.hand_out(tensor);
        }
        self.end(stream, device, begin)
    }

    /// The waiting thread may have ended.
    fn hand_out(&self, tensor: Tensor) {
        let _ = self.sender.send(LoadEvent::Tensor(Box::new(tensor)));
    }

    /// Requests GPU memory from Python, and waits for it.
    fn request_memory(&self, bytes: usize) -> Result<BorrowedMemory> {
        let _ = self.sender.send(LoadEvent::Wanted(bytes));
        loop {
            self.check()?;
            match self.brought.recv_timeout(SIGNAL_POLL_INTERVAL) {
                Ok(brought) => return Ok(brought),
                Err(RecvTimeoutError::Timeout) => {}
                // Python has dropped the job.
                Err(RecvTimeoutError::Disconnected) => return Err(onehop_load::Error::Cancelled.into()),
            }
        }
    }

    /// Lets a cancellation stop the engine.
    fn stop_by(&self, stopper: Stopper) -> Result<()> {
        *self.shared.stopper.lock().unwrap_or_else(PoisonError::into_inner) = Some(stopper);
        // A cancellation from before the stopper existed is stored.
        self.check()
    }

    /// The end of a stream whose tensors have all arrived.
    fn end<A>(
        &self,
        mut stream: Stream<RingEngine<A>>,
        device: &GpuDevice,
        begin: Instant,
    ) -> Result<(Ended, A)> {
        let took = begin.elapsed();
        let warnings = self.request.model.still_same();
        let warnings = warnings.inspect_err(|error| stream.engine().give_up(&error.to_string()))?;
        stream.engine_mut().wait_for_group()?;
        let account = stream.engine().account();
        let rate = if self.request.measure_limit { stream.engine().copy_rate(&*device.gpu)? } else { None };
        let (plan, arena) = stream.finish()?;
        Ok((Ended { plan, account, begin, took, rate, warnings }, arena))
    }

    /// Hands out the tensors when all have arrived.
    fn load_from_drive(&self, drive: &OpenDrive, options: &onehop_transfer::RouteOptions) -> Result<Outcome> {
        let LoadScope::Selection(selection) = &self.request.wanted else { return Err(Error::Lost) };
        let manifest = self.manifest()?;
        let plan = drive.plan(selection, ALIGN)?;
        self.shared.total.store(plan.tensor_bytes, Ordering::Release);
        let device = self.request.device.open()?;
        let begin = Instant::now();
        fits(&plan, &device)?;
        // Memory that a drive accesses must not move when this process forks.
        let shared: Arc<dyn Gpu> =
            if device.cuda.is_some() { device.gpu.clone() } else { Arc::new(Emulated::new()) };
        let gpu = Chosen { gpu: shared, why: device.why.clone() };
        let loaded = drive.load(&gpu, options, &plan, &*self.shared)?;
        for placed in &plan.tensors {
            let tensor = whole(placed, memory(&loaded.arena, placed.at, placed.bytes)?, None, device.dlpack);
            let _ = self.sender.send(LoadEvent::Tensor(Box::new(tensor)));
        }
        self.shared.bytes.store(plan.tensor_bytes, Ordering::Release);
        if self.request.verify
            && let Some(changed) = drive.on_drive.check_maps(&*self.shared)?
        {
            return Err(changed.into());
        }
        let verdict = self.verify(&plan, &device, &loaded.arena, manifest.as_ref())?;
        let start = LoadStart { begun: self.start, gpu: begin - self.start };
        Ok(Outcome::of_drive(drive, loaded, plan.gpu_bytes, &start, verdict))
    }

    fn plan(&self) -> Result<Plan> {
        let options = match self.request.memory {
            TensorMemory::Bounded(most) => PlanOptions::in_segments(segment_bytes(most)),
            TensorMemory::Own | TensorMemory::Arena => PlanOptions::ring(),
        };
        let options = PlanOptions { small: ALIGN, ..options };
        let model = &self.request.model;
        let plan = match &self.request.wanted {
            LoadScope::Selection(selection) => Plan::new(model, selection, options),
            LoadScope::Part { tensor, part, .. } => Plan::of_part(model, tensor, part.clone(), options),
        };
        Ok(plan.map_err(onehop_load::Error::from)?)
    }

    /// Hands tensors out as they arrive, unless Python makes them itself.
    fn arrive(&self, mut stream: Stream<RingEngine>, device: &GpuDevice) -> Result<Stream<RingEngine>> {
        while let Some(streamed) = stream.next()? {
            if self.request.memory == TensorMemory::Arena {
                self.shared.bytes.store(stream.bytes(), Ordering::Release);
                continue;
            }
            let tensor = match &self.request.wanted {
                LoadScope::Selection(_) => {
                    let Placed { at, bytes, .. } = streamed.tensor;
                    whole(streamed.tensor, memory(streamed.arena, *at, *bytes)?, None, device.dlpack)
                }
                LoadScope::Part { tensor, part, view } => {
                    view.tensor(&tensor.info, part, streamed.arena, streamed.tensor.at, device.dlpack)?
                }
            };
            self.shared.bytes.store(stream.bytes(), Ordering::Release);
            self.hand_out(tensor);
        }
        Ok(stream)
    }

    fn verify(
        &self,
        plan: &Plan,
        device: &GpuDevice,
        arena: &Region,
        manifest: Option<&Manifest>,
    ) -> Result<(bool, Option<String>)> {
        let (model, shared) = (&self.request.model, &*self.shared);
        let go_on = || !shared.is_stopped();
        let mut verdict: Verdict<Error> = Verdict { compared: None, compared_by: BY_FILES, manifest: None };
        if let LoadOrigin::Drive(drive, _) = &self.request.origin {
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

/// A load whose bytes have all arrived.
struct Ended {
    plan: Plan,
    account: engine::Account,
    begin: Instant,
    took: Duration,
    rate: Option<f64>,
    warnings: Vec<String>,
}

impl Ended {
    fn outcome(
        self,
        model: &Model,
        device: &GpuDevice,
        start: Instant,
        verdict: (bool, Option<String>),
    ) -> Outcome {
        let Self { plan, account, begin, took, rate, warnings } = self;
        let went = onehop_load::outcome::Outcome::new(&[&plan], &account, took, rate);
        let went = onehop_load::outcome::Outcome { warnings, ..went };
        Outcome::new(model, device, account, went, &LoadStart { begun: start, gpu: begin - start }, verdict)
    }
}

/// Bytes of a segment: some are filled while others are used.
fn segment_bytes(most: u64) -> u64 {
    (most / SEGMENTS).max(LEAST_SEGMENT.min(most)).max(1)
}
