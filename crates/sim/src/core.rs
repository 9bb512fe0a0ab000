//! The controller behind its lock, and access by registers, doorbells and the clock.
//!
//! With a worker, doorbell writes only go into a mailbox, as posted writes go onto the bus; the next to lock the
//! controller, the worker or a register access, delivers them in order.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use onehop_os::{HostMem, Registers};
use onehop_proto::regs::{self, GONE32, offset};

use crate::Result;
use crate::cmb::bar_size;
use crate::config::Config;
use crate::device::ControllerState;
use crate::dma::Space;
use crate::engine::IoEngine;
use crate::mapped::MappedDoorbells;
use crate::null::Fast;
use crate::violation::{Book, Rule};
use crate::worker::Worker;

/// Called with an interrupt vector.
pub(crate) type OnInterrupt = Arc<dyn Fn(u16) + Send + Sync>;

/// The controller and the state shared around it.
pub(crate) struct Core {
    pub config: Arc<Config>,
    pub space: Arc<Space>,
    pub book: Book,
    pub engine: Option<Arc<dyn IoEngine>>,
    pub cmb: Option<(HostMem, u32)>,
    /// Doorbells that the host writes as memory, once it may.
    pub mapped: Arc<OnceLock<MappedDoorbells>>,
    device: Mutex<ControllerState>,
    mail: Mutex<VecDeque<(u32, u32)>>,
    bell: Condvar,
    has_mail: AtomicBool,
    sleeping: AtomicBool,
    pub stop: AtomicBool,
    gone: AtomicBool,
    on_interrupt: Mutex<Option<OnInterrupt>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    /// A controller. `engine` executes its I/O commands; otherwise the null controller if the configuration selects it,
    /// or the core itself.
    pub(crate) fn new(config: Config, engine: Option<Arc<dyn IoEngine>>) -> Result<Self> {
        config.check()?;
        let (config, space, book) = (Arc::new(config), Space::new(), Book::default());
        let null = |order| Arc::new(Fast::new(config.queues, order, book.clone())) as Arc<dyn IoEngine>;
        let engine = engine.or_else(|| config.null.map(null));
        let device = ControllerState::new(config.clone(), space.clone(), book.clone(), engine.clone())?;
        let cmb = device.cmb.as_ref().map(|cmb| (cmb.mem.clone(), cmb.bar_offset));
        Ok(Self {
            config,
            space,
            book,
            engine,
            cmb,
            mapped: device.mapped.clone(),
            device: Mutex::new(device),
            mail: Mutex::default(),
            bell: Condvar::new(),
            has_mail: AtomicBool::new(false),
            sleeping: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            on_interrupt: Mutex::default(),
        })
    }

    /// Runs `work` on the controller, after delivering earlier doorbell writes.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut ControllerState) -> T) -> T {
        let mut device = locked(&self.device);
        self.deliver(&mut device);
        let result = work(&mut device);
        if self.config.workers {
            device.tick();
        } else {
            device.run(usize::MAX);
        }
        self.gone.store(device.gone, Relaxed);
        let raised = std::mem::take(&mut device.raised);
        let more = self.config.workers && device.next_due().is_some();
        drop(device);
        self.interrupt(&raised);
        if more {
            self.has_mail.store(true, SeqCst);
            self.wake();
        }
        result
    }

    /// Lets the worker do some work; returns the time until there is more.
    pub(crate) fn work(&self, most: usize) -> Option<Duration> {
        let mut device = locked(&self.device);
        self.deliver(&mut device);
        device.run(most);
        self.gone.store(device.gone, Relaxed);
        let wait = device.next_due().map(|due| Duration::from_nanos(due.saturating_sub(device.clock.now())));
        let raised = std::mem::take(&mut device.raised);
        drop(device);
        self.interrupt(&raised);
        wait
    }

    /// Does the next due work, however far off; false if there is none.
    pub(crate) fn step(&self) -> bool {
        self.with(|device| {
            let Some(due) = device.next_due() else { return false };
            device.clock.skip_to(due);
            device.run(1);
            true
        })
    }

    fn deliver(&self, device: &mut ControllerState) {
        if self.has_mail.load(Acquire) {
            let mail = {
                let mut mail = locked(&self.mail);
                self.has_mail.store(false, Relaxed);
                std::mem::take(&mut *mail)
            };
            device.tick();
            mail.iter().for_each(|(at, value)| self.note_written(*at, *value));
            self.deliver_all(device, mail);
        }
        if let Some(mapped) = self.mapped.get().filter(|mapped| mapped.has_changed()) {
            device.tick();
            self.deliver_all(device, mapped.changes());
        }
    }

    fn deliver_all(&self, device: &mut ControllerState, doorbells: impl IntoIterator<Item = (u32, u32)>) {
        for (at, value) in doorbells {
            if !device.gone && !self.rings_engine(at, value) {
                device.ring(at, value);
            }
        }
    }

    /// A doorbell was written as a register: updates its memory, if mapped.
    fn note_written(&self, at: u32, value: u32) {
        if let Some(mapped) = self.mapped.get() {
            mapped.written(at, value);
        }
    }

    /// Whether a doorbell belongs to the engine, which is then notified.
    fn rings_engine(&self, at: u32, value: u32) -> bool {
        let Some(engine) = &self.engine else { return false };
        regs::doorbell_of(at, self.config.dstrd).is_some_and(|(qid, is_cq)| engine.ring(qid, is_cq, value))
    }

    /// Delivers doorbells that the host wrote as memory; returns whether there were any.
    pub(crate) fn poll_doorbells(&self) -> bool {
        let changed = self.mapped.get().is_some_and(MappedDoorbells::has_changed);
        if changed {
            self.with(|_| ());
        }
        changed
    }

    fn interrupt(&self, raised: &[u16]) {
        if raised.is_empty() {
            return;
        }
        // The handler may ring doorbells, and so come back here.
        let call = locked(&self.on_interrupt).clone();
        if let Some(call) = call {
            raised.iter().for_each(|vector| call(*vector));
        }
    }

    pub(crate) fn on_interrupt(&self, call: OnInterrupt) {
        *locked(&self.on_interrupt) = Some(call);
    }

    /// Whether the device is known to have left the bus.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Relaxed)
    }

    /// Wakes the worker, if it sleeps.
    pub(crate) fn wake(&self) {
        if self.sleeping.load(SeqCst) {
            let _mail = locked(&self.mail);
            self.bell.notify_one();
        }
    }

    /// Sleeps until there is mail, or for some time.
    pub(crate) fn sleep(&self, wait: Option<Duration>) {
        let mail = locked(&self.mail);
        self.sleeping.store(true, SeqCst);
        if !self.has_mail.load(SeqCst) && !self.stop.load(SeqCst) {
            let wait = wait.unwrap_or(Duration::from_millis(100));
            let _woken = self.bell.wait_timeout(mail, wait);
        }
        self.sleeping.store(false, Release);
    }

    pub(crate) fn has_mail(&self) -> bool {
        self.has_mail.load(Acquire)
    }

    fn post(&self, at: u32, value: u32) {
        let mut mail = locked(&self.mail);
        mail.push_back((at, value));
        self.has_mail.store(true, SeqCst);
        if self.sleeping.load(SeqCst) {
            self.bell.notify_one();
        }
    }
}

