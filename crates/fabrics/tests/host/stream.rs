//! The queue without a connection: the same bytes cut at any place give the same events, and no bytes make it panic.

use onehop_fabrics::pdu::{Digests, HEADER};
use onehop_fabrics::queue::{CapsuleQueue, Data, ProtocolViolation, QueueEvent, Send, Want};
use onehop_proto::{Sqe, Status, nvm};
use proptest::prelude::*;

/// Feeds bytes in parts of these lengths, in rotation. Returns the events, and the data received.
fn feed(
    queue: &mut CapsuleQueue,
    mut bytes: &[u8],
    lengths: &[usize],
    memory: &mut [Vec<u8>],
) -> Result<Vec<QueueEvent>, ProtocolViolation> {
    let mut events = Vec::new();
    let mut lengths = lengths.iter().cycle();
    let mut left = 0;
    while !bytes.is_empty() {
        if left == 0 {
            left = *lengths.next().unwrap();
        }
        let (count, data) = match queue.want() {
            Want::Bytes(room) => {
                let count = room.len().min(bytes.len()).min(left);
                assert!(!room.is_empty(), "nothing wanted");
                room[..count].copy_from_slice(&bytes[..count]);
                (count, None)
            }
            Want::Data(extent) => {
                assert!(extent.bytes > 0, "nothing wanted");
                let count = (extent.bytes as usize).min(bytes.len()).min(left);
                (count, Some(extent))
            }
        };
        if let Some(extent) = data {
            let at = extent.offset as usize;
            memory[usize::from(extent.slot)][at..at + count].copy_from_slice(&bytes[..count]);
            queue.check(&bytes[..count]);
        }
        events.extend(queue.got(count)?);
        bytes = &bytes[count..];
        left -= count;
    }
    Ok(events)
}

/// Sends everything queued, in parts of at most `most` bytes; the data is all `b'w'`.
fn drain(queue: &mut CapsuleQueue, most: usize) -> Vec<u8> {
    let mut out = Vec::new();
    loop {
        let mut part = match queue.send() {
            Send::Nothing => return out,
            Send::Bytes(bytes) => bytes.to_vec(),
            Send::Data(front, extent) => {
                let mut part = front.to_vec();
                part.resize(front.len() + extent.bytes as usize, b'w');
                part
            }
            Send::Digest(extent) => {
                let crc = crc32c::crc32c(&vec![b'w'; extent.bytes as usize]);
                queue.digest_of_data(crc);
                continue;
            }
        };
        assert!(!part.is_empty());
        part.truncate(most);
        queue.sent(part.len());
        out.extend(part);
    }
}

fn ic_resp(digests: u8) -> Vec<u8> {
    let mut out = vec![1, 0, 128, 0, 128, 0, 0, 0, 0, 0, 0, digests, 0, 16, 0, 0];
    out.resize(128, 0);
    out
}

fn pdu(kind: u8, flags: u8, rest: &[u8], data: Option<&[u8]>, digests: u8, padding: usize) -> Vec<u8> {
    let (hd, dd) = (usize::from(digests & 1) * 4, usize::from(digests >> 1) * 4);
    let dd = if data.is_some() { dd } else { 0 };
    let pdo = data.map_or(0, |_| HEADER + hd + padding);
    let plen = pdo.max(HEADER + hd) + data.map_or(0, <[u8]>::len) + dd;
    let mut out = vec![kind, flags | digests & 1 | u8::from(dd > 0) << 1, 24, pdo as u8];
    out.extend((plen as u32).to_le_bytes());
    out.extend(rest);
    out.resize(HEADER, 0);
    if hd > 0 {
        out.extend(crc32c::crc32c(&out).to_le_bytes());
    }
    if let Some(data) = data {
        out.resize(pdo, 0);
        out.extend(data);
        if dd > 0 {
            out.extend(crc32c::crc32c(data).to_le_bytes());
        }
    }
    out
}

