//! One connection of a client: reads its requests, executes those that do not block, and queues the rest.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use rustix::io::Errno;

use super::perform::{self, PendingRequest};
use super::session::{Admit, ClientSession};
use super::{POLL_INTERVAL, ServerShared};
use crate::buffers::{DataFlow, PooledBuffer};
use crate::handshake;
use crate::transport::{Incoming, Link, MemoryRange, Outgoing};
use crate::wire::{FrameKind, Head, Reply, Request, pack, unpack};
use crate::{Error, Result};

/// The longest read that the connection's thread executes itself. Longer ones would delay the next request.
const MAX_INLINE_READ: usize = 128 << 10;
/// Files that a client may release with one message.
const MAX_RELEASED: usize = 4096;

/// How long the connection's thread waits for a buffer: briefly, to slow down a client that is faster than the disk.
/// Requests of other users are queued behind.
const READER_BUFFER_WAIT: Duration = Duration::from_millis(20);

/// Data of an answer, and its checksum.
pub(crate) struct Summed {
    pub data: MemoryRange,
    pub crc: u32,
}

/// A connection after its handshake.
pub(crate) struct Connection {
    pub link: Arc<dyn Link>,
    pub session: Arc<ClientSession>,
    in_flight: AtomicU32,
    limit: Duration,
    ended: AtomicBool,
}

impl Connection {
    pub fn new(link: Arc<dyn Link>, session: Arc<ClientSession>, limit: Duration) -> Arc<Self> {
        let (in_flight, ended) = (AtomicU32::new(0), AtomicBool::new(false));
        let this = Arc::new(Self { link, session, in_flight, limit, ended });
        this.session.connection_opened(&this);
        this
    }

    /// Whether the connection has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Ends the connection.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.link.close();
    }

    /// Sends an answer. If the client does not accept it, the connection is closed; the answer is kept.
    pub fn answer(&self, id: u64, reply: &Reply, data: Option<&Summed>) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
        if self.send_reply(id, reply, data).is_err() {
            self.link.close();
        }
    }

    fn send_reply(&self, id: u64, reply: &Reply, summed: Option<&Summed>) -> Result<()> {
        let body = pack(reply)?;
        let mut head = Head::new(FrameKind::Reply, id, &body);
        if let Some(Summed { data, crc }) = summed {
            (head.data, head.data_crc) = (data.len as u32, *crc);
        }
        self.link.send(&Outgoing { head, body: &body, data: summed.map(|summed| &summed.data) }, self.limit)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.session.connection_closed();
    }
}

/// Serves a client until it disconnects or violates the protocol, or the server ends.
pub(crate) fn serve(shared: &Arc<ServerShared>, link: Arc<dyn Link>) -> Result<()> {
    let limits = &shared.options.limits;
    let key = shared.options.key.as_ref();
    let admitted = handshake::admit(&*link, key, limits.handshake, |join| shared.session(join));
    shared.end_handshake(&link);
    let session = admitted?;
    let connection = Connection::new(link, session, limits.stall);
    let ended = listen(shared, &connection);
    if let Err(error @ (Error::Protocol { .. } | Error::Checksum { .. })) = &ended {
        // Tell the client what is wrong, for its developer.
        let _ = handshake::send(
            &*connection.link,
            FrameKind::Goodbye,
            error.to_string().as_bytes(),
            limits.stall,
        );
    }
    connection.end();
    match ended {
        Err(Error::Closed { .. }) => Ok(()),
        other => other,
    }
}

