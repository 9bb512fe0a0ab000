//! Links: speed and width between a device and the port above it, present and maximum.

use std::fmt;

use serde::{Serialize, Serializer};

/// The rate of one lane, in tenths of a gigatransfer per second.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Speed(u16);

/// Number of lanes.
pub type Width = u8;

/// Tenths of GT/s by generation, starting with the first.
const GENERATIONS: [u16; 6] = [25, 50, 80, 160, 320, 640];

impl Speed {
    /// Parses sysfs' form, such as `16.0 GT/s PCIe` or `8 GT/s`; `None` if it is not a PCIe rate.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let number = text.split_once(" GT/s")?.0;
        let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
        let plain = |part: &str| (1..=3).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
        if !plain(whole) || !plain(tenth) {
            return None;
        }
        let tenths = whole.parse::<u16>().ok()? * 10 + tenth[..1].parse::<u16>().ok()?;
        GENERATIONS.contains(&tenths).then_some(Self(tenths))
    }

    /// Decodes the value used in registers.
    #[must_use]
    pub fn of_generation(generation: u8) -> Option<Self> {
        GENERATIONS.get(usize::from(generation.checked_sub(1)?)).copied().map(Self)
    }

    /// The PCIe generation.
    #[must_use]
    pub fn generation(self) -> u8 {
        GENERATIONS.iter().position(|speed| *speed == self.0).map_or(0, |at| at as u8 + 1)
    }

    /// Bytes per second that one lane carries in each direction: the rate less the line code. Packet overhead is not
    /// included.
    #[must_use]
    pub fn bytes_per_second(self) -> f64 {
        let code = match self.generation() {
            1 | 2 => 8.0 / 10.0,
            6 => 242.0 / 256.0,
            _ => 128.0 / 130.0,
        };
        f64::from(self.0) * 1e8 * code / 8.0
    }
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gen{}", self.generation())
    }
}

impl Serialize for Speed {
    /// In GT/s.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(f64::from(self.0) / 10.0)
    }
}

/// A device's link to the port above it. Unknown values are `None`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Link {
    /// The present rate.
    pub speed: Option<Speed>,
    /// The present width.
    pub width: Option<Width>,
    /// The maximum rate of this end.
    pub max_speed: Option<Speed>,
    /// The maximum width of this end.
    pub max_width: Option<Width>,
}

impl Link {
    /// Present bytes per second in each direction.
    #[must_use]
    pub fn rate(&self) -> Option<f64> {
        Some(self.speed?.bytes_per_second() * f64::from(self.width?))
    }

    /// Maximum bytes per second in each direction.
    #[must_use]
    pub fn max_rate(&self) -> Option<f64> {
        Some(self.max_speed?.bytes_per_second() * f64::from(self.max_width?))
    }

    /// Such as `Gen4 x16`; `None` if rate or width is unknown.
    #[must_use]
    pub fn now(&self) -> Option<String> {
        Some(format!("{} x{}", self.speed?, self.width?))
    }

    /// The same for the maximum of this end.
    #[must_use]
    pub fn best(&self) -> Option<String> {
        Some(format!("{} x{}", self.max_speed?, self.max_width?))
    }
}

/// Parses sysfs' width; 0 and 255 mean unknown.
pub(crate) fn lanes(text: &str) -> Option<Width> {
    text.parse().ok().filter(|lanes| (1..=32).contains(lanes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_known_by_their_words() {
        for (text, generation) in [
            ("2.5 GT/s PCIe", 1),
            ("5 GT/s", 2),
            ("8.0 GT/s PCIe", 3),
            ("16.0 GT/s PCIe", 4),
            ("64.0 GT/s PCIe", 6),
        ] {
            let speed = Speed::parse(text).unwrap();
            assert_eq!((speed.generation(), Speed::of_generation(generation)), (generation, Some(speed)));
        }
        for bad in ["", "Unknown", " GT/s", "-5 GT/s", "7.0 GT/s", "99999 GT/s", "2. GT/s", "2.5"] {
            assert_eq!(Speed::parse(bad), None, "{bad}");
        }
        assert_eq!((Speed::of_generation(0), Speed::of_generation(7)), (None, None));
        assert_eq!((lanes("16"), lanes("0"), lanes("255"), lanes("x")), (Some(16), None, None, None));
    }

    #[test]
    fn a_link_carries_what_the_line_code_leaves() {
        let speed = Speed::of_generation;
        let link = Link { speed: speed(4), width: Some(4), max_speed: speed(5), max_width: Some(4) };
        assert_eq!(link.now().as_deref(), Some("Gen4 x4"));
        assert!((link.rate().unwrap() / 1e9 - 7.877).abs() < 0.001);
        let old = Link { speed: speed(2), width: Some(2), ..Link::default() };
        assert!((old.rate().unwrap() - 1e9).abs() < 1.0 && old.max_rate().is_none());
    }
}
