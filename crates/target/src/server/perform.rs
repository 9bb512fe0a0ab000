//! Executes requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use onehop_os::HostMem;
use rustix::io::Errno;

use super::connection::{Connection, Summed};
use super::session::{Begin, SessionFile};
use super::{Class, ServerShared};
use crate::buffers::{DataFlow, PooledBuffer, SessionUser};
use crate::shares::TakenShare;
use crate::transport::{MemoryRange, checksum_for, checksum_on};
use crate::tree::{Local, OpenFile, TransferMemory, Tree, TreeResult, errno};
use crate::turns::Divisible;
use crate::wire::{AttrChange, Caller, FULL, MAX_DATA, NO_USER, OpenMode, Remote, Reply, Request};

/// Bytes that are read at a time: enough for a disk, and few enough for the CPU's cache.
const PART: usize = 512 << 10;

/// The error when the client's memory could not be reached. The client then transfers the data inline.
const UNREACHED: Errno = Errno::COMM;

/// A queued request.
pub(crate) struct PendingRequest {
    pub connection: Arc<Connection>,
    /// `None` for an internal release, which nobody waits for.
    pub id: Option<u64>,
    pub request: Request,
    pub data: Option<PooledBuffer>,
    /// Counts its bytes for its user.
    pub body: Option<TakenShare<SessionUser>>,
}

impl Divisible for PendingRequest {
    type Part = Self;

    fn divide(self) -> (Option<Self>, Option<Self>) {
        (Some(self), None)
    }
}

impl PendingRequest {
    /// Releases files of answers that a client has not received ([`super::session::ClientSession::wants_release`]), for
    /// all users.
    pub fn release(connection: &Arc<Connection>) -> Self {
        let request = Request::Release { uid: NO_USER, files: Vec::new(), nodes: Vec::new() };
        Self { connection: connection.clone(), id: None, request, data: None, body: None }
    }

    /// What it waits for.
    pub fn class(&self) -> Class {
        let waits = match &self.request {
            Request::Lookup { .. }
            | Request::Attr { .. }
            | Request::ReadLink { .. }
            | Request::Space { .. } => return Class::Lookup,
            Request::Sync { .. }
            | Request::SyncFolder { .. }
            | Request::Allocate { .. }
            | Request::Succeed { .. } => true,
            Request::Change { change, .. } => change.size.is_some(),
            Request::Write { file, .. } | Request::Append { file, .. } => {
                self.connection.session.opened(*file).is_ok_and(|open| open.syncs)
            }
            _ => false,
        };
        if waits { Class::Disk } else { Class::Other }
    }

    /// Executes and answers the request.
    pub fn run(self, shared: &ServerShared) {
        let Self { connection, id, request, data, body: _counts } = self;
        let session = &connection.session;
        let Some(id) = id else { return session.release_unheard() };
        match session.begin(id, &request, &connection) {
            Begin::Do => {}
            // Cancelled: later requests may have been executed already.
            Begin::Cancelled => return send_answer(&connection, id, &request, &cancelled(), None),
            // A client that was killed must not overwrite what its successor writes.
            Begin::Abandoned => return,
        }
        let done = perform(shared, &connection, &request, data);
        let (reply, data) = done.unwrap_or_else(|error| (failed(error), None));
        send_answer(&connection, id, &request, &reply, data.as_ref().map(|(_buffer, summed)| summed));
    }
}

pub(crate) fn failed(error: Errno) -> Reply {
    Reply::Failed { errno: error.raw_os_error() }
}

/// The answer to a cancelled request, which returns its credit.
pub(crate) fn cancelled() -> Reply {
    failed(Errno::CANCELED)
}

