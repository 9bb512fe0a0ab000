//! Files of a target behave like those of a local folder.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use onehop_os::HostMem;
use onehop_target::client::RemoteTree;
use onehop_target::server;
use onehop_target::tcp::TcpConnector;
use onehop_target::tree::{Folder, FolderRules, OpenFile, TransferMemory, Tree};
use onehop_target::wire::{AttrChange, Caller, FileKind, Make, Name, OpenMode, ROOT, TimeChange, Xattr};
use rustix::fs::{OFlags, XattrFlags};
use rustix::io::Errno;

use crate::bed::{BOTH, Bed, ME, READ, connect, key, name, options, start};

fn bytes(len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

fn names(tree: &dyn Tree, node: u64) -> Vec<String> {
    let (mut all, mut from) = (Vec::new(), 0);
    loop {
        let some = tree.list(node, from, &ME).unwrap();
        all.extend(some.names.iter().map(|(_, _, _, name)| String::from_utf8_lossy(name).into_owned()));
        let Some(next) = some.next else { break };
        from = next;
    }
    all.retain(|name| name != "." && name != "..");
    all.sort();
    all
}

fn attributes(tree: &dyn Tree, node: u64, root: &Path) {
    let name = || b"user.onehop".to_vec();
    let ask = |ask| tree.xattr(node, &ask, &ME);
    let set = |name, value: &[u8], flags| Xattr::Set { name, value: value.to_vec(), flags };
    let made = ask(set(name(), b"one", 0));
    if rustix::fs::setxattr(root, "user.onehop", b"", XattrFlags::empty()) == Err(Errno::OPNOTSUPP) {
        let _ = writeln!(std::io::stderr(), "SKIPPED: this file system has no extended attributes");
        return;
    }
    made.unwrap();
    assert_eq!(ask(set(name(), b"two", 1)).err(), Some(Errno::EXIST));
    assert_eq!(ask(Xattr::Get { name: name() }).unwrap(), b"one");
    assert_eq!(ask(Xattr::List).unwrap(), b"user.onehop\0");
    ask(Xattr::Remove { name: name() }).unwrap();
    assert_eq!(ask(Xattr::Get { name: name() }).err(), Some(Errno::NODATA));
    let other = b"system.other".to_vec();
    assert_eq!(ask(Xattr::Get { name: other }).err(), Some(Errno::OPNOTSUPP));
    assert_eq!(ask(set(name(), &vec![7; 65_536], 0)).err(), Some(Errno::TOOBIG));
}

/// Runs the same operations on a local folder, and on it through a target.
fn everything(tree: &dyn Tree, root: &Path) {
    let folder = tree.make(ROOT, &name("folder"), &Make::Folder { mode: 0o755 }, &ME).unwrap();
    assert_eq!(folder.kind, FileKind::Folder);
    let (made, file) = tree.create(folder.node, &name("file"), 0o640, BOTH, true, &ME).unwrap();
    assert_eq!((made.perm, made.size, made.kind), (0o640, 0, FileKind::Regular));
    let again = tree.create(folder.node, &name("file"), 0o640, BOTH, true, &ME);
    assert_eq!(again.err(), Some(Errno::EXIST));
    // Longer than one chunk.
    let data = bytes(5_000_011);
    assert_eq!(file.write_bytes(&data, 7).unwrap(), data.len());
    file.sync(false).unwrap();
    let mut back = vec![1; data.len() + 100];
    assert_eq!(file.read_bytes(&mut back, 0).unwrap(), data.len() + 7);
    assert!(back[..7] == [0; 7] && back[7..data.len() + 7] == data);
    for shared in [false, true] {
        let mem = HostMem::anonymous(data.len() + 4096).unwrap();
        let to = TransferMemory { mem: &mem, at: 5, len: data.len() + 100, shared };
        assert_eq!(file.read(to, 7).unwrap(), data.len());
        assert_eq!(mem.to_vec(5, data.len()).unwrap(), data);
        let from = TransferMemory { mem: &mem, at: 5, len: 1000, shared };
        assert_eq!(file.write(from, 7).unwrap(), 1000);
    }
    let change = AttrChange { size: Some(100), mode: Some(0o600), mtime: None, ..AttrChange::default() };
    let changed = tree.change(made.node, &change, &ME).unwrap();
    assert_eq!((changed.size, changed.perm, changed.node), (100, 0o600, made.node));
    file.set_len(50).unwrap();
    // Concurrent appends.
    let other = tree.open(made.node, BOTH, &ME).unwrap();
    std::thread::scope(|scope| {
        for file in [&file, &other] {
            scope.spawn(|| (0..50).for_each(|_| assert_eq!(file.append_bytes(b"whole").unwrap(), 5)));
        }
    });
    let mut back = vec![1; 1000];
    assert_eq!(file.read_bytes(&mut back, 0).unwrap(), 550);
    assert!(back[50..550].chunks(5).all(|record| record == b"whole"));
    file.set_len(50).unwrap();
    assert_eq!(tree.attr(made.node, 0).unwrap().size, 50);
    file.allocate(0, 0, 1 << 20).unwrap();
    file.allocate(3, 0, 1 << 16).unwrap();
    assert!(file.has_hole(0, 1 << 20).unwrap() && !file.has_hole(1 << 20, 1).unwrap());
    assert_eq!(file.seek(0, false).unwrap(), 1 << 16);
    let link = tree.make(ROOT, &name("link"), &Make::Link { text: b"../../..".to_vec() }, &ME).unwrap();
    assert_eq!(tree.read_link(link.node, 0).unwrap(), b"../../..");
    // Links are not followed here: the client's kernel does that.
    assert_eq!(tree.lookup(link.node, &name("etc"), &ME).err(), Some(Errno::NOTDIR));
    assert_eq!(tree.open(link.node, READ, &ME).err(), Some(Errno::LOOP));
    let pipe = tree.make(ROOT, &name("pipe"), &Make::Node { mode: 0o10_600, rdev: 0 }, &ME).unwrap();
    assert_eq!((pipe.kind, tree.open(pipe.node, READ, &ME).err()), (FileKind::Pipe, Some(Errno::NXIO)));
    attributes(tree, made.node, root);
    let second = tree.link(made.node, ROOT, &name("second"), &ME).unwrap();
    assert_eq!((second.node, second.links), (made.node, 2));
    tree.rename((folder.node, &name("file")), (ROOT, &name("moved")), 0, &ME).unwrap();
    assert_eq!(tree.rename((ROOT, &name("moved")), (ROOT, &name("link")), 1, &ME).err(), Some(Errno::EXIST));
    assert_eq!(tree.lookup(folder.node, &name("file"), &ME).err(), Some(Errno::NOENT));
    assert_eq!(names(tree, ROOT), ["folder", "link", "moved", "pipe", "second"]);
    tree.sync_folder(ROOT, 0).unwrap();
    assert_eq!(tree.remove(ROOT, &name("folder"), false, &ME).err(), Some(Errno::ISDIR));
    tree.remove(ROOT, &name("folder"), true, &ME).unwrap();
    for gone in ["link", "moved", "pipe", "second"] {
        tree.remove(ROOT, &name(gone), false, &ME).unwrap();
    }
    // Still open, so it still exists.
    assert_eq!(file.write_bytes(b"yes", 0).unwrap(), 3);
    assert_eq!(tree.attr(made.node, 0).unwrap().links, 0);
    assert!(names(tree, ROOT).is_empty());
    assert!(tree.space(0).unwrap().blocks[0] > 0);
    for number in 0..3000 {
        let make = Make::Node { mode: 0o100_600, rdev: 0 };
        let made = tree.make(ROOT, &name(&format!("one of many files {number:040}")), &make, &ME).unwrap();
        tree.forget(made.node, 1);
    }
    assert_eq!(names(tree, ROOT).len(), 3000);
}

#[test]
fn a_local_folder() {
    let bed = Bed::new();
    let root = std::fs::File::open(bed.root()).unwrap();
    let rules = FolderRules { for_others: false, most_open: 100 };
    everything(&Folder::new(root.into(), rules).unwrap(), &bed.root());
}

/// A folder without descriptors for known files. Without file handles, prints a line and returns `None`.
fn without_descriptors(bed: &Bed) -> Option<Folder> {
    let root = std::fs::File::open(bed.root()).unwrap();
    if !onehop_os::handle_of(&root).is_ok_and(|handle| handle.open(&root).is_ok()) {
        let _ = writeln!(std::io::stderr(), "SKIPPED: file handles are not supported here");
        return None;
    }
    Some(Folder::new(root.into(), FolderRules { for_others: false, most_open: 0 }).unwrap())
}

#[test]
fn a_local_folder_with_file_handles() {
    let bed = Bed::new();
    let Some(folder) = without_descriptors(&bed) else { return };
    everything(&folder, &bed.root());
}

#[test]
fn reused_inode_numbers_are_other_files() {
    let bed = Bed::new();
    let Some(tree) = without_descriptors(&bed) else { return };
    let inner = tree.make(ROOT, &name("inner"), &Make::Folder { mode: 0o700 }, &ME).unwrap().node;
    let names: Vec<_> = (0..300).map(|number| name(&number.to_string())).collect();
    let make = |name| {
        let (made, file) = tree.create(inner, name, 0o600, BOTH, true, &ME).unwrap();
        file.write_bytes(name.bytes(), 0).unwrap();
        made
    };
    let before: Vec<_> = names.iter().map(make).collect();
    for (name, made) in names.iter().zip(&before) {
        assert_eq!(tree.attr(made.node, 0).unwrap().size, name.bytes().len() as u64);
        tree.remove(inner, name, false, &ME).unwrap();
    }
    // File systems reuse inode numbers.
    let after: Vec<_> = names.iter().rev().map(make).collect();
    let again = after.iter().filter(|new| before.iter().any(|old| old.key.inode == new.key.inode)).count();
    println!("{again} of them reuse inode numbers");
    for (name, made) in names.iter().rev().zip(&after) {
        let mut bytes = vec![0; 8];
        let count = tree.open(made.node, READ, &ME).unwrap().read_bytes(&mut bytes, 0).unwrap();
        assert_eq!(&bytes[..count], name.bytes());
    }
    for old in &before {
        assert!(after.iter().all(|new| new.node != old.node));
        assert_eq!(tree.attr(old.node, 0).err(), Some(Errno::STALE));
        tree.forget(old.node, 1);
    }
    for (name, made) in names.iter().rev().zip(&after) {
        assert_eq!(tree.lookup(inner, name, &ME).unwrap().node, made.node);
    }
}

#[test]
fn a_remote_folder() {
    let bed = Bed::new();
    let (target, address) = bed.target();
    let tree = connect(address, options());
    everything(&tree, &bed.root());
    let report = target.report();
    assert!(report.sessions == 1 && report.connections >= 1 && report.broken == 0, "{report:?}");
    assert!(report.written_bytes >= 5_000_011 && report.read_bytes >= 15_000_000, "{report:?}");
    drop(tree);
    assert!(target.drain(crate::bed::LONG));
}

#[test]
fn nothing_outside_the_folder_is_reachable() {
    let bed = Bed::new();
    std::fs::write(bed.dir.join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink("..", bed.root().join("up")).unwrap();
    std::os::unix::fs::symlink(bed.dir.join("secret"), bed.root().join("absolute")).unwrap();
    let (_target, address) = bed.target();
    let tree = connect(address, options());
    for invalid in [&b".."[..], b".", b"", b"a/b", b"/etc", b"up/secret", b"a\0b", &[b'x'; 256]] {
        assert!(Name::new(invalid).is_none(), "{invalid:?}");
    }
    for link in ["up", "absolute"] {
        let found = tree.lookup(ROOT, &name(link), &ME).unwrap();
        assert_eq!(found.kind, FileKind::Link);
        assert!(tree.lookup(found.node, &name("secret"), &ME).is_err());
        assert!(tree.open(found.node, READ, &ME).is_err());
        // A change may affect the link, but not its target.
        let _ = tree.change(found.node, &AttrChange { mode: Some(0o777), ..AttrChange::default() }, &ME);
        assert!(
            tree.change(found.node, &AttrChange { size: Some(0), ..AttrChange::default() }, &ME).is_err()
        );
    }
    assert_eq!(std::fs::read(bed.dir.join("secret")).unwrap(), b"secret");
    // Nothing is created that gives rights on the target's machine.
    let device = Make::Node { mode: 0o20_666, rdev: 0x0103 };
    assert_eq!(tree.make(ROOT, &name("null"), &device, &ME).err(), Some(Errno::PERM));
    for mode in [0o4755, 0o2755, 0o6755] {
        let made = tree.create(ROOT, &name("program"), mode, BOTH, true, &ME);
        assert_eq!(made.err(), Some(Errno::PERM));
    }
    let (made, _file) = tree.create(ROOT, &name("program"), 0o755, BOTH, true, &ME).unwrap();
    for nobody in [
        AttrChange { uid: Some(u32::MAX), ..AttrChange::default() },
        AttrChange { gid: Some(u32::MAX), ..AttrChange::default() },
    ] {
        assert_eq!(tree.change(made.node, &nobody, &ME).err(), Some(Errno::INVAL));
    }
    let changed = tree.change(made.node, &AttrChange { mode: Some(0o6711), ..AttrChange::default() }, &ME);
    assert_eq!(changed.err(), Some(Errno::PERM));
    assert_eq!(tree.attr(made.node, 0).unwrap().perm, 0o755);
    let capable = Xattr::Set { name: b"security.capability".to_vec(), value: vec![0; 20], flags: 0 };
    assert_eq!(tree.xattr(made.node, &capable, &ME).err(), Some(Errno::OPNOTSUPP));
}

#[test]
fn new_files_belong_to_their_creator() {
    let bed = Bed::new();
    let (_target, address) = bed.target();
    let tree = connect(address, options());
    std::fs::set_permissions(bed.root(), Permissions::from_mode(0o777)).unwrap();
    let maker = Caller { uid: 12_345, gid: 54_321, groups: vec![], umask: 0o027 };
    let (made, _) = tree.create(ROOT, &name("theirs"), 0o666, BOTH, true, &maker).unwrap();
    let me = rustix::process::geteuid();
    let wanted = if me.is_root() { 12_345 } else { me.as_raw() };
    assert_eq!((made.uid, made.perm), (wanted, 0o640));
    let made = tree.make(ROOT, &name("folder"), &Make::Folder { mode: 0o777 }, &maker).unwrap();
    assert_eq!((made.uid, made.perm), (wanted, 0o750));
}

/// The same for extended attributes of a file.
fn attributes_of_others(tree: &dyn Tree, node: u64, user: &Caller) {
    let error = |ask| tree.xattr(node, &ask, user).err();
    let name = || b"user.onehop".to_vec();
    let set = |name: &[u8], value: &[u8]| Xattr::Set { name: name.to_vec(), value: value.to_vec(), flags: 0 };
    for ask in [Xattr::Get { name: name() }, set(&name(), b"theirs"), Xattr::Remove { name: name() }] {
        assert_eq!(error(ask), Some(Errno::ACCESS));
    }
    // Version 2 of ACLs: tag, permissions and ID of each entry. This one grants the user everything.
    let entry = |tag: u16, rights: u16, uid: u32| {
        [&tag.to_le_bytes()[..], &rights.to_le_bytes(), &uid.to_le_bytes()].concat()
    };
    let entries =
        [(1, 6, u32::MAX), (2, 7, user.uid), (4, 0, u32::MAX), (16, 7, u32::MAX), (32, 0, u32::MAX)];
    let entries = entries.map(|(tag, rights, uid)| entry(tag, rights, uid)).concat();
    let list = [&2_u32.to_le_bytes()[..], &entries].concat();
    // Some file systems have no ACLs, and root's attributes are never served to other machines.
    for ask in [set(b"system.posix_acl_access", &list), set(b"trusted.onehop", b"theirs")] {
        assert!([Some(Errno::PERM), Some(Errno::OPNOTSUPP)].contains(&error(ask)));
    }
}

/// Operations that an unprivileged user may not perform on files of others.
fn nothing_of_others(tree: &dyn Tree) {
    let user = Caller { uid: 21_001, gid: 21_001, groups: vec![21_002], umask: 0 };
    let refused = Some(Errno::ACCESS);
    let found = tree.lookup(ROOT, &name("secret"), &user).unwrap();
    // The client's kernel takes the result of a create for a new file, and checks nothing.
    for access in [READ, BOTH, OpenMode { truncate: true, ..BOTH }] {
        assert_eq!(tree.create(ROOT, &name("secret"), 0o600, access, false, &user).err(), refused);
        assert_eq!(tree.open(found.node, access, &user).err(), refused);
    }
    for change in [
        AttrChange { mode: Some(0o666), ..AttrChange::default() },
        AttrChange { uid: Some(21_001), ..AttrChange::default() },
        AttrChange { mtime: Some(TimeChange::To((1, 0))), ..AttrChange::default() },
    ] {
        assert_eq!(tree.change(found.node, &change, &user).err(), Some(Errno::PERM));
    }
    assert_eq!(
        tree.change(found.node, &AttrChange { size: Some(0), ..AttrChange::default() }, &user).err(),
        refused
    );
    let closed = tree.lookup(ROOT, &name("closed"), &user).unwrap().node;
    assert_eq!(tree.lookup(closed, &name("file"), &user).err(), refused);
    assert_eq!(tree.list(closed, 0, &user).err(), refused);
    assert_eq!(tree.make(closed, &name("x"), &Make::Folder { mode: 0o777 }, &user).err(), refused);
    assert_eq!(tree.remove(ROOT, &name("closed"), true, &user).err(), Some(Errno::PERM));
    assert_eq!(
        tree.rename((ROOT, &name("secret")), (ROOT, &name("mine")), 0, &user).err(),
        Some(Errno::PERM)
    );
    assert_eq!(tree.rename((ROOT, &name("secret")), (closed, &name("x")), 0, &user).err(), refused);
    assert_eq!(tree.link(found.node, closed, &name("x"), &user).err(), refused);
    attributes_of_others(tree, found.node, &user);
    // Group permissions grant access, and deny it.
    let shared = tree.lookup(ROOT, &name("shared"), &user).unwrap().node;
    assert!(tree.open(shared, BOTH, &user).is_ok());
    assert_eq!(tree.open(shared, BOTH, &Caller { groups: vec![], ..user.clone() }).err(), refused);
    let kept = tree.lookup(ROOT, &name("kept-from"), &user).unwrap().node;
    assert_eq!(tree.open(kept, BOTH, &user).err(), refused);
    assert!(tree.open(kept, BOTH, &Caller { groups: vec![], ..user.clone() }).is_ok());
    // Execute permission allows opening for execution only.
    let program = tree.lookup(ROOT, &name("program"), &user).unwrap().node;
    let run = OpenMode { execute: true, ..READ };
    assert_eq!(tree.open(program, READ, &user).err(), refused);
    assert!(tree.open(program, run, &user).is_ok());
    for access in [OpenMode { execute: true, ..BOTH }, OpenMode { truncate: true, ..run }] {
        assert_eq!(tree.open(program, access, &user).err(), Some(Errno::INVAL));
    }
    assert_eq!(tree.attr(program, 0).unwrap().size, 6);
    // The invalid user ID must not become root's.
    for by in [Caller { uid: u32::MAX, ..ME }, Caller { uid: 1, gid: u32::MAX, ..ME }] {
        assert_eq!(tree.lookup(ROOT, &name("secret"), &by).err(), Some(Errno::PERM));
        assert_eq!(tree.create(ROOT, &name("new"), 0o600, BOTH, false, &by).err(), Some(Errno::PERM));
    }
    // An existing file of another type is looked up again by the client's kernel.
    assert_eq!(tree.create(ROOT, &name("pipe"), 0o600, BOTH, false, &user).err(), Some(Errno::STALE));
    assert_eq!(tree.create(ROOT, &name("link"), 0o600, BOTH, false, &user).err(), Some(Errno::STALE));
}

#[test]
fn the_kernel_checks_the_permissions_of_users() {
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIPPED: only root can be two users");
        return;
    }
    let bed = Bed::new();
    let file = |name: &str, mode, group| {
        let path = bed.root().join(name);
        std::fs::write(&path, "secret").unwrap();
        std::os::unix::fs::chown(&path, None, Some(group)).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    };
    let secret = file("secret", 0o600, 0);
    file("shared", 0o660, 21_002);
    file("kept-from", 0o606, 21_002);
    file("program", 0o711, 0);
    std::fs::create_dir(bed.root().join("closed")).unwrap();
    std::os::unix::fs::symlink("secret", bed.root().join("link")).unwrap();
    let pipe = bed.root().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::from(0o666), 0)
        .unwrap();
    std::fs::set_permissions(bed.root().join("closed"), Permissions::from_mode(0o700)).unwrap();
    std::fs::set_permissions(bed.root(), Permissions::from_mode(0o1777)).unwrap();
    let root = std::fs::File::open(bed.root()).unwrap();
    nothing_of_others(&Folder::new(root.into(), FolderRules { for_others: false, most_open: 100 }).unwrap());
    let (_target, address) = bed.target();
    nothing_of_others(&connect(address, options()));
    assert_eq!(std::fs::read(secret).unwrap(), b"secret");
    assert_eq!(names_of(&bed), ["closed", "kept-from", "link", "pipe", "program", "secret", "shared"]);
}

