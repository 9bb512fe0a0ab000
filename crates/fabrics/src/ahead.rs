//! Receives small data ahead of need.

use std::io::Read;
use std::net::TcpStream;
use std::ops::Range;

use onehop_os::HostMem;

use crate::link::into_io;

/// Maximum bytes received ahead if data comes in small parts, and the size of a small part.
const AHEAD: usize = 32 << 10;
const SMALL_DATA: usize = 8 << 10;
/// The same for larger parts: headers of what follows.
const AHEAD_OF_LARGE: usize = 64;

/// Bytes received before the queue needs them: after others, in the same call.
pub(crate) struct ReadAhead {
    bytes: Box<[u8]>,
    /// Those not yet consumed.
    rest: Range<usize>,
    /// Maximum bytes to receive ahead.
    most: usize,
    /// A header is being received, and data may follow.
    is_head: bool,
}

impl ReadAhead {
    pub(crate) fn new() -> Self {
        Self { bytes: vec![0; AHEAD].into(), rest: 0..0, most: AHEAD, is_head: true }
    }

    /// Whether none are left.
    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// A header comes next.
    pub(crate) fn expect_header(&mut self) {
        self.is_head = true;
    }

    /// `data` bytes of data come next. Small data is copied from here, which is faster than a call for each header and
    /// each part; of large data only a few bytes are received ahead.
    pub(crate) fn expect(&mut self, data: usize) {
        if std::mem::take(&mut self.is_head) {
            self.most = if data <= SMALL_DATA { AHEAD } else { AHEAD_OF_LARGE };
        }
    }

    /// Takes at most `most` of the bytes.
    pub(crate) fn take(&mut self, most: usize) -> &[u8] {
        let from = self.rest.start;
        self.rest.start = self.rest.end.min(from + most);
        &self.bytes[from..self.rest.start]
    }

    /// Receives into this buffer; false when the other side has closed.
    pub(crate) fn fill(&mut self, mut stream: &TcpStream) -> std::io::Result<bool> {
        let count = stream.read(&mut self.bytes[..self.most])?;
        self.rest = 0..count;
        Ok(count > 0)
    }

    /// Receives up to `bytes` bytes into memory, and further ones into this buffer; returns how many went into memory.
    pub(crate) fn receive(
        &mut self,
        stream: &TcpStream,
        memory: &HostMem,
        at: usize,
        bytes: usize,
    ) -> std::io::Result<usize> {
        let count = memory.receive_with_rest(stream, at, bytes, &mut self.bytes[..self.most]);
        let count = count.map_err(into_io)?;
        self.rest = 0..count.saturating_sub(bytes);
        Ok(count.min(bytes))
    }

    /// Whether data comes in small parts.
    pub(crate) fn is_small(&self) -> bool {
        self.most == AHEAD
    }
}
