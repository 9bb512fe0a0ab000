//! Open folders. Names are read on demand, so an open folder takes little memory however many names it has.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::sync::{Arc, Mutex};

use fuser::FileType;
use onehop_target::shares::Shares;
use onehop_target::tree::{FolderNames, Tree};
use onehop_target::wire::Caller;
use rustix::io::Errno;

use super::attr::kind;
use crate::lock;
use crate::persons::Persons;

/// Open folders of one user, and of all users.
const MAX_PER_USER: u64 = 4096;
const MAX: u64 = 65_536;
/// Names that are kept from opening a folder until the first read.
const FEW: usize = 64;
/// A user with more open folders than this keeps only [`FEW`] names between reads.
const MAX_WITH_NAMES: u64 = 256;

/// A name in a folder.
pub(super) struct FolderEntry {
    pub inode: u64,
    pub kind: FileType,
    /// The offset of the next entry.
    pub next: u64,
    pub name: OsString,
}

/// Names of a folder, from an offset on.
#[derive(Default)]
struct Chunk {
    from: u64,
    entries: Vec<FolderEntry>,
    is_last: bool,
    /// Not read yet.
    is_new: bool,
}

impl Chunk {
    fn of(from: u64, names: FolderNames) -> Self {
        let is_last = names.next.is_none();
        let entry = |(inode, of, next, name)| {
            let (kind, name) = (kind(of), OsString::from_vec(name));
            FolderEntry { inode, kind, next, name }
        };
        Self { from, entries: names.names.into_iter().map(entry).collect(), is_last, is_new: true }
    }

    /// The index of the first entry behind an offset; `None` if the chunk does not contain that offset.
    fn behind(&self, offset: u64) -> Option<usize> {
        if offset == self.from {
            return Some(0);
        }
        self.entries.iter().position(|entry| entry.next == offset).map(|before| before + 1)
    }
}

/// An open folder.
pub(super) struct OpenFolder {
    inode: u64,
    /// Who opened it.
    pub uid: u32,
    /// The process that opened the folder of links.
    pub watcher: Option<u32>,
    chunk: Mutex<Chunk>,
}

impl OpenFolder {
    /// Opens a folder, if the caller may read it.
    pub fn open(tree: &dyn Tree, by: &Caller, inode: u64) -> Result<Self, Errno> {
        let mut chunk = Chunk::of(0, tree.list(inode, 0, by)?);
        if chunk.entries.len() > FEW {
            chunk = Chunk::default();
        }
        Ok(Self { inode, uid: by.uid, watcher: None, chunk: chunk.into() })
    }

    /// A folder of `3fs-virt`, whose names are listed at each read.
    pub fn of_virtual(inode: u64, uid: u32, watcher: Option<u32>) -> Self {
        Self { inode, uid, watcher, chunk: Mutex::default() }
    }

    /// Calls `take` for the names from an offset on, until it returns true. The rest is kept for the next read, all of
    /// it if `keeps_many`.
    pub fn read(
        &self,
        tree: &dyn Tree,
        from: u64,
        keeps_many: bool,
        mut take: impl FnMut(&FolderEntry) -> bool,
    ) -> Result<(), Errno> {
        let mut chunk = lock(&self.chunk);
        // A read from the start sees names that were created since.
        let is_again = from == 0 && !chunk.is_new;
        let known = if is_again { None } else { chunk.behind(from) };
        let start = match known {
            Some(start) if start < chunk.entries.len() || chunk.is_last => start,
            _ => {
                // Opening checked the permission; a later change of mode does not matter.
                *chunk = Chunk::of(from, tree.list(self.inode, from, &Caller::ROOT)?);
                0
            }
        };
        chunk.is_new = false;
        if start == chunk.entries.len() {
            *chunk = Chunk { from, is_last: true, ..Chunk::default() };
            return Ok(());
        }
        let _ = chunk.entries[start..].iter().find(|entry| take(entry));
        if !keeps_many && chunk.entries.len() > FEW {
            *chunk = Chunk::default();
        }
        Ok(())
    }
}

#[derive(Default)]
struct FoldersByHandle {
    all: HashMap<u64, Arc<OpenFolder>>,
    /// How often each user has each folder open.
    counts: HashMap<(u64, u32), usize>,
}

/// All open folders.
pub(super) struct OpenFolders {
    all: Mutex<FoldersByHandle>,
    shares: Shares,
}

