//! Protection information: eight bytes at the end of each block's metadata, inserted and checked as requested.

use onehop_proto::Status;
use onehop_proto::nvm::{Rw, opcode};

use crate::exec::CommandFailure;

/// Bytes of protection information: guard, application tag, reference tag, each big-endian.
pub(crate) const BYTES: usize = 8;
/// Bits of PRCHK.
const CHECK_GUARD: u8 = 1 << 2;
const CHECK_APPTAG: u8 = 1 << 1;
const CHECK_REFTAG: u8 = 1 << 0;

/// The CRC that guards a block (T10 DIF: polynomial 8BB7h), a byte at a time.
const TABLE: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = ((byte as u16) << 8, 0);
        while bit < 8 {
            crc = if crc & 0x8000 != 0 { crc << 1 ^ 0x8bb7 } else { crc << 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

fn crc16(start: u16, data: &[u8]) -> u16 {
    data.iter().fold(start, |crc, byte| crc << 8 ^ TABLE[usize::from(crc >> 8) ^ usize::from(*byte)])
}

/// The protection information of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ProtectionInfo {
    guard: u16,
    apptag: u16,
    reftag: u32,
}

impl ProtectionInfo {
    fn decode(raw: &[u8]) -> Self {
        let word = |at: usize| u16::from_be_bytes([raw[at], raw[at + 1]]);
        Self { guard: word(0), apptag: word(2), reftag: u32::from(word(4)) << 16 | u32::from(word(6)) }
    }

    fn encode(self) -> [u8; BYTES] {
        let mut raw = [0; BYTES];
        raw[..2].copy_from_slice(&self.guard.to_be_bytes());
        raw[2..4].copy_from_slice(&self.apptag.to_be_bytes());
        raw[4..].copy_from_slice(&self.reftag.to_be_bytes());
        raw
    }
}

/// A command's use of its namespace's protection information.
#[derive(Clone, Copy)]
pub(crate) struct Protection {
    /// The type, 1 to 3.
    kind: u8,
    prchk: u8,
    lba: u64,
    reftag: u32,
    apptag: u16,
    apptag_mask: u16,
}

impl Protection {
    /// A command's use of it, for a namespace of this type.
    ///
    /// # Errors
    /// When its fields contradict the type.
    pub(crate) fn new(kind: u8, rw: &Rw) -> Result<Self, Status> {
        let checks_reftag = rw.prchk & CHECK_REFTAG != 0;
        // Compare and Verify neither insert nor strip.
        let inserts = rw.pract && matches!(rw.opcode, opcode::COMPARE | opcode::VERIFY);
        if inserts || checks_reftag && (kind == 3 || kind == 1 && rw.reftag != rw.lba as u32) {
            return Err(Status::INVALID_PROTECTION_INFO.with_dnr());
        }
        let Rw { prchk, lba, reftag, apptag, apptag_mask, .. } = *rw;
        Ok(Self { kind, prchk, lba, reftag, apptag, apptag_mask })
    }

    /// Whether anything is checked.
    pub(crate) const fn checks(&self) -> bool {
        self.prchk != 0
    }

    /// The reference tag of a block.
    const fn reftag(&self, block: usize) -> u32 {
        if self.kind == 3 { self.reftag } else { self.reftag.wrapping_add(block as u32) }
    }

    /// Whether a block is exempt from checks, as unwritten blocks are.
    const fn is_exempt(&self, info: ProtectionInfo) -> bool {
        info.apptag == u16::MAX && (self.kind != 3 || info.reftag == u32::MAX)
    }

    /// Checks blocks of data with their metadata.
    ///
    /// # Errors
    /// Names the first wrong block.
    pub(crate) fn check(
        &self,
        data: &[u8],
        meta: &[u8],
        lba: usize,
        ms: usize,
    ) -> Result<(), CommandFailure> {
        for (i, (data, meta)) in data.chunks_exact(lba).zip(meta.chunks_exact(ms)).enumerate() {
            let (others, raw) = meta.split_at(ms - BYTES);
            let info = ProtectionInfo::decode(raw);
            if self.is_exempt(info) {
                continue;
            }
            let wrong = |bit: u8, is_wrong: bool| self.prchk & bit != 0 && is_wrong;
            let apptag = (info.apptag ^ self.apptag) & self.apptag_mask;
            let status = if wrong(CHECK_GUARD, info.guard != crc16(crc16(0, data), others)) {
                Status::GUARD_CHECK
            } else if wrong(CHECK_APPTAG, apptag != 0) {
                Status::APPTAG_CHECK
            } else if wrong(CHECK_REFTAG, info.reftag != self.reftag(i)) {
                Status::REFTAG_CHECK
            } else {
                continue;
            };
            return Err(CommandFailure { status: status.with_dnr(), lba: Some(self.lba + i as u64) });
        }
        Ok(())
    }

    /// Inserts the protection information of blocks, replacing that part of their metadata.
    pub(crate) fn insert(&self, data: &[u8], meta: &mut [u8], lba: usize, ms: usize) {
        for (i, (data, meta)) in data.chunks_exact(lba).zip(meta.chunks_exact_mut(ms)).enumerate() {
            let (others, raw) = meta.split_at_mut(ms - BYTES);
            let guard = crc16(crc16(0, data), others);
            raw.copy_from_slice(
                &ProtectionInfo { guard, apptag: self.apptag, reftag: self.reftag(i) }.encode(),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guard_is_the_crc_of_t10() {
        assert_eq!(crc16(0, b"123456789"), 0xd0db);
        assert_eq!(crc16(0, &[0; 512]), 0);
        assert_eq!(crc16(crc16(0, b"1234"), b"56789"), 0xd0db);
    }

    #[test]
    fn fields_go_there_and_back() {
        let info = ProtectionInfo { guard: 0x1234, apptag: 0x5678, reftag: 0x9abc_def0 };
        assert_eq!(info.encode(), [0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0]);
        assert_eq!(ProtectionInfo::decode(&info.encode()), info);
    }
}
