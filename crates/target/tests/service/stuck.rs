//! A mounted file system that does not answer blocks only those who access its files.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use onehop_target::client::ClientOptions;
use onehop_target::tree::Tree;
use onehop_target::wire::{Caller, Make, ROOT, Xattr};
use rustix::io::Errno;

use crate::bed::{BOTH, Bed, LONG, ME, READ, connect, name, options, start};
use crate::hung_fs::Mounted;

/// Users of the mount.
const THEIRS: u32 = 21_001;
const ANOTHER: u32 = 21_002;
/// More requests of each kind than a user may have threads.
const MANY: usize = 40;

/// The longest value of an attribute that a target takes.
const VALUE: usize = 56 << 10;

#[test]
fn waiting_attribute_values_use_only_their_user_s_budget() {
    let bed = Bed::new();
    let Some(stuck) = Mounted::new(&bed.root().join("stuck")) else { return };
    let mut of = bed.options();
    of.limits.requests = 1 << 20;
    let (target, address) = start(of, "127.0.0.1:0");
    let patient = ClientOptions { stall: 4 * LONG, give_up: LONG / 6, ..options() };
    let tree = connect(address, patient);
    let set = |node, uid| {
        let (name, value) = (b"user.large".to_vec(), vec![b'v'; VALUE]);
        tree.xattr(node, &Xattr::Set { name, value, flags: 0 }, &Caller { uid, ..ME }).err()
    };
    let folder = tree.lookup(ROOT, &name("stuck"), &Caller { uid: THEIRS, ..ME }).unwrap().node;
    let make = Make::Node { mode: 0o100_666, rdev: 0 };
    let file = tree.make(ROOT, &name("file"), &make, &ME).unwrap().node;
    let before = target.report().requests;
    stuck.gate.set(true);
    let errors = std::thread::scope(|scope| {
        let hostile: Vec<_> = (0..MANY).map(|_| scope.spawn(|| set(folder, THEIRS))).collect();
        let start = Instant::now();
        while target.report().requests < before + MANY as u64 && start.elapsed() < LONG {
            std::thread::sleep(Duration::from_millis(2));
        }
        for _ in 0..20 {
            // The file system may not support attributes, or not such long ones.
            let error = set(file, ANOTHER);
            assert!([None, Some(Errno::OPNOTSUPP), Some(Errno::NOSPC)].contains(&error), "{error:?}");
        }
        hostile.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    // The user may have half of the budget, enough for nine values; the others were refused each time.
    let count = |of: &[Errno]| errors.iter().flatten().filter(|error| of.contains(error)).count();
    let (refused, waited) = (count(&[Errno::NOBUFS]), count(&[Errno::TIMEDOUT, Errno::BUSY]));
    assert!(refused >= MANY / 2 && waited > 0 && refused + waited == MANY, "{errors:?}");
    stuck.gate.set(false);
    // Cancelled requests end soon, and release their share of the budget.
    let begun = Instant::now();
    while set(folder, THEIRS) != Some(Errno::OPNOTSUPP) {
        assert!(begun.elapsed() < LONG);
    }
}

#[test]
fn a_hung_file_system_blocks_only_its_users() {
    let bed = Bed::new();
    let Some(stuck) = Mounted::new(&bed.root().join("stuck")) else { return };
    let (target, address) = bed.target();
    // With one connection: if it were blocked, nobody would get an answer.
    let patient = ClientOptions { lanes: 1, stall: 4 * LONG, give_up: 4 * LONG, ..options() };
    let tree = connect(address, patient);
    let them = Caller { uid: THEIRS, ..ME };
    let folder = tree.lookup(ROOT, &name("stuck"), &them).unwrap().node;
    let of_stuck = tree.lookup(folder, &name("file"), &them).unwrap().node;
    let of_stuck = tree.open(of_stuck, READ, &them).unwrap();
    let (made, file) = tree.create(ROOT, &name("file"), 0o600, BOTH, true, &ME).unwrap();
    let link = tree.make(ROOT, &name("link"), &Make::Link { text: b"file".to_vec() }, &ME).unwrap().node;
    let before = target.report().requests;
    stuck.gate.set(true);
    std::thread::scope(|scope| {
        // Short enough to be executed by the connection's thread.
        scope.spawn(|| assert_eq!(of_stuck.read_bytes(&mut [0; 4096], 0).unwrap(), 0));
        for _ in 0..MANY {
            scope.spawn(|| tree.attr(folder, THEIRS).unwrap());
            scope.spawn(|| tree.sync_folder(folder, THEIRS).unwrap());
        }
        let begun = Instant::now();
        let all_asked = || target.report().requests > before + 2 * MANY as u64;
        while !all_asked() && begun.elapsed() < LONG {
            std::thread::sleep(Duration::from_millis(2));
        }
        let (tx, rx) = mpsc::channel();
        let (tree, file) = (&tree, &file);
        scope.spawn(move || {
            for round in 1..50 {
                file.write_bytes(&[7; 100], (round - 1) * 100).unwrap();
                // An acknowledged write is visible to others.
                assert_eq!(tree.attr(made.node, ANOTHER).unwrap().size, round * 100);
            }
            assert_eq!(tree.read_link(link, ANOTHER).unwrap(), b"file");
            tree.sync_folder(ROOT, ANOTHER).unwrap();
            assert!(tree.space(ANOTHER).unwrap().blocks[0] > 0);
            let found = tree.lookup(ROOT, &name("file"), &Caller { uid: ANOTHER, ..ME }).unwrap();
            assert_eq!(found.node, made.node);
            tree.attr(ROOT, ANOTHER).unwrap();
            tx.send(()).unwrap();
        });
        let is_done = rx.recv_timeout(LONG).is_ok();
        let were_asked = all_asked() && stuck.gate.holds_a_request();
        stuck.gate.set(false);
        assert!(were_asked, "{:?}", target.report());
        assert!(is_done, "another user waits for the hung file system");
    });
}

#[test]
fn files_that_cannot_be_closed_do_not_lock_others_out() {
    let bed = Bed::new();
    let Some(stuck) = Mounted::new(&bed.root().join("stuck")) else { return };
    let mut of = bed.options();
    of.limits.lease = Duration::from_millis(50);
    let (_target, address) = start(of, "127.0.0.1:0");
    let tree = connect(address, options());
    let folder = tree.lookup(ROOT, &name("stuck"), &ME).unwrap().node;
    let found = tree.lookup(folder, &name("file"), &ME).unwrap().node;
    let file = tree.open(found, READ, &ME).unwrap();
    stuck.gate.set(true);
    // The client says goodbye without closing the file.
    drop(tree);
    std::thread::sleep(Duration::from_secs(1));
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || tx.send(connect(address, options()).attr(ROOT, 0).is_ok()));
    let is_in = rx.recv_timeout(LONG);
    stuck.gate.set(false);
    assert_eq!(is_in, Ok(true));
    drop(file);
}

#[test]
fn a_successor_does_not_wait_for_files_to_be_closed() {
    let bed = Bed::new();
    let Some(stuck) = Mounted::new(&bed.root().join("stuck")) else { return };
    let (target, address) = bed.target();
    let old = connect(address, options());
    let folder = old.lookup(ROOT, &name("stuck"), &ME).unwrap().node;
    let found = old.lookup(folder, &name("file"), &ME).unwrap().node;
    let file = old.open(found, READ, &ME).unwrap();
    stuck.gate.set(true);
    let (mount, (tx, rx)) = (old.mount_id(), mpsc::channel());
    // Wait until its connections no longer hold its files.
    drop(old);
    let begun = Instant::now();
    while target.report().connections > 0 && begun.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(2));
    }
    std::thread::spawn(move || {
        let new = connect(address, options());
        let succeeded = new.succeed(mount);
        // Other clients can connect as well.
        let another = connect(address, options());
        tx.send((succeeded, another.attr(ROOT, 0).is_ok()))
    });
    let done = rx.recv_timeout(LONG);
    let begun = Instant::now();
    while !stuck.gate.holds_a_request() && begun.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(2));
    }
    let is_closing = stuck.gate.holds_a_request();
    stuck.gate.set(false);
    assert_eq!(done, Ok((Ok(()), true)));
    assert!(is_closing, "the files of the killed mount stay open");
    drop(file);
}
