//! Files that the kernel knows: under which number, where they were seen last, and what the target calls them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use super::{SessionView, Trouble};
use crate::lock;
use crate::tree::{FOREIGN, TreeResult};
use crate::wire::{Attr, FileKey, Name, ROOT};

/// A file that the kernel knows.
pub(super) struct Node {
    pub number: u64,
    pub key: FileKey,
    /// Who asked for it first.
    pub uid: u32,
    /// Where it was seen last.
    pub place: Mutex<Option<(Arc<Node>, Name)>>,
    pub at: Mutex<RemoteNodeId>,
    /// The server machine's run in which something was written to it that is not synced.
    unsynced: Mutex<Option<[u8; 16]>>,
}

/// What the target calls it in an epoch, and how often it said so.
#[derive(Clone, Copy, Default)]
pub(super) struct RemoteNodeId {
    pub epoch: u64,
    pub id: u64,
    pub told: u64,
}

impl Node {
    pub fn new(number: u64, key: FileKey, uid: u32) -> Self {
        let (place, at, unsynced) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { number, key, uid, place, at, unsynced }
    }

    /// Something of it was changed, and is safe only while that machine runs.
    pub fn changed(&self, view: SessionView) {
        lock(&self.unsynced).get_or_insert(view.boot);
    }

    /// Before its bytes are synced: whether some of them may be lost already. That is told once.
    pub fn check_boot(&self, view: SessionView) -> Result<(), Trouble> {
        let mut unsynced = lock(&self.unsynced);
        match *unsynced {
            Some(boot) if boot != view.boot => {
                *unsynced = None;
                Err(Errno::IO.into())
            }
            _ => Ok(()),
        }
    }

    /// Before a sync: what it is to make safe.
    pub fn take_unsynced(&self) -> Option<[u8; 16]> {
        lock(&self.unsynced).take()
    }

    /// What was not synced still is not.
    pub fn restore(&self, before: Option<[u8; 16]>) {
        if let Some(boot) = before {
            // The older run counts: it is what has gone first.
            *lock(&self.unsynced) = Some(boot);
        }
    }

    /// Notes what the target calls it. Whether that is news: an answer of a session that was lost may come after one of the next.
    pub fn told(&self, view: SessionView, id: u64) -> bool {
        let mut at = lock(&self.at);
        if at.epoch > view.epoch {
            return false;
        }
        if at.epoch == view.epoch && at.id == id {
            at.told += 1;
        } else {
            *at = RemoteNodeId { epoch: view.epoch, id, told: 1 };
        }
        true
    }
}

/// Whether it is the file that was known. A machine that was restarted may count its file systems anew.
pub(super) fn is_same(a: &FileKey, b: &FileKey) -> bool {
    a.inode == b.inode && a.born == b.born && (a.born.is_some() || a.device == b.device)
}

/// All of them.
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

    /// Notes what the kernel is about to be told, under the kernel's number for it.
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
        if node.told(view, id) {
            *lock(&node.place) = Some((parent.clone(), name.clone()));
            known.by_place.insert((parent.number, name.clone()), number);
        }
        attr.node = number;
        (attr, node.clone())
    }

    /// Subtracts from the times that the kernel was given a file's number; gives the file when none are left.
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

    /// A name has become another one.
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
    fn a_late_answer_of_a_lost_session_is_no_news() {
        let node = Node::new(2, FileKey { inode: 1, device: 1, born: None }, 0);
        let told = |epoch, id| node.told(SessionView { epoch, boot: [0; 16] }, id);
        assert!(told(2, 7) && told(2, 7) && !told(1, 9));
        assert!(matches!(*lock(&node.at), RemoteNodeId { epoch: 2, id: 7, told: 2 }));
    }
}
