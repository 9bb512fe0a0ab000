//! Scatter gather lists: 16-byte descriptors, and a strict walk over a list as a controller reads it.

use core::fmt;

use crate::wire::{bits, flags};
use crate::{BusAddr, Sqe, Status};

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: u64 = 16;

/// A descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Descriptor {
    /// Bytes of the buffer.
    Data {
        /// Where they lie.
        at: BusAddr,
        /// How many.
        len: u32,
    },
    /// Bytes that a read discards; a write has none of them.
    BitBucket {
        /// How many.
        len: u32,
    },
    /// The next segment, which ends in another pointer.
    Segment {
        /// Where it lies.
        at: BusAddr,
        /// Its bytes.
        len: u32,
    },
    /// The next and last segment.
    LastSegment {
        /// Where it lies.
        at: BusAddr,
        /// Its bytes.
        len: u32,
    },
}

impl Descriptor {
    /// The descriptor as two qwords, the lower first.
    #[inline(always)]
    #[must_use]
    pub const fn encode(self) -> (u64, u64) {
        let (at, len, kind) = match self {
            Self::Data { at, len } => (at.0, len, 0u64),
            Self::BitBucket { len } => (0, len, 1),
            Self::Segment { at, len } => (at.0, len, 2),
            Self::LastSegment { at, len } => (at.0, len, 3),
        };
        (at, len as u64 | kind << 60)
    }

    /// The descriptor as it travels.
    #[inline]
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        let (low, high) = self.encode();
        (low as u128 | (high as u128) << 64).to_le_bytes()
    }

    /// A descriptor from its two qwords; refuses keyed, transport, vendor and unknown kinds.
    #[inline]
    pub const fn decode(low: u64, high: u64) -> Result<Self, BadKind> {
        let (at, len) = (BusAddr(low), high as u32);
        match (high >> 56) as u8 {
            0x00 => Ok(Self::Data { at, len }),
            0x10 => Ok(Self::BitBucket { len }),
            0x20 => Ok(Self::Segment { at, len }),
            0x30 => Ok(Self::LastSegment { at, len }),
            kind => Err(BadKind(kind)),
        }
    }

    /// A descriptor from its bytes; refuses what [`Descriptor::decode`] refuses.
    #[inline]
    pub const fn from_bytes(bytes: &[u8; 16]) -> Result<Self, BadKind> {
        let all = u128::from_le_bytes(*bytes);
        Self::decode(all as u64, (all >> 64) as u64)
    }

    /// The command with this descriptor as its data pointer.
    #[inline(always)]
    #[must_use]
    pub const fn put_in(self, mut sqe: Sqe) -> Sqe {
        let (low, high) = self.encode();
        sqe.dw[0] = sqe.dw[0] & !(3 << 14) | 1 << 14;
        sqe.with_qword(6, low).with_qword(8, high)
    }

    /// The descriptor in a command's data pointer.
    #[inline]
    pub const fn of(sqe: &Sqe) -> Result<Self, BadKind> {
        Self::decode(sqe.qword(6), sqe.qword(8))
    }
}

/// The type and subtype of a descriptor that a PCIe controller cannot follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadKind(pub u8);

impl fmt::Display for BadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 >> 4 {
            0..=3 => "unknown subtype",
            4 => "keyed data block",
            5 => "transport data block",
            0xf => "vendor specific",
            _ => "unknown type",
        };
        write!(f, "SGL descriptor {:#04x} ({name})", self.0)
    }
}

impl core::error::Error for BadKind {}

/// SGLS of Identify Controller (bytes 539:536): which lists the controller takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(transparent)]
pub struct Support(pub u32);

impl Support {
    /// `kind`: no SGLs.
    pub const NONE: u8 = 0;
    /// `kind`: SGLs of any alignment.
    pub const ANY_ALIGNMENT: u8 = 1;
    /// `kind`: SGLs whose data blocks are aligned to dwords and count whole dwords.
    pub const DWORDS: u8 = 2;

    bits! { u32;
        /// None, any alignment, or dwords.
        kind with_kind 0 2 u8;
        /// Recommended most descriptors of a command; 0 says nothing.
        threshold with_threshold 8 8 u8;
    }
    flags! { u32;
        /// Keyed data blocks.
        keyed with_keyed 2;
        /// Bit buckets.
        bit_bucket with_bit_bucket 16;
        /// A contiguous metadata buffer of any alignment.
        byte_metadata with_byte_metadata 17;
        /// A list may be longer than the transfer.
        longer with_longer 18;
        /// A metadata pointer that holds a descriptor.
        metadata_sgl with_metadata_sgl 19;
        /// Addresses that are offsets.
        offsets with_offsets 20;
        /// Transport data blocks.
        transport with_transport 21;
    }

