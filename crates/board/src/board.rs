//! The board: its thread, its registers, and what it has to say.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::{ControllerBackend, FunctionReset, HostMem, Interrupt, Mapper, Registers};
use onehop_radio::{Limits, regs};

use crate::config::Iommu;
use crate::mapper::BoardMapper;
use crate::registers::State;
use crate::space::Space;
use crate::violation::{Book, Rule};
use crate::{Config, Error, Reached, Result, Violation, engine};

/// What a board has done since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// How often samples were started.
    pub starts: u64,
    /// Blocks that the converter made: those that were written and those that were lost.
    pub sent_blocks: u64,
    /// Blocks that were lost as a whole.
    pub lost_blocks: u64,
    /// Samples of bursts that are missing in the others.
    pub missing_samples: u64,
    /// How far the generator was behind its clock at worst: this machine is too slow for the rate then.
    pub most_behind: Duration,
    /// Samples that were transmitted.
    pub transmitted_samples: u64,
}

/// What flowed from a start to the stop after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flow {
    /// Samples of each block.
    pub block_samples: u32,
    /// Blocks that the converter made.
    pub sent_blocks: u64,
    /// Those that were lost as a whole.
    pub lost_blocks: u64,
    /// Samples of bursts that are missing in the others.
    pub missing_samples: u64,
}

/// Whom an interrupt is told.
type Listener = Box<dyn Fn(u16) + Send + Sync>;

pub(crate) struct Inner {
    pub config: Arc<Config>,
    pub space: Arc<Space>,
    pub book: Arc<Book>,
    state: Mutex<State>,
    pub wake: Condvar,
    raised: AtomicU64,
    listener: Mutex<Option<Listener>>,
    seen: Mutex<u64>,
    rang: Condvar,
}

impl Inner {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As after power-on.
    pub(crate) fn reset(&self) {
        self.state().reset();
        // Nothing of what was under way reaches memory after this returns.
        loop {
            let state = self.state();
            if !state.rx.busy && !state.tx.busy {
                return;
            }
            drop(state);
            std::thread::yield_now();
        }
    }

    /// Raises the board's only interrupt.
    pub(crate) fn interrupt(&self) {
        self.raised.fetch_add(1, Ordering::SeqCst);
        drop(self.seen.lock().unwrap_or_else(PoisonError::into_inner));
        self.rang.notify_all();
        if let Some(listener) = &*self.listener.lock().unwrap_or_else(PoisonError::into_inner) {
            listener(0);
        }
    }
}

/// A simulated board. It stops when it is dropped.
pub struct Board {
    inner: Arc<Inner>,
    mapper: Arc<BoardMapper>,
    thread: Option<JoinHandle<()>>,
}

impl Board {
    /// A new board, as after power-on.
    ///
    /// # Errors
    /// When the machine has no thread for it.
    pub fn new(config: Config) -> Result<Self> {
        let config = Arc::new(config);
        let (space, book) = (Space::new(config.p2p, config.mask_bits), Arc::<Book>::default());
        let mapper = Arc::new(BoardMapper::new(space.clone(), &config));
        let state = State::new(config.clone(), space.clone(), book.clone());
        let inner = Arc::new(Inner {
            config,
            space,
            book,
            state: Mutex::new(state),
            wake: Condvar::new(),
            raised: AtomicU64::new(0),
            listener: Mutex::default(),
            seen: Mutex::default(),
            rang: Condvar::new(),
        });
        let mine = inner.clone();
        let thread = std::thread::Builder::new().name("sdr board".into()).spawn(move || engine::run(&mine));
        Ok(Self { inner, mapper, thread: Some(thread.map_err(Error::Thread)?) })
    }

