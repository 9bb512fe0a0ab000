//! The socket on which programs register GPU memory: a Unix socket in `/dev/shm`, whose peer credentials come from the
//! kernel.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_target::shares::Shares;
use onehop_usrbio::gpu::Offer;
use onehop_usrbio::wire::{self, Answer, Ask};
use onehop_usrbio::{Error as Usrbio, Id, Name};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with, sockopt,
};
use rustix::process::geteuid;

use crate::daemon::DaemonShared;
use crate::error::{Error, Result};
use crate::persons::Persons;
use crate::table::{GpuMemory, LinkContent, LinkedBuffer, Owner};

/// Clients that are served at once. A user may have as many as remain for others. The rest wait.
const MAX: u64 = 32;
/// Clients that have connected and not yet sent a message.
const MAX_SILENT: usize = 256;

/// Opens the socket, to which everybody may connect. It gets its name after it listens: before, another daemon would
/// take it for a leftover and remove it.
pub(crate) fn open(path: &Path) -> Result<OwnedFd> {
    let early = path.with_extension("new");
    let failed = |call| move |e: Errno| Error::file(call, path, e);
    let address = SocketAddrUnix::new(&early).map_err(failed("address of"))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed("socket"))?;
    bind(&socket, &address).map_err(failed("bind"))?;
    let opened = rustix::fs::chmod(&early, Mode::from_raw_mode(0o666)).map_err(failed("chmod"));
    let opened = opened.and_then(|()| listen(&socket, 128).map_err(failed("listen")));
    let opened = opened.and_then(|()| rustix::fs::rename(&early, path).map_err(failed("rename")));
    if opened.is_err() {
        let _ = std::fs::remove_file(&early);
    }
    opened.map(|()| socket)
}

/// Whether a process accepts connections there. If that is unknown, assume yes.
pub(crate) fn is_served(path: &Path) -> bool {
    let Ok(address) = SocketAddrUnix::new(path) else { return true };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None) else {
        return true;
    };
    !matches!(rustix::net::connect(&socket, &address), Err(Errno::CONNREFUSED))
}

/// A client that has connected and not yet sent a message. It takes a descriptor and no thread.
struct SilentClient {
    client: OwnedFd,
    owner: Owner,
    since: Instant,
}

/// Serves clients until the daemon ends.
pub(crate) fn serve(shared: &Arc<DaemonShared>, socket: &OwnedFd) {
    let (busy, mut silent) = (Arc::new(shared.persons.shares(MAX)), Vec::new());
    while !shared.is_over() {
        for program in ready(shared, socket, &mut silent, &busy) {
            start(shared, &busy, program);
        }
        silent.retain(|program: &SilentClient| program.since.elapsed() < wire::TIMEOUT);
    }
    while busy.taken() > 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits briefly, accepts new clients, and returns the clients that have sent a message and may be served. They count
/// as busy.
fn ready(
    shared: &DaemonShared,
    socket: &OwnedFd,
    silent: &mut Vec<SilentClient>,
    busy: &Shares,
) -> Vec<SilentClient> {
    let (may, crowded): (Vec<_>, Vec<_>) =
        std::mem::take(silent).into_iter().partition(|program| busy.room(program.owner.uid) > 0);
    let mut fds: Vec<_> = may.iter().map(|program| PollFd::new(&program.client, PollFlags::IN)).collect();
    fds.push(PollFd::new(socket, PollFlags::IN));
    // Nothing signals when a busy user may have another client served, so poll more often.
    let some = if crowded.is_empty() { 50_000_000 } else { 2_000_000 };
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: some }));
    let has_message: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
    let (mut talking, mut rest) = (Vec::new(), crowded);
    for (program, has_message) in may.into_iter().zip(&has_message) {
        // Several clients of a user may be ready at once: each takes its place before the next is checked.
        if *has_message && busy.take(program.owner.uid, 1) {
            talking.push(program)
        } else {
            rest.push(program)
        }
    }
    rest.sort_by_key(|program| program.since);
    if has_message.last() == Some(&true) {
        accept(&shared.persons, socket, &mut rest);
    }
    *silent = rest;
    talking
}

