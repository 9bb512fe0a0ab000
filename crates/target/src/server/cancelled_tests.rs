//! Tests that cancelled requests are not executed later, even without further requests of the client, and do not block
//! changes by others.

use super::*;
use crate::client::{ClientOptions, RemoteTree};
use crate::tcp::{TcpAcceptor, TcpConnector};
use crate::tree::{OpenFile, Tree};
use crate::wire::{Caller, Name, ROOT};
use rustix::io::Errno;

const LONG: Duration = Duration::from_secs(60);
const GIVE_UP: Duration = Duration::from_secs(3);
const TIMED_OUT: Option<i32> = Some(Errno::TIMEDOUT.raw_os_error());

/// A target and a client of it.
struct ServedFolder {
    tree: RemoteTree,
    target: Target,
    dir: PathBuf,
}

impl ServedFolder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("onehop-given-up-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
        let connector = TcpConnector::new(&acceptor.local().unwrap().to_string()).unwrap();
        let target = Target::start(ServerOptions::new(&dir, None), vec![Box::new(acceptor)]).unwrap();
        let options = ClientOptions { lanes: 2, give_up: GIVE_UP, stall: LONG, ..ClientOptions::new(None) };
        let tree = RemoteTree::connect(Box::new(connector), options).unwrap();
        Self { tree, target, dir }
    }

    fn create(&self, text: &str, data_sync: bool) -> Arc<dyn OpenFile> {
        let access = OpenMode { read: true, write: true, data_sync, ..OpenMode::default() };
        self.tree.create(ROOT, &name(text), 0o600, access, true, &Caller::ROOT).unwrap().1
    }

    /// Stops the execution of a class of requests, as if all its threads waited for a disk.
    fn block(&self, class: Class) -> &WorkQueue {
        let queue = self.target.shared.queue(class);
        if queue.threads.fetch_add(MAX_THREADS, Ordering::AcqRel) > 0 {
            // End the threads that wait for more work.
            queue.queue.end();
            while queue.threads.load(Ordering::Acquire) > MAX_THREADS {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        queue
    }
}

impl Drop for ServedFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

#[test]
fn a_cancelled_write_is_not_executed_later() {
    let bed = ServedFolder::new();
    let file = bed.create("file", true);
    let disk = bed.block(Class::Disk);
    assert_eq!(file.write_bytes(b"late!", 0).unwrap_err().raw_os_error(), TIMED_OUT);
    // Another program writes the file before the disk continues.
    std::fs::write(bed.dir.join("file"), "newer").unwrap();
    let Next::Work(work, _) = disk.queue.worker().next(LONG) else {
        panic!("the target has no such request")
    };
    let (id, session, start) = (work.id.unwrap(), work.connection.session.clone(), Instant::now());
    while !session.has_cancelled(id) {
        assert!(start.elapsed() < LONG / 2, "the target was not notified");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The cancelled write blocks nobody.
    assert_eq!(bed.create("others", false).write_bytes(b"bytes", 0).unwrap(), 5);
    work.run(&bed.target.shared);
    assert_eq!(std::fs::read_to_string(bed.dir.join("file")).unwrap(), "newer");
    // Later changes are executed.
    assert_eq!(bed.create("other", false).write_bytes(b"later", 0).unwrap(), 5);
}

#[test]
fn a_cancelled_lookup_does_not_block_changes() {
    let bed = ServedFolder::new();
    let file = bed.create("file", false);
    bed.block(Class::Lookup);
    let found = bed.tree.lookup(ROOT, &name("file"), &Caller::ROOT);
    assert_eq!(found.err().map(Errno::raw_os_error), TIMED_OUT);
    assert_eq!(file.write_bytes(b"bytes", 0).unwrap(), 5);
}
