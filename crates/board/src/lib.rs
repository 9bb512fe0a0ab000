//! A simulated SDR board like the uSDR: registers, DMA engines and event page, behind the same seams as any device.
//!
//! 1. [`BoardConfig::parse`] describes the board and its machine.
//! 2. [`Board::new`] creates it.
//! 3. [`Board::port`] and [`Board::interrupt`] are what a driver needs.
//! 4. [`Board::stats`] counts blocks and samples.
//! 5. [`Board::violations`] lists what a real board could not have done.
//!
//! ```
//! use onehop_board::{Board, BoardConfig};
//!
//! # fn main() -> Result<(), onehop_board::Error> {
//! let board = Board::new(BoardConfig::parse("usdr?rate=10M&signal=counter")?)?;
//! let (backend, interrupt) = (board.port(), board.interrupt());
//! // A driver uses both.
//! assert!(board.violations().is_empty());
//! # drop((backend, interrupt));
//! # Ok(())
//! # }
//! ```
//!
//! The board is strict: what a real board could not do, or what would make it write to wrong places, is recorded as a
//! [`BoardViolation`] and not done. Samples come from a generator ([`Signal`]) at a fixed rate, and its clock does not wait
//! for software: without a free buffer, a block is lost and counted. Properties that only a real board can show (IDs,
//! limits, behaviour of the loopback) are configuration.
#![forbid(unsafe_code)]

mod board;
mod config;
mod engine;
mod error;
mod mapper;
mod registers;
mod signal;
mod space;
mod transmit;
mod violation;

pub use board::{Board, BoardStats, Flow};
pub use config::{BoardConfig, Iommu, Missing, P2p};
pub use error::{Error, Result};
pub use mapper::BoardMapper;
pub use signal::Signal;
pub use space::Reached;
pub use violation::{BoardRule, BoardViolation};
