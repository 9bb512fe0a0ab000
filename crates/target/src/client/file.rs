//! An open file of a target. When the target has forgotten it, it is opened again, if it is still found and still the same.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use onehop_os::HostMem;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::known::Node;
use super::tree::{TreeState, attr_of, opened};
use super::{SessionView, Trouble};
use crate::buffers::{DataFlow, PooledBuffer};
use crate::lock;
use crate::transport::{Shareable, Stretch, checksum};
use crate::tree::{OpenFile, TransferMemory, Via};
use crate::wire::{Attr, Caller, MOST_DATA, OpenMode, Reply, Request};

/// An open file.
pub(super) struct RemoteFile {
    core: Arc<TreeState>,
    node: Arc<Node>,
    /// How it is opened again, and as whom it is written.
    access: OpenMode,
    by: Caller,
    /// Its number in an epoch.
    at: Mutex<(u64, u64)>,
}

fn plain(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::other(error)
}

fn kernel(error: onehop_os::Error) -> io::Error {
    error.errno().map_or_else(|| plain(error), io::Error::from_raw_os_error)
}

/// What a target answers that could not reach our memory, and has done nothing.
const UNREACHED: Errno = Errno::COMM;

fn shareable(mem: &HostMem) -> Shareable {
    Arc::new(mem.clone())
}

/// The pieces of a transfer: where each begins, and how long it is.
fn pieces(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(MOST_DATA).map(move |start| (start, MOST_DATA.min(len - start)))
}

impl RemoteFile {
    pub fn new(
        core: &Arc<TreeState>,
        node: &Arc<Node>,
        (access, by): (OpenMode, Caller),
        at: (u64, u64),
    ) -> Self {
        let access = OpenMode { truncate: false, ..access };
        Self { core: core.clone(), node: node.clone(), access, by, at: Mutex::new(at) }
    }

    fn id(&self, view: SessionView, until: Instant) -> Result<u64, Trouble> {
        // Held while it is opened again, so that this is done once.
        let mut at = lock(&self.at);
        if at.0 != view.epoch {
            let node = self.core.id_of(&self.node, view, until)?;
            let request = Request::Open { node, access: self.access, again: true, by: self.by.clone() };
            let file = opened(self.core.call(view, &request, until))?;
            *at = (view.epoch, file);
        }
        Ok(at.1)
    }

    fn ask<T>(
        &self,
        request: impl Fn(u64) -> Request,
        read: impl Fn(Reply) -> Option<T>,
    ) -> Result<T, Errno> {
        self.core.client.ask(true, |view, until| {
            let (reply, _) = self.core.call(view, &request(self.id(view, until)?), until)?;
            read(reply).ok_or(Trouble::Errno(Errno::PROTO))
        })
    }

    /// What the target calls the file, and knows of it.
    fn attr(&self, view: SessionView, until: Instant) -> Result<(u64, Attr), Trouble> {
        let node = self.core.id_of(&self.node, view, until)?;
        let request = Request::Attr { node, uid: self.by.uid };
        Ok((node, attr_of(self.core.call(view, &request, until))?))
    }

    /// Has the target put bytes straight into memory; gives how many, and their checksum. None where it does not reach it.
    fn read_exposed(
        &self,
        memory: &Shareable,
        range: Range<usize>,
        at: u64,
    ) -> io::Result<Option<(usize, u32)>> {
        let len = range.len() as u32;
        let Some(exposed) = self.core.client.expose(memory, range) else { return Ok(None) };
        let done = self.core.client.ask(true, |view, until| {
            let into = Some(exposed.remote);
            let request = Request::Read { file: self.id(view, until)?, at, len, into };
            match self.core.client.call(view.epoch, &request, None, None, until) {
                Ok((Reply::Count { bytes, crc }, 0)) if bytes <= len => Ok(Some((bytes as usize, crc))),
                Ok(_) => Err(Errno::PROTO.into()),
                Err(Trouble::Errno(UNREACHED)) => Ok(None),
                Err(trouble) => Err(trouble),
            }
        })?;
        Ok(done)
    }

    /// Has the target get the bytes to be written straight from memory. None where it does not reach it: then nothing was
    /// written.
    fn write_exposed(&self, memory: &Shareable, range: Range<usize>, at: u64) -> io::Result<Option<usize>> {
        let len = range.len() as u32;
        let Some(exposed) = self.core.client.expose(memory, range) else { return Ok(None) };
        let done = self.core.client.ask(true, |view, until| {
            let from = Some(exposed.remote);
            let request = Request::Write { file: self.id(view, until)?, at, len, from };
            match self.core.client.call(view.epoch, &request, None, None, until) {
                Ok((Reply::Count { bytes, .. }, _)) if bytes <= len => {
                    self.node.changed(view);
                    Ok(Some(bytes as usize))
                }
                Ok(_) => Err(Errno::PROTO.into()),
                Err(Trouble::Errno(UNREACHED)) => Ok(None),
                Err(trouble) => Err(trouble),
            }
        })?;
        Ok(done)
    }

