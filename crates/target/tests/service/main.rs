//! Tests of a target and its clients: file operations, clients without the key, hostile clients, a relay in between,
//! and outages.
#![allow(clippy::unwrap_used)]

mod bed;
mod files;
mod hostile;
mod hung_fs;
mod mounts;
mod outages;
mod relay;
mod stuck;
mod together;
