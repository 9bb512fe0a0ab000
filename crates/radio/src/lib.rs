//! The words of SDR boards like the uSDR: its registers ([`regs`]), what it writes into its event page ([`event`]), the
//! rules that its ring of buffers obeys ([`ring`]), samples ([`Format`]), and the kernels that work on them ([`kernel`]).
//!
//! The driver, the simulated board and the GPU compile the same source: no `std`, no allocation, no dependency.
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

pub use ring::{BUFFERS, Broken, Limits, Ring, Shape};
pub use sample::{Format, Sample};
