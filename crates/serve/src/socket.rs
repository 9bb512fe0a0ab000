//! Where programs bring GPU memory: a Unix socket in `/dev/shm`, whose other end the kernel vouches for.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use onehop_usrbio::gpu::Offer;
use onehop_usrbio::wire::{self, Answer, Ask};
use onehop_usrbio::{Error as Usrbio, Id, Name};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with, sockopt,
};

use crate::daemon::Shared;
use crate::error::{Error, Result};
use crate::table::{Buffer, GpuMemory, Owner, What};

/// Programs that are talked to at once. Others wait in line, or try again.
const MOST: usize = 32;

/// Opens the socket; everybody may connect.
pub(crate) fn open(path: &Path) -> Result<OwnedFd> {
    let failed = |call| move |e: Errno| Error::file(call, path, e);
    let address = SocketAddrUnix::new(path).map_err(failed("address of"))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed("socket"))?;
    bind(&socket, &address).map_err(failed("bind"))?;
    rustix::fs::chmod(path, Mode::from_raw_mode(0o666)).map_err(failed("chmod"))?;
    listen(&socket, 128).map_err(failed("listen"))?;
    Ok(socket)
}

/// Whether anybody accepts connections there. Where that cannot be told, somebody may.
pub(crate) fn is_served(path: &Path) -> bool {
    let Ok(address) = SocketAddrUnix::new(path) else { return true };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None) else {
        return true;
    };
    !matches!(rustix::net::connect(&socket, &address), Err(Errno::CONNREFUSED))
}

/// Answers until the daemon ends.
pub(crate) fn serve(shared: &Arc<Shared>, socket: &OwnedFd) {
    let busy = Arc::new(AtomicUsize::new(0));
    while !shared.is_over() {
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        let some = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        let there = poll(&mut fds, Some(&some)).unwrap_or(0) > 0;
        if !there || busy.load(Ordering::Acquire) >= MOST {
            if there {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            continue;
        }
        let Ok(client) = accept_with(socket, SocketFlags::CLOEXEC) else { continue };
        busy.fetch_add(1, Ordering::AcqRel);
        let (shared, held) = (shared.clone(), busy.clone());
        let thread = std::thread::Builder::new().name("usrbio socket".into()).spawn(move || {
            answer(&shared, &client);
            held.fetch_sub(1, Ordering::AcqRel);
        });
        if thread.is_err() {
            busy.fetch_sub(1, Ordering::AcqRel);
        }
    }
    while busy.load(Ordering::Acquire) > 0 {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// One message each way.
fn answer(shared: &Arc<Shared>, client: &OwnedFd) {
    let Ok(peer) = sockopt::socket_peercred(client) else { return };
    let owner = Owner {
        uid: peer.uid.as_raw(),
        gid: peer.gid.as_raw(),
        pid: u32::try_from(peer.pid.as_raw_nonzero().get()).unwrap_or(0),
    };
    if wire::be_patient(client.as_fd()).is_err() {
        return;
    }
    let Ok(Some(packet)) = wire::receive(client) else { return };
    let done = Ask::unpack(packet).map_err(Error::from).and_then(|ask| carry_out(shared, owner, ask));
    let answer =
        done.unwrap_or_else(|error| Answer::Refused { errno: error.errno(), why: error.to_string() });
    // Who has gone learns nothing; what was registered goes with them.
    let _ = wire::send(client, &answer.pack());
}

fn refused(errno: Errno, why: &str) -> Error {
    Usrbio::Refused { errno: errno.raw_os_error(), why: why.into() }.into()
}

fn carry_out(shared: &Arc<Shared>, owner: Owner, ask: Ask) -> Result<Answer> {
    match ask {
        Ask::Register { id, device, block, offer } => {
            let secret = register(shared, owner, (id, device, block), offer)?;
            Ok(Answer::Registered { secret })
        }
        Ask::Import { id, secret, new } => {
            let buffer = find(shared, id, |memory, _| same(&memory.secret, &secret))?;
            lend(shared, owner, &buffer, Some(new))
        }
        Ask::Open { id } => {
            let buffer = find(shared, id, |_, maker| maker.uid == owner.uid || owner.uid == 0)?;
            lend(shared, owner, &buffer, None)
        }
    }
}

/// Compares without telling by its time where they differ.
fn same(a: &[u8; 16], b: &[u8; 16]) -> bool {
    a.iter().zip(b).fold(0, |seen, (a, b)| seen | (a ^ b)) == 0
}

fn register(
    shared: &Arc<Shared>,
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
    let added = shared.table.add(name, &name.to_string(), &target, owner, What::Gpu(Box::new(memory)));
    added.map_err(|errno| refused(errno, "there is a buffer of this id, or there are too many"))?;
    Ok(secret)
}

/// A buffer in GPU memory that may be had.
fn find(shared: &Shared, id: Id, may: impl Fn(&GpuMemory, Owner) -> bool) -> Result<Arc<Buffer>> {
    let found = shared.table.get(id);
    let allowed = found.filter(|b| matches!(&b.what, What::Gpu(memory) if may(memory, b.owner)));
    allowed.ok_or_else(|| refused(Errno::NOENT, "there is no GPU buffer of this id, or it may not be had"))
}

/// Gives a buffer's memory to another program; with a new id, as a buffer of its own.
fn lend(shared: &Arc<Shared>, owner: Owner, buffer: &Buffer, new: Option<Id>) -> Result<Answer> {
    let What::Gpu(memory) = &buffer.what else {
        return Err(refused(Errno::INVAL, "the buffer is in host memory"));
    };
    let device = memory.device;
    let secret = match new {
        Some(new) => register(shared, owner, (new, device, buffer.name.block), copy(&memory.offer)?)?,
        None => memory.secret,
    };
    Ok(Answer::Lent { secret, device, offer: copy(&memory.offer)? })
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
