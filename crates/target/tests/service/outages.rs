//! Broken connections, restarted targets, and stalled or corrupted data: nothing hangs, and acknowledged writes
//! persist.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use onehop_os::StopSignal;
use onehop_target::tcp::TcpConnector;
use onehop_target::tree::{OpenFile, Tree};
use onehop_target::wire::{Make, ROOT};
use onehop_target::{Error, client};
use rustix::io::Errno;

use crate::bed::{BOTH, Bed, LONG, ME, Wire, connect, name, options, start};

const RECORD: usize = 3000;

fn record(number: u64, turn: u64) -> Vec<u8> {
    (number << 32 | turn).to_le_bytes().repeat(RECORD / 8)
}

/// A client with short timeouts.
fn quick() -> client::ClientOptions {
    client::ClientOptions {
        stall: Duration::from_millis(400),
        connect: Duration::from_secs(2),
        give_up: LONG,
        ..options()
    }
}

/// Writes records, each place with an increasing number, while `happen` runs. Then checks that each place has the last
/// acknowledged record.
fn checked(tree: &dyn Tree, happen: impl FnOnce(&AtomicU64)) {
    const WRITERS: u64 = 3;
    const PLACES: u64 = 20;
    let (_, file) = tree.create(ROOT, &name("records"), 0o600, BOTH, false, &ME).unwrap();
    let (over, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let write = |file: &dyn OpenFile, writer: u64| {
        let mut last = vec![0; PLACES as usize];
        let mut turn = 1;
        while !over.load(Ordering::Acquire) {
            let place = turn % PLACES;
            let (number, at) = (writer * PLACES + place, (writer * PLACES + place) * RECORD as u64);
            match file.write_bytes(&record(number, turn), at) {
                Ok(count) => {
                    assert_eq!(count, RECORD);
                    last[place as usize] = turn;
                    written.fetch_add(1, Ordering::AcqRel);
                    let mut back = vec![0; RECORD];
                    if file.read_bytes(&mut back, at).is_ok() {
                        assert_eq!(back, record(number, turn), "a record differs from what was just written");
                    }
                }
                Err(error) => panic!("a write failed: {error}"),
            }
            turn += 1;
        }
        last
    };
    std::thread::scope(|scope| {
        let file = &*file;
        let writers: Vec<_> = (0..WRITERS).map(|w| scope.spawn(move || write(file, w))).collect();
        happen(&written);
        over.store(true, Ordering::Release);
        for (writer, thread) in (0..).zip(writers) {
            for (place, turn) in (0..).zip(thread.join().unwrap()) {
                if turn > 0 {
                    let number = writer * PLACES + place;
                    let mut seen = vec![0; RECORD];
                    file.read_bytes(&mut seen, number * RECORD as u64).unwrap();
                    assert_eq!(seen, record(number, turn), "place {number}");
                }
            }
        }
    });
    file.sync(false).unwrap();
}

/// Waits until `count` more records were written.
fn more(written: &AtomicU64, count: u64) {
    let (start, wanted) = (Instant::now(), written.load(Ordering::Acquire) + count);
    while written.load(Ordering::Acquire) < wanted {
        assert!(start.elapsed() < LONG, "writing has stopped");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn cut_connections_are_made_again() {
    let bed = Bed::new();
    let (target, address) = bed.target();
    let wire = Wire::new(address);
    let tree = connect(wire.address, quick());
    checked(&tree, |written| {
        for _ in 0..5 {
            more(written, 20);
            wire.cut();
        }
        more(written, 20);
    });
    let report = tree.report();
    assert!(report.reconnects >= 3 && report.sessions_lost == 0, "{report:?}");
    assert_eq!(target.report().sessions, 1);
}

#[test]
fn stalled_and_corrupted_connections_are_replaced() {
    let bed = Bed::new();
    let (target, address) = bed.target();
    let wire = Wire::new(address);
    let tree = connect(wire.address, quick());
    checked(&tree, |written| {
        more(written, 20);
        wire.stall(true);
        std::thread::sleep(Duration::from_millis(600));
        wire.stall(false);
        more(written, 20);
        wire.corrupt(300_000);
        more(written, 300);
        wire.corrupt(0);
        more(written, 20);
    });
    assert!(tree.report().reconnects >= 2, "{:?} {:?}", tree.report(), target.report());
    assert_eq!(tree.report().sessions_lost, 0);
}

#[test]
fn appends_are_executed_once_despite_cut_connections() {
    let bed = Bed::new();
    let (target, address) = bed.target();
    let wire = Wire::new(address);
    let tree = connect(wire.address, quick());
    let (_, file) = tree.create(ROOT, &name("log"), 0o600, BOTH, true, &ME).unwrap();
    let cut = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..10 {
                std::thread::sleep(Duration::from_millis(20));
                wire.cut();
            }
            cut.store(true, Ordering::Release);
        });
        let mut number = 0_u32;
        while !cut.load(Ordering::Acquire) || number < 100 {
            assert_eq!(file.append_bytes(&number.to_le_bytes()).unwrap(), 4);
            number += 1;
        }
        let wanted: Vec<u8> = (0..number).flat_map(u32::to_le_bytes).collect();
        assert!(std::fs::read(bed.root().join("log")).unwrap() == wanted, "{:?}", target.report());
    });
    assert!(tree.report().reconnects >= 2, "{:?}", tree.report());
}

