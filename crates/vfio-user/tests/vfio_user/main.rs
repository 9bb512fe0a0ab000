//! Tests of both sides of vfio-user: devices that are served, and drives that another process serves.
#![allow(missing_docs, clippy::unwrap_used)]

mod anything;
mod board;
mod client;
mod driver;
mod protocol;
mod scheme;
#[path = "../../../drive/tests/suite/mod.rs"]
mod suite;
