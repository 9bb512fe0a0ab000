//! A simulated SDR board like the uSDR: its registers, its DMA engines and its event page, behind the seams that every
//! device here has. It is strict: what the real board could not do, or what would make it write where it should not, is
//! written down as a [`Violation`] and not done.
//!
//! Samples come from a generator ([`Signal`]) at a rate, by a clock that does not wait for software: where no buffer is
//! free a block is lost, and counted. What cannot be known of a real board without one (identifiers, limits, what its
//! loopback does) is configuration.
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

pub use board::{Board, Flow, Stats};
pub use config::{Config, Iommu, Missing, P2p};
pub use error::{Error, Result};
pub use mapper::BoardMapper;
pub use signal::Signal;
pub use space::Reached;
pub use violation::{Rule, Violation};
