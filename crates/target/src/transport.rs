//! The seam: how frames, and the data that goes with them, get from one side to the other.
//!
//! A transport moves whole frames, in order, or says that the connection has ended. It knows nothing of files. There are two ways
//! for data: *inline*, behind a frame, which every transport has; and *exposed*, where the client makes memory known with a
//! request, and the server puts bytes there or gets them from there without the client having a part in it (RDMA). What is
//! retried, and that nothing is done twice, is decided above.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_os::{DmaMemory, HostMem};

use crate::Result;
use crate::auth::Keys;
use crate::wire::{Head, Remote};

/// Data of a frame: a stretch of memory that nobody else writes meanwhile.
#[derive(Clone)]
pub struct Stretch {
    /// The memory.
    pub mem: HostMem,
    /// Where in it.
    pub at: usize,
    /// How long.
    pub len: usize,
}

/// A frame that goes out. Lengths in its head are right already, and so are checksums ([`Head::new`], [`checksum`]), which
/// count for connections that are not encrypted.
pub struct Outgoing<'a> {
    /// Its head.
    pub head: Head,
    /// Its body.
    pub body: &'a [u8],
    /// Its data, where it has some.
    pub data: Option<&'a Stretch>,
}

/// A frame that came in. It was authenticated or, where the connection is not encrypted, its checksums were right.
#[derive(Debug)]
pub struct Incoming {
    /// Its head.
    pub head: Head,
    /// Its body.
    pub body: Vec<u8>,
}

/// Memory that can be exposed. A transport may keep it, so that the next time is quicker.
pub type Shareable = Arc<dyn DmaMemory + Send + Sync>;

/// Says where the data of a frame goes, whose head and body have come.
pub type DataPlacer<'a> = &'a mut dyn FnMut(&Head, &[u8]) -> Result<Option<Stretch>>;

/// Memory that the other side reaches, until this is dropped.
pub struct Exposed {
    /// What to tell the other side.
    pub remote: Remote,
    /// The way by which it is reached.
    pub route: &'static str,
    /// Holds the registration, or whatever else the transport has to keep.
    pub hold: Box<dyn Send + Sync>,
}

/// A connection.
///
/// `send`, `put` and `get` are called by several threads at once, `receive` by one. After an error of `send` or
/// `receive` the connection is used no more, but for [`Link::close`].
pub trait Link: Send + Sync {
    /// The transport's name: `tcp`, `rdma`.
    fn transport(&self) -> &'static str;

    /// The other side, for people.
    fn peer(&self) -> &str;

    /// Sends a frame, all of it, within a time.
    ///
    /// # Errors
    /// When the connection has ended, or the other side does not take it in time.
    fn send(&self, frame: &Outgoing<'_>, limit: Duration) -> Result<()>;

    /// Waits for the next frame; none if nothing began to come within `limit`. What began to come has to be whole within
    /// `stall` more. Where it has data, `place` is asked where that goes, with the frame's head and body; given nothing, the
    /// data is taken and thrown away. `place` may wait: then the other side has to wait, too.
    ///
    /// # Errors
    /// When the connection has ended, something changed on its way, or `place` fails.
    fn receive(&self, limit: Duration, stall: Duration, place: DataPlacer<'_>) -> Result<Option<Incoming>>;

    /// What both sides know of this connection, and would not agree on if each had it with somebody between them. It goes
    /// into the key exchange.
    fn binding(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Encrypts and authenticates all frames from now on, in both directions. Data that is put or got is not covered.
    fn encrypt(&self, keys: &Keys);

    /// Whether it does.
    fn is_encrypted(&self) -> bool;

    /// The other side has been let in: it may reach memory that is exposed to it. Before this it reaches none.
    ///
    /// # Errors
    /// When the transport cannot let it.
    fn trust(&self) -> Result<()> {
        Ok(())
    }

    /// Why data goes inline and not straight to where it belongs, and what would change that. Empty where nothing keeps it.
    fn why_inline(&self) -> (String, String);

    /// Server: puts bytes into exposed memory of the client. When it returns they are there, or will be before any frame
    /// that is sent later.
    ///
    /// # Errors
    /// When the client's memory cannot be reached, or not in time.
    fn put(&self, from: &Stretch, to: &Remote, limit: Duration) -> Result<()>;

    /// Server: gets bytes from exposed memory of the client.
    ///
    /// # Errors
    /// As for [`Link::put`].
    fn get(&self, to: &Stretch, from: &Remote, limit: Duration) -> Result<()>;

    /// Ends the connection, from whatever thread; others that wait in it get an error soon. When it has returned, the other
    /// side reaches no memory of this one by it any more.
    fn close(&self);
}

/// How a client gets connections.
pub trait Connector: Send + Sync {
    /// The transport's name.
    fn transport(&self) -> &'static str;

    /// The server, for people.
    fn peer(&self) -> &str;

    /// A new connection. A transport with several adapters spreads `lane` over them.
    ///
    /// # Errors
    /// When the server cannot be reached in time.
    fn connect(&self, lane: usize, limit: Duration) -> Result<Box<dyn Link>>;

    /// Makes memory known to the server, whichever connection it then goes by. None where this transport sends all data inline,
    /// or does not reach this memory; then [`Link::why_inline`] has the reason.
    fn expose(&self, memory: &Shareable, range: Range<usize>) -> Option<Exposed> {
        let _ = (memory, range);
        None
    }

    /// This memory is exposed no more, and may be let go of.
    fn forget(&self, memory: &Shareable) {
        let _ = memory;
    }
}

/// How a server gets them.
pub trait Acceptor: Send + Sync {
    /// Where it listens, for people and scripts.
    fn address(&self) -> String;

    /// Waits for the next client; none within `limit`.
    ///
    /// # Errors
    /// When there will be no more.
    fn accept(&self, limit: Duration) -> Result<Option<Box<dyn Link>>>;
}

/// The least that a connection has to carry: a side that brings less than this in the long run stalls.
const BYTES_A_SECOND: u64 = 1 << 20;

/// By when so many bytes have to be through.
pub(crate) fn due(limit: Duration, bytes: usize) -> Instant {
    Instant::now() + limit + Duration::from_millis(bytes as u64 * 1000 / BYTES_A_SECOND)
}

/// The CRC-32C of memory.
///
/// # Errors
/// When the stretch does not lie within its memory.
pub fn checksum(data: &Stretch) -> Result<u32> {
    checksum_on(0, &data.mem, data.at, data.len)
}

/// The checksum of data that goes behind a frame: none where that is authenticated.
pub(crate) fn checksum_for(link: &dyn Link, data: &Stretch) -> Result<u32> {
    if link.is_encrypted() { Ok(0) } else { checksum(data) }
}

/// Bytes that are copied out and looked at together: three runs of the length that is quickest, and no more than the innermost
/// cache has room for.
const BLOCK: usize = 24 << 10;

/// The CRC-32C of something whose own so far is `crc`, and of the memory that follows it.
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
