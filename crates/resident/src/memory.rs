//! Words in GPU memory, and the blocks of the namespace there.

use std::io;

use onehop_gpu::{Region, Result};
use onehop_sim::Blocks;

/// Writes words from `at` on.
pub(crate) fn put(region: &Region, at: usize, words: &[u32]) -> Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    region.write(at, &bytes)
}

/// Reads `N` words from `at` on.
pub(crate) fn get<const N: usize>(region: &Region, at: usize) -> Result<[u32; N]> {
    let mut bytes = vec![0; N * 4];
    region.read(at, &mut bytes)?;
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    Ok(words)
}

/// The namespace's blocks.
pub(crate) struct Namespace(pub Region);

impl Blocks for Namespace {
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset as usize, out).map_err(io::Error::other)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset as usize, data).map_err(io::Error::other)
    }
}
