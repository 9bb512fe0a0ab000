//! UUIDs of buffers.

use crate::{Error, Result};

/// The UUID of a buffer, or of a file in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub [u8; 16]);

impl Id {
    /// A random ID.
    ///
    /// # Errors
    /// When the system call fails.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::file("getrandom", "", e))?;
        if got != bytes.len() {
            return Err(Error::Broken("the system returned fewer random bytes than requested".into()));
        }
        // Version 4, variant 1.
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Self(bytes))
    }

    /// Parses 32 hexadecimal digits, with the usual dashes or without any.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let dashed = text.len() == 36;
        if !dashed && text.len() != 32 {
            return None;
        }
        let mut bytes = [0; 16];
        let mut nibbles = 0;
        for (place, byte) in text.bytes().enumerate() {
            if dashed && [8, 13, 18, 23].contains(&place) {
                if byte != b'-' {
                    return None;
                }
                continue;
            }
            let digit = char::from(byte).to_digit(16)? as u8;
            bytes[nibbles / 2] |= digit << (4 * (1 - nibbles % 2));
            nibbles += 1;
        }
        Some(Self(bytes))
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (place, byte) in self.0.iter().enumerate() {
            if [4, 6, 8, 10].contains(&place) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_parsed() {
        let id = Id::random().unwrap();
        let text = id.to_string();
        assert_eq!((text.len(), &text[14..15]), (36, "4"));
        assert_eq!(Id::parse(&text), Some(id));
        assert_eq!(Id::parse(&text.replace('-', "").to_uppercase()), Some(id));
        for bad in ["", "0", &text[1..], &text.replace('-', "x"), &"g".repeat(32), &"é".repeat(16)] {
            assert_eq!(Id::parse(bad), None, "{bad}");
        }
    }
}