#[test]
fn requests_of_a_killed_mount_do_not_follow_its_successor() {
    let bed = Bed::new();
    let (target, address) = bed.target();
    let wire = Wire::new(address);
    let old = connect(wire.address, client::ClientOptions { give_up: Duration::from_secs(2), ..options() });
    let (_, file) = old.create(ROOT, &name("file"), 0o600, BOTH, true, &ME).unwrap();
    file.write_bytes(b"before", 0).unwrap();
    // The mount is killed with a write in flight, and the target does not notice, as after a power failure.
    wire.stall(true);
    wire.lead_to(std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    std::thread::scope(|scope| {
        let late = scope.spawn(|| file.write_bytes(b"late!!", 0));
        std::thread::sleep(Duration::from_millis(300));
        let new = connect(address, options());
        new.succeed(old.mount_id()).unwrap();
        assert_eq!(target.report().sessions, 1);
        let (_, again) = new.create(ROOT, &name("file"), 0o600, BOTH, false, &ME).unwrap();
        again.write_bytes(b"after!", 0).unwrap();
        wire.stall(false);
        assert!(late.join().unwrap().is_err());
        std::thread::sleep(Duration::from_millis(300));
        let mut seen = [0; 6];
        again.read_bytes(&mut seen, 0).unwrap();
        assert_eq!(seen, *b"after!");
        // A mount cannot succeed itself, and succeeding an unknown one does nothing.
        assert_eq!(new.succeed(new.mount_id()).err(), Some(Errno::INVAL));
        new.succeed([3; 16]).unwrap();
    });
}

#[test]
fn timed_out_requests_are_not_executed_later() {
    let bed = Bed::new();
    let (_target, address) = bed.target();
    let wire = Wire::new(address);
    let give_up = Duration::from_millis(300);
    let tree = connect(wire.address, client::ClientOptions { give_up, ..quick() });
    let (_, file) = tree.create(ROOT, &name("file"), 0o600, BOTH, true, &ME).unwrap();
    file.write_bytes(b"before", 0).unwrap();
    wire.stall(true);
    let start = Instant::now();
    let error = file.write_bytes(b"in vain", 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::TIMEDOUT.raw_os_error()), "{error}");
    assert_eq!(tree.make(ROOT, &name("x"), &Make::Folder { mode: 0o700 }, &ME).err(), Some(Errno::TIMEDOUT));
    assert!(start.elapsed() < LONG);
    wire.stall(false);
    while file.write_bytes(b"after!", 0).is_err() {
        assert!(start.elapsed() < LONG);
    }
    // Requests still in transit are not executed after it.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(std::fs::read(bed.root().join("file")).unwrap()[..6], *b"after!");
}

/// Descriptors of a file in this process, which runs the target. Includes `O_PATH` descriptors.
fn descriptors(path: &std::path::Path) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|fd| fd.as_ref().is_ok_and(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == path)))
        .count()
}

