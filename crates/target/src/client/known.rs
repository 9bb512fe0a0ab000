//! The files that the kernel knows: their numbers, where they were last seen, and the target's numbers for them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use super::{RequestError, SessionView};
use crate::lock;
use crate::tree::{FOREIGN, TreeResult};
use crate::wire::{Attr, FileKey, Name, ROOT};

/// A file that the kernel knows.
pub(super) struct Node {
    pub number: u64,
    pub key: FileKey,
    /// The user who asked for it first.
    pub uid: u32,
    /// Where it was seen last.
    pub place: Mutex<Option<(Arc<Node>, Name)>>,
    pub at: Mutex<RemoteNodeId>,
    /// The boot ID of the server under which it was last changed without a sync.
    unsynced: Mutex<Option<[u8; 16]>>,
}

/// The target's number of a file in an epoch, and how often the target has returned it.
#[derive(Clone, Copy, Default)]
pub(super) struct RemoteNodeId {
    pub epoch: u64,
    pub id: u64,
    pub returned: u64,
}

impl Node {
    pub fn new(number: u64, key: FileKey, uid: u32) -> Self {
        let (place, at, unsynced) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { number, key, uid, place, at, unsynced }
    }

    /// Records a change, which is lost if the server reboots before a sync.
    pub fn changed(&self, view: SessionView) {
        lock(&self.unsynced).get_or_insert(view.boot);
    }

    /// Returns `EIO` once if the server has rebooted since an unsynced change.
    pub fn check_boot(&self, view: SessionView) -> Result<(), RequestError> {
        let mut unsynced = lock(&self.unsynced);
        match *unsynced {
            Some(boot) if boot != view.boot => {
                *unsynced = None;
                Err(Errno::IO.into())
            }
            _ => Ok(()),
        }
    }

    /// Clears the mark of unsynced changes before a sync.
    pub fn take_unsynced(&self) -> Option<[u8; 16]> {
        lock(&self.unsynced).take()
    }

    /// Restores the mark after a failed sync.
    pub fn restore(&self, before: Option<[u8; 16]>) {
        if let Some(boot) = before {
            // The older boot ID counts: its changes were lost first.
            *lock(&self.unsynced) = Some(boot);
        }
    }

    /// Records the target's number for this file. Returns false for an answer of an earlier session, which may arrive
    /// late.
    pub fn record_id(&self, view: SessionView, id: u64) -> bool {
        let mut at = lock(&self.at);
        if at.epoch > view.epoch {
            return false;
        }
        if at.epoch == view.epoch && at.id == id {
            at.returned += 1;
        } else {
            *at = RemoteNodeId { epoch: view.epoch, id, returned: 1 };
        }
        true
    }
}

/// Whether it is the same file. Device numbers may change when the server reboots.
pub(super) fn is_same(a: &FileKey, b: &FileKey) -> bool {
    a.inode == b.inode && a.born == b.born && (a.born.is_some() || a.device == b.device)
}

/// All known files.
pub(super) struct KnownFiles {
    pub root: Arc<Node>,
    maps: Mutex<Maps>,
}

#[derive(Default)]
struct Maps {
    /// A file, and how often the kernel was given its number.
    by_number: HashMap<u64, (Arc<Node>, u64)>,
    by_key: HashMap<FileKey, u64>,
    /// By the folder's number and the name.
    by_place: HashMap<(u64, Name), u64>,
    next: u64,
}

impl KnownFiles {
    pub fn new(root: FileKey) -> Self {
        Self { root: Arc::new(Node::new(ROOT, root, 0)), maps: Mutex::default() }
    }

    pub fn node(&self, number: u64) -> TreeResult<Arc<Node>> {
        if number == ROOT {
            return Ok(self.root.clone());
        }
        lock(&self.maps).by_number.get(&number).map(|(node, _)| node.clone()).ok_or(Errno::STALE)
    }

    /// Records a file whose number the kernel is about to get. Returns its attributes with that number.
    pub fn remember(
        &self,
        mut attr: Attr,
        view: SessionView,
        (parent, name): (&Arc<Node>, &Name),
        uid: u32,
    ) -> (Attr, Arc<Node>) {
        if attr.node == ROOT {
            return (attr, self.root.clone());
        }
        let known = &mut *lock(&self.maps);
        let id = attr.node;
        let number = match known.by_key.entry(attr.key) {
            Entry::Occupied(number) => *number.get(),
            Entry::Vacant(free) => {
                let own = (ROOT + 1..FOREIGN).contains(&id) && !known.by_number.contains_key(&id);
                if !own {
                    known.next += 1;
                }
                *free.insert(if own { id } else { FOREIGN + known.next })
            }
        };
        let new = || (Arc::new(Node::new(number, attr.key, uid)), 0);
        let (node, count) = known.by_number.entry(number).or_insert_with(new);
        *count += 1;
        if node.record_id(view, id) {
            *lock(&node.place) = Some((parent.clone(), name.clone()));
            known.by_place.insert((parent.number, name.clone()), number);
        }
        attr.node = number;
        (attr, node.clone())
    }

    /// Subtracts from the count of times that the kernel was given a number. Returns the file when none are left.
    pub fn forget(&self, number: u64, times: u64) -> Option<Arc<Node>> {
        let mut known = lock(&self.maps);
        let (node, count) = known.by_number.get_mut(&number)?;
        *count = count.saturating_sub(times);
        if *count > 0 {
            return None;
        }
        let node = node.clone();
        known.by_number.remove(&number);
        known.by_key.remove(&node.key);
        if let Some((parent, name)) = lock(&node.place).clone()
            && known.by_place.get(&(parent.number, name.clone())) == Some(&number)
        {
            known.by_place.remove(&(parent.number, name));
        }
        Some(node)
    }

    /// Records a rename.
    pub fn moved(&self, from: (&Arc<Node>, &Name), to: (&Arc<Node>, &Name), exchanged: bool) {
        let mut known = lock(&self.maps);
        let (old, new) = ((from.0.number, from.1.clone()), (to.0.number, to.1.clone()));
        let (one, other) = (known.by_place.remove(&old), known.by_place.remove(&new));
        let mut put = |number: Option<u64>, folder: &Arc<Node>, place: (u64, Name)| {
            let Some(number) = number else { return };
            if let Some((node, _)) = known.by_number.get(&number) {
                *lock(&node.place) = Some((folder.clone(), place.1.clone()));
                known.by_place.insert(place, number);
            }
        };
        put(one, to.0, new);
        if exchanged {
            put(other, from.0, old);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_answer_of_a_lost_session_is_ignored() {
        let node = Node::new(2, FileKey { inode: 1, device: 1, born: None }, 0);
        let record = |epoch, id| node.record_id(SessionView { epoch, boot: [0; 16] }, id);
        assert!(record(2, 7) && record(2, 7) && !record(1, 9));
        assert!(matches!(*lock(&node.at), RemoteNodeId { epoch: 2, id: 7, returned: 2 }));
    }
}
