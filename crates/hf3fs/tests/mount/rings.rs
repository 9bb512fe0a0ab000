//! Links and semaphores of rings and buffers: creation, lookup and removal.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use onehop_os::page_cache::may_swap;
use onehop_serve::MountOptions;
use onehop_usrbio::buffer::{Buffer, Ring};
use onehop_usrbio::mount::Mount;
use onehop_usrbio::ring::Request;
use onehop_usrbio::{Error, Id, Name, Priority, RingName, SHM};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde_json::Value;

use crate::attacks::{ATTACKER, become_user};
use crate::bed::{Bed, LONG, run, skipped, subtest, subtest_dir};
use crate::exhaustion::make_folder_writable;

const NAME: RingName =
    RingName { read: false, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };

fn mount(dir: &Path) -> Arc<Mount> {
    Arc::new(Mount::open(&dir.join("mnt")).unwrap())
}

/// Run by [`links_are_created_and_removed_by_either_call`].
#[test]
fn buffer_linker() {
    let Some(dir) = subtest_dir() else { return };
    let (mount, links) = (mount(&dir), dir.join("mnt/3fs-virt/iovs"));
    let link = |id: Id| links.join(id.to_string());
    // The library uses an ioctl; plain calls see its effects.
    let buffer = Buffer::create(&mount, 4096, 0, None).unwrap();
    let target = std::fs::read_link(link(buffer.id())).unwrap();
    assert!(target.is_file());
    std::fs::remove_file(link(buffer.id())).unwrap();
    assert!(std::fs::read_link(link(buffer.id())).is_err());
    assert!(matches!(mount.withdraw(&Name::buffer(buffer.id(), 0)), Err(Error::File { .. })));
    // And vice versa.
    let name = Name::buffer(Id::random().unwrap(), 0);
    symlink(&target, link(name.id)).unwrap();
    let again = mount.publish(&name, &target).unwrap_err();
    assert_eq!(again.errno(), Errno::EXIST.raw_os_error(), "{again}");
    mount.withdraw(&name).unwrap();
    assert!(std::fs::read_link(link(name.id)).is_err());
    for invalid in ["/etc/passwd", "/dev/shm/nothing there", ""] {
        let refused = mount.publish(&name, Path::new(invalid)).unwrap_err();
        let plain = symlink(invalid, link(name.id)).unwrap_err();
        assert_eq!(Some(refused.errno()), plain.raw_os_error(), "{invalid}: {refused}");
    }
    drop(buffer);
    if !geteuid().is_root() {
        return skipped("only root can be another user");
    }
    let buffer = Buffer::create(&mount, 4096, 0, None).unwrap();
    let (id, shared) = (buffer.id(), mount.clone());
    let other = std::thread::spawn(move || {
        become_user(ATTACKER, &[]);
        shared.withdraw(&Name::buffer(id, 0)).unwrap_err()
    });
    assert_eq!(other.join().unwrap().errno(), Errno::NOENT.raw_os_error());
    assert!(std::fs::read_link(link(id)).is_ok());
}

#[test]
fn links_are_created_and_removed_by_either_call() {
    let Some(bed) = Bed::start() else { return };
    make_folder_writable(&bed);
    assert!(run(subtest("rings::buffer_linker", &bed)).contains("1 passed"));
    assert_eq!(bed.report()["buffers"], 0);
}

/// Run by [`replaced_semaphores_are_found`].
#[test]
fn semaphore_breaker() {
    let Some(dir) = subtest_dir() else { return };
    let (mount, uid) = (mount(&dir), geteuid().as_raw());
    let _first = Ring::create(&mount, 8, NAME, None).unwrap();
    let found = || mount.submissions(uid, NAME.priority).unwrap();
    let before = found();
    assert!(Arc::ptr_eq(&before, &found()) && before.are_served());
    assert!(!Arc::ptr_eq(&before, &mount.submissions(uid + 1, NAME.priority).unwrap()));
    let path = std::fs::read_link(dir.join("mnt/3fs-virt/iovs").join(NAME.priority.link())).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    let start = Instant::now();
    // The daemon notices when it next uses the semaphore, and creates another one for the next ring.
    while Arc::ptr_eq(&before, &found()) {
        assert!(start.elapsed() < LONG, "the unserved semaphore is still in use");
        std::thread::sleep(Duration::from_millis(10));
        let _next = Ring::create(&mount, 8, NAME, None).unwrap();
    }
    assert!(!path.exists() && found().are_served());
}

#[test]
fn replaced_semaphores_are_found() {
    let Some(bed) = Bed::start() else { return };
    assert!(run(subtest("rings::semaphore_breaker", &bed)).contains("1 passed"));
}

/// Run by [`too_many_rings_are_an_error`].
#[test]
fn ring_maker() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let mount = mount(&dir);
    let mut rings = Vec::new();
    let refused = loop {
        match Ring::create(&mount, 1, NAME, None) {
            Ok(ring) => rings.push(ring),
            Err(error) => break error,
        }
        assert!(rings.len() < 4096, "there is no limit");
    };
    assert!(matches!(refused, Error::TooMany { .. }), "{refused}");
    assert_eq!(refused.errno(), Errno::MFILE.raw_os_error());
    assert!(refused.to_string().contains("onehop mount") && refused.to_string().contains("--status"));
    assert_eq!(rings.len(), 2048);
    let status = std::fs::read_to_string(dir.join("mnt/3fs-virt/onehop/stats")).unwrap();
    let yours = serde_json::from_str::<Value>(&status).unwrap()["yours"]["rings"].clone();
    assert_eq!(yours, serde_json::json!({ "taken": 2048, "left": 0 }));
    rings.pop();
    Ring::create(&mount, 1, NAME, None).unwrap();
    // A buffer does not count as a ring.
    Buffer::create(&mount, 4096, 0, None).unwrap();
}