/// Writes as a user who is not the owner. Returns the file's mode after that.
fn mode_after_a_write(tree: &dyn Tree, path: &Path, (mode, gid): (u32, u32), by: &Caller) -> u32 {
    std::fs::write(path, "old").unwrap();
    std::os::unix::fs::chown(path, Some(21_009), Some(gid)).unwrap();
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    let node = tree.lookup(ROOT, &name("program"), &ME).unwrap().node;
    assert_eq!(tree.open(node, BOTH, by).unwrap().write_bytes(b"new", 0).unwrap(), 3);
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn set_id_bits_are_cleared_as_by_a_local_write() {
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIPPED: only root can write as another user");
        return;
    }
    let bed = Bed::new();
    std::fs::set_permissions(bed.root(), Permissions::from_mode(0o1777)).unwrap();
    let program = bed.root().join("program");
    let root = std::fs::File::open(bed.root()).unwrap();
    let folder = Folder::new(root.into(), FolderRules { for_others: false, most_open: 100 }).unwrap();
    let (_target, address) = bed.target();
    let client = connect(address, options());
    let user = Caller { uid: 21_001, gid: 21_001, groups: vec![21_002, 21_003], umask: 0 };
    for tree in [&folder as &dyn Tree, &client] {
        for (before, gid, after) in [
            // Not executable by the group, and the writer is in the group: the bit stays.
            (0o2666, 21_003, 0o2666),
            (0o2777, 21_003, 0o777),
            (0o6777, 21_004, 0o777),
        ] {
            assert_eq!(mode_after_a_write(tree, &program, (before, gid), &user), after, "{before:o}");
        }
        // Root's own writes clear nothing. For other writers to a file that root has opened, there is `drop_set_id`.
        assert_eq!(mode_after_a_write(tree, &program, (0o6755, 0), &ME), 0o6755);
        let node = tree.lookup(ROOT, &name("program"), &ME).unwrap().node;
        let open = tree.open(node, BOTH, &ME).unwrap();
        open.drop_set_id().unwrap();
        assert_eq!(std::fs::metadata(&program).unwrap().permissions().mode() & 0o7777, 0o755);
        assert_eq!(std::fs::metadata(&program).unwrap().uid(), 21_009);
        // A set-group-id bit without execute permission stays.
        std::fs::set_permissions(&program, Permissions::from_mode(0o2666)).unwrap();
        open.drop_set_id().unwrap();
        assert_eq!(std::fs::metadata(&program).unwrap().permissions().mode() & 0o7777, 0o2666);
        a_mode_is_not_changed_back(&*open, &program);
    }
}

