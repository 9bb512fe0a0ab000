//! Frames over RDMA. They are sent as messages of a reliable connection. The server transfers data directly between the
//! buffers of both sides, with RDMA reads and writes. Both sides meet over TCP, at the server's listening address.
//!
//! Only a client exposes memory, to one target, over connections whose target has proven that it has the key. A
//! server's memory is never exposed. Frames are encrypted as over TCP; data that is put or got is not.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_os::Deadline;
use onehop_pci::Root;
use onehop_rdma::{
    CacheLimits, Channel, ChannelSize, Choice, Endpoint, HeldRegistration, MemoryRef, Message, Nic,
    Registered, Verbs, nearest_first,
};

use crate::auth::Keys;
use crate::lock;
use crate::seal::{ByteSource, Opener, Sealer};
use crate::tcp::{TcpAcceptor, TcpConnector};
use crate::transport::{
    Acceptor, Connector, DataPlacer, Exposed, Incoming, Link, MemoryRange, Outgoing, Shareable,
};
use crate::wire::{HEAD_BYTES, Head, Remote};
use crate::{Error, Result};

/// Ports that one side uses: a request has room for this many keys.
pub const MAX_PORTS: usize = 4;
/// Clients whose handshake is in progress.
const MAX_PENDING: usize = 64;
/// The time limit of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How often finished handshakes are looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Bytes that are copied at a time between messages and memory.
const BLOCK: usize = 4096;

/// RDMA ports of this machine, in order of preference.
#[derive(Clone)]
pub struct Ports {
    nics: Arc<Vec<Arc<Nic>>>,
    /// Why memory could not be exposed last.
    why: Arc<Mutex<Option<String>>>,
}

impl Ports {
    /// Opens ports of the named devices, or without names, of all devices that work, those nearest to a GPU first.
    ///
    /// # Errors
    /// When RDMA is not available, with the reason, or a named device cannot be used.
    pub fn open(names: &[String]) -> Result<Self> {
        let verbs = Verbs::load()?;
        let open = |name: &String| Nic::open(&verbs, &Choice::device(name), CacheLimits::default());
        if !names.is_empty() {
            if names.len() > MAX_PORTS {
                let why = format!("{} devices are named, but at most {MAX_PORTS} are used", names.len());
                return Err(onehop_rdma::Error::NoRdma { why }.into());
            }
            let all: onehop_rdma::Result<Vec<_>> = names.iter().map(open).collect();
            return Ok(Self::of(all?));
        }
        let (mut ports, mut why) = (Vec::new(), "there is no RDMA device".to_owned());
        let known = verbs.devices()?;
        for name in nearest_first(&Root::here()).into_iter().filter(|name| known.contains(name)) {
            match open(&name) {
                Ok(port) => ports.push(port),
                Err(onehop_rdma::Error::NoRdma { why: reason }) => why = reason,
                Err(error) => why = error.to_string(),
            }
        }
        ports.truncate(MAX_PORTS);
        if ports.is_empty() {
            return Err(onehop_rdma::Error::NoRdma { why }.into());
        }
        Ok(Self::of(ports))
    }

    fn of(nics: Vec<Arc<Nic>>) -> Self {
        Self { nics: Arc::new(nics), why: Arc::default() }
    }

    /// The ports.
    #[must_use]
    pub fn all(&self) -> &[Arc<Nic>] {
        &self.nics
    }

    /// Names and addresses of the ports.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.nics.iter().map(|nic| format!("{} ({})", nic.name(), nic.address())).collect()
    }

    fn note_failure(&self, why: &str) {
        *lock(&self.why) = Some(why.to_owned());
    }

    fn of_lane(&self, lane: usize) -> &Arc<Nic> {
        &self.nics[lane % self.nics.len()]
    }
}

/// A connection over RDMA.
pub struct RdmaLink {
    channel: Channel,
    ports: Ports,
    peer: String,
    /// The client's port that carries the connection, which decides which of its keys counts.
    lane: usize,
    /// Locked while a frame is sent. Seals it if frames are encrypted.
    out: Mutex<Option<Sealer>>,
    input: Mutex<Input>,
    encrypted: AtomicBool,
}

