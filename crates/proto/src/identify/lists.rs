//! Lists that Identify returns: active namespaces (CNS 02h, 07h) and the names of one namespace (CNS 03h).

use core::fmt;

use crate::wire::Wire;

/// Most namespaces in one list.
const MAX_LISTED: usize = 1024;

/// The active namespaces in a list, in ascending order as sent; a full list may go on after its last.
pub fn active_namespaces(bytes: &[u8; 4096]) -> ActiveNamespaces<'_> {
    ActiveNamespaces { bytes, next: 0 }
}

/// See [`active_namespaces`].
#[derive(Clone)]
pub struct ActiveNamespaces<'a> {
    bytes: &'a [u8; 4096],
    next: usize,
}

impl Iterator for ActiveNamespaces<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        if self.next >= MAX_LISTED {
            return None;
        }
        let nsid = u32::get(self.bytes, self.next * 4);
        self.next = if nsid == 0 { MAX_LISTED } else { self.next + 1 };
        (nsid != 0).then_some(nsid)
    }
}

/// Writes a list of active namespaces; what does not fit is left out, the rest is zeroed.
pub fn put_active(bytes: &mut [u8; 4096], nsids: impl IntoIterator<Item = u32>) {
    bytes.fill(0);
    for (i, nsid) in nsids.into_iter().take(MAX_LISTED).enumerate() {
        nsid.put(bytes, i * 4);
    }
}

/// A name of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NamespaceId {
    /// IEEE extended unique identifier.
    Eui64([u8; 8]),
    /// Globally unique identifier.
    Nguid([u8; 16]),
    /// UUID.
    Uuid([u8; 16]),
    /// Command set.
    Csi(u8),
    /// A kind that we do not know.
    Unknown {
        /// Its kind.
        kind: u8,
        /// Its bytes.
        len: u8,
    },
}

/// What is wrong with a list of names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DescriptorError {
    /// A name of a known kind has the wrong length.
    Length {
        /// Where it starts.
        at: usize,
        /// Its kind.
        kind: u8,
        /// Its length.
        len: u8,
    },
    /// A name goes past the end.
    PastEnd {
        /// Where it starts.
        at: usize,
    },
}

impl fmt::Display for DescriptorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Length { at, kind, len } => {
                write!(f, "namespace identifier at byte {at}: type {kind} with {len} bytes")
            }
            Self::PastEnd { at } => write!(f, "namespace identifier at byte {at} goes past the end"),
        }
    }
}

impl core::error::Error for DescriptorError {}

/// The names of a namespace; ends at the end of the list or at the first malformed one.
pub fn descriptors(bytes: &[u8; 4096]) -> Descriptors<'_> {
    Descriptors { bytes, at: 0 }
}

/// See [`descriptors`].
#[derive(Clone)]
pub struct Descriptors<'a> {
    bytes: &'a [u8; 4096],
    at: usize,
}

/// Bytes before a name: kind, length, two reserved.
const HEADER: usize = 4;

impl Descriptors<'_> {
    fn parse(&self, kind: u8, len: u8) -> Result<NamespaceId, DescriptorError> {
        let at = self.at;
        let from = at + HEADER;
        if from + len as usize > self.bytes.len() {
            return Err(DescriptorError::PastEnd { at });
        }
        match (kind, len) {
            (1, 8) => Ok(NamespaceId::Eui64(Wire::get(self.bytes, from))),
            (2, 16) => Ok(NamespaceId::Nguid(Wire::get(self.bytes, from))),
            (3, 16) => Ok(NamespaceId::Uuid(Wire::get(self.bytes, from))),
            (4, 1) => Ok(NamespaceId::Csi(Wire::get(self.bytes, from))),
            (1..=4, _) => Err(DescriptorError::Length { at, kind, len }),
            _ => Ok(NamespaceId::Unknown { kind, len }),
        }
    }
}

impl Iterator for Descriptors<'_> {
    type Item = Result<NamespaceId, DescriptorError>;

    fn next(&mut self) -> Option<Self::Item> {
        let header: [u8; HEADER] = *self.bytes.get(self.at..)?.first_chunk()?;
        let [kind, len, ..] = header;
        if len == 0 {
            self.at = self.bytes.len();
            return None;
        }
        let name = self.parse(kind, len);
        self.at = if name.is_ok() { self.at + HEADER + len as usize } else { self.bytes.len() };
        Some(name)
    }
}

/// Writes the names of a namespace; unknown kinds and what does not fit are left out, the rest is zeroed.
pub fn put_descriptors(bytes: &mut [u8; 4096], names: impl IntoIterator<Item = NamespaceId>) {
    bytes.fill(0);
    let mut at = 0;
    for name in names {
        let (kind, len) = match name {
            NamespaceId::Eui64(_) => (1u8, 8u8),
            NamespaceId::Nguid(_) => (2, 16),
            NamespaceId::Uuid(_) => (3, 16),
            NamespaceId::Csi(_) => (4, 1),
            NamespaceId::Unknown { .. } => continue,
        };
        if at + HEADER + len as usize > bytes.len() {
            return;
        }
        [kind, len, 0, 0].put(bytes, at);
        match name {
            NamespaceId::Eui64(id) => id.put(bytes, at + HEADER),
            NamespaceId::Nguid(id) | NamespaceId::Uuid(id) => id.put(bytes, at + HEADER),
            NamespaceId::Csi(csi) => csi.put(bytes, at + HEADER),
            NamespaceId::Unknown { .. } => {}
        }
        at += HEADER + len as usize;
    }
}
