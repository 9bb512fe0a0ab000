//! A target that does not answer some or all requests: waiting lookups must not delay other users, or requests that
//! need no target.

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
use crate::bed::{Bed, LONG, skipped, subtest, subtest_dir, wait};
use crate::stalled::{LOOKUP_TIMEOUT, missing_names_are_not_found};

/// The number of the hostile user's lookups.
const LOOKUPS: usize = 100;
/// The threads of a session.
const SESSION_THREADS: usize = 16;

/// Selects frames to hold.
type Rule = fn(Option<&Request>) -> bool;

/// A connection to a target, and its held frames.
struct ProxyConnection {
    to: TcpStream,
    held: Vec<Vec<u8>>,
}

/// A proxy between a mount and a target without a key, so that it can decode frames. It holds the frames that a rule
/// selects.
#[derive(Clone)]
struct HoldingProxy {
    address: SocketAddr,
    rule: Arc<Mutex<Rule>>,
    connections: Arc<Mutex<Vec<Arc<Mutex<ProxyConnection>>>>>,
}

impl HoldingProxy {
    fn new(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let this = Self {
            address: listener.local_addr().unwrap(),
            rule: Arc::new(Mutex::new(|_| false)),
            connections: Arc::default(),
        };
        let proxy = this.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(target) else { return };
                let (mut back, mut to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut back, &mut to);
                    let _ = to.shutdown(Shutdown::Both);
                });
                let proxy = proxy.clone();
                std::thread::spawn(move || proxy.pass(near, far));
            }
        });
        this
    }

    fn pass(&self, mut near: TcpStream, far: TcpStream) -> Option<()> {
        let connection = Arc::new(Mutex::new(ProxyConnection { to: far, held: Vec::new() }));
        self.connections.lock().unwrap().push(connection.clone());
        loop {
            let mut head = [0; HEAD_BYTES];
            if near.read_exact(&mut head).is_err() {
                let _ = connection.lock().unwrap().to.shutdown(Shutdown::Both);
                return None;
            }
            let Head { kind, body: bytes, data, .. } = Head::from_bytes(&head, "a mount").ok()?;
            let mut rest = vec![0; (bytes + data) as usize];
            near.read_exact(&mut rest).ok()?;
            let request = (kind == FrameKind::Request).then(|| unpack(&rest[..bytes as usize], "a mount"));
            let frame = [&head[..], &rest].concat();
            let is_held = self.rule.lock().unwrap()(request.and_then(Result::ok).as_ref());
            let mut connection = connection.lock().unwrap();
            if is_held { connection.held.push(frame) } else { connection.to.write_all(&frame).ok()? }
        }
    }

    fn hold(&self, rule: Rule) {
        *self.rule.lock().unwrap() = rule;
    }

    fn held(&self) -> usize {
        self.connections.lock().unwrap().iter().map(|connection| connection.lock().unwrap().held.len()).sum()
    }

    /// Forwards the held frames and all later ones.
    fn release(&self) {
        self.hold(|_| false);
        for connection in &*self.connections.lock().unwrap() {
            let ProxyConnection { to, held } = &mut *connection.lock().unwrap();
            held.drain(..).for_each(|frame| drop(to.write_all(&frame)));
        }
    }
}

/// Run by the test below: an ordinary user looks up many names concurrently.
#[test]
fn lookup_caller() {
    let Some(dir) = subtest_dir() else { return };
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
fn unanswered_lookups_block_nothing_else() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    let bed = Bed::folder();
    let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
    let address = acceptor.local().unwrap();
    let options = ServerOptions::new(&bed.dir.join("root"), None);
    let _target = Target::start(options, vec![Box::new(acceptor)]).unwrap();
    let proxy = HoldingProxy::new(address);
    // No connection is closed for not answering.
    let options = ClientOptions { stall: 4 * LONG, give_up: 4 * LONG, ..ClientOptions::new(None) };
    let connector = TcpConnector::new(&proxy.address.to_string()).unwrap();
    let tree = RemoteTree::connect(Box::new(connector), options).unwrap();
    let options = MountOptions::of_target(&bed.mount(), tree);
    let Some(bed) = bed.mounted(options) else { return };
    // It does not answer this user's lookups.
    proxy.hold(|request| matches!(request, Some(Request::Lookup { by, .. }) if by.uid == ATTACKER));
    let lookup_caller = subtest("silent::lookup_caller", &bed).stdout(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while proxy.held() < SESSION_THREADS {
        assert!(start.elapsed() < LONG, "{} lookups are in flight", proxy.held());
        std::thread::sleep(Duration::from_millis(2));
    }
    // By another thread, which waits forever if this fails.
    let (tx, rx) = channel();
    let (path, file, status) = (bed.mount(), bed.file(), bed.mount().join(onehop_serve::STATS));
    std::thread::spawn(move || {
        tx.send((missing_names_are_not_found(&path), std::fs::read(file).map(|bytes| bytes.len())))
    });
    let (found, bytes) = rx.recv_timeout(LOOKUP_TIMEOUT).expect("another user's calls wait");
    assert!(found && bytes.unwrap() == 6_000_011);
    // Now it answers nothing.
    proxy.hold(|_| true);
    let lookups: Vec<_> = (0..LOOKUPS)
        .map(|number| {
            let name = bed.mount().join(format!("nothing {number}"));
            std::thread::spawn(move || std::fs::symlink_metadata(name).is_err())
        })
        .collect();
    // By now the kernel has dropped its cached attributes of the root.
    std::thread::sleep(Duration::from_secs(2));
    let (tx, rx) = channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        let read = File::open(status).and_then(|mut file| file.read_to_string(&mut text));
        tx.send(read.map(|_| text))
    });
    let report = rx.recv_timeout(LOOKUP_TIMEOUT).expect("the mount's status waits for the target");
    assert!(report.unwrap().contains("\"remote\""));
    proxy.release();
    assert!(lookups.into_iter().all(|lookup| lookup.join().unwrap()));
    let output = wait(lookup_caller);
    assert!(output.status.success(), "{output:?}");
}