    /// Carries pieces straight; none as soon as one cannot be, and then all of them have to go another way.
    fn all_exposed(
        &self,
        range: Range<usize>,
        carry: impl Fn(Range<usize>, usize) -> io::Result<Option<usize>>,
    ) -> io::Result<Option<usize>> {
        let mut done = 0;
        for (start, len) in pieces(range.len()) {
            let first = range.start + start;
            let Some(count) = carry(first..first + len, start)? else { return Ok(None) };
            done += count;
            if count < len {
                break;
            }
        }
        Ok(Some(done))
    }

    /// Reads into memory of our own.
    fn read_piece(&self, to: &Stretch, at: u64) -> io::Result<usize> {
        let len = to.len as u32;
        let exposed = self.read_exposed(&shareable(&to.mem), to.at..to.at + to.len, at)?;
        if let Some((count, crc)) = exposed
            && (count == 0 || checksum(&Stretch { len: count, ..to.clone() }).map_err(plain)? == crc)
        {
            return Ok(count);
        }
        // Bytes that changed on their way are asked for once more.
        let count = self.core.client.ask(true, |view, until| {
            let request = Request::Read { file: self.id(view, until)?, at, len, into: None };
            match self.core.client.call(view.epoch, &request, None, Some(to), until)? {
                (Reply::Count { bytes, .. }, came) if bytes as usize == came => Ok(came),
                _ => Err(Errno::PROTO.into()),
            }
        })?;
        Ok(count)
    }

    /// Writes memory of our own.
    fn write_piece(&self, from: &Stretch, at: u64) -> io::Result<usize> {
        let len = from.len as u32;
        if let Some(count) = self.write_exposed(&shareable(&from.mem), from.at..from.at + from.len, at)? {
            return Ok(count);
        }
        let count = self.core.client.ask(true, |view, until| {
            let request = Request::Write { file: self.id(view, until)?, at, len, from: None };
            self.written(view, &request, from, until)
        })?;
        Ok(count)
    }

    /// Asks for a write whose bytes follow the request, and takes down that the file is another now.
    fn written(
        &self,
        view: SessionView,
        request: &Request,
        from: &Stretch,
        until: Instant,
    ) -> Result<usize, Trouble> {
        match self.core.client.call(view.epoch, request, Some(from), None, until)?.0 {
            Reply::Count { bytes, .. } if bytes as usize <= from.len => {
                self.node.changed(view);
                Ok(bytes as usize)
            }
            _ => Err(Errno::PROTO.into()),
        }
    }

    fn buffer(&self, way: DataFlow) -> io::Result<PooledBuffer> {
        let client = &self.core.client;
        client.buffer(self.by.uid, way).map_err(plain)?.ok_or_else(|| Errno::TIMEDOUT.into())
    }

    /// Carries pieces by way of a buffer of ours; ends with the first that is short.
    fn by_buffer(
        &self,
        way: DataFlow,
        len: usize,
        carry: impl Fn(&PooledBuffer, usize, usize) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let lent = self.buffer(way)?;
        let mut done = 0;
        for (start, piece) in pieces(len) {
            let count = carry(&lent, start, piece)?;
            done += count;
            if count < piece {
                break;
            }
        }
        Ok(done)
    }

    fn straight(
        &self,
        memory: TransferMemory<'_>,
        carry: impl Fn(&Stretch, usize) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut done = 0;
        for (start, len) in pieces(memory.len) {
            let count =
                carry(&Stretch { mem: HostMem::clone(memory.mem), at: memory.at + start, len }, start)?;
            done += count;
            if count < len {
                break;
            }
        }
        Ok(done)
    }
}

impl OpenFile for RemoteFile {
    fn read_now(&self, _to: TransferMemory<'_>, _at: u64) -> io::Result<Option<usize>> {
        // The target has to be waited for.
        Ok(None)
    }

    fn read(&self, to: TransferMemory<'_>, at: u64) -> io::Result<usize> {
        if !to.shared {
            return self.straight(to, |piece, start| self.read_piece(piece, at + start as u64));
        }
        let memory = shareable(to.mem);
        // A card reaches the pages, whatever becomes of the file that they are of.
        if let Some(count) = self.read_direct(&memory, to.at..to.at + to.len, at)? {
            return Ok(count);
        }
        // What others may cut short is touched by the kernel alone.
        self.by_buffer(DataFlow::Read, to.len, |lent, start, len| {
            let count = self.read_piece(&lent.stretch(len).map_err(plain)?, at + start as u64)?;
            to.mem.read_file(to.at + start, count, lent.file().map_err(plain)?, 0).map_err(kernel)
        })
    }

    fn write(&self, from: TransferMemory<'_>, at: u64) -> io::Result<usize> {
        if !from.shared {
            return self.straight(from, |piece, start| self.write_piece(piece, at + start as u64));
        }
        let memory = shareable(from.mem);
        if let Some(count) = self.write_direct(&memory, from.at..from.at + from.len, at)? {
            return Ok(count);
        }
        self.by_buffer(DataFlow::Write, from.len, |lent, start, len| {
            let file = lent.file().map_err(plain)?;
            let len = from.mem.write_file(from.at + start, len, file, 0).map_err(kernel)?;
            self.write_piece(&lent.stretch(len).map_err(plain)?, at + start as u64)
        })
    }

