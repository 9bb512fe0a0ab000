//! Which pages of memory exist.

use std::ffi::{c_int, c_void};
use std::ops::Range;

use onehop_os::HostMem;

use crate::cache::PAGE;

// SAFETY: the C library has this function, with these types on 64-bit Linux.
unsafe extern "C" {
    /// Writes a byte for each page of a mapped range: the lowest bit says whether it is in memory.
    fn mincore(at: *mut c_void, len: usize, pages: *mut u8) -> c_int;
}

/// Whether all pages of a range of whole pages are in memory, so that pinning them takes none. If the kernel does not say, they
/// are not.
pub(crate) fn is_resident(mem: &HostMem, range: Range<usize>) -> bool {
    let Ok(part) = mem.slice(range) else { return false };
    let mut pages = vec![0; part.len().div_ceil(PAGE as usize)];
    // SAFETY: the range is mapped while `part` lives, and the call writes one byte for each of its pages, for which there is room.
    // It fails if the address is not a page's, and then writes nothing.
    let answer = unsafe { mincore(part.host_ptr().cast(), part.len(), pages.as_mut_ptr()) };
    answer == 0 && pages.iter().all(|page| page & 1 == 1)
}
