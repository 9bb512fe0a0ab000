//! A drive: brought up, asked, shut down.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use onehop_os::{DmaMemory, HostMem, Port};
use onehop_proto::admin::{self as words, Select, cns};
use onehop_proto::feature::{self, HostMemoryEntry, Queues};
use onehop_proto::identify::active_namespaces;
use onehop_proto::log::AsyncEvent;
use onehop_proto::regs::Version;

use crate::admin::Admin;
use crate::control::Control;
use crate::ladder::{Incident, Participant};
use crate::queue::{IoQueue, QueueCell};
use crate::ring::{Dma, PairHalf};
use crate::slots::Slots;
use crate::{Buffer, Error, Identity, Namespace, Options, Result};

/// Most namespaces that are looked at.
const MAX_NAMESPACES: usize = 1024;

/// A drive. Clones are the same drive; it is shut down when the last of them, and of its queues, goes.
#[derive(Clone)]
pub struct Drive(pub(crate) Arc<Inner>);

/// What all handles on a drive share.
pub(crate) struct Inner {
    pub(crate) control: Control,
    pub(crate) options: Options,
    identity: OnceLock<(Identity, Vec<Namespace>)>,
    pub(crate) admin: Mutex<AdminState>,
}

/// What only one thread at a time may do to a drive.
pub(crate) struct AdminState {
    pub(crate) admin: Admin,
    pub(crate) dead: Option<Error>,
    /// Which I/O queue pairs are in use; the first stands for queue 1.
    pub(crate) in_use: Vec<bool>,
    pub(crate) participants: Vec<Arc<dyn Participant>>,
    pub(crate) incidents: Vec<Incident>,
    events: Vec<AsyncEvent>,
    /// What was lent to the drive, and the list that describes it.
    host_memory: Option<(Dma, Dma)>,
    pub(crate) cmb: Option<crate::gpu::Cmb>,
}

impl Drive {
    /// Resets the controller, brings it up and learns who it is.
    ///
    /// # Errors
    /// When it is gone, does not come up, or cannot be driven.
    pub fn open(port: Port, options: Options) -> Result<Self> {
        let control = Control::new(port.clone(), &options)?;
        let admin = Admin::new(&port, &control, options.admin_timeout)?;
        let state = AdminState {
            admin,
            dead: None,
            in_use: Vec::new(),
            participants: Vec::new(),
            incidents: Vec::new(),
            events: Vec::new(),
            host_memory: None,
            cmb: None,
        };
        let inner = Arc::new(Inner { control, options, identity: OnceLock::new(), admin: Mutex::new(state) });
        inner.first_start()?;
        Ok(Self(inner))
    }

