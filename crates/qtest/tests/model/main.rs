//! The qtest client against QEMU, where it is installed, and against a server that misbehaves.

// The helpers around the tests may fail as the tests do.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod driver;
mod fake;
mod protocol;
mod qemu;
mod script;
