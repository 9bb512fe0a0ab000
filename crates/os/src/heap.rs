//! Allocates address ranges: first fit, adjacent free ranges merged.

use std::collections::BTreeMap;

/// The free ranges of memory or of bus addresses. No two of them are adjacent.
#[derive(Debug)]
pub struct Heap {
    free: BTreeMap<usize, usize>,
}

impl Heap {
    /// Everything from `start` to `end` is free.
    #[must_use]
    pub fn new(start: usize, end: usize) -> Self {
        let free = (start < end).then(|| (start, end - start));
        Self { free: free.into_iter().collect() }
    }

    /// Takes the first free range that is long enough, and returns its start.
    pub fn take(&mut self, len: usize) -> Option<usize> {
        let (start, have) = self.free.iter().map(|(s, l)| (*s, *l)).find(|(_, l)| len > 0 && *l >= len)?;
        self.free.remove(&start);
        if have > len {
            self.free.insert(start + len, have - len);
        }
        Some(start)
    }

    /// Total free length.
    #[must_use]
    pub fn left(&self) -> usize {
        self.free.values().sum()
    }

    /// Returns a range from [`Heap::take`].
    pub fn free(&mut self, start: usize, len: usize) {
        let (mut start, mut len) = (start, len);
        if let Some(after) = self.free.remove(&(start + len)) {
            len += after;
        }
        if let Some((before, have)) = self.free.range(..start).next_back().map(|(s, l)| (*s, *l))
            && before + have == start
        {
            self.free.remove(&before);
            (start, len) = (before, have + len);
        }
        self.free.insert(start, len);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const START: usize = 0x20_0000;
    const PAGES: usize = 64;

    /// Free pages as a map; checks that free ranges are in bounds and not adjacent.
    fn free_pages(heap: &Heap) -> [bool; PAGES] {
        let mut pages = [false; PAGES];
        let mut last_end = 0;
        for (start, len) in &heap.free {
            assert!(*start > last_end && *len > 0, "{heap:?}");
            last_end = start + len;
            pages[start - START..last_end - START].fill(true);
        }
        pages
    }

    /// The start that first fit must choose.
    fn first_fit(pages: &[bool; PAGES], len: usize) -> Option<usize> {
        pages.windows(len).position(|run| run.iter().all(|free| *free))
    }

    proptest! {
        #[test]
        fn never_allocates_twice_and_joins_all_that_was_freed(
            steps in prop::collection::vec((any::<bool>(), 1..20_usize, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut heap = Heap::new(START, START + PAGES);
            let mut allocated: Vec<(usize, usize)> = Vec::new();
            let mut model = [true; PAGES];
            for (take, len, which) in steps {
                if take || allocated.is_empty() {
                    let got = heap.take(len);
                    prop_assert_eq!(got, first_fit(&model, len).map(|at| at + START));
                    if let Some(at) = got {
                        model[at - START..at - START + len].fill(false);
                        allocated.push((at, len));
                    }
                } else {
                    let (at, len) = allocated.swap_remove(which.index(allocated.len()));
                    heap.free(at, len);
                    model[at - START..at - START + len].fill(true);
                }
                prop_assert_eq!(free_pages(&heap), model);
            }
            for (at, len) in allocated {
                heap.free(at, len);
            }
            prop_assert_eq!(heap.take(PAGES), Some(START), "one range again");
        }
    }

    #[test]
    fn an_empty_heap_allocates_nothing() {
        assert_eq!(Heap::new(8, 8).take(1), None);
        assert_eq!(Heap::new(9, 8).take(1), None);
        assert_eq!(Heap::new(0, 8).take(0), None);
        assert_eq!(Heap::new(0, 8).take(9), None);
    }
}
