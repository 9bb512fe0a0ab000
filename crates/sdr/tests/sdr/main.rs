//! Tests of receivers and transmitters on the simulated board.

#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

mod common;
mod partial;
mod process;
mod selftest;
mod stream;
mod wake;
