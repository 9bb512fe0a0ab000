//! Locks of programs, held on files of this machine as the daemon's own: they exclude the programs of other mounts, and those that
//! use the folder itself.
//!
//! Each owner that the kernel names (a process for `fcntl`, an open file for `flock`) has an open file of its own here, and locks
//! ranges of it. The kernel's messages do not say which of the two calls was made. A lock on a whole file may be either, so it is taken as
//! both; a program that takes both on one file gets in its own way, as it does over NFS.

mod owned;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use onehop_os::locks::{LockKind, LockRange, lock_in_the_way};
use onehop_target::shares::Shares;
use rustix::io::Errno;

use crate::lock;
use crate::opens::Open;
use crate::persons::Persons;
use owned::{LockedRange, Owned, RangeCount, plain};

/// Who asks, by which open file.
#[derive(Clone, Copy)]
pub(crate) struct Asker {
    /// What the kernel calls the owner.
    pub owner: u64,
    pub handle: u64,
    /// The person for whom it counts.
    pub uid: u32,
    pub pid: u32,
}

/// What an owner has of a file.
enum OwnerState {
    /// Nothing yet: its first lock is being tried.
    New,
    Has(Owned),
    /// Nothing any more, and nobody finds it: another one has its place.
    Gone,
}

/// An owner of locks on a file, until its handle or its process is gone: the kernel may give its number to another one then. What the file system may take long over is done under its own lock, so only calls of this owner wait.
pub(crate) struct Holder {
    uid: u32,
    state: Mutex<OwnerState>,
    shown: Mutex<ShownLocks>,
}

/// What an owner has locked, for those who ask while a call of this owner waits.
#[derive(Default)]
struct ShownLocks {
    ranges: Arc<Vec<LockedRange>>,
    /// The program that locked last. An open file may be several programs', and the number of one that is closed may be another's.
    pid: u32,
}

impl Holder {
    fn new(by: Asker) -> Self {
        Self { uid: by.uid, state: OwnerState::New.into(), shown: Mutex::default() }
    }

    /// Shows others what it has locked now, and the program that has just locked some of it.
    fn show(&self, owned: &Owned, locked_by: Option<u32>) {
        let mut shown = lock(&self.shown);
        shown.ranges = owned.ranges.clone();
        shown.pid = locked_by.unwrap_or(shown.pid);
    }
}

/// An owner in the index, and the open handles by which it has asked. It goes with the last of them.
struct KnownHolder {
    holder: Arc<Holder>,
    handles: HashSet<u64>,
}

/// Who has locks on a file.
#[derive(Default)]
struct FileLocks {
    /// By what the kernel calls them.
    owners: HashMap<u64, KnownHolder>,
    /// The owners that have asked by a handle.
    by_handle: HashMap<u64, HashSet<u64>>,
}

impl FileLocks {
    fn remove(&mut self, owner: u64) -> Option<Arc<Holder>> {
        let gone = self.owners.remove(&owner)?;
        for handle in &gone.handles {
            if let Some(owners) = self.by_handle.get_mut(handle) {
                owners.remove(&owner);
                if owners.is_empty() {
                    self.by_handle.remove(handle);
                }
            }
        }
        Some(gone.holder)
    }

    /// Removes the owners that have asked by a handle, and by no other that is still open. A handle may be closed late: by then the
    /// kernel may have given the number of its owner to the next open file, which has asked by another handle.
    fn close(&mut self, handle: u64) -> Vec<Arc<Holder>> {
        let askers = self.by_handle.remove(&handle).unwrap_or_default();
        let close = |owner| {
            let known = self.owners.get_mut(&owner)?;
            known.handles.remove(&handle);
            if known.handles.is_empty() { self.remove(owner) } else { None }
        };
        askers.into_iter().filter_map(close).collect()
    }
}

/// All locks, by inode.
pub(crate) struct Locks {
    /// Held for a moment only, and never while a file system is asked: session threads look here. Who has both locks took an owner's
    /// first.
    files: Mutex<HashMap<u64, FileLocks>>,
    /// Owners at once.
    shares: Shares,
    /// Ranges that they have locked.
    ranges: Arc<Shares>,
}

impl Locks {
    /// For so many owners.
    pub fn new(most: usize, persons: &Persons) -> Self {
        let ranges = persons.shares(owned::MOST_OF_ALL).with_limit(owned::MOST_OF_A_PERSON);
        Self { files: Mutex::default(), shares: persons.shares(most as u64), ranges: ranges.into() }
    }

    /// Locks a range of a file; false where another has it locked.
    pub fn lock(&self, open: &Open, by: Asker, range: LockRange, kind: LockKind) -> Result<bool, Errno> {
        loop {
            let holder = self.holder(open.inode, by)?;
            let mut state = lock(&holder.state);
            let first = match &mut *state {
                OwnerState::Gone => continue,
                OwnerState::Has(owned) => {
                    let done = owned.lock(open, range, kind);
                    holder.show(owned, (done == Ok(true)).then_some(by.pid));
                    return done;
                }
                OwnerState::New => {
                    Owned::open(open, RangeCount::new(&self.ranges, by.uid)).and_then(|mut owned| {
                        let is_locked = owned.lock(open, range, kind)?;
                        Ok(is_locked.then_some(owned))
                    })
                }
            };
            return match first {
                Ok(Some(owned)) => {
                    holder.show(&owned, Some(by.pid));
                    *state = OwnerState::Has(owned);
                    Ok(true)
                }
                other => {
                    self.end(open.inode, by.owner, &holder, &mut state);
                    other.map(|_| false)
                }
            };
        }
    }