/// Accepts new clients. If there are too many, drops the oldest of the user who has most.
fn accept(persons: &Persons, socket: &OwnedFd, silent: &mut Vec<SilentClient>) {
    for _ in 0..MAX_SILENT {
        let client = match accept_with(socket, SocketFlags::CLOEXEC) {
            Ok(client) => client,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                // The connection stays in the backlog, and poll would report it again at once.
                std::thread::sleep(Duration::from_millis(20));
                return;
            }
            Err(_) => return,
        };
        let Ok(peer) = sockopt::socket_peercred(&client) else { continue };
        let owner = Owner {
            uid: peer.uid.as_raw(),
            gid: peer.gid.as_raw(),
            pid: u32::try_from(peer.pid.as_raw_nonzero().get()).unwrap_or(0),
        };
        silent.push(SilentClient { client, owner, since: Instant::now() });
        if silent.len() > MAX_SILENT {
            let mut counts = HashMap::<u32, usize>::new();
            let person = |program: &SilentClient| persons.of(program.owner.uid);
            silent.iter().for_each(|program| *counts.entry(person(program)).or_default() += 1);
            let most = counts.into_iter().max_by_key(|(_, count)| *count).map(|(person, _)| person);
            let oldest = silent.iter().position(|program| Some(person(program)) == most);
            oldest.map(|place| silent.remove(place));
        }
    }
}

/// Serves a client that counts as busy.
fn start(shared: &Arc<DaemonShared>, busy: &Arc<Shares>, program: SilentClient) {
    let uid = program.owner.uid;
    let (starter, shared, held) = (&shared.starter, shared.clone(), busy.clone());
    let thread = starter.spawn("usrbio socket", move || {
        answer(&shared, &program);
        held.put_back(uid, 1);
    });
    if thread.is_err() {
        busy.put_back(uid, 1);
    }
}

/// Receives one message and answers it.
fn answer(shared: &Arc<DaemonShared>, SilentClient { client, owner, .. }: &SilentClient) {
    if wire::set_timeouts(client.as_fd()).is_err() {
        return;
    }
    let Ok(Some(packet)) = wire::receive(client) else { return };
    let done = Ask::unpack(packet).map_err(Error::from).and_then(|ask| handle(shared, *owner, ask));
    let answer =
        done.unwrap_or_else(|error| Answer::Refused { errno: error.errno(), why: error.to_string() });
    // The client may have gone; what it registered is removed with its process.
    let _ = wire::send(client, &answer.pack());
}

fn refused(errno: Errno, why: &str) -> Error {
    Usrbio::Refused { errno: errno.raw_os_error(), why: why.into() }.into()
}

fn handle(shared: &Arc<DaemonShared>, owner: Owner, ask: Ask) -> Result<Answer> {
    match ask {
        Ask::Register { id, device, block, offer } => {
            check_handle(owner, geteuid().as_raw(), &offer)?;
            let secret = register(shared, owner, (id, device, block), offer)?;
            Ok(Answer::Registered { secret })
        }
        Ask::Import { id, secret, new } => {
            let buffer = find(shared, id, |memory, _| same(&memory.secret, &secret))?;
            share_memory(shared, owner, &buffer, Some(new))
        }
        Ask::Open { id } => {
            let buffer = find(shared, id, |_, maker| maker.uid == owner.uid || owner.uid == 0)?;
            share_memory(shared, owner, &buffer, None)
        }
    }
}

/// Compares in constant time.
fn same(a: &[u8; 16], b: &[u8; 16]) -> bool {
    a.iter().zip(b).fold(0, |seen, (a, b)| seen | (a ^ b)) == 0
}

