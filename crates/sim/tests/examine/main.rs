//! The simulator under a raw host: every rule, every fault, every command.
#![allow(clippy::unwrap_used)]

mod admin;
mod basics;
mod cmb;
mod commands;
mod faults;
mod features;
mod host;
mod logs;
mod mapped;
mod media;
mod null;
mod protection;
mod queues;
mod registers;
mod rules;
mod shadow;
mod stranger;
mod stress;
