//! Frames over RDMA. They go as messages of a reliable connection; data goes straight between the buffers of both sides, put
//! there and got from there by the server. Both sides meet over TCP, at the address where the server listens.
//!
//! Only a client exposes memory, to one target, over connections whose target has shown that it has the key. A server's memory
//! is reached by nobody, whatever they say. Frames are encrypted as over TCP; data that is put or got is not.

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
    Acceptor, Connector, DataPlacer, Exposed, Incoming, Link, Outgoing, Shareable, Stretch,
};
use crate::wire::{HEAD_BYTES, Head, Remote};
use crate::{Error, Result};

/// Ports that one side uses at once: as many keys as a request has room for.
pub const MOST_PORTS: usize = 4;
/// Clients that are about to be connected.
const MOST_PENDING: usize = 64;
/// How long one may take for that.
const MEETING: Duration = Duration::from_secs(5);
/// How often it is looked whether one is there.
const TICK: Duration = Duration::from_millis(10);
/// Bytes that are copied at once between messages and memory.
const BLOCK: usize = 4096;

/// Ports of this machine, in the order in which they are used.
#[derive(Clone)]
pub struct Ports {
    nics: Arc<Vec<Arc<Nic>>>,
    /// Why memory could not be exposed lately.
    why: Arc<Mutex<Option<String>>>,
}

impl Ports {
    /// Opens ports of the devices with these names, or, where none are named, of all that work, those nearest to a GPU first.
    ///
    /// # Errors
    /// When there is no RDMA here, with the reason; or a device that was named cannot be used.
    pub fn open(names: &[String]) -> Result<Self> {
        let verbs = Verbs::load()?;
        let open = |name: &String| Nic::open(&verbs, &Choice::device(name), CacheLimits::default());
        if !names.is_empty() {
            if names.len() > MOST_PORTS {
                let why = format!("{} devices are named, and it uses {MOST_PORTS} at most", names.len());
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
        ports.truncate(MOST_PORTS);
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

    /// What they are called, with their addresses.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.nics.iter().map(|nic| format!("{} ({})", nic.name(), nic.address())).collect()
    }

    fn missed(&self, why: &str) {
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
    /// Which of the client's ports it goes by, and so which of its keys counts.
    lane: usize,
    /// Held while a frame is sent; seals it, where frames are encrypted.
    out: Mutex<Option<Sealer>>,
    input: Mutex<Input>,
    encrypted: AtomicBool,
}

/// The message that is being read, and how far.
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
                Error::TimedOut { peer: self.peer.clone(), what: "take what was sent", limit }
            }
            onehop_rdma::Error::Broken(_) => Error::Closed { peer: self.peer.clone() },
            other => Error::io(call, &self.peer, std::io::Error::other(other)),
        }
    }

    /// The next bytes of the stream that messages make: false where none came in time.
    fn more(&self, input: &mut Input, deadline: Deadline) -> Result<bool> {
        if input.message.as_ref().is_some_and(|message| input.at < message.len()) {
            return Ok(true);
        }
        // Its room is free again before the next one is waited for.
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
        to: Option<&Stretch>,
        until: (Duration, Deadline),
    ) -> Result<()> {
        let bytes = head.data as usize;
        if to.is_some_and(|to| to.len < bytes) {
            return Err(Error::protocol(&self.peer, format!("{bytes} bytes of data where fewer belong")));
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

    /// Sends all of `front`, and the data behind it.
    fn give(
        &self,
        front: &[u8],
        data: Option<&Stretch>,
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

    /// The registration of memory of ours, and the key of the client's that counts here.
    fn both(
        &self,
        ours: &Stretch,
        theirs: &Remote,
    ) -> Result<(HeldRegistration<Registered>, onehop_rdma::RemoteMemory)> {
        if theirs.len < ours.len as u64 {
            return Err(Error::protocol(&self.peer, "it exposes less memory than it asks for"));
        }
        let memory: MemoryRef = Arc::new(ours.mem.clone());
        let registered = self.channel.nic().cached_whole(&memory)?;
        let rkey = theirs.keys[self.lane % MOST_PORTS];
        Ok((registered, onehop_rdma::RemoteMemory { addr: theirs.addr, len: ours.len as u64, rkey }))
    }
}

/// The bytes of messages, as they come.
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
            return sealer.frame(frame, |bytes| self.give(bytes, None, until));
        }
        let front = [&frame.head.to_bytes()[..], frame.body].concat();
        self.give(&front, frame.data, until)
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
            // Who had to wait for a place has not stalled.
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

    fn put(&self, from: &Stretch, to: &Remote, limit: Duration) -> Result<()> {
        let (ours, theirs) = self.both(from, to)?;
        let done = self.channel.put(&ours, from.at as u64, theirs, Deadline::after(limit));
        done.map_err(|e| self.failed("putting bytes into memory of", limit, e))
    }

    fn get(&self, to: &Stretch, from: &Remote, limit: Duration) -> Result<()> {
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
    /// When it is no address, or a device has no room for one more client.
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
        let (mut keys, mut hold) = ([0; MOST_PORTS], Vec::new());
        let (mut addr, mut route) = (0, "rdma");
        let (at, len) = (range.start as u64, range.len() as u64);
        for (key, nic) in keys.iter_mut().zip(self.ports.all()) {
            let found = nic.cached_part(memory, at..at + len);
            let found = found.and_then(|held| Ok((held.remote(held.offset(), len)?, held)));
            let (remote, held) = found.inspect_err(|error| self.ports.missed(&error.to_string())).ok()?;
            (*key, addr, route) = (remote.rkey, remote.addr, held.way().name());
            hold.push(held);
        }
        Some(Exposed { remote: Remote { addr, len, keys }, route, hold: Box::new(hold) })
    }

    fn forget(&self, memory: &Shareable) {
        self.ports.all().iter().for_each(|nic| nic.forget_whole(memory));
    }
}