/// Checks the kind of handle. A CUDA IPC handle is a number that a program can guess, and CUDA opens it with the
/// daemon's rights: a program could have others' memory written. A descriptor can only come from its owner.
fn check_handle(owner: Owner, own_uid: u32, offer: &Offer) -> Result<()> {
    if offer.ticket.by_fd || owner.uid == 0 || owner.uid == own_uid {
        return Ok(());
    }
    let why = "memory of cudaMalloc is named by a CUDA IPC handle, and the daemon accepts those from its own user \
               only; use memory of hf3fs_iovcreate_gpu, or mount as this user";
    Err(refused(Errno::PERM, why))
}

fn register(
    shared: &Arc<DaemonShared>,
    owner: Owner,
    (id, device, block): (Id, u32, u64),
    offer: Offer,
) -> Result<[u8; 16]> {
    if block > offer.ticket.bytes {
        return Err(refused(Errno::INVAL, "a block is longer than the buffer"));
    }
    let (gpu, region) = shared.gpus.accept(&offer)?;
    let engine = shared.engine(gpu)?;
    let secret = Id::random()?.0;
    let name = Name { gpu: Some(device), ..Name::buffer(id, block) };
    let target = PathBuf::from(format!("gdr://onehop/v1/device/{device}/size/{}", region.len()));
    let memory = GpuMemory { region, engine, device, secret, offer };
    let added = shared.table.add(name, &name.to_string(), &target, owner, LinkContent::Gpu(Box::new(memory)));
    added.map_err(|errno| refused(errno, "a buffer with this id exists, or there are too many"))?;
    Ok(secret)
}

/// Finds a buffer in GPU memory that `may` allows.
fn find(shared: &DaemonShared, id: Id, may: impl Fn(&GpuMemory, Owner) -> bool) -> Result<Arc<LinkedBuffer>> {
    let found = shared.table.get(id);
    let allowed = found.filter(|b| matches!(&b.what, LinkContent::Gpu(memory) if may(memory, b.owner)));
    allowed.ok_or_else(|| {
        refused(Errno::NOENT, "there is no GPU buffer with this id, or access to it is denied")
    })
}

/// Passes a buffer's memory to another program. With `new`, registers it as a buffer of its own.
fn share_memory(
    shared: &Arc<DaemonShared>,
    owner: Owner,
    buffer: &LinkedBuffer,
    new: Option<Id>,
) -> Result<Answer> {
    let LinkContent::Gpu(memory) = &buffer.what else {
        return Err(refused(Errno::INVAL, "the buffer is in host memory"));
    };
    let device = memory.device;
    let secret = match new {
        // Without blocks: the structure of an imported buffer has none.
        Some(new) => register(shared, owner, (new, device, 0), copy(&memory.offer)?)?,
        None => memory.secret,
    };
    Ok(Answer::Memory { secret, device, offer: copy(&memory.offer)? })
}

