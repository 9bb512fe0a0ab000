//! The board: its thread, its registers and its statistics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::{ControllerBackend, FunctionReset, HostMem, Interrupt, Mapper, Registers};
use onehop_radio::{BoardLimits, regs};

use crate::config::Iommu;
use crate::mapper::BoardMapper;
use crate::registers::BoardState;
use crate::space::BoardBus;
use crate::violation::{BoardRule, Book};
use crate::{BoardConfig, BoardViolation, Error, Reached, Result, engine};

/// Statistics of a board since it was created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BoardStats {
    /// How often samples were started.
    pub starts: u64,
    /// Blocks that the converter produced, both written and lost.
    pub sent_blocks: u64,
    /// Blocks that were lost entirely.
    pub lost_blocks: u64,
    /// Samples of missing bursts in the other blocks.
    pub missing_samples: u64,
    /// The generator's largest delay. If it is large, this machine is too slow for the rate.
    pub most_behind: Duration,
    /// Transmitted samples.
    pub transmitted_samples: u64,
}

/// Statistics of the samples between a start and the next stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flow {
    /// Samples per block.
    pub block_samples: u32,
    /// Blocks that the converter produced.
    pub sent_blocks: u64,
    /// Blocks that were lost entirely.
    pub lost_blocks: u64,
    /// Samples of missing bursts in the other blocks.
    pub missing_samples: u64,
}

/// Called at each interrupt.
type Listener = Box<dyn Fn(u16) + Send + Sync>;

pub(crate) struct BoardInner {
    pub config: Arc<BoardConfig>,
    pub space: Arc<BoardBus>,
    pub book: Arc<Book>,
    state: Mutex<BoardState>,
    pub wake: Condvar,
    raised: AtomicU64,
    listener: Mutex<Option<Listener>>,
    seen: Mutex<u64>,
    rang: Condvar,
}

impl BoardInner {
    pub(crate) fn state(&self) -> MutexGuard<'_, BoardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Restores the power-on state.
    pub(crate) fn reset(&self) {
        self.state().reset();
        // No transfer reaches memory after this returns.
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
    inner: Arc<BoardInner>,
    mapper: Arc<BoardMapper>,
    thread: Option<JoinHandle<()>>,
}

impl Board {
    /// Creates a board in its power-on state.
    ///
    /// # Errors
    /// When its thread cannot be started.
    pub fn new(config: BoardConfig) -> Result<Self> {
        let config = Arc::new(config);
        let (space, book) = (BoardBus::new(config.p2p, config.mask_bits), Arc::<Book>::default());
        let mapper = Arc::new(BoardMapper::new(space.clone(), &config));
        let state = BoardState::new(config.clone(), space.clone(), book.clone());
        let inner = Arc::new(BoardInner {
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

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &BoardConfig {
        &self.inner.config
    }

    /// Limits of its receiver.
    #[must_use]
    pub fn limits(&self) -> BoardLimits {
        let BoardConfig { max_bytes, mask_bits, .. } = *self.inner.config;
        BoardLimits { max_bytes, mask_bits, ..BoardLimits::USDR_RX }
    }

    /// Limits of its transmitter.
    #[must_use]
    pub fn tx_limits(&self) -> BoardLimits {
        BoardLimits { mask_bits: self.inner.config.mask_bits, ..BoardLimits::USDR_TX }
    }

    /// The backend for a driver.
    #[must_use]
    pub fn port(&self) -> ControllerBackend {
        ControllerBackend {
            regs: Arc::new(RegisterBar(self.inner.clone())),
            mapper: self.mapper.clone() as Arc<dyn Mapper>,
            reset: self.inner.config.flr.then(|| Arc::new(RegisterBar(self.inner.clone())) as _),
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
        Arc::new(RegisterBar(self.inner.clone()))
    }

    /// Calls `listener` with the vector, which is always 0, at each interrupt.
    pub fn on_interrupt(&self, listener: impl Fn(u16) + Send + Sync + 'static) {
        *self.inner.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(listener));
    }

    /// Enables or disables the board's access to memory.
    pub fn set_bus_master(&self, on: bool) {
        self.inner.space.set_master(on);
    }

    /// Power-on reset, which also works for boards without function level reset.
    pub fn power_on(&self) {
        self.inner.reset();
    }

    /// Maps memory for the board at a bus address of the caller's choice; `None` if the address is in use. Without an
    /// IOMMU, memory at the address of the GPU's BAR counts as GPU memory.
    #[must_use]
    pub fn reach(&self, at: u64, memory: HostMem) -> Option<Reached> {
        let BoardConfig { iommu, bar, .. } = *self.inner.config;
        self.inner.space.add(vec![(at, memory)], iommu == Iommu::Off && at >= bar)
    }

    /// Records an access that does not cover whole registers, for callers that see accesses before the registers do.
    pub fn note_irregular_access(&self, offset: u64, bytes: usize) {
        self.inner.book.note(BoardRule::Access, format!("{bytes} bytes at {offset:#x}"));
    }

    /// Its statistics.
    #[must_use]
    pub fn stats(&self) -> BoardStats {
        self.inner.state().stats
    }

    /// The most recent periods of flowing samples, the latest at the end.
    #[must_use]
    pub fn flows(&self) -> Vec<Flow> {
        self.inner.state().flows.iter().copied().collect()
    }

    /// The recorded violations.
    #[must_use]
    pub fn violations(&self) -> Vec<BoardViolation> {
        self.inner.book.list()
    }

    /// Number of violations.
    #[must_use]
    pub fn violation_count(&self) -> u64 {
        self.inner.book.count()
    }

    /// The last transmitted samples, as they were in the buffers.
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
struct RegisterBar(Arc<BoardInner>);

impl RegisterBar {
    /// The register at an offset, if it exists.
    fn register(&self, offset: u32, what: &str) -> Option<u32> {
        if offset.is_multiple_of(4) && offset < regs::BAR_BYTES {
            return Some(offset / 4);
        }
        self.0.book.note(BoardRule::Access, format!("a {what} at {offset:#x}"));
        None
    }
}

impl Registers for RegisterBar {
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

impl FunctionReset for RegisterBar {
    fn function_reset(&self) -> onehop_os::Result<()> {
        self.0.reset();
        Ok(())
    }
}

impl Interrupt for RegisterBar {
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
