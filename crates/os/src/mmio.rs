//! Registers of a device as memory of this process, accessed as Linux's `readl` and `writel` do.
//!
//! Each access is one volatile load or store. Locked instructions are not used: on uncached memory they lock the bus
//! for every core, and a kernel may forbid them. An access is ordered with others as follows:
//! - before a store, all earlier stores to memory are visible to the device: on x86-64 stores are not reordered, and
//!   the compiler is prevented from it; on aarch64 by `dmb oshst`;
//! - after a load, no later load of memory is satisfied early: on x86-64 loads are not reordered; on aarch64 by `dmb oshld`;
//! - accesses to one device keep their order among each other, because its memory is mapped as device memory.
//!
//! A load is not ordered after an earlier store to ordinary memory; nothing here needs that.

use std::sync::atomic::{Ordering, compiler_fence};

use crate::HostMem;

/// A device's registers as memory of this process: a mapped BAR, from its first byte.
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

    /// A 32-bit register; all ones if it does not exist, as on a bus on which nothing answers.
    #[inline]
    #[must_use]
    pub fn read32(&self, offset: u32) -> u32 {
        let Some(at) = self.place(offset, 4) else { return u32::MAX };
        // SAFETY: in range and aligned; the mapping outlives &self. It is not a Rust allocation, so a volatile access
        // there is a hardware access, regardless of concurrent accesses by devices or threads. Registers of simulated
        // devices are shared or anonymous mappings made by mmap, and each access is one aligned instruction.
        let value = unsafe { at.cast::<u32>().read_volatile() };
        after_load();
        value
    }

    /// Writes a 32-bit register, if it exists.
    #[inline]
    pub fn write32(&self, offset: u32, value: u32) {
        let Some(at) = self.place(offset, 4) else { return };
        before_store();
        // SAFETY: as for `read32`, and writable.
        unsafe { at.cast::<u32>().write_volatile(value) };
    }

    /// Writes a 64-bit register by one store, if it exists.
    #[inline]
    pub fn write64(&self, offset: u32, value: u64) {
        let Some(at) = self.place(offset, 8) else { return };
        before_store();
        // SAFETY: as for `read32`, and writable.
        unsafe { at.cast::<u64>().write_volatile(value) };
    }

    /// The address of a register; `None` unless it is aligned and within writable memory.
    #[inline]
    fn place(&self, offset: u32, bytes: usize) -> Option<*mut u8> {
        let offset = offset as usize;
        let at = self.0.host_ptr().wrapping_add(offset);
        (self.0.is_writable_range(offset, bytes) && at.addr().is_multiple_of(bytes)).then_some(at)
    }
}

/// Makes earlier stores visible to the device before the following store.
#[inline(always)]
fn before_store() {
    compiler_fence(Ordering::SeqCst);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier, which changes neither memory nor registers.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
}

/// Orders later loads after the preceding load.
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