    /// What people call it.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Who it is.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        self.0.identity()
    }

    /// Its active namespaces.
    #[must_use]
    pub fn namespaces(&self) -> &[Namespace] {
        self.0.namespaces()
    }

    /// One of its namespaces.
    ///
    /// # Errors
    /// When it is not there, or not active.
    pub fn namespace(&self, nsid: u32) -> Result<&Namespace> {
        let found = self.namespaces().iter().find(|ns| ns.nsid == nsid);
        found.ok_or_else(|| Error::NoNamespace { drive: self.name().to_owned(), nsid })
    }

    /// New host memory that the drive can reach.
    ///
    /// # Errors
    /// When there is none.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer> {
        let mapper = &*self.0.control.port.mapper;
        Buffer::new(mapper, mapper.alloc(bytes)?)
    }

    /// New host memory for which others give further addresses, and which [`Self::map`] can map.
    ///
    /// # Errors
    /// When there is none.
    pub fn host_memory(&self, bytes: usize) -> Result<HostMem> {
        Ok(self.0.control.port.mapper.alloc(bytes)?)
    }

    /// Makes memory reachable for the drive.
    ///
    /// # Errors
    /// When the drive cannot reach it.
    pub fn map(&self, memory: impl DmaMemory + Send + Sync + 'static) -> Result<Buffer> {
        Buffer::new(&*self.0.control.port.mapper, memory)
    }

    /// A queue pair for CPU threads.
    ///
    /// # Errors
    /// When the controller has no more.
    pub fn queue(&self) -> Result<IoQueue> {
        let inner = &self.0;
        let mut state = inner.alive()?;
        let qid = state.take_qid(inner)?;
        let made = Slots::new(&inner.control.port, qid, inner.identity(), inner.namespaces(), &inner.options)
            .and_then(|slots| {
                let (sq, cq) = slots.halves();
                inner.create_pair(&mut state.admin, qid, sq, cq).map(|()| slots)
            });
        match made {
            Ok(slots) => {
                let cell = Arc::new(QueueCell { qid, slots: Mutex::new(slots) });
                state.participants.push(cell.clone());
                Ok(IoQueue::new(cell, inner.clone()))
            }
            Err(error) => {
                state.give_qid(qid);
                Err(error)
            }
        }
    }

    /// A log page, or its first `bytes` bytes. A page longer than 4 KiB is read in pieces where the drive allows it.
    ///
    /// # Errors
    /// When the drive does not have it.
    pub fn log_page(&self, lid: u8, nsid: u32, bytes: usize) -> Result<Vec<u8>> {
        let mut state = self.0.alive()?;
        self.0.log_page(&mut state, lid, nsid, bytes)
    }

    /// The current value of a feature.
    ///
    /// # Errors
    /// When the drive does not have it.
    pub fn feature(&self, fid: u8) -> Result<u32> {
        let what = format!("get feature {fid:02x}h");
        Ok(self.0.alive()?.admin.run(&what, &words::get_features(fid, Select::Current, 0))?.result())
    }

    /// Sets a feature that is one dword, until the next reset.
    ///
    /// # Errors
    /// When the drive refuses it.
    pub fn set_feature(&self, fid: u8, value: u32) -> Result<()> {
        let what = format!("set feature {fid:02x}h");
        self.0.alive()?.admin.run(&what, &words::set_features(fid, false, value)).map(|_| ())
    }

    /// What the drive reported by itself since the last call.
    ///
    /// # Errors
    /// When the drive is dead, or a log page cannot be read.
    pub fn events(&self) -> Result<Vec<AsyncEvent>> {
        let mut state = self.0.alive()?;
        self.0.serve_events(&mut state)?;
        Ok(std::mem::take(&mut state.events))
    }

    /// Which recoveries were needed so far.
    #[must_use]
    pub fn incidents(&self) -> Vec<Incident> {
        self.0.state().incidents.clone()
    }

    /// Resets the controller now. Commands in flight are tried again.
    ///
    /// # Errors
    /// When it does not come back.
    pub fn reset(&self) -> Result<()> {
        let mut state = self.0.alive()?;
        self.0.reset(&mut state, "asked for").map(|_| ())
    }

    /// Bytes of BAR0 from `offset` on, as 32-bit registers.
    #[must_use]
    pub fn registers(&self, offset: u32, count: u32) -> Vec<u32> {
        (0..count).map(|i| self.0.control.port.regs.read32(offset + 4 * i)).collect()
    }
}

impl Inner {
    pub(crate) fn name(&self) -> &str {
        &self.control.port.name
    }

    pub(crate) fn identity(&self) -> &Identity {
        // Set before any handle is given out.
        &self.identity.get_or_init(|| unreachable!("a drive without identity was handed out")).0
    }