/// Listens for clients that come over RDMA. Each is met on a thread of its own: one that says nothing keeps nobody waiting.
pub struct RdmaAcceptor {
    tcp: TcpAcceptor,
    ports: Ports,
    met: (Sender<RdmaLink>, Mutex<Receiver<RdmaLink>>),
    pending: Arc<PendingPeers>,
}

impl RdmaAcceptor {
    /// Listens at an address; port 0 is one that is free.
    ///
    /// # Errors
    /// When it is no address of this machine, or taken.
    pub fn listen(address: &str, ports: Ports) -> Result<Self> {
        let (sender, receiver) = channel();
        let met = (sender, Mutex::new(receiver));
        Ok(Self { tcp: TcpAcceptor::listen(address)?, ports, met, pending: Arc::default() })
    }

    fn meet(&self, stream: TcpStream) -> Result<()> {
        let failed = |e| Error::io("dup of", "a client's socket", e);
        let place = self.pending.add(stream.try_clone().map_err(failed)?);
        let (ports, sender) = (self.ports.clone(), self.met.0.clone());
        let meeting = move || {
            if let Some(link) = meet(&ports, stream) {
                // Nobody listens any more: the server has ended.
                let _ = sender.send(link);
            }
            drop(place);
        };
        let thread = std::thread::Builder::new().name("rdma meets".into()).spawn(meeting);
        thread.map(drop).map_err(|e| Error::io("a thread for", "a client", e))
    }
}

/// Those who are about to be connected, the one that has taken longest first. Where there are more than may be, that one goes.
#[derive(Default)]
struct PendingPeers {
    streams: Mutex<VecDeque<(u64, TcpStream)>>,
    next: AtomicU64,
}

/// One of them, until it is connected or has failed to be.
struct PendingPlace(Arc<PendingPeers>, u64);

impl PendingPeers {
    fn add(self: &Arc<Self>, stream: TcpStream) -> PendingPlace {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut streams = lock(&self.streams);
        streams.push_back((number, stream));
        if streams.len() > MOST_PENDING
            && let Some((_, longest)) = streams.pop_front()
        {
            // Its thread finds nobody at the other end. It may have gone by itself.
            let _ = longest.shutdown(Shutdown::Both);
        }
        PendingPlace(self.clone(), number)
    }
}

impl Drop for PendingPlace {
    fn drop(&mut self) {
        lock(&self.0.streams).retain(|(number, _)| *number != self.1);
    }
}

/// Who says nothing of use is of no matter.
fn meet(ports: &Ports, stream: TcpStream) -> Option<RdmaLink> {
    let peer = stream.peer_addr().ok()?.to_string();
    let ip = stream.local_addr().ok()?.ip();
    // The port that has the address the client came to; else one after the other.
    let own = ports.all().iter().find(|nic| nic.has(ip));
    let mut lane = 0;
    let choose = |other: &Endpoint| {
        lane = usize::from(other.lane);
        own.unwrap_or_else(|| ports.of_lane(lane))
    };
    stream.set_nonblocking(false).ok()?;
    let channel =
        onehop_rdma::accept(choose, ChannelSize::default(), stream, Deadline::after(MEETING)).ok()?;
    Some(RdmaLink::new(channel, ports, lane, peer))
}

impl Acceptor for RdmaAcceptor {
    fn address(&self) -> String {
        self.tcp.address()
    }

    fn accept(&self, limit: Duration) -> Result<Option<Box<dyn Link>>> {
        let until = Instant::now() + limit;
        loop {
            if let Ok(link) = lock(&self.met.1).try_recv() {
                return Ok(Some(Box::new(link)));
            }
            let left = until.saturating_duration_since(Instant::now());
            if let Some(stream) = self.tcp.next(left.min(TICK))? {
                self.meet(stream)?;
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

    /// Whether the other end has closed a connection, or does within a moment.
    fn is_closed(stream: &mut TcpStream, moment: Duration) -> bool {
        stream.set_read_timeout(Some(moment)).unwrap();
        matches!(stream.read(&mut [0]), Ok(0))
    }

    #[test]
    fn silent_connections_make_way_for_newcomers() {
        let acceptor = RdmaAcceptor::listen("127.0.0.1:0", Ports::of(Vec::new())).unwrap();
        let address = acceptor.address();
        let come = |_| {
            let stream = TcpStream::connect(&address).unwrap();
            assert!(acceptor.accept(Duration::from_millis(20)).unwrap().is_none());
            stream
        };
        let mut held: Vec<_> = (0..MOST_PENDING).map(come).collect();
        let mut newcomer = come(0);
        // Before it is too late for all of them.
        assert!(is_closed(&mut held[0], MEETING / 2), "the one that was first has gone");
        assert!(!is_closed(&mut held[1], Duration::from_millis(50)));
        assert!(!is_closed(&mut newcomer, Duration::from_millis(50)), "the newcomer was sent away");
    }
}
