//! Frames over TCP, for machines without RDMA. All data is inline. Without encryption, the kernel reads and writes data
//! in place, and checksums are computed while the data is in the CPU's cache. With encryption, data is sealed and
//! opened record by record in a buffer that stays in the cache.

use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::auth::Keys;
use crate::lock;
use crate::seal::{ByteSource, Opener, Sealer};
use crate::transport::{
    Acceptor, Connector, DataPlacer, Incoming, Link, MemoryRange, Outgoing, checksum_on, due,
};
use crate::wire::{HEAD_BYTES, Head, MAX_BODY, Remote};
use crate::{Error, Result};

/// Bytes of data that are received at a time: few enough to stay in the cache for their checksum.
const CHUNK: usize = 256 << 10;
/// Bytes that are received at a time while heads and bodies are read. Data among them is copied once more.
const READ_AHEAD: usize = 16 << 10;
/// The size of the input buffer: a whole head and body, and the read-ahead.
const INPUT: usize = HEAD_BYTES + MAX_BODY + READ_AHEAD;
/// A connection over TCP.
pub struct TcpLink {
    stream: TcpStream,
    peer: String,
    /// Locked while a frame is sent.
    out: Mutex<Out>,
    input: Mutex<Input>,
    encrypted: AtomicBool,
}

#[derive(Default)]
struct Out {
    /// The head and body of an unencrypted frame.
    front: Vec<u8>,
    sealer: Option<Sealer>,
}

/// Received bytes that were not processed yet.
struct Input {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
    opener: Option<Opener>,
}

/// Waits until the descriptor is ready. Returns false on a timeout.
fn ready(fd: impl std::os::fd::AsFd, what: PollFlags, until: Instant) -> std::result::Result<bool, Errno> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut fds = [PollFd::new(&fd, what)];
        match poll(&mut fds, Some(&time)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

impl TcpLink {
    /// Wraps a connected socket.
    ///
    /// # Errors
    /// When it is disconnected.
    pub fn new(stream: TcpStream) -> Result<Self> {
        let peer = stream.peer_addr().map_or_else(|_| "an unknown peer".into(), |peer| peer.to_string());
        let failed = |e: std::io::Error| Error::io("setting up the connection with", &peer, e);
        stream.set_nonblocking(true).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let input = Mutex::new(Input { bytes: vec![0; INPUT], from: 0, to: 0, opener: None });
        Ok(Self { stream, peer, out: Mutex::default(), input, encrypted: AtomicBool::new(false) })
    }

    fn failed(&self, call: &'static str, error: std::io::Error) -> Error {
        match error.kind() {
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::NotConnected => {
                Error::Closed { peer: self.peer.clone() }
            }
            _ => Error::io(call, &self.peer, error),
        }
    }

    /// Calls `attempt` until it does not block; `None` on a timeout.
    fn when_ready(
        &self,
        call: &'static str,
        what: PollFlags,
        until: Instant,
        mut attempt: impl FnMut() -> std::io::Result<usize>,
    ) -> Result<Option<usize>> {
        loop {
            match attempt() {
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if !ready(&self.stream, what, until).map_err(|e| self.failed(call, e.into()))? {
                        return Ok(None);
                    }
                }
                Err(error) => return Err(self.failed(call, error)),
            }
        }
    }

    /// Receives bytes. Returns how many, or `None` on a timeout.
    fn receive_some(
        &self,
        until: Instant,
        take: impl FnMut() -> std::io::Result<usize>,
    ) -> Result<Option<usize>> {
        match self.when_ready("receiving from", PollFlags::IN, until, take)? {
            Some(0) => Err(Error::Closed { peer: self.peer.clone() }),
            other => Ok(other),
        }
    }

    /// Receives at most `wanted` more bytes into the input. Returns false on a timeout.
    fn more(&self, input: &mut Input, wanted: usize, until: Instant) -> Result<bool> {
        if input.from == input.to {
            (input.from, input.to) = (0, 0);
        } else if input.bytes.len() - input.to < wanted {
            input.bytes.copy_within(input.from..input.to, 0);
            (input.from, input.to) = (0, input.to - input.from);
        }
        let end = input.bytes.len().min(input.to + wanted);
        let room = &mut input.bytes[input.to..end];
        let count =
            self.receive_some(until, || Ok(recv(&self.stream, &mut *room, RecvFlags::DONTWAIT)?.0))?;
        input.to += count.unwrap_or(0);
        Ok(count.is_some())
    }

    fn timed_out(&self, limit: Duration) -> Error {
        Error::TimedOut { peer: self.peer.clone(), what: "finish a frame", limit }
    }

    fn fill(&self, input: &mut Input, bytes: usize, limit: Duration, until: Instant) -> Result<()> {
        while input.to - input.from < bytes {
            let missing = bytes - (input.to - input.from);
            if !self.more(input, missing.max(READ_AHEAD), until)? {
                return Err(self.timed_out(limit));
            }
        }
        Ok(())
    }

    fn data(&self, input: &mut Input, head: &Head, to: Option<&MemoryRange>, limit: Duration) -> Result<()> {
        let bytes = head.data as usize;
        if to.is_some_and(|to| to.len < bytes) {
            return Err(Error::protocol(
                &self.peer,
                format!("{bytes} bytes of data, which is more than expected"),
            ));
        }
        let until = due(limit, bytes);
        let (mut done, mut crc) = (0, 0);
        while done < bytes {
            match to {
                Some(to) if input.from == input.to => {
                    let (at, most) = (to.at + done, CHUNK.min(bytes - done));
                    let take = || to.mem.receive(&self.stream, at, most).map_err(onehop_os::Error::into_io);
                    let len = self.receive_some(until, take)?.ok_or_else(|| self.timed_out(limit))?;
                    crc = checksum_on(crc, &to.mem, at, len)?;
                    done += len;
                }
                _ => {
                    self.fill(input, 1, limit, until)?;
                    let part = &input.bytes[input.from..input.to.min(input.from + bytes - done)];
                    crc = crc32c::crc32c_append(crc, part);
                    if let Some(to) = to {
                        to.mem.write(to.at + done, part)?;
                    }
                    done += part.len();
                    input.from += part.len();
                }
            }
        }
        head.check_data(crc, &self.peer)
    }

    /// Sends `front` and the data after it.
    fn send_all(
        &self,
        front: &[u8],
        data: Option<&MemoryRange>,
        (limit, until): (Duration, Instant),
    ) -> Result<()> {
        let data_len = data.map_or(0, |data| data.len);
        let mut done = 0;
        while done < front.len() + data_len {
            let (front, skip) = (&front[done.min(front.len())..], done.saturating_sub(front.len()));
            let give = || match data {
                Some(data) => data
                    .mem
                    .send(&self.stream, front, data.at + skip, data.len - skip)
                    .map_err(onehop_os::Error::into_io),
                None => Ok(send(&self.stream, front, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?),
            };
            let Some(count) = self.when_ready("sending to", PollFlags::OUT, until, give)? else {
                return Err(Error::TimedOut { peer: self.peer.clone(), what: "accept a frame", limit });
            };
            done += count;
        }
        Ok(())
    }
}

/// The byte stream of a connection: the buffered input first.
struct BufferedSource<'a> {
    link: &'a TcpLink,
    input: &'a mut Input,
    stall: Duration,
}