    /// True if data may be described by SGLs at all.
    #[inline]
    #[must_use]
    pub const fn usable(self) -> bool {
        matches!(self.kind(), Self::ANY_ALIGNMENT | Self::DWORDS)
    }
}

/// Which rule a list breaks, or why it cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SglError<E> {
    /// A kind of descriptor that is not for PCIe, or unknown.
    Kind(BadKind),
    /// A bit bucket, which the controller does not know.
    BitBucket,
    /// A data block that is not aligned to dwords, on a controller that requires this.
    Granularity {
        /// Where the block lies.
        at: BusAddr,
        /// Its bytes.
        len: u32,
    },
    /// The address of a segment is not qword aligned.
    SegmentUnaligned(BusAddr),
    /// The length of a segment is zero or not a multiple of 16.
    SegmentLength(u32),
    /// A segment pointer before the end of its segment.
    SegmentPlace,
    /// A segment pointer in the last segment.
    SegmentInLast,
    /// A segment that should end in a pointer does not.
    NoNextSegment,
    /// The list is shorter than the transfer.
    Short {
        /// Bytes without a place.
        missing: u64,
    },
    /// The list is longer than the transfer, and the controller does not allow that.
    Long,
    /// The list has more descriptors than the controller will follow.
    TooMany,
    /// A segment could not be read.
    Read(E),
}

impl<E> SglError<E> {
    /// What a controller answers.
    #[must_use]
    pub const fn status(&self) -> Status {
        match self {
            Self::Kind(_) | Self::BitBucket => Status::SGL_TYPE_INVALID,
            Self::Granularity { .. } => Status::SGL_GRANULARITY_INVALID,
            Self::SegmentUnaligned(_) | Self::SegmentLength(_) => Status::INVALID_SGL_SEGMENT,
            Self::SegmentInLast | Self::NoNextSegment => Status::INVALID_SGL_SEGMENT,
            Self::SegmentPlace | Self::TooMany => Status::INVALID_SGL_COUNT,
            Self::Short { .. } | Self::Long => Status::DATA_SGL_LENGTH_INVALID,
            Self::Read(_) => Status::DATA_TRANSFER_ERROR,
        }
    }
}

impl<E: fmt::Display> fmt::Display for SglError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(kind) => write!(f, "{kind} is not for PCIe"),
            Self::BitBucket => f.write_str("bit buckets are not supported"),
            Self::Granularity { at, len } => write!(f, "SGL data block {at} + {len} is not made of dwords"),
            Self::SegmentUnaligned(at) => write!(f, "SGL segment {at} is not qword aligned"),
            Self::SegmentLength(len) => write!(f, "SGL segment of {len} bytes"),
            Self::SegmentPlace => f.write_str("SGL segment pointer before the end of its segment"),
            Self::SegmentInLast => f.write_str("SGL segment pointer in the last segment"),
            Self::NoNextSegment => f.write_str("SGL segment does not lead to the next"),
            Self::Short { missing } => write!(f, "the SGL is {missing} bytes short"),
            Self::Long => f.write_str("the SGL is longer than the transfer"),
            Self::TooMany => f.write_str("the SGL has too many descriptors"),
            Self::Read(e) => write!(f, "the SGL cannot be read: {e}"),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for SglError<E> {}

/// Where a part of a transfer goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// To or from memory.
    Memory {
        /// Where.
        at: BusAddr,
        /// Bytes, never zero.
        len: u64,
    },
    /// Nowhere: the bytes are discarded.
    Discard {
        /// Bytes, never zero.
        len: u64,
    },
}

/// What a walk needs to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// What the controller supports.
    pub support: Support,
    /// The controller reads the buffer (a write command), so bit buckets count nothing.
    pub is_source: bool,
    /// Most descriptors to follow; ends loops.
    pub max_descriptors: u32,
}

/// The parts of a transfer as a controller sees them; stops after the first error.
pub struct Walk<R> {
    rules: Rules,
    left: u64,
    /// The descriptor to take next; none if it must be read from the segment.
    ready: Option<(u64, u64)>,
    /// Where in the segment the next descriptor lies, and how many are left.
    at: u64,
    in_segment: u32,
    /// The current segment must end in a pointer.
    more_segments: bool,
    count: u32,
    done: bool,
    read: R,
}

