//! A relay without the key that changes, repeats, drops, reorders, cuts and forges data: each attack is detected, and
//! has no effect.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_target::client::{self, RemoteTree};
use onehop_target::server::{self, Target};
use onehop_target::tcp::TcpConnector;
use onehop_target::tree::{OpenFile, Tree};
use onehop_target::wire::{Caller, FrameKind, Head, Hello, HelloBack, ROOT, Request, pack};
use rustix::io::Errno;

use crate::bed::{BOTH, Bed, LONG, ME, connect, name, options, start};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Up,
    Down,
}

/// An attack on the next data from a socket.
#[derive(Clone, PartialEq, Debug)]
enum Attack {
    /// Flips a bit of the byte at this fraction of the data.
    Flip(f64),
    Repeat,
    Drop,
    /// Sends the data after the data that follows it.
    Swap,
    /// Drops the last bytes.
    Cut(usize),
    /// Inserts bytes before the data.
    Insert(Vec<u8>),
    /// Replaces the data.
    Replace(Vec<u8>),
}

#[derive(Default)]
struct Plan {
    next: Mutex<Option<(Direction, Attack)>>,
    over: AtomicBool,
    /// The data of each connection, in both directions.
    seen: Mutex<Vec<[Vec<u8>; 2]>>,
}

struct Relay {
    address: SocketAddr,
    plan: Arc<Plan>,
}

impl Relay {
    fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, plan) = (listener.local_addr().unwrap(), Arc::new(Plan::default()));
        listener.set_nonblocking(true).unwrap();
        let shared = plan.clone();
        std::thread::spawn(move || {
            while !shared.over.load(Ordering::Acquire) {
                match listener.accept() {
                    Ok((near, _)) => carry(near, to, &shared),
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        });
        Self { address, plan }
    }

    fn plan(&self, direction: Direction, attack: Attack) {
        *self.plan.next.lock().unwrap() = Some((direction, attack));
    }

    fn is_done(&self) -> bool {
        self.plan.next.lock().unwrap().is_none()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.plan.over.store(true, Ordering::Release);
    }
}

fn carry(near: TcpStream, to: SocketAddr, plan: &Arc<Plan>) {
    let Ok(far) = TcpStream::connect(to) else { return };
    near.set_nonblocking(false).unwrap();
    let number = {
        let mut seen = plan.seen.lock().unwrap();
        seen.push(Default::default());
        seen.len() - 1
    };
    for (direction, from, to) in
        [(Direction::Up, near.try_clone(), far.try_clone()), (Direction::Down, Ok(far), Ok(near))]
    {
        let (mut from, mut to, plan) = (from.unwrap(), to.unwrap(), plan.clone());
        std::thread::spawn(move || {
            let _ = pass(direction, number, &mut from, &mut to, &plan);
            let _ = from.shutdown(std::net::Shutdown::Both);
            let _ = to.shutdown(std::net::Shutdown::Both);
        });
    }
}

/// The next data from a socket; empty at its end.
fn some(from: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; 65_536];
    let count = from.read(&mut bytes)?;
    bytes.truncate(count);
    Ok(bytes)
}

fn pass(
    direction: Direction,
    number: usize,
    from: &mut TcpStream,
    to: &mut TcpStream,
    plan: &Plan,
) -> std::io::Result<()> {
    loop {
        let mut bytes = some(from)?;
        if bytes.is_empty() {
            return Ok(());
        }
        plan.seen.lock().unwrap()[number][usize::from(direction == Direction::Down)]
            .extend_from_slice(&bytes);
        let attack = plan.next.lock().unwrap().take_if(|(chosen, _)| *chosen == direction);
        match attack.map(|(_, attack)| attack) {
            None => {}
            Some(Attack::Flip(part)) => {
                let at = ((bytes.len() - 1) as f64 * part) as usize;
                bytes[at] ^= 0x20;
            }
            Some(Attack::Repeat) => to.write_all(&bytes)?,
            Some(Attack::Drop) => bytes.clear(),
            Some(Attack::Swap) => {
                let after = some(from)?;
                if after.is_empty() {
                    // Nothing followed, so nothing was swapped: try again with the next connection.
                    *plan.next.lock().unwrap() = Some((direction, Attack::Swap));
                    return Ok(());
                }
                to.write_all(&after)?;
            }
            Some(Attack::Cut(count)) => bytes.truncate(bytes.len().saturating_sub(count)),
            Some(Attack::Insert(more)) => to.write_all(&more)?,
            Some(Attack::Replace(others)) => bytes = others,
        }
        to.write_all(&bytes)?;
    }
}

