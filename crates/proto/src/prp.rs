//! Physical region pages: how a driver describes a buffer page by page, and how a controller reads that back.
//!
//! [`build`] and [`Walk`] are the two sides of one rule book; the driver and the simulator share it.

mod prebuilt;

use core::fmt;

pub use prebuilt::PrebuiltPrpLists;

use crate::{BusAddr, Status};

/// The smallest page shift that CC.MPS can say.
pub const MIN_PAGE_SHIFT: u32 = 12;
/// The largest page shift that CC.MPS can say.
pub const MAX_PAGE_SHIFT: u32 = 27;
/// Bytes of an entry.
pub const ENTRY_BYTES: u64 = 8;

/// The shift itself, or the nearest that CC.MPS can say.
#[inline(always)]
const fn nearest_shift(page_shift: u32) -> u32 {
    if page_shift < MIN_PAGE_SHIFT {
        MIN_PAGE_SHIFT
    } else if page_shift > MAX_PAGE_SHIFT {
        MAX_PAGE_SHIFT
    } else {
        page_shift
    }
}

/// Bytes of a page; a shift that CC.MPS cannot say counts as the nearest that it can.
#[inline(always)]
#[must_use]
pub const fn page_bytes(page_shift: u32) -> u64 {
    1 << nearest_shift(page_shift)
}

/// Entries that fill a page.
#[inline(always)]
#[must_use]
pub const fn entries_per_page(page_shift: u32) -> u64 {
    page_bytes(page_shift) / ENTRY_BYTES
}

/// How many pages `len` bytes touch when the first lies `offset` bytes into its page.
#[inline(always)]
#[must_use]
pub const fn pages(page_shift: u32, offset: u64, len: u64) -> u64 {
    if len == 0 {
        return 0;
    }
    let page = page_bytes(page_shift);
    let first = page - (offset & (page - 1));
    if len <= first { 1 } else { 2 + ((len - first - 1) >> nearest_shift(page_shift)) }
}

/// What a transfer needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    /// Pages that the data touches.
    pub pages: u64,
    /// Data entries in the list; chain entries come on top.
    pub list_entries: u64,
    /// Pages that the list takes.
    pub list_pages: u64,
}

/// What a transfer needs if its list, should it need one, starts at entry `first_index` of a page.
#[inline]
#[must_use]
pub const fn layout(page_shift: u32, offset: u64, len: u64, first_index: u32) -> Layout {
    let pages = pages(page_shift, offset, len);
    if pages <= 2 {
        return Layout { pages, list_entries: 0, list_pages: 0 };
    }
    let entries = pages - 1;
    let per_page = entries_per_page(page_shift);
    let first = per_page - (first_index as u64 & (per_page - 1));
    let list_pages = if entries <= first {
        1
    } else {
        // Every page but the last gives one entry to the chain. `| 1` changes nothing: it shows that this is not zero.
        1 + (entries - (first - 1) - 1).div_ceil((per_page - 1) | 1)
    };
    Layout { pages, list_entries: entries, list_pages }
}

/// Why a buffer cannot be described.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrpError {
    /// The transfer has no bytes.
    Empty,
    /// The page shift is outside 12 to 27.
    PageShift(u32),
    /// The first byte is not dword aligned.
    Unaligned(BusAddr),
    /// A page other than the first does not start on a page boundary.
    PageOffset {
        /// Which page, the first being 0.
        index: u64,
    },
    /// A page of the list does not start on a page boundary.
    ListOffset {
        /// Which page of the list.
        list_page: u32,
    },
    /// The list cannot start at this entry: a page has fewer.
    FirstIndex(u32),
    /// The list would need more pages than can be counted.
    TooLong,
}

impl fmt::Display for PrpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Empty => f.write_str("the transfer is empty"),
            Self::PageShift(shift) => write!(f, "pages of 2^{shift} bytes are not NVMe pages"),
            Self::Unaligned(at) => write!(f, "the buffer starts at {at}, which is not dword aligned"),
            Self::PageOffset { index } => write!(f, "page {index} of the buffer is not page aligned"),
            Self::ListOffset { list_page } => {
                write!(f, "page {list_page} of the PRP list is not page aligned")
            }
            Self::FirstIndex(index) => write!(f, "a PRP list cannot start at entry {index}"),
            Self::TooLong => f.write_str("the transfer is too long for a PRP list"),
        }
    }
}