impl<R> Walk<R> {
    /// A walk over `len` bytes from the descriptor in a command; `read` fetches one as two qwords.
    #[inline]
    pub const fn new<E>(descriptor: (u64, u64), len: u64, rules: Rules, read: R) -> Self
    where
        R: FnMut(BusAddr) -> Result<(u64, u64), E>,
    {
        Self {
            rules,
            left: len,
            ready: Some(descriptor),
            at: 0,
            in_segment: 0,
            more_segments: false,
            count: 0,
            done: false,
            read,
        }
    }

    /// Enters a segment.
    fn enter<E>(&mut self, at: BusAddr, len: u32, more: bool) -> Result<(), SglError<E>> {
        if at.0 & 7 != 0 {
            return Err(SglError::SegmentUnaligned(at));
        }
        if len == 0 || !(len as u64).is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(SglError::SegmentLength(len));
        }
        self.at = at.0;
        self.in_segment = (len as u64 / DESCRIPTOR_BYTES) as u32;
        self.more_segments = more;
        Ok(())
    }

    /// The next descriptor and whether a segment pointer may stand in its place; none at the end of the list.
    fn fetch<E>(&mut self) -> Result<Option<(Descriptor, bool)>, SglError<E>>
    where
        R: FnMut(BusAddr) -> Result<(u64, u64), E>,
    {
        let (words, pointer_fits) = if let Some(words) = self.ready.take() {
            (words, true)
        } else if self.in_segment == 0 {
            return Ok(None);
        } else {
            if self.count >= self.rules.max_descriptors {
                return Err(SglError::TooMany);
            }
            let words = (self.read)(BusAddr(self.at)).map_err(SglError::Read)?;
            self.at = self.at.wrapping_add(DESCRIPTOR_BYTES);
            self.in_segment -= 1;
            (words, self.more_segments && self.in_segment == 0)
        };
        self.count += 1;
        match Descriptor::decode(words.0, words.1) {
            Ok(descriptor) => Ok(Some((descriptor, pointer_fits))),
            Err(kind) => Err(SglError::Kind(kind)),
        }
    }

    /// The next part; none at the end of the list.
    fn step<E>(&mut self) -> Result<Option<Part>, SglError<E>>
    where
        R: FnMut(BusAddr) -> Result<(u64, u64), E>,
    {
        loop {
            let in_command = self.ready.is_some();
            let Some((descriptor, pointer_fits)) = self.fetch()? else {
                let missing = self.left;
                return if missing == 0 { Ok(None) } else { Err(SglError::Short { missing }) };
            };
            let is_pointer =
                matches!(descriptor, Descriptor::Segment { .. } | Descriptor::LastSegment { .. });
            if is_pointer && !pointer_fits {
                return Err(if self.more_segments {
                    SglError::SegmentPlace
                } else {
                    SglError::SegmentInLast
                });
            }
            if !is_pointer && pointer_fits && !in_command {
                return Err(SglError::NoNextSegment);
            }
            let part = match descriptor {
                Descriptor::Segment { at, len } => {
                    self.enter(at, len, true)?;
                    continue;
                }
                Descriptor::LastSegment { at, len } => {
                    self.enter(at, len, false)?;
                    continue;
                }
                Descriptor::Data { at, len } => {
                    if self.rules.support.kind() == Support::DWORDS && (at.0 | len as u64) & 3 != 0 {
                        return Err(SglError::Granularity { at, len });
                    }
                    Part::Memory { at, len: self.take(len)? }
                }
                Descriptor::BitBucket { .. } if !self.rules.support.bit_bucket() => {
                    return Err(SglError::BitBucket);
                }
                Descriptor::BitBucket { .. } if self.rules.is_source => continue,
                Descriptor::BitBucket { len } => Part::Discard { len: self.take(len)? },
            };
            match part {
                Part::Memory { len: 0, .. } | Part::Discard { len: 0 } => continue,
                part => return Ok(Some(part)),
            }
        }
    }

    /// How many of a descriptor's bytes the transfer uses.
    fn take<E>(&mut self, len: u32) -> Result<u64, SglError<E>> {
        let used = (len as u64).min(self.left);
        if used < len as u64 && !self.rules.support.longer() {
            return Err(SglError::Long);
        }
        self.left -= used;
        Ok(used)
    }
}

impl<E, R: FnMut(BusAddr) -> Result<(u64, u64), E>> Iterator for Walk<R> {
    type Item = Result<Part, SglError<E>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let step = self.step();
        self.done = !matches!(step, Ok(Some(_)));
        step.transpose()
    }
}