    fn read_direct(&self, to: &Shareable, range: Range<usize>, at: u64) -> io::Result<Option<usize>> {
        self.all_exposed(range, |piece, start| {
            Ok(self.read_exposed(to, piece, at + start as u64)?.map(|(count, _)| count))
        })
    }

    fn write_direct(&self, from: &Shareable, range: Range<usize>, at: u64) -> io::Result<Option<usize>> {
        self.all_exposed(range, |piece, start| self.write_exposed(from, piece, at + start as u64))
    }

    fn read_bytes(&self, to: &mut [u8], at: u64) -> io::Result<usize> {
        let to = Mutex::new(to);
        let len = lock(&to).len();
        self.by_buffer(DataFlow::Read, len, |lent, start, len| {
            let piece = lent.stretch(len).map_err(plain)?;
            let count = self.read_piece(&piece, at + start as u64)?;
            piece.mem.read(0, &mut lock(&to)[start..start + count]).map_err(plain)?;
            Ok(count)
        })
    }

    fn write_bytes(&self, from: &[u8], at: u64) -> io::Result<usize> {
        self.by_buffer(DataFlow::Write, from.len(), |lent, start, len| {
            let piece = lent.stretch(len).map_err(plain)?;
            piece.mem.write(0, &from[start..start + len]).map_err(plain)?;
            self.write_piece(&piece, at + start as u64)
        })
    }

    fn append_bytes(&self, from: &[u8]) -> io::Result<usize> {
        let from = &from[..from.len().min(MOST_DATA)];
        let lent = self.buffer(DataFlow::Write)?;
        let piece = lent.stretch(from.len()).map_err(plain)?;
        piece.mem.write(0, from).map_err(plain)?;
        let len = piece.len as u32;
        // Within a session it is done once; what came of it in one that was lost nobody can tell.
        let count = self.core.client.ask(false, |view, until| {
            let request = Request::Append { file: self.id(view, until)?, len };
            self.written(view, &request, &piece, until)
        })?;
        Ok(count)
    }

    fn has_hole(&self, at: u64, bytes: u64) -> io::Result<bool> {
        let size = self.core.client.ask(true, |view, until| Ok(self.attr(view, until)?.1.size))?;
        let end = size.min(at.saturating_add(bytes));
        Ok(at < end && self.seek(at, true)? < end)
    }

    fn is_cold(&self, _at: u64, _bytes: u64) -> bool {
        // That is the target's business.
        false
    }

    fn read_past(&self, _to: TransferMemory<'_>, _at: u64) -> io::Result<Option<usize>> {
        Ok(None)
    }

    fn sync(&self, data_only: bool) -> io::Result<()> {
        self.core.client.ask(true, |view, until| {
            self.node.check_boot(view)?;
            let before = self.node.take_unsynced();
            let synced = self.id(view, until).and_then(|file| {
                match self.core.call(view, &Request::Sync { file, data_only }, until)?.0 {
                    Reply::Done => Ok(()),
                    _ => Err(Errno::PROTO.into()),
                }
            });
            synced.inspect_err(|_| self.node.restore(before))
        })?;
        Ok(())
    }

    fn drop_set_id(&self) -> io::Result<()> {
        Ok(self.ask(|file| Request::DropSetId { file }, |reply| matches!(reply, Reply::Done).then_some(()))?)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        let change = crate::wire::AttrChange { size: Some(bytes), ..Default::default() };
        self.core.client.ask(true, |view, until| {
            let (node, file) = (self.core.id_of(&self.node, view, until)?, self.id(view, until)?);
            let request = Request::Change { node, file: Some(file), change, by: self.by.clone() };
            self.core.call(view, &request, until)?;
            self.node.changed(view);
            Ok(())
        })?;
        Ok(())
    }

    fn allocate(&self, mode: u32, at: u64, len: u64) -> io::Result<()> {
        // Taking bytes out of the middle, or putting some in, is not to be done twice.
        let moves = FallocateFlags::COLLAPSE_RANGE | FallocateFlags::INSERT_RANGE;
        self.core.client.ask(mode & moves.bits() == 0, |view, until| {
            let request = Request::Allocate { file: self.id(view, until)?, mode, at, len };
            self.core.call(view, &request, until)?;
            self.node.changed(view);
            Ok(())
        })?;
        Ok(())
    }

    fn seek(&self, at: u64, hole: bool) -> io::Result<u64> {
        let place = self.ask(
            |file| Request::Seek { file, at, hole },
            |reply| match reply {
                Reply::Place(place) => Some(place),
                _ => None,
            },
        )?;
        Ok(place)
    }

    fn via(&self) -> Option<Via> {
        Some(self.core.client.via())
    }
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        let (epoch, file) = *lock(&self.at);
        self.core.client.chores.close(epoch, self.by.uid, file);
    }
}