/// The message that is being read, and the offset in it.
#[derive(Default)]
struct Input {
    message: Option<Message>,
    at: usize,
    opener: Option<Opener>,
}

impl RdmaLink {
    fn new(channel: Channel, ports: &Ports, lane: usize, peer: String) -> Self {
        let (out, input, encrypted) = Default::default();
        Self { channel, ports: ports.clone(), peer, lane, out, input, encrypted }
    }

    fn failed(&self, call: &'static str, limit: Duration, error: onehop_rdma::Error) -> Error {
        match error {
            onehop_rdma::Error::TimedOut(_) => {
                Error::TimedOut { peer: self.peer.clone(), what: "accept data", limit }
            }
            onehop_rdma::Error::Broken(_) => Error::Closed { peer: self.peer.clone() },
            other => Error::io(call, &self.peer, std::io::Error::other(other)),
        }
    }

    /// Waits for further bytes. Returns false on a timeout.
    fn more(&self, input: &mut Input, deadline: Deadline) -> Result<bool> {
        if input.message.as_ref().is_some_and(|message| input.at < message.len()) {
            return Ok(true);
        }
        // Free its buffer before waiting for the next message.
        input.message = None;
        let next = self.channel.receive(deadline);
        let next = next.map_err(|e| self.failed("receiving from", deadline.left(), e))?;
        (input.message, input.at) = (next, 0);
        Ok(input.message.is_some())
    }

    fn fill(&self, input: &mut Input, out: &mut [u8], (stall, deadline): (Duration, Deadline)) -> Result<()> {
        let mut done = 0;
        while done < out.len() {
            if !self.more(input, deadline)? {
                let (peer, what) = (self.peer.clone(), "finish a frame");
                return Err(Error::TimedOut { peer, what, limit: stall });
            }
            let Some(message) = &input.message else { continue };
            let count = (message.len() - input.at).min(out.len() - done);
            let (mem, at) = message.place();
            mem.read(at + input.at, &mut out[done..done + count])?;
            (done, input.at) = (done + count, input.at + count);
        }
        Ok(())
    }

    fn data(
        &self,
        input: &mut Input,
        head: &Head,
        to: Option<&MemoryRange>,
        until: (Duration, Deadline),
    ) -> Result<()> {
        let bytes = head.data as usize;
        if to.is_some_and(|to| to.len < bytes) {
            return Err(Error::protocol(
                &self.peer,
                format!("{bytes} bytes of data, which is more than expected"),
            ));
        }
        let (mut block, mut done, mut crc) = ([0; BLOCK], 0, 0);
        while done < bytes {
            let part = &mut block[..(bytes - done).min(BLOCK)];
            self.fill(input, part, until)?;
            crc = crc32c::crc32c_append(crc, part);
            if let Some(to) = to {
                to.mem.write(to.at + done, part)?;
            }
            done += part.len();
        }
        head.check_data(crc, &self.peer)
    }

    /// Sends `front` and the data after it.
    fn send_all(
        &self,
        front: &[u8],
        data: Option<&MemoryRange>,
        (limit, deadline): (Duration, Deadline),
    ) -> Result<()> {
        let total = front.len() + data.map_or(0, |data| data.len);
        let mut done = 0;
        while done < total {
            let count = self.channel.most().min(total - done);
            let sent = self.channel.send(count, deadline, |mem, at| {
                let of_front = front.len().saturating_sub(done).min(count);
                if of_front > 0 {
                    mem.write(at, &front[done..done + of_front])?;
                }
                let mut block = [0; BLOCK];
                let mut copied = of_front;
                while let Some(from) = data.filter(|_| copied < count) {
                    let part = &mut block[..(count - copied).min(BLOCK)];
                    from.mem.read(from.at + done + copied - front.len(), part)?;
                    mem.write(at + copied, part)?;
                    copied += part.len();
                }
                Ok(())
            });
            sent.map_err(|e| self.failed("sending to", limit, e))?;
            done += count;
        }
        Ok(())
    }

