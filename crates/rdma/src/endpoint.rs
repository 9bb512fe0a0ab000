//! The description of one side of a connection that it sends to the other over a socket, before the first message.

use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"onehopR1";

/// One side's queue pair and its parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// The queue pair's number.
    pub pair: u32,
    /// The number of the first packet that it sends.
    pub psn: u32,
    /// The port's global address.
    pub gid: [u8; 16],
    /// Its local address, on networks that have them.
    pub lid: u16,
    /// Log2 of the largest packet, less 7.
    pub mtu: u8,
    /// Maximum concurrent reads that it answers.
    pub reads: u8,
    /// Messages that it has room for.
    pub room: u16,
    /// Maximum bytes of a message.
    pub message: u32,
    /// This connection's index among several: two machines with several ports each spread them by it.
    pub lane: u8,
}

impl Endpoint {
    /// Bytes of an endpoint.
    pub const BYTES: usize = 48;
    /// Credits need at least this many messages.
    pub const LEAST_ROOM: u16 = 4;

    /// As bytes, to be sent.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&self.pair.to_le_bytes());
        out[12..16].copy_from_slice(&self.psn.to_le_bytes());
        out[16..32].copy_from_slice(&self.gid);
        out[32..34].copy_from_slice(&self.lid.to_le_bytes());
        out[34] = self.mtu;
        out[35] = self.reads;
        out[36..38].copy_from_slice(&self.room.to_le_bytes());
        out[40..44].copy_from_slice(&self.message.to_le_bytes());
        out[44] = self.lane;
        out
    }

    /// Parses the other side's endpoint.
    ///
    /// # Errors
    /// When it is not an endpoint, or an impossible one.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = |why: &str| Error::Protocol(format!("its endpoint {why}"));
        let bytes: &[u8; Self::BYTES] =
            bytes.try_into().map_err(|_| bad(&format!("has {} bytes", bytes.len())))?;
        if bytes[..8] != MAGIC {
            return Err(bad("does not start as one of this version does"));
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[16..32]);
        let this = Self {
            pair: word(8),
            psn: word(12),
            gid,
            lid: half(32),
            mtu: bytes[34],
            reads: bytes[35],
            room: half(36),
            message: word(40),
            lane: bytes[44],
        };
        if this.pair >> 24 != 0 || this.psn >> 24 != 0 {
            return Err(bad("has numbers of more than 24 bits"));
        }
        if !(1..=5).contains(&this.mtu) || this.reads == 0 {
            return Err(bad("has an impossible MTU, or no reads"));
        }
        if this.room < Self::LEAST_ROOM || this.message == 0 || this.message > 1 << 20 {
            return Err(bad("has no room for messages, or an impossible size of them"));
        }
        Ok(this)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn endpoints_come_back_and_nonsense_does_not() {
        let one = Endpoint {
            pair: 0x12_3456,
            psn: 0xff_ffff,
            gid: *b"0123456789abcdef",
            lid: 7,
            mtu: 3,
            reads: 16,
            room: 64,
            message: 4096,
            lane: 3,
        };
        let bytes = one.to_bytes();
        assert_eq!(Endpoint::from_bytes(&bytes).unwrap(), one);
        assert!(Endpoint::from_bytes(&bytes[1..]).is_err());
        for (at, value) in [(0, 0), (11, 1), (15, 1), (34, 0), (34, 6), (35, 0), (36, 3), (43, 1)] {
            let mut broken = bytes;
            broken[at] = value;
            assert!(matches!(Endpoint::from_bytes(&broken), Err(Error::Protocol(_))), "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64), magic: bool) {
            let mut bytes = bytes;
            if magic && bytes.len() >= 8 {
                bytes[..8].copy_from_slice(&MAGIC);
            }
            if let Ok(one) = Endpoint::from_bytes(&bytes) {
                prop_assert_eq!(Endpoint::from_bytes(&one.to_bytes()).unwrap(), one);
            }
        }
    }
}
