//! The rules for a ring of buffers. The engine has no scatter-gather: it has one 32-bit address register for each of
//! exactly 32 buffers of one size, so each buffer must be contiguous on the bus and below the DMA mask.

use core::fmt;

use crate::Format;

/// Buffers of a stream.
pub const BUFFERS: u32 = 32;
/// Alignment of buffers.
pub const PAGE: u64 = 4096;

/// Limits of a board: configuration, because boards differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BoardLimits {
    /// Maximum size of a buffer.
    pub max_bytes: u32,
    /// Address bits of its DMA engine.
    pub mask_bits: u8,
    /// Bursts are multiples of this size.
    pub granule: u32,
    /// Maximum number of bursts per block.
    pub max_bursts: u32,
    /// Maximum number of samples per burst.
    pub max_burst_samples: u32,
    /// Size of the FIFO, which must hold two bursts.
    pub fifo_bytes: u32,
}

impl BoardLimits {
    /// The receiver of a uSDR.
    pub const USDR_RX: Self = Self {
        max_bytes: 1 << 20,
        mask_bits: 32,
        granule: 8,
        max_bursts: 32,
        max_burst_samples: 8192,
        fifo_bytes: 64 << 10,
    };
    /// The transmitter of a uSDR, which takes a buffer as one burst; its FIFO holds 126 976 bytes.
    pub const USDR_TX: Self = Self {
        max_bytes: 128 << 10,
        mask_bits: 32,
        granule: 8,
        max_bursts: 1,
        max_burst_samples: 32768,
        fifo_bytes: 2 * 126_976,
    };

    /// The highest bus address that the engine can generate.
    #[must_use]
    pub const fn last_addr(&self) -> u64 {
        if self.mask_bits >= 64 { u64::MAX } else { (1 << self.mask_bits) - 1 }
    }
}

/// How samples are packed into blocks, one block per buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// The format of a sample.
    pub format: Format,
    /// Samples of a burst.
    pub burst_samples: u32,
    /// Bursts of a block.
    pub bursts: u32,
}

impl Shape {
    /// The largest block for a board.
    #[must_use]
    pub const fn largest(format: Format, limits: &BoardLimits) -> Self {
        let by_bytes = limits.fifo_bytes / 2 / format.bytes();
        let samples = if by_bytes < limits.max_burst_samples { by_bytes } else { limits.max_burst_samples };
        // Whole granules: sixteen samples of either format are.
        let samples = samples / 16 * 16;
        let fit = limits.max_bytes / (samples * format.bytes());
        Self {
            format,
            burst_samples: samples,
            bursts: if fit < limits.max_bursts { fit } else { limits.max_bursts },
        }
    }

    /// The block of at most `bytes` bytes with the fewest bursts.
    ///
    /// # Errors
    /// When not even one granule fits.
    pub const fn of_bytes(format: Format, limits: &BoardLimits, bytes: u32) -> Result<Self, Broken> {
        let largest = Self::largest(format, limits);
        let samples = bytes / format.bytes() / 16 * 16;
        if samples == 0 {
            return Err(Broken::Empty);
        }
        if samples <= largest.burst_samples {
            return Ok(Self { format, burst_samples: samples, bursts: 1 });
        }
        let bursts = samples.div_ceil(largest.burst_samples);
        let bursts = if bursts < limits.max_bursts { bursts } else { limits.max_bursts };
        let each = samples / bursts / 16 * 16;
        let each = if each < largest.burst_samples { each } else { largest.burst_samples };
        Ok(Self { format, burst_samples: each, bursts })
    }

    /// Samples per block.
    #[must_use]
    pub const fn samples(&self) -> u32 {
        self.burst_samples * self.bursts
    }

    /// Bytes per burst.
    #[must_use]
    pub const fn burst_bytes(&self) -> u32 {
        self.burst_samples * self.format.bytes()
    }

    /// Bytes per block.
    #[must_use]
    pub const fn bytes(&self) -> u32 {
        self.burst_bytes() * self.bursts
    }

    /// Distance between the starts of two buffers.
    #[must_use]
    pub const fn stride(&self) -> u64 {
        (self.bytes() as u64).next_multiple_of(PAGE)
    }

    /// Bytes of a ring.
    #[must_use]
    pub const fn ring_bytes(&self) -> u64 {
        self.stride() * BUFFERS as u64
    }

    /// Checks whether a board can fill such blocks.
    ///
    /// # Errors
    /// The violated rule.
    pub const fn check(&self, limits: &BoardLimits) -> Result<(), Broken> {
        if self.burst_samples == 0 || self.bursts == 0 {
            return Err(Broken::Empty);
        }
        if self.bursts > limits.max_bursts {
            return Err(Broken::Bursts { bursts: self.bursts, most: limits.max_bursts });
        }
        if self.burst_samples > limits.max_burst_samples || self.burst_bytes() > limits.fifo_bytes / 2 {
            return Err(Broken::Burst { samples: self.burst_samples, bytes: self.burst_bytes() });
        }
        if !self.burst_bytes().is_multiple_of(limits.granule) {
            return Err(Broken::Granule { bytes: self.burst_bytes(), granule: limits.granule });
        }
        if self.bytes() > limits.max_bytes {
            return Err(Broken::Size { bytes: self.bytes(), most: limits.max_bytes });
        }
        Ok(())
    }
}

