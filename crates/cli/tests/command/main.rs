//! Tests of the onehop binary.
#![allow(clippy::unwrap_used)]

mod arguments;
mod cufile;
mod demo;
mod drive;
#[path = "../../../fabrics/tests/host/target.rs"]
#[allow(dead_code, reason = "a part of it is used")]
mod fabrics_target;
mod gather;
mod interrupts;
mod load;
mod maps;
mod mount;
#[path = "../../../files/tests/common/mounted.rs"]
mod mounted;
mod owned;
mod pages;
mod refusals;
mod reports;
mod run;
mod schemas;
mod sdr;
mod see;
mod serve;
mod signals;
mod sweep;
mod target;
mod terminal;
mod transfers;
