//! The format of a map file: a line with the version and the body's checksum, then the body in JSON.

use serde::{Deserialize, Serialize};

use super::{DriveId, ExtentMap, MAP, MapChunk, MappedFile};
use crate::{Error, Extent, Place, Result};

const NAME: &str = "onehop-extents";
const VERSION: &str = "1";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    file: MappedFile,
    drive: DriveId,
    /// In the file's order and without gaps, so no file offsets are stored.
    #[serde(rename = "pieces")]
    chunks: Vec<Stored>,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Stored {
    /// Length, byte of the drive, CRC-32C.
    Drive(u64, u64, u32),
    /// Length.
    Zeros(u64),
    /// The file's first bytes in hexadecimal, if stored inline; only zeros may follow.
    Inline(String),
}

pub(super) fn to_bytes(map: &ExtentMap) -> Vec<u8> {
    let stored = |chunk: &MapChunk| match &chunk.extent.place {
        Place::Drive(at) => Stored::Drive(chunk.extent.len, *at, chunk.crc32c.unwrap_or(0)),
        Place::Zeros => Stored::Zeros(chunk.extent.len),
        Place::Inline(bytes) => Stored::Inline(hex(bytes)),
    };
    let chunks = map.chunks.iter().map(stored).collect();
    let body = Body { file: map.file.clone(), drive: map.drive.clone(), chunks };
    // Serializing only fails for maps with non-text keys, and there are none.
    let body = serde_json::to_string(&body).unwrap_or_default();
    format!("{NAME} {VERSION} {:08x}\n{body}\n", crc32c::crc32c(format!("{body}\n").as_bytes())).into_bytes()
}

/// Splits concatenated maps, each of which begins with a header line. No line of a body can look like a header, because
/// a JSON string contains no line break.
pub(super) fn split(bytes: &[u8]) -> Vec<&[u8]> {
    let mut maps: Vec<&[u8]> = Vec::new();
    let (mut start, mut at) = (0, 0);
    for line in bytes.split_inclusive(|&b| b == b'\n') {
        if at > start && line.starts_with(NAME.as_bytes()) {
            maps.push(&bytes[start..at]);
            start = at;
        }
        at += line.len();
    }
    if start < bytes.len() {
        maps.push(&bytes[start..]);
    }
    maps
}

pub(super) fn parse(bytes: &[u8]) -> Result<ExtentMap> {
    let bad = |why: String| Error::damaged(MAP, why);
    let end = bytes.iter().take(64).position(|&b| b == b'\n');
    let (head, body) = bytes.split_at(end.map_or(0, |end| end + 1));
    let head = std::str::from_utf8(head).unwrap_or_default();
    let words: Vec<_> = head.trim_end_matches('\n').split(' ').collect();
    let [NAME, version, crc] = words[..] else {
        return Err(bad(format!("it does not begin with `{NAME}`")));
    };
    if version != VERSION {
        return Err(Error::unsupported(
            format!("version {version} of extent maps"),
            format!("only {VERSION} is supported"),
        ));
    }
    let have = format!("{:08x}", crc32c::crc32c(body));
    if crc != have {
        return Err(bad(format!("its checksum is {have}, and should be {crc}")));
    }
    let body: Body = serde_json::from_slice(body).map_err(|e| bad(e.to_string()))?;
    let mut chunks = Vec::new();
    let mut offset = 0_u64;
    for stored in body.chunks {
        let (len, place, crc32c) = match stored {
            Stored::Drive(len, at, crc) => (len, Place::Drive(at), Some(crc)),
            Stored::Zeros(len) => (len, Place::Zeros, None),
            Stored::Inline(hex) => {
                let bytes =
                    unhex(&hex).ok_or_else(|| bad("its inline bytes are not hexadecimal".to_owned()))?;
                (bytes.len() as u64, Place::Inline(bytes), None)
            }
        };
        chunks.push(MapChunk { extent: Extent { offset, len, place }, crc32c });
        offset = offset.saturating_add(len);
    }
    Ok(ExtentMap { file: body.file, drive: body.drive, chunks })
}

/// Paths in JSON: text, or hexadecimal digits for paths that are not UTF-8.
pub(super) mod raw_path {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged, deny_unknown_fields)]
    enum RawPath {
        Utf8(String),
        Raw { hex: String },
    }

    pub(in crate::map) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        let text = match path.to_str() {
            Some(text) => RawPath::Utf8(text.to_owned()),
            None => RawPath::Raw { hex: super::hex(path.as_os_str().as_bytes()) },
        };
        text.serialize(to)
    }

    pub(in crate::map) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        match RawPath::deserialize(from)? {
            RawPath::Utf8(text) => Ok(text.into()),
            RawPath::Raw { hex } => {
                let bytes =
                    super::unhex(&hex).ok_or_else(|| D::Error::custom("its path is not hexadecimal"))?;
                Ok(OsString::from_vec(bytes).into())
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| char::from(b).to_digit(16).map(|d| d as u8);
    let whole = text.len().is_multiple_of(2);
    let pair = |p: &[u8]| Some(digit(p[0])? << 4 | digit(p[1])?);
    if whole { text.as_bytes().chunks_exact(2).map(pair).collect() } else { None }
}
