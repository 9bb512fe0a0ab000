//! Samples in wire format.

use core::fmt;

/// How a complex sample is packed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Format {
    /// Sixteen bits each, I first, little-endian.
    Ci16,
    /// Twelve bits each, I first, in three bytes, the lowest bits first.
    Ci12,
}

/// A complex sample of 16-bit components; 12-bit ones are in the upper bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sample {
    /// In phase.
    pub i: i16,
    /// In quadrature.
    pub q: i16,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 2] = [Self::Ci16, Self::Ci12];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ci16 => "ci16",
            Self::Ci12 => "ci12",
        }
    }

    /// Bytes of a sample.
    #[must_use]
    #[inline(always)]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Ci16 => 4,
            Self::Ci12 => 3,
        }
    }

    /// The front end's code for its width.
    #[must_use]
    pub const fn width(self) -> u32 {
        match self {
            Self::Ci12 => 2,
            Self::Ci16 => 3,
        }
    }

    /// The format of a width.
    #[must_use]
    pub const fn of_width(width: u32) -> Option<Self> {
        match width {
            2 => Some(Self::Ci12),
            3 => Some(Self::Ci16),
            _ => None,
        }
    }

    /// The transmitted bits of a component.
    #[must_use]
    #[inline(always)]
    pub const fn mask(self) -> u32 {
        match self {
            Self::Ci16 => u32::MAX,
            Self::Ci12 => 0xff_ffff,
        }
    }

    /// Decodes a sample, I in the lower half.
    #[must_use]
    #[inline(always)]
    pub const fn sample(self, bits: u32) -> Sample {
        match self {
            Self::Ci16 => Sample { i: bits as i16, q: (bits >> 16) as i16 },
            Self::Ci12 => Sample { i: (bits << 4) as i16, q: (bits >> 8 & 0xfff0) as i16 },
        }
    }

    /// Encodes a sample.
    #[must_use]
    #[inline(always)]
    pub const fn bits(self, sample: Sample) -> u32 {
        match self {
            Self::Ci16 => sample.i as u16 as u32 | (sample.q as u16 as u32) << 16,
            Self::Ci12 => (sample.i as u16 as u32) >> 4 | (sample.q as u16 as u32 & 0xfff0) << 8,
        }
    }

    /// The bits of four samples from the words that hold them: four words of `ci16`, the first three of `ci12`.
    #[must_use]
    #[inline(always)]
    pub const fn four(self, words: [u32; 4]) -> [u32; 4] {
        let [a, b, c, _] = words;
        match self {
            Self::Ci16 => words,
            Self::Ci12 => [a & 0xff_ffff, a >> 24 | (b & 0xffff) << 8, b >> 16 | (c & 0xff) << 16, c >> 8],
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_survive_the_wire() {
        for value in [i16::MIN, -16, 0, 16, 2047 << 4] {
            for other in [i16::MIN, -4096, 16, 32752] {
                let sample = Sample { i: value, q: other };
                for format in Format::ALL {
                    let bits = format.bits(sample);
                    assert_eq!(bits & !format.mask(), 0);
                    assert_eq!(format.sample(bits), sample, "{format}");
                }
            }
        }
    }

    #[test]
    fn four_samples_of_twelve_bits_lie_in_three_words() {
        let bits = [0x00ab_cdef, 0x0012_3456, 0x0078_9abc, 0x00de_f012];
        let bytes: std::vec::Vec<u8> =
            bits.iter().flat_map(|b: &u32| b.to_le_bytes()[..3].to_vec()).collect();
        let word = |i: usize| u32::from_le_bytes(bytes[i * 4..i * 4 + 4].try_into().unwrap());
        assert_eq!(Format::Ci12.four([word(0), word(1), word(2), 0]), bits);
    }
}
