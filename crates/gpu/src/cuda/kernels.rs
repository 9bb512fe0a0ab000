//! The device code of this build, and how the host calls it. Everything that has to agree with the device crate is in
//! this file: kernel names, layouts of their parameters, shared memory, launch shapes.

use onehop_device::PTX;
use onehop_device::params::{GROUP_SHARED_BYTES, LANES, OWNER_SHARED_BYTES, SINGLE_SHARED_BYTES};
use onehop_proto::kernel::{Exit, ItemOutcome, WorkItem, scratch_bytes, times};
use onehop_proto::queue::SharedLayout;
use onehop_proto::{Cqe, Sqe};

use super::context::Context;
use super::live::Touched;
use super::module::{Arg, Function, Module, Shape};
use crate::{Error, KernelJob, KernelQueue, Launch, Result};

use std::sync::Arc;

/// Warps of a block in shared mode: few, so that many blocks run at once.
const SHARED_WARPS: u32 = 4;
/// Maximum threads of a launch in shared mode: all of them wait for one queue.
const MOST_THREADS: u32 = 1 << 20;

/// The kernels.
pub(super) struct Kernels {
    owner: Function,
    single: Function,
    owner_prepare: Function,
    shared: Function,
    shared_prepare: Function,
}

/// A kernel with its arguments.
pub(super) struct KernelCall<'a> {
    pub(super) function: &'a Function,
    pub(super) shape: Shape,
    pub(super) args: Vec<Arg>,
}

/// Offsets in a launch's memory.
pub(super) struct LaunchLayout {
    pub(super) exits: usize,
    pub(super) bytes: usize,
}

impl Kernels {
    /// Loads the device code: `other`, or this build's.
    pub(super) fn load(context: &Arc<Context>, other: Option<&str>) -> Result<Self> {
        let module = match other {
            Some(ptx) => Module::load(context, ptx),
            None => Module::load(context, &PTX.text()),
        }?;
        Ok(Self {
            owner: module.function("onehop_owner")?,
            single: module.function("onehop_single")?,
            owner_prepare: module.function("onehop_owner_prepare")?,
            shared: module.function("onehop_shared")?,
            shared_prepare: module.function("onehop_shared_prepare")?,
        })
    }

    /// Registers per thread of the kernel for such a launch.
    pub(super) fn registers(&self, launch: &Launch) -> Result<u32> {
        match launch {
            Launch::Owner(list) if crate::is_single(list) => self.single.registers(),
            Launch::Owner(_) => self.owner.registers(),
            Launch::Shared(..) => self.shared.registers(),
        }
    }

    /// The kernel that prepares a launch's queues; `at` is the address of its memory.
    pub(super) fn prepare(&self, launch: &Launch, at: u64) -> KernelCall<'_> {
        let queues = Arg::U64(at);
        match launch {
            Launch::Owner(list) => Self::for_each(&self.owner_prepare, queues, list.len() as u32),
            Launch::Shared(list, _) => Self::for_each(&self.shared_prepare, queues, list.len() as u32),
        }
    }

    /// A thread for each queue.
    fn for_each(function: &Function, queues: Arg, count: u32) -> KernelCall<'_> {
        let shape = Shape { blocks: count.div_ceil(LANES), threads: LANES, shared: 0 };
        KernelCall { function, shape, args: vec![queues, Arg::U32(count)] }
    }

    /// The kernel of a launch.
    pub(super) fn run(
        &self,
        launch: &Launch,
        job: &KernelJob,
        at: u64,
        layout: &LaunchLayout,
    ) -> Result<KernelCall<'_>> {
        let queues = Arg::U64(at);
        let job = Arg::Job(*job);
        let exits = Arg::U64(at + layout.exits as u64);
        match launch {
            Launch::Owner(list) => {
                let warps = list.len() as u32;
                let (function, shared) = match crate::is_single(list) {
                    true => (&self.single, SINGLE_SHARED_BYTES),
                    false => (&self.owner, OWNER_SHARED_BYTES),
                };
                Ok(KernelCall {
                    function,
                    shape: Shape { blocks: warps, threads: LANES, shared },
                    args: vec![queues, exits, job, Arg::U32(warps)],
                })
            }
            Launch::Shared(list, threads) => {
                let warps = threads.div_ceil(LANES);
                let of_block = SHARED_WARPS.min(self.shared.most_threads()? / LANES).clamp(1, warps);
                let shared = GROUP_SHARED_BYTES * of_block;
                Ok(KernelCall {
                    function: &self.shared,
                    shape: Shape { blocks: warps.div_ceil(of_block), threads: of_block * LANES, shared },
                    args: vec![queues, exits, job, Arg::U32(warps), Arg::U32(list.len() as u32)],
                })
            }
        }
    }
}

