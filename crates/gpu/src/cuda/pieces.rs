//! Pieces copied by the GPU's copy engine, on a separate stream.

use std::ffi::c_void;
use std::sync::Arc;

use onehop_os::DmaMemory;

use super::context::Context;
use super::copier::{CopyLists, NOT_SUPPORTED, shared_ptr};
use super::driver::Failure;
use super::stream::{COPIES, End, LONGEST, Stream};
use crate::pieces::{Piece, PieceCopier};
use crate::{Region, Result};

const WHAT: &str = "copying pieces to or from GPU memory";
/// Pieces of one call: the driver takes longer for each of more.
const MOST: usize = 1024;

/// See [`PieceCopier`].
pub(super) struct CudaPieces {
    context: Arc<Context>,
    stream: Arc<Stream>,
    /// Whether the driver accepts many copies in one call; determined by trying.
    batches: bool,
    /// The memories of copies that may not have ended.
    used: Vec<Region>,
}

impl CudaPieces {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        // A program's stream that waits for these copies must not share a channel of the GPU with them.
        let stream = Arc::new(Stream::apart(context)?);
        Ok(Self { context: context.clone(), stream, batches: true, used: Vec::new() })
    }

    fn one(&self, memories: &[Region], piece: &Piece) -> Result<()> {
        let (from, to) = (&memories[piece.from.0], &memories[piece.to.0]);
        let (start, end) = (shared_ptr(from, piece.from.1), shared_ptr(to, piece.to.1));
        let (bytes, stream) = (piece.bytes, self.stream.raw());
        // SAFETY: the range was checked to lie within the two regions, which are kept until the stream has ended.
        self.context.call(WHAT, |driver| unsafe {
            if from.host().is_some() {
                driver.copy_in(end, start as *const c_void, bytes, stream)
            } else if to.host().is_some() {
                driver.copy_out(end as *mut c_void, start, bytes, stream)
            } else {
                driver.copy_within(end, start, bytes, stream)
            }
        })
    }
}

impl PieceCopier for CudaPieces {
    fn start(&mut self, memories: &[Region], pieces: &[Piece]) -> Result<()> {
        pieces.iter().try_for_each(|piece| piece.check(memories))?;
        memories.iter().try_for_each(|memory| self.context.check_copied(WHAT, memory))?;
        self.used.extend_from_slice(memories);
        for some in pieces.chunks(MOST) {
            if self.batches {
                let mut lists = CopyLists::default();
                for piece in some.iter().filter(|piece| piece.bytes > 0) {
                    let from = shared_ptr(&memories[piece.from.0], piece.from.1);
                    lists.add(from, shared_ptr(&memories[piece.to.0], piece.to.1), piece.bytes);
                }
                // SAFETY: every range was checked to lie within its region, which is kept until the stream has ended.
                match unsafe { lists.start(&self.context, &self.stream) } {
                    Ok(()) => continue,
                    Err(Failure::Missing(..) | Failure::Code(_, NOT_SUPPORTED)) => self.batches = false,
                    Err(failure) => return self.context.call(WHAT, |_| Err(failure)),
                }
            }
            some.iter().filter(|piece| piece.bytes > 0).try_for_each(|piece| self.one(memories, piece))?;
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        match self.stream.end(LONGEST) {
            End::Over => {
                self.used.clear();
                Ok(())
            }
            end => Err(self.stream.error(WHAT, end, LONGEST)),
        }
    }
}

impl Drop for CudaPieces {
    fn drop(&mut self) {
        if self.used.is_empty() {
            return;
        }
        if let End::Unended(_) = super::stream::wait(super::copier::END, COPIES, || self.stream.progress()) {
            // The GPU may still use them.
            self.stream.outlasted(std::mem::take(&mut self.used));
        }
    }
}
