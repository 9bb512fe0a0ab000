//! Arithmetic on the words of shared mode: bitmaps of identifiers, and counters that wrap.

/// `bits` without the `count` lowest of them.
#[inline(always)]
pub(crate) const fn without_lowest(mut bits: u32, count: u32) -> u32 {
    let mut i = 0;
    while i < count && bits != 0 {
        bits &= bits - 1;
        i += 1;
    }
    bits
}

/// Whether `tail` lies after `ticket`, on counters that wrap.
#[inline(always)]
pub(crate) fn is_after(tail: u32, ticket: u32) -> bool {
    tail.wrapping_sub(ticket).wrapping_sub(1) < 1 << 31
}
