//! What the fuzz targets share: memory that notices every access outside of what was laid out, and in it a controller
//! whose completions the fuzzer writes; models that are planned and carried out.
#![forbid(unsafe_code)]

mod bed;
mod controller;
pub mod model;

pub use bed::{At, Bed, Door};
pub use controller::{Controller, Post};

/// The first `N` bytes, filled up with zeros: a device always returns whole pages.
pub fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut page = [0; N];
    page.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    page
}
