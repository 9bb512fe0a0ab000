//! Pins pages by registering them as buffers of an io_uring, for as long as it is open.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use io_uring::IoUring;

use crate::{Error, Result};

/// The kernel's limit for one buffer.
const MOST: usize = 1 << 30;
/// Number of buffers.
const SLOTS: u32 = 4096;

/// Room for pinned pages.
pub(super) struct Pins {
    ring: IoUring,
    free: Mutex<Vec<u32>>,
}

/// Pages that are pinned until this is dropped.
pub(super) struct Pinned {
    pins: Arc<Pins>,
    slots: Vec<u32>,
}

impl Pins {
    pub(super) fn new() -> Result<Self> {
        let refused = |e: io::Error| {
            Error::Refused {
            what: "pinning memory for a device".into(),
            why: format!("io_uring with room for {SLOTS} buffers: {e}"),
            fix: "Allow io_uring (sysctl kernel.io_uring_disabled=0; Linux 5.19 or newer), or drive it through VFIO".into(),
        }
        };
        let ring = IoUring::new(1).map_err(refused)?;
        ring.submitter().register_buffers_sparse(SLOTS).map_err(refused)?;
        Ok(Self { ring, free: Mutex::new((0..SLOTS).collect()) })
    }

    /// Keeps the pages pinned while it is open.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the ring's, which is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    fn set(&self, slot: u32, start: usize, len: usize) -> io::Result<()> {
        let buffer = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: len };
        // SAFETY: the kernel pins the pages and does nothing with them: nothing is ever read or written through
        // this ring; the pages stay pinned even if the mapping goes away, and `PinnedMapping` holds that longer.
        unsafe { self.ring.submitter().register_buffers_update(slot, &[buffer], None) }
    }

    /// Pins whole pages.
    pub(super) fn pin(self: &Arc<Self>, start: usize, len: usize) -> std::result::Result<Pinned, String> {
        let mut pinned = Pinned { pins: self.clone(), slots: Vec::new() };
        for at in (0..len).step_by(MOST) {
            let slot = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let slot = slot.ok_or_else(|| format!("{SLOTS} ranges are pinned, which is the maximum"))?;
            pinned.slots.push(slot);
            let bytes = MOST.min(len - at);
            self.set(slot, start + at, bytes).map_err(|e| format!("pinning {bytes} bytes: {e}"))?;
        }
        Ok(pinned)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        for slot in self.slots.drain(..) {
            // What cannot be unpinned keeps its slot.
            if self.pins.set(slot, 0, 0).is_ok() {
                self.pins.free.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
            }
        }
    }
}
