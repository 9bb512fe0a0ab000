//! Memory of other code in this process, as memory that a device shares.

use crate::{HostMem, Result};

impl HostMem {
    /// Memory that other code in this process has allocated. `owner` is dropped with the last clone of the result.
    ///
    /// # Errors
    /// When the address is zero.
    ///
    /// # Safety
    /// The bytes stay allocated, and writable if so told, until the owner is dropped. No Rust reference to them is used meanwhile:
    /// they are read and written as by a device.
    pub unsafe fn borrow(
        base: *mut u8,
        len: usize,
        writable: bool,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        Ok(Self::at(base, len, writable, true)?.on_last_drop(move || drop(owner)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::*;

    #[test]
    fn borrowed_memory_is_its_owners() {
        let (mut bytes, owner) = (vec![1_u8; 100], Arc::new(()));
        // SAFETY: the vector outlives the memory, and nobody uses it meanwhile.
        let mem =
            unsafe { HostMem::borrow(bytes.as_mut_ptr().wrapping_add(3), 90, true, owner.clone()) }.unwrap();
        let part = mem.slice(1..80).unwrap();
        drop(mem);
        part.write(0, &[7; 79]).unwrap();
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(part);
        assert_eq!(Arc::strong_count(&owner), 1);
        assert_eq!((bytes[3], &bytes[4..83], bytes[83]), (1, &[7; 79][..], 1));
    }

    #[test]
    fn gives_back_when_the_last_clone_goes() {
        let gone = Arc::new(AtomicU8::new(0));
        let seen = gone.clone();
        let mem = HostMem::anonymous(1).unwrap().on_last_drop(move || seen.store(1, Ordering::Relaxed));
        let part = mem.slice(0..8).unwrap();
        drop(mem);
        assert_eq!(gone.load(Ordering::Relaxed), 0);
        drop(part);
        assert_eq!(gone.load(Ordering::Relaxed), 1);
    }
}
