//! A file whose every word is known, and random pages of it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The smallest page.
const BLOCK: usize = 4096;
const CHUNK: usize = 4 << 20;

/// A file of known content, which changes with each write of a page.
pub struct PageFile {
    file: File,
    path: PathBuf,
    /// How often each block has been written.
    versions: Vec<u32>,
    /// Block numbers in an order that is continued with each round.
    seed: u64,
}

impl PageFile {
    /// Creates or overwrites a file of whole blocks of 4 KiB.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn create(path: &Path, bytes: u64) -> Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
        let file = file.map_err(|e| failed("creating", path, e))?;
        let versions = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX) / BLOCK];
        let this = Self { file, path: path.to_owned(), versions, seed: 1 };
        let mut chunk = vec![0; CHUNK];
        let end = (this.versions.len() * BLOCK) as u64;
        for at in (0..end).step_by(CHUNK) {
            let count = CHUNK.min((end - at) as usize);
            this.content(at, &mut chunk[..count]);
            this.file.write_all_at(&chunk[..count], at).map_err(|e| failed("writing", path, e))?;
        }
        Ok(this)
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens it anew, and returns another handle of this opening.
    pub(super) fn open_anew(&mut self, writes: bool) -> Result<File> {
        let opened = File::options().read(true).write(writes).open(&self.path);
        self.file = opened.map_err(|e| failed("opening", &self.path, e))?;
        self.file.try_clone().map_err(|e| failed("opening", &self.path, e))
    }

    pub(super) fn pages(&self, page: usize) -> usize {
        self.versions.len() * BLOCK / page
    }

    /// Places of different pages, at random.
    pub(super) fn places(&mut self, page: usize, count: usize) -> Vec<u64> {
        let mut all: Vec<u32> = (0..self.pages(page) as u32).collect();
        let count = count.min(all.len());
        for n in 0..count {
            let left = (all.len() - n) as u64;
            all.swap(n, n + (self.random() % left) as usize);
        }
        all[..count].iter().map(|number| u64::from(*number) * page as u64).collect()
    }

    fn random(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    /// Gives pages a new content, which is to be written.
    pub(super) fn renew(&mut self, places: &[u64], page: usize) {
        for place in places {
            let first = *place as usize / BLOCK;
            self.versions[first..first + page / BLOCK].iter_mut().for_each(|version| *version += 1);
        }
    }

    /// The bytes of whole blocks, as they must be.
    pub(super) fn content(&self, at: u64, out: &mut [u8]) {
        let first = at as usize / BLOCK;
        for (number, block) in (first..).zip(out.chunks_mut(BLOCK)) {
            let mut word = (number as u64) << 32 ^ u64::from(self.versions[number]).wrapping_mul(0x9e37_79b9);
            for bytes in block.as_chunks_mut::<8>().0 {
                word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                *bytes = word.to_le_bytes();
            }
        }
    }

    pub(super) fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, at).map_err(|e| failed("reading", &self.path, e))
    }
}

pub(super) fn failed(call: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::File { call, path: path.display().to_string(), source }
}