/// Answers over the connection that made the request last, which may be newer than the one it came by.
fn send_answer(by: &Arc<Connection>, id: u64, request: &Request, reply: &Reply, data: Option<&Summed>) {
    if request.is_read_only()
        && matches!(reply, Reply::Failed { errno } if *errno == UNREACHED.raw_os_error())
    {
        // The failed transfer has broken the connection that the answer goes to. A client that repeats the request over
        // the next connection gets this answer at once.
        by.session.keep(id, reply);
    }
    let over = if request.is_read_only() { None } else { by.session.finish(id, request, reply) };
    let cancelled = cancelled();
    let reply = if matches!(over, Some((_, false))) { &cancelled } else { reply };
    let Some((mut requesters, _)) = over else { return by.answer(id, reply, data) };
    requesters.retain(|one| !one.has_ended());
    let Some(last) = requesters.pop() else { return };
    last.answer(id, reply, data);
    // The other ends of the earlier connections are gone. If one is alive, because an earlier one delivered the request
    // late, it repeats the request.
    requesters.iter().for_each(|one| one.link.close());
}

/// Executes requests that do not block. Returns false if the request may block.
pub(crate) fn try_at_once(
    shared: &ServerShared,
    connection: &Arc<Connection>,
    id: u64,
    request: &Request,
    scratch: &HostMem,
) -> bool {
    let session = &connection.session;
    match request {
        Request::Outstanding { below, ids, unheard } => {
            let noted = session.outstanding(*below, ids, unheard);
            let reply = noted.map_or_else(failed, |()| Reply::Done);
            send_answer(connection, id, request, &reply, None);
            true
        }
        Request::Read { file, at, len, into: None } if *len as usize <= scratch.len() => {
            let wanted = *len as usize;
            let to = TransferMemory { mem: scratch, at: 0, len: wanted, shared: false };
            let Ok(file) = session.file(*file) else { return false };
            if !is_place(*at, *len) || !matches!(file.read_now(to, *at), Ok(Some(count)) if count == wanted) {
                return false;
            }
            let data = MemoryRange { mem: scratch.clone(), at: 0, len: wanted };
            let Ok(crc) = checksum_for(&*connection.link, &data) else { return false };
            shared.stats.read.fetch_add(wanted as u64, Ordering::Relaxed);
            connection.answer(id, &Reply::Count { bytes: *len, crc: 0 }, Some(&Summed { data, crc }));
            true
        }
        _ => false,
    }
}

/// Answers that there is no room for a request or its data. Not queued: earlier requests of its user may take long.
pub(crate) fn refuse(connection: &Arc<Connection>, id: u64, request: &Request) {
    send_answer(connection, id, request, &failed(FULL), None);
}

/// An answer, and its data with the buffer that holds it.
type Performed = (Reply, Option<(PooledBuffer, Summed)>);