impl core::error::Error for PrpError {}

/// The page addresses of memory that is contiguous on the bus, for [`build`].
#[inline(always)]
pub const fn contiguous(first: BusAddr, page_shift: u32) -> impl Fn(u64) -> BusAddr {
    let page = page_bytes(page_shift);
    move |index| {
        if index == 0 { first } else { BusAddr(first.0 & !(page - 1)).plus(index.wrapping_mul(page)) }
    }
}

/// Describes `len` bytes by PRP1 and PRP2, and by a list if they touch more than two pages.
///
/// `page_addr(i)` is the bus address of page `i` of the buffer; page 0 with the offset of the first byte. The list
/// starts at entry `first_index` of the page at `list_page_addr(0)`; `put(page, index, entry)` writes its entries.
#[inline]
pub fn build(
    page_shift: u32,
    page_addr: impl Fn(u64) -> BusAddr,
    len: u64,
    first_index: u32,
    list_page_addr: impl Fn(u32) -> BusAddr,
    mut put: impl FnMut(u32, u32, u64),
) -> Result<(u64, u64), PrpError> {
    if !(MIN_PAGE_SHIFT..=MAX_PAGE_SHIFT).contains(&page_shift) {
        return Err(PrpError::PageShift(page_shift));
    }
    let mask = page_bytes(page_shift) - 1;
    if len == 0 {
        return Err(PrpError::Empty);
    }
    let first = page_addr(0);
    if first.0 & 3 != 0 {
        return Err(PrpError::Unaligned(first));
    }
    let need = layout(page_shift, first.0 & mask, len, first_index);
    let aligned_page = |index: u64| {
        let at = page_addr(index).0;
        if at & mask == 0 { Ok(at) } else { Err(PrpError::PageOffset { index }) }
    };
    match need.pages {
        1 => return Ok((first.0, 0)),
        2 => return Ok((first.0, aligned_page(1)?)),
        _ => {}
    }
    let aligned_list_page = |list_page: u32| {
        let at = list_page_addr(list_page).0;
        if at & mask == 0 { Ok(at) } else { Err(PrpError::ListOffset { list_page }) }
    };
    let last_slot = entries_per_page(page_shift) as u32 - 1;
    if first_index > last_slot {
        return Err(PrpError::FirstIndex(first_index));
    }
    if need.list_pages > u32::MAX as u64 {
        return Err(PrpError::TooLong);
    }
    let prp2 = aligned_list_page(0)? + first_index as u64 * ENTRY_BYTES;
    let (mut list_page, mut slot) = (0, first_index);
    for index in 1..need.pages {
        if slot == last_slot && index + 1 < need.pages {
            let next = aligned_list_page(list_page + 1)?;
            put(list_page, slot, next);
            list_page += 1;
            slot = 0;
        }
        put(list_page, slot, aligned_page(index)?);
        slot += 1;
    }
    Ok((first.0, prp2))
}

/// Which rule a data pointer breaks, or why it cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WalkError<E> {
    /// The page shift is outside 12 to 27.
    PageShift(u32),
    /// PRP1 is not dword aligned.
    Prp1Unaligned(u64),
    /// PRP2 is a page, but has an offset.
    Prp2Offset(u64),
    /// PRP2 is a list, but not qword aligned.
    ListUnaligned(u64),
    /// An entry of a list has an offset.
    EntryOffset {
        /// The entry.
        entry: u64,
        /// Where it was read.
        at: BusAddr,
    },
    /// The pointer to the next page of a list has an offset.
    ChainOffset {
        /// The pointer.
        entry: u64,
        /// Where it was read.
        at: BusAddr,
    },
    /// The list could not be read.
    Read(E),
}

impl<E> WalkError<E> {
    /// What a controller answers.
    #[must_use]
    pub const fn status(&self) -> Status {
        match self {
            Self::Read(_) => Status::DATA_TRANSFER_ERROR,
            Self::PageShift(_) => Status::INTERNAL_ERROR,
            _ => Status::INVALID_PRP_OFFSET,
        }
    }
}

