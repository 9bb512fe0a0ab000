//! What a client has given up does not happen later, though that client asks for nothing more, and does not keep others from changing
//! files.

use super::*;
use crate::client::{ClientOptions, RemoteTree};
use crate::tcp::{TcpAcceptor, TcpConnector};
use crate::tree::{OpenFile, Tree};
use crate::wire::{Caller, Name, ROOT};
use rustix::io::Errno;

const LONG: Duration = Duration::from_secs(60);
const GIVE_UP: Duration = Duration::from_secs(3);
const TIMED_OUT: Option<i32> = Some(Errno::TIMEDOUT.raw_os_error());

/// A target, and a client of it.
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

    /// Has nothing of a class done any more, as if all threads waited for a disk.
    fn block(&self, class: Class) -> &WorkQueue {
        let queue = self.target.shared.queue(class);
        if queue.threads.fetch_add(MOST_THREADS, Ordering::AcqRel) > 0 {
            // Threads that have done something wait for more.
            queue.queue.end();
            while queue.threads.load(Ordering::Acquire) > MOST_THREADS {
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
fn a_write_that_is_given_up_does_not_happen_though_its_client_asks_for_nothing_more() {
    let bed = ServedFolder::new();
    let file = bed.create("file", true);
    let disk = bed.block(Class::Disk);
    assert_eq!(file.write_bytes(b"late!", 0).unwrap_err().raw_os_error(), TIMED_OUT);
    // Somebody else writes something, and then the disk is there again.
    std::fs::write(bed.dir.join("file"), "newer").unwrap();
    let Next::Work(work, _) = disk.queue.worker().next(LONG) else {
        panic!("the target has no such request")
    };
    let (id, session, start) = (work.id.unwrap(), work.connection.session.clone(), Instant::now());
    while !session.gave_up(id) {
        assert!(start.elapsed() < LONG / 2, "the target is not told");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Nobody has to wait for what never happens.
    assert_eq!(bed.create("others", false).write_bytes(b"bytes", 0).unwrap(), 5);
    work.run(&bed.target.shared);
    assert_eq!(std::fs::read_to_string(bed.dir.join("file")).unwrap(), "newer");
    // Changes that come later are made.
    assert_eq!(bed.create("other", false).write_bytes(b"later", 0).unwrap(), 5);
}

#[test]
fn a_lookup_that_is_given_up_keeps_nobody_from_changing_files() {
    let bed = ServedFolder::new();
    let file = bed.create("file", false);
    bed.block(Class::Look);
    let found = bed.tree.lookup(ROOT, &name("file"), &Caller::ROOT);
    assert_eq!(found.err().map(Errno::raw_os_error), TIMED_OUT);
    assert_eq!(file.write_bytes(b"bytes", 0).unwrap(), 5);
}
