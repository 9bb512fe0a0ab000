//! Rows of memory that no cache holds, packed.

use crate::{Error, HostMem, Result};

/// Rows are fetched this far ahead of the one that is copied.
const AHEAD: usize = 16;
/// A line of a cache.
const LINE: usize = 64;
/// Of longer rows only the start is fetched: the processor sees by itself that the rest follows.
const FETCHED: usize = 512;

impl HostMem {
    /// Copies rows of `bytes` bytes from `from`, where they begin at `starts`, to `offset`, one after the other.
    ///
    /// # Errors
    /// When a row, or the room for it, does not lie within its memory.
    pub fn pack_rows(
        &self,
        offset: usize,
        from: &Self,
        starts: impl Iterator<Item = usize> + Clone,
        bytes: usize,
    ) -> Result<()> {
        let mut ahead = starts.clone();
        ahead.by_ref().take(AHEAD).for_each(|start| from.fetch(start, bytes));
        let mut to = offset;
        for start in starts {
            if let Some(start) = ahead.next() {
                from.fetch(start, bytes);
            }
            self.copy_from(to, from, start, bytes)?;
            to = to.saturating_add(bytes);
        }
        Ok(())
    }

    /// Has the processor fetch a range into its cache. Outside of this memory that has no use, and does no harm.
    #[inline]
    fn fetch(&self, offset: usize, bytes: usize) {
        #[cfg(target_arch = "x86_64")]
        for line in (0..bytes.min(FETCHED)).step_by(LINE) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let at = self.host_ptr().wrapping_add(offset.wrapping_add(line));
            // SAFETY: this accesses nothing; at an address without memory it has no effect.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (offset, bytes);
    }

    /// Copies bytes from other memory.
    #[inline]
    fn copy_from(&self, offset: usize, from: &Self, start: usize, bytes: usize) -> Result<()> {
        self.check_writable_range(offset, bytes)?;
        if start > from.len() || bytes > from.len() - start {
            return Err(Error::OutOfRange { offset: start, bytes, len: from.len() });
        }
        self.copy_within_bounds(offset, from, start, bytes);
        Ok(())
    }

    /// By one instruction: others may change the memory meanwhile, which a copy by Rust's own means must rule out.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline]
    fn copy_within_bounds(&self, offset: usize, from: &Self, start: usize, bytes: usize) {
        let (to, from) = (self.host_ptr().wrapping_add(offset), from.host_ptr().wrapping_add(start));
        // SAFETY: both ranges were checked; their mappings outlive this call. To the compiler this is a write to memory by
        // others, as memory that is shared always may be. The direction flag is clear, as the ABI demands.
        unsafe {
            std::arch::asm!("rep movsb", inout("rcx") bytes => _, inout("rdi") to => _, inout("rsi") from => _,
                options(nostack, preserves_flags));
        }
    }

    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    fn copy_within_bounds(&self, offset: usize, from: &Self, start: usize, bytes: usize) {
        let mut buffer = [0; FETCHED];
        for at in (0..bytes).step_by(buffer.len()) {
            let part = &mut buffer[..FETCHED.min(bytes - at)];
            let copied = from.read(start + at, part).and_then(|()| self.write(offset + at, part));
            debug_assert!(copied.is_ok(), "the ranges were checked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_packed_in_order() {
        let from = HostMem::anonymous(1 << 16).unwrap();
        let bytes: Vec<u8> = (0..1u32 << 16).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
        from.write(0, &bytes).unwrap();
        let to = HostMem::anonymous(1 << 16).unwrap();
        for (row, count) in
            [(1, 300), (7, 40), (256, 60), (264, 50), (511, 20), (512, 20), (1500, 9), (4096, 3)]
        {
            let starts = (0..count).map(|i| i * 7919 % (bytes.len() - row));
            to.fill(0, to.len(), 0xee).unwrap();
            to.pack_rows(5, &from, starts.clone(), row).unwrap();
            let expected: Vec<u8> = starts.flat_map(|start| &bytes[start..start + row]).copied().collect();
            let end = 5 + expected.len();
            assert!(to.to_vec(5, expected.len()).unwrap() == expected, "{row}");
            assert_eq!((to.to_vec(0, 5).unwrap(), to.to_vec(end, 1).unwrap()), (vec![0xee; 5], vec![0xee]));
        }
    }

    #[test]
    fn rows_outside_are_refused() {
        let (from, to) = (HostMem::anonymous(4096).unwrap(), HostMem::anonymous(4096).unwrap());
        let pack = |offset, start, bytes| to.pack_rows(offset, &from, std::iter::once(start), bytes);
        assert!(pack(0, 4000, 96).is_ok() && pack(4000, 0, 96).is_ok());
        for (offset, start, bytes) in
            [(0, 4001, 96), (4001, 0, 96), (usize::MAX, 0, 8), (0, usize::MAX - 3, 8)]
        {
            assert!(pack(offset, start, bytes).is_err(), "{offset} {start} {bytes}");
        }
    }
}
