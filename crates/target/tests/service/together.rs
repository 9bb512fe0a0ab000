//! Requests of one client are under way together: none waits for the answer to another.

use std::time::Duration;

use onehop_target::client;
use onehop_target::tcp::TcpAcceptor;
use onehop_target::transport::{Acceptor, Incoming, Link, Outgoing};
use onehop_target::tree::{Folder, FolderRules, Tree};
use onehop_target::wire::{FrameKind, Head, HelloBack, ROOT, Reply, Request, Welcome, pack, unpack};

use crate::bed::{Bed, LONG, connect, options};

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