fn perform(
    shared: &ServerShared,
    connection: &Connection,
    request: &Request,
    data: Option<PooledBuffer>,
) -> TreeResult<Performed> {
    if shared.options.read_only && request.changes() {
        return Err(Errno::ROFS);
    }
    let session = &connection.session;
    match request {
        Request::Read { file, at, len, into } => {
            return read(shared, connection, (*file, *at, *len), into.as_ref());
        }
        Request::Write { file, at, len, from } => {
            return write(shared, connection, (*file, *at, *len), from.as_ref(), data);
        }
        Request::Append { file, len } => return append(shared, connection, *file, *len, data),
        _ => {}
    }
    let folder = &session.folder;
    let reply = match request {
        Request::Lookup { parent, name, by } => Reply::Attr(folder.lookup(*parent, name, by)?),
        Request::Release { files, nodes, .. } => {
            session.release(files.iter().copied(), nodes.iter().copied());
            Reply::Done
        }
        Request::Attr { node, uid } => Reply::Attr(folder.attr(*node, *uid)?),
        Request::Change { node, file, change, by } => {
            let mut change = *change;
            if let (Some(file), Some(size)) = (file, change.size.take_if(|_| file.is_some())) {
                session.file(*file)?.set_len(size).map_err(|e| errno(&e))?;
            }
            // After a truncation alone nothing is left; an empty change would be a change of owner.
            let is_done = file.is_some() && change == AttrChange::default();
            Reply::Attr(if is_done {
                folder.attr(*node, by.uid)?
            } else {
                folder.change(*node, &change, by)?
            })
        }
        Request::ReadLink { node, uid } => Reply::Text(folder.read_link(*node, *uid)?),
        Request::Make { parent, name, make, by } => {
            if !make.is_sound() {
                return Err(Errno::INVAL);
            }
            Reply::Attr(folder.make(*parent, name, make, by)?)
        }
        Request::Create { parent, name, mode, access, exclusive, by } => {
            let access = shared.access(*access);
            let (attr, file) = folder.create_local(*parent, name, *mode, access, *exclusive, by)?;
            let file = session.add_file(opened(file, access, by), false);
            let file = file.inspect_err(|_| drop(folder.forget(attr.node, 1)))?;
            Reply::Created { attr, file }
        }
        Request::Remove { parent, name, folder: is_folder, by } => {
            folder.remove(*parent, name, *is_folder, by)?;
            Reply::Done
        }
        Request::Rename { parent, name, to, new_name, flags, by } => {
            folder.rename((*parent, name), (*to, new_name), *flags, by)?;
            Reply::Done
        }
        Request::Link { node, parent, name, by } => Reply::Attr(folder.link(*node, *parent, name, by)?),
        Request::List { node, from, by } => {
            let some = folder.list(*node, *from, by)?;
            Reply::Names { names: some.names, next: some.next }
        }
        Request::SyncFolder { node, uid } => {
            folder.sync_folder(*node, *uid)?;
            Reply::Done
        }
        Request::Xattr { node, ask, by } => Reply::Text(folder.xattr(*node, ask, by)?),
        Request::Space { uid } => Reply::Space(folder.space(*uid)?),
        Request::Open { node, access, again, by } => {
            let access = shared.access(*access);
            let file = match again {
                true => folder.open_again(*node, access, by),
                false => folder.open_local(*node, access, by),
            };
            let file = file?;
            let has_name = file.has_name();
            Reply::Opened { file: session.add_file(opened(file, access, by), *again)?, has_name }
        }
        Request::Succeed { mount } => {
            // A mount that ends itself would wait for this very request.
            if *mount == session.mount {
                return Err(Errno::INVAL);
            }
            if !shared.end_mount(*mount) {
                return Err(Errno::BUSY);
            }
            Reply::Done
        }
        Request::Sync { file, data_only } => {
            session.file(*file)?.sync(*data_only).map_err(|e| errno(&e))?;
            Reply::Done
        }
        Request::DropSetId { file } => {
            session.file(*file)?.drop_set_id().map_err(|e| errno(&e))?;
            Reply::Done
        }
        Request::Allocate { file, mode, at, len } => {
            session.file(*file)?.allocate(*mode, *at, *len).map_err(|e| errno(&e))?;
            Reply::Done
        }
        Request::Seek { file, at, hole } => {
            Reply::Place(session.file(*file)?.seek(*at, *hole).map_err(|e| errno(&e))?)
        }
        Request::Outstanding { .. }
        | Request::Read { .. }
        | Request::Write { .. }
        | Request::Append { .. } => return Err(Errno::INVAL),
    };
    Ok((reply, None))
}

fn opened(file: Local, access: OpenMode, by: &Caller) -> SessionFile {
    SessionFile { file: Arc::new(file), uid: by.uid, syncs: access.sync || access.data_sync }
}

/// Whether a file can have bytes there.
fn is_place(at: u64, len: u32) -> bool {
    at.checked_add(len.into()).is_some_and(|end| i64::try_from(end).is_ok())
}

fn check(at: u64, len: u32, remote: Option<&Remote>) -> TreeResult<()> {
    let fits = remote.is_none_or(|remote| remote.len >= len.into());
    if len == 0 || len as usize > MAX_DATA || !fits {
        return Err(Errno::INVAL);
    }
    if is_place(at, len) { Ok(()) } else { Err(Errno::FBIG) }
}

/// How long an execution thread waits for a buffer. The user's writes that hold the buffers may be waiting for that
/// thread.
const BUFFER_WAIT: Duration = Duration::from_secs(1);

