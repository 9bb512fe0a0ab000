//! An open file of a target. After the target has lost it, it is opened again, if it is still the same file.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use onehop_os::HostMem;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::known::Node;
use super::tree::{TreeState, attr_of, opened};
use super::{RequestError, SessionView};
use crate::buffers::{DataFlow, PooledBuffer};
use crate::lock;
use crate::transport::{MemoryRange, Shareable, checksum};
use crate::tree::{OpenFile, TransferMemory, Via};
use crate::wire::{Attr, Caller, MAX_DATA, OpenMode, Reply, Request};

/// An open file.
pub(super) struct RemoteFile {
    core: Arc<TreeState>,
    node: Arc<Node>,
    /// How the file is reopened, and for whom it is accessed.
    access: OpenMode,
    by: Caller,
    /// The session's epoch, and the file's number in it.
    at: Mutex<(u64, u64)>,
    had_name: bool,
}

fn other_error(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::other(error)
}

fn os_error(error: onehop_os::Error) -> io::Error {
    error.errno().map_or_else(|| other_error(error), io::Error::from_raw_os_error)
}

/// The target's error when it could not reach our memory. Nothing was transferred.
const UNREACHED: Errno = Errno::COMM;

fn shareable(mem: &HostMem) -> Shareable {
    Arc::new(mem.clone())
}

/// Splits a transfer into chunks: offset and length.
fn chunks(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(MAX_DATA).map(move |start| (start, MAX_DATA.min(len - start)))
}

impl RemoteFile {
    pub fn new(
        core: &Arc<TreeState>,
        node: &Arc<Node>,
        (access, by): (OpenMode, Caller),
        at: (u64, u64),
        had_name: bool,
    ) -> Self {
        let access = OpenMode { truncate: false, ..access };
        Self { core: core.clone(), node: node.clone(), access, by, at: Mutex::new(at), had_name }
    }

    fn id(&self, view: SessionView, until: Instant) -> Result<u64, RequestError> {
        // Held while the file is reopened, so that it is reopened once.
        let mut at = lock(&self.at);
        if at.0 != view.epoch {
            let node = self.core.id_of(&self.node, view, until)?;
            let request = Request::Open { node, access: self.access, again: true, by: self.by.clone() };
            let (file, _) = opened(self.core.call(view, &request, until))?;
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
            read(reply).ok_or(RequestError::Errno(Errno::PROTO))
        })
    }

    /// The target's number of the file, and its attributes.
    fn attr(&self, view: SessionView, until: Instant) -> Result<(u64, Attr), RequestError> {
        let node = self.core.id_of(&self.node, view, until)?;
        let request = Request::Attr { node, uid: self.by.uid };
        Ok((node, attr_of(self.core.call(view, &request, until))?))
    }

    /// Makes the target write directly into memory. Returns the number of bytes and their checksum; `None` if it cannot
    /// reach the memory.
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
                Err(RequestError::Errno(UNREACHED)) => Ok(None),
                Err(error) => Err(error),
            }
        })?;
        Ok(done)
    }

    /// Makes the target read directly from memory; `None` if it cannot reach the memory, and then nothing was written.
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
                Err(RequestError::Errno(UNREACHED)) => Ok(None),
                Err(error) => Err(error),
            }
        })?;
        Ok(done)
    }

    /// Transfers chunks directly. `None` as soon as one cannot be; then the caller transfers all of them another way.
    fn transfer_exposed(
        &self,
        range: Range<usize>,
        transfer: impl Fn(Range<usize>, usize) -> io::Result<Option<usize>>,
    ) -> io::Result<Option<usize>> {
        let mut done = 0;
        for (start, len) in chunks(range.len()) {
            let first = range.start + start;
            let Some(count) = transfer(first..first + len, start)? else { return Ok(None) };
            done += count;
            if count < len {
                break;
            }
        }
        Ok(Some(done))
    }

    /// Reads into private memory.
    fn read_chunk(&self, to: &MemoryRange, at: u64) -> io::Result<usize> {
        let len = to.len as u32;
        let exposed = self.read_exposed(&shareable(&to.mem), to.at..to.at + to.len, at)?;
        if let Some((count, crc)) = exposed
            && (count == 0
                || checksum(&MemoryRange { len: count, ..to.clone() }).map_err(other_error)? == crc)
        {
            return Ok(count);
        }
        // On a checksum mismatch, read again, with the data inline.
        let count = self.core.client.ask(true, |view, until| {
            let request = Request::Read { file: self.id(view, until)?, at, len, into: None };
            match self.core.client.call(view.epoch, &request, None, Some(to), until)? {
                (Reply::Count { bytes, .. }, came) if bytes as usize == came => Ok(came),
                _ => Err(Errno::PROTO.into()),
            }
        })?;
        Ok(count)
    }

    /// Writes from private memory.
    fn write_chunk(&self, from: &MemoryRange, at: u64) -> io::Result<usize> {
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

    /// Sends a write with its data inline, and marks the file as changed.
    fn written(
        &self,
        view: SessionView,
        request: &Request,
        from: &MemoryRange,
        until: Instant,
    ) -> Result<usize, RequestError> {
        match self.core.client.call(view.epoch, request, Some(from), None, until)?.0 {
            Reply::Count { bytes, .. } if bytes as usize <= from.len => {
                self.node.changed(view);
                Ok(bytes as usize)
            }
            _ => Err(Errno::PROTO.into()),
        }
    }

    fn buffer(&self, flow: DataFlow) -> io::Result<PooledBuffer> {
        let client = &self.core.client;
        client.buffer(self.by.uid, flow).map_err(other_error)?.ok_or_else(|| Errno::TIMEDOUT.into())
    }

    /// Transfers chunks through a buffer, until one is short.
    fn by_buffer(
        &self,
        flow: DataFlow,
        len: usize,
        transfer: impl Fn(&PooledBuffer, usize, usize) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let buffer = self.buffer(flow)?;
        let mut done = 0;
        for (start, chunk) in chunks(len) {
            let count = transfer(&buffer, start, chunk)?;
            done += count;
            if count < chunk {
                break;
            }
        }
        Ok(done)
    }

    fn in_place(
        &self,
        memory: TransferMemory<'_>,
        transfer: impl Fn(&MemoryRange, usize) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut done = 0;
        for (start, len) in chunks(memory.len) {
            let count = transfer(
                &MemoryRange { mem: HostMem::clone(memory.mem), at: memory.at + start, len },
                start,
            )?;
            done += count;
            if count < len {
                break;
            }
        }
        Ok(done)
    }
}

