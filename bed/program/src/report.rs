//! How tests say how they went.

use std::fmt::Display;

use onehop_os::HostMem;

/// Why a test did not pass.
pub(crate) struct Failed(pub(crate) String);

impl<E: Display> From<E> for Failed {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

/// Runs a test, and tells.
pub(crate) fn check(what: &str, test: impl FnOnce() -> Result<(), Failed>) {
    match test() {
        Ok(()) => println!("PASS {what}"),
        Err(Failed(why)) => println!("FAIL {what}: {why}"),
    }
}

/// An error unless it holds.
pub(crate) fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), Failed> {
    if holds { Ok(()) } else { Err(Failed(why())) }
}

/// What the host has to find in a file.
pub(crate) fn expect(file: &str, offset: u64, bytes: &[u8]) {
    println!("CHECK {file} {offset} {} {:08x}", bytes.len(), crc32c::crc32c(bytes));
}

/// Where a part of some memory lies in it.
pub(crate) fn offset_in(whole: &HostMem, part: &HostMem) -> Result<u64, Failed> {
    let at = (part.host_ptr() as usize).checked_sub(whole.host_ptr() as usize);
    let at = at.filter(|at| at + part.len() <= whole.len());
    at.map(|at| at as u64).ok_or_else(|| Failed("the region is not part of the emulated VRAM".into()))
}

/// Bytes from a seed, none of them like their neighbours.
pub(crate) fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    crate::suite::Rng(seed).bytes(bytes)
}