#[test]
fn files_of_lost_answers_are_released() {
    let bed = Bed::new();
    let (_target, address) = bed.target();
    let wire = Wire::new(address);
    let give_up = Duration::from_secs(5);
    let tree = connect(wire.address, client::ClientOptions { stall: LONG, give_up, ..quick() });
    let (opened, found) = (bed.root().join("opened"), bed.root().join("found"));
    let start = Instant::now();
    let wait_until = |is_so: &dyn Fn() -> bool| {
        while !is_so() {
            assert!(start.elapsed() < LONG, "{} {}", descriptors(&opened), descriptors(&found));
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    for path in [&opened, &found] {
        std::fs::write(path, "x").unwrap();
    }
    let node = tree.lookup(ROOT, &name("opened"), &ME).unwrap().node;
    let known = descriptors(&opened);
    for lane_ends in [false, true] {
        wire.block_replies(true);
        std::thread::scope(|scope| {
            let opens = scope.spawn(|| tree.open(node, crate::bed::READ, &ME).map(drop));
            let looks = scope.spawn(|| tree.lookup(ROOT, &name("found"), &ME).map(drop));
            wait_until(&|| descriptors(&opened) > known && descriptors(&found) > 0);
            assert_eq!(opens.join().unwrap().err(), Some(Errno::TIMEDOUT));
            assert_eq!(looks.join().unwrap().err(), Some(Errno::TIMEDOUT));
        });
        if lane_ends {
            wire.cut();
        }
        wire.block_replies(false);
        // Without any further request.
        wait_until(&|| descriptors(&opened) == known && descriptors(&found) == 0);
    }
    tree.attr(node, 0).unwrap();
    assert_eq!(tree.report().sessions_lost, 0);
}

/// The connections are open, and the target does not answer: only a request to stop ends the waits before `LONG` is
/// over.
#[test]
fn a_request_to_stop_ends_all_waits() {
    let bed = Bed::new();
    let (_target, address) = bed.target();
    let wire = Wire::new(address);
    let stop = StopSignal::default();
    let patient = client::ClientOptions { stall: LONG, give_up: LONG, stop: stop.clone(), ..quick() };
    let tree = connect(wire.address, patient);
    let (made, file) = tree.create(ROOT, &name("file"), 0o600, BOTH, true, &ME).unwrap();
    wire.stall(true);
    let start = Instant::now();
    let timed_out = Some(Errno::TIMEDOUT);
    std::thread::scope(|scope| {
        // One waits for an answer, and one for the connection to accept its data.
        let asks = scope.spawn(|| tree.attr(made.node, 0).err());
        let writes = scope.spawn(|| file.write_bytes(&vec![7; 64 << 20], 0).map(|_| ()));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!asks.is_finished() && !writes.is_finished());
        stop.set();
        assert_eq!(asks.join().unwrap(), timed_out);
        writes.join().unwrap().unwrap_err();
    });
    // Later requests do not wait either.
    assert_eq!(tree.attr(made.node, 0).err(), timed_out);
    drop(file);
    drop(tree);
    assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
}

/// The server accepts connections and sends nothing: only a request to stop ends the wait before `LONG` is over.
#[test]
fn a_request_to_stop_ends_the_wait_for_a_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let stop = StopSignal::default();
    let patient = client::ClientOptions { connect: LONG, stop: stop.clone(), ..options() };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let connects = scope.spawn(|| {
            let connector = TcpConnector::new(&address).unwrap();
            client::RemoteTree::connect(Box::new(connector), patient).map(|_| ())
        });
        let accepted = listener.accept().unwrap();
        stop.set();
        let end = connects.join().unwrap();
        assert!(matches!(&end, Err(Error::Stopped { peer }) if *peer == address), "{end:?}");
        drop(accepted);
    });
    assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
}

#[test]
fn an_absent_target_is_waited_for_once() {
    let bed = Bed::new();
    let (_target, address) = bed.target();
    let wire = Wire::new(address);
    let give_up = Duration::from_secs(8);
    let tree = connect(wire.address, client::ClientOptions { give_up, ..quick() });
    let (made, file) = tree.create(ROOT, &name("file"), 0o600, BOTH, true, &ME).unwrap();
    wire.stall(true);
    let timed_out = Some(Errno::TIMEDOUT);
    assert_eq!(tree.attr(made.node, 0).err(), timed_out);
    // Until the target is back, no request waits as long again.
    let start = Instant::now();
    for _ in 0..3 {
        assert_eq!(tree.attr(made.node, 0).err(), timed_out);
    }
    assert!(start.elapsed() < 2 * give_up, "{:?}", start.elapsed());
    wire.stall(false);
    while file.write_bytes(b"again", 0).is_err() {
        assert!(start.elapsed() < LONG);
    }
    assert_eq!(tree.attr(made.node, 0).unwrap().size, 5);
}

