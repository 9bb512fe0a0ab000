//! Tests of the driver on the simulator, on QEMU, and on a controller that works in GPU memory.
#![allow(missing_docs, clippy::unwrap_used)]

mod exported;
mod faults;
mod hardship;
mod qtest_matrix;
mod resident_matrix;
mod sim_matrix;
mod smoke;
#[path = "../suite/mod.rs"]
mod suite;
mod torture;

use suite::common;
