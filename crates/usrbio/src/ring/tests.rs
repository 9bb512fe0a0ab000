//! Tests of both sides of a ring, and of the daemon's side with arbitrary memory.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::{Priority, RingName};

fn name(depth: i32, millis: u64) -> RingName {
    let timeout = Duration::from_millis(millis);
    RingName { read: true, depth, priority: Priority::Normal, timeout, flags: 0 }
}

fn ring(entries: i32, name: RingName) -> (Client, RingServer, HostMem) {
    let mem = HostMem::anonymous(bytes(entries).unwrap()).unwrap().slice(0..bytes(entries).unwrap()).unwrap();
    let server = RingServer::new(mem.clone(), name).unwrap();
    (Client::new(mem.clone()).unwrap(), server, mem)
}

fn request(n: u64) -> Request {
    Request { buffer: Id([n as u8; 16]), offset: n, inode: n + 1, at: n << 40, len: 4096, userdata: !n }
}

#[test]
fn sizes_are_those_of_3fs() {
    assert_eq!((bytes(64), bytes(1024)), (Some(10_384), Some(102_544)));
    assert_eq!((entries(10_384), entries(102_544)), (64, 1024));
    assert_eq!((bytes(0), bytes(-1), bytes(i32::MAX)), (None, None, None));
    assert_eq!((entries(0), entries(usize::MAX)), (0, i32::MAX));
}

#[test]
fn requests_arrive_and_complete() {
    let (client, server, _) = ring(4, name(0, 0));
    let (mut out, mut seen) = (Vec::new(), Vec::new());
    // A round takes seconds under Miri.
    let rounds = if cfg!(miri) { 4 } else { 30 };
    for round in 0..rounds {
        for n in 0..4 {
            client.prepare(&request(round * 4 + n)).unwrap();
        }
        assert!(matches!(client.prepare(&request(9)), Err(Error::Full)));
        let taken = server.take(Instant::now(), 3, &mut out);
        assert_eq!((taken.count, taken.more), (3, true));
        assert_eq!(server.take(Instant::now(), 3, &mut out).count, 1);
        for (n, entry) in out.drain(..).enumerate() {
            assert_eq!(entry.request, Some(request(round * 4 + n as u64)));
            server.complete(&[Done { index: entry.index, userdata: entry.userdata, result: -5 }]);
        }
        client.wait(Duration::from_secs(60));
        assert_eq!(client.take(&mut seen, 3).unwrap() + client.take(&mut seen, 9).unwrap(), 4);
        assert_eq!(client.take(&mut seen, 9).unwrap(), 0);
    }
    assert!(seen.iter().enumerate().all(|(n, done)| done.userdata == !(n as u64) && done.result == -5));
}

#[test]
fn depths_make_batches_and_timeouts_end_them() {
    let (client, server, _) = ring(8, name(3, 0));
    let (mut out, now) = (Vec::new(), Instant::now());
    for n in 0..8 {
        client.prepare(&request(n)).unwrap();
        let want = if n == 2 || n == 5 { 3 } else { 0 };
        assert_eq!(server.take(now, 100, &mut out).count, want, "{n}");
    }
    let (client, server, _) = ring(8, name(-3, 50));
    client.prepare(&request(0)).unwrap();
    let first = server.take(now, 100, &mut out);
    assert_eq!((first.count, first.due), (0, Some(now + Duration::from_millis(50))));
    assert_eq!(server.take(now + Duration::from_millis(49), 100, &mut out).count, 0);
    assert_eq!(server.take(now + Duration::from_millis(50), 100, &mut out).count, 1);
    (1..5).for_each(|n| assert!(client.prepare(&request(n)).is_ok()));
    assert_eq!(server.take(now, 100, &mut out).count, 4);
    // The timeout starts again.
    client.prepare(&request(5)).unwrap();
    assert_eq!(server.take(now + Duration::from_millis(60), 100, &mut out).count, 0);
}

#[test]
fn entries_are_taken_only_with_room_for_completions() {
    let (client, server, mem) = ring(4, name(0, 0));
    let mut out = Vec::new();
    (0..4).for_each(|n| assert!(client.prepare(&request(n)).is_ok()));
    assert_eq!(server.take(Instant::now(), 100, &mut out).count, 4);
    for entry in &out {
        server.complete(&[Done { index: entry.index, userdata: 0, result: 0 }]);
    }
    // The program has not taken completions, so further submissions must wait.
    mem.word(SUBMITTED).unwrap().store(2, Ordering::SeqCst);
    assert_eq!(server.take(Instant::now(), 100, &mut out).count, 0);
    assert_eq!(client.take(&mut Vec::new(), 1).unwrap(), 1);
    assert_eq!(server.take(Instant::now(), 100, &mut out).count, 1);
}

#[test]
fn impossible_indices_break_a_ring() {
    for which in [SUBMITTED, SEEN] {
        for value in [5, 6, u32::MAX, 1 << 31] {
            let (client, server, mem) = ring(4, name(0, 0));
            client.prepare(&request(0)).unwrap();
            mem.word(which).unwrap().store(value, Ordering::SeqCst);
            assert_eq!(server.take(Instant::now(), 100, &mut Vec::new()), Taken::default());
            assert!(server.is_broken(), "{which} {value}");
        }
    }
}

proptest! {
    #[test]
    fn a_server_survives_any_memory(
        content in proptest::collection::vec(any::<u8>(), 512..700), depth in -5..5,
        indices in proptest::collection::vec(0_u32..5, 4),
    ) {
        let (_, server, mem) = ring(4, name(depth, 0));
        mem.write(0, &content[..496]).unwrap();
        for (i, index) in indices.iter().enumerate() {
            mem.word(i * 4).unwrap().store(*index, Ordering::SeqCst);
        }
        let mut out = Vec::new();
        for _ in 0..3 {
            let taken = server.take(Instant::now(), 100, &mut out);
            prop_assert!(taken.count <= 4 && out.len() == taken.count);
            for entry in out.drain(..) {
                server.complete(&[Done { index: entry.index, userdata: entry.userdata, result: 1 }]);
            }
        }
    }
}