    /// What it is.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// What its receiver can do.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let Config { max_bytes, mask_bits, .. } = *self.inner.config;
        Limits { max_bytes, mask_bits, ..Limits::USDR_RX }
    }

    /// How a driver gets at it.
    #[must_use]
    pub fn port(&self) -> ControllerBackend {
        ControllerBackend {
            regs: Arc::new(Bar(self.inner.clone())),
            mapper: self.mapper.clone() as Arc<dyn Mapper>,
            reset: self.inner.config.flr.then(|| Arc::new(Bar(self.inner.clone())) as _),
            name: "sim:usdr".into(),
            simulated: true,
        }
    }

    /// Its mapper.
    #[must_use]
    pub fn mapper(&self) -> &Arc<BoardMapper> {
        &self.mapper
    }

    /// Its interrupt, for a driver in this process.
    #[must_use]
    pub fn interrupt(&self) -> Arc<dyn Interrupt> {
        Arc::new(Bar(self.inner.clone()))
    }

    /// Calls `listener` with the vector, which is always 0, at every interrupt.
    pub fn on_interrupt(&self, listener: impl Fn(u16) + Send + Sync + 'static) {
        *self.inner.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(listener));
    }

    /// Whether the function may reach memory.
    pub fn set_bus_master(&self, on: bool) {
        self.inner.space.set_master(on);
    }

    /// Power-on, which even a board has that cannot be reset from outside.
    pub fn power_on(&self) {
        self.inner.reset();
    }

    /// Lets the board reach memory at a bus address of the caller's choice; none if something lies there. Without an
    /// IOMMU, what lies where a GPU's BAR does is taken for one's.
    #[must_use]
    pub fn reach(&self, at: u64, memory: HostMem) -> Option<Reached> {
        let Config { iommu, bar, .. } = *self.inner.config;
        self.inner.space.add(vec![(at, memory)], iommu == Iommu::Off && at >= bar)
    }

    /// Writes down an access that is none of whole registers, for those who see such accesses before the registers do.
    pub fn note_odd_access(&self, offset: u64, bytes: usize) {
        self.inner.book.note(Rule::Access, format!("{bytes} bytes at {offset:#x}"));
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.inner.state().stats
    }

    /// The last times that samples flowed, the latest of them at the end.
    #[must_use]
    pub fn flows(&self) -> Vec<Flow> {
        self.inner.state().flows.iter().copied().collect()
    }

    /// The rules that were broken.
    #[must_use]
    pub fn violations(&self) -> Vec<Violation> {
        self.inner.book.list()
    }

    /// How many times rules were broken.
    #[must_use]
    pub fn violation_count(&self) -> u64 {
        self.inner.book.count()
    }

    /// The end of what was transmitted, as it came out of the buffers.
    #[must_use]
    pub fn transmitted(&self) -> Vec<u8> {
        self.inner.state().tx.sent.iter().copied().collect()
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        self.inner.state().ended = true;
        self.inner.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// BAR0: big-endian registers.
struct Bar(Arc<Inner>);

impl Bar {
    /// The register at an offset, where there is one.
    fn register(&self, offset: u32, what: &str) -> Option<u32> {
        if offset.is_multiple_of(4) && offset < regs::BAR_BYTES {
            return Some(offset / 4);
        }
        self.0.book.note(Rule::Access, format!("a {what} at {offset:#x}"));
        None
    }
}

impl Registers for Bar {
    fn read32(&self, offset: u32) -> u32 {
        let Some(register) = self.register(offset, "read") else { return u32::MAX };
        let state = self.0.state();
        if state.ended { u32::MAX } else { state.read(register).swap_bytes() }
    }

    fn write32(&self, offset: u32, value: u32) {
        if let Some(register) = self.register(offset, "write") {
            let mut state = self.0.state();
            state.write(register, value.swap_bytes());
            drop(state);
            self.0.wake.notify_all();
        }
    }

    fn size(&self) -> u32 {
        regs::BAR_BYTES
    }
}

impl FunctionReset for Bar {
    fn function_reset(&self) -> onehop_os::Result<()> {
        self.0.reset();
        Ok(())
    }
}

impl Interrupt for Bar {
    fn wait(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let raised = self.0.raised.load(Ordering::SeqCst);
            if raised != *seen {
                *seen = raised;
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            seen = self.0.rang.wait_timeout(seen, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
