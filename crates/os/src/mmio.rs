//! Registers of a device as memory of this process, accessed as Linux's `readl` and `writel` do.
//!
//! Each access is one volatile load or store. A locked instruction has no place here: on memory that is not cached it locks
//! the bus for every core, and a kernel may forbid it. What orders an access with others is:
//! - before a store, all earlier stores to memory are visible to the device: on x86-64 stores are not reordered and the
//!   compiler is kept from it; on aarch64 by `dmb oshst`;
//! - after a load, no later load of memory is satisfied early: on x86-64 loads are not reordered; on aarch64 by `dmb oshld`;
//! - accesses to one device keep their order among each other, because its memory is mapped as device memory.
//!
//! Nothing orders a load behind an earlier store to ordinary memory; nothing here needs that.

use std::sync::atomic::{Ordering, compiler_fence};

use crate::HostMem;

/// A device's registers as memory of this process: a mapped BAR, from its first byte on.
#[derive(Clone, Debug)]
pub struct MmioWindow(HostMem);

impl MmioWindow {
    /// `mem` is the mapping of a BAR: of sysfs `resource0`, or of a VFIO region.
    #[must_use]
    pub fn new(mem: HostMem) -> Self {
        Self(mem)
    }

    /// The mapping.
    #[must_use]
    pub fn memory(&self) -> &HostMem {
        &self.0
    }

    /// A 32-bit register; all ones, as from a bus on which nothing answers, where there is none.
    #[inline]
    #[must_use]
    pub fn read32(&self, offset: u32) -> u32 {
        let Some(at) = self.place(offset, 4) else { return u32::MAX };
        // SAFETY: in range and aligned; the mapping outlives &self. It is none of Rust's allocations: a volatile access there is
        // one of the hardware's, whatever a device or another thread does there at the same time. Registers of simulated devices
        // are shared or anonymous mappings, made by mmap and not by Rust, and each access is one aligned instruction.
        let value = unsafe { at.cast::<u32>().read_volatile() };
        after_load();
        value
    }

    /// Writes a 32-bit register, where there is one.
    #[inline]
    pub fn write32(&self, offset: u32, value: u32) {
        let Some(at) = self.place(offset, 4) else { return };
        before_store();
        // SAFETY: as for `read32`, and writable.
        unsafe { at.cast::<u32>().write_volatile(value) };
    }

    /// Writes a 64-bit register by one store, where there is one.
    #[inline]
    pub fn write64(&self, offset: u32, value: u64) {
        let Some(at) = self.place(offset, 8) else { return };
        before_store();
        // SAFETY: as for `read32`, and writable.
        unsafe { at.cast::<u64>().write_volatile(value) };
    }

    /// Where a register lies; none unless it lies within writable memory and is aligned.
    #[inline]
    fn place(&self, offset: u32, bytes: usize) -> Option<*mut u8> {
        let offset = offset as usize;
        let at = self.0.host_ptr().wrapping_add(offset);
        (self.0.is_writable_range(offset, bytes) && at.addr().is_multiple_of(bytes)).then_some(at)
    }
}

/// Earlier stores become visible to the device before the store that follows.
#[inline(always)]
fn before_store() {
    compiler_fence(Ordering::SeqCst);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier, which changes neither memory nor registers.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
}

/// Later loads come after the load before.
#[inline(always)]
fn after_load() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier, which changes neither memory nor registers.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
    compiler_fence(Ordering::SeqCst);
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("state what orders stores to memory before a store to a register on this architecture");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_words_of_the_mapping() {
        let mem = HostMem::anonymous(4096).unwrap();
        let window = MmioWindow::new(mem.clone());
        window.write32(4, 0x1234_5678);
        window.write64(8, 0x1122_3344_5566_7788);
        assert_eq!(
            (window.read32(4), window.read32(8), window.read32(12)),
            (0x1234_5678, 0x5566_7788, 0x1122_3344)
        );
        for beyond in [4096, 4094, 2, u32::MAX] {
            window.write32(beyond, 1);
            assert_eq!(window.read32(beyond), u32::MAX);
        }
        window.write64(4092, 1);
        window.write64(12, 1);
        assert_eq!((window.read32(4092), window.read32(12)), (0, 0x1122_3344));
    }
}
