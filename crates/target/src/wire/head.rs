//! The head of a frame.

use super::{MAX_BODY, MAX_DATA};
use crate::{Error, Result};

/// The version of the protocol.
pub const VERSION: u16 = 8;
/// The length of a head in bytes.
pub const HEAD_BYTES: usize = 48;
const MAGIC: [u8; 4] = *b"1HOP";

/// The kind of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FrameKind {
    /// The client's first frame: [`super::Hello`].
    Hello = 1,
    /// The server's answer: [`super::HelloBack`].
    HelloBack = 2,
    /// The client joins: [`super::Join`].
    Join = 3,
    /// The server accepts: [`super::Welcome`].
    Welcome = 4,
    /// A request: [`super::Request`].
    Request = 5,
    /// An answer: [`super::Reply`].
    Reply = 6,
    /// Asks the other side to answer.
    Ping = 7,
    /// Answers a ping.
    Pong = 8,
    /// This side is closing, for the reason in the body as text. Requests in flight are still answered.
    Goodbye = 9,
}

impl FrameKind {
    const ALL: [Self; 9] = [
        Self::Hello,
        Self::HelloBack,
        Self::Join,
        Self::Welcome,
        Self::Request,
        Self::Reply,
        Self::Ping,
        Self::Pong,
        Self::Goodbye,
    ];
}

/// The head of a frame. It has the checksums of the rest, for unencrypted connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// The kind.
    pub kind: FrameKind,
    /// The number of a request, or of the request that a reply answers. Numbers go up; a repeated request keeps its
    /// number.
    pub id: u64,
    /// In a request: all requests below this number are answered and may be forgotten, except those in
    /// [`super::Request::Outstanding`].
    pub done: u64,
    /// Bytes of the body.
    pub body: u32,
    /// Bytes of data after the body.
    pub data: u32,
    /// CRC-32C of the body.
    pub body_crc: u32,
    /// CRC-32C of the data.
    pub data_crc: u32,
}

impl Head {
    /// The head of a frame without data.
    #[must_use]
    pub fn new(kind: FrameKind, id: u64, body: &[u8]) -> Self {
        Self {
            kind,
            id,
            done: 0,
            body: body.len() as u32,
            data: 0,
            body_crc: crc32c::crc32c(body),
            data_crc: 0,
        }
    }

    /// The encoded head.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(4, &VERSION.to_le_bytes());
        put(6, &[self.kind as u8]);
        put(8, &self.id.to_le_bytes());
        put(16, &self.done.to_le_bytes());
        put(24, &self.body.to_le_bytes());
        put(28, &self.data.to_le_bytes());
        put(32, &self.body_crc.to_le_bytes());
        put(36, &self.data_crc.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..HEAD_BYTES - 4]);
        bytes[HEAD_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes and checks a head. Reserved fields must be zero.
    ///
    /// # Errors
    /// When it is not a head of this version, was corrupted, or exceeds the length limits.
    pub fn from_bytes(bytes: &[u8; HEAD_BYTES], peer: &str) -> Result<Self> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if bytes[..4] != MAGIC {
            return Err(Error::protocol(peer, "not a onehop frame"));
        }
        let (is, announced) = (crc32c::crc32c(&bytes[..HEAD_BYTES - 4]), word(HEAD_BYTES - 4));
        if is != announced {
            return Err(Error::Checksum { peer: peer.to_owned(), what: "a head", is, announced });
        }
        let version = u16::from_le_bytes([bytes[4], bytes[5]]);
        if version != VERSION {
            let what = format!("it has version {version}, this side {VERSION}: update the older one");
            return Err(Error::protocol(peer, what));
        }
        let kind = FrameKind::ALL.into_iter().find(|kind| *kind as u8 == bytes[6]);
        let (Some(kind), 0, 0) = (kind, bytes[7], word(40)) else {
            return Err(Error::protocol(peer, format!("a frame of kind {}", bytes[6])));
        };
        let head = Self {
            kind,
            id: long(8),
            done: long(16),
            body: word(24),
            data: word(28),
            body_crc: word(32),
            data_crc: word(36),
        };
        if head.body as usize > MAX_BODY || head.data as usize > MAX_DATA {
            let what = format!("a frame of {} and {} bytes", head.body, head.data);
            return Err(Error::protocol(peer, what));
        }
        Ok(head)
    }

    /// Checks a body against the head's checksum.
    ///
    /// # Errors
    /// When it was corrupted.
    pub fn check_body(&self, body: &[u8], peer: &str) -> Result<()> {
        self.check("a body", crc32c::crc32c(body), self.body_crc, peer)
    }

    /// Checks data against the head's checksum, given its own.
    ///
    /// # Errors
    /// When it was corrupted.
    pub fn check_data(&self, crc: u32, peer: &str) -> Result<()> {
        self.check("data", crc, self.data_crc, peer)
    }

    fn check(&self, what: &'static str, is: u32, announced: u32, peer: &str) -> Result<()> {
        if is == announced {
            Ok(())
        } else {
            Err(Error::Checksum { peer: peer.to_owned(), what, is, announced })
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn heads() -> impl Strategy<Value = Head> {
        let lengths = (0..=MAX_BODY as u32, 0..=MAX_DATA as u32);
        (0..9_usize, any::<[u64; 2]>(), lengths, any::<[u32; 2]>()).prop_map(
            |(kind, [id, done], (body, data), [body_crc, data_crc])| {
                let kind = FrameKind::ALL[kind];
                Head { kind, id, done, body, data, body_crc, data_crc }
            },
        )
    }

    proptest! {
        #[test]
        fn heads_arrive_as_they_were_sent(head in heads()) {
            prop_assert_eq!(Head::from_bytes(&head.to_bytes(), "a test").unwrap(), head);
        }

        #[test]
        fn a_changed_bit_is_detected(head in heads(), bit in 0..HEAD_BYTES * 8) {
            let mut bytes = head.to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Head::from_bytes(&bytes, "a test").is_err());
        }

        #[test]
        fn lengths_are_bounded(head in heads(), more in 1..1000_u32) {
            for long in [
                Head { body: MAX_BODY as u32 + more, ..head },
                Head { data: MAX_DATA as u32 + more, ..head },
            ] {
                let error = Head::from_bytes(&long.to_bytes(), "a test").unwrap_err();
                prop_assert!(matches!(error, Error::Protocol { .. }), "{}", error);
            }
        }
    }

    #[test]
    fn another_version_is_reported() {
        let mut bytes = Head::new(FrameKind::Hello, 0, b"").to_bytes();
        bytes[4] = 9;
        let crc = crc32c::crc32c(&bytes[..44]);
        bytes[44..].copy_from_slice(&crc.to_le_bytes());
        let error = Head::from_bytes(&bytes, "a test").unwrap_err().to_string();
        assert!(error.contains("version 9") && error.contains("update"), "{error}");
    }
}
