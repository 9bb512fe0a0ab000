//! Tests of the doctor on composed machines.
#![allow(clippy::unwrap_used)]

mod fixtures;
mod harm;
mod hostile;
mod machines;
#[path = "../../../bench/tests/common/page.rs"]
mod page;
mod pages;
