//! Mounts below a served folder: they are served, and can be unmounted while their files are known.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use onehop_target::tree::{Folder, FolderRules, Tree};
use onehop_target::wire::{AttrChange, ROOT};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_remount, unmount};

use crate::bed::{BOTH, Bed, ME, READ, connect, name, options};

/// A mount. Dropping it detaches it.
struct Mounted(PathBuf);

impl Mounted {
    /// A tmpfs. Without permission to mount, prints a line and returns `None`.
    fn memory(at: &Path) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        match mount("none", at, "tmpfs", MountFlags::empty(), None) {
            Ok(()) => Some(Self(at.to_owned())),
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "SKIPPED: cannot mount here: {error}");
                None
            }
        }
    }

    /// A read-only bind mount.
    fn read_only(of: &Path, at: &Path) -> Self {
        std::fs::create_dir_all(at).unwrap();
        mount_bind(of, at).unwrap();
        let this = Self(at.to_owned());
        mount_remount(at, MountFlags::BIND | MountFlags::RDONLY, c"").unwrap();
        this
    }

    /// Unmounts, if the mount is not in use.
    fn end(self) -> Result<(), Errno> {
        unmount(&self.0, UnmountFlags::empty())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

fn folder(bed: &Bed) -> Folder {
    let rules = FolderRules { for_others: false, most_open: 100 };
    Folder::new(File::open(bed.root()).unwrap().into(), rules).unwrap()
}

/// Uses mounts below the root, unmounts them while their files are known, and mounts another one.
fn comes_and_goes(tree: &dyn Tree, root: &Path) {
    let (sub, inner) = (root.join("sub"), root.join("sub/inner"));
    let Some(outside) = Mounted::memory(&sub) else { return };
    let within = Mounted::memory(&inner).unwrap();
    std::fs::write(sub.join("file"), "outside").unwrap();
    std::fs::write(inner.join("file"), "within").unwrap();
    let known = |parent, of: &str| tree.lookup(parent, &name(of), &ME).unwrap().node;
    let sub_node = known(ROOT, "sub");
    let file = known(sub_node, "file");
    let inner_node = known(sub_node, "inner");
    let inner_file = known(inner_node, "file");
    assert_eq!([file, inner_file].map(|node| tree.attr(node, 0).unwrap().size), [7, 6]);
    let mut bytes = [0; 8];
    assert_eq!(tree.open(inner_file, READ, &ME).unwrap().read_bytes(&mut bytes, 0).unwrap(), 6);
    assert_eq!(&bytes[..6], b"within");
    let (made, open) = tree.create(inner_node, &name("made"), 0o600, BOTH, true, &ME).unwrap();
    assert_eq!(open.write_bytes(b"made", 0).unwrap(), 4);
    assert_eq!(tree.attr(made.node, 0).unwrap().size, 4);
    assert_eq!(tree.list(inner_node, 0, &ME).unwrap().names.len(), 4);
    // An open file keeps the mount in use.
    assert_eq!(unmount(&inner, UnmountFlags::empty()), Err(Errno::BUSY));
    drop(open);
    let start = std::time::Instant::now();
    // A target closes the file a moment later.
    while unmount(&inner, UnmountFlags::empty()).is_err() {
        assert!(start.elapsed() < std::time::Duration::from_secs(10), "it cannot be unmounted");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    drop(within);
    for node in [inner_node, inner_file, made.node] {
        assert_eq!(tree.attr(node, 0).err(), Some(Errno::STALE));
    }
    // The folder under the mount point is another one.
    assert_ne!(known(sub_node, "inner"), inner_node);
    assert_eq!(tree.attr(file, 0).unwrap().size, 7);
    outside.end().unwrap();
    for node in [sub_node, file] {
        assert_eq!(tree.attr(node, 0).err(), Some(Errno::STALE));
    }
    let _again = Mounted::memory(&sub).unwrap();
    assert_eq!(tree.lookup(known(ROOT, "sub"), &name("file"), &ME).err(), Some(Errno::NOENT));
}

#[test]
fn mounts_below_can_be_unmounted() {
    let bed = Bed::new();
    comes_and_goes(&folder(&bed), &bed.root());
    let bed = Bed::new();
    let (_target, address) = bed.target();
    comes_and_goes(&connect(address, options()), &bed.root());
}

#[test]
fn a_file_in_two_mounts_follows_the_options_of_each() {
    for read_only_first in [true, false] {
        let bed = Bed::new();
        let (there, here) = (bed.root().join("there"), bed.root().join("here"));
        let Some(_memory) = Mounted::memory(&there) else { return };
        std::fs::write(there.join("file"), "bytes").unwrap();
        let again = Mounted::read_only(&there, &here);
        let tree = folder(&bed);
        let known = |parent, of: &str| tree.lookup(parent, &name(of), &ME).unwrap().node;
        let order = if read_only_first { ["here", "there"] } else { ["there", "here"] };
        let mut files = order.map(|of| known(known(ROOT, of), "file"));
        if !read_only_first {
            files.reverse();
        }
        let [file, writable] = files;
        assert_ne!(file, writable);
        // Again, so that the mount looked up last varies.
        assert_eq!(known(known(ROOT, order[0]), "file"), if read_only_first { file } else { writable });
        let cut = AttrChange { size: Some(0), ..AttrChange::default() };
        assert_eq!(tree.open(file, BOTH, &ME).err(), Some(Errno::ROFS));
        assert_eq!(tree.change(file, &cut, &ME).err(), Some(Errno::ROFS));
        drop(tree.open(writable, BOTH, &ME).unwrap());
        again.end().unwrap();
        assert_eq!(tree.attr(file, 0).err(), Some(Errno::STALE));
        assert_eq!(tree.attr(writable, 0).unwrap().size, 5);
        assert_eq!(known(known(ROOT, "there"), "file"), writable);
        assert!(tree.open(writable, BOTH, &ME).is_ok());
    }
}

/// The client's kernel then looks the name up again, and opens what it finds, with permission checks.
#[test]
fn creating_a_file_does_not_open_one_through_a_mount() {
    let bed = Bed::new();
    let Some(_memory) = Mounted::memory(&bed.root().join("sub")) else { return };
    let [within, plain] = ["sub/within", "plain"].map(|name| bed.root().join(name));
    for path in [&within, &plain] {
        std::fs::write(path, "bytes").unwrap();
    }
    let tree = folder(&bed);
    let make = || tree.create(ROOT, &name("plain"), 0o600, BOTH, false, &ME).map(|(attr, _)| attr.size);
    assert_eq!(make(), Ok(5));
    mount_bind(&within, &plain).unwrap();
    let mounted = Mounted(plain);
    assert_eq!(make(), Err(Errno::STALE));
    let found = tree.lookup(ROOT, &name("plain"), &ME).unwrap().node;
    assert!(tree.open(found, BOTH, &ME).is_ok());
    mounted.end().unwrap();
    assert_eq!(make(), Ok(5));
}

/// With a bind mount of the folder itself, or of another folder of its file system.
#[test]
fn read_only_bind_mounts_stay_read_only() {
    for of in ["", "private"] {
        let bed = Bed::new();
        let Some(_memory) = Mounted::memory(&bed.root()) else { return };
        let (private, view) = (bed.root().join("private"), bed.root().join("view"));
        std::fs::create_dir(&private).unwrap();
        std::fs::write(private.join("file"), "bytes").unwrap();
        let _view = Mounted::read_only(&bed.root().join(of), &view);
        let tree = folder(&bed);
        let known = |parent, of: &str| tree.lookup(parent, &name(of), &ME).unwrap().node;
        let file = known(known(ROOT, "private"), "file");
        let top = known(ROOT, "view");
        let folder = if of.is_empty() { known(top, "private") } else { top };
        let viewed = known(folder, "file");
        assert!(top != ROOT && viewed != file);
        assert_eq!(tree.open(viewed, BOTH, &ME).err(), Some(Errno::ROFS));
        let made = tree.create(folder, &name("new"), 0o600, BOTH, true, &ME);
        assert_eq!(made.err(), Some(Errno::ROFS));
        assert!(tree.open(file, BOTH, &ME).is_ok());
    }
}