    /// The registration of our memory, and the client's key for this connection.
    fn both(
        &self,
        ours: &MemoryRange,
        theirs: &Remote,
    ) -> Result<(HeldRegistration<Registered>, onehop_rdma::RemoteMemory)> {
        if theirs.len < ours.len as u64 {
            return Err(Error::protocol(&self.peer, "it exposes less memory than it requests"));
        }
        let memory: MemoryRef = Arc::new(ours.mem.clone());
        let registered = self.channel.nic().cached_whole(&memory)?;
        let rkey = theirs.keys[self.lane % MAX_PORTS];
        Ok((registered, onehop_rdma::RemoteMemory { addr: theirs.addr, len: ours.len as u64, rkey }))
    }
}

/// The byte stream of received messages.
struct Messages<'a> {
    link: &'a RdmaLink,
    input: &'a mut Input,
    stall: Duration,
}

impl ByteSource for Messages<'_> {
    fn take(&mut self, out: &mut [u8], until: Instant) -> Result<()> {
        let left = until.saturating_duration_since(Instant::now());
        self.link.fill(self.input, out, (self.stall, Deadline::after(left)))
    }
}

impl Link for RdmaLink {
    fn transport(&self) -> &'static str {
        "rdma"
    }

    fn peer(&self) -> &str {
        &self.peer
    }

    fn send(&self, frame: &Outgoing<'_>, limit: Duration) -> Result<()> {
        let until = (limit, Deadline::after(limit));
        let mut sealer = lock(&self.out);
        if let Some(sealer) = sealer.as_mut() {
            return sealer.frame(frame, |bytes| self.send_all(bytes, None, until));
        }
        let front = [&frame.head.to_bytes()[..], frame.body].concat();
        self.send_all(&front, frame.data, until)
    }

    fn receive(&self, limit: Duration, stall: Duration, place: DataPlacer<'_>) -> Result<Option<Incoming>> {
        let mut input = lock(&self.input);
        if !self.more(&mut input, Deadline::after(limit))? {
            return Ok(None);
        }
        if let Some(mut opener) = input.opener.take() {
            let mut source = Messages { link: self, input: &mut input, stall };
            let frame = opener.frame(&mut source, stall, &self.peer, place);
            input.opener = Some(opener);
            return frame.map(Some);
        }
        let until = (stall, Deadline::after(stall));
        let mut bytes = [0; HEAD_BYTES];
        self.fill(&mut input, &mut bytes, until)?;
        let head = Head::from_bytes(&bytes, &self.peer)?;
        let mut body = vec![0; head.body as usize];
        self.fill(&mut input, &mut body, until)?;
        head.check_body(&body, &self.peer)?;
        if head.data > 0 {
            let to = place(&head, &body)?;
            // The wait for a buffer was ours, so the time starts again.
            let until = (stall, Deadline::after(stall));
            self.data(&mut input, &head, to.as_ref(), until)?;
        }
        Ok(Some(Incoming { head, body }))
    }

    fn binding(&self) -> Vec<u8> {
        self.channel.ends()
    }

    fn encrypt(&self, keys: &Keys) {
        *lock(&self.out) = Some(Sealer::new(keys.send));
        lock(&self.input).opener = Some(Opener::new(keys.receive));
        self.encrypted.store(true, Ordering::Release);
    }

    fn is_encrypted(&self) -> bool {
        self.encrypted.load(Ordering::Acquire)
    }

    fn trust(&self) -> Result<()> {
        Ok(self.channel.let_in()?)
    }

    fn why_inline(&self) -> (String, String) {
        let fix = "See docs/set-up-a-machine.md on RDMA cards: locked memory, dma-bufs, nvidia-peermem";
        lock(&self.ports.why).clone().map(|why| (why, fix.to_owned())).unwrap_or_default()
    }

    fn put(&self, from: &MemoryRange, to: &Remote, limit: Duration) -> Result<()> {
        let (ours, theirs) = self.both(from, to)?;
        let done = self.channel.put(&ours, from.at as u64, theirs, Deadline::after(limit));
        done.map_err(|e| self.failed("putting bytes into memory of", limit, e))
    }

    fn get(&self, to: &MemoryRange, from: &Remote, limit: Duration) -> Result<()> {
        let (ours, theirs) = self.both(to, from)?;
        let done = self.channel.get(&ours, to.at as u64, theirs, Deadline::after(limit));
        done.map_err(|e| self.failed("getting bytes from memory of", limit, e))
    }

    fn close(&self) {
        self.channel.close("it was closed on this side");
    }
}

