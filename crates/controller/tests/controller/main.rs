//! The controllers against hosts written for the purpose: their data against a shadow copy, every rule, every fault,
//! the real kernels of the driver, and lanes that are threads of their own.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used)]

mod faults;
mod litmus;
mod lockstep;
mod memory;
mod model;
mod null;
mod owner;
mod rig;
mod rng;
mod rules;
mod warp;