/// Run in a child process by tests that kill it.
#[test]
fn target_of_another_process() {
    let Ok(dir) = std::env::var("ONEHOP_TEST_TARGET") else { return };
    let dir = std::path::PathBuf::from(dir);
    let options = onehop_target::server::ServerOptions::new(&dir.join("root"), Some(crate::bed::key()));
    let (_target, address) = start(options, "127.0.0.1:0");
    std::fs::write(dir.join("address.new"), address.to_string()).unwrap();
    std::fs::rename(dir.join("address.new"), dir.join("address")).unwrap();
    std::thread::sleep(LONG);
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn target_process(bed: &Bed) -> (Killed, std::net::SocketAddr) {
    let _ = std::fs::remove_file(bed.dir.join("address"));
    let mut target = Command::new(std::env::current_exe().unwrap());
    target.args(["--exact", "outages::target_of_another_process"]).env("ONEHOP_TEST_TARGET", &bed.dir);
    let child = Killed(target.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let start = Instant::now();
    loop {
        if let Ok(text) = std::fs::read_to_string(bed.dir.join("address")) {
            return (child, text.parse().unwrap());
        }
        assert!(start.elapsed() < LONG, "the target did not start");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_restarted_target_continues() {
    let bed = Bed::new();
    let (mut target, address) = target_process(&bed);
    let wire = Wire::new(address);
    let tree = connect(wire.address, quick());
    let deep = tree.make(ROOT, &name("a"), &Make::Folder { mode: 0o755 }, &ME).unwrap();
    let deep = tree.make(deep.node, &name("b"), &Make::Folder { mode: 0o755 }, &ME).unwrap();
    let (kept, open) = tree.create(deep.node, &name("kept"), 0o600, BOTH, true, &ME).unwrap();
    let (_, gone) = tree.create(deep.node, &name("gone"), 0o600, BOTH, true, &ME).unwrap();
    let (other, _) = tree.create(deep.node, &name("other"), 0o600, BOTH, true, &ME).unwrap();
    tree.rename((deep.node, &name("kept")), (ROOT, &name("moved")), 0, &ME).unwrap();
    open.write_bytes(b"kept", 0).unwrap();
    tree.remove(deep.node, &name("gone"), false, &ME).unwrap();
    gone.write_bytes(b"still there", 0).unwrap();
    checked(&tree, |written| {
        for _ in 0..3 {
            more(written, 20);
            drop(std::mem::replace(
                &mut target,
                {
                    // The new one starts before the old one ends, at another address.
                    let (next, address) = target_process(&bed);
                    wire.lead_to(address);
                    (next, address)
                }
                .0,
            ));
            wire.cut();
        }
        more(written, 20);
    });
    assert!(tree.report().sessions_lost >= 3, "{:?}", tree.report());
    // Open files stay open, even after a rename. A deleted file is stale.
    let mut seen = [0; 4];
    assert_eq!((open.read_bytes(&mut seen, 0).unwrap(), seen), (4, *b"kept"));
    assert_eq!(tree.attr(kept.node, 0).unwrap().size, 4);
    let error = gone.read_bytes(&mut seen, 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::STALE.raw_os_error()), "{error}");
    // Another file under the same name is not mistaken for it.
    std::fs::write(bed.root().join("a/b/new"), "new").unwrap();
    std::fs::rename(bed.root().join("a/b/new"), bed.root().join("a/b/other")).unwrap();
    drop(target);
    let (_target, address) = target_process(&bed);
    wire.lead_to(address);
    wire.cut();
    assert_eq!(tree.attr(other.node, 0).err(), Some(Errno::STALE));
    assert_eq!(tree.attr(kept.node, 0).unwrap().size, 4);
}

#[test]
fn a_draining_target_finishes_requests() {
    let bed = Bed::new();
    let (target, address) = bed.target();
    let wire = Wire::new(address);
    let tree = connect(wire.address, quick());
    checked(&tree, |written| {
        more(written, 20);
        let (next, address) = bed.target();
        wire.lead_to(address);
        assert!(target.drain(LONG));
        more(written, 20);
        std::mem::forget(next);
    });
    assert!(tree.report().sessions_lost >= 1);
}