/// The controller, whose worker is stopped with the last handle.
pub(crate) struct CoreHandle {
    pub core: Arc<Core>,
    _worker: Option<Worker>,
}

impl CoreHandle {
    pub(crate) fn new(core: Core) -> Result<Self> {
        let core = Arc::new(core);
        let worker = if core.config.workers { Some(Worker::start(core.clone())?) } else { None };
        Ok(Self { core, _worker: worker })
    }
}

/// BAR0 of the simulated controller.
pub(crate) struct SimRegisters(pub Arc<CoreHandle>);

impl SimRegisters {
    /// The word of the controller memory buffer at a BAR offset.
    fn cmb_word(&self, at: u32) -> Option<(&HostMem, usize)> {
        let (mem, start) = self.0.core.cmb.as_ref()?;
        let offset = at.checked_sub(*start)? as usize;
        (offset < mem.len()).then_some((mem, offset))
    }

    fn is_bad(&self, at: u32) -> bool {
        if at.is_multiple_of(4) && at < self.size() {
            return false;
        }
        let detail = format!("an access to {at:#x}, in a BAR of {:#x} bytes", self.size());
        self.0.core.book.note(Rule::RegisterAccess, None, detail);
        true
    }
}

impl Registers for SimRegisters {
    fn read32(&self, at: u32) -> u32 {
        let core = &self.0.core;
        if core.is_gone() || self.is_bad(at) {
            return GONE32;
        }
        if let Some((mem, offset)) = self.cmb_word(at) {
            return mem.word(offset).map_or(GONE32, |word| word.load(Acquire));
        }
        core.with(|device| {
            device.tick();
            if device.gone { GONE32 } else { device.read_register(at) }
        })
    }

    fn write32(&self, at: u32, value: u32) {
        let core = &self.0.core;
        if core.is_gone() {
            return;
        }
        if at >= offset::DOORBELLS && core.rings_engine(at, value) {
            return;
        }
        if self.is_bad(at) {
            return;
        }
        if let Some((mem, offset)) = self.cmb_word(at) {
            if let Ok(word) = mem.word(offset) {
                word.store(value, Release);
            }
        } else if at < offset::DOORBELLS {
            core.with(|device| {
                device.tick();
                if !device.gone {
                    device.write_register(at, value);
                }
            });
        } else if core.config.workers {
            core.post(at, value);
        } else {
            core.with(|device| {
                core.note_written(at, value);
                device.ring(at, value);
            });
        }
    }

    fn size(&self) -> u32 {
        bar_size(&self.0.core.config)
    }

    fn window(&self, bar: u8, offset: u64, bytes: u64) -> Option<HostMem> {
        let (mem, start) = self.0.core.cmb.as_ref()?;
        let from = offset.checked_sub(u64::from(*start)).filter(|_| bar == 0)?;
        mem.slice(usize::try_from(from).ok()?..usize::try_from(from.checked_add(bytes)?).ok()?).ok()
    }
}
