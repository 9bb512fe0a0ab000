//! The sending side: the connection request, command capsules, data.

use super::command::{Data, Progress};
use super::{CapsuleQueue, DataPart, Waiting};
use crate::pdu::{self, COMMAND, Common, DIGEST, DataHeader, HEADER, flag, kind};

/// Commands without data are sent together, up to this many bytes.
const TOGETHER: usize = 8 << 10;

/// A PDU to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Item {
    Init,
    Command(u16),
    /// Requested data, up to `end`.
    Data {
        slot: u16,
        tag: u16,
        offset: u32,
        end: u32,
    },
}

/// What to send next.
#[derive(PartialEq, Eq, Debug)]
pub enum Send<'a> {
    /// Nothing.
    Nothing,
    /// These bytes.
    Bytes(&'a [u8]),
    /// These bytes, if any, followed by data of a command.
    Data(&'a [u8], DataPart),
    /// Nothing until [`CapsuleQueue::digest_of_data`] gets the CRC32C of this data.
    Digest(DataPart),
}

/// Waiting PDUs, and those being sent.
pub(super) struct Sender {
    waiting: Waiting,
    /// The headers being sent, and the ends of their PDUs.
    bytes: Vec<u8>,
    ends: Vec<(Item, usize)>,
    /// The data after them.
    data: Option<DataPart>,
    tail: Tail,
    sent: usize,
    /// The end of the last completely sent PDU.
    boundary: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tail {
    None,
    Missing,
    Digest([u8; DIGEST]),
}

impl Tail {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Digest(bytes) => bytes,
            Self::None | Self::Missing => &[],
        }
    }
}

impl Sender {
    pub(super) fn new() -> Self {
        Self {
            waiting: [Item::Init].into(),
            bytes: Vec::new(),
            ends: Vec::new(),
            data: None,
            tail: Tail::None,
            sent: 0,
            boundary: 0,
        }
    }

    pub(super) fn queue(&mut self, item: Item) {
        self.waiting.push_back(item);
    }

    /// Whether a PDU was partly sent.
    pub(super) fn is_within_pdu(&self) -> bool {
        self.sent > self.boundary
    }

    fn data_bytes(&self) -> usize {
        self.data.map_or(0, |extent| extent.bytes as usize)
    }
}

impl CapsuleQueue {
    /// What to send next.
    pub fn send(&mut self) -> Send<'_> {
        if self.sender.ends.is_empty() {
            self.load();
        }
        let sender = &self.sender;
        if let (Tail::Missing, Some(extent)) = (sender.tail, sender.data) {
            return Send::Digest(extent);
        }
        let (heads, data, sent) = (sender.bytes.len(), sender.data_bytes(), sender.sent);
        let front = sender.bytes.get(sent..).unwrap_or(&[]);
        match sender.data {
            Some(extent) if sent < heads + data => {
                let passed = sent.saturating_sub(heads) as u32;
                let rest =
                    DataPart { offset: extent.offset + passed, bytes: extent.bytes - passed, ..extent };
                Send::Data(front, rest)
            }
            Some(_) => Send::Bytes(sender.tail.bytes().get(sent - heads - data..).unwrap_or(&[])),
            None if front.is_empty() => Send::Nothing,
            None => Send::Bytes(front),
        }
    }

    /// Sets the CRC32C of the data in [`Send::Digest`].
    pub fn digest_of_data(&mut self, crc: u32) {
        if self.sender.tail == Tail::Missing {
            self.sender.tail = Tail::Digest(crc.to_le_bytes());
        }
    }

    /// Handles sent bytes, at most as many as [`Self::send`] returned.
    pub fn sent(&mut self, bytes: usize) {
        self.sender.sent += bytes;
        let sent = self.sender.sent;
        let done = self.sender.ends.iter().take_while(|(_, end)| *end <= sent).count();
        // Few at a time, and each list is short.
        let items: Vec<_> = self.sender.ends.drain(..done).collect();
        for (item, end) in items {
            self.sender.boundary = end;
            self.was_sent(item);
        }
    }

    fn was_sent(&mut self, item: Item) {
        match item {
            Item::Init => {}
            Item::Command(slot) => {
                let command = &mut self.commands[usize::from(slot)];
                command.progress = Progress::Sent;
                if let Data::InCapsule(len) = command.data {
                    command.moved = len;
                }
            }
            Item::Data { slot, tag, offset, end } => {
                let offset = offset + (end - offset).min(self.max_h2c);
                let command = &mut self.commands[usize::from(slot)];
                command.moved = offset;
                command.is_sending = offset < end;
                if offset < end {
                    // Queued last: other commands need not wait for all of this data.
                    self.sender.queue(Item::Data { slot, tag, offset, end });
                }
            }
        }
    }

    /// Builds the next PDUs.
    fn load(&mut self) {
        self.sender.bytes.clear();
        self.sender.data = None;
        self.sender.tail = Tail::None;
        self.sender.sent = 0;
        self.sender.boundary = 0;
        while self.sender.data.is_none()
            && self.sender.bytes.len() < TOGETHER
            && let Some(item) = self.sender.waiting.pop_front()
        {
            match item {
                Item::Init => self.sender.bytes.extend(pdu::init_request(self.asked)),
                Item::Command(slot) => {
                    let command = &self.commands[usize::from(slot)];
                    let entry = pdu::entry_bytes(&command.sqe);
                    let data = match command.data {
                        Data::InCapsule(bytes) if bytes > 0 => Some(DataPart { slot, offset: 0, bytes }),
                        _ => None,
                    };
                    self.append(kind::COMMAND, 0, COMMAND, &entry, data);
                }
                Item::Data { slot, tag, offset, end } => {
                    let bytes = (end - offset).min(self.max_h2c);
                    let cid = self.commands[usize::from(slot)].cid(slot);
                    let header = DataHeader { cid, tag, offset, len: bytes }.encode();
                    let flags = if offset + bytes == end { flag::LAST } else { 0 };
                    self.append(
                        kind::H2C_DATA,
                        flags,
                        HEADER,
                        &header,
                        Some(DataPart { slot, offset, bytes }),
                    );
                }
            }
            let sender = &mut self.sender;
            let tail = if sender.tail == Tail::Missing { DIGEST } else { 0 };
            let end = sender.bytes.len() + sender.data_bytes() + tail;
            sender.ends.push((item, end));
        }
    }

    /// Appends a PDU, up to its data.
    fn append(&mut self, kind: u8, flags: u8, hlen: usize, rest: &[u8], data: Option<DataPart>) {
        let mut flags = flags;
        let mut at = hlen;
        if self.digests.header {
            flags |= flag::HEADER_DIGEST;
            at += DIGEST;
        }
        let (mut pdo, mut plen) = (0, at as u32);
        if let Some(extent) = data {
            at = at.next_multiple_of(self.unit);
            pdo = at as u8;
            plen = at as u32 + extent.bytes;
            if self.digests.data {
                flags |= flag::DATA_DIGEST;
                plen += DIGEST as u32;
            }
        }
        let common = Common { kind, flags, hlen: hlen as u8, pdo, plen };
        let sender = &mut self.sender;
        let start = sender.bytes.len();
        sender.bytes.extend(common.encode());
        sender.bytes.extend(rest);
        if self.digests.header {
            let digest = crc32c::crc32c(&sender.bytes[start..]);
            sender.bytes.extend(digest.to_le_bytes());
        }
        sender.bytes.resize(start + at, 0);
        sender.data = data;
        sender.tail = if data.is_some() && self.digests.data { Tail::Missing } else { Tail::None };
    }
}
