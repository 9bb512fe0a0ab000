//! Samples of an SDR board straight into GPU memory, and out of it.
//!
//! A [`Session`] is a board with its event page. A [`Receiver`] gives it a ring of 32 equal buffers, in GPU memory where
//! the board reaches that ([`Route::Direct`]) or in host memory from which blocks are copied ([`Route::Pinned`]), and
//! lends out block after block, with the number of its first sample and the count of those that were lost before it. Which
//! way the samples go is shown by a self-test with data, and told with the reason where it is not the best one. A
//! [`Transmitter`] does the same the other way round, and [`Processor`] has the GPU convert samples and look at them.
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
pub use process::{Processor, Settings, Sight};
pub use rx::{Block, Counts, DetachedBlock, Receiver, RxOptions};
pub use selftest::{SelfTest, Step, self_test};
pub use session::Session;
pub use tx::{Transmitter, TxBlock, TxOptions};

/// Is told several times a second how many buffers a self-test has seen filled, and ends it by `false`.
pub type Watch<'a> = &'a mut dyn FnMut(u32) -> bool;

/// The way that samples go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// The board reaches GPU memory.
    Direct,
    /// The board reaches host memory; the GPU's copy engine, or the GPU itself, does the rest.
    Pinned,
}

impl Route {
    /// Both, the better one first.
    pub const BEST_FIRST: [Self; 2] = [Self::Direct, Self::Pinned];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "cpu/direct",
            Self::Pinned => "cpu/pinned",
        }
    }

    /// The best that opens, or `only` that one, and why no better one did. A board that is gone, busy or does not stop is
    /// that by every way.
    fn best<T>(only: Option<Self>, mut open: impl FnMut(Self) -> Result<T>) -> Result<(T, Vec<WhyNot>)> {
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
                Err(error) => why_not_better.push(WhyNot { route, reason: error.reason(), fix: error.fix() }),
            }
        }
        Err(Error::NoRoute(why_not_better))
    }
}

/// A route that could not be had.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WhyNot {
    /// Which.
    pub route: Route,
    /// Why not.
    pub reason: String,
    /// What would mend it.
    pub fix: String,
}
