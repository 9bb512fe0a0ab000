//! Concurrent requests of one client: none waits for the answer to another.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use onehop_os::{HostMem, StopSignal};
use onehop_target::client;
use onehop_target::tcp::TcpAcceptor;
use onehop_target::transport::{Acceptor, Incoming, Link, MemoryRange, Outgoing, checksum};
use onehop_target::tree::{Folder, FolderRules, Tree};
use onehop_target::wire::{
    FrameKind, HEAD_BYTES, Head, HelloBack, ROOT, Reply, Request, Welcome, pack, unpack,
};
use rustix::io::Errno;

use crate::bed::{BOTH, Bed, LONG, ME, READ, connect, options};

const TOGETHER: usize = 16;

/// The folder that a target played by a test serves.
fn folder_of(bed: &Bed) -> Folder {
    let root = std::fs::File::open(bed.root()).unwrap();
    Folder::new(root.into(), FolderRules { for_others: false, most_open: 8 }).unwrap()
}

fn listening() -> (TcpAcceptor, SocketAddr) {
    let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
    let address = acceptor.local().unwrap();
    (acceptor, address)
}

fn receive(link: &dyn Link) -> Incoming {
    let mut nowhere = |_: &Head, _: &[u8]| Ok(None);
    link.receive(LONG, LONG, &mut nowhere).unwrap().expect("the client sends nothing")
}

fn send<T: serde::Serialize>(link: &dyn Link, kind: FrameKind, id: u64, message: &T) {
    let body = pack(message).unwrap();
    link.send(&Outgoing { head: Head::new(kind, id, &body), body: &body, data: None }, LONG).unwrap();
}

const WELCOME: Welcome =
    Welcome { session: [1; 16], boot: [1; 16], credits: 64, lease_ms: 60_000, read_only: false };

fn let_in(link: &dyn Link) {
    receive(link);
    send(link, FrameKind::HelloBack, 0, &HelloBack { exchange: None });
    receive(link);
    send(link, FrameKind::Welcome, 0, &WELCOME);
}

/// A target that answers links only when all requests have arrived, the last one first.
fn answer_late(link: &dyn Link, folder: &Folder) {
    let_in(link);
    let mut waiting = Vec::new();
    while waiting.len() < TOGETHER {
        let frame = receive(link);
        if frame.head.kind == FrameKind::Ping {
            send(link, FrameKind::Pong, 0, &());
            continue;
        }
        match unpack(&frame.body, "the client").unwrap() {
            Request::Attr { .. } => {
                send(link, FrameKind::Reply, frame.head.id, &Reply::Attr(folder.attr(ROOT, 0).unwrap()));
            }
            Request::Xattr { .. } => {
                let errno = Errno::NODATA.raw_os_error();
                send(link, FrameKind::Reply, frame.head.id, &Reply::Failed { errno });
            }
            Request::ReadLink { .. } => waiting.push(frame.head.id),
            other => panic!("{other:?}"),
        }
    }
    for id in waiting.into_iter().rev() {
        send(link, FrameKind::Reply, id, &Reply::Text(id.to_string().into_bytes()));
    }
    // Until the client has everything and disconnects.
    let mut nowhere = |_: &Head, _: &[u8]| Ok(None);
    while matches!(link.receive(LONG, LONG, &mut nowhere), Ok(Some(frame)) if frame.head.kind != FrameKind::Goodbye)
    {
    }
}

#[test]
fn requests_do_not_wait_for_each_other() {
    let bed = Bed::new();
    let (folder, (acceptor, address)) = (folder_of(&bed), listening());
    std::thread::scope(|scope| {
        scope.spawn(|| answer_late(&*acceptor.accept(LONG).unwrap().unwrap(), &folder));
        let give_up = LONG / 2;
        let stall = Duration::from_secs(20);
        let tree =
            connect(address, client::ClientOptions { key: None, lanes: 1, give_up, stall, ..options() });
        let mut answers = std::thread::scope(|askers| {
            let ask = |_| askers.spawn(|| tree.read_link(ROOT, 0).unwrap());
            let asked: Vec<_> = (0..TOGETHER).map(ask).collect();
            asked.into_iter().map(|asker| asker.join().unwrap()).collect::<Vec<_>>()
        });
        answers.sort();
        answers.dedup();
        assert_eq!(answers.len(), TOGETHER, "the answers differ");
    });
}

