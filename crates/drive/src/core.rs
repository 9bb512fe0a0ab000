//! A drive before it is identified: its registers, its admin queue, and the memory that it may still reach.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use onehop_os::Transport;
use onehop_proto::admin as words;
use onehop_proto::admin::cns;
use onehop_proto::feature::{self, HostMemoryEntry, Queues};
use onehop_proto::identify::{NamespaceId, active_namespaces, descriptors};
use onehop_proto::log::AsyncEvent;
use onehop_proto::regs::Version;
use onehop_proto::{Sqe, Status};

use crate::admin::Admin;
use crate::control::Control;
use crate::durability::Durability;
use crate::ladder::{Incident, Participant, RESET_PAUSES};
use crate::ring::{Dma, PairHalf};
use crate::slots::may_retry;
use crate::{Error, Identity, Namespace, Options, Result};

/// Most namespaces that are read.
const MAX_NAMESPACES: usize = 1024;
/// The pause before identify data is read again.
const IDENTIFY_PAUSE: Duration = Duration::from_millis(100);
/// How long Identify commands for namespaces may keep failing, even if the limit of admin commands is longer.
const LONGEST_IDENTIFY: Duration = Duration::from_secs(10);
/// Most entries of the list that describes the Host Memory Buffer: what fits into a page.
const MAX_HMB_ENTRIES: usize = 256;

/// The part of a drive that outlives every handle, and releases everything at the end.
pub(crate) struct Core {
    pub(crate) control: Control,
    pub(crate) options: Options,
    pub(crate) admin: Mutex<AdminState>,
    pub(crate) durability: Arc<Durability>,
    pub(crate) quarantine: Arc<DmaQuarantine>,
}

/// Memory that is no longer used, but that the controller may still reach: it stays allocated and mapped until the
/// controller is disabled, or for ever.
#[derive(Default)]
pub(crate) struct DmaQuarantine(Mutex<Vec<Box<dyn Any + Send>>>);

impl DmaQuarantine {
    pub(crate) fn keep(&self, memory: impl Any + Send) {
        self.list().push(Box::new(memory));
    }

