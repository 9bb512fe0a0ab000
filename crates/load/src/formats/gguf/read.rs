//! Reads a header, and distinguishes truncated files from bytes that have not been read yet.

use super::Error;

/// A cursor over the first bytes of a file.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    length: u64,
}

impl<'a> Reader<'a> {
    /// Reads the first bytes of a file of `length` bytes.
    pub fn new(bytes: &'a [u8], length: u64) -> Self {
        Self { bytes, at: 0, length }
    }

    /// The present offset.
    pub fn at(&self) -> u64 {
        self.at as u64
    }

    /// The next `count` bytes, which belong to `what`.
    pub fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], Error> {
        let needed = self.at().saturating_add(count);
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        match usize::try_from(count).ok().and_then(|n| rest.get(..n)) {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None if needed > self.length => {
                Err(Error::Truncated { what: what.into(), needed, length: self.length })
            }
            None => Err(Error::More { given: self.bytes.len() as u64, needed }),
        }
    }

    /// The next `N` bytes.
    pub fn word<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Error> {
        let mut word = [0; N];
        word.copy_from_slice(self.take(N as u64, what)?);
        Ok(word)
    }

    pub fn u32(&mut self, what: &str) -> Result<u32, Error> {
        self.word(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &str) -> Result<u64, Error> {
        self.word(what).map(u64::from_le_bytes)
    }

    /// A length, followed by that many bytes.
    pub fn bytes(&mut self, what: &str) -> Result<&'a [u8], Error> {
        let count = self.u64(what)?;
        self.take(count, what)
    }

    /// The same for a name, which must be UTF-8.
    pub fn name(&mut self, what: &str) -> Result<String, Error> {
        let bytes = self.bytes(what)?;
        String::from_utf8(bytes.to_vec()).map_err(|e| {
            Error::NotText(format!(
                "{what} ({:?})",
                String::from_utf8_lossy(e.as_bytes().get(..32).unwrap_or(bytes))
            ))
        })
    }

    /// Checks that the rest of the file has room for `count` elements of at least `least` bytes.
    pub fn check_count(&self, what: &'static str, count: u64, least: u64) -> Result<(), Error> {
        match count.checked_mul(least) {
            Some(bytes) if bytes <= self.length.saturating_sub(self.at()) => Ok(()),
            _ => Err(Error::Count { what, count, least, length: self.length }),
        }
    }
}
