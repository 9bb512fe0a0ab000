//! A target and its clients: files as they should be, whoever has no key, what is hostile, who sits between them, and what happens when something goes.
#![allow(clippy::unwrap_used)]

mod alike;
mod bed;
mod files;
mod hostile;
mod mounts;
mod outages;
mod relay;
mod stuck;
mod together;