/// A target that answers only what is needed to mount it and open a file, until it is signalled. Then it answers all
/// requests, the reads with data.
fn answer_when_signalled(link: &dyn Link, folder: &Folder, signalled: &mpsc::Receiver<()>) {
    let_in(link);
    let mut nowhere = |_: &Head, _: &[u8]| Ok(None);
    let (mut waiting, mut is_signalled) = (Vec::new(), false);
    loop {
        is_signalled |= signalled.try_recv().is_ok();
        let ready = if is_signalled { std::mem::take(&mut waiting) } else { Vec::new() };
        for (id, data) in ready {
            let reply =
                if data == 0 { Reply::Text(b"text".into()) } else { Reply::Count { bytes: data, crc: 0 } };
            let body = pack(&reply).unwrap();
            let mem = HostMem::anonymous(4096).unwrap();
            let data = MemoryRange { mem, at: 0, len: data as usize };
            let mut head = Head::new(FrameKind::Reply, id, &body);
            (head.data, head.data_crc) = (data.len as u32, checksum(&data).unwrap());
            let data = Some(&data).filter(|data| data.len > 0);
            link.send(&Outgoing { head, body: &body, data }, LONG).unwrap();
        }
        let Ok(frame) = link.receive(Duration::from_millis(10), LONG, &mut nowhere) else { return };
        let Some(frame) = frame else { continue };
        let id = frame.head.id;
        match frame.head.kind {
            FrameKind::Goodbye => return,
            FrameKind::Ping => {
                send(link, FrameKind::Pong, 0, &());
                continue;
            }
            _ => {}
        }
        match unpack(&frame.body, "the client").unwrap() {
            Request::Attr { .. } => {
                send(link, FrameKind::Reply, id, &Reply::Attr(folder.attr(ROOT, 0).unwrap()))
            }
            Request::Open { .. } => {
                send(link, FrameKind::Reply, id, &Reply::Opened { file: 1, has_name: true })
            }
            Request::Read { len, .. } => waiting.push((id, len)),
            Request::ReadLink { .. } => waiting.push((id, 0)),
            _ => send(link, FrameKind::Reply, id, &Reply::Done),
        }
    }
}

#[test]
fn a_cancelled_request_does_not_affect_others() {
    let bed = Bed::new();
    let (folder, (acceptor, address)) = (folder_of(&bed), listening());
    let (signal, signalled) = mpsc::channel();
    std::thread::scope(|scope| {
        // With one connection: if it were closed, nothing would be answered.
        scope.spawn(move || {
            answer_when_signalled(&*acceptor.accept(LONG).unwrap().unwrap(), &folder, &signalled)
        });
        let give_up = Duration::from_secs(8);
        let stall = Duration::from_secs(20);
        let tree =
            connect(address, client::ClientOptions { key: None, lanes: 1, give_up, stall, ..options() });
        let file = tree.open(ROOT, READ, &ME).unwrap();
        std::thread::scope(|askers| {
            let first = askers.spawn(|| file.read_bytes(&mut [0; 4096], 0));
            std::thread::sleep(give_up / 2);
            let second = askers.spawn(|| tree.read_link(ROOT, 0));
            assert!(first.join().unwrap().is_err());
            signal.send(()).unwrap();
            assert_eq!(second.join().unwrap().unwrap(), b"text");
        });
        // The late answer had no effect.
        assert_eq!(file.read_bytes(&mut [1; 4096], 0).unwrap(), 4096);
        assert_eq!(tree.report().reconnects, 0);
    });
}

/// A target that answers neither writes nor releases. Reports each request.
fn answer_some(link: &dyn Link, folder: &Folder, asked: &mpsc::Sender<(u64, Request)>) {
    let_in(link);
    let mut nowhere = |_: &Head, _: &[u8]| Ok(None);
    while let Ok(frame) = link.receive(LONG, LONG, &mut nowhere) {
        let Some(frame) = frame else { continue };
        let id = frame.head.id;
        match frame.head.kind {
            FrameKind::Goodbye => return,
            FrameKind::Ping => {
                send(link, FrameKind::Pong, 0, &());
                continue;
            }
            _ => {}
        }
        let request = unpack(&frame.body, "the client").unwrap();
        match &request {
            Request::Attr { .. } => {
                send(link, FrameKind::Reply, id, &Reply::Attr(folder.attr(ROOT, 0).unwrap()))
            }
            Request::Open { .. } => {
                send(link, FrameKind::Reply, id, &Reply::Opened { file: id, has_name: true })
            }
            Request::Write { .. } | Request::Release { .. } => {}
            _ => send(link, FrameKind::Reply, id, &Reply::Done),
        }
        asked.send((id, request)).unwrap();
    }
}