/// Connects over RDMA.
pub struct RdmaConnector {
    tcp: TcpConnector,
    ports: Ports,
}

impl RdmaConnector {
    /// Connects to a server: `host:port`, or several of its addresses with commas between them.
    ///
    /// # Errors
    /// When it is not an address, or a device has no room for another client.
    pub fn new(target: &str, ports: &Ports) -> Result<Self> {
        let tcp = TcpConnector::new(target)?;
        let nics: onehop_rdma::Result<Vec<_>> = ports.nics.iter().map(|nic| nic.for_exposing()).collect();
        Ok(Self { tcp, ports: Ports::of(nics?) })
    }

    /// Connects to loopback addresses only, as [`TcpConnector::loopback_only`] does.
    #[must_use]
    pub fn loopback_only(self) -> Self {
        Self { tcp: self.tcp.loopback_only(), ..self }
    }
}

impl Connector for RdmaConnector {
    fn transport(&self) -> &'static str {
        "rdma"
    }

    fn peer(&self) -> &str {
        self.tcp.peer()
    }

    fn connect(&self, lane: usize, limit: Duration) -> Result<Box<dyn Link>> {
        let stream = self.tcp.dial(lane, limit)?;
        let peer = stream.peer_addr().map_or_else(|_| self.tcp.peer().to_owned(), |peer| peer.to_string());
        let lane = lane % self.ports.all().len();
        let size = ChannelSize { lane: lane as u8, ..ChannelSize::default() };
        let channel = onehop_rdma::connect(self.ports.of_lane(lane), size, stream, Deadline::after(limit))?;
        Ok(Box::new(RdmaLink::new(channel, &self.ports, lane, peer)))
    }

    fn expose(&self, memory: &Shareable, range: Range<usize>) -> Option<Exposed> {
        let (mut keys, mut hold) = ([0; MAX_PORTS], Vec::new());
        let (mut addr, mut route) = (0, "rdma");
        let (at, len) = (range.start as u64, range.len() as u64);
        for (key, nic) in keys.iter_mut().zip(self.ports.all()) {
            let found = nic.cached_part(memory, at..at + len);
            let found = found.and_then(|held| Ok((held.remote(held.offset(), len)?, held)));
            let (remote, held) =
                found.inspect_err(|error| self.ports.note_failure(&error.to_string())).ok()?;
            (*key, addr, route) = (remote.rkey, remote.addr, held.way().name());
            hold.push(held);
        }
        Some(Exposed { remote: Remote { addr, len, keys }, route, hold: Box::new(hold) })
    }

    fn forget(&self, memory: &Shareable) {
        self.ports.all().iter().for_each(|nic| nic.forget_whole(memory));
    }
}

/// Listens for RDMA clients. Each handshake runs on a thread of its own, so that a silent client does not block others.
pub struct RdmaAcceptor {
    tcp: TcpAcceptor,
    ports: Ports,
    connected: (Sender<RdmaLink>, Mutex<Receiver<RdmaLink>>),
    pending: Arc<PendingPeers>,
}

impl RdmaAcceptor {
    /// Listens at an address; port 0 chooses a free port.
    ///
    /// # Errors
    /// When it is not an address of this machine, or in use.
    pub fn listen(address: &str, ports: Ports) -> Result<Self> {
        let (sender, receiver) = channel();
        let connected = (sender, Mutex::new(receiver));
        Ok(Self { tcp: TcpAcceptor::listen(address)?, ports, connected, pending: Arc::default() })
    }

