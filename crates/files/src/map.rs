//! Extent maps: the places of a file's bytes, with checksums, stored so that a file can be read by blocks after its
//! drive was detached from the kernel. `docs/files.md` has the format.

mod drive;
mod stored;

use std::path::{Path, PathBuf};

use crate::extent::Builder;
use crate::volume::{File, FileId, Volume};
use crate::{Blocks, Error, Extent, Place, Result};
pub use drive::{DriveId, NvmeIds};

/// Upper limit of the bytes per checksum, and so of what is read again after a mismatch.
pub const CHUNK_BYTES: u64 = 64 << 20;
/// Linux has no longer files.
const LONGEST_FILE: u64 = i64::MAX as u64;
const STEP: usize = 1 << 20;
const MAP: &str = "extent map";

/// Where a file's bytes are on one drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentMap {
    /// The file.
    pub file: MappedFile,
    /// The drive.
    pub drive: DriveId,
    chunks: Vec<MapChunk>,
}

/// Identifies the file of a map.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MappedFile {
    /// The path at which it was found, which may be any bytes. It selects a file among several maps.
    #[serde(with = "stored::raw_path")]
    pub path: PathBuf,
    /// The file system's name.
    pub fs: String,
    /// The file system's identifier; empty if unknown.
    pub fs_uuid: String,
    /// The file's number, generation, length and times.
    #[serde(flatten)]
    pub id: FileId,
}

/// Adjacent bytes with a checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapChunk {
    /// The bytes and their place.
    pub extent: Extent,
    /// CRC-32C of bytes on the drive.
    pub crc32c: Option<u32>,
}

impl ExtentMap {
    /// Makes a map of a file whose extents are known. `read` returns the file's bytes at an offset; each byte is read
    /// once.
    ///
    /// # Errors
    /// When the extents do not match the file, are not on the drive, or cannot be read.
    pub fn make(
        file: MappedFile,
        drive: DriveId,
        extents: &[Extent],
        mut read: impl FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<Self> {
        let mut chunks = Vec::new();
        for extent in extents {
            let Place::Drive(start) = extent.place else {
                chunks.push(MapChunk { extent: extent.clone(), crc32c: None });
                continue;
            };
            for within in (0..extent.len).step_by(CHUNK_BYTES as usize) {
                let (offset, len) = (extent.offset + within, (extent.len - within).min(CHUNK_BYTES));
                let crc32c = Some(checksum(len, |at, out| read(offset + at, out))?);
                chunks.push(MapChunk {
                    extent: Extent { offset, len, place: Place::Drive(start + within) },
                    crc32c,
                });
            }
        }
        let map = Self { file, drive, chunks };
        map.check(2)?;
        Ok(map)
    }

    /// Makes a map of a file on a volume that onehop reads itself.
    ///
    /// # Errors
    /// As for [`ExtentMap::make`].
    pub fn of_volume(volume: &Volume, file: &File, path: impl AsRef<Path>, drive: DriveId) -> Result<Self> {
        let about = MappedFile {
            path: path.as_ref().to_owned(),
            fs: volume.fs_name().to_owned(),
            fs_uuid: volume.uuid(),
            id: file.id,
        };
        Self::make(about, drive, volume.extents(file)?, |offset, out| {
            volume.read(file, offset, out).map(|_| ())
        })
    }

    /// Serializes the map.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        stored::to_bytes(self)
    }