fn copy(offer: &Offer) -> Result<Offer> {
    let failed = |e| Error::file("dup", Path::new("GPU memory"), e);
    let dup = |fd: &OwnedFd| fd.try_clone().map_err(failed);
    let fd = offer.fd.as_ref().map(dup).transpose()?;
    let dma_buf = match &offer.dma_buf {
        Some(buf) => Some(onehop_os::DmaBuf { fd: dup(&buf.fd)?, offset: buf.offset, bytes: buf.bytes }),
        None => None,
    };
    Ok(Offer { ticket: offer.ticket, fd, dma_buf })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use onehop_gpu::cuda::Ticket;
    use rustix::net::{SendFlags, socketpair};

    use super::*;
    use crate::daemon::MountOptions;

    #[test]
    fn cuda_ipc_handles_are_accepted_from_the_daemon_s_user_only() {
        let shared = DaemonShared::new(MountOptions::new(Path::new("/"), Path::new("/"))).unwrap();
        let own = geteuid().as_raw();
        let ask = |uid, by_fd| {
            let ticket = Ticket {
                by_fd,
                gpu: [3; 16],
                allocation: 8192,
                offset: 0,
                bytes: 4096,
                buffer: 1,
                handle: [7; 64],
            };
            let offer = Offer { ticket, fd: None, dma_buf: None };
            let ask = Ask::Register { id: Id::random().unwrap(), device: 0, block: 0, offer };
            handle(&shared, Owner { uid, gid: 1, pid: 1 }, ask).err().unwrap()
        };
        let error = ask(own + 1, false);
        assert!(error.errno() == Errno::PERM.raw_os_error(), "{error}");
        assert!(error.to_string().contains("hf3fs_iovcreate_gpu"), "{error}");
        // The others fail because there is no such GPU.
        for (uid, by_fd) in [(own, false), (0, false), (own + 1, true)] {
            let error = ask(uid, by_fd);
            assert!(error.errno() != Errno::PERM.raw_os_error(), "{error}");
        }
    }

    #[test]
    fn a_socket_is_served_once_it_has_its_name() {
        let path = |number: usize| {
            std::env::temp_dir().join(format!("onehop-test-{}-{number}.sock", std::process::id()))
        };
        let (now, over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let sockets = std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    let path = path(now.load(Ordering::Acquire));
                    assert!(is_served(&path), "another daemon would remove {path:?}");
                }
            });
            let sockets: Vec<_> = (0..200)
                .map(|number| {
                    now.store(number, Ordering::Release);
                    open(&path(number)).unwrap()
                })
                .collect();
            over.store(true, Ordering::Release);
            watcher.join().unwrap();
            sockets
        });
        (0..sockets.len()).for_each(|number| std::fs::remove_file(path(number)).unwrap());
    }

    #[test]
    fn clients_of_one_user_get_no_more_threads_than_their_share() {
        let shared = DaemonShared::new(MountOptions::new(Path::new("/"), Path::new("/"))).unwrap();
        let socket = open(&shared.socket).unwrap();
        let (busy, mut silent, mut programs) = (shared.persons.shares(MAX), Vec::new(), Vec::new());
        for number in 0..40 {
            let (client, program) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
            rustix::net::send(&program, b"something", SendFlags::empty()).unwrap();
            // Neither root nor the daemon's user, who may have all.
            let uid = geteuid().as_raw() + 1 + u32::from(number == 39);
            silent.push(SilentClient { client, owner: Owner { uid, gid: 1, pid: 1 }, since: Instant::now() });
            programs.push(program);
        }
        let half = MAX as usize / 2;
        let talking = ready(&shared, &socket, &mut silent, &busy);
        assert_eq!((talking.len(), silent.len(), busy.taken()), (half + 1, 39 - half, MAX / 2 + 1));
        assert!(ready(&shared, &socket, &mut silent, &busy).is_empty());
        // An answered client makes room for the next.
        busy.put_back(talking[0].owner.uid, 1);
        assert_eq!(ready(&shared, &socket, &mut silent, &busy).len(), 1);
        shared.end();
    }

    #[test]
    fn silent_clients_do_not_block_others() {
        let shared = DaemonShared::new(MountOptions::new(Path::new("/"), Path::new("/"))).unwrap();
        let socket = open(&shared.socket).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| serve(&shared, &socket));
            let silent = |_| {
                let flags = SocketFlags::CLOEXEC;
                let silent = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
                rustix::net::connect(&silent, &SocketAddrUnix::new(&shared.socket).unwrap()).unwrap();
                silent
            };
            let held: Vec<_> = (0..160).map(silent).collect();
            let begun = Instant::now();
            let answer = wire::ask(&shared.socket, Ask::Open { id: Id::random().unwrap() });
            let took = begun.elapsed();
            drop(held);
            shared.end();
            assert!(
                matches!(answer, Err(Usrbio::Refused { errno, .. }) if errno == Errno::NOENT.raw_os_error())
            );
            assert!(took < Duration::from_secs(2), "{took:?}");
        });
    }
}
