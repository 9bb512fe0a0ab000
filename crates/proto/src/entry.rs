//! The two entries that travel through the rings: 64 bytes to the controller, 16 bytes back.

use crate::Status;

/// A submission queue entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C, align(64))]
pub struct Sqe {
    /// The sixteen dwords, in host byte order of a little-endian machine.
    pub dw: [u32; 16],
}

impl Sqe {
    /// Bytes of an entry (IOSQES = 6).
    pub const BYTES: usize = 64;

    /// An entry with an opcode and a namespace, everything else zero.
    #[inline(always)]
    #[must_use]
    pub const fn new(opcode: u8, nsid: u32) -> Self {
        let mut dw = [0; 16];
        dw[0] = opcode as u32;
        dw[1] = nsid;
        Self { dw }
    }

    /// The opcode.
    #[inline(always)]
    #[must_use]
    pub const fn opcode(&self) -> u8 {
        self.dw[0] as u8
    }

    /// The command identifier.
    #[inline(always)]
    #[must_use]
    pub const fn cid(&self) -> u16 {
        (self.dw[0] >> 16) as u16
    }

    /// The same entry under another command identifier.
    #[inline(always)]
    #[must_use]
    pub const fn with_cid(mut self, cid: u16) -> Self {
        self.dw[0] = self.dw[0] & 0xffff | (cid as u32) << 16;
        self
    }

    /// The namespace.
    #[inline(always)]
    #[must_use]
    pub const fn nsid(&self) -> u32 {
        self.dw[1]
    }

    /// PSDT: 0 means PRPs, 1 an SGL with a contiguous metadata buffer, 2 an SGL with a metadata SGL.
    #[inline(always)]
    #[must_use]
    pub const fn psdt(&self) -> u8 {
        (self.dw[0] >> 14) as u8 & 3
    }

    /// FUSE: 0 for a command of its own, else a part of a fused operation.
    #[inline(always)]
    #[must_use]
    pub const fn fuse(&self) -> u8 {
        (self.dw[0] >> 8) as u8 & 3
    }

    /// True if a reserved bit of dword 0 is set.
    #[inline(always)]
    #[must_use]
    pub const fn has_reserved(&self) -> bool {
        self.dw[0] >> 10 & 0xf != 0
    }

    /// A 64-bit field that starts at dword `i`.
    #[inline(always)]
    #[must_use]
    pub const fn qword(&self, i: usize) -> u64 {
        self.dw[i] as u64 | (self.dw[i + 1] as u64) << 32
    }

    /// The same entry with a 64-bit field set at dword `i`.
    #[inline(always)]
    #[must_use]
    pub const fn with_qword(mut self, i: usize, v: u64) -> Self {
        self.dw[i] = v as u32;
        self.dw[i + 1] = (v >> 32) as u32;
        self
    }

    /// The same entry with dword `i` set.
    #[inline(always)]
    #[must_use]
    pub const fn with_dw(mut self, i: usize, v: u32) -> Self {
        self.dw[i] = v;
        self
    }

    /// PRP entry 1.
    #[inline(always)]
    #[must_use]
    pub const fn prp1(&self) -> u64 {
        self.qword(6)
    }

    /// PRP entry 2.
    #[inline(always)]
    #[must_use]
    pub const fn prp2(&self) -> u64 {
        self.qword(8)
    }

    /// The same entry, its data described by two PRP entries.
    #[inline(always)]
    #[must_use]
    pub const fn with_prps(mut self, prp1: u64, prp2: u64) -> Self {
        self.dw[0] &= !(3 << 14);
        self.with_qword(6, prp1).with_qword(8, prp2)
    }

    /// The metadata pointer.
    #[inline(always)]
    #[must_use]
    pub const fn mptr(&self) -> u64 {
        self.qword(4)
    }

    /// The same entry with a metadata pointer.
    #[inline(always)]
    #[must_use]
    pub const fn with_mptr(self, mptr: u64) -> Self {
        self.with_qword(4, mptr)
    }
}

/// A completion queue entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C, align(16))]
pub struct Cqe {
    /// The four dwords.
    pub dw: [u32; 4],
}

impl Cqe {
    /// Bytes of an entry (IOCQES = 4).
    pub const BYTES: usize = 16;

    /// An entry as a controller writes it.
    #[inline(always)]
    #[must_use]
    pub const fn new(result: u32, sqhd: u16, sqid: u16, cid: u16, status: Status, phase: bool) -> Self {
        let dw3 = cid as u32 | (phase as u32) << 16 | (status.0 as u32) << 17;
        Self { dw: [result, 0, sqhd as u32 | (sqid as u32) << 16, dw3] }
    }

    /// The command's own result.
    #[inline(always)]
    #[must_use]
    pub const fn result(&self) -> u32 {
        self.dw[0]
    }

    /// How far the controller has fetched the submission queue.
    #[inline(always)]
    #[must_use]
    pub const fn sqhd(&self) -> u16 {
        self.dw[2] as u16
    }

    /// The submission queue that the command came from.
    #[inline(always)]
    #[must_use]
    pub const fn sqid(&self) -> u16 {
        (self.dw[2] >> 16) as u16
    }

    /// The command identifier.
    #[inline(always)]
    #[must_use]
    pub const fn cid(&self) -> u16 {
        self.dw[3] as u16
    }

    /// The phase tag.
    #[inline(always)]
    #[must_use]
    pub const fn phase(&self) -> bool {
        self.dw[3] >> 16 & 1 != 0
    }

    /// The status.
    #[inline(always)]
    #[must_use]
    pub const fn status(&self) -> Status {
        Status((self.dw[3] >> 17) as u16)
    }
}
