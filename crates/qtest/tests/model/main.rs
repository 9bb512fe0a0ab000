//! The qtest client against QEMU, if installed, and against a server that misbehaves.

// The tests' helpers may panic, too.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod driver;
mod fake;
mod protocol;
mod qemu;
mod script;