#[test]
fn a_cancelled_write_is_reported_despite_older_requests() {
    let bed = Bed::new();
    let (folder, (acceptor, address)) = (folder_of(&bed), listening());
    let (ask, asked) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || answer_some(&*acceptor.accept(LONG).unwrap().unwrap(), &folder, &ask));
        let (give_up, stall) = (Duration::from_secs(3), Duration::from_secs(20));
        let tree =
            connect(address, client::ClientOptions { key: None, lanes: 1, give_up, stall, ..options() });
        let next = |is_it: &dyn Fn(&Request) -> bool| loop {
            let (id, request) = asked.recv_timeout(LONG).expect("the target was not notified");
            if is_it(&request) {
                return (id, request);
            }
        };
        let file = tree.open(ROOT, BOTH, &ME).unwrap();
        drop(tree.open(ROOT, READ, &ME).unwrap());
        // The release stays outstanding for the whole session, and is older than the write.
        let (older, _) = next(&|request| matches!(request, Request::Release { .. }));
        assert!(file.write_bytes(b"late", 0).is_err());
        let (write, _) = next(&|request| matches!(request, Request::Write { .. }));
        // Without any further request.
        let (_, list) = next(&|request| matches!(request, Request::Outstanding { .. }));
        let Request::Outstanding { below, ids, unheard } = list else { unreachable!() };
        assert!(older < write && write < below, "{older} {write} {below}");
        assert!(ids.contains(&older) && !ids.contains(&write) && unheard == [write], "{ids:?} {unheard:?}");
    });
}

/// A target with one connection that sends half of a read's data and reports that.
fn answer_in_part(listener: &TcpListener, folder: &Folder, begun: &mpsc::Sender<()>) {
    let (mut stream, _) = listener.accept().unwrap();
    let hear = |mut stream: &TcpStream| {
        let mut bytes = [0; HEAD_BYTES];
        stream.read_exact(&mut bytes).ok()?;
        let head = Head::from_bytes(&bytes, "the client").unwrap();
        let mut body = vec![0; head.body as usize];
        stream.read_exact(&mut body).ok()?;
        Some((head, body))
    };
    let framed = |head: Head, body: &[u8]| [&head.to_bytes()[..], body].concat();
    while let Some((head, body)) = hear(&stream) {
        let (kind, body) = match head.kind {
            FrameKind::Hello => (FrameKind::HelloBack, pack(&HelloBack { exchange: None })),
            FrameKind::Join => (FrameKind::Welcome, pack(&WELCOME)),
            FrameKind::Ping => (FrameKind::Pong, pack(&())),
            FrameKind::Goodbye => return,
            _ => match unpack(&body, "the client").unwrap() {
                Request::Attr { .. } => (FrameKind::Reply, pack(&Reply::Attr(folder.attr(ROOT, 0).unwrap()))),
                Request::Open { .. } => (FrameKind::Reply, pack(&Reply::Opened { file: 1, has_name: true })),
                Request::Read { len, .. } => {
                    let body = pack(&Reply::Count { bytes: len, crc: 0 }).unwrap();
                    let head = Head { data: len, ..Head::new(FrameKind::Reply, head.id, &body) };
                    stream.write_all(&framed(head, &body)).unwrap();
                    stream.write_all(&vec![7; len as usize / 2]).unwrap();
                    begun.send(()).unwrap();
                    continue;
                }
                _ => (FrameKind::Reply, pack(&Reply::Done)),
            },
        };
        let body = body.unwrap();
        if stream.write_all(&framed(Head::new(kind, head.id, &body), &body)).is_err() {
            return;
        }
    }
}

#[test]
fn a_request_to_stop_ends_a_read_with_partial_data() {
    let bed = Bed::new();
    let folder = folder_of(&bed);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (begin, begun) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || answer_in_part(&listener, &folder, &begin));
        let (give_up, stop) = (Duration::from_secs(5), StopSignal::default());
        // The maintenance thread waits for the second connection all the time.
        let options = client::ClientOptions {
            key: None,
            lanes: 2,
            connect: 2 * LONG,
            stall: 2 * LONG,
            give_up,
            stop: stop.clone(),
            ..options()
        };
        let tree = connect(address, options);
        let file = tree.open(ROOT, READ, &ME).unwrap();
        std::thread::scope(|readers| {
            let reader = readers.spawn(|| file.read_bytes(&mut vec![0; 1 << 20], 0));
            begun.recv_timeout(LONG).unwrap();
            // The lane's reader is writing to its memory, so the read cannot return before that ends.
            std::thread::sleep(give_up + Duration::from_secs(1));
            assert!(!reader.is_finished());
            let start = Instant::now();
            stop.set();
            assert!(reader.join().unwrap().is_err());
            assert!(start.elapsed() < LONG, "{:?}", start.elapsed());
        });
    });
}
