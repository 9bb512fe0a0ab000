//! Locks of programs. The daemon holds them on the underlying files, so they also exclude programs of other mounts and
//! programs that use the folder directly.
//!
//! Each owner that the kernel names (a process for `fcntl`, an open file for `flock`) has an open file of its own here,
//! and locks ranges of it. FUSE does not report which of the two calls was made. A lock on a whole file may be either,
//! so it is taken as both. A program that takes both on one file conflicts with itself, as it does over NFS.

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

/// The requester of a lock, and its open file.
#[derive(Clone, Copy)]
pub(crate) struct LockRequester {
    /// The kernel's number of the lock owner.
    pub owner: u64,
    pub handle: u64,
    /// The person for whom the lock counts.
    pub uid: u32,
    pub pid: u32,
}

/// The locks of an owner on a file.
enum OwnerState {
    /// None yet: its first lock is being tried.
    New,
    Has(Owned),
    /// Removed from the index; a new entry may have taken its place.
    Gone,
}

/// An owner of locks on a file. It is removed with its handle or its process, because the kernel may then reuse its
/// number. Slow calls to the file system are made under its own mutex, so that only calls of this owner wait.
pub(crate) struct Holder {
    uid: u32,
    state: Mutex<OwnerState>,
    shown: Mutex<ShownLocks>,
}

/// An owner's locks, as others see them while a call of this owner blocks.
#[derive(Default)]
struct ShownLocks {
    ranges: Arc<Vec<LockedRange>>,
    /// The program that locked last. An open file may belong to several programs, and the number of a closed one may be
    /// reused.
    pid: u32,
}

impl Holder {
    fn new(by: LockRequester) -> Self {
        Self { uid: by.uid, state: OwnerState::New.into(), shown: Mutex::default() }
    }

    /// Publishes the ranges, and the program that has just locked one.
    fn show(&self, owned: &Owned, locked_by: Option<u32>) {
        let mut shown = lock(&self.shown);
        shown.ranges = owned.ranges.clone();
        shown.pid = locked_by.unwrap_or(shown.pid);
    }
}

/// An owner in the index, and the open handles through which it has made requests. Removed with the last of them.
struct KnownHolder {
    holder: Arc<Holder>,
    handles: HashSet<u64>,
}

/// The owners of locks on a file.
#[derive(Default)]
struct FileLocks {
    /// By the kernel's number.
    owners: HashMap<u64, KnownHolder>,
    /// The owners that have made requests through a handle.
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

    /// Removes the owners that have made requests through this handle alone. A handle may be closed late: by then the
    /// kernel may have given the number of its owner to the next open file, which has another handle.
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
    /// Held briefly, and never during a call to a file system, because session threads take it. An owner's mutex is
    /// taken before this one.
    files: Mutex<HashMap<u64, FileLocks>>,
    /// Owners at once.
    shares: Shares,
    /// Locked ranges of all owners.
    ranges: Arc<Shares>,
}

impl Locks {
    /// For this many owners.
    pub fn new(most: usize, persons: &Persons) -> Self {
        let ranges = persons.shares(owned::MAX_OF_ALL).with_limit(owned::MAX_PER_PERSON);
        Self { files: Mutex::default(), shares: persons.shares(most as u64), ranges: ranges.into() }
    }

    /// Locks a range of a file. Returns false if another owner has it locked.
    pub fn lock(
        &self,
        open: &Open,
        by: LockRequester,
        range: LockRange,
        kind: LockKind,
    ) -> Result<bool, Errno> {
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

    /// Finds the owner of a request, or adds it.
    fn holder(&self, inode: u64, by: LockRequester) -> Result<Arc<Holder>, Errno> {
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

    /// Removes an owner with all its locks.
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

    /// Whether an owner has locks on a file, or is trying for its first.
    pub fn has_any(&self, inode: u64, owner: u64) -> bool {
        lock(&self.files).get(&inode).is_some_and(|file| file.owners.contains_key(&owner))
    }

    /// Unlocks a range.
    pub fn unlock(&self, inode: u64, by: LockRequester, range: LockRange) -> Result<(), Errno> {
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

    /// The conflicting lock, and the program that holds it; 0 for programs that do not use this mount.
    pub fn in_the_way(
        &self,
        open: &Open,
        by: LockRequester,
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

    /// The other owners of locks on a file, and those that try for their first.
    fn others(&self, inode: u64, owner: u64) -> Vec<Arc<Holder>> {
        let files = lock(&self.files);
        let all = files.get(&inode).into_iter().flat_map(|file| &file.owners);
        all.filter(|(other, _)| **other != owner).map(|(_, known)| known.holder.clone()).collect()
    }

    /// Releases the locks of an owner after a process has closed the file. Returns whether there were any.
    pub fn flushed(&self, inode: u64, owner: u64) -> bool {
        let Some(holder) = self.known(inode, owner) else { return false };
        let mut state = lock(&holder.state);
        let had_locks = matches!(*state, OwnerState::Has(_));
        // Otherwise another thread has already removed it.
        if !matches!(*state, OwnerState::Gone) {
            self.end(inode, owner, &holder, &mut state);
        }
        had_locks
    }

    /// Removes the owners that have made requests through this handle alone, and returns them; their locks are then to
    /// be released. Locks by `fcntl` went before, when their process closed the file.
    pub fn closed(&self, inode: u64, handle: u64) -> Vec<Arc<Holder>> {
        let mut files = lock(&self.files);
        let Some(file) = files.get_mut(&inode) else { return Vec::new() };
        let gone = file.close(handle);
        if file.owners.is_empty() {
            files.remove(&inode);
        }
        gone
    }

    /// Releases the locks of removed owners. Returns whether there were any.
    pub fn release(&self, gone: &[Arc<Holder>]) -> bool {
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
