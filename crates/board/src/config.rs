//! Configuration of the board and its machine.

use onehop_radio::BoardLimits;

use crate::mapper::LOW_BAR;
use crate::{Error, Result, Signal};

/// How bus addresses of memory are assigned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Iommu {
    /// A translating IOMMU: all memory is contiguous and below 4 GiB.
    Translated,
    /// No IOMMU: GPU memory is at its BAR's address, and memory that the mapper did not allocate is scattered.
    Off,
}

/// What happens to accesses to GPU memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum P2p {
    /// They arrive.
    Works,
    /// Writes arrive, reads do not: as with root ports that only forward posted writes.
    WritesOnly,
    /// Accesses are dropped silently.
    Dropped,
    /// The mapping is refused.
    Refused,
}

/// Bursts that never arrive, as after a FIFO overflow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Missing {
    /// Which bursts of a block, one bit each, starting with the lowest.
    pub bursts: u32,
    /// Every how many blocks they are missing.
    pub every: u64,
}

impl Missing {
    /// The bursts of a block that arrive; blocks are counted from 0.
    pub(crate) fn arriving(self, block: u64, bursts: u32) -> u32 {
        let all = u32::MAX.checked_shr(32 - bursts.min(32)).unwrap_or(0);
        if block % self.every == self.every - 1 { all & !self.bursts } else { all }
    }

    /// Parses bursts and ranges of them, counted from 0 and separated by `+`, followed by `@n=EVERY`: `0+3-5@n=7`.
    fn parse(text: &str) -> Option<Self> {
        let (list, every) = text.split_once("@n=").unwrap_or((text, "1"));
        let mut bursts = 0;
        for range in list.split('+') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
            if first > last || last >= BoardLimits::USDR_RX.max_bursts {
                return None;
            }
            bursts |= u32::MAX << first & u32::MAX >> (31 - last);
        }
        Some(Self { bursts, every: every.parse().ok().filter(|every| *every > 0)? })
    }
}

/// A board and its machine.
#[derive(Clone, PartialEq, Debug)]
pub struct BoardConfig {
    /// PCI vendor ID.
    pub vendor: u16,
    /// PCI device ID.
    pub device: u16,
    /// Samples per second.
    pub rate: f64,
    /// The received signal.
    pub signal: Signal,
    /// Whether its clock waits for software instead of losing samples: unlike any board, but useful for measuring the
    /// path.
    pub patient: bool,
    /// Maximum size of a receive buffer.
    pub max_bytes: u32,
    /// Address bits of its DMA engines.
    pub mask_bits: u8,
    /// Whether events contain the sample clock.
    pub reports_time: bool,
    /// Bursts that never arrive.
    pub missing: Option<Missing>,
    /// Whether losses are not reported: a fault that tests the detection of losses.
    pub losses_unreported: bool,
    /// How bus addresses of memory are assigned.
    pub iommu: Iommu,
    /// Bus address of GPU memory without an IOMMU.
    pub bar: u64,
    /// What happens to accesses to GPU memory.
    pub p2p: P2p,
    /// Whether it supports function level reset.
    pub flr: bool,
}

impl Default for BoardConfig {
    fn default() -> Self {
        Self {
            vendor: 0x10ee,
            device: 0x7045,
            rate: 10e6,
            signal: Signal::default(),
            patient: false,
            max_bytes: 1 << 20,
            mask_bits: 32,
            reports_time: true,
            missing: None,
            losses_unreported: false,
            iommu: Iommu::Translated,
            bar: 0x60_0000_0000,
            p2p: P2p::Works,
            flr: true,
        }
    }
}

const OPTIONS: &str =
    "rate, signal, freq, level, dc, patient, id, max, mask, time, missing, untold, iommu, bar, p2p, flr";