/// The control memory of a queue, which kernels that prepare it access.
fn control(queue: &KernelQueue, shared: bool) -> Result<Touched> {
    let KernelQueue { sq_entries, cq_entries, .. } = *queue;
    let bytes = match SharedLayout::new(sq_entries, cq_entries) {
        Some(layout) if shared => layout.bytes(),
        None if shared => {
            let why =
                format!("a shared queue needs rings of a power of two, not {sq_entries} and {cq_entries}");
            return Err(Error::Launch(why));
        }
        _ if sq_entries < 2 || cq_entries < 2 || queue.window == 0 => {
            let window = queue.window;
            let why = format!("rings of {sq_entries} and {cq_entries} entries, {window} commands in flight");
            return Err(Error::Launch(why));
        }
        _ => scratch_bytes(queue.window),
    };
    Ok(Touched { what: "a queue's control memory", at: queue.control, bytes: u64::from(bytes) })
}

fn queues(launch: &Launch) -> (&[KernelQueue], bool) {
    match launch {
        Launch::Owner(list) => (list, false),
        Launch::Shared(list, _) => (list, true),
    }
}

/// Refuses memory that is not aligned as [`KernelQueue`] and [`KernelJob`] say: a kernel that accessed it would
/// destroy the context.
fn aligned(touched: Touched, to: u64) -> Result<Touched> {
    let Touched { what, at, .. } = touched;
    if at.0.is_multiple_of(to) {
        return Ok(touched);
    }
    Err(Error::Launch(format!("{what} at {at} is not on a multiple of {to} bytes")))
}

/// The memory that kernels access which prepare a launch's queues.
pub(super) fn prepared(launch: &Launch) -> Result<Vec<Touched>> {
    let (list, shared) = queues(launch);
    list.iter().map(|queue| aligned(control(queue, shared)?, 16)).collect()
}

/// The rings of a queue, and its doorbells.
fn rings(queue: &KernelQueue) -> [Touched; 4] {
    let KernelQueue { sq, cq, sq_door, cq_door, sq_entries, cq_entries, .. } = *queue;
    let touched = |what, at, bytes| Touched { what, at, bytes };
    [
        touched("a submission queue", sq, u64::from(sq_entries) * Sqe::BYTES as u64),
        touched("a completion queue", cq, u64::from(cq_entries) * Cqe::BYTES as u64),
        touched("a submission doorbell", sq_door, 4),
        touched("a completion doorbell", cq_door, 4),
    ]
}

/// The memory that kernels access which use a queue in shared mode.
pub(super) fn shared(queue: &KernelQueue) -> Result<Vec<Touched>> {
    Ok(rings(queue).into_iter().chain([control(queue, true)?]).collect())
}

