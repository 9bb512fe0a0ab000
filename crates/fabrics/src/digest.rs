//! CRC32C of data in shared memory.

use onehop_os::HostMem;

use crate::link::into_io;

/// Bytes whose digest is computed at a time: they stay in the processor's first cache.
const CHUNK: usize = 16 << 10;

/// Memory of this program for bytes whose digest is computed: others may write to where they come from.
pub(crate) struct DigestBuffer(Box<[u8]>);

impl DigestBuffer {
    pub(crate) fn new() -> Self {
        Self(vec![0; CHUNK].into())
    }

    /// Calls `add` with all bytes of a range, in order.
    pub(crate) fn each(
        &mut self,
        memory: &HostMem,
        at: usize,
        bytes: usize,
        mut add: impl FnMut(&[u8]),
    ) -> std::io::Result<()> {
        for start in (0..bytes).step_by(CHUNK) {
            let part = &mut self.0[..CHUNK.min(bytes - start)];
            memory.read(at + start, part).map_err(into_io)?;
            add(part);
        }
        Ok(())
    }
}