    fn list(&self) -> MutexGuard<'_, Vec<Box<dyn Any + Send>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The state that only one thread at a time may use.
pub(crate) struct AdminState {
    pub(crate) admin: Admin,
    pub(crate) dead: Option<Error>,
    /// Which I/O queue pairs are in use; the first stands for queue 1.
    pub(crate) in_use: Vec<bool>,
    pub(crate) participants: Vec<Arc<dyn Participant>>,
    pub(crate) incidents: Vec<Incident>,
    pub(crate) events: Vec<AsyncEvent>,
    /// An event was not answered in its share of the time: next time the first one gets all of it.
    pub(crate) is_slow: bool,
    /// How long a shutdown may take.
    pub(crate) shutdown_time: Duration,
    /// The drive's Host Memory Buffer, and the list that describes it.
    host_memory: Option<(Dma, Dma)>,
    pub(crate) cmb: Option<crate::gpu::Cmb>,
}

/// The active namespaces of a drive.
#[derive(Default)]
pub(crate) struct ActiveNamespaces {
    pub(crate) usable: Vec<Namespace>,
    /// Those that cannot be used, and why.
    pub(crate) unusable: Vec<(u32, Error)>,
}

impl Core {
    pub(crate) fn new(control: Control, options: Options) -> Result<Self> {
        let admin = Admin::new(&control, options.admin_timeout)?;
        let state = AdminState {
            admin,
            dead: None,
            in_use: Vec::new(),
            participants: Vec::new(),
            incidents: Vec::new(),
            events: Vec::new(),
            is_slow: false,
            shutdown_time: Duration::from_secs(10),
            host_memory: None,
            cmb: None,
        };
        Ok(Self {
            control,
            options,
            admin: Mutex::new(state),
            durability: Arc::default(),
            quarantine: Arc::default(),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.control.port.name
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, AdminState> {
        self.admin.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The state of a drive that can still be used.
    pub(crate) fn alive(&self) -> Result<MutexGuard<'_, AdminState>> {
        let state = self.state();
        match &state.dead {
            Some(error) => Err(error.clone()),
            None => Ok(state),
        }
    }

    /// Disables the controller, which then no longer uses any memory.
    pub(crate) fn disable(&self) -> Result<()> {
        if !self.control.is_running()? {
            // Another driver stopped it, or it lost power: its volatile memory may be lost.
            self.durability.may_be_lost();
        }
        self.control.disable(true)?;
        let kept = std::mem::take(&mut *self.quarantine.list());
        drop(kept);
        Ok(())
    }

    /// Resets the function from outside, or the subsystem. The drive's volatile memory may be lost.
    pub(crate) fn reset_function(&self) -> Result<()> {
        self.durability.may_be_lost();
        self.control.reset_function()
    }

    /// Brings a controller up from any state. If that fails, it resets the function and tries once more, so that a
    /// single lost or failed admin command does not prevent opening a drive.
    pub(crate) fn bring_up_from_anywhere(
        &self,
        state: &mut AdminState,
    ) -> Result<(Identity, ActiveNamespaces)> {
        let mut up = self.bring_up(state);
        for pause in RESET_PAUSES {
            let may_help = match &up {
                Err(Error::NotReady { .. } | Error::Fatal { .. } | Error::NoAnswer { .. }) => true,
                Err(Error::Command { status, .. }) => is_temporary(*status),
                _ => false,
            };
            if !may_help {
                break;
            }
            self.control.stop.sleep(pause);
            self.control.check_stop()?;
            // If the function reset is impossible or fails, the controller is reset once more.
            if let Err(error @ Error::Gone { .. }) = self.reset_function() {
                return Err(error);
            }
            up = self.bring_up(state);
        }
        up
    }

    /// Resets the controller, identifies it and its namespaces, and configures it.
    fn bring_up(&self, state: &mut AdminState) -> Result<(Identity, ActiveNamespaces)> {
        let mut identity = self.start(&mut state.admin, None)?;
        state.shutdown_time = identity.shutdown_time();
        let namespaces = self.list_namespaces(&mut state.admin)?;
        identity.queues = self.configure(state, &identity)?;
        Ok((identity, namespaces))
    }

    /// Disables, enables and identifies. With a `limit`, all admin commands from now on share that time.
    pub(crate) fn start(&self, admin: &mut Admin, limit: Option<Duration>) -> Result<Identity> {
        self.disable()?;
        admin.start(&self.control, || self.durability.may_be_lost())?;
        admin.set_due(limit.and_then(|limit| Instant::now().checked_add(limit)));
        let sqe = words::identify(cns::CONTROLLER, 0, 0, 0);
        let data = admin.read(&self.control.port, "identify controller", &sqe, 4096)?;
        Identity::new(&self.control, &data, &self.options)
    }

    /// The active namespaces. One that is invalid, has an unknown format, or cannot be identified is skipped, with the
    /// reason: the others can be used.
    pub(crate) fn list_namespaces(&self, admin: &mut Admin) -> Result<ActiveNamespaces> {
        let mut found = ActiveNamespaces::default();
        let nsids = self.list_nsids(admin)?;
        let due = self.identify_due();
        for nsid in nsids {
            match self.identify_namespace(admin, nsid, due) {
                Ok(ns) => found.usable.push(ns),
                Err(Error::NoNamespace { .. }) => {}
                Err(error) if is_of_namespace(&error) => found.unusable.push((nsid, error)),
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Deadline for repeating failed Identify commands for namespaces: all of them together have the time of one admin
    /// command, and at most [`LONGEST_IDENTIFY`].
    pub(crate) fn identify_due(&self) -> Instant {
        Instant::now() + self.options.admin_timeout.min(LONGEST_IDENTIFY)
    }

    pub(crate) fn identify_namespace(&self, admin: &mut Admin, nsid: u32, due: Instant) -> Result<Namespace> {
        let sqe = words::identify(cns::NAMESPACE, nsid, 0, 0);
        let data = self.read_with_retries(admin, "identify namespace", &sqe, due)?;
        let ns = Namespace::new(&self.control, nsid, &data, self.durability.account(nsid))?;
        // Some local drives fail to list identifiers although their version requires it. For them an identifier of
        // their own is enough. A target may serve another image under the same NGUID, so it is not enough there.
        if ns.has_ids() && self.control.transport() == Transport::Memory {
            return Ok(ns);
        }
        ns.learn(&self.namespace_ids(admin, nsid, due)?);
        Ok(ns)
    }

    /// The identifiers of a namespace from the separate list (CNS 03h). Drives without that list, and invalid lists,
    /// have fewer.
    pub(crate) fn namespace_ids(
        &self,
        admin: &mut Admin,
        nsid: u32,
        due: Instant,
    ) -> Result<Vec<NamespaceId>> {
        if self.control.version < Version::new(1, 3, 0) {
            return Ok(Vec::new());
        }
        let sqe = words::identify(cns::NAMESPACE_DESCRIPTORS, nsid, 0, 0);
        match self.read_with_retries(admin, "identify namespace descriptors", &sqe, due) {
            Ok(data) => {
                let page: Option<&[u8; 4096]> = data.as_slice().try_into().ok();
                Ok(page.into_iter().flat_map(|page| descriptors(page)).map_while(|id| id.ok()).collect())
            }
            Err(Error::Command { status, .. }) if !is_temporary(status) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Reads a page of identify data. A temporary failure says nothing about the namespace, so the command is tried
    /// again until `due`, with a minimum number of tries.
    fn read_with_retries(&self, admin: &mut Admin, what: &str, sqe: &Sqe, due: Instant) -> Result<Vec<u8>> {
        let mut tries = 0;
        loop {
            match admin.read(&self.control.port, what, sqe, 4096) {
                Err(Error::Command { status, .. })
                    if is_temporary(status) && (tries < self.options.retries || Instant::now() < due) =>
                {
                    tries += 1;
                }
                end => return end,
            }
            self.control.stop.sleep(IDENTIFY_PAUSE);
            self.control.check_stop()?;
        }
    }

    fn list_nsids(&self, admin: &mut Admin) -> Result<Vec<u32>> {
        if self.control.version < Version::new(1, 1, 0) {
            return Ok(vec![1]);
        }
        let mut nsids = Vec::new();
        loop {
            let after = nsids.last().copied().unwrap_or(0);
            let sqe = words::identify(cns::ACTIVE_NAMESPACES, after, 0, 0);
            let data = admin.read(&self.control.port, "identify active namespaces", &sqe, 4096)?;
            let page: &[u8; 4096] = data.as_slice().try_into().map_err(|_| Error::Nonsense {
                drive: self.name().to_owned(),
                what: "a namespace list",
                why: "it is too short".into(),
            })?;
            let before = nsids.len();
            nsids.extend(active_namespaces(page).filter(|nsid| *nsid > after));
            if nsids.len() - before < 1024 || nsids.len() >= MAX_NAMESPACES {
                return Ok(nsids);
            }
        }
    }

    /// Configures an enabled controller by the options; returns the number of I/O queue pairs granted. That number
    /// comes first, because it can only be set before queues exist.
    pub(crate) fn configure(&self, state: &mut AdminState, identity: &Identity) -> Result<u32> {
        let want = u32::from(self.options.queues);
        let sqe = words::set_features(feature::id::NUMBER_OF_QUEUES, false, Queues::ask(want, want).0);
        let granted = Queues(state.admin.run("set number of queues", &sqe)?.result());
        let view = identity.controller();
        self.durability.set_cached(view.vwc().present());
        if view.apsta() & 1 != 0 {
            // Autonomous power state transitions cost latency when work comes.
            let sqe = words::set_features(feature::id::APST, false, feature::Apst::OFF.0);
            let table = &feature::Apst::OFF_TABLE;
            optional(state.admin.write(&self.control.port, "set APST off", &sqe, table))?;
        }
        if (1..=3).any(|crd| view.retry_delay_ms(crd) > 0) {
            // A controller reports how long to wait before a retry only to a host that asks for it.
            let mut behavior = [0; 512];
            behavior[0] = 1;
            let sqe = words::set_features(feature::id::HOST_BEHAVIOR, false, 0);
            optional(state.admin.write(&self.control.port, "set host behavior", &sqe, &behavior))?;
        }
        self.enable_host_memory(state, identity)?;
        let events = feature::EventConfig(0).with_critical(0x1f).with_namespace(view.oaes() & 1 << 8 != 0);
        let sqe = words::set_features(feature::id::ASYNC_EVENT, false, events.0);
        optional(state.admin.run("set event configuration", &sqe))?;
        state.admin.post_events(view.aer_limit());
        Ok(granted.sqs().min(granted.cqs()).min(want))
    }

    /// Gives a drive without DRAM the Host Memory Buffer that it asks for. Only on a controller that was just enabled: it no
    /// longer uses an earlier one.
    fn enable_host_memory(&self, state: &mut AdminState, identity: &Identity) -> Result<()> {
        let (view, page_shift) = (identity.controller(), self.control.page_shift);
        let unit = 4096;
        let least = u64::from(view.hmmin()) * unit;
        let want = (u64::from(view.hmpre()) * unit).min(self.options.host_memory);
        if want == 0 || want < least {
            return Ok(());
        }
        let mapper = &*self.control.port.mapper;
        let memory = match state.host_memory.take() {
            Some((memory, _)) => memory,
            None => Dma::alloc(mapper, want as usize, page_shift)?,
        };
        let (list, pages) = host_memory_list(&memory, page_shift, view.hmmaxd());
        if pages == 0 || (u64::from(pages) << page_shift) < least {
            // It has more entries than the drive accepts, and those that it accepts are too small.
            return Ok(());
        }
        let list_memory = Dma::alloc(mapper, list.len(), page_shift)?;
        list_memory.mem.write(0, &list)?;
        let buffer = feature::HostMemory {
            enable: true,
            memory_return: false,
            pages,
            list: list_memory.bus()?,
            entries: (list.len() / HostMemoryEntry::BYTES) as u32,
        };
        // The drive may use it from this moment on: a command without an answer may still be executed.
        state.host_memory = Some((memory, list_memory));
        if optional(state.admin.run("set host memory buffer", &buffer.command()))?.is_none() {
            state.host_memory = None;
        }
        Ok(())
    }

    /// Creates a pair on the controller. With a `patience`, a request to stop does not end the wait at once. After
    /// [`Error::NoAnswer`], [`Error::Interrupted`] and [`Error::Nonsense`] the controller may have it, or get it later.
    pub(crate) fn create_pair(
        &self,
        admin: &mut Admin,
        qid: u16,
        sq: PairHalf,
        cq: PairHalf,
        patience: Option<Duration>,
    ) -> Result<()> {
        let mut run = |what, sqe: &Sqe| match patience {
            Some(patience) => admin.run_within(what, sqe, patience),
            None => admin.run(what, sqe),
        };
        let (sq_z, cq_z) = ((sq.entries - 1) as u16, (cq.entries - 1) as u16);
        run("create completion queue", &words::create_cq(qid, cq_z, cq.bus, true, None))?;
        let sqe = words::create_sq(qid, sq_z, sq.bus, qid, true, words::Priority::default());
        match run("create submission queue", &sqe) {
            Ok(_) => Ok(()),
            Err(refused @ Error::Command { .. }) => {
                let why = self.control.port.regs.failure();
                let drive = || self.name().to_owned();
                run("delete completion queue", &words::delete_cq(qid)).map_err(|error| match error {
                    // It still has the queue, so this is not a plain refusal that leaves everything as before.
                    Error::Command { status, .. } => Error::Nonsense {
                        drive: drive(),
                        what: "an answer to the deletion of an unused completion queue",
                        why: status.to_string(),
                    },
                    other => other,
                })?;
                Err(why.map_or(refused, |why| Error::NotConnected { drive: drive(), qid, why }))
            }
            Err(error) => Err(error),
        }
    }
}

impl AdminState {
    pub(crate) fn take_qid(&mut self, drive: &str) -> Result<u16> {
        let free = self.in_use.iter().position(|used| !used);
        let Some(index) = free else {
            return Err(Error::NoQueue { drive: drive.to_owned(), granted: self.in_use.len() as u32 });
        };
        self.in_use[index] = true;
        Ok(index as u16 + 1)
    }

    pub(crate) fn give_qid(&mut self, qid: u16) {
        if let Some(used) = self.in_use.get_mut(usize::from(qid).wrapping_sub(1)) {
            *used = false;
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let limit = self.options.ready_limit;
        let state = self.admin.get_mut().unwrap_or_else(|e| e.into_inner());
        if !state.admin.was_started {
            // It was never started, so it is left as it was found.
            return;
        }
        if state.dead.is_none() {
            // A controller that does not complete its shutdown is disabled all the same.
            let _ = self.control.shut_down(state.shutdown_time.min(limit));
        }
        // Taken out first: the kept values may hold references to this list.
        let kept = std::mem::take(&mut *self.quarantine.list());
        if self.control.disable(false).is_err() {
            // It may still reach all memory that it ever got.
            state.admin.abandon();
            std::mem::forget(state.host_memory.take());
            std::mem::forget(state.cmb.take());
            std::mem::forget(std::mem::take(&mut state.participants));
            std::mem::forget(kept);
        }
    }
}

/// Whether an Identify command that failed may succeed later. Drives set Do Not Retry or not when a namespace or a list
/// does not exist.
pub(crate) fn is_temporary(status: Status) -> bool {
    const LASTING: [Status; 3] = [Status::INVALID_NAMESPACE, Status::INVALID_FIELD, Status::INVALID_OPCODE];
    may_retry(status) && !LASTING.iter().any(|lasting| status.is(*lasting))
}

/// Whether this failure of an Identify command concerns its namespace alone. The controller has answered.
pub(crate) fn is_of_namespace(error: &Error) -> bool {
    matches!(
        error,
        Error::NoNamespace { .. } | Error::Format { .. } | Error::Nonsense { .. } | Error::Command { .. }
    )
}

/// The answer to an optional command; `None` if the drive refused it.
fn optional<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(Error::Command { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The descriptor list of a Host Memory Buffer, and the number of its pages.
fn host_memory_list(memory: &Dma, page_shift: u32, most: u16) -> (Vec<u8>, u32) {
    let most = if most == 0 { MAX_HMB_ENTRIES } else { MAX_HMB_ENTRIES.min(most.into()) };
    let mut list = Vec::new();
    let mut pages = 0;
    // Runs come in pages of 4 KiB, which need not start or end with one of the controller's.
    let whole = memory.map.runs().iter().filter_map(|run| {
        let skip = run.addr.0.checked_next_multiple_of(1 << page_shift)? - run.addr.0;
        let here = (run.len.checked_sub(skip)? >> page_shift) as u32;
        (here > 0).then_some(HostMemoryEntry { at: run.addr.plus(skip), pages: here })
    });
    for entry in whole.take(most) {
        list.extend(entry.encode());
        pages += entry.pages;
    }
    (list, pages)
}

#[cfg(test)]
mod tests {
    use onehop_os::{BusRange, HostMem, Mapped};
    use onehop_proto::BusAddr;

    use super::*;

    #[test]
    fn host_memory_buffer_has_only_whole_pages() {
        let run = |at, len| BusRange { addr: BusAddr(at), len };
        let runs = vec![run(0x2000, 0x2000), run(0x5000, 0x1000), run(0x7000, 0x4000), run(0xf000, 0x1000)];
        let memory = Dma { map: Mapped::new(runs, Box::new(())), mem: HostMem::anonymous(0x8000).unwrap() };
        let (list, pages) = host_memory_list(&memory, 13, 0);
        let entries =
            [(0x2000, 1), (0x8000, 1)].map(|(at, pages)| HostMemoryEntry { at: BusAddr(at), pages });
        assert_eq!((list, pages), (entries.map(|entry| entry.encode()).concat(), 2));
        assert_eq!(host_memory_list(&memory, 12, 0).1, 8);
        assert_eq!(host_memory_list(&memory, 13, 1).1, 1);
    }
}
