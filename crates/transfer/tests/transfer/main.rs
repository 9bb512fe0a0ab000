//! Tests of transfers between drives and GPUs.
#![allow(clippy::unwrap_used)]

mod blocks;
mod network;
#[allow(dead_code, reason = "these tests use a part of the target")]
#[path = "../../../fabrics/tests/host/target.rs"]
mod target;