/// A buffer for a user's data in one direction.
fn buffer(
    shared: &ServerShared,
    connection: &Connection,
    uid: u32,
    flow: DataFlow,
) -> TreeResult<PooledBuffer> {
    let user = ((connection.session.number, uid), flow);
    shared.buffers.take(user, BUFFER_WAIT).map_err(|_| Errno::NOMEM)?.ok_or(FULL)
}

fn read(
    shared: &ServerShared,
    connection: &Connection,
    (file, at, len): (u64, u64, u32),
    into: Option<&Remote>,
) -> TreeResult<Performed> {
    check(at, len, into)?;
    let limit = shared.options.limits.stall;
    let SessionFile { file, uid, .. } = connection.session.opened(file)?;
    let buffer = buffer(shared, connection, uid, DataFlow::Read)?;
    let range = buffer.range(len as usize).map_err(|_| Errno::NOMEM)?;
    // Data behind the answer of an encrypted connection is authenticated there.
    let sums = into.is_some() || !connection.link.is_encrypted();
    let (count, crc) = read_and_sum(&*file, &range, at, sums)?;
    shared.stats.read.fetch_add(count as u64, Ordering::Relaxed);
    let (bytes, whole) = (count as u32, MemoryRange { len: count, ..range });
    if count == 0 {
        return Ok((Reply::Count { bytes, crc: 0 }, None));
    }
    let Some(remote) = into else {
        return Ok((Reply::Count { bytes, crc: 0 }, Some((buffer, Summed { data: whole, crc }))));
    };
    connection.link.put(&whole, remote, limit).map_err(|_| UNREACHED)?;
    Ok((Reply::Count { bytes, crc }, None))
}

/// Reads in parts, so that each part is still in the cache when its checksum is computed. Returns the number of bytes,
/// and their checksum if `sums`.
fn read_and_sum(file: &impl OpenFile, to: &MemoryRange, at: u64, sums: bool) -> TreeResult<(usize, u32)> {
    let (mut done, mut crc) = (0, 0);
    while done < to.len {
        let len = PART.min(to.len - done);
        let part = TransferMemory { mem: &to.mem, at: to.at + done, len, shared: false };
        let count = file.read(part, at + done as u64).map_err(|e| errno(&e))?;
        if sums {
            crc = checksum_on(crc, &to.mem, to.at + done, count).map_err(|_| Errno::IO)?;
        }
        done += count;
        if count < len {
            break;
        }
    }
    Ok((done, crc))
}

fn write(
    shared: &ServerShared,
    connection: &Connection,
    (file, at, len): (u64, u64, u32),
    from: Option<&Remote>,
    data: Option<PooledBuffer>,
) -> TreeResult<Performed> {
    check(at, len, from)?;
    let limit = shared.options.limits.stall;
    let SessionFile { file, uid, .. } = connection.session.opened(file)?;
    let (buffer, range) = match (from, data) {
        (None, Some(buffer)) => {
            let range = buffer.range(len as usize).map_err(|_| Errno::NOMEM)?;
            (buffer, range)
        }
        (Some(remote), _) => {
            let buffer = buffer(shared, connection, uid, DataFlow::Write)?;
            let range = buffer.range(len as usize).map_err(|_| Errno::NOMEM)?;
            connection.link.get(&range, remote, limit).map_err(|_| UNREACHED)?;
            (buffer, range)
        }
        (None, None) => return Err(Errno::INVAL),
    };
    let bytes = TransferMemory { mem: &range.mem, at: 0, len: range.len, shared: false };
    let count = file.write(bytes, at).map_err(|e| errno(&e))?;
    drop(buffer);
    shared.stats.written.fetch_add(count as u64, Ordering::Relaxed);
    Ok((Reply::Count { bytes: count as u32, crc: 0 }, None))
}

