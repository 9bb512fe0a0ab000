//! What GPU threads run, on memory with a controller in it that keeps to the rules or breaks one of them.
#![allow(missing_docs, clippy::unwrap_used)]

mod bed;
mod owner;
mod shared;
mod single;