/// The memory that a launch's kernels access. The controller moves the data: the kernels only know its bus addresses.
pub(super) fn touched(launch: &Launch, job: &KernelJob, metered: bool) -> Result<Vec<Touched>> {
    let (list, warps) = (queues(launch).0, count(launch)? as u32);
    let mut all = prepared(launch)?;
    for (one, to) in list.iter().flat_map(|queue| rings(queue).into_iter().zip([64, 16, 4, 4])) {
        all.push(aligned(one, to)?);
    }
    let mut add = |what, at, bytes, to| -> Result<()> {
        all.push(aligned(Touched { what, at, bytes }, to)?);
        Ok(())
    };
    let outcomes = u64::from(job.count) * u64::from(ItemOutcome::BYTES);
    let outcomes = if metered { times::end(job.count, warps) } else { outcomes };
    if job.count > 0 {
        add("the list of work", job.works, u64::from(job.count) * u64::from(WorkItem::BYTES), 16)?;
    }
    if outcomes > 0 {
        add("the outcomes", job.outcomes, outcomes, 8)?;
    }
    add("the poison word", job.poison, 4, 4)?;
    Ok(all)
}

/// The number of exits of a launch, one per warp; an error if the launch is invalid.
pub(super) fn count(launch: &Launch) -> Result<usize> {
    match launch {
        Launch::Owner(list) | Launch::Shared(list, _) if list.is_empty() => {
            Err(Error::Launch("it has no queue".into()))
        }
        Launch::Owner(list) => Ok(list.len()),
        Launch::Shared(_, threads) if (1..=MOST_THREADS).contains(threads) => {
            Ok(threads.div_ceil(LANES) as usize)
        }
        Launch::Shared(_, threads) => {
            Err(Error::Launch(format!("{threads} threads; a launch has 1 to {MOST_THREADS}")))
        }
    }
}

/// The queues of a launch as the kernels read them.
pub(super) fn queue_bytes(launch: &Launch) -> &[u8] {
    let list = queues(launch).0;
    // SAFETY: a descriptor consists of integers without padding, so each of its bytes is initialised; the slice borrows
    // the list.
    unsafe { std::slice::from_raw_parts(list.as_ptr().cast(), size_of_val(list)) }
}

/// The offsets of queues and exits in a launch's memory: queues first, each part on cache lines of its own.
pub(super) fn layout(queues: usize, exits: usize) -> LaunchLayout {
    let at = queues.next_multiple_of(128);
    LaunchLayout { exits: at, bytes: at + exit_bytes(exits) }
}

/// Bytes of an exit.
const EXIT_BYTES: usize = 8;

/// Reads the exits; an error if a warp never wrote its own.
pub(super) fn exits(bytes: &[u8]) -> Result<Vec<Exit>> {
    let word = |at: &[u8]| at.iter().rev().fold(0u32, |word, byte| word << 8 | u32::from(*byte));
    let read = |(i, bytes): (usize, &[u8])| {
        Exit::from_words([word(&bytes[..4]), word(&bytes[4..])]).ok_or_else(|| {
            Error::Launch(format!("warp {i} ended without a word; this is a defect of onehop"))
        })
    };
    bytes.chunks_exact(EXIT_BYTES).enumerate().map(read).collect()
}

/// Bytes of `count` exits.
pub(super) const fn exit_bytes(count: usize) -> usize {
    count * EXIT_BYTES
}

#[cfg(test)]
mod tests {
    use onehop_proto::GpuAddr;

    use super::*;

    fn queue() -> KernelQueue {
        KernelQueue {
            sq: GpuAddr(64),
            cq: GpuAddr(16),
            sq_door: GpuAddr(4),
            cq_door: GpuAddr(8),
            control: GpuAddr(32),
            sq_entries: 6,
            cq_entries: 7,
            window: 8,
            zero: 0,
        }
    }

    #[test]
    fn launches_are_laid_out_without_overlap() {
        let launch = Launch::Owner(vec![queue(), queue(), queue()]);
        let bytes = queue_bytes(&launch);
        assert_eq!((bytes.len(), count(&launch).unwrap()), (3 * 56, 3));
        assert_eq!((bytes[56], bytes[56 + 40], bytes[56 + 48]), (64, 6, 8));
        let layout = layout(bytes.len(), 3);
        assert!(layout.exits >= bytes.len() && layout.exits.is_multiple_of(128));
        assert_eq!(layout.bytes, layout.exits + exit_bytes(3));
        assert!(
            count(&Launch::Shared(vec![queue()], 33)).unwrap() == 2
                && count(&Launch::Owner(vec![])).is_err()
                && count(&Launch::Shared(vec![queue()], 0)).is_err()
        );
    }