/// The owner removes permissions while others write.
fn a_mode_is_not_changed_back(open: &dyn OpenFile, path: &Path) {
    let change = |mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    open.drop_set_id().unwrap();
                }
            });
        }
        let changed_back = (0..20_000).find(|_| {
            change(0o4755);
            change(0o600);
            (0..4).any(|_| std::fs::metadata(path).unwrap().permissions().mode() & 0o777 != 0o600)
        });
        over.store(true, Ordering::Relaxed);
        assert_eq!(changed_back, None, "a change of the mode was undone");
    });
}

fn names_of(bed: &Bed) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(bed.root())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// The flags with which this process, and so a target within it, has opened a file.
fn flags_of(path: &Path) -> OFlags {
    let flags = |entry: std::fs::DirEntry| {
        std::fs::read_link(entry.path()).ok().filter(|target| target == path)?;
        let info = std::fs::read_to_string(Path::new("/proc/self/fdinfo").join(entry.file_name())).ok()?;
        let octal = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
        Some(OFlags::from_bits_retain(u32::from_str_radix(octal.trim(), 8).ok()?))
    };
    let mut all = std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(flags);
    // The target also holds an `O_PATH` descriptor.
    all.find(|flags| !flags.contains(OFlags::PATH)).unwrap()
}

#[test]
fn write_through_opens_files_with_dsync() {
    let synced = OpenMode { data_sync: true, ..BOTH };
    for (write_through, access, wanted) in [(false, BOTH, false), (true, BOTH, true), (false, synced, true)] {
        let bed = Bed::new();
        let root = bed.root().canonicalize().unwrap();
        std::fs::write(root.join("there"), "old").unwrap();
        let (_target, address) =
            start(server::ServerOptions { write_through, ..bed.options() }, "127.0.0.1:0");
        let tree = connect(address, options());
        let node = tree.lookup(ROOT, &name("there"), &ME).unwrap().node;
        let there = tree.open(node, access, &ME).unwrap();
        let (_, made) = tree.create(ROOT, &name("made"), 0o600, access, true, &ME).unwrap();
        for (file, name) in [(there, "there"), (made, "made")] {
            assert_eq!(file.write_bytes(b"new", 0).unwrap(), 3);
            assert_eq!(flags_of(&root.join(name)).contains(OFlags::DSYNC), wanted, "{name} {write_through}");
        }
    }
}

