//! Clients that send invalid data harm only themselves.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use onehop_target::auth::Key;
use onehop_target::server;
use onehop_target::tcp::TcpConnector;
use onehop_target::transport::{Connector, MemoryRange, Outgoing};
use onehop_target::tree::Tree;
use onehop_target::wire::{
    Caller, FrameKind, Head, Hello, HelloBack, Join, Name, ROOT, Request, Xattr, pack, unpack,
};

use crate::bed::{BOTH, Bed, LONG, ME, connect, key, name, options, start};

/// A pseudo-random generator with a fixed seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 16
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.roll() as usize % from.len()].clone()
    }
}

fn frame(kind: FrameKind, id: u64, body: &[u8], data: &[u8]) -> Vec<u8> {
    let mut head = Head::new(kind, id, body);
    head.data = data.len() as u32;
    head.data_crc = crc32c::crc32c(data);
    [&head.to_bytes()[..], body, data].concat()
}

fn hostile_request(dice: &mut Dice) -> Request {
    let edges = [0, 1, 2, 3, ROOT, 4096, u64::MAX, i64::MAX as u64, 1 << 48];
    let (node, other, at) = (dice.pick(&edges), dice.pick(&edges), dice.pick(&edges));
    let len = dice.pick(&[0, 1, 4096, 4 << 20, u32::MAX]);
    let name = Name::new(&dice.pick(&[b"x".to_vec(), vec![0xff; 255], b"file".to_vec()])).unwrap();
    let by = dice.pick(&[
        Caller::ROOT,
        Caller { uid: u32::MAX, ..Caller::ROOT },
        Caller { uid: 21_001, gid: 21_001, groups: vec![len; 9000], umask: len },
    ]);
    match dice.roll() % 16 {
        0 => Request::Lookup { parent: node, name, by },
        1 => Request::Release { uid: len, files: vec![node, at], nodes: vec![(node, other), (other, at)] },
        2 => Request::List { node, from: at, by },
        3 => Request::Read { file: node, at, len, into: None },
        4 => Request::Write { file: node, at, len, from: None },
        5 => Request::Open { node, access: BOTH, again: at == 0, by },
        6 => Request::Rename { parent: node, name: name.clone(), to: other, new_name: name, flags: len, by },
        7 => Request::Outstanding { below: other, ids: vec![node, at, other], unheard: vec![at, node] },
        8 => Request::Allocate { file: node, mode: len, at, len: other },
        9 => Request::Seek { file: node, at, hole: true },
        10 => {
            let remote = onehop_target::wire::Remote { addr: at, len: other, keys: [len; 4] };
            Request::Read { file: node, at, len, into: Some(remote) }
        }
        11 => Request::Link { node, parent: other, name, by },
        12 => Request::Attr { node, uid: len },
        13 => Request::Append { file: node, len },
        14 => Request::Xattr { node, ask: Xattr::Get { name: vec![0xff; 300] }, by },
        _ => Request::Space { uid: 0 },
    }
}

/// The kind, number, body and data of a hostile frame.
fn hostile_frame(dice: &mut Dice, number: u64) -> (FrameKind, u64, Vec<u8>, Vec<u8>) {
    let id = dice.pick(&[number, number, number, 0, 5000, u64::MAX]);
    let body = pack(&hostile_request(dice)).unwrap();
    let data = vec![7; dice.pick(&[0, 0, 0, 1, 4096])];
    let kind = dice.pick(&[
        FrameKind::Request,
        FrameKind::Request,
        FrameKind::Request,
        FrameKind::Ping,
        FrameKind::Reply,
    ]);
    (kind, id, body, data)
}