    /// Parses a map.
    ///
    /// # Errors
    /// When it is damaged, has another version, or is inconsistent.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        Self::parse_at(bytes, 1)
    }

    /// The same, for a map that begins at this line of its file.
    fn parse_at(bytes: &[u8], line: usize) -> Result<Self> {
        let map = stored::parse(bytes)?;
        map.check(line + 1)?;
        Ok(map)
    }

    /// Parses a file of one or more concatenated maps.
    ///
    /// # Errors
    /// As for [`ExtentMap::parse`], and when there is no map.
    pub fn parse_all(bytes: &[u8]) -> Result<Vec<Self>> {
        let mut line = 1;
        let parse = |map: &[u8]| {
            let first = line;
            line += map.iter().filter(|&&b| b == b'\n').count();
            Self::parse_at(map, first)
        };
        let maps = stored::split(bytes).into_iter().map(parse).collect::<Result<Vec<_>>>()?;
        if maps.is_empty() {
            return Err(Error::damaged(MAP, "it is empty"));
        }
        Ok(maps)
    }

    /// The file's extents, neighbours merged.
    ///
    /// # Errors
    /// None for a map that was made or parsed.
    pub fn extents(&self) -> Result<Vec<Extent>> {
        let mut out = Builder::new(MAP, self.file.id.len);
        for MapChunk { extent, .. } in &self.chunks {
            match &extent.place {
                Place::Drive(at) => out.push(extent.offset, extent.len, Some(*at))?,
                Place::Zeros => out.push(extent.offset, extent.len, None)?,
                Place::Inline(bytes) => out.inline(bytes.clone()),
            }
        }
        out.finish(false)
    }

    /// The chunks with their checksums, in the file's order, for callers that compute checksums themselves, for example
    /// on a GPU.
    #[must_use]
    pub fn chunks(&self) -> &[MapChunk] {
        &self.chunks
    }

    /// Checks that `found` is the map's drive.
    ///
    /// # Errors
    /// When any field differs.
    pub fn check_drive(&self, found: &DriveId) -> Result<()> {
        if *found == self.drive {
            return Ok(());
        }
        let text = |d: &DriveId| {
            format!(
                "{:?}, namespace {}, {:?}, {} bytes in blocks of {}",
                d.serial, d.nsid, d.wwid, d.bytes, d.lba_bytes
            )
        };
        Err(Error::Changed {
            what: "the drive".to_owned(),
            why: format!("this is {}, and the extent map is for {}", text(found), text(&self.drive)),
        })
    }

    /// Checks that the file is unchanged since the map was made.
    ///
    /// # Errors
    /// When file system, number, generation, length or times differ.
    pub fn check_file(&self, fs_uuid: &str, id: &FileId) -> Result<()> {
        if (fs_uuid, id) == (&self.file.fs_uuid, &self.file.id) {
            return Ok(());
        }
        Err(Error::Changed {
            what: self.file.path.display().to_string(),
            why: format!(
                "it is {id:?} on {fs_uuid}, and the extent map is for {:?} on {}",
                self.file.id, self.file.fs_uuid
            ),
        })
    }

    /// Reads every chunk from the drive and compares its checksum.
    ///
    /// # Errors
    /// When the drive cannot be read, or its contents have changed.
    pub fn verify(&self, drive: &dyn Blocks) -> Result<()> {
        for chunk in &self.chunks {
            if let (Place::Drive(start), Some(want)) = (&chunk.extent.place, chunk.crc32c) {
                let read = |at: u64, out: &mut [u8]| {
                    let (offset, len) = (start + at, out.len());
                    drive.read_at(offset, out).map_err(|source| Error::Read { offset, len, source })
                };
                self.check_checksum(chunk, checksum(chunk.extent.len, read)?, want)?;
            }
        }
        Ok(())
    }

    fn check_checksum(&self, chunk: &MapChunk, have: u32, want: u32) -> Result<()> {
        if have == want {
            return Ok(());
        }
        let Extent { offset, len, .. } = chunk.extent;
        Err(Error::Changed {
            what: self.file.path.display().to_string(),
            why: format!(
                "its bytes {offset}..{} have CRC-32C {have:08x} on the drive, and had {want:08x}",
                offset + len
            ),
        })
    }

    /// Checks that the chunks cover the file without gaps and lie on the drive. `line` is the line that holds them.
    fn check(&self, line: usize) -> Result<()> {
        let bad = |why: String| Err(Error::damaged(MAP, why));
        if self.file.id.len > LONGEST_FILE {
            return bad(format!(
                "line {line}, file.len: {} bytes are more than the {LONGEST_FILE} that a file can have",
                self.file.id.len
            ));
        }
        let lba = self.drive.lba_bytes;
        if !lba.is_power_of_two() || !(512..=65536).contains(&lba) {
            return bad(format!("its drive has blocks of {lba} bytes"));
        }
        let inline =
            matches!(self.chunks.first(), Some(first) if matches!(first.extent.place, Place::Inline(_)));
        let mut at = 0_u64;
        for (i, MapChunk { extent, crc32c }) in self.chunks.iter().enumerate() {
            let end = at.checked_add(extent.len).filter(|&end| end <= self.file.id.len && extent.len > 0);
            let Some(end) = end.filter(|_| extent.offset == at) else {
                return bad(format!(
                    "line {line}, pieces[{i}]: a chunk of {} bytes follows byte {at} of {}",
                    extent.len, self.file.id.len
                ));
            };
            let good = match &extent.place {
                Place::Drive(start) => {
                    let inside = start.checked_add(extent.len).is_some_and(|end| end <= self.drive.bytes);
                    inside && extent.len <= CHUNK_BYTES && crc32c.is_some() && !inline
                }
                Place::Zeros => crc32c.is_none(),
                Place::Inline(bytes) => crc32c.is_none() && bytes.len() as u64 == extent.len && at == 0,
            };
            if !good {
                return bad(format!(
                    "line {line}, pieces[{i}]: the chunk at byte {at} of the file is not on its drive, or too long"
                ));
            }
            at = end;
        }
        if at != self.file.id.len {
            return bad(format!("its chunks are {at} bytes of {}", self.file.id.len));
        }
        Ok(())
    }
}

/// CRC-32C of `len` bytes, read step by step.
fn checksum(len: u64, mut read: impl FnMut(u64, &mut [u8]) -> Result<()>) -> Result<u32> {
    let mut buffer = vec![0; STEP.min(len as usize)];
    let mut crc = 0;
    for at in (0..len).step_by(STEP) {
        let part = &mut buffer[..(len - at).min(STEP as u64) as usize];
        read(at, part)?;
        crc = crc32c::crc32c_append(crc, part);
    }
    Ok(crc)
}