    #[test]
    fn a_launch_names_all_that_its_kernels_touch() {
        let mut queue = queue();
        (queue.sq_entries, queue.cq_entries) = (64, 32);
        let at = GpuAddr(4096);
        let job =
            KernelJob { works: at, outcomes: at, poison: at, count: 3, nsid: 1, ..KernelJob::default() };
        let bytes = |launch: &Launch, metered| -> Vec<u64> {
            touched(launch, &job, metered).unwrap().iter().map(|one| one.bytes).collect()
        };
        let owner = Launch::Owner(vec![queue]);
        assert_eq!(bytes(&owner, false), [u64::from(scratch_bytes(8)), 4096, 512, 4, 4, 96, 24, 4]);
        assert_eq!(bytes(&owner, true)[6], times::end(3, 1));
        let nothing = KernelJob { count: 0, ..job };
        let without = |metered| touched(&owner, &nothing, metered).unwrap();
        assert_eq!([without(false).len(), without(true).len()], [6, 7]);
        assert!(without(true).iter().all(|one| one.bytes > 0));
        let shared = Launch::Shared(vec![queue, queue], 64);
        let control = SharedLayout::new(64, 32).unwrap().bytes();
        assert_eq!(bytes(&shared, false)[..2], [u64::from(control); 2]);
        assert_eq!(bytes(&shared, false).len(), 2 * 5 + 3);
        for (sq, cq, window) in [(0, 32, 8), (64, 1, 8), (64, 32, 0)] {
            let queue = KernelQueue { sq_entries: sq, cq_entries: cq, window, ..queue };
            assert!(prepared(&Launch::Owner(vec![queue])).is_err());
        }
        let queue = KernelQueue { sq_entries: 63, ..queue };
        assert!(prepared(&Launch::Shared(vec![queue], 32)).is_err());
    }

    #[test]
    fn memory_that_is_not_aligned_is_refused() {
        let good = KernelQueue { sq_entries: 64, cq_entries: 64, ..queue() };
        let at = GpuAddr(4096);
        let job =
            KernelJob { works: at, outcomes: at, poison: at, count: 3, nsid: 1, ..KernelJob::default() };
        let is_refused = |queue, job: &KernelJob| touched(&Launch::Owner(vec![queue]), job, false).is_err();
        assert!(!is_refused(good, &job));
        let control = KernelQueue { control: GpuAddr(4096 + 8), ..good };
        assert!(prepared(&Launch::Owner(vec![control])).is_err());
        for queue in [
            control,
            KernelQueue { sq: GpuAddr(4096 + 32), ..good },
            KernelQueue { cq: GpuAddr(4096 + 8), ..good },
            KernelQueue { sq_door: GpuAddr(4096 + 2), ..good },
            KernelQueue { cq_door: GpuAddr(4096 + 2), ..good },
        ] {
            assert!(is_refused(queue, &job), "{queue:?}");
        }
        for job in [
            KernelJob { works: GpuAddr(4096 + 8), ..job },
            KernelJob { outcomes: GpuAddr(4096 + 4), ..job },
            KernelJob { poison: GpuAddr(4096 + 2), ..job },
        ] {
            assert!(is_refused(good, &job), "{job:?}");
        }
    }

    #[test]
    fn exits_that_were_never_written_are_noticed() {
        let mut bytes = vec![0; 16];
        bytes[0] = 3;
        bytes[4] = 9;
        assert!(exits(&bytes).is_err());
        bytes[8] = 1;
        assert_eq!(exits(&bytes).unwrap(), [Exit::Poisoned(9), Exit::Finished]);
    }
}