/// A hostile client with the key: frames in any order, with false heads and lengths.
fn misbehave_with_the_key(address: SocketAddr, dice: &mut Dice) {
    let limit = Duration::from_millis(200);
    let Ok(link) = TcpConnector::new(&address.to_string()).unwrap().connect(0, limit) else { return };
    let send =
        |head, body: &[u8], data: Option<&MemoryRange>| link.send(&Outgoing { head, body, data }, limit);
    let send_plainly = |kind, body: &[u8]| send(Head::new(kind, 0, body), body, None).is_ok();
    let (exchange, message) = key().begin(&link.binding()).unwrap();
    if !send_plainly(FrameKind::Hello, &pack(&Hello { exchange: Some(message) }).unwrap()) {
        return;
    }
    let mut no_data = |_: &Head, _: &[u8]| Ok(None);
    let Ok(Some(back)) = link.receive(LONG, LONG, &mut no_data) else { return };
    let Ok(HelloBack { exchange: Some(answer) }) = unpack(&back.body, "the target") else { return };
    link.encrypt(&exchange.finish(&answer).unwrap());
    let session = dice.pick(&[None, None, None, Some([dice.0 as u8; 16])]);
    if !dice.roll().is_multiple_of(8) {
        send_plainly(FrameKind::Join, &pack(&Join { session, mount: [0; 16] }).unwrap());
    }
    for number in 0..100 {
        let (mut kind, id, body, data) = hostile_frame(dice, number);
        if dice.roll().is_multiple_of(64) {
            kind = dice.pick(&[FrameKind::Hello, FrameKind::Join, FrameKind::Welcome, FrameKind::Goodbye]);
        }
        let mut head = Head { data: data.len() as u32, ..Head::new(kind, id, &body) };
        match dice.roll() % 64 {
            0 => head.data = dice.pick(&[1, 4 << 20, (4 << 20) + 1, u32::MAX]),
            1 => head.body = dice.pick(&[0, 1, 64 << 10, (64 << 10) + 1, u32::MAX]),
            2 => head.done = dice.pick(&[id, id.wrapping_add(1), u64::MAX]),
            _ => {}
        }
        let mem = HostMem::anonymous(4096).unwrap();
        mem.write(0, &data).unwrap();
        let data = MemoryRange { mem, at: 0, len: data.len() };
        if send(head, &body, (data.len > 0).then_some(&data)).is_err() {
            break;
        }
    }
    // Half of them read the answers.
    if dice.roll().is_multiple_of(2) {
        while matches!(link.receive(limit, limit, &mut no_data), Ok(Some(_))) {}
    }
}

/// A hostile client without a key. Its connection may fail at any step.
fn misbehave(address: SocketAddr, dice: &mut Dice) {
    let Ok(mut stream) = TcpStream::connect(address) else { return };
    stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut send = |bytes: &[u8]| stream.write_all(bytes).is_ok();
    let hello = pack(&Hello { exchange: None }).unwrap();
    let join = pack(&Join { session: None, mount: [0; 16] }).unwrap();
    match dice.roll() % 8 {
        0 => {
            let garbage: Vec<u8> = (0..dice.roll() % 5000).map(|_| dice.roll() as u8).collect();
            send(&garbage);
        }
        1 => {
            // Stops in the middle of a head, a body or data.
            let whole = frame(FrameKind::Hello, 0, &hello, &[1; 100]);
            send(&whole[..dice.roll() as usize % whole.len()]);
        }
        2 => {
            let mut whole = frame(FrameKind::Hello, 0, &hello, b"");
            let place = dice.roll() as usize % whole.len();
            whole[place] ^= 1 << (dice.roll() % 8);
            send(&whole);
        }
        _ => {
            send(&frame(FrameKind::Hello, 0, &hello, b""));
            send(&frame(FrameKind::Join, 0, &join, b""));
            for number in 0..100 {
                let (kind, id, body, data) = hostile_frame(dice, number);
                let bytes = match dice.roll() % 5 {
                    0 => frame(kind, id, &body[..body.len() / 2], b""),
                    _ => frame(kind, id, &body, &data),
                };
                if !send(&bytes) {
                    break;
                }
            }
        }
    }
    // Half of them read the answers.
    if dice.roll().is_multiple_of(2) {
        let mut answer = [0; 4096];
        while matches!(stream.read(&mut answer), Ok(1..)) {}
    }
}

#[test]
fn invalid_data_does_not_affect_others() {
    does_not_affect_others(None, misbehave);
}

#[test]
fn invalid_data_with_the_key_does_not_affect_others() {
    does_not_affect_others(Some(key()), misbehave_with_the_key);
}