fn plain(kind: FrameKind, id: u64, message: &impl serde::Serialize) -> Vec<u8> {
    let body = pack(message).unwrap();
    [&Head::new(kind, id, &body).to_bytes()[..], &body].concat()
}

/// An unencrypted request to remove the file `keep`.
fn removal() -> Vec<u8> {
    let by = Caller::ROOT;
    plain(FrameKind::Request, 1000, &Request::Remove { parent: ROOT, name: name("keep"), folder: false, by })
}

/// One connection, and short timeouts.
fn quick() -> client::ClientOptions {
    let stall = Duration::from_millis(400);
    client::ClientOptions { lanes: 1, stall, connect: Duration::from_secs(2), give_up: LONG, ..options() }
}

const LEN: usize = 5000;

struct Scene {
    bed: Bed,
    target: Target,
    relay: Relay,
}

impl Scene {
    fn new(of: impl FnOnce(server::ServerOptions) -> server::ServerOptions) -> Self {
        let bed = Bed::new();
        std::fs::write(bed.root().join("keep"), "kept").unwrap();
        let (target, address) = start(of(bed.options()), "127.0.0.1:0");
        let relay = Relay::new(address);
        Self { bed, target, relay }
    }
}

/// Writes and reads until the attack was made and detected. Checks all data that was acknowledged.
fn until_detected(scene: &Scene, tree: &RemoteTree, file: &dyn OpenFile, direction: Direction) {
    let count = || match direction {
        Direction::Up => scene.target.report().forged,
        Direction::Down => tree.report().forged,
    };
    let (begun, before) = (Instant::now(), count());
    let mut turn = 0_u32;
    while !scene.relay.is_done() || count() == before {
        assert!(begun.elapsed() < LONG, "{:?} {:?}", scene.target.report(), tree.report());
        turn += 1;
        let wrote = turn.to_le_bytes().repeat(LEN / 4);
        assert_eq!(file.write_bytes(&wrote, 0).unwrap(), LEN);
        let mut seen = vec![0; LEN];
        assert_eq!(file.read_bytes(&mut seen, 0).unwrap(), LEN);
        assert!(seen == wrote, "turn {turn}: the data differs from what was written");
    }
    assert_eq!(count(), before + 1, "the attack closed one connection");
}

#[test]
fn attacks_by_a_relay_are_detected_and_have_no_effect() {
    let scene = Scene::new(|options| options);
    let tree = connect(scene.relay.address, quick());
    let (_, file) = tree.create(ROOT, &name("data"), 0o600, BOTH, true, &ME).unwrap();
    file.write_bytes(&[1; LEN], 0).unwrap();
    // Data of an earlier connection, after its key exchange.
    let [up, down] = scene.relay.plan.seen.lock().unwrap()[0].clone();
    let earlier = |direction| match direction {
        Direction::Up => up[up.len() - LEN..].to_vec(),
        Direction::Down => down[down.len() - 64..].to_vec(),
    };
    for direction in [Direction::Up, Direction::Down] {
        for attack in [
            Attack::Flip(0.0),
            Attack::Flip(0.01),
            Attack::Flip(0.5),
            Attack::Flip(1.0),
            Attack::Repeat,
            Attack::Drop,
            Attack::Swap,
            Attack::Cut(1),
            Attack::Cut(40),
            Attack::Insert(removal()),
            Attack::Insert(vec![0; 64]),
            Attack::Insert(earlier(direction)),
        ] {
            println!("{direction:?} {:.60}", format!("{attack:?}"));
            scene.relay.plan(direction, attack);
            until_detected(&scene, &tree, &*file, direction);
        }
    }
    assert_eq!(tree.report().sessions_lost, 0);
    assert_eq!(std::fs::read(scene.bed.root().join("keep")).unwrap(), b"kept");
}

