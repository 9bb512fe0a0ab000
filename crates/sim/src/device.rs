//! The controller: its whole state, and its resets.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::Result;
use crate::aer::Events;
use crate::cmb::Cmb;
use crate::completion::RetryKey;
use crate::config::Config;
use crate::dma::{Space, Unreachable};
use crate::doorbell::Shadow;
use crate::engine::IoEngine;
use crate::exec::{DelayedTask, FetchedCommand, HeldCompletion};
use crate::faults::FaultBook;
use crate::features::Features;
use crate::health::Health;
use crate::mapped::MappedDoorbells;
use crate::media::{NamespaceMedia, namespaces};
use crate::queues::{Cq, Sq};
use crate::regs::Regs;
use crate::rng::Rng;
use crate::stats::OpcodeCounts;
use crate::transfer::TransferSpan;
use crate::violation::{Book, Rule};

/// Nanoseconds since the drive was created; may be ahead of the real clock when time is stepped.
pub(crate) struct Clock {
    start: Instant,
    ahead: u64,
}

impl Clock {
    pub(crate) fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64 + self.ahead
    }

    /// Advances to `then`, if that is later.
    pub(crate) fn skip_to(&mut self, then: u64) {
        self.ahead += then.saturating_sub(self.now());
    }
}

/// The controller's state between off and ready.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    /// Disabled.
    Off,
    /// Enabled, ready at this time.
    Starting(u64),
    /// Enabled and ready.
    Ready,
    /// Disabled, no longer ready at this time.
    Stopping(u64),
}

/// The controller.
pub(crate) struct ControllerState {
    pub config: Arc<Config>,
    pub space: Arc<Space>,
    pub book: Book,
    pub clock: Clock,
    pub regs: Regs,
    pub phase: Phase,
    /// When EN last went to 1.
    pub enabled_at: u64,
    /// When a shutdown that was asked for is complete.
    pub shutdown: Option<u64>,
    /// When the keep-alive timeout expires.
    pub silent_at: Option<u64>,
    pub sqs: Vec<Option<Sq>>,
    pub cqs: Vec<Option<Cq>>,
    /// Completion queues that the host deleted and has not created again.
    pub deleted_cqs: BTreeSet<u16>,
    pub generation: u64,
    pub namespaces: Vec<NamespaceMedia>,
    pub features: Features,
    pub events: Events,
    pub health: Health,
    /// Namespaces changed since the host last read the list.
    pub changed: BTreeSet<u32>,
    pub faults: FaultBook,
    pub rng: Rng,
    pub shadow: Option<Shadow>,
    pub cmb: Option<Cmb>,
    pub mapped: Arc<OnceLock<MappedDoorbells>>,
    pub gone: bool,
    /// Commands to execute now, in order.
    pub ready: VecDeque<FetchedCommand>,
    /// Later work, by time and order.
    pub timers: BTreeMap<(u64, u64), DelayedTask>,
    /// Commands that never complete on their own.
    pub lost: Vec<FetchedCommand>,
    /// Completions that wait for others.
    pub held: Vec<HeldCompletion>,
    pub order: u64,
    /// Commands whose retry must wait, and until when.
    pub retries: HashMap<RetryKey, u64>,
    /// When the medium will be idle.
    pub medium_free: u64,
    pub counts: OpcodeCounts,
    /// Interrupt vectors to raise once the lock is released.
    pub raised: Vec<u16>,
    pub buffer: Vec<u8>,
    pub meta: Vec<u8>,
    pub spans: Vec<TransferSpan>,
    pub engine: Option<Arc<dyn IoEngine>>,
}

impl ControllerState {
    pub(crate) fn new(
        config: Arc<Config>,
        space: Arc<Space>,
        book: Book,
        engine: Option<Arc<dyn IoEngine>>,
    ) -> Result<Self> {
        let cmb = Cmb::new(&config)?;
        let queues = usize::from(config.queues) + 1;
        Ok(Self {
            space,
            book,
            clock: Clock { start: Instant::now(), ahead: 0 },
            regs: Regs::new(&config),
            phase: Phase::Off,
            enabled_at: 0,
            shutdown: None,
            silent_at: None,
            sqs: (0..queues).map(|_| None).collect(),
            cqs: (0..queues).map(|_| None).collect(),
            deleted_cqs: BTreeSet::new(),
            generation: 0,
            namespaces: namespaces(&config, engine.as_ref().and_then(|e| e.blocks()))?,
            features: Features::new(&config),
            events: Events::default(),
            health: Health::default(),
            changed: BTreeSet::new(),
            faults: FaultBook::new(&config.faults, config.seed),
            rng: Rng::new(config.seed ^ 0x6f6e_6568_6f70),
            shadow: None,
            cmb,
            mapped: Arc::default(),
            gone: false,
            ready: VecDeque::new(),
            timers: BTreeMap::new(),
            lost: Vec::new(),
            held: Vec::new(),
            order: 0,
            retries: HashMap::new(),
            medium_free: 0,
            counts: OpcodeCounts::new(),
            raised: Vec::new(),
            buffer: Vec::new(),
            meta: Vec::new(),
            spans: Vec::new(),
            engine,
            config,
        })
    }