fn listen(shared: &Arc<ServerShared>, connection: &Arc<Connection>) -> Result<()> {
    let limits = &shared.options.limits;
    let scratch = HostMem::anonymous(MAX_INLINE_READ)?;
    let mut last_received = Instant::now();
    let mut goodbye_sent: Option<Instant> = None;
    loop {
        if shared.is_over() && goodbye_sent.is_none() {
            handshake::send(&*connection.link, FrameKind::Goodbye, b"the target ends", limits.stall)?;
            goodbye_sent = Some(Instant::now());
        }
        let is_idle = connection.in_flight.load(Ordering::Acquire) == 0;
        if goodbye_sent.is_some_and(|since| is_idle && since.elapsed() > limits.goodbye_wait) {
            return Ok(());
        }
        let mut data = None;
        let mut place = |head: &Head, body: &[u8]| place(shared, connection, head, body, &mut data);
        match connection.link.receive(POLL_INTERVAL, limits.stall, &mut place)? {
            Some(frame) => {
                last_received = Instant::now();
                take(shared, connection, frame, data, &scratch)?;
            }
            None if last_received.elapsed() > limits.silence => {
                let (peer, limit) = (connection.link.peer().to_owned(), limits.silence);
                return Err(Error::TimedOut { peer, what: "send anything", limit });
            }
            None => {}
        }
        if connection.session.wants_release() {
            shared.enqueue(PendingRequest::release(connection));
        }
    }
}

/// A buffer for the data of a request. If its user may have none, the data is discarded, and the client sends it again
/// later.
fn place(
    shared: &ServerShared,
    connection: &Connection,
    head: &Head,
    body: &[u8],
    data: &mut Option<PooledBuffer>,
) -> Result<Option<MemoryRange>> {
    let peer = connection.link.peer();
    if head.kind != FrameKind::Request {
        return Err(Error::protocol(peer, "unexpected data"));
    }
    let request = unpack::<Request>(body, peer)?;
    if request.data() != Some(head.data) {
        return Err(Error::protocol(peer, "unexpected data"));
    }
    let user = (connection.session.user(&request), DataFlow::Write);
    let Some(buffer) = shared.buffers.take(user, READER_BUFFER_WAIT)? else {
        return Ok(None);
    };
    let range = buffer.range(head.data as usize)?;
    *data = Some(buffer);
    Ok(Some(range))
}

fn take(
    shared: &Arc<ServerShared>,
    connection: &Arc<Connection>,
    frame: Incoming,
    data: Option<PooledBuffer>,
    scratch: &HostMem,
) -> Result<()> {
    let peer = connection.link.peer();
    match frame.head.kind {
        FrameKind::Ping => {
            return handshake::send(&*connection.link, FrameKind::Pong, b"", shared.options.limits.stall);
        }
        FrameKind::Goodbye => return Err(Error::Closed { peer: peer.to_owned() }),
        FrameKind::Request => {}
        other => return Err(Error::protocol(peer, format!("{other:?} after the handshake"))),
    }
    let (id, request) = (frame.head.id, unpack::<Request>(&frame.body, peer)?);
    if let Request::Release { files, nodes, .. } = &request
        && files.len() + nodes.len() > MAX_RELEASED
    {
        return Err(Error::protocol(peer, "too many files released at once"));
    }
    if request.data().is_some_and(|len| len != frame.head.data || len == 0) {
        return Err(Error::protocol(peer, "a write whose length differs from its data"));
    }
    if connection.in_flight.fetch_add(1, Ordering::AcqRel) >= shared.options.limits.credits {
        return Err(Error::protocol(peer, "more requests than credits"));
    }
    shared.stats.requests.fetch_add(1, Ordering::Relaxed);
    match connection.session.admit(id, frame.head.done, &request, connection) {
        Admit::Do => {}
        Admit::Answer(reply) => {
            shared.stats.repeated.fetch_add(1, Ordering::Relaxed);
            connection.answer(id, &reply, None);
            return Ok(());
        }
        Admit::Wait => return Ok(()),
        Admit::Busy => {
            connection.answer(id, &perform::failed(Errno::BUSY), None);
            return Ok(());
        }
        Admit::Drop => {
            connection.answer(id, &perform::cancelled(), None);
            return Ok(());
        }
        Admit::Violation(what) => return Err(Error::protocol(peer, what)),
    }
    let lacks_data = request.data().is_some() && data.is_none();
    if !lacks_data && perform::try_at_once(shared, connection, id, &request, scratch) {
        return Ok(());
    }
    let body = shared.room_for(connection, &request, frame.body.len());
    if lacks_data || body.is_none() {
        perform::refuse(connection, id, &request);
        return Ok(());
    }
    shared.enqueue(PendingRequest { connection: connection.clone(), id: Some(id), request, data, body });
    Ok(())
}