#[test]
fn too_many_rings_are_an_error() {
    if !geteuid().is_root() {
        return skipped("only root can be another user, and a daemon's own user has no limit");
    }
    let Some(bed) = Bed::start() else { return };
    make_folder_writable(&bed);
    assert!(run(subtest("rings::ring_maker", &bed)).contains("1 passed"));
}

/// Run by [`cached_files_are_read_directly`].
#[test]
fn memory_reader() {
    let Some(dir) = subtest_dir() else { return };
    let (mount, file) = (mount(&dir), File::open(dir.join("mnt/file")).unwrap());
    let ring = Ring::create(&mount, 8, RingName { read: true, ..NAME }, None).unwrap();
    let buffer = Buffer::create(&mount, 4 * MEMORY_READ as usize, 0, None).unwrap();
    let inode = file.metadata().unwrap().ino();
    let mut results = Vec::new();
    for (place, at) in [0, 100, 3 * MEMORY_READ, 4 * MEMORY_READ - 7].into_iter().enumerate() {
        let offset = place as u64 * MEMORY_READ;
        let request = Request { buffer: buffer.id(), offset, inode, at, len: MEMORY_READ, userdata: 0 };
        ring.prepare(&request).unwrap();
        ring.submit();
        let (until, mut done) = (SystemTime::now() + LONG, Vec::new());
        ring.wait(&mut done, (1, 8), Some(until), Duration::from_millis(1)).unwrap();
        let count = usize::try_from(done[0].result).unwrap();
        let mut wanted = vec![0; MEMORY_READ as usize];
        let whole = file.read_at(&mut wanted, at).unwrap();
        assert_eq!(count, whole, "at {at}");
        assert!(buffer.memory().to_vec(offset as usize, wanted.len()).unwrap() == wanted, "at {at}");
        results.push(count as u64);
    }
    assert_eq!(results, [MEMORY_READ, MEMORY_READ, MEMORY_READ, 7]);
}

/// The length of a read that the ring's thread performs itself.
const MEMORY_READ: u64 = 64 << 10;

#[test]
fn cached_files_are_read_directly() {
    if may_swap() {
        return skipped("memory may be swapped out here, so that reads of files in memory may wait");
    }
    let bed = Bed::folder();
    let root = Path::new(SHM).join(format!("onehop-test-{}", Id::random().unwrap()));
    std::fs::create_dir(&root).unwrap();
    let bytes: Vec<u8> = (0..4 * MEMORY_READ).map(|i| ((i * i) >> 7) as u8).collect();
    std::fs::write(root.join("file"), bytes).unwrap();
    let options = MountOptions::new(&bed.mount(), &root);
    if let Some(bed) = bed.mounted(options) {
        assert!(run(subtest("rings::memory_reader", &bed)).contains("1 passed"));
        let routes = bed.report()["routes"].clone();
        // All but the first, which finds out that reads need not wait, and the last, which reaches the end of the file.
        let of = |route: &str| {
            let entry = routes.as_array().unwrap().iter().find(|entry| entry["route"] == route);
            entry.map_or(Value::Null, |entry| entry["bytes"].clone())
        };
        let wanted = (2 * MEMORY_READ, MEMORY_READ + 7);
        assert_eq!((of("cpu/cached"), of("cpu/waited")), (wanted.0.into(), wanted.1.into()), "{routes:#}");
    }
    std::fs::remove_dir_all(root).unwrap();
}

/// Run by [`creating_and_removing_rings_leaks_nothing`].
#[test]
fn maker_and_remover() {
    let Some(dir) = subtest_dir() else { return };
    let mount = mount(&dir);
    let path = Path::new(SHM).join(format!("onehop-test-{}", Id::random().unwrap()));
    let memory = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    memory.set_len(onehop_usrbio::ring::bytes(8).unwrap() as u64).unwrap();
    let over = AtomicBool::new(false);
    let names: Vec<_> =
        (0..4).map(|_| Name { ring: Some(NAME), ..Name::buffer(Id::random().unwrap(), 0) }).collect();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let _ = mount.withdraw(name);
                }
            });
        }
        // Creating a semaphore takes time between the two steps of creating a ring.
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(1) {
            for name in &names {
                let _ = mount.publish(name, &path);
            }
            let semaphore = std::fs::read_link(dir.join("mnt/3fs-virt/iovs").join(NAME.priority.link()));
            if let Ok(file) = semaphore.and_then(|path| File::options().write(true).open(path)) {
                file.set_len(0).unwrap();
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    names.iter().for_each(|name| drop(mount.withdraw(name)));
    std::fs::remove_file(path).unwrap();
    let start = Instant::now();
    loop {
        let status = std::fs::read_to_string(dir.join("mnt/3fs-virt/onehop/stats")).unwrap();
        let status: Value = serde_json::from_str(&status).unwrap();
        if (&status["rings"], &status["yours"]["rings"]["taken"]) == (&0.into(), &0.into()) {
            break;
        }
        assert!(start.elapsed() < LONG, "leaked rings: {status:#}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn creating_and_removing_rings_leaks_nothing() {
    let Some(bed) = Bed::start() else { return };
    assert!(run(subtest("rings::maker_and_remover", &bed)).contains("1 passed"));
}
