//! The PDUs of NVMe/TCP: their headers, as bytes and as values.

use onehop_proto::{Cqe, Sqe, Status};

/// Bytes of the common header of all PDUs.
pub const COMMON: usize = 8;
/// Bytes of the header of every PDU that a host receives once the connection is open.
pub const HEADER: usize = 24;
/// Bytes of ICReq and ICResp.
pub const INIT: usize = 128;
/// Bytes of a command capsule's header.
pub const COMMAND: usize = COMMON + Sqe::BYTES;
/// Bytes of a digest.
pub const DIGEST: usize = 4;
/// Maximum bytes of a rejected header in a termination request.
pub const REJECTED: usize = 128;

/// PDU types.
pub mod kind {
    /// Initialize Connection Request.
    pub const IC_REQ: u8 = 0;
    /// Initialize Connection Response.
    pub const IC_RESP: u8 = 1;
    /// Host to Controller Terminate Connection Request.
    pub const H2C_TERM: u8 = 2;
    /// Controller to Host Terminate Connection Request.
    pub const C2H_TERM: u8 = 3;
    /// Command Capsule.
    pub const COMMAND: u8 = 4;
    /// Response Capsule.
    pub const RESPONSE: u8 = 5;
    /// Host to Controller Data.
    pub const H2C_DATA: u8 = 6;
    /// Controller to Host Data.
    pub const C2H_DATA: u8 = 7;
    /// Ready to Transfer.
    pub const R2T: u8 = 9;
}

/// Flags of PDUs.
pub mod flag {
    /// A header digest follows the header.
    pub const HEADER_DIGEST: u8 = 1;
    /// A data digest follows the data.
    pub const DATA_DIGEST: u8 = 2;
    /// The last data of a command, or of a Ready to Transfer.
    pub const LAST: u8 = 4;
    /// The command succeeded, and no response follows.
    pub const SUCCESS: u8 = 8;
}

/// The digests of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Digests {
    /// A CRC32C of every header.
    pub header: bool,
    /// A CRC32C of the data of every PDU.
    pub data: bool,
}

impl Digests {
    pub(crate) fn bits(self) -> u8 {
        u8::from(self.header) | u8::from(self.data) << 1
    }

    pub(crate) fn from_bits(bits: u8) -> Self {
        Self { header: bits & 1 != 0, data: bits & 2 != 0 }
    }
}

impl std::fmt::Display for Digests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match (self.header, self.data) {
            (false, false) => "no digests",
            (true, false) => "header digests",
            (false, true) => "data digests",
            (true, true) => "header and data digests",
        })
    }
}

/// A little-endian field of a header; zero past its end.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |raw| u16::from_le_bytes(*raw))
}

/// A little-endian field of a header; zero past its end.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |raw| u32::from_le_bytes(*raw))
}

/// The header that all PDUs begin with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Common {
    /// The type.
    pub kind: u8,
    /// The flags.
    pub flags: u8,
    /// Bytes of the header, this part included.
    pub hlen: u8,
    /// Where the data starts; 0 if there is none.
    pub pdo: u8,
    /// Bytes of the whole PDU, digests and padding included.
    pub plen: u32,
}

impl Common {
    /// Encodes it.
    #[must_use]
    pub fn encode(&self) -> [u8; COMMON] {
        let [a, b, c, d] = self.plen.to_le_bytes();
        [self.kind, self.flags, self.hlen, self.pdo, a, b, c, d]
    }

    /// Decodes the start of a PDU; missing bytes count as 0.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Self {
        let byte = |at| bytes.get(at).copied().unwrap_or(0);
        Self { kind: byte(0), flags: byte(1), hlen: byte(2), pdo: byte(3), plen: u32_at(bytes, 4) }
    }

    /// Whether a flag is set.
    #[must_use]
    pub fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Initialize Connection Request, for this host's version and alignment.
#[must_use]
pub fn init_request(digests: Digests) -> [u8; INIT] {
    let common = Common { kind: kind::IC_REQ, flags: 0, hlen: INIT as u8, pdo: 0, plen: INIT as u32 };
    let mut out = [0; INIT];
    out[..COMMON].copy_from_slice(&common.encode());
    // Version 0, data aligned to 4 bytes, one Ready to Transfer at a time: all zero.
    out[11] = digests.bits();
    out
}

/// A decoded Initialize Connection Response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InitResponse {
    /// The version of the PDU format.
    pub version: u16,
    /// Alignment of data to the controller in dwords, zero-based.
    pub cpda: u8,
    /// The digests of the connection.
    pub digests: u8,
    /// Maximum data of a data PDU to the controller.
    pub max_h2c: u32,
}

impl InitResponse {
    /// Decodes the whole PDU.
    #[must_use]
    pub fn decode(pdu: &[u8]) -> Self {
        Self {
            version: u16_at(pdu, 8),
            cpda: pdu.get(10).copied().unwrap_or(0),
            digests: pdu.get(11).copied().unwrap_or(0),
            max_h2c: u32_at(pdu, 12),
        }
    }
}

/// The fields that data PDUs and Ready to Transfer have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataHeader {
    /// The command.
    pub cid: u16,
    /// The transfer tag of data to the controller, and of Ready to Transfer.
    pub tag: u16,
    /// Where the data starts within the command's.
    pub offset: u32,
    /// Bytes of data.
    pub len: u32,
}

impl DataHeader {
    /// Decodes a PDU's header.
    #[must_use]
    pub fn decode(header: &[u8]) -> Self {
        Self {
            cid: u16_at(header, 8),
            tag: u16_at(header, 10),
            offset: u32_at(header, 12),
            len: u32_at(header, 16),
        }
    }

    /// Encodes what follows the common header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER - COMMON] {
        let mut out = [0; HEADER - COMMON];
        out[..2].copy_from_slice(&self.cid.to_le_bytes());
        out[2..4].copy_from_slice(&self.tag.to_le_bytes());
        out[4..8].copy_from_slice(&self.offset.to_le_bytes());
        out[8..12].copy_from_slice(&self.len.to_le_bytes());
        out
    }
}

/// The completion in a response capsule.
#[must_use]
pub fn completion(header: &[u8]) -> Cqe {
    let mut cqe = Cqe { dw: std::array::from_fn(|i| u32_at(header, COMMON + 4 * i)) };
    // The phase tag has no meaning here.
    cqe.dw[3] &= !(1 << 16);
    cqe
}

/// A completion in place of a response: for a SUCCESS flag, or generated by this host.
#[must_use]
pub fn made_completion(cid: u16, status: Status) -> Cqe {
    Cqe::new(0, 0, 0, cid, status, false)
}

/// Host to Controller Terminate Connection Request, with the fault in the rejected header.
#[must_use]
pub fn terminate(reason: u16, info: u32, rejected: &[u8]) -> Vec<u8> {
    let rejected = &rejected[..rejected.len().min(REJECTED)];
    let plen = (HEADER + rejected.len()) as u32;
    let common = Common { kind: kind::H2C_TERM, flags: 0, hlen: HEADER as u8, pdo: 0, plen };
    let mut out = common.encode().to_vec();
    out.extend(reason.to_le_bytes());
    out.extend(info.to_le_bytes());
    out.resize(HEADER, 0);
    out.extend(rejected);
    out
}

/// The bytes of an entry on the wire.
#[must_use]
pub fn entry_bytes(sqe: &Sqe) -> [u8; Sqe::BYTES] {
    let mut out = [0; Sqe::BYTES];
    for (to, dword) in out.chunks_exact_mut(4).zip(sqe.dw) {
        to.copy_from_slice(&dword.to_le_bytes());
    }
    out
}