impl OpenFolders {
    pub fn new(persons: &Persons) -> Self {
        Self { all: Mutex::default(), shares: persons.shares(MAX).with_limit(MAX_PER_USER) }
    }

    /// Adds a folder under a handle, if its user's limit allows it.
    pub fn add(&self, handle: u64, folder: OpenFolder) -> Result<(), Errno> {
        if !self.shares.take(folder.uid, 1) {
            return Err(Errno::MFILE);
        }
        let mut folders = lock(&self.all);
        *folders.counts.entry((folder.inode, folder.uid)).or_default() += 1;
        folders.all.insert(handle, Arc::new(folder));
        Ok(())
    }

    /// Whether folders of a user may keep many names between reads.
    pub fn keep_many(&self, uid: u32) -> bool {
        self.shares.taken_by(uid) <= MAX_WITH_NAMES
    }

    pub fn get(&self, handle: u64) -> Option<Arc<OpenFolder>> {
        lock(&self.all).all.get(&handle).cloned()
    }

    /// Whether a user has a folder open.
    pub fn has_open(&self, inode: u64, uid: u32) -> bool {
        lock(&self.all).counts.contains_key(&(inode, uid))
    }

    pub fn remove(&self, handle: u64) -> Option<Arc<OpenFolder>> {
        let mut folders = lock(&self.all);
        let gone = folders.all.remove(&handle)?;
        if let Entry::Occupied(mut count) = folders.counts.entry((gone.inode, gone.uid)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        drop(folders);
        self.shares.put_back(gone.uid, 1);
        Some(gone)
    }
}

#[cfg(test)]
mod tests {
    use onehop_target::tree::{Folder, FolderRules};
    use onehop_target::wire::ROOT;

    use super::*;

    fn names(folder: &OpenFolder, tree: &dyn Tree, at_once: usize, keeps_many: bool) -> Vec<String> {
        let (mut all, mut from) = (Vec::new(), 0);
        loop {
            let mut left = at_once;
            let before = all.len();
            folder
                .read(tree, from, keeps_many, |entry| {
                    if left == 0 {
                        return true;
                    }
                    left -= 1;
                    from = entry.next;
                    all.push(entry.name.to_string_lossy().into_owned());
                    false
                })
                .unwrap();
            if all.len() == before {
                all.sort();
                return all;
            }
        }
    }

    #[test]
    fn long_folders_are_read_in_chunks_and_again_from_the_start() {
        let dir = std::env::temp_dir().join(format!("onehop-folders-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut wanted = vec![".".to_owned(), "..".to_owned()];
        for number in 0..5000 {
            let name = format!("a name that takes some room {number:05}");
            std::fs::write(dir.join(&name), "").unwrap();
            wanted.push(name);
        }
        let root = std::fs::File::open(&dir).unwrap();
        let tree = Folder::new(root.into(), FolderRules { for_others: false, most_open: 8 }).unwrap();
        let folder = OpenFolder::open(&tree, &Caller::ROOT, ROOT).unwrap();
        assert!(lock(&folder.chunk).entries.is_empty());
        for (at_once, keeps_many) in [(700, true), (1, true), (700, false), (usize::MAX, false)] {
            assert_eq!(names(&folder, &tree, at_once, keeps_many), wanted);
            assert!(lock(&folder.chunk).entries.is_empty());
            let name = format!("b{}", wanted.len());
            std::fs::write(dir.join(&name), "").unwrap();
            wanted.push(name);
            wanted.sort();
        }
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn open_folders_are_limited_per_user() {
        let folders = OpenFolders::new(&Persons::default());
        let add = |handle, uid| folders.add(handle, OpenFolder::of_virtual(1, uid, None));
        for handle in 0..MAX_PER_USER {
            add(handle, 1000).unwrap();
        }
        assert_eq!(add(1 << 32, 1000), Err(Errno::MFILE));
        add(1 << 33, 1001).unwrap();
        folders.remove(0).unwrap();
        add(0, 1000).unwrap();
        assert!(folders.has_open(1, 1000) && !folders.has_open(2, 1000) && !folders.has_open(1, 1002));
        (0..MAX_PER_USER).for_each(|handle| drop(folders.remove(handle).unwrap()));
        assert!(!folders.has_open(1, 1000) && folders.has_open(1, 1001));
    }
}
