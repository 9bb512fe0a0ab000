//! Shared by the fuzz targets: memory that detects every access outside of its regions, with a controller whose
//! completions the fuzzer writes; and models that are planned and executed.
#![forbid(unsafe_code)]

mod bed;
mod controller;
pub mod model;

pub use bed::{At, Bed, Door};
pub use controller::{Controller, Post};

/// The first `N` bytes, padded with zeros: a device always returns whole pages.
pub fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut page = [0; N];
    page.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    page
}