#[test]
fn without_a_key_a_relay_can_insert_requests() {
    // This shows that the attacks above would work.
    let scene = Scene::new(|options| server::ServerOptions { key: None, ..options });
    let tree = connect(scene.relay.address, client::ClientOptions { key: None, ..quick() });
    scene.relay.plan(Direction::Up, Attack::Insert(removal()));
    let begun = Instant::now();
    while scene.bed.root().join("keep").exists() {
        assert!(begun.elapsed() < LONG);
        let _ = tree.attr(ROOT, 0);
    }
    assert_eq!(tree.lookup(ROOT, &name("keep"), &ME).err(), Some(Errno::NOENT));
}

#[test]
fn a_relay_cannot_read_data() {
    let scene = Scene::new(|options| options);
    let tree = connect(scene.relay.address, quick());
    let secret = b"that nobody but the two of us is to know";
    let (_, file) = tree.create(ROOT, &name("a-telling-name"), 0o600, BOTH, true, &ME).unwrap();
    file.write_bytes(secret, 0).unwrap();
    let mut seen = [0; 40];
    file.read_bytes(&mut seen, 0).unwrap();
    assert_eq!(seen, *secret);
    let all: Vec<u8> = scene.relay.plan.seen.lock().unwrap().concat().concat();
    for text in [&secret[..8], b"telling"] {
        assert!(!all.windows(text.len()).any(|part| part == text));
    }
    assert_eq!((tree.report().encrypted, tree.report().forged), ("all", 0));
}

#[test]
fn recorded_connections_cannot_be_replayed() {
    let scene = Scene::new(|options| options);
    let tree = connect(scene.relay.address, quick());
    let (_, file) = tree.create(ROOT, &name("log"), 0o600, BOTH, true, &ME).unwrap();
    file.append_bytes(b"once").unwrap();
    tree.remove(ROOT, &name("keep"), false, &ME).unwrap();
    drop((file, tree));
    std::fs::write(scene.bed.root().join("keep"), "again").unwrap();
    let [up, _] = scene.relay.plan.seen.lock().unwrap()[0].clone();
    let mut stream = TcpStream::connect(scene.relay.address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(&up).unwrap();
    // The target closes the connection.
    let _ = stream.read_to_end(&mut Vec::new());
    // The target counts a connection after it has closed it.
    let begun = Instant::now();
    while scene.target.report().forged == 0 {
        assert!(begun.elapsed() < LONG, "{:?}", scene.target.report());
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert_eq!(scene.target.report().forged, 1, "{:?}", scene.target.report());
    assert_eq!(std::fs::read(scene.bed.root().join("keep")).unwrap(), b"again");
    assert_eq!(std::fs::read(scene.bed.root().join("log")).unwrap(), b"once");
}

#[test]
fn the_key_cannot_be_negotiated_away() {
    let scene = Scene::new(|options| options);
    let none = [
        (Direction::Up, plain(FrameKind::Hello, 0, &Hello { exchange: None }), "a key is required"),
        (Direction::Down, plain(FrameKind::HelloBack, 0, &HelloBack { exchange: None }), "has no key"),
        (
            Direction::Up,
            plain(FrameKind::Hello, 0, &Hello { exchange: Some(vec![9; 48]) }),
            "not the target's key",
        ),
        (
            Direction::Down,
            plain(FrameKind::HelloBack, 0, &HelloBack { exchange: Some(vec![9; 48]) }),
            "our key",
        ),
    ];
    for (direction, frame, expected) in none {
        scene.relay.plan(direction, Attack::Replace(frame));
        let connector = TcpConnector::new(&scene.relay.address.to_string()).unwrap();
        let error = RemoteTree::connect(Box::new(connector), quick()).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(scene.target.report().sessions, 0);
    assert!(connect(scene.relay.address, quick()).attr(ROOT, 0).is_ok());
}