    /// Who asks, known from now on.
    fn holder(&self, inode: u64, by: Asker) -> Result<Arc<Holder>, Errno> {
        let mut files = lock(&self.files);
        let is_known = files.get(&inode).is_some_and(|file| file.owners.contains_key(&by.owner));
        if !is_known && !self.shares.take(by.uid, 1) {
            return Err(Errno::NOLCK);
        }
        let file = files.entry(inode).or_default();
        file.by_handle.entry(by.handle).or_default().insert(by.owner);
        let known = file
            .owners
            .entry(by.owner)
            .or_insert_with(|| KnownHolder { holder: Holder::new(by).into(), handles: HashSet::new() });
        known.handles.insert(by.handle);
        Ok(known.holder.clone())
    }

    /// Gives up all that an owner has; then nobody finds it any more.
    fn end(&self, inode: u64, owner: u64, holder: &Arc<Holder>, state: &mut OwnerState) {
        *state = OwnerState::Gone;
        let mut files = lock(&self.files);
        if let Some(file) = files.get_mut(&inode)
            && file.owners.get(&owner).is_some_and(|known| Arc::ptr_eq(&known.holder, holder))
        {
            file.remove(owner);
            if file.owners.is_empty() {
                files.remove(&inode);
            }
        }
        drop(files);
        self.shares.put_back(holder.uid, 1);
    }

    /// Whether an owner has locks on a file, or is about to.
    pub fn has_any(&self, inode: u64, owner: u64) -> bool {
        lock(&self.files).get(&inode).is_some_and(|file| file.owners.contains_key(&owner))
    }

    /// Unlocks a range.
    pub fn unlock(&self, inode: u64, by: Asker, range: LockRange) -> Result<(), Errno> {
        if range == LockRange::WHOLE {
            self.flushed(inode, by.owner);
            return Ok(());
        }
        let Some(holder) = self.known(inode, by.owner) else { return Ok(()) };
        let mut state = lock(&holder.state);
        let OwnerState::Has(owned) = &mut *state else { return Ok(()) };
        let done = owned.unlock(range);
        holder.show(owned, None);
        done
    }

    fn known(&self, inode: u64, owner: u64) -> Option<Arc<Holder>> {
        let files = lock(&self.files);
        files.get(&inode)?.owners.get(&owner).map(|known| known.holder.clone())
    }

    /// The lock that is in somebody's way, and the program that has it; 0 where that is not of this mount.
    pub fn in_the_way(
        &self,
        open: &Open,
        by: Asker,
        range: LockRange,
        kind: LockKind,
    ) -> Result<Option<(LockRange, LockKind, u32)>, Errno> {
        let holder = self.known(open.inode, by.owner);
        let state = holder.as_ref().map(|holder| lock(&holder.state));
        let file = match state.as_deref() {
            Some(OwnerState::Has(owned)) => &owned.file,
            _ => open.file().local().ok_or(Errno::NOLCK)?,
        };
        let Some((range, kind)) = lock_in_the_way(file, range, kind).map_err(plain)? else { return Ok(None) };
        let others = self.others(open.inode, by.owner);
        let pid = others.into_iter().find_map(|other| {
            let shown = lock(&other.shown);
            shown.ranges.contains(&(range, kind)).then_some(shown.pid)
        });
        Ok(Some((range, kind, pid.unwrap_or(0))))
    }

    /// All who have locks on a file or ask for their first, except one.
    fn others(&self, inode: u64, owner: u64) -> Vec<Arc<Holder>> {
        let files = lock(&self.files);
        let all = files.get(&inode).into_iter().flat_map(|file| &file.owners);
        all.filter(|(other, _)| **other != owner).map(|(_, known)| known.holder.clone()).collect()
    }

    /// A process has closed the file, by one of its descriptors: what it had locked goes. Whether there was anything.
    pub fn flushed(&self, inode: u64, owner: u64) -> bool {
        let Some(holder) = self.known(inode, owner) else { return false };
        let mut state = lock(&holder.state);
        let had_locks = matches!(*state, OwnerState::Has(_));
        // By who has ended it, where that is over.
        if !matches!(*state, OwnerState::Gone) {
            self.end(inode, owner, &holder, &mut state);
        }
        had_locks
    }

    /// A handle is closed: the owners that asked by it alone are not found from now on, and what they had locked is to be let go. What
    /// `fcntl` had locked went before, when its process closed the file.
    pub fn closed(&self, inode: u64, handle: u64) -> Vec<Arc<Holder>> {
        let mut files = lock(&self.files);
        let Some(file) = files.get_mut(&inode) else { return Vec::new() };
        let gone = file.close(handle);
        if file.owners.is_empty() {
            files.remove(&inode);
        }
        gone
    }

    /// Unlocks what they had. Whether there was anything.
    pub fn let_go(&self, gone: &[Arc<Holder>]) -> bool {
        gone.iter().fold(false, |had_locks, holder| {
            let mut state = lock(&holder.state);
            let before = std::mem::replace(&mut *state, OwnerState::Gone);
            if !matches!(before, OwnerState::Gone) {
                self.shares.put_back(holder.uid, 1);
            }
            had_locks | matches!(before, OwnerState::Has(_))
        })
    }
}
