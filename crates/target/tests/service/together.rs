//! Requests of one client are under way together: none waits for the answer to another.

use std::sync::mpsc;
use std::time::Duration;

use onehop_os::HostMem;
use onehop_target::client;
use onehop_target::tcp::TcpAcceptor;
use onehop_target::transport::{Acceptor, Incoming, Link, Outgoing, Stretch, checksum};
use onehop_target::tree::{Folder, FolderRules, Tree};
use onehop_target::wire::{FrameKind, Head, HelloBack, ROOT, Reply, Request, Welcome, pack, unpack};

use crate::bed::{Bed, LONG, ME, READ, connect, options};

const TOGETHER: usize = 16;

fn receive(link: &dyn Link) -> Incoming {
    let mut nowhere = |_: &Head, _: &[u8]| Ok(None);
    link.receive(LONG, LONG, &mut nowhere).unwrap().expect("the client says nothing")
}

fn say<T: serde::Serialize>(link: &dyn Link, kind: FrameKind, id: u64, message: &T) {
    let body = pack(message).unwrap();
    link.send(&Outgoing { head: Head::new(kind, id, &body), body: &body, data: None }, LONG).unwrap();
}

/// A target that says at once what its folder is, and what links say only when all have asked: the last one first.
fn answer_late(link: &dyn Link, folder: &Folder) {
    receive(link);
    say(link, FrameKind::HelloBack, 0, &HelloBack { exchange: None });
    receive(link);
    let welcome =
        Welcome { session: [1; 16], boot: [1; 16], credits: 64, lease_ms: 60_000, read_only: false };
    say(link, FrameKind::Welcome, 0, &welcome);
    let mut waiting = Vec::new();
    while waiting.len() < TOGETHER {
        let frame = receive(link);
        if frame.head.kind == FrameKind::Ping {
            say(link, FrameKind::Pong, 0, &());
            continue;
        }
        match unpack(&frame.body, "the client").unwrap() {
            Request::Attr { .. } => {
                say(link, FrameKind::Reply, frame.head.id, &Reply::Attr(folder.attr(ROOT).unwrap()));
            }
            Request::ReadLink { .. } => waiting.push(frame.head.id),
            other => panic!("{other:?}"),
        }
    }
    for id in waiting.into_iter().rev() {
        say(link, FrameKind::Reply, id, &Reply::Text(id.to_string().into_bytes()));
    }
    // Until the client goes, with a word or without, so that it has all of it.
    let mut nowhere = |_: &Head, _: &[u8]| Ok(None);
    while matches!(link.receive(LONG, LONG, &mut nowhere), Ok(Some(frame)) if frame.head.kind != FrameKind::Goodbye)
    {
    }
}

#[test]
fn requests_do_not_wait_for_each_other() {
    let bed = Bed::new();
    let root = std::fs::File::open(bed.root()).unwrap();
    let folder = Folder::new(root.into(), FolderRules { for_others: false, most_open: 8 }).unwrap();
    let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
    let address = acceptor.local().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| answer_late(&*acceptor.accept(LONG).unwrap().unwrap(), &folder));
        let give_up = LONG / 2;
        let stall = Duration::from_secs(20);
        let tree =
            connect(address, client::ClientOptions { key: None, lanes: 1, give_up, stall, ..options() });
        let mut said = std::thread::scope(|askers| {
            let ask = |_| askers.spawn(|| tree.read_link(ROOT).unwrap());
            let asked: Vec<_> = (0..TOGETHER).map(ask).collect();
            asked.into_iter().map(|asker| asker.join().unwrap()).collect::<Vec<_>>()
        });
        said.sort();
        said.dedup();
        assert_eq!(said.len(), TOGETHER, "each has its own answer");
    });
}

/// A target that answers nothing but what it needs to be mounted and to open a file, until it is told to. Then it answers all that was asked
/// for, the reads with data.
fn answer_when_told(link: &dyn Link, folder: &Folder, told: &mpsc::Receiver<()>) {
    receive(link);
    say(link, FrameKind::HelloBack, 0, &HelloBack { exchange: None });
    receive(link);
    let welcome =
        Welcome { session: [1; 16], boot: [1; 16], credits: 64, lease_ms: 60_000, read_only: false };
    say(link, FrameKind::Welcome, 0, &welcome);
    let mut nowhere = |_: &Head, _: &[u8]| Ok(None);
    let (mut waiting, mut is_told) = (Vec::new(), false);
    loop {
        is_told |= told.try_recv().is_ok();
        let ready = if is_told { std::mem::take(&mut waiting) } else { Vec::new() };
        for (id, data) in ready {
            let reply =
                if data == 0 { Reply::Text(b"text".into()) } else { Reply::Count { bytes: data, crc: 0 } };
            let body = pack(&reply).unwrap();
            let mem = HostMem::anonymous(4096).unwrap();
            let data = Stretch { mem, at: 0, len: data as usize };
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
                say(link, FrameKind::Pong, 0, &());
                continue;
            }
            _ => {}
        }
        match unpack(&frame.body, "the client").unwrap() {
            Request::Attr { .. } => say(link, FrameKind::Reply, id, &Reply::Attr(folder.attr(ROOT).unwrap())),
            Request::Open { .. } => say(link, FrameKind::Reply, id, &Reply::Opened { file: 1 }),
            Request::Read { len, .. } => waiting.push((id, len)),
            Request::ReadLink { .. } => waiting.push((id, 0)),
            _ => say(link, FrameKind::Reply, id, &Reply::Done),
        }
    }
}

#[test]
fn a_request_that_is_given_up_costs_others_nothing() {
    let bed = Bed::new();
    let root = std::fs::File::open(bed.root()).unwrap();
    let folder = Folder::new(root.into(), FolderRules { for_others: false, most_open: 8 }).unwrap();
    let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
    let address = acceptor.local().unwrap();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        // There is one connection: were it ended, nothing would be answered any more.
        scope.spawn(move || answer_when_told(&*acceptor.accept(LONG).unwrap().unwrap(), &folder, &told));
        let give_up = Duration::from_secs(8);
        let stall = Duration::from_secs(20);
        let tree =
            connect(address, client::ClientOptions { key: None, lanes: 1, give_up, stall, ..options() });
        let file = tree.open(ROOT, READ, &ME).unwrap();
        std::thread::scope(|askers| {
            let first = askers.spawn(|| file.read_bytes(&mut [0; 4096], 0));
            std::thread::sleep(give_up / 2);
            let second = askers.spawn(|| tree.read_link(ROOT));
            assert!(first.join().unwrap().is_err());
            tell.send(()).unwrap();
            assert_eq!(second.join().unwrap().unwrap(), b"text");
        });
        // The answer that came late has hurt nobody.
        assert_eq!(file.read_bytes(&mut [1; 4096], 0).unwrap(), 4096);
        assert_eq!(tree.report().reconnects, 0);
    });
}
