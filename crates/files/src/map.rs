//! Extent maps: where a file's bytes were, kept for later with checksums, so that a drive can be read after it was taken
//! from the kernel, by its blocks alone. `docs/files.md` has the format.

mod drive;
mod stored;

use std::path::{Path, PathBuf};

use crate::extent::Builder;
use crate::volume::{File, FileId, Volume};
use crate::{Blocks, Error, Extent, Place, Result};
pub use drive::{DriveId, NvmeIds};

/// Bytes that one checksum is for, at most: what has to be read again when it is wrong.
pub const PIECE_BYTES: u64 = 64 << 20;
const STEP: usize = 1 << 20;
const MAP: &str = "extent map";

/// Where a file's bytes are on one drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentMap {
    /// The file.
    pub file: MappedFile,
    /// The drive.
    pub drive: DriveId,
    pieces: Vec<Piece>,
}

/// Which file a map is of.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MappedFile {
    /// Where it was found, any bytes: what a file of several maps is asked by.
    #[serde(with = "stored::raw_path")]
    pub path: PathBuf,
    /// The file system's name.
    pub fs: String,
    /// The file system's identifier; empty where it could not be had.
    pub fs_uuid: String,
    /// The file's number, generation, length and times.
    #[serde(flatten)]
    pub id: FileId,
}

/// Neighbouring bytes with a checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The bytes and their place.
    pub extent: Extent,
    /// CRC-32C of the bytes, where they are on the drive.
    pub crc32c: Option<u32>,
}

impl ExtentMap {
    /// Makes a map of a file whose extents are known. `read` gives the file's bytes at an offset: each is read once.
    ///
    /// # Errors
    /// When the extents are not the file's, do not lie on the drive, or cannot be read.
    pub fn make(
        file: MappedFile,
        drive: DriveId,
        extents: &[Extent],
        mut read: impl FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<Self> {
        let mut pieces = Vec::new();
        for extent in extents {
            let Place::Drive(start) = extent.place else {
                pieces.push(Piece { extent: extent.clone(), crc32c: None });
                continue;
            };
            for within in (0..extent.len).step_by(PIECE_BYTES as usize) {
                let (offset, len) = (extent.offset + within, (extent.len - within).min(PIECE_BYTES));
                let crc32c = Some(checksum(len, |at, out| read(offset + at, out))?);
                pieces.push(Piece {
                    extent: Extent { offset, len, place: Place::Drive(start + within) },
                    crc32c,
                });
            }
        }
        let map = Self { file, drive, pieces };
        map.check()?;
        Ok(map)
    }

    /// Makes a map of a file that was found on a volume that is read by ourselves.
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

    /// The bytes of a map file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        stored::to_bytes(self)
    }

    /// Reads a map file.
    ///
    /// # Errors
    /// When it is damaged, of another version, or contradicts itself.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let map = stored::parse(bytes)?;
        map.check()?;
        Ok(map)
    }

    /// Reads a file with any number of maps, one behind the other.
    ///
    /// # Errors
    /// As for [`ExtentMap::parse`], and when there is none.
    pub fn parse_all(bytes: &[u8]) -> Result<Vec<Self>> {
        let maps = stored::split(bytes).into_iter().map(Self::parse).collect::<Result<Vec<_>>>()?;
        if maps.is_empty() {
            return Err(Error::damaged(MAP, "it is empty"));
        }
        Ok(maps)
    }

    /// The file's extents, neighbours merged.
    ///
    /// # Errors
    /// Never for a map that was made or parsed.
    pub fn extents(&self) -> Result<Vec<Extent>> {
        let mut out = Builder::new(MAP, self.file.id.len);
        for Piece { extent, .. } in &self.pieces {
            match &extent.place {
                Place::Drive(at) => out.push(extent.offset, extent.len, Some(*at))?,
                Place::Zeros => out.push(extent.offset, extent.len, None)?,
                Place::Inline(bytes) => out.inline(bytes.clone()),
            }
        }
        out.finish(false)
    }

    /// The pieces with their checksums, in the file's order: for whoever computes them elsewhere, as on a GPU.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Refuses another drive than the one that the map is for.
    ///
    /// # Errors
    /// When anything that is known of the two differs.
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

    /// Refuses a file that has changed since the map was made.
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

    /// Reads every piece from the drive and compares its checksum.
    ///
    /// # Errors
    /// When the drive cannot be read, or holds something else than when the map was made.
    pub fn verify(&self, drive: &dyn Blocks) -> Result<()> {
        for piece in &self.pieces {
            if let (Place::Drive(start), Some(want)) = (&piece.extent.place, piece.crc32c) {
                let read = |at: u64, out: &mut [u8]| {
                    let (offset, len) = (start + at, out.len());
                    drive.read_at(offset, out).map_err(|source| Error::Read { offset, len, source })
                };
                self.check_piece(piece, checksum(piece.extent.len, read)?, want)?;
            }
        }
        Ok(())
    }

    fn check_piece(&self, piece: &Piece, have: u32, want: u32) -> Result<()> {
        if have == want {
            return Ok(());
        }
        let Extent { offset, len, .. } = piece.extent;
        Err(Error::Changed {
            what: self.file.path.display().to_string(),
            why: format!(
                "its bytes {offset}..{} have CRC-32C {have:08x} on the drive, and had {want:08x}",
                offset + len
            ),
        })
    }

    /// That the pieces are the file, without gaps, and lie on the drive.
    fn check(&self) -> Result<()> {
        let bad = |why: String| Err(Error::damaged(MAP, why));
        let lba = self.drive.lba_bytes;
        if !lba.is_power_of_two() || !(512..=65536).contains(&lba) {
            return bad(format!("its drive has blocks of {lba} bytes"));
        }
        let inline =
            matches!(self.pieces.first(), Some(first) if matches!(first.extent.place, Place::Inline(_)));
        let mut at = 0_u64;
        for Piece { extent, crc32c } in &self.pieces {
            let end = at.checked_add(extent.len).filter(|&end| end <= self.file.id.len && extent.len > 0);
            let Some(end) = end.filter(|_| extent.offset == at) else {
                return bad(format!(
                    "a piece of {} bytes follows byte {at} of {}",
                    extent.len, self.file.id.len
                ));
            };
            let good = match &extent.place {
                Place::Drive(start) => {
                    let inside = start.checked_add(extent.len).is_some_and(|end| end <= self.drive.bytes);
                    inside && extent.len <= PIECE_BYTES && crc32c.is_some() && !inline
                }
                Place::Zeros => crc32c.is_none(),
                Place::Inline(bytes) => crc32c.is_none() && bytes.len() as u64 == extent.len && at == 0,
            };
            if !good {
                return bad(format!("the piece at byte {at} of the file is not on its drive, or too long"));
            }
            at = end;
        }
        if at != self.file.id.len {
            return bad(format!("its pieces are {at} bytes of {}", self.file.id.len));
        }
        Ok(())
    }
}

/// CRC-32C of `len` bytes that are read step by step.
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