impl ByteSource for BufferedSource<'_> {
    fn take(&mut self, out: &mut [u8], until: Instant) -> Result<()> {
        let (link, input) = (self.link, &mut *self.input);
        let mut done = 0;
        while done < out.len() {
            let rest = &mut out[done..];
            if input.from == input.to && rest.len() >= READ_AHEAD {
                let take = || Ok(recv(&link.stream, &mut *rest, RecvFlags::DONTWAIT)?.0);
                done += link.receive_some(until, take)?.ok_or_else(|| link.timed_out(self.stall))?;
                continue;
            }
            link.fill(input, 1, self.stall, until)?;
            let count = rest.len().min(input.to - input.from);
            rest[..count].copy_from_slice(&input.bytes[input.from..input.from + count]);
            (done, input.from) = (done + count, input.from + count);
        }
        Ok(())
    }
}

impl Link for TcpLink {
    fn transport(&self) -> &'static str {
        "tcp"
    }

    fn peer(&self) -> &str {
        &self.peer
    }

    fn send(&self, frame: &Outgoing<'_>, limit: Duration) -> Result<()> {
        let mut out = lock(&self.out);
        let until = due(limit, frame.data.map_or(0, |data| data.len));
        if let Some(sealer) = &mut out.sealer {
            return sealer.frame(frame, |bytes| self.send_all(bytes, None, (limit, until)));
        }
        out.front.clear();
        out.front.extend_from_slice(&frame.head.to_bytes());
        out.front.extend_from_slice(frame.body);
        self.send_all(&out.front, frame.data, (limit, until))
    }

    fn receive(&self, limit: Duration, stall: Duration, place: DataPlacer<'_>) -> Result<Option<Incoming>> {
        let mut input = lock(&self.input);
        if input.from == input.to && !self.more(&mut input, READ_AHEAD, Instant::now() + limit)? {
            return Ok(None);
        }
        if let Some(mut opener) = input.opener.take() {
            let mut source = BufferedSource { link: self, input: &mut input, stall };
            let frame = opener.frame(&mut source, stall, &self.peer, place);
            input.opener = Some(opener);
            return frame.map(Some);
        }
        let until = Instant::now() + stall;
        self.fill(&mut input, HEAD_BYTES, stall, until)?;
        let mut bytes = [0; HEAD_BYTES];
        bytes.copy_from_slice(&input.bytes[input.from..input.from + HEAD_BYTES]);
        let head = Head::from_bytes(&bytes, &self.peer)?;
        input.from += HEAD_BYTES;
        let length = head.body as usize;
        self.fill(&mut input, length, stall, until)?;
        let body = input.bytes[input.from..input.from + length].to_vec();
        input.from += length;
        head.check_body(&body, &self.peer)?;
        if head.data > 0 {
            let to = place(&head, &body)?;
            self.data(&mut input, &head, to.as_ref(), stall)?;
        }
        Ok(Some(Incoming { head, body }))
    }

    fn encrypt(&self, keys: &Keys) {
        lock(&self.out).sealer = Some(Sealer::new(keys.send));
        lock(&self.input).opener = Some(Opener::new(keys.receive));
        self.encrypted.store(true, Ordering::Release);
    }

    fn is_encrypted(&self) -> bool {
        self.encrypted.load(Ordering::Acquire)
    }

    fn why_inline(&self) -> (String, String) {
        let fix = "Give both machines an RDMA adapter and start the target with --transport rdma";
        ("TCP cannot write into a GPU's memory: data goes through host memory".into(), fix.into())
    }

    fn put(&self, _from: &MemoryRange, _to: &Remote, _limit: Duration) -> Result<()> {
        Err(Error::protocol(&self.peer, "exposed memory over TCP"))
    }

    fn get(&self, _to: &MemoryRange, _from: &Remote, _limit: Duration) -> Result<()> {
        Err(Error::protocol(&self.peer, "exposed memory over TCP"))
    }

    fn close(&self) {
        // Fails if it is disconnected.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Listens for TCP clients.
pub struct TcpAcceptor {
    listener: TcpListener,
}

impl TcpAcceptor {
    /// Listens at an address; port 0 chooses a free port.
    ///
    /// # Errors
    /// When it is not an address of this machine, or in use.
    pub fn listen(address: &str) -> Result<Self> {
        let failed = |e: std::io::Error| Error::io("listening at", address, e);
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { listener })
    }

    /// The listening address, with the actual port.
    ///
    /// # Errors
    /// When the system call fails.
    pub fn local(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|e| Error::io("the address of", "a listening socket", e))
    }
}

