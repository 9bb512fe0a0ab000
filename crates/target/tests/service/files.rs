//! Files of a target are as those of a folder.

use std::path::Path;

use onehop_os::HostMem;
use onehop_target::client::RemoteTree;
use onehop_target::server;
use onehop_target::tcp::TcpConnector;
use onehop_target::tree::{Folder, Memory, Rules, Tree};
use onehop_target::wire::{Access, Change, FileKind, Make, Name, Owner, ROOT};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::bed::{BOTH, Bed, ME, READ, connect, key, name, options, start};

fn bytes(len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

fn names(tree: &dyn Tree, node: u64) -> Vec<String> {
    let (mut all, mut from) = (Vec::new(), 0);
    loop {
        let some = tree.list(node, from).unwrap();
        all.extend(some.names.iter().map(|(_, _, name)| String::from_utf8_lossy(name).into_owned()));
        let Some(next) = some.next else { break };
        from = next;
    }
    all.retain(|name| name != "." && name != "..");
    all.sort();
    all
}

/// The same is asked of a folder, and of the same folder through a target.
fn everything(tree: &dyn Tree) {
    let folder = tree.make(ROOT, &name("folder"), &Make::Folder { mode: 0o755 }, ME).unwrap();
    assert_eq!(folder.kind, FileKind::Folder);
    let (made, file) = tree.create(folder.node, &name("file"), 0o640, BOTH, true, ME).unwrap();
    assert_eq!((made.perm, made.size, made.kind), (0o640, 0, FileKind::Regular));
    let again = tree.create(folder.node, &name("file"), 0o640, BOTH, true, ME);
    assert_eq!(again.err(), Some(Errno::EXIST));
    // Longer than one piece.
    let data = bytes(5_000_011);
    assert_eq!(file.write_bytes(&data, 7).unwrap(), data.len());
    file.sync(false).unwrap();
    let mut back = vec![1; data.len() + 100];
    assert_eq!(file.read_bytes(&mut back, 0).unwrap(), data.len() + 7);
    assert!(back[..7] == [0; 7] && back[7..data.len() + 7] == data);
    for shared in [false, true] {
        let mem = HostMem::anonymous(data.len() + 4096).unwrap();
        let to = Memory { mem: &mem, at: 5, len: data.len() + 100, shared };
        assert_eq!(file.read(to, 7).unwrap(), data.len());
        assert_eq!(mem.to_vec(5, data.len()).unwrap(), data);
        let from = Memory { mem: &mem, at: 5, len: 1000, shared };
        assert_eq!(file.write(from, 7).unwrap(), 1000);
    }
    let change = Change { size: Some(100), mode: Some(0o600), mtime: None, ..Change::default() };
    let changed = tree.change(made.node, &change).unwrap();
    assert_eq!((changed.size, changed.perm, changed.node), (100, 0o600, made.node));
    file.set_len(50).unwrap();
    // Behind what is there, by many at once.
    let other = tree.open(made.node, BOTH).unwrap();
    std::thread::scope(|scope| {
        for file in [&file, &other] {
            scope.spawn(|| (0..50).for_each(|_| assert_eq!(file.append_bytes(b"whole").unwrap(), 5)));
        }
    });
    let mut back = vec![1; 1000];
    assert_eq!(file.read_bytes(&mut back, 0).unwrap(), 550);
    assert!(back[50..550].chunks(5).all(|record| record == b"whole"));
    file.set_len(50).unwrap();
    assert_eq!(tree.attr(made.node).unwrap().size, 50);
    file.allocate(0, 0, 1 << 20).unwrap();
    file.allocate(3, 0, 1 << 16).unwrap();
    assert!(file.has_hole(0, 1 << 20).unwrap() && !file.has_hole(1 << 20, 1).unwrap());
    assert_eq!(file.seek(0, false).unwrap(), 1 << 16);
    let link = tree.make(ROOT, &name("link"), &Make::Link { text: b"../../..".to_vec() }, ME).unwrap();
    assert_eq!(tree.read_link(link.node).unwrap(), b"../../..");
    // A link leads nowhere here: only the kernel that asks follows it.
    assert_eq!(tree.lookup(link.node, &name("etc")).err(), Some(Errno::NOTDIR));
    assert_eq!(tree.open(link.node, READ).err(), Some(Errno::LOOP));
    let pipe = tree.make(ROOT, &name("pipe"), &Make::Node { mode: 0o10_600, rdev: 0 }, ME).unwrap();
    assert_eq!((pipe.kind, tree.open(pipe.node, READ).err()), (FileKind::Pipe, Some(Errno::NXIO)));
    let second = tree.link(made.node, ROOT, &name("second")).unwrap();
    assert_eq!((second.node, second.links), (made.node, 2));
    tree.rename((folder.node, &name("file")), (ROOT, &name("moved")), 0).unwrap();
    assert_eq!(tree.rename((ROOT, &name("moved")), (ROOT, &name("link")), 1).err(), Some(Errno::EXIST));
    assert_eq!(tree.lookup(folder.node, &name("file")).err(), Some(Errno::NOENT));
    assert_eq!(names(tree, ROOT), ["folder", "link", "moved", "pipe", "second"]);
    tree.sync_folder(ROOT).unwrap();
    assert_eq!(tree.remove(ROOT, &name("folder"), false).err(), Some(Errno::ISDIR));
    tree.remove(ROOT, &name("folder"), true).unwrap();
    for gone in ["link", "moved", "pipe", "second"] {
        tree.remove(ROOT, &name(gone), false).unwrap();
    }
    // It is open, and so it is still there.
    assert_eq!(file.write_bytes(b"yes", 0).unwrap(), 3);
    assert_eq!(tree.attr(made.node).unwrap().links, 0);
    assert!(names(tree, ROOT).is_empty());
    assert!(tree.space().unwrap().blocks[0] > 0);
    for number in 0..3000 {
        let make = Make::Node { mode: 0o100_600, rdev: 0 };
        let made = tree.make(ROOT, &name(&format!("one of many files {number:040}")), &make, ME).unwrap();
        tree.forget(made.node, 1);
    }
    assert_eq!(names(tree, ROOT).len(), 3000);
}

#[test]
fn a_folder_here() {
    let bed = Bed::new();
    let root = std::fs::File::open(bed.root()).unwrap();
    let rules = Rules { for_others: false, most_nodes: 100 };
    everything(&Folder::new(root.into(), rules).unwrap());
}

#[test]
fn a_folder_elsewhere() {
    let bed = Bed::new();
    let (target, address) = bed.target();
    let tree = connect(address, options());
    everything(&tree);
    let report = target.report();
    assert!(report.sessions == 1 && report.connections >= 1 && report.broken == 0, "{report:?}");
    assert!(report.written_bytes >= 5_000_011 && report.read_bytes >= 15_000_000, "{report:?}");
    drop(tree);
    assert!(target.drain(crate::bed::LONG));
}

#[test]
fn nothing_outside_of_the_folder_is_reached() {
    let bed = Bed::new();
    std::fs::write(bed.dir.join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink("..", bed.root().join("up")).unwrap();
    std::os::unix::fs::symlink(bed.dir.join("secret"), bed.root().join("absolute")).unwrap();
    let (_target, address) = bed.target();
    let tree = connect(address, options());
    for odd in [&b".."[..], b".", b"", b"a/b", b"/etc", b"up/secret", b"a\0b", &[b'x'; 256]] {
        assert!(Name::new(odd).is_none(), "{odd:?}");
    }
    for link in ["up", "absolute"] {
        let found = tree.lookup(ROOT, &name(link)).unwrap();
        assert_eq!(found.kind, FileKind::Link);
        assert!(tree.lookup(found.node, &name("secret")).is_err());
        assert!(tree.open(found.node, READ).is_err());
        // What is changed is the link, if anything.
        let _ = tree.change(found.node, &Change { mode: Some(0o777), ..Change::default() });
        assert!(tree.change(found.node, &Change { size: Some(0), ..Change::default() }).is_err());
    }
    assert_eq!(std::fs::read(bed.dir.join("secret")).unwrap(), b"secret");
    // No rights on the target's machine come out of it.
    let device = Make::Node { mode: 0o20_666, rdev: 0x0103 };
    assert_eq!(tree.make(ROOT, &name("null"), &device, ME).err(), Some(Errno::PERM));
    let (made, _file) = tree.create(ROOT, &name("program"), 0o6755, BOTH, true, ME).unwrap();
    assert_eq!(made.perm, 0o755);
    let changed = tree.change(made.node, &Change { mode: Some(0o6711), ..Change::default() }).unwrap();
    assert_eq!(changed.perm, 0o711);
}

#[test]
fn what_is_made_belongs_to_its_maker() {
    let bed = Bed::new();
    let (_target, address) = bed.target();
    let tree = connect(address, options());
    let owner = Owner { uid: 12_345, gid: 54_321 };
    let (made, _) = tree.create(ROOT, &name("theirs"), 0o600, BOTH, true, owner).unwrap();
    let me = rustix::process::geteuid();
    let wanted = if me.is_root() { 12_345 } else { me.as_raw() };
    assert_eq!(made.uid, wanted);
}

/// The flags with which this process, and so a target within it, has a file open.
fn flags_of(path: &Path) -> OFlags {
    let flags = |entry: std::fs::DirEntry| {
        std::fs::read_link(entry.path()).ok().filter(|target| target == path)?;
        let info = std::fs::read_to_string(Path::new("/proc/self/fdinfo").join(entry.file_name())).ok()?;
        let octal = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
        Some(OFlags::from_bits_retain(u32::from_str_radix(octal.trim(), 8).ok()?))
    };
    let mut all = std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(flags);
    // The target also holds a descriptor that is a mere path.
    all.find(|flags| !flags.contains(OFlags::PATH)).unwrap()
}

#[test]
fn writes_are_on_the_disk_first_where_that_is_wanted() {
    let synced = Access { data_sync: true, ..BOTH };
    for (write_through, access, wanted) in [(false, BOTH, false), (true, BOTH, true), (false, synced, true)] {
        let bed = Bed::new();
        let root = bed.root().canonicalize().unwrap();
        std::fs::write(root.join("there"), "old").unwrap();
        let (_target, address) = start(server::Options { write_through, ..bed.options() }, "127.0.0.1:0");
        let tree = connect(address, options());
        let node = tree.lookup(ROOT, &name("there")).unwrap().node;
        let there = tree.open(node, access).unwrap();
        let (_, made) = tree.create(ROOT, &name("made"), 0o600, access, true, ME).unwrap();
        for (file, name) in [(there, "there"), (made, "made")] {
            assert_eq!(file.write_bytes(b"new", 0).unwrap(), 3);
            assert_eq!(flags_of(&root.join(name)).contains(OFlags::DSYNC), wanted, "{name} {write_through}");
        }
    }
}

#[test]
fn a_target_may_refuse_changes() {
    let bed = Bed::new();
    std::fs::write(bed.root().join("file"), "old").unwrap();
    let (_target, address) = start(server::Options { read_only: true, ..bed.options() }, "127.0.0.1:0");
    let tree = connect(address, options());
    let node = tree.lookup(ROOT, &name("file")).unwrap().node;
    let mut seen = [0; 3];
    assert_eq!(tree.open(node, READ).unwrap().read_bytes(&mut seen, 0).unwrap(), 3);
    assert_eq!(tree.open(node, BOTH).err(), Some(Errno::ROFS));
    assert_eq!(tree.remove(ROOT, &name("file"), false).err(), Some(Errno::ROFS));
    assert_eq!(tree.create(ROOT, &name("new"), 0o600, BOTH, false, ME).err(), Some(Errno::ROFS));
    assert_eq!(std::fs::read(bed.root().join("file")).unwrap(), b"old");
}

#[test]
fn without_the_key_nobody_is_let_in() {
    let bed = Bed::new();
    let (target, address) = bed.target();
    let other = onehop_target::auth::Key::new(&[6; 32]).unwrap();
    for (given, says) in [(None, "its key"), (Some(other), "not the target's key")] {
        let connector = TcpConnector::new(&address.to_string()).unwrap();
        let options = onehop_target::client::Options { key: given, ..options() };
        let said = RemoteTree::connect(Box::new(connector), options).err().unwrap().to_string();
        assert!(said.contains(says), "{said}");
    }
    // And a target without a key is not taken for ours.
    let (_open, address) = start(server::Options { key: None, ..bed.options() }, "127.0.0.1:0");
    let connector = TcpConnector::new(&address.to_string()).unwrap();
    let said = RemoteTree::connect(Box::new(connector), options()).err().unwrap().to_string();
    assert!(said.contains("no key"), "{said}");
    let without = onehop_target::client::Options { key: None, ..options() };
    drop(connect(address, without));
    assert_eq!(target.report().sessions, 0);
    let _ = key();
}
