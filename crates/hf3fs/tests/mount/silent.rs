//! A target that does not answer, or not to everybody: lookups that wait for it keep nobody else waiting, nor what needs no target.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_serve::MountOptions;
use onehop_target::client::{ClientOptions, RemoteTree};
use onehop_target::server::{ServerOptions, Target};
use onehop_target::tcp::{TcpAcceptor, TcpConnector};
use onehop_target::wire::{FrameKind, HEAD_BYTES, Head, Request, unpack};

use crate::attacks::{ATTACKER, become_user};
use crate::bed::{Bed, LONG, part, part_of, skipped, wait};
use crate::stalled::{SOON, finds_nothing};

/// Lookups of the hostile user.
const LOOKUPS: usize = 100;
/// Threads of a session.
const SESSION: usize = 16;

/// Frames that are held back.
type Rule = fn(Option<&Request>) -> bool;

/// A way to a target, and what is held back of it.
struct Way {
    to: TcpStream,
    held: Vec<Vec<u8>>,
}

/// Between a mount and a target without a key, whose frames it can read: it holds some back.
#[derive(Clone)]
struct Sieve {
    address: SocketAddr,
    rule: Arc<Mutex<Rule>>,
    ways: Arc<Mutex<Vec<Arc<Mutex<Way>>>>>,
}

impl Sieve {
    fn new(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let this = Self {
            address: listener.local_addr().unwrap(),
            rule: Arc::new(Mutex::new(|_| false)),
            ways: Arc::default(),
        };
        let sieve = this.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(target) else { return };
                let (mut back, mut to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut back, &mut to);
                    let _ = to.shutdown(Shutdown::Both);
                });
                let sieve = sieve.clone();
                std::thread::spawn(move || sieve.pass(near, far));
            }
        });
        this
    }

    fn pass(&self, mut near: TcpStream, far: TcpStream) -> Option<()> {
        let way = Arc::new(Mutex::new(Way { to: far, held: Vec::new() }));
        self.ways.lock().unwrap().push(way.clone());
        loop {
            let mut head = [0; HEAD_BYTES];
            if near.read_exact(&mut head).is_err() {
                let _ = way.lock().unwrap().to.shutdown(Shutdown::Both);
                return None;
            }
            let Head { kind, body: bytes, data, .. } = Head::from_bytes(&head, "a mount").ok()?;
            let mut rest = vec![0; (bytes + data) as usize];
            near.read_exact(&mut rest).ok()?;
            let request = (kind == FrameKind::Request).then(|| unpack(&rest[..bytes as usize], "a mount"));
            let frame = [&head[..], &rest].concat();
            let is_held = self.rule.lock().unwrap()(request.and_then(Result::ok).as_ref());
            let mut way = way.lock().unwrap();
            if is_held { way.held.push(frame) } else { way.to.write_all(&frame).ok()? }
        }
    }

    fn hold(&self, rule: Rule) {
        *self.rule.lock().unwrap() = rule;
    }

    fn held(&self) -> usize {
        self.ways.lock().unwrap().iter().map(|way| way.lock().unwrap().held.len()).sum()
    }

    /// Lets everything pass.
    fn release(&self) {
        self.hold(|_| false);
        for way in &*self.ways.lock().unwrap() {
            let Way { to, held } = &mut *way.lock().unwrap();
            held.drain(..).for_each(|frame| drop(to.write_all(&frame)));
        }
    }
}

/// Run by the test below: an ordinary user looks up many names at once.
#[test]
fn looker() {
    let Some(dir) = part_of() else { return };
    become_user(ATTACKER, &[]);
    std::thread::scope(|scope| {
        for number in 0..LOOKUPS {
            let name = dir.join(format!("mnt/nothing of theirs {number}"));
            scope.spawn(move || {
                let found = std::fs::symlink_metadata(name);
                assert!(found.is_err_and(|error| error.kind() == ErrorKind::NotFound));
            });
        }
    });
}

#[test]
fn lookups_that_a_target_does_not_answer_hold_up_nothing_else() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    let bed = Bed::folder();
    let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
    let address = acceptor.local().unwrap();
    let options = ServerOptions::new(&bed.dir.join("root"), None);
    let _target = Target::start(options, vec![Box::new(acceptor)]).unwrap();
    let sieve = Sieve::new(address);
    // No connection is given up for being silent.
    let options = ClientOptions { stall: 4 * LONG, give_up: 4 * LONG, ..ClientOptions::new(None) };
    let connector = TcpConnector::new(&sieve.address.to_string()).unwrap();
    let tree = RemoteTree::connect(Box::new(connector), options).unwrap();
    let options = MountOptions::of_target(&bed.mount(), tree);
    let Some(bed) = bed.mounted(options) else { return };
    // Of one user, it answers no lookup.
    sieve.hold(|request| matches!(request, Some(Request::Lookup { by, .. }) if by.uid == ATTACKER));
    let looker = part("silent::looker", &bed).stdout(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while sieve.held() < SESSION {
        assert!(start.elapsed() < LONG, "{} lookups are under way", sieve.held());
        std::thread::sleep(Duration::from_millis(2));
    }
    // By threads that may wait for ever where this fails.
    let (say, said) = channel();
    let (path, file, status) = (bed.mount(), bed.file(), bed.mount().join(onehop_serve::STATS));
    std::thread::spawn(move || {
        say.send((finds_nothing(&path), std::fs::read(file).map(|bytes| bytes.len())))
    });
    let (found, bytes) = said.recv_timeout(SOON).expect("another user's calls wait");
    assert!(found && bytes.unwrap() == 6_000_011);
    // To nobody, it answers anything.
    sieve.hold(|_| true);
    let lookups: Vec<_> = (0..LOOKUPS)
        .map(|number| {
            let name = bed.mount().join(format!("nothing {number}"));
            std::thread::spawn(move || std::fs::symlink_metadata(name).is_err())
        })
        .collect();
    // By now the kernel has forgotten what it knew of the root.
    std::thread::sleep(Duration::from_secs(2));
    let (say, said) = channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        let read = File::open(status).and_then(|mut file| file.read_to_string(&mut text));
        say.send(read.map(|_| text))
    });
    let report = said.recv_timeout(SOON).expect("the mount's status waits for the target");
    assert!(report.unwrap().contains("\"remote\""));
    sieve.release();
    assert!(lookups.into_iter().all(|lookup| lookup.join().unwrap()));
    let output = wait(looker);
    assert!(output.status.success(), "{output:?}");
}