impl TcpAcceptor {
    /// The next client's socket; `None` on a timeout.
    pub(crate) fn next(&self, limit: Duration) -> Result<Option<TcpStream>> {
        let failed = |e: std::io::Error| Error::io("accepting at", "a listening socket", e);
        let until = Instant::now() + limit;
        if !ready(&self.listener, PollFlags::IN, until).map_err(|e| failed(e.into()))? {
            return Ok(None);
        }
        match self.listener.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted => Ok(None),
                _ => Err(failed(error)),
            },
        }
    }
}

impl Acceptor for TcpAcceptor {
    fn address(&self) -> String {
        self.local().map_or_else(|e| e.to_string(), |address| address.to_string())
    }

    fn accept(&self, limit: Duration) -> Result<Option<Box<dyn Link>>> {
        // A client that has disconnected again is ignored.
        let link = |stream| TcpLink::new(stream).ok().map(|link| Box::new(link) as Box<dyn Link>);
        Ok(self.next(limit)?.and_then(link))
    }
}

/// Connects over TCP.
pub struct TcpConnector {
    /// The addresses of one server, one for each of its adapters.
    addresses: Vec<String>,
    name: String,
    loopback_only: bool,
}

impl TcpConnector {
    /// Connects to a server: `host:port`, or several of its addresses with commas between them.
    ///
    /// # Errors
    /// When it is not an address.
    pub fn new(target: &str) -> Result<Self> {
        let addresses: Vec<String> = target.split(',').map(str::to_owned).collect();
        for address in &addresses {
            let port =
                address.rsplit_once(':').map(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
            if port != Some(true) {
                return Err(Error::Address(address.clone()));
            }
        }
        Ok(Self { addresses, name: target.to_owned(), loopback_only: false })
    }

    /// Connects to loopback addresses only. Checked after each name resolution, because a name may change its address.
    #[must_use]
    pub fn loopback_only(self) -> Self {
        Self { loopback_only: true, ..self }
    }

    /// A connected socket.
    pub(crate) fn dial(&self, lane: usize, limit: Duration) -> Result<TcpStream> {
        let mut last = Error::Address(self.name.clone());
        // Try each address.
        for turn in 0..self.addresses.len() {
            let address = &self.addresses[(lane + turn) % self.addresses.len()];
            let failed = |e: std::io::Error| Error::io("connecting to", address, e);
            let found = match address.to_socket_addrs() {
                Ok(found) => found,
                Err(error) => {
                    last = failed(error);
                    continue;
                }
            };
            for place in found {
                if self.loopback_only && !place.ip().is_loopback() {
                    last = Error::NotLoopback { address: place.to_string() };
                    continue;
                }
                match TcpStream::connect_timeout(&place, limit).map_err(failed) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
        }
        Err(last)
    }
}

impl Connector for TcpConnector {
    fn transport(&self) -> &'static str {
        "tcp"
    }

    fn peer(&self) -> &str {
        &self.name
    }

    fn connect(&self, lane: usize, limit: Duration) -> Result<Box<dyn Link>> {
        Ok(Box::new(TcpLink::new(self.dial(lane, limit)?)?))
    }
}
