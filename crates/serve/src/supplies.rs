//! Budgets of links: what users share.

use std::sync::Arc;

use onehop_target::shares::{Shares, TakenShare};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::memory::link_mappings;
use crate::persons::Persons;
use crate::workers::MAX_GROUPS;

/// One user may have one in this many of all links, each of which is a mapping.
const PART_OF_A_USER: u64 = 4;
/// Rings of one user, and of all. Each has a guard, and a second mapping if its memory is truncated.
pub(crate) const MAX_RINGS_PER_USER: u64 = 2048;
const MAX_RINGS: u64 = 16_384;
/// Address space that the memory of one user takes, and that of all. Files in `/dev/shm` may have holes, and a process
/// has 128 TiB.
const MAX_MAPPED_PER_USER: u64 = 4 << 40;
const MAX_MAPPED: u64 = 32 << 40;
// Semaphores have guards too, and so do rings that are being added or removed.
const _: () = assert!((MAX_RINGS + MAX_RINGS_PER_USER) as usize + MAX_GROUPS < onehop_os::Guard::MOST);

/// The budgets of all links.
pub(crate) struct Supplies {
    pub links: Arc<Shares>,
    pub rings: Arc<Shares>,
    /// Bytes of address space.
    pub mapped: Arc<Shares>,
    /// Descriptors of GPU memory.
    descriptors: Arc<Shares>,
}

/// What a link needs.
pub(crate) struct LinkNeeds {
    pub rings: u64,
    /// Bytes of address space.
    pub mapped: u64,
    pub descriptors: u64,
}

/// What a link has taken. It is returned when nothing uses the link's memory any more, which may be after the link is
/// removed.
pub(crate) struct SupplyShare {
    _of_each: [TakenShare; 4],
}

impl Supplies {
    pub fn new(persons: &Persons, descriptors: u64) -> Self {
        let links = link_mappings();
        Self {
            links: Arc::new(persons.shares(links).with_limit(links / PART_OF_A_USER)),
            rings: Arc::new(persons.shares(MAX_RINGS).with_limit(MAX_RINGS_PER_USER)),
            mapped: Arc::new(persons.shares(MAX_MAPPED).with_limit(MAX_MAPPED_PER_USER)),
            descriptors: Arc::new(persons.shares(descriptors)),
        }
    }

    /// Takes what a link needs.
    ///
    /// # Errors
    /// `EMFILE` for too many links, rings or descriptors, `ENOMEM` for too many bytes.
    pub fn take(&self, uid: u32, needs: &LinkNeeds) -> Result<SupplyShare, Errno> {
        let link = self.links.acquire(uid, 1).ok_or(Errno::MFILE)?;
        let ring = self.rings.acquire(uid, needs.rings).ok_or(Errno::MFILE)?;
        let descriptors = self.descriptors.acquire(uid, needs.descriptors).ok_or(Errno::MFILE)?;
        // Checked again: several calls may have seen the same room before.
        let mapped = self.mapped.acquire(uid, needs.mapped).ok_or(Errno::NOMEM)?;
        Ok(SupplyShare { _of_each: [link, ring, descriptors, mapped] })
    }

    /// A user's share: what is taken, and what is left.
    pub fn of_user(&self, uid: u32) -> Value {
        let of = |supply: &Shares| json!({ "taken": supply.taken_by(uid), "left": supply.room(uid) });
        json!({
            "rings": of(&self.rings),
            "rings_and_buffers": of(&self.links),
            "mapped_bytes": of(&self.mapped),
            "gpu_descriptors": of(&self.descriptors),
        })
    }
}
