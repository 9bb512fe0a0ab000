//! The transport interface: how frames and their data get from one side to the other.
//!
//! A transport moves whole frames in order, or reports that the connection has ended. It knows nothing of files. Data
//! is transferred in one of two ways: *inline*, behind a frame, which every transport supports; or through *exposed*
//! memory (RDMA): the client names memory in a request, and the server reads or writes it without the client's CPU.
//! Retries, and that nothing is executed twice, are decided above.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_os::{DmaMemory, HostMem};

use crate::Result;
use crate::auth::Keys;
use crate::wire::{Head, Remote};

/// Memory for the data of a frame, which nothing else writes meanwhile.
#[derive(Clone)]
pub struct MemoryRange {
    /// The memory.
    pub mem: HostMem,
    /// The offset in it.
    pub at: usize,
    /// The length.
    pub len: usize,
}

/// A frame to send. The lengths and checksums in its head are set ([`Head::new`], [`checksum`]); checksums are used on
/// unencrypted connections only.
pub struct Outgoing<'a> {
    /// Its head.
    pub head: Head,
    /// Its body.
    pub body: &'a [u8],
    /// Its data, if any.
    pub data: Option<&'a MemoryRange>,
}

/// A received frame. It was authenticated or, on an unencrypted connection, its checksums were verified.
#[derive(Debug)]
pub struct Incoming {
    /// Its head.
    pub head: Head,
    /// Its body.
    pub body: Vec<u8>,
}

/// Memory that can be exposed. A transport may keep its registration for the next time.
pub type Shareable = Arc<dyn DmaMemory + Send + Sync>;

/// Chooses where the data of a frame goes, given its head and body.
pub type DataPlacer<'a> = &'a mut dyn FnMut(&Head, &[u8]) -> Result<Option<MemoryRange>>;

/// Memory that the other side can reach, until this is dropped.
pub struct Exposed {
    /// The description for the other side.
    pub remote: Remote,
    /// The route by which it is reached.
    pub route: &'static str,
    /// Keeps the registration.
    pub hold: Box<dyn Send + Sync>,
}

/// A connection.
///
/// `send`, `put` and `get` are called by several threads at once, `receive` by one. After an error of `send` or
/// `receive` only [`Link::close`] may be called.
pub trait Link: Send + Sync {
    /// The transport's name: `tcp`, `rdma`.
    fn transport(&self) -> &'static str;

    /// The name of the other side, for messages.
    fn peer(&self) -> &str;

    /// Sends a whole frame within a time limit.
    ///
    /// # Errors
    /// When the connection has ended, or the other side does not accept the frame in time.
    fn send(&self, frame: &Outgoing<'_>, limit: Duration) -> Result<()>;

    /// Waits for the next frame; `None` if nothing begins to arrive within `limit`. A frame that has begun must be
    /// complete within `stall`. If it has data, `place` chooses where that goes, given the head and body; for `None`
    /// the data is discarded. `place` may block, and then the other side waits.
    ///
    /// # Errors
    /// When the connection has ended, the frame was corrupted, or `place` fails.
    fn receive(&self, limit: Duration, stall: Duration, place: DataPlacer<'_>) -> Result<Option<Incoming>>;

    /// Facts about this connection that both sides know, and that would differ with a man in the middle. They enter the
    /// key exchange.
    fn binding(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Encrypts and authenticates all further frames in both directions. Data that is put or got is not covered.
    fn encrypt(&self, keys: &Keys);

    /// Whether frames are encrypted.
    fn is_encrypted(&self) -> bool;

    /// Allows the other side to reach memory that is exposed to it. Called after the handshake; before, it reaches
    /// none.
    ///
    /// # Errors
    /// When the transport cannot allow it.
    fn trust(&self) -> Result<()> {
        Ok(())
    }

    /// Why data is inline instead of direct, and how to fix that. Empty if nothing prevents direct transfers.
    fn why_inline(&self) -> (String, String);

    /// Server: writes into exposed memory of the client. On return the data is there, or will be before any frame that
    /// is sent later.
    ///
    /// # Errors
    /// When the client's memory cannot be reached in time.
    fn put(&self, from: &MemoryRange, to: &Remote, limit: Duration) -> Result<()>;

    /// Server: reads from exposed memory of the client.
    ///
    /// # Errors
    /// As for [`Link::put`].
    fn get(&self, to: &MemoryRange, from: &Remote, limit: Duration) -> Result<()>;

    /// Ends the connection, from any thread. Other threads that wait in it get an error soon. After the return the
    /// other side can no longer reach memory through it.
    fn close(&self);
}

/// Makes connections, for a client.
pub trait Connector: Send + Sync {
    /// The transport's name.
    fn transport(&self) -> &'static str;

    /// The name of the server, for messages.
    fn peer(&self) -> &str;

    /// Makes a connection. A transport with several adapters spreads lanes over them.
    ///
    /// # Errors
    /// When the server cannot be reached in time.
    fn connect(&self, lane: usize, limit: Duration) -> Result<Box<dyn Link>>;

    /// Exposes memory to the server, for requests over any connection. `None` if this transport is inline only, or
    /// cannot reach this memory; then [`Link::why_inline`] has the reason.
    fn expose(&self, memory: &Shareable, range: Range<usize>) -> Option<Exposed> {
        let _ = (memory, range);
        None
    }

    /// Removes any registration of this memory, which may then be freed.
    fn forget(&self, memory: &Shareable) {
        let _ = memory;
    }
}

/// Accepts connections, for a server.
pub trait Acceptor: Send + Sync {
    /// The listening address, for messages and scripts.
    fn address(&self) -> String;

    /// Waits for the next client; `None` on a timeout.
    ///
    /// # Errors
    /// When no further clients can be accepted.
    fn accept(&self, limit: Duration) -> Result<Option<Box<dyn Link>>>;
}

/// The least throughput of a connection: a slower side counts as stalled.
const MIN_BYTES_PER_SECOND: u64 = 1 << 20;

/// The deadline for a number of bytes.
pub(crate) fn due(limit: Duration, bytes: usize) -> Instant {
    Instant::now() + limit + Duration::from_millis(bytes as u64 * 1000 / MIN_BYTES_PER_SECOND)
}

/// The CRC-32C of memory.
///
/// # Errors
/// When the range is not within its memory.
pub fn checksum(data: &MemoryRange) -> Result<u32> {
    checksum_on(0, &data.mem, data.at, data.len)
}

/// The checksum of inline data; 0 if the connection authenticates it.
pub(crate) fn checksum_for(link: &dyn Link, data: &MemoryRange) -> Result<u32> {
    if link.is_encrypted() { Ok(0) } else { checksum(data) }
}

/// Bytes that are copied out and checksummed at a time: three runs of the length that is fastest, and no more than the
/// L1 cache holds.
const BLOCK: usize = 24 << 10;

/// Continues the CRC-32C `crc` with a range of memory.
pub(crate) fn checksum_on(mut crc: u32, mem: &HostMem, at: usize, len: usize) -> Result<u32> {
    let mut block = vec![0; len.min(BLOCK)];
    let mut done = 0;
    while done < len {
        let part = &mut block[..(len - done).min(BLOCK)];
        mem.read(at + done, part)?;
        crc = crc32c::crc32c_append(crc, part);
        done += part.len();
    }
    Ok(crc)
}