impl BoardConfig {
    /// Parses what follows `sim:`: the name `usdr`, and options behind a `?`, separated by `&`.
    ///
    /// # Errors
    /// Which option is wrong, and what it takes.
    pub fn parse(text: &str) -> Result<Self> {
        let (name, options) = text.split_once('?').unwrap_or((text, ""));
        if !matches!(name, "usdr" | "") {
            return Err(Error::UnknownBoard(name.escape_debug().to_string()));
        }
        let mut config = Self::default();
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            config.set(name, value)?;
        }
        Ok(config)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        match name {
            "rate" => {
                self.rate = number(value, 1e3, 4e9)
                    .ok_or_else(|| bad("rate", value, "samples per second: 1k to 4G"))?
            }
            "signal" => {
                self.signal.kind = Signal::kind(value).ok_or_else(|| bad("signal", value, Signal::KINDS))?;
            }
            "freq" => {
                self.signal.freq = number(value, -0.5, 0.5)
                    .ok_or_else(|| bad("freq", value, "a fraction of the rate: -0.5 to 0.5"))?;
            }
            "level" => {
                self.signal.level =
                    number(value, -120.0, 0.0).ok_or_else(|| bad("level", value, "dBFS: -120 to 0"))?;
            }
            "dc" => {
                self.signal.dc = number(value, -1.0, 1.0)
                    .ok_or_else(|| bad("dc", value, "a fraction of full scale: -1 to 1"))?;
            }
            "patient" => self.patient = flag("patient", value)?,
            "time" => self.reports_time = flag("time", value)?,
            "missing" => {
                let missing = Missing::parse(value)
                    .ok_or_else(|| bad("missing", value, "bursts of a block, 0 to 31, as in 0+3-5@n=7"))?;
                self.missing = Some(missing);
            }
            "untold" => self.losses_unreported = flag("untold", value)?,
            "flr" => self.flr = flag("flr", value)?,
            "id" => {
                (self.vendor, self.device) =
                    ids(value).ok_or_else(|| bad("id", value, "vendor:device in hex"))?
            }
            "max" => {
                let bytes = number(value, 4096.0, 1048576.0).filter(|bytes| bytes % 4096.0 == 0.0);
                self.max_bytes =
                    bytes.ok_or_else(|| bad("max", value, "pages of 4096 bytes, up to 1048576"))? as u32;
            }
            "mask" => {
                let bits = value.parse().ok().filter(|bits| (24..=64).contains(bits));
                self.mask_bits = bits.ok_or_else(|| bad("mask", value, "address bits: 24 to 64"))?;
            }
            "iommu" => {
                self.iommu = match value {
                    "translated" | "on" => Iommu::Translated,
                    "off" => Iommu::Off,
                    _ => return Err(bad("iommu", value, "translated or off")),
                };
            }
            "bar" => {
                self.bar = match value {
                    "low" => LOW_BAR,
                    "high" => 0x60_0000_0000,
                    _ => return Err(bad("bar", value, "low (below 4 GiB) or high")),
                };
            }
            "p2p" => {
                self.p2p = match value {
                    "works" => P2p::Works,
                    "writes" => P2p::WritesOnly,
                    "dropped" => P2p::Dropped,
                    "refused" => P2p::Refused,
                    _ => return Err(bad("p2p", value, "works, writes, dropped or refused")),
                };
            }
            _ => return Err(Error::UnknownOption { name: name.escape_debug().to_string(), have: OPTIONS }),
        }
        Ok(())
    }
}

fn bad(name: &'static str, value: &str, takes: &'static str) -> Error {
    Error::BadValue { name, value: value.escape_debug().to_string(), takes }
}

fn flag(name: &'static str, value: &str) -> Result<bool> {
    match value {
        "1" | "" => Ok(true),
        "0" => Ok(false),
        _ => Err(bad(name, value, "0 or 1")),
    }
}

/// Parses a number with a suffix k, M or G, within bounds.
fn number(text: &str, least: f64, most: f64) -> Option<f64> {
    let (digits, unit) = match text.as_bytes().last()? {
        b'k' => (&text[..text.len() - 1], 1e3),
        b'M' => (&text[..text.len() - 1], 1e6),
        b'G' => (&text[..text.len() - 1], 1e9),
        _ => (text, 1.0),
    };
    digits.parse::<f64>().ok().map(|n| n * unit).filter(|n| (least..=most).contains(n))
}

fn ids(text: &str) -> Option<(u16, u16)> {
    let (vendor, device) = text.split_once(':')?;
    Some((u16::from_str_radix(vendor, 16).ok()?, u16::from_str_radix(device, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read() {
        let config = BoardConfig::parse(
            "usdr?rate=2.5M&signal=chirp&level=-6&p2p=writes&iommu=off&bar=low&id=10ee:7031",
        )
        .unwrap();
        assert_eq!((config.rate, config.signal.level, config.bar), (2.5e6, -6.0, 0xd000_0000));
        assert_eq!((config.p2p, config.iommu, config.device), (P2p::WritesOnly, Iommu::Off, 0x7031));
        let config = BoardConfig::parse("usdr?missing=0+3-5@n=7&untold=1&time=0").unwrap();
        assert_eq!(config.missing, Some(Missing { bursts: 0b11_1001, every: 7 }));
        assert!(config.losses_unreported && !config.reports_time);
        let config = BoardConfig::parse("usdr?missing=0-31").unwrap();
        assert_eq!(config.missing, Some(Missing { bursts: u32::MAX, every: 1 }));
        assert_eq!(BoardConfig::parse("").unwrap(), BoardConfig::default());
    }

    #[test]
    fn invalid_options_are_refused_by_name() {
        for (text, word) in [
            ("radio", "no simulated board 'radio'; sim:usdr"),
            ("usdr?rate=0", "samples"),
            ("usdr?rate=nan", "samples"),
            ("usdr?rate=é", "samples"),
            ("usdr?freq=1", "fraction of the rate"),
            ("usdr?max=5000", "pages"),
            ("usdr?mask=12", "24 to 64"),
            ("usdr?colour=red", "p2p"),
            ("usdr?id=xyz", "hex"),
            ("usdr?missing=", "bursts"),
            ("usdr?missing=32", "bursts"),
            ("usdr?missing=5-3", "bursts"),
            ("usdr?missing=1@n=0", "bursts"),
        ] {
            let error = BoardConfig::parse(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
