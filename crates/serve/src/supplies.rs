//! What links take of what their users share.

use std::sync::Arc;

use onehop_target::shares::{Shares, TakenShare};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::memory::link_mappings;
use crate::persons::Persons;
use crate::workers::MOST_GROUPS;

/// Of all links, which are a mapping each, one user may have this part.
const PART_OF_A_USER: u64 = 4;
/// Rings of one user, and of all, among them: a guard each, and a second mapping when a part of its memory is cut off.
pub(crate) const MOST_RINGS_OF_A_USER: u64 = 2048;
const MOST_RINGS: u64 = 16_384;
/// Bytes of addresses that the memory of one user takes, and that of all: files in `/dev/shm` may have holes, and a process has 128 TiB.
const MOST_MAPPED_OF_A_USER: u64 = 4 << 40;
const MOST_MAPPED: u64 = 32 << 40;
// Semaphores have guards too, and so have rings that are on their way here or from here.
const _: () = assert!((MOST_RINGS + MOST_RINGS_OF_A_USER) as usize + MOST_GROUPS < onehop_os::Guard::MOST);

/// All that links take.
pub(crate) struct Supplies {
    pub links: Arc<Shares>,
    pub rings: Arc<Shares>,
    /// Bytes of addresses.
    pub mapped: Arc<Shares>,
    /// Descriptors of GPU memory.
    descriptors: Arc<Shares>,
}

/// What a link needs.
pub(crate) struct LinkNeeds {
    pub rings: u64,
    /// Bytes of addresses.
    pub mapped: u64,
    pub descriptors: u64,
}

/// What a link has taken. It goes back when nothing uses the link's memory any more, which may be later than the link goes.
pub(crate) struct SupplyShare {
    _of_each: [TakenShare; 4],
}

impl Supplies {
    pub fn new(persons: &Persons, descriptors: u64) -> Self {
        let links = link_mappings();
        Self {
            links: Arc::new(persons.shares(links).with_limit(links / PART_OF_A_USER)),
            rings: Arc::new(persons.shares(MOST_RINGS).with_limit(MOST_RINGS_OF_A_USER)),
            mapped: Arc::new(persons.shares(MOST_MAPPED).with_limit(MOST_MAPPED_OF_A_USER)),
            descriptors: Arc::new(persons.shares(descriptors)),
        }
    }

    /// Takes a link's part.
    ///
    /// # Errors
    /// `EMFILE` for one link, ring or descriptor too many, `ENOMEM` for too many bytes.
    pub fn take(&self, uid: u32, needs: &LinkNeeds) -> Result<SupplyShare, Errno> {
        let link = self.links.lend(uid, 1).ok_or(Errno::MFILE)?;
        let ring = self.rings.lend(uid, needs.rings).ok_or(Errno::MFILE)?;
        let descriptors = self.descriptors.lend(uid, needs.descriptors).ok_or(Errno::MFILE)?;
        // Several may have asked at once how much room there is.
        let mapped = self.mapped.lend(uid, needs.mapped).ok_or(Errno::NOMEM)?;
        Ok(SupplyShare { _of_each: [link, ring, descriptors, mapped] })
    }

    /// What a user has, and may still take.
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
