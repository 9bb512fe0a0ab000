//! PRP lists that are written once for a whole range of memory, and then serve every transfer within it.
//!
//! A list need not begin at the start of its page. So lists of all pages of the memory are laid out once, each page of
//! them beginning half a page of entries after the one before: wherever a transfer begins, one page of the lists holds
//! all its entries in a row, and no chain is needed. A command then only points to the lists; nothing is written, and no
//! command needs memory of its own. It costs two entries for each page, and bounds a transfer to half a list page.

use super::{ENTRY_BYTES, entries_per_page, page_bytes, pages};
use crate::BusAddr;

/// Where the entries of prebuilt lists lie, for pages of this size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrebuiltPrpLists {
    page_shift: u32,
}

impl PrebuiltPrpLists {
    /// The lists for controller pages of `1 << page_shift` bytes.
    #[inline(always)]
    #[must_use]
    pub const fn new(page_shift: u32) -> Self {
        Self { page_shift }
    }

    /// Entries from the beginning of one list page's to the next one's.
    #[inline(always)]
    const fn step(self) -> u64 {
        entries_per_page(self.page_shift) / 2
    }

    /// The longest transfer that is described, wherever it begins.
    #[inline(always)]
    #[must_use]
    pub const fn most_bytes(self) -> u64 {
        self.step() * page_bytes(self.page_shift)
    }

    /// How many list pages there are for `pages` pages of memory.
    #[must_use]
    pub const fn list_pages(self, pages: u64) -> u64 {
        pages.div_ceil(self.step())
    }

    /// Which pages of memory the entries of a list page stand for; those behind the end of the memory have none.
    pub const fn entries(self, list_page: u64) -> core::ops::Range<u64> {
        let first = list_page * self.step();
        first..first + entries_per_page(self.page_shift)
    }

    /// PRP1 and PRP2 for `bytes` bytes, 1 to [`Self::most_bytes`], from `offset` on, a multiple of four. `page` and `list` give
    /// the bus addresses of a page of the memory and of a page of the lists.
    #[inline(always)]
    pub fn point(
        self,
        offset: u64,
        bytes: u64,
        page: impl Fn(u64) -> BusAddr,
        list: impl Fn(u64) -> BusAddr,
    ) -> (u64, u64) {
        let within = offset & (page_bytes(self.page_shift) - 1);
        let first = offset / page_bytes(self.page_shift);
        let prp1 = page(first).0 + within;
        let next = first + 1;
        let prp2 = match pages(self.page_shift, within, bytes) {
            0 | 1 => 0,
            2 => page(next).0,
            _ => list(next / self.step()).0 + next % self.step() * ENTRY_BYTES,
        };
        (prp1, prp2)
    }
}
