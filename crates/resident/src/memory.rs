//! The blocks of the namespace in GPU memory.

use std::io;

use onehop_gpu::Region;
use onehop_sim::Blocks;

/// The namespace's blocks.
pub(crate) struct NamespaceBlocks(pub Region);

impl Blocks for NamespaceBlocks {
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset as usize, out).map_err(io::Error::other)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset as usize, data).map_err(io::Error::other)
    }
}
