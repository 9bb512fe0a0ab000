//! The controllers against test hosts: data against a shadow copy, every rule, every fault, the driver's real kernels,
//! and lanes that are threads.
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