#[test]
fn a_read_only_target_refuses_changes() {
    let bed = Bed::new();
    std::fs::write(bed.root().join("file"), "old").unwrap();
    let (_target, address) = start(server::ServerOptions { read_only: true, ..bed.options() }, "127.0.0.1:0");
    let tree = connect(address, options());
    let node = tree.lookup(ROOT, &name("file"), &ME).unwrap().node;
    let mut seen = [0; 3];
    assert_eq!(tree.open(node, READ, &ME).unwrap().read_bytes(&mut seen, 0).unwrap(), 3);
    assert_eq!(tree.open(node, BOTH, &ME).err(), Some(Errno::ROFS));
    assert_eq!(tree.remove(ROOT, &name("file"), false, &ME).err(), Some(Errno::ROFS));
    assert_eq!(tree.create(ROOT, &name("new"), 0o600, BOTH, false, &ME).err(), Some(Errno::ROFS));
    assert_eq!(std::fs::read(bed.root().join("file")).unwrap(), b"old");
}

#[test]
fn clients_need_the_key() {
    let bed = Bed::new();
    let (target, address) = bed.target();
    let other = onehop_target::auth::Key::new(&[6; 32]).unwrap();
    for (given, expected) in [(None, "a key is required"), (Some(other), "not the target's key")] {
        let connector = TcpConnector::new(&address.to_string()).unwrap();
        let options = onehop_target::client::ClientOptions { key: given, ..options() };
        let error = RemoteTree::connect(Box::new(connector), options).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
    // A target without a key is refused, too.
    let (_open, address) = start(server::ServerOptions { key: None, ..bed.options() }, "127.0.0.1:0");
    let connector = TcpConnector::new(&address.to_string()).unwrap();
    let error = RemoteTree::connect(Box::new(connector), options()).err().unwrap().to_string();
    assert!(error.contains("no key"), "{error}");
    let without = onehop_target::client::ClientOptions { key: None, ..options() };
    drop(connect(address, without));
    assert_eq!(target.report().sessions, 0);
    let _ = key();
}