fn does_not_affect_others(key: Option<Key>, misbehave: fn(SocketAddr, &mut Dice)) {
    let bed = Bed::new();
    std::fs::write(bed.dir.join("outside"), "outside").unwrap();
    std::fs::write(bed.root().join("file"), vec![9; 100_000]).unwrap();
    let mut options_of = server::ServerOptions { key: key.clone(), ..bed.options() };
    options_of.limits.stall = Duration::from_secs(1);
    options_of.limits.handshake = Duration::from_secs(1);
    let (target, address) = start(options_of, "127.0.0.1:0");
    let tree = connect(address, onehop_target::client::ClientOptions { key, ..options() });
    let (_, file) = tree.create(ROOT, &name("honest"), 0o600, BOTH, true, &ME).unwrap();
    let seconds = std::env::var("ONEHOP_TEST_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    let start = Instant::now();
    let hostile: Vec<_> = (0..3)
        .map(|seed| {
            std::thread::spawn(move || {
                let (mut dice, mut lives) = (Dice(seed + 1), 0);
                while start.elapsed() < Duration::from_secs(seconds) {
                    misbehave(address, &mut dice);
                    lives += 1;
                }
                lives
            })
        })
        .collect();
    let mut turns = 0_u32;
    while hostile.iter().any(|thread| !thread.is_finished()) {
        let (wrote, mut read) = (turns.to_le_bytes().repeat(2000), vec![0; 8000]);
        assert_eq!(file.write_bytes(&wrote, 0).unwrap(), 8000);
        assert_eq!(file.read_bytes(&mut read, 0).unwrap(), 8000);
        assert_eq!(read, wrote);
        turns += 1;
    }
    let lives: u32 = hostile.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert!(turns > 0 && lives > 0);
    let report = target.report();
    println!("{lives} hostile connections, {turns} honest rounds: {report:?}");
    assert!(report.broken > 0, "{report:?}");
    // The honest connections were never closed.
    assert_eq!(tree.report().reconnects, 0, "{report:?}");
    assert_eq!(std::fs::read(bed.dir.join("outside")).unwrap(), b"outside");
    drop((file, tree));
    assert!(target.drain(LONG));
}

#[test]
fn stalled_and_silent_clients_are_disconnected() {
    let bed = Bed::new();
    let mut of = server::ServerOptions { key: None, ..bed.options() };
    (of.limits.handshake, of.limits.stall) = (Duration::from_millis(100), Duration::from_millis(100));
    of.limits.silence = Duration::from_millis(300);
    let (_target, address) = start(of, "127.0.0.1:0");
    let hello = frame(FrameKind::Hello, 0, &pack(&Hello { exchange: None }).unwrap(), b"");
    let join = frame(FrameKind::Join, 0, &pack(&Join { session: None, mount: [0; 16] }).unwrap(), b"");
    let half = [&hello[..], &join, &frame(FrameKind::Ping, 0, b"", b"")[..20]].concat();
    let silent = [&hello[..], &join].concat();
    for sent in [&b""[..], &hello[..10], &hello, &half, &silent] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(sent).unwrap();
        // The target closes the connection.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
}

#[test]
fn silent_connections_do_not_lock_others_out() {
    let bed = Bed::new();
    let (target, address) = bed.target();
    let hello = frame(
        FrameKind::Hello,
        0,
        &pack(&Hello { exchange: Some(key().begin(b"").unwrap().1) }).unwrap(),
        b"",
    );
    let silent = |number: usize| {
        let mut stream = TcpStream::connect(address).unwrap();
        if number.is_multiple_of(2) {
            let _ = stream.write_all(&hello);
        }
        stream
    };
    let _held: Vec<_> = (0..200).map(silent).collect();
    let begun = Instant::now();
    // Each lane is a connection.
    let tree = connect(address, options());
    while tree.report().connections < 2 {
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", tree.report());
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(target.report().refused >= 130, "{:?}", target.report());
}

#[test]
fn disconnected_clients_make_room_for_others() {
    let bed = Bed::new();
    let mut of = server::ServerOptions { key: None, ..bed.options() };
    of.limits.sessions = 3;
    let (target, address) = start(of, "127.0.0.1:0");
    let hello = frame(FrameKind::Hello, 0, &pack(&Hello { exchange: None }).unwrap(), b"");
    let join = frame(FrameKind::Join, 0, &pack(&Join { session: None, mount: [0; 16] }).unwrap(), b"");
    let here = connect(address, onehop_target::client::ClientOptions { key: None, ..options() });
    for _ in 0..10 {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(&[&hello[..], &join].concat()).unwrap();
        // A byte after the answer to the hello is the answer to the join.
        assert!(stream.read(&mut [0; 1]).unwrap() > 0);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let start = Instant::now();
    let late = connect(address, onehop_target::client::ClientOptions { key: None, ..options() });
    assert!(late.attr(ROOT, 0).is_ok() && here.attr(ROOT, 0).is_ok() && start.elapsed() < LONG);
    assert_eq!((target.report().sessions <= 3, here.report().sessions_lost), (true, 0));
}
