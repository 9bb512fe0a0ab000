//! Addresses of PCI functions, as Linux writes them: `0000:0b:00.0`.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::Error;

/// The address of a PCI function.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Address {
    /// The domain, also called segment.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device on the bus, below 32.
    pub device: u8,
    /// The function of the device, below 8.
    pub function: u8,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for Address {
    type Err = Error;

    /// Parses `0000:0b:00.0` and `0b:00.0`, in any case.
    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text).ok_or_else(|| Error::garbage("the PCI address", text, "address such as 0000:0b:00.0"))
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn parse(text: &str) -> Option<Address> {
    let hex = |part: &str, longest: usize, most: u32| {
        let plain = (1..=longest).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit());
        let value = u32::from_str_radix(part, 16).ok()?;
        (plain && value <= most).then_some(value)
    };
    let (front, function) = text.rsplit_once('.')?;
    let (domain, bus, device) = match front.split(':').collect::<Vec<_>>()[..] {
        [bus, device] => ("0", bus, device),
        [domain, bus, device] => (domain, bus, device),
        _ => return None,
    };
    Some(Address {
        domain: hex(domain, 8, u32::MAX)?,
        bus: hex(bus, 2, 0xff)? as u8,
        device: hex(device, 2, 0x1f)? as u8,
        function: hex(function, 1, 7)? as u8,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, same) in [
            ("0000:0b:00.0", "0000:0b:00.0"),
            ("0B:1f.7", "0000:0b:1f.7"),
            ("10000:e1:00.0", "10000:e1:00.0"),
            ("00000000:01:00.0", "0000:01:00.0"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), same);
        }
        for bad in ["", ".", "0b:00", "0b:20.0", "0b:00.8", "1:2:3:4.5", "+1:0.0", "x:0b:00.0", "0b:00.00"] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }
}