/// The addresses of a ring's buffers, in the form of the registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingAddresses(pub [u32; BUFFERS as usize]);

impl RingAddresses {
    /// Cuts mapped memory into buffers. `runs` are its contiguous ranges of bus addresses, start and length, in order.
    ///
    /// # Errors
    /// The violated rule.
    pub fn plan(
        shape: &Shape,
        limits: &BoardLimits,
        runs: impl Iterator<Item = (u64, u64)> + Clone,
    ) -> Result<Self, Broken> {
        shape.check(limits)?;
        let have = runs.clone().fold(0u64, |sum, (_, len)| sum.saturating_add(len));
        if have < shape.ring_bytes() {
            return Err(Broken::Count { bytes: have, need: shape.ring_bytes() });
        }
        let mut ring = [0; BUFFERS as usize];
        for (buffer, register) in (0u32..).zip(&mut ring) {
            let from = u64::from(buffer) * shape.stride();
            let start = contiguous(runs.clone(), from, u64::from(shape.bytes()))
                .ok_or(Broken::Contiguous { buffer, bytes: shape.bytes() })?;
            if !start.is_multiple_of(PAGE) {
                return Err(Broken::Alignment { buffer, addr: start });
            }
            let last = start.saturating_add(u64::from(shape.bytes()) - 1);
            if last > limits.last_addr() || last > u64::from(u32::MAX) {
                return Err(Broken::Mask { buffer, addr: last, bits: limits.mask_bits });
            }
            *register = start as u32;
        }
        Ok(Self(ring))
    }
}

/// The bus address of `bytes` bytes from offset `from` on, if they are contiguous; adjacent runs count as one.
fn contiguous(runs: impl Iterator<Item = (u64, u64)>, from: u64, bytes: u64) -> Option<u64> {
    let (mut at, mut start, mut got) = (0u64, None, 0u64);
    for (addr, len) in runs {
        let end = at.saturating_add(len);
        if end > from {
            let skip = from.saturating_sub(at);
            let here = addr.checked_add(skip)?;
            match start {
                None => start = Some(here),
                Some(begun) if u64::checked_add(begun, got) != Some(here) => return None,
                Some(_) => {}
            }
            got = got.saturating_add(len - skip);
            if got >= bytes {
                return start;
            }
        }
        at = end;
    }
    None
}

/// The rule that a ring violates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Broken {
    /// No sample fits a buffer.
    Empty,
    /// There is not enough memory for 32 buffers.
    Count {
        /// Available bytes.
        bytes: u64,
        /// Required bytes.
        need: u64,
    },
    /// A buffer is too large.
    Size {
        /// Its size.
        bytes: u32,
        /// The maximum.
        most: u32,
    },
    /// A burst has too many samples or bytes.
    Burst {
        /// Its samples.
        samples: u32,
        /// Its size.
        bytes: u32,
    },
    /// A block has too many bursts.
    Bursts {
        /// Its bursts.
        bursts: u32,
        /// The maximum.
        most: u32,
    },
    /// A burst is not a whole number of granules.
    Granule {
        /// Its size.
        bytes: u32,
        /// Size of a granule.
        granule: u32,
    },
    /// A buffer is not contiguous on the bus.
    Contiguous {
        /// The buffer.
        buffer: u32,
        /// Its size.
        bytes: u32,
    },
    /// A buffer does not begin on a page.
    Alignment {
        /// The buffer.
        buffer: u32,
        /// Its address.
        addr: u64,
    },
    /// A buffer exceeds the engine's address bits.
    Mask {
        /// The buffer.
        buffer: u32,
        /// Address of its last byte.
        addr: u64,
        /// Address bits.
        bits: u8,
    },
}