impl OpenFile for RemoteFile {
    fn has_name(&self) -> bool {
        self.had_name
    }

    fn read_now(&self, _to: TransferMemory<'_>, _at: u64) -> io::Result<Option<usize>> {
        // A target always has to be waited for.
        Ok(None)
    }

    fn read(&self, to: TransferMemory<'_>, at: u64) -> io::Result<usize> {
        if !to.shared {
            return self.in_place(to, |chunk, start| self.read_chunk(chunk, at + start as u64));
        }
        let memory = shareable(to.mem);
        // A network card reaches the pages even after the file is truncated.
        if let Some(count) = self.read_direct(&memory, to.at..to.at + to.len, at)? {
            return Ok(count);
        }
        // Memory that others may truncate is accessed by the kernel only.
        self.by_buffer(DataFlow::Read, to.len, |buffer, start, len| {
            let count = self.read_chunk(&buffer.range(len).map_err(other_error)?, at + start as u64)?;
            to.mem.read_file(to.at + start, count, buffer.file().map_err(other_error)?, 0).map_err(os_error)
        })
    }

    fn write(&self, from: TransferMemory<'_>, at: u64) -> io::Result<usize> {
        if !from.shared {
            return self.in_place(from, |chunk, start| self.write_chunk(chunk, at + start as u64));
        }
        let memory = shareable(from.mem);
        if let Some(count) = self.write_direct(&memory, from.at..from.at + from.len, at)? {
            return Ok(count);
        }
        self.by_buffer(DataFlow::Write, from.len, |buffer, start, len| {
            let file = buffer.file().map_err(other_error)?;
            let len = from.mem.write_file(from.at + start, len, file, 0).map_err(os_error)?;
            self.write_chunk(&buffer.range(len).map_err(other_error)?, at + start as u64)
        })
    }

    fn read_direct(&self, to: &Shareable, range: Range<usize>, at: u64) -> io::Result<Option<usize>> {
        self.transfer_exposed(range, |chunk, start| {
            Ok(self.read_exposed(to, chunk, at + start as u64)?.map(|(count, _)| count))
        })
    }

    fn write_direct(&self, from: &Shareable, range: Range<usize>, at: u64) -> io::Result<Option<usize>> {
        self.transfer_exposed(range, |chunk, start| self.write_exposed(from, chunk, at + start as u64))
    }

    fn read_bytes(&self, to: &mut [u8], at: u64) -> io::Result<usize> {
        let to = Mutex::new(to);
        let len = lock(&to).len();
        self.by_buffer(DataFlow::Read, len, |buffer, start, len| {
            let chunk = buffer.range(len).map_err(other_error)?;
            let count = self.read_chunk(&chunk, at + start as u64)?;
            chunk.mem.read(0, &mut lock(&to)[start..start + count]).map_err(other_error)?;
            Ok(count)
        })
    }

    fn write_bytes(&self, from: &[u8], at: u64) -> io::Result<usize> {
        self.by_buffer(DataFlow::Write, from.len(), |buffer, start, len| {
            let chunk = buffer.range(len).map_err(other_error)?;
            chunk.mem.write(0, &from[start..start + len]).map_err(other_error)?;
            self.write_chunk(&chunk, at + start as u64)
        })
    }

    fn append_bytes(&self, from: &[u8]) -> io::Result<usize> {
        let from = &from[..from.len().min(MAX_DATA)];
        let buffer = self.buffer(DataFlow::Write)?;
        let chunk = buffer.range(from.len()).map_err(other_error)?;
        chunk.mem.write(0, from).map_err(other_error)?;
        let len = chunk.len as u32;
        // Executed once within a session. If the session is lost, the outcome is unknown.
        let count = self.core.client.ask(false, |view, until| {
            let request = Request::Append { file: self.id(view, until)?, len };
            self.written(view, &request, &chunk, until)
        })?;
        Ok(count)
    }

    fn has_hole(&self, at: u64, bytes: u64) -> io::Result<bool> {
        let size = self.core.client.ask(true, |view, until| Ok(self.attr(view, until)?.1.size))?;
        let end = size.min(at.saturating_add(bytes));
        Ok(at < end && self.seek(at, true)? < end)
    }

    fn is_cold(&self, _at: u64, _bytes: u64) -> bool {
        // The target handles its page cache itself.
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
        // Collapsing or inserting a range must not be repeated.
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
        self.core.client.releases.close(epoch, self.by.uid, file);
    }
}