fn data_header(cid: u16, tag: u16, offset: u32, len: u32) -> Vec<u8> {
    let mut out = cid.to_le_bytes().to_vec();
    out.extend(tag.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out.extend(len.to_le_bytes());
    out
}

fn response(cid: u16, status: Status) -> Vec<u8> {
    let mut out = vec![0; 12];
    out.extend(cid.to_le_bytes());
    out.extend((status.0 << 1).to_le_bytes());
    out
}

/// An open queue with two reads of 100 and 60 bytes and a write of 9000, sent.
fn begun(digests: u8, most: usize) -> (CapsuleQueue, [u16; 3], Vec<u8>) {
    let asked = Digests { header: digests & 1 != 0, data: digests & 2 != 0 };
    let mut queue = CapsuleQueue::new(8, asked);
    drain(&mut queue, most);
    assert_eq!(feed(&mut queue, &ic_resp(digests), &[7], &mut []).unwrap(), [QueueEvent::Opened]);
    let read = Sqe::new(nvm::opcode::READ, 1);
    let first = queue.submit(&read, Data::In(100)).unwrap();
    let second = queue.submit(&read, Data::In(60)).unwrap();
    let write = queue.submit(&Sqe::new(nvm::opcode::WRITE, 1), Data::Out(9000)).unwrap();
    let sent = drain(&mut queue, most);
    (queue, [first, second, write], sent)
}

/// A target's answers to [`begun`], with the two reads interleaved.
fn answers(queue: &CapsuleQueue, slots: [u16; 3], digests: u8) -> Vec<u8> {
    let [first, second, write] = slots.map(|slot| queue.cid(slot).unwrap());
    let data = |cid: u16, flags: u8, at: u32, len: u32, padding| {
        let bytes: Vec<u8> = (at..at + len).map(|i| (i as u8) ^ cid as u8).collect();
        pdu(7, flags, &data_header(cid, 0, at, len), Some(&bytes), digests, padding)
    };
    [
        data(first, 0, 0, 30, 0),
        data(second, 0, 0, 1, 5),
        pdu(9, 0, &data_header(write, 7, 0, 5000), None, digests, 0),
        data(first, 4, 30, 70, 4),
        data(second, 4 | 8, 1, 59, 0),
        pdu(5, 0, &response(first, Status::SUCCESS), None, digests, 0),
    ]
    .concat()
}

#[test]
fn the_stream_may_be_cut_anywhere() {
    for digests in 0..4 {
        let (queue, slots, _) = begun(digests, 1 << 20);
        let stream = answers(&queue, slots, digests);
        let mut want = None;
        let cuts =
            (1..=stream.len()).map(|cut| vec![cut, stream.len()]).chain([vec![1], vec![2, 3], vec![5]]);
        for lengths in cuts {
            let (mut queue, slots, _) = begun(digests, 13);
            let mut memory = vec![vec![0; 9000]; 8];
            let events = feed(&mut queue, &stream, &lengths, &mut memory).unwrap();
            let ends: Vec<_> = events
                .iter()
                .map(|event| match event {
                    QueueEvent::Done { slot, cqe } => (*slot, cqe.status()),
                    QueueEvent::Opened => panic!("opened twice"),
                })
                .collect();
            assert_eq!(ends, [(slots[1], Status::SUCCESS), (slots[0], Status::SUCCESS)]);
            let data = drain(&mut queue, 999);
            // Two PDUs, because one carries at most 4096 bytes.
            let parts = if digests & 1 != 0 { 2 * 28 } else { 2 * 24 } + if digests & 2 != 0 { 8 } else { 0 };
            assert_eq!(data.len(), 5000 + parts);
            let now = (memory, data);
            assert!(*want.get_or_insert_with(|| now.clone()) == now, "{lengths:?}");
        }
    }
}

#[test]
fn what_is_sent_does_not_depend_on_how_it_is_taken() {
    for digests in 0..4 {
        let all = begun(digests, usize::MAX).2;
        for most in [1, 2, 71, 72, 73, 100] {
            assert!(begun(digests, most).2 == all);
        }
    }
}

#[test]
fn an_answer_to_what_was_not_sent_is_refused() {
    let mut queue = CapsuleQueue::new(4, Digests::default());
    drain(&mut queue, 1000);
    feed(&mut queue, &ic_resp(0), &[128], &mut []).unwrap();
    let slot = queue.submit(&Sqe::new(nvm::opcode::FLUSH, 1), Data::None).unwrap();
    let cid = queue.cid(slot).unwrap();
    let Send::Bytes(bytes) = queue.send() else { panic!("nothing to send") };
    let all = bytes.len();
    queue.sent(all - 1);
    assert!(queue.last_words(&ProtocolViolation::Kind(9)).is_none(), "within a PDU");
    let answer = pdu(5, 0, &response(cid, Status::SUCCESS), None, 0, 0);
    let refused = feed(&mut queue, &answer, &[24], &mut []).unwrap_err();
    assert_eq!(refused, ProtocolViolation::UnknownCommand { kind: 5, cid });
}

#[test]
fn the_identifier_of_an_earlier_command_is_not_its_successors() {
    let (mut queue, slots, _) = begun(0, 1000);
    let before = queue.cid(slots[0]).unwrap();
    let failed = pdu(5, 0, &response(before, Status::INTERNAL_ERROR), None, 0, 0);
    assert_eq!(feed(&mut queue, &failed, &[24], &mut []).unwrap().len(), 1);
    let again = queue.submit(&Sqe::new(nvm::opcode::READ, 1), Data::In(100)).unwrap();
    drain(&mut queue, 1000);
    assert_eq!(again, slots[0]);
    assert!(feed(&mut queue, &failed, &[24], &mut []).is_err());
    // After all uses of a slot, identifier FFFFh has not occurred.
    let mut queue = CapsuleQueue::new(1024, Digests::default());
    drain(&mut queue, 1000);
    feed(&mut queue, &ic_resp(0), &[128], &mut []).unwrap();
    for _ in 0..200 {
        let slot = (0..1024).map(|_| queue.submit(&Sqe::default(), Data::None).unwrap()).last().unwrap();
        drain(&mut queue, 1 << 20);
        assert!(queue.submit(&Sqe::default(), Data::None).is_none());
        for slot in 0..1024 {
            let cid = queue.cid(slot).unwrap();
            assert_ne!(cid, 0xffff);
            let answer = pdu(5, 0, &response(cid, Status::SUCCESS), None, 0, 0);
            feed(&mut queue, &answer, &[24], &mut []).unwrap();
        }
        assert!(slot < 1024 && queue.in_flight() == 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random bytes in a valid stream lead to events or a violation. Data only lands in its command's memory: `feed`
    /// would panic otherwise.
    #[test]
    fn random_bytes_do_no_harm(
        digests in 0u8..4,
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6),
        lengths in proptest::collection::vec(1usize..40, 1..6),
        tail in proptest::collection::vec(any::<u8>(), 0..60),
    ) {
        let (mut queue, slots, _) = begun(digests, 1000);
        let mut stream = answers(&queue, slots, digests);
        stream.extend(tail);
        for (at, byte) in changes {
            let at = at.index(stream.len());
            stream[at] = byte;
        }
        let mut memory = vec![vec![0; 9000]; 8];
        let lens = [100, 60, 9000];
        for (slot, len) in slots.iter().zip(lens) {
            memory[usize::from(*slot)].truncate(len);
        }
        if let Err(violation) = feed(&mut queue, &stream, &lengths, &mut memory)
            && let Some(last) = queue.last_words(&violation)
        {
            prop_assert_eq!((last[0], last[4] as usize), (2, last.len()));
        }
    }

    /// The same before the connection is open.
    #[test]
    fn a_random_start_does_no_harm(
        changes in proptest::collection::vec((0usize..128, any::<u8>()), 1..4),
        lengths in proptest::collection::vec(1usize..40, 1..6),
    ) {
        let mut queue = CapsuleQueue::new(4, Digests { header: true, data: true });
        drain(&mut queue, 1000);
        let mut stream = ic_resp(3);
        for (at, byte) in changes {
            stream[at] = byte;
        }
        let _ = feed(&mut queue, &stream, &lengths, &mut []);
    }
}