    pub(crate) fn namespaces(&self) -> &[Namespace] {
        self.identity.get().map_or(&[], |(_, namespaces)| namespaces)
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

    /// Returns once no reset is under way.
    pub(crate) fn wait_for_reset(&self) {
        drop(self.state());
    }

    fn first_start(&self) -> Result<()> {
        let mut state = self.state();
        let began = self.start_from_anywhere(&mut state.admin)?;
        let mut identity = began;
        let namespaces = self.list_namespaces(&mut state.admin)?;
        let granted = self.configure(&mut state, &identity)?;
        identity.queues = granted;
        state.in_use = vec![false; granted as usize];
        let _ = self.identity.set((identity, namespaces));
        Ok(())
    }

    /// Disables, enables and identifies; by a function reset if the controller does not let go otherwise.
    pub(crate) fn start_from_anywhere(&self, admin: &mut Admin) -> Result<Identity> {
        match self.start(admin) {
            Err(Error::NotReady { .. } | Error::Fatal { .. } | Error::NoAnswer { .. }) => {
                self.control.reset_function()?;
                self.start(admin)
            }
            other => other,
        }
    }

    fn start(&self, admin: &mut Admin) -> Result<Identity> {
        self.control.disable()?;
        admin.start(&self.control)?;
        self.identify(admin)
    }

    pub(crate) fn identify(&self, admin: &mut Admin) -> Result<Identity> {
        let sqe = words::identify(cns::CONTROLLER, 0, 0, 0);
        let data = admin.read(&self.control.port, "identify controller", &sqe, 4096)?;
        Identity::new(&self.control, &data, &self.options)
    }

    fn list_namespaces(&self, admin: &mut Admin) -> Result<Vec<Namespace>> {
        let port = &self.control.port;
        let mut nsids = Vec::new();
        if self.control.version >= Version::new(1, 1, 0) {
            loop {
                let after = nsids.last().copied().unwrap_or(0);
                let sqe = words::identify(cns::ACTIVE_NAMESPACES, after, 0, 0);
                let data = admin.read(port, "identify active namespaces", &sqe, 4096)?;
                let page: &[u8; 4096] =
                    data.as_slice().try_into().map_err(|_| self.short("the namespace list"))?;
                let before = nsids.len();
                nsids.extend(active_namespaces(page).filter(|nsid| *nsid > after));
                if nsids.len() - before < 1024 || nsids.len() >= MAX_NAMESPACES {
                    break;
                }
            }
        } else {
            nsids.push(1);
        }
        let mut found = Vec::new();
        for nsid in nsids {
            let sqe = words::identify(cns::NAMESPACE, nsid, 0, 0);
            let data = admin.read(port, "identify namespace", &sqe, 4096)?;
            match Namespace::new(&port.name, nsid, &data) {
                Ok(ns) if ns.blocks > 0 => found.push(ns),
                Ok(_) => {}
                // A namespace in a format that we do not know is left alone; the others can be used.
                Err(Error::Format { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    fn short(&self, what: &'static str) -> Error {
        Error::Nonsense { drive: self.name().to_owned(), what, why: "it is too short".into() }
    }

    /// Sets a started controller up as the options want it; gives the I/O queue pairs granted. First of all the number
    /// of queues: it can only be set before there are any.
    pub(crate) fn configure(&self, state: &mut AdminState, identity: &Identity) -> Result<u32> {
        let want = u32::from(self.options.queues.max(1));
        let sqe = words::set_features(feature::id::NUMBER_OF_QUEUES, false, Queues::ask(want, want).0);
        let granted = Queues(state.admin.run("set number of queues", &sqe)?.result());
        let view = identity.controller();
        if view.apsta() & 1 != 0 {
            // Power states of its own choosing cost latency when work comes.
            let sqe = words::set_features(feature::id::APST, false, feature::Apst::OFF.0);
            state.admin.write(&self.control.port, "set APST off", &sqe, &feature::Apst::OFF_TABLE)?;
        }
        if (1..=3).any(|crd| view.retry_delay_ms(crd) > 0) {
            // Only to a host that asks for it does a controller say how long to wait before a retry.
            let mut behavior = [0; 512];
            behavior[0] = 1;
            let sqe = words::set_features(feature::id::HOST_BEHAVIOR, false, 0);
            state.admin.write(&self.control.port, "set host behavior", &sqe, &behavior)?;
        }
        self.lend_host_memory(state, identity)?;
        let events = feature::EventConfig(0).with_critical(0x1f).with_namespace(view.oaes() & 1 << 8 != 0);
        let sqe = words::set_features(feature::id::ASYNC_EVENT, false, events.0);
        match state.admin.run("set event configuration", &sqe) {
            Ok(_) | Err(Error::Command { .. }) => {}
            Err(error) => return Err(error),
        }
        state.admin.post_events(view.aer_limit());
        Ok(granted.sqs().min(granted.cqs()).min(want))
    }

    /// Lends the host memory that a drive without memory of its own wants.
    fn lend_host_memory(&self, state: &mut AdminState, identity: &Identity) -> Result<()> {
        let view = identity.controller();
        let unit = 4096;
        let want = (u64::from(view.hmpre()) * unit).min(self.options.host_memory);
        if want == 0 || want < u64::from(view.hmmin()) * unit {
            return Ok(());
        }
        let memory = match state.host_memory.take() {
            Some((memory, _)) => memory,
            None => Dma::alloc(&*self.control.port.mapper, want as usize, self.control.page_shift)?,
        };
        let (list, pages) = host_memory_list(&memory, self.control.page_shift, view.hmmaxd());
        let list_memory = Dma::alloc(&*self.control.port.mapper, list.len().max(1), self.control.page_shift)?;
        list_memory.mem.write(0, &list)?;
        let lend = feature::HostMemory {
            enable: true,
            memory_return: false,
            pages,
            list: list_memory.bus()?,
            entries: (list.len() / HostMemoryEntry::BYTES) as u32,
        };
        state.admin.run("lend host memory", &lend.command())?;
        state.host_memory = Some((memory, list_memory));
        Ok(())
    }

    /// Creates a pair on the controller.
    pub(crate) fn create_pair(&self, admin: &mut Admin, qid: u16, sq: PairHalf, cq: PairHalf) -> Result<()> {
        let (sq_z, cq_z) = ((sq.entries - 1) as u16, (cq.entries - 1) as u16);
        admin.run("create completion queue", &words::create_cq(qid, cq_z, cq.bus, true, None))?;
        let sqe = words::create_sq(qid, sq_z, sq.bus, qid, true, words::Priority::default());
        admin.run("create submission queue", &sqe).map(|_| ()).inspect_err(|_| {
            let _ = admin.run("delete completion queue", &words::delete_cq(qid));
        })
    }

    /// Takes a pair away from the controller. When this succeeds the controller has let go of all its commands.
    /// `between` is run when no completion can follow any more.
    pub(crate) fn delete_pair(&self, admin: &mut Admin, qid: u16, between: impl FnOnce()) -> Result<()> {
        let patience = self.options.abort_wait;
        admin.run_within("delete submission queue", &words::delete_sq(qid), patience)?;
        between();
        admin.run_within("delete completion queue", &words::delete_cq(qid), patience).map(|_| ())
    }

    pub(crate) fn close_queue(&self, cell: &Arc<QueueCell>) {
        let mut state = self.state();
        let participant: Arc<dyn Participant> = cell.clone();
        state.participants.retain(|p| !Arc::ptr_eq(p, &participant));
        if state.dead.is_none() && self.delete_pair(&mut state.admin, cell.qid, || ()).is_err() {
            let _ = self.reset(&mut state, "a queue that could not be deleted");
        }
        state.give_qid(cell.qid);
        if let Some(error) = state.dead.clone() {
            cell.fail(&error);
            leak_unless_gone(&error, cell.clone());
        }
    }

    pub(crate) fn log_page(
        &self,
        state: &mut AdminState,
        lid: u8,
        nsid: u32,
        bytes: usize,
    ) -> Result<Vec<u8>> {
        let in_pieces = self.identity.get().is_some_and(|(identity, _)| identity.controller().log_offsets());
        let mut out = Vec::new();
        while out.len() < bytes && (out.is_empty() || in_pieces) {
            let piece = (bytes - out.len()).min(4096);
            let sqe = words::get_log_page(lid, nsid, piece as u32, out.len() as u64, false, 0);
            let what = format!("get log page {lid:02x}h");
            out.extend(state.admin.read(&self.control.port, &what, &sqe, piece)?);
        }
        Ok(out)
    }

    /// Reads the log page of every event, which lets the controller report the next of its kind, and posts its request
    /// again.
    pub(crate) fn serve_events(&self, state: &mut AdminState) -> Result<()> {
        state.admin.look();
        while let Some(event) = state.admin.fired.pop_front() {
            match self.log_page(state, event.page(), u32::MAX, 512) {
                Ok(_) | Err(Error::Command { .. }) => {}
                Err(error) => return Err(error),
            }
            state.events.push(event);
            state.admin.post_events(self.identity().controller().aer_limit());
        }
        Ok(())
    }
}

impl AdminState {
    pub(crate) fn take_qid(&mut self, inner: &Inner) -> Result<u16> {
        let free = self.in_use.iter().position(|used| !used);
        let Some(index) = free else {
            return Err(Error::NoQueue { drive: inner.name().to_owned(), granted: self.in_use.len() as u32 });
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

impl Drop for Inner {
    fn drop(&mut self) {
        let patience =
            self.identity.get().map_or(Duration::from_secs(10), |(identity, _)| identity.shutdown_time());
        let state = self.admin.get_mut().unwrap_or_else(|e| e.into_inner());
        if state.dead.is_some() {
            return;
        }
        // Queues are deleted by now. A controller that does not come to rest is disabled; one that does not even let
        // itself be disabled keeps its memory.
        let rest = self.control.shut_down(patience.min(self.options.ready_limit));
        let disabled = self.control.disable();
        if let Err(error) = rest.and(disabled)
            && let Err(error) = self.control.disable().map_err(|_| error)
            && !matches!(error, Error::Gone { .. })
        {
            std::mem::forget(state.host_memory.take());
        }
    }
}

/// Keeps memory that a device may still reach for ever, unless the device is gone.
pub(crate) fn leak_unless_gone<T>(error: &Error, memory: T) {
    if !matches!(error, Error::Gone { .. }) {
        std::mem::forget(memory);
    }
}

/// The descriptor list for a piece of host memory, and its pages in all.
fn host_memory_list(memory: &Dma, page_shift: u32, most: u16) -> (Vec<u8>, u32) {
    let most = if most == 0 { usize::MAX } else { usize::from(most) };
    let mut list = Vec::new();
    let mut pages = 0;
    for run in memory.map.runs().iter().take(most.min(256)) {
        let here = (run.len >> page_shift) as u32;
        list.extend(HostMemoryEntry { at: run.addr, pages: here }.encode());
        pages += here;
    }
    (list, pages)
}
