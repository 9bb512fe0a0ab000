//! What GPU threads run, on memory with a controller in it that keeps to the rules or breaks one of them.
#![allow(missing_docs)]

mod bed;
mod owner;
mod shared;
