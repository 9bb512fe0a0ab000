//! One connection of a client: reads what it asks for, does what needs no waiting, and hands the rest to those who may wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use rustix::io::Errno;

use super::perform::{self, PendingRequest};
use super::session::{Admit, ClientSession};
use super::{ServerShared, TICK};
use crate::buffers::{DataFlow, PooledBuffer};
use crate::handshake;
use crate::transport::{Incoming, Link, Outgoing, Stretch};
use crate::wire::{FrameKind, Head, Reply, Request, pack, unpack};
use crate::{Error, Result};

/// What is read at once, by the thread that reads requests: more would keep it from the next.
const MOST_AT_ONCE: usize = 128 << 10;
/// Files that a client may release with one message.
const MOST_RELEASED: usize = 4096;

/// How long the thread that reads requests waits for a buffer: a little, so that a client that is only quicker than a disk has to
/// wait, and no more, because other users' requests come behind.
const SHORT_WAIT: Duration = Duration::from_millis(20);

/// Data of an answer, and its checksum.
pub(crate) struct Summed {
    pub data: Stretch,
    pub crc: u32,
}

/// A connection that was let in.
pub(crate) struct Connection {
    pub link: Arc<dyn Link>,
    pub session: Arc<ClientSession>,
    under_way: AtomicU32,
    limit: Duration,
    ended: AtomicBool,
}

impl Connection {
    pub fn new(link: Arc<dyn Link>, session: Arc<ClientSession>, limit: Duration) -> Arc<Self> {
        let (under_way, ended) = (AtomicU32::new(0), AtomicBool::new(false));
        let this = Arc::new(Self { link, session, under_way, limit, ended });
        this.session.joined(&this);
        this
    }

    /// Whether nobody listens at its other end any more.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Says that nobody does.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.link.close();
    }

    /// Tells what came of a request. Who does not listen is cut off; what was done stays done, and the answer is kept.
    pub fn answer(&self, id: u64, reply: &Reply, data: Option<&Summed>) {
        self.under_way.fetch_sub(1, Ordering::AcqRel);
        if self.tell(id, reply, data).is_err() {
            self.link.close();
        }
    }

    fn tell(&self, id: u64, reply: &Reply, summed: Option<&Summed>) -> Result<()> {
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
        self.session.parted();
    }
}

/// Serves a client until it goes, breaks the rules, or the server ends.
pub(crate) fn serve(shared: &Arc<ServerShared>, link: Arc<dyn Link>) -> Result<()> {
    let limits = &shared.options.limits;
    let key = shared.options.key.as_ref();
    let admitted = handshake::admit(&*link, key, limits.handshake, |join| shared.session(join));
    shared.met(&link);
    let session = admitted?;
    let connection = Connection::new(link, session, limits.stall);
    let ended = listen(shared, &connection);
    if let Err(error @ (Error::Protocol { .. } | Error::Checksum { .. })) = &ended {
        // What is wrong with it is of use to whoever wrote the other side.
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
    let scratch = HostMem::anonymous(MOST_AT_ONCE)?;
    let mut heard = Instant::now();
    let mut farewell: Option<Instant> = None;
    loop {
        if shared.is_over() && farewell.is_none() {
            handshake::send(&*connection.link, FrameKind::Goodbye, b"the target ends", limits.stall)?;
            farewell = Some(Instant::now());
        }
        let is_idle = connection.under_way.load(Ordering::Acquire) == 0;
        if farewell.is_some_and(|since| is_idle && since.elapsed() > limits.farewell) {
            return Ok(());
        }
        let mut data = None;
        let mut place = |head: &Head, body: &[u8]| place(shared, connection, head, body, &mut data);
        match connection.link.receive(TICK, limits.stall, &mut place)? {
            Some(frame) => {
                heard = Instant::now();
                take(shared, connection, frame, data, &scratch)?;
            }
            None if heard.elapsed() > limits.silence => {
                let (peer, limit) = (connection.link.peer().to_owned(), limits.silence);
                return Err(Error::TimedOut { peer, what: "say anything", limit });
            }
            None => {}
        }
        if connection.session.wants_release() {
            shared.later(PendingRequest::release(connection));
        }
    }
}

/// Where data goes that comes with a request: into a buffer. Where its user may have none it is thrown away: the client sends it
/// again later.
fn place(
    shared: &ServerShared,
    connection: &Connection,
    head: &Head,
    body: &[u8],
    data: &mut Option<PooledBuffer>,
) -> Result<Option<Stretch>> {
    let peer = connection.link.peer();
    if head.kind != FrameKind::Request {
        return Err(Error::protocol(peer, "data where none belongs"));
    }
    let request = unpack::<Request>(body, peer)?;
    if request.data() != Some(head.data) {
        return Err(Error::protocol(peer, "data where none belongs"));
    }
    let user = (connection.session.user(&request), DataFlow::Write);
    let Some(lent) = shared.buffers.take(user, SHORT_WAIT)? else {
        return Ok(None);
    };
    let stretch = lent.stretch(head.data as usize)?;
    *data = Some(lent);
    Ok(Some(stretch))
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
        other => return Err(Error::protocol(peer, format!("{other:?} after the beginning"))),
    }
    let (id, request) = (frame.head.id, unpack::<Request>(&frame.body, peer)?);
    if let Request::Release { files, nodes, .. } = &request
        && files.len() + nodes.len() > MOST_RELEASED
    {
        return Err(Error::protocol(peer, "more files released at once than allowed"));
    }
    if request.data().is_some_and(|len| len != frame.head.data || len == 0) {
        return Err(Error::protocol(peer, "a write of another length than its data"));
    }
    if connection.under_way.fetch_add(1, Ordering::AcqRel) >= shared.options.limits.credits {
        return Err(Error::protocol(peer, "more requests at once than it has credits for"));
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
            connection.answer(id, &perform::given_up(), None);
            return Ok(());
        }
        Admit::Breach(what) => return Err(Error::protocol(peer, what)),
    }
    let lacks_data = request.data().is_some() && data.is_none();
    if !lacks_data && perform::at_once(shared, connection, id, &request, scratch) {
        return Ok(());
    }
    let body = shared.room_for(connection, &request, frame.body.len());
    if lacks_data || body.is_none() {
        perform::refuse(connection, id, &request);
        return Ok(());
    }
    shared.later(PendingRequest { connection: connection.clone(), id: Some(id), request, data, body });
    Ok(())
}
