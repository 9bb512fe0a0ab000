//! Moves samples between SDR boards and GPU memory by DMA.
//!
//! To receive, in order:
//!
//! 1. [`open`] claims a board on the PCI bus; [`Session::open`] sets up its event page.
//! 2. [`Receiver::open`] allocates a ring of 32 buffers, in GPU memory if the board can reach it ([`SampleRoute::Direct`]),
//!    otherwise in host memory, from which blocks are copied ([`SampleRoute::Pinned`]). It tests the route with data,
//!    and keeps the reasons why no better route works.
//! 3. [`Receiver::start`] starts the flow of samples.
//! 4. [`Receiver::acquire`] returns the next block, with the number of its first sample and the number of samples lost
//!    before it.
//! 5. [`Processor::process`] converts and measures samples on the GPU.
//!
//! ```no_run
//! # use std::{sync::Arc, time::Duration};
//! # fn receive(gpu: Arc<dyn onehop_gpu::Gpu>) -> Result<(), onehop_sdr::Error> {
//! use onehop_radio::{Format, Shape};
//! use onehop_sdr::{Processor, Receiver, RxOptions, Session, Settings, open};
//!
//! let session = Session::open(open(&onehop_pci::Root::here(), "0000:0c:00.0".parse()?)?)?;
//! let shape = Shape::of_bytes(Format::Ci16, &session.card().profile.rx, 64 << 10)?;
//! let mut receiver = Receiver::open(&session, &gpu, &RxOptions::new(shape))?;
//! let mut processor = Processor::new(&gpu, shape, Settings::default())?;
//! receiver.start()?;
//! while let Some(block) = receiver.acquire(Duration::from_secs(1))? {
//!     processor.process(block.memory(), block.first)?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A [`Transmitter`] works the same way in the other direction.
#![forbid(unsafe_code)]

mod card;
mod error;
mod memory;
mod pci;
mod process;
mod proof;
mod rx;
mod selftest;
mod session;
mod staging;
mod tx;

pub use card::{Card, Profile};
pub use error::{Error, Result};
pub use pci::{BoardName, open};
pub use process::{Measurements, Processor, Settings};
pub use rx::{Block, Counts, DetachedBlock, Receiver, RxOptions};
pub use selftest::{SelfTest, Step, self_test};
pub use session::Session;
pub use tx::{Transmitter, TxBlock, TxOptions};

/// A callback that gets the number of buffers filled so far in a self-test, several times a second. Returning `false`
/// cancels the test.
pub type Watch<'a> = &'a mut dyn FnMut(u32) -> bool;

/// The path of the samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SampleRoute {
    /// The board accesses GPU memory.
    Direct,
    /// The board accesses host memory. Blocks are copied to the GPU; for transmission, the GPU writes host memory.
    Pinned,
}

impl SampleRoute {
    /// All routes, the best first.
    pub const BEST_FIRST: [Self; 2] = [Self::Direct, Self::Pinned];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "cpu/direct",
            Self::Pinned => "cpu/pinned",
        }
    }

    /// Opens the best route that works, or `only` that one, and returns why better ones do not work. If the board is
    /// gone, busy or does not stop, no other route is tried.
    fn best<T>(
        only: Option<Self>,
        mut open: impl FnMut(Self) -> Result<T>,
    ) -> Result<(T, Vec<UnavailableRoute>)> {
        let mut why_not_better = Vec::new();
        for route in Self::BEST_FIRST.into_iter().filter(|route| only.is_none_or(|only| only == *route)) {
            match open(route) {
                Ok(opened) => return Ok((opened, why_not_better)),
                Err(
                    error @ (Error::Gone { .. }
                    | Error::Stopped { .. }
                    | Error::Busy { .. }
                    | Error::Cancelled
                    | Error::DoesNotStop { .. }),
                ) => {
                    return Err(error);
                }
                Err(error) => {
                    why_not_better.push(UnavailableRoute { route, reason: error.reason(), fix: error.fix() })
                }
            }
        }
        Err(Error::NoRoute(why_not_better))
    }
}

/// A route that does not work.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnavailableRoute {
    /// The route.
    pub route: SampleRoute,
    /// The reason.
    pub reason: String,
    /// How to fix it.
    pub fix: String,
}
