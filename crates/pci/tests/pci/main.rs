//! Tests on composed systems.
#![allow(clippy::unwrap_used)]

#[path = "../common/compose.rs"]
mod compose;
mod refusals;
mod tree;