fn append(
    shared: &ServerShared,
    connection: &Connection,
    file: u64,
    len: u32,
    data: Option<PooledBuffer>,
) -> TreeResult<Performed> {
    check(0, len, None)?;
    let file = connection.session.file(file)?;
    let range = data.as_ref().ok_or(Errno::INVAL)?.range(len as usize).map_err(|_| Errno::NOMEM)?;
    // With one system call, so that no other bytes come in between.
    let bytes = range.mem.to_vec(range.at, range.len).map_err(|_| Errno::IO)?;
    let count = file.append_bytes(&bytes).map_err(|e| errno(&e))?;
    shared.stats.written.fetch_add(count as u64, Ordering::Relaxed);
    Ok((Reply::Count { bytes: count as u32, crc: 0 }, None))
}

#[cfg(test)]
mod tests {
    use super::super::session::ClientSession;
    use super::*;
    use crate::shares::Shares;
    use crate::tcp::{TcpAcceptor, TcpConnector};
    use crate::transport::{Acceptor, Connector};
    use crate::tree::{Folder, FolderRules};
    use crate::wire::ROOT;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn requests_are_queued_by_class_and_user() {
        let open = |path: &str| std::fs::File::open(path).unwrap();
        let folder = Folder::new(open("/").into(), FolderRules { for_others: true, most_open: 64 }).unwrap();
        let shares = Arc::new(Shares::new(8));
        let session = Arc::new(ClientSession::new(([1; 16], [2; 16]), 0, folder, (shares.clone(), 8)));
        let add = |uid, syncs| {
            let file = Arc::new(Local::new(open("/dev/null")));
            session.add_file(SessionFile { file, uid, syncs }, false).unwrap()
        };
        let (plain, synced) = (add(1000, false), add(1001, true));
        let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
        let connector = TcpConnector::new(&acceptor.local().unwrap().to_string()).unwrap();
        let _near = connector.connect(0, LONG).unwrap();
        let link = acceptor.accept(LONG).unwrap().unwrap();
        let connection = Connection::new(link.into(), session.clone(), LONG);
        let of = |request| {
            let pending =
                PendingRequest { connection: connection.clone(), id: None, request, data: None, body: None };
            (pending.class(), session.user(&pending.request).1)
        };
        let write = |file| Request::Write { file, at: 0, len: 1, from: None };
        let change = |size| Request::Change {
            node: ROOT,
            file: None,
            change: AttrChange { size, ..AttrChange::default() },
            by: Caller { uid: 7, ..Caller::ROOT },
        };
        let name = crate::wire::Name::new(b"name").unwrap();
        let lookup = Request::Lookup { parent: ROOT, name, by: Caller { uid: 7, ..Caller::ROOT } };
        let looks = [
            lookup,
            Request::Attr { node: ROOT, uid: 7 },
            Request::ReadLink { node: ROOT, uid: 7 },
            Request::Space { uid: 7 },
        ];
        assert_eq!(looks.map(of), [(Class::Lookup, 7); 4]);
        assert_eq!(of(Request::Sync { file: plain, data_only: true }), (Class::Disk, 1000));
        assert_eq!(of(Request::Allocate { file: synced, mode: 0, at: 0, len: 1 }), (Class::Disk, 1001));
        assert_eq!(of(Request::SyncFolder { node: ROOT, uid: 7 }), (Class::Disk, 7));
        assert_eq!((of(write(plain)), of(write(synced))), ((Class::Other, 1000), (Class::Disk, 1001)));
        assert_eq!((of(change(None)), of(change(Some(1)))), ((Class::Other, 7), (Class::Disk, 7)));
        assert_eq!(of(Request::Read { file: synced, at: 0, len: 1, into: None }), (Class::Other, 1001));
        assert_eq!(of(Request::Sync { file: 99, data_only: true }), (Class::Disk, 0));
        // Descriptors are returned with the session.
        assert_eq!(shares.taken(), 2);
        session.close_file(plain).unwrap();
        assert_eq!(shares.taken(), 1);
        drop((connection, session));
        assert_eq!(shares.taken(), 0);
    }
}
