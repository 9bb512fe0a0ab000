//! Small volumes stored as their non-zero lines, patched at will: the input of mutation tests and fuzz targets.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use onehop_files::{Blocks, Error, File, FileKind, Place, Volume};

const LINE: u64 = 16;
/// Limit of files opened per volume: hostile directories refer to each other without end.
const MOST_FILES: u32 = 300;

/// Bytes of a drive, most of them zero.
#[derive(Clone)]
pub struct Sparse {
    size: u64,
    lines: BTreeMap<u64, [u8; 16]>,
}

impl Sparse {
    /// Unpacks what `templates/make` has packed.
    pub fn unpack(packed: &[u8]) -> Self {
        let word =
            |at: usize| u64::from(u32::from_le_bytes(packed[at..at + 4].try_into().expect("four bytes")));
        let line = |at: usize| (word(at), packed[at + 4..at + 20].try_into().expect("sixteen bytes"));
        let lines = (4..packed.len()).step_by(20).map(line).collect();
        Self { size: word(0), lines }
    }

    /// From all bytes of a drive.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut sparse = Self { size: bytes.len() as u64, lines: BTreeMap::new() };
        for (i, chunk) in bytes.chunks(16).enumerate().filter(|(_, c)| c.iter().any(|&b| b != 0)) {
            let mut line = [0; 16];
            line[..chunk.len()].copy_from_slice(chunk);
            sparse.lines.insert(i as u64, line);
        }
        sparse
    }

    /// The place of a patch: mostly at or just behind existing data, else anywhere.
    fn place(&self, patch: &Patch) -> u64 {
        let lines = self.lines.len().max(1);
        let known = self.lines.keys().nth(usize::from(patch.line) % lines).copied().unwrap_or(0);
        match patch.byte {
            0..240 => known * LINE + u64::from(patch.byte % 48),
            _ => u64::from(patch.line) * self.size / 65536 + u64::from(patch.byte),
        }
    }

    /// Applies patches; those outside of the drive are ignored.
    pub fn patch(&mut self, patches: &[Patch]) {
        let places: Vec<u64> = patches.iter().map(|p| self.place(p)).collect();
        for (at, patch) in places.into_iter().zip(patches) {
            for (i, byte) in patch.bytes().into_iter().enumerate() {
                self.set(at + i as u64, byte);
            }
        }
    }

    /// Changes one byte.
    pub fn set(&mut self, at: u64, byte: u8) {
        if at < self.size {
            self.lines.entry(at / LINE).or_default()[(at % LINE) as usize] = byte;
        }
    }
}

impl Blocks for Sparse {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(out.len() as u64).filter(|&end| end <= self.size);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        out.fill(0);
        for (number, line) in self.lines.range(offset / LINE..end.div_ceil(LINE)) {
            for (at, byte) in (number * LINE..).zip(line).filter(|(at, _)| (offset..end).contains(at)) {
                out[(at - offset) as usize] = *byte;
            }
        }
        Ok(())
    }
}

/// A change of one, two or four bytes.
#[derive(Debug, Clone, Copy)]
pub struct Patch {
    pub line: u16,
    pub byte: u8,
    pub width: u8,
    pub value: u32,
}

impl Patch {
    /// Decodes patches from a fuzzer's input.
    pub fn all(bytes: &[u8]) -> Vec<Self> {
        let patch = |b: &[u8]| Self {
            line: u16::from_le_bytes([b[0], b[1]]),
            byte: b[2],
            width: b[3],
            value: u32::from_le_bytes([b[4], b[5], b[6], b[7]]),
        };
        bytes.chunks_exact(8).map(patch).collect()
    }

    fn bytes(&self) -> Vec<u8> {
        self.value.to_le_bytes()[..[1, 2, 4][usize::from(self.width % 3)]].to_vec()
    }
}

/// Reads everything on a volume and checks the API's guarantees. Returns whether it could be opened.
pub fn explore(blocks: Arc<dyn Blocks>, start: u64, len: u64) -> bool {
    let size = blocks.size();
    let volume = match Volume::at(blocks, start, len) {
        Ok(volume) => volume,
        Err(error) => return refused(&error),
    };
    let _ = (volume.fs_name(), volume.label(), volume.uuid(), volume.notes().len());
    let mut left = MOST_FILES;
    let mut todo: Vec<File> = volume.root().into_iter().collect();
    while let Some(file) = todo.pop() {
        match file.kind {
            FileKind::Directory => match volume.list(&file) {
                Ok(entries) => {
                    for entry in entries {
                        assert!(!entry.name.contains(&b'/') && entry.name != b".." && !entry.name.is_empty());
                        left = left.saturating_sub(1);
                        if left > 0
                            && let Ok(file) = volume.file(&entry)
                        {
                            todo.push(file);
                        }
                    }
                }
                Err(error) => drop(refused(&error)),
            },
            FileKind::File => look(&volume, &file, size),
            FileKind::Symlink => drop(volume.read_link(&file).map_err(|e| refused(&e))),
            FileKind::Special => {}
        }
    }
    for path in ["dir/pieces", "slow", "short", "dir/loop/loop/pieces", "directory/pieces.bin", "a/b", "map"]
    {
        let _ = volume.lookup(path).map(|file| look(&volume, &file, size));
    }
    true
}

fn refused(error: &Error) -> bool {
    assert!(!error.to_string().is_empty());
    false
}

/// Checks that a file's extents have no gaps, stay on the drive, and agree with reading.
fn look(volume: &Volume, file: &File, size: u64) {
    let Ok(extents) = volume.extents(file) else { return };
    let mut at = 0;
    for extent in extents {
        assert!(extent.offset == at && extent.len > 0, "{extent:?} at {at}");
        at += extent.len;
        match &extent.place {
            Place::Drive(position) => assert!(position + extent.len <= size, "{extent:?} leaves the drive"),
            Place::Inline(bytes) => assert_eq!(bytes.len() as u64, extent.len),
            Place::Zeros => {}
        }
    }
    assert_eq!(at, file.size());
    let mut out = [0; 64];
    for offset in [0, file.size() / 2, file.size().saturating_sub(10), u64::MAX - 3] {
        let want = file.size().saturating_sub(offset).min(64) as usize;
        assert_eq!(volume.read(file, offset, &mut out).expect("memory can be read"), want);
    }
}