    fn start_handshake(&self, stream: TcpStream) -> Result<()> {
        let failed = |e| Error::io("dup of", "a client's socket", e);
        let entry = self.pending.add(stream.try_clone().map_err(failed)?);
        let (ports, sender) = (self.ports.clone(), self.connected.0.clone());
        let run = move || {
            if let Some(link) = handshake(&ports, stream) {
                // Fails if the server has ended.
                let _ = sender.send(link);
            }
            drop(entry);
        };
        let thread = std::thread::Builder::new().name("rdma meets".into()).spawn(run);
        thread.map(drop).map_err(|e| Error::io("a thread for", "a client", e))
    }
}

/// Clients whose handshake is in progress, oldest first. If there are too many, the oldest is dropped.
#[derive(Default)]
struct PendingPeers {
    streams: Mutex<VecDeque<(u64, TcpStream)>>,
    next: AtomicU64,
}

/// An entry, until the handshake ends.
struct PendingEntry(Arc<PendingPeers>, u64);

impl PendingPeers {
    fn add(self: &Arc<Self>, stream: TcpStream) -> PendingEntry {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut streams = lock(&self.streams);
        streams.push_back((number, stream));
        if streams.len() > MAX_PENDING
            && let Some((_, longest)) = streams.pop_front()
        {
            // Its thread then sees the end of the connection, unless the client has closed it.
            let _ = longest.shutdown(Shutdown::Both);
        }
        PendingEntry(self.clone(), number)
    }
}

impl Drop for PendingEntry {
    fn drop(&mut self) {
        lock(&self.0.streams).retain(|(number, _)| *number != self.1);
    }
}

/// Performs a handshake. Errors are not reported.
fn handshake(ports: &Ports, stream: TcpStream) -> Option<RdmaLink> {
    let peer = stream.peer_addr().ok()?.to_string();
    let ip = stream.local_addr().ok()?.ip();
    // The port with the address that the client connected to, or else the ports in turn.
    let own = ports.all().iter().find(|nic| nic.has(ip));
    let mut lane = 0;
    let choose = |other: &Endpoint| {
        lane = usize::from(other.lane);
        own.unwrap_or_else(|| ports.of_lane(lane))
    };
    stream.set_nonblocking(false).ok()?;
    let channel =
        onehop_rdma::accept(choose, ChannelSize::default(), stream, Deadline::after(HANDSHAKE_TIMEOUT))
            .ok()?;
    Some(RdmaLink::new(channel, ports, lane, peer))
}

impl Acceptor for RdmaAcceptor {
    fn address(&self) -> String {
        self.tcp.address()
    }

    fn accept(&self, limit: Duration) -> Result<Option<Box<dyn Link>>> {
        let until = Instant::now() + limit;
        loop {
            if let Ok(link) = lock(&self.connected.1).try_recv() {
                return Ok(Some(Box::new(link)));
            }
            let left = until.saturating_duration_since(Instant::now());
            if let Some(stream) = self.tcp.next(left.min(POLL_INTERVAL))? {
                self.start_handshake(stream)?;
            } else if left.is_zero() {
                return Ok(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Whether the other end closes a connection within a moment.
    fn is_closed(stream: &mut TcpStream, moment: Duration) -> bool {
        stream.set_read_timeout(Some(moment)).unwrap();
        matches!(stream.read(&mut [0]), Ok(0))
    }

    #[test]
    fn silent_connections_are_dropped_for_new_ones() {
        let acceptor = RdmaAcceptor::listen("127.0.0.1:0", Ports::of(Vec::new())).unwrap();
        let address = acceptor.address();
        let come = |_| {
            let stream = TcpStream::connect(&address).unwrap();
            assert!(acceptor.accept(Duration::from_millis(20)).unwrap().is_none());
            stream
        };
        let mut held: Vec<_> = (0..MAX_PENDING).map(come).collect();
        let mut newcomer = come(0);
        // Before the handshakes time out.
        assert!(is_closed(&mut held[0], HANDSHAKE_TIMEOUT / 2), "the oldest was dropped");
        assert!(!is_closed(&mut held[1], Duration::from_millis(50)));
        assert!(!is_closed(&mut newcomer, Duration::from_millis(50)), "the newcomer was dropped");
    }
}