impl<E: fmt::Display> fmt::Display for WalkError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PageShift(shift) => write!(f, "pages of 2^{shift} bytes are not NVMe pages"),
            Self::Prp1Unaligned(prp) => write!(f, "PRP1 {prp:#x} is not dword aligned"),
            Self::Prp2Offset(prp) => write!(f, "PRP2 {prp:#x} is a page with an offset"),
            Self::ListUnaligned(prp) => write!(f, "PRP list pointer {prp:#x} is not qword aligned"),
            Self::EntryOffset { entry, at } => write!(f, "PRP list entry {entry:#x} at {at} has an offset"),
            Self::ChainOffset { entry, at } => {
                write!(f, "PRP list chain pointer {entry:#x} at {at} has an offset")
            }
            Self::Read(e) => write!(f, "the PRP list cannot be read: {e}"),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for WalkError<E> {}

/// The segments of a data pointer as a controller sees them, one page at most each; stops after the first error.
pub struct Walk<R> {
    page_shift: u32,
    prp1: u64,
    prp2: u64,
    left: u64,
    /// Where the next list entry lies; none until the list is entered.
    list: Option<u64>,
    started: bool,
    read: R,
}

impl<R> Walk<R> {
    /// A walk over `len` bytes; `read_qword` fetches a list entry.
    #[inline]
    pub const fn new<E>(page_shift: u32, prp1: u64, prp2: u64, len: u64, read_qword: R) -> Self
    where
        R: FnMut(BusAddr) -> Result<u64, E>,
    {
        Self { page_shift, prp1, prp2, left: len, list: None, started: false, read: read_qword }
    }

    /// Bytes that have not been walked yet.
    #[inline]
    #[must_use]
    pub const fn left(&self) -> u64 {
        self.left
    }

    /// The next segment; none when all bytes are described.
    #[inline]
    fn step<E>(&mut self) -> Result<(BusAddr, u64), WalkError<E>>
    where
        R: FnMut(BusAddr) -> Result<u64, E>,
    {
        if !(MIN_PAGE_SHIFT..=MAX_PAGE_SHIFT).contains(&self.page_shift) {
            return Err(WalkError::PageShift(self.page_shift));
        }
        let page = 1u64 << self.page_shift;
        let at = if self.started { self.next_page(page)? } else { self.first_page()? };
        let len = (page - (at & (page - 1))).min(self.left);
        self.left -= len;
        Ok((BusAddr(at), len))
    }

    #[inline]
    fn first_page<E>(&mut self) -> Result<u64, WalkError<E>> {
        self.started = true;
        if self.prp1 & 3 != 0 { Err(WalkError::Prp1Unaligned(self.prp1)) } else { Ok(self.prp1) }
    }

    #[inline]
    fn next_page<E>(&mut self, page: u64) -> Result<u64, WalkError<E>>
    where
        R: FnMut(BusAddr) -> Result<u64, E>,
    {
        let mask = page - 1;
        let mut at = match self.list {
            Some(at) => at,
            None if self.left <= page => {
                let prp2 = self.prp2;
                return if prp2 & mask != 0 { Err(WalkError::Prp2Offset(prp2)) } else { Ok(prp2) };
            }
            None if self.prp2 & 7 != 0 => return Err(WalkError::ListUnaligned(self.prp2)),
            None => self.prp2,
        };
        let mut entry = (self.read)(BusAddr(at)).map_err(WalkError::Read)?;
        if at & mask == page - ENTRY_BYTES && self.left > page {
            if entry & mask != 0 {
                return Err(WalkError::ChainOffset { entry, at: BusAddr(at) });
            }
            at = entry;
            entry = (self.read)(BusAddr(at)).map_err(WalkError::Read)?;
        }
        if entry & mask != 0 {
            return Err(WalkError::EntryOffset { entry, at: BusAddr(at) });
        }
        self.list = Some(at.wrapping_add(ENTRY_BYTES));
        Ok(entry)
    }
}

impl<E, R: FnMut(BusAddr) -> Result<u64, E>> Iterator for Walk<R> {
    type Item = Result<(BusAddr, u64), WalkError<E>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let step = self.step();
        if step.is_err() {
            self.left = 0;
        }
        Some(step)
    }
}

/// A walk over the data of a command: see [`Walk`].
#[inline]
pub const fn walk<E, R: FnMut(BusAddr) -> Result<u64, E>>(
    page_shift: u32,
    prp1: u64,
    prp2: u64,
    len: u64,
    read_qword: R,
) -> Walk<R> {
    Walk::new(page_shift, prp1, prp2, len, read_qword)
}
