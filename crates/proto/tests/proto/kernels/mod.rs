//! What GPU threads run, on memory with a controller in it that keeps to the rules or breaks one of them.

mod bed;
mod owner;
mod shared;
mod single;
