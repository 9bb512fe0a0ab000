//! Bus addresses as the controller sees them: only those in the table are mapped.

use onehop_proto::GpuAddr;
use onehop_proto::queue::{Address, Memory};

use crate::layout::BusMapping;
use crate::{Rule, layout::Pair};

/// The memory of `bytes` bytes at a bus address.
///
/// # Errors
/// The rule that the address breaks, and the address.
#[inline]
pub(crate) fn find<M: Memory<Addr = GpuAddr>>(
    mem: &M,
    pair: &Pair,
    bus: u64,
    bytes: u64,
) -> Result<GpuAddr, (Rule, u64)> {
    // The last range that starts at or below the address.
    let (mut low, mut high) = (0, pair.range_count);
    while low < high {
        let middle = low + (high - low) / 2;
        if long(mem, range(pair, middle)) <= bus {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    let Some(index) = low.checked_sub(1) else { return Err((Rule::DmaUnmapped, bus)) };
    let range = BusMapping::load(mem, range(pair, index));
    let offset = bus.wrapping_sub(range.bus);
    if offset >= range.bytes {
        return Err((Rule::DmaUnmapped, bus));
    }
    if range.bytes - offset < bytes {
        return Err((Rule::DmaPastEnd, bus));
    }
    Ok(range.target.plus(offset))
}

#[inline(always)]
fn range(pair: &Pair, index: u32) -> GpuAddr {
    pair.ranges.plus(u64::from(index) * u64::from(BusMapping::BYTES))
}

#[inline(always)]
fn long<M: Memory<Addr = GpuAddr>>(mem: &M, at: GpuAddr) -> u64 {
    u64::from(mem.load(at)) | u64::from(mem.load(Address::plus(at, 4))) << 32
}

/// A qword of a PRP list.
///
/// # Errors
/// As [`find`].
#[inline]
pub(crate) fn qword<M: Memory<Addr = GpuAddr>>(mem: &M, pair: &Pair, bus: u64) -> Result<u64, (Rule, u64)> {
    find(mem, pair, bus, 8).map(|at| long(mem, at))
}