impl Broken {
    /// The rule's name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Count { .. } => "count",
            Self::Size { .. } => "size",
            Self::Burst { .. } => "burst",
            Self::Bursts { .. } => "bursts",
            Self::Granule { .. } => "granule",
            Self::Contiguous { .. } => "contiguous",
            Self::Alignment { .. } => "alignment",
            Self::Mask { .. } => "mask",
        }
    }

    /// How to fix it.
    #[must_use]
    pub const fn fix(&self) -> &'static str {
        match self {
            Self::Empty | Self::Size { .. } => "Use another buffer size (--buffer)",
            Self::Burst { .. } | Self::Bursts { .. } | Self::Granule { .. } => {
                "Let the buffer size choose the bursts, in multiples of 16 samples"
            }
            Self::Count { .. } => "Allocate 32 buffers of one size",
            Self::Contiguous { .. } => {
                "Enable the IOMMU in translated mode (iommu=nopt), which joins scattered pages"
            }
            Self::Alignment { .. } => "Align each buffer to a page of 4 KiB",
            Self::Mask { .. } => {
                "Enable the IOMMU in translated mode (iommu=nopt), or place BAR1 below 4 GiB: Resizable BAR and Above 4G \
                 Decoding off"
            }
        }
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "no sample fits the buffer"),
            Self::Count { bytes, need } => {
                write!(f, "32 buffers need {need} bytes, and {bytes} are mapped")
            }
            Self::Size { bytes, most } => {
                write!(f, "a buffer of {bytes} bytes is more than the board's {most}")
            }
            Self::Burst { samples, bytes } => {
                write!(f, "a burst of {samples} samples, {bytes} bytes, is more than the board's FIFO takes")
            }
            Self::Bursts { bursts, most } => {
                write!(f, "{bursts} bursts in a block are more than the board's {most}")
            }
            Self::Granule { bytes, granule } => {
                write!(f, "a burst of {bytes} bytes is not a multiple of {granule}")
            }
            Self::Contiguous { buffer, bytes } => {
                write!(f, "the {bytes} bytes of buffer {buffer} are not contiguous on the bus")
            }
            Self::Alignment { buffer, addr } => {
                write!(f, "buffer {buffer} begins at bus {addr:#x}, not on a page")
            }
            Self::Mask { buffer, addr, bits } => {
                write!(f, "buffer {buffer} ends at bus {addr:#x}, beyond the board's {bits} address bits")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    const RX: BoardLimits = BoardLimits::USDR_RX;

    fn plan(shape: &Shape, runs: &[(u64, u64)]) -> Result<RingAddresses, Broken> {
        RingAddresses::plan(shape, &RX, runs.iter().copied())
    }

    #[test]
    fn the_largest_blocks_are_the_boards() {
        let ci16 = Shape::largest(Format::Ci16, &RX);
        assert_eq!((ci16.bytes(), ci16.bursts, ci16.burst_samples), (1 << 20, 32, 8192));
        let ci12 = Shape::largest(Format::Ci12, &RX);
        assert_eq!((ci12.bytes(), ci12.bursts), (768 << 10, 32));
        let tx = Shape::largest(Format::Ci16, &BoardLimits::USDR_TX);
        assert_eq!((tx.bytes(), tx.bursts), (126_976, 1));
    }

    #[test]
    fn sizes_that_are_asked_for_keep_the_rules() {
        for format in Format::ALL {
            for bytes in [64, 96, 4096, 5000, 65536, 100_000, 1 << 20, u32::MAX] {
                let shape = Shape::of_bytes(format, &RX, bytes).unwrap();
                assert_eq!(shape.check(&RX), Ok(()), "{format} {bytes}: {shape:?}");
                assert!(shape.bytes() <= bytes);
            }
            assert_eq!(Shape::of_bytes(format, &RX, 15), Err(Broken::Empty));
        }
    }

    #[test]
    fn each_rule_is_refused_by_name() {
        let shape = Shape { format: Format::Ci16, burst_samples: 1024, bursts: 2 };
        let bytes = shape.ring_bytes();
        let whole = plan(&shape, &[(0x1000_0000, bytes)]).unwrap();
        assert_eq!((whole.0[0], whole.0[31]), (0x1000_0000, 0x1000_0000 + 31 * 8192));
        // Adjacent ranges count as one, and separate ranges may each hold whole buffers.
        let halves = [(0x1000_0000, bytes / 2), (0x1000_0000 + bytes / 2, bytes / 2)];
        assert_eq!(plan(&shape, &halves).unwrap(), whole);
        let apart: Vec<_> = (0..32u64).rev().map(|i| (i << 20, 8192)).collect();
        assert_eq!(plan(&shape, &apart).unwrap().0[0], 31 << 20);
        let pages: Vec<_> = (0..bytes / 4096).map(|i| (i << 14, 4096)).collect();
        type Case<'a> = (&'a Shape, &'a [(u64, u64)], &'a str);
        let cases: [Case<'_>; 9] = [
            (&shape, &pages, "contiguous"),
            (&shape, &[(0x1000_0000, bytes - 1)], "count"),
            (&shape, &[(0x1000_0010, bytes)], "alignment"),
            (&shape, &[(0xffff_f000, bytes)], "mask"),
            (&shape, &[(1 << 38, bytes)], "mask"),
            (&Shape { bursts: 33, ..shape }, &[(0, 1 << 30)], "bursts"),
            (&Shape { burst_samples: 8193, ..shape }, &[(0, 1 << 30)], "burst"),
            (&Shape { burst_samples: 1023, ..shape }, &[(0, 1 << 30)], "granule"),
            (&Shape { bursts: 0, ..shape }, &[(0, 1 << 30)], "empty"),
        ];
        for (shape, runs, rule) in cases {
            let broken = plan(shape, runs).unwrap_err();
            assert_eq!(broken.name(), rule, "{broken}");
            assert!(!broken.fix().is_empty());
        }
        let narrow = BoardLimits { max_bytes: 4096, ..RX };
        assert_eq!(shape.check(&narrow).unwrap_err().name(), "size");
        assert_eq!(plan(&shape, &[(u64::MAX - 4095, bytes)]).unwrap_err().name(), "mask");
    }
}