    /// Records a violation by the driver.
    pub(crate) fn breach(&self, rule: Rule, queue: Option<u16>, detail: impl Into<String>) {
        self.book.note(rule, queue, detail);
    }

    /// Records that the driver made the controller access an invalid address.
    pub(crate) fn breach_dma(&self, queue: u16, what: &str, at: Unreachable) {
        let rule = match at {
            Unreachable::Unmapped { .. } => Rule::DmaUnmapped,
            Unreachable::PastEnd { .. } => Rule::DmaPastEnd,
            Unreachable::ReadOnly { .. } => Rule::DmaReadOnly,
            Unreachable::NotShared { .. } => Rule::DmaNotShared,
            Unreachable::NoMaster { .. } => Rule::BusMaster,
        };
        self.breach(rule, Some(queue), format!("{what}: {at}"));
    }

    /// The namespace of an identifier.
    pub(crate) fn namespace(&mut self, nsid: u32) -> Option<&mut NamespaceMedia> {
        self.namespaces.get_mut((nsid as usize).checked_sub(1)?)
    }

    /// Whether commands are executed.
    pub(crate) const fn runs(&self) -> bool {
        matches!(self.phase, Phase::Ready | Phase::Stopping(_))
            && !self.regs.csts.cfs()
            && !self.gone
            && !self.is_shut_down()
    }

    const fn is_shut_down(&self) -> bool {
        self.regs.csts.shst() == onehop_proto::regs::Csts::SHST_COMPLETE
    }

    /// The controller fails until it is reset.
    pub(crate) fn fatal(&mut self) {
        self.regs.csts = self.regs.csts.with_cfs(true);
    }

    /// A queue is new, and so is its doorbell.
    pub(crate) fn restart_doorbell(&self, qid: u16, is_cq: bool) {
        if let Some(mapped) = self.mapped.get() {
            mapped.restart(qid, is_cq);
        }
    }

    /// Discards everything that a controller reset discards.
    pub(crate) fn drop_queues(&mut self) {
        self.sqs.iter_mut().for_each(|q| *q = None);
        self.cqs.iter_mut().for_each(|q| *q = None);
        self.deleted_cqs.clear();
        self.ready.clear();
        self.timers.clear();
        self.lost.clear();
        self.held.clear();
        self.shadow = None;
        self.medium_free = 0;
        self.silent_at = None;
        self.events = Events::default();
        self.features.reset();
        if let Some(mapped) = self.mapped.get() {
            mapped.clear();
        }
        if let Some(engine) = &self.engine {
            engine.clear();
        }
    }

    /// Ends a controller reset: not ready, queues gone, features at their defaults.
    pub(crate) fn controller_reset(&mut self) {
        self.drop_queues();
        self.phase = Phase::Off;
        self.shutdown = None;
        self.counts.rest.resets += 1;
        let nssro = self.regs.csts.nssro();
        self.regs.csts = onehop_proto::regs::Csts::default().with_nssro(nssro);
        self.regs.intms = 0;
    }

    /// The state after power-on, except for the content of the media.
    pub(crate) fn full_reset(&mut self) {
        self.controller_reset();
        self.regs = Regs::new(&self.config);
        self.space.set_cmb(None);
    }

    /// Power loss and return.
    pub(crate) fn power_loss(&mut self) {
        self.gone = false;
        if self.phase != Phase::Off && !self.is_shut_down() {
            self.health.unsafe_shutdowns += 1;
        }
        self.health.power_cycles += 1;
        let lost: Vec<_> = self.namespaces.iter_mut().map(NamespaceMedia::lose_power).collect();
        if lost.iter().any(std::result::Result::is_err) {
            self.health.media_errors += 1;
        }
        if let Some(cmb) = &self.cmb {
            cmb.forget();
        }
        self.full_reset();
    }

    /// Makes every acknowledged write durable.
    pub(crate) fn flush_all(&mut self) {
        self.namespaces.iter_mut().for_each(NamespaceMedia::flush);
    }
}
