//! What an NVMe/TCP target may send: an opening of its own, and PDUs for commands in flight. Digests that the fuzzer
//! cannot guess are made right on request. Data only ever lands within the data of a command in flight.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use onehop_fabrics::pdu::Digests;
use onehop_fabrics::queue::{CapsuleQueue, Data, QueueEvent, Send, Want};
use onehop_proto::Sqe;

#[derive(Arbitrary, Debug)]
enum Step {
    /// A command with so much data, the way that the low bits say.
    Submit(u16, u8),
    /// Bytes as they are.
    Bytes(Vec<u8>),
    /// A header with a right length and digest: type, flags, padding, command, tag, offset, length.
    Header(u8, u8, u8, u8, u16, u32, u16),
    /// So many bytes are taken from what waits to be sent.
    Send(u16),
}

#[derive(Arbitrary, Debug)]
struct Input {
    digests: u8,
    max_h2c: u16,
    cpda: u8,
    piece: u8,
    steps: Vec<Step>,
}

const DEPTH: u16 = 8;

struct Rig {
    queue: CapsuleQueue,
    /// Bytes of data of the command in each slot, where it takes any.
    room: [u32; DEPTH as usize],
    piece: usize,
}

impl Rig {
    /// False when the connection is over.
    fn feed(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let most = bytes.len().min(self.piece);
            let count = match self.queue.want() {
                Want::Bytes(room) => {
                    assert!(!room.is_empty());
                    let count = room.len().min(most);
                    room[..count].copy_from_slice(&bytes[..count]);
                    count
                }
                Want::Data(extent) => {
                    assert!(
                        extent.bytes > 0
                            && extent.offset + extent.bytes <= self.room[usize::from(extent.slot)]
                    );
                    let count = (extent.bytes as usize).min(most);
                    self.queue.check(&bytes[..count]);
                    count
                }
            };
            match self.queue.got(count) {
                Ok(Some(QueueEvent::Done { slot, .. })) => self.room[usize::from(slot)] = 0,
                Ok(_) => {}
                Err(violation) => {
                    let _ = (violation.to_string(), self.queue.last_words(&violation));
                    return false;
                }
            }
            bytes = &bytes[count..];
        }
        true
    }

    fn send(&mut self, mut most: usize) {
        while most > 0 {
            let count = match self.queue.send() {
                Send::Nothing => return,
                Send::Bytes(bytes) => bytes.len(),
                Send::Data(front, extent) => front.len() + extent.bytes as usize,
                Send::Digest(extent) => {
                    self.queue.digest_of_data(extent.bytes);
                    continue;
                }
            };
            assert!(count > 0);
            self.queue.sent(count.min(most));
            most -= count.min(most);
        }
    }
}

fuzz_target!(|input: Input| {
    let Input { digests, max_h2c, cpda, piece, steps } = input;
    let asked = Digests { header: digests & 1 != 0, data: digests & 2 != 0 };
    let piece = usize::from(piece).max(1);
    let mut rig = Rig { queue: CapsuleQueue::new(DEPTH, asked), room: [0; DEPTH as usize], piece };
    rig.send(usize::MAX);
    let mut opening = vec![1, 0, 128, 0, 128, 0, 0, 0, 0, 0, cpda, digests & 3];
    opening.extend((u32::from(max_h2c) << 2).to_le_bytes());
    opening.resize(128, 0);
    if !rig.feed(&opening) {
        return;
    }
    for step in steps {
        match step {
            Step::Submit(bytes, way) => {
                let bytes = u32::from(bytes);
                let data = match way & 3 {
                    0 => Data::None,
                    1 => Data::Out(bytes),
                    2 => Data::In(bytes),
                    _ => Data::InCapsule(bytes),
                };
                if let Some(slot) = rig.queue.submit(&Sqe::new(way, 1), data) {
                    rig.room[usize::from(slot)] = if way & 3 == 2 { bytes } else { 0 };
                }
            }
            Step::Bytes(bytes) => {
                if !rig.feed(&bytes) {
                    return;
                }
            }
            Step::Header(kind, flags, padding, slot, tag, offset, len) => {
                let digest = digests & 1 != 0;
                let pdo = 24 + if digest { 4 } else { 0 } + (padding & 63);
                let (has_data, tail) = (kind == 7, if digests & 2 != 0 { 4 } else { 0 });
                let plen = if has_data {
                    u32::from(pdo) + u32::from(len) + tail
                } else {
                    24 + if digest { 4 } else { 0 }
                };
                let cid = rig.queue.cid(u16::from(slot) % DEPTH).unwrap_or(tag);
                let mut out = vec![kind, flags & 0xfc | digests & 3, 24, if has_data { pdo } else { 0 }];
                out.extend(plen.to_le_bytes());
                out.extend(cid.to_le_bytes());
                out.extend(tag.to_le_bytes());
                out.extend(offset.to_le_bytes());
                out.extend(u32::from(len).to_le_bytes());
                out.resize(24, 0);
                if kind == 5 {
                    // In a response, the identifier is elsewhere.
                    out[20..22].copy_from_slice(&cid.to_le_bytes());
                }
                if digest {
                    out.extend(crc32c::crc32c(&out).to_le_bytes());
                }
                if has_data {
                    out.resize(usize::from(pdo), 0);
                }
                if !rig.feed(&out) {
                    return;
                }
            }
            Step::Send(most) => rig.send(usize::from(most)),
        }
    }
});
