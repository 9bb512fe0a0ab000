//! Definitions for SDR boards like the uSDR: registers ([`regs`]), the event page ([`event`]), the rules for a ring of
//! buffers ([`ring`]), samples ([`Format`]), and the kernels that process them ([`kernel`]).
//!
//! 1. [`Shape::of_bytes`] chooses how samples are packed into a buffer.
//! 2. [`RingAddresses::plan`] cuts mapped memory into buffers, and checks the board's rules.
//! 3. [`event::EventEntry::is`] recognises a new event.
//! 4. [`event::RxReport::from_data`] decodes it.
//! 5. [`event::RxReport::extents`] lists the samples that a block holds.
//!
//! ```
//! use onehop_radio::{BUFFERS, Format, BoardLimits, RingAddresses, Shape};
//!
//! let limits = BoardLimits::USDR_RX;
//! let shape = Shape::of_bytes(Format::Ci16, &limits, 64 << 10).unwrap();
//! let memory = [(0x1000_0000, shape.ring_bytes())];
//! let ring = RingAddresses::plan(&shape, &limits, memory.into_iter()).unwrap();
//! assert_eq!(ring.0.len(), BUFFERS as usize);
//! ```
//!
//! The driver, the simulated board and the GPU compile the same source: no `std`, no allocation.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod event;
pub mod ids;
pub mod kernel;
pub mod regs;
pub mod ring;
mod sample;

pub use ring::{BUFFERS, BoardLimits, Broken, RingAddresses, Shape};
pub use sample::{Format, Sample};
