//! The copies of calls: each into the memory that its call names.

use std::sync::Arc;

use onehop_gpu::{Copier, Mark, Rows};

use super::SLOT;
use super::call::{Call, CallError};
use crate::engine::slot_pool::{Full, SlotCopier};
use crate::error::{Error, Result};

/// The bytes that were read into a slot.
pub(super) struct CallPart {
    pub(super) call: Arc<Call>,
    pub(super) chunk: usize,
    /// Bytes of the slot before those that the call wants, and the number of those.
    pub(super) skip: usize,
    pub(super) bytes: usize,
}

/// Bytes that are worth a call while others are in flight. Each caller waits for its own, so less than for a load.
const BATCH: usize = 8 << 20;

/// A copier for each GPU. A failed copy ends its own calls, and no others.
#[derive(Default)]
pub(super) struct CallLane {
    copiers: Vec<Box<dyn Copier>>,
}

impl CallLane {
    pub(super) fn add(&mut self, copier: Box<dyn Copier>) -> usize {
        self.copiers.push(copier);
        self.copiers.len() - 1
    }
}

fn rows(full: &Full<CallPart>) -> Rows {
    let CallPart { call, chunk, skip, bytes } = &full.part;
    Rows { from: full.slot * SLOT + skip, to: call.place(*chunk), row: *bytes, rows: 1, step: *bytes }
}

/// Whether all copies up to a mark are over, which is set now if there is none.
fn are_over(copier: &mut dyn Copier, mark: &mut Option<Mark>) -> Result<bool> {
    let mark = match mark {
        Some(mark) => *mark,
        None => *mark.insert(copier.mark()?),
    };
    Ok(copier.is_over(mark)?)
}

/// The end of the GPU's use of some slots.
pub(super) enum CallEnd {
    /// The GPU does not use them.
    Over,
    /// Copies of this GPU's copier. There is no mark until the copier has given one.
    Copies(usize, Option<Mark>),
    /// Copies of a thread's own copier, likewise.
    Own(Box<dyn Copier>, Option<Mark>),
}

impl SlotCopier for CallLane {
    type Part = CallPart;
    type End = CallEnd;

    fn slot_bytes(&self) -> usize {
        SLOT
    }

    fn batch_bytes(&self) -> usize {
        BATCH
    }

    fn bytes(&self, part: &CallPart) -> usize {
        part.bytes
    }

    fn groups(&self) -> usize {
        self.copiers.len()
    }

    fn group(&self, part: &CallPart) -> usize {
        part.call.memory.target.index
    }

    fn copy(&mut self, full: &[Full<CallPart>]) -> Result<CallEnd> {
        // Checked right before the copy: freed memory may have been allocated again.
        let mut asked: Option<&Arc<Call>> = None;
        for call in full.iter().map(|full| &full.part.call).filter(|call| !call.has_failed()) {
            let is_new = asked.replace(call).is_none_or(|last| !Arc::ptr_eq(last, call));
            if is_new && !call.is_memory_there() {
                call.note(CallError::Gone);
            }
        }
        let wanted: Vec<_> = full.iter().filter(|full| !full.part.call.has_failed()).collect();
        let Some(gpu) = wanted.first().map(|full| self.group(&full.part)) else { return Ok(CallEnd::Over) };
        let Some(copier) = self.copiers.get_mut(gpu) else { return Ok(CallEnd::Over) };
        let all: Vec<Rows> = wanted.iter().map(|full| rows(full)).collect();
        if copier.copy_all(&all).is_err() {
            // One of them was refused. To find it, they are copied one by one; copying one twice does no harm.
            for full in wanted {
                if let Err(error) = copier.copy(&rows(full)) {
                    full.part.call.note(error.into());
                }
            }
        }
        // Part of a refused one may have been started.
        Ok(CallEnd::Copies(gpu, copier.mark().ok()))
    }

    fn is_over(&mut self, end: &mut CallEnd) -> Result<bool> {
        match end {
            CallEnd::Over => Ok(true),
            CallEnd::Copies(gpu, mark) => match self.copiers.get_mut(*gpu) {
                Some(copier) => are_over(&mut **copier, mark),
                None => Ok(true),
            },
            CallEnd::Own(copier, mark) => are_over(&mut **copier, mark),
        }
    }

    /// The calls that they are of have failed.
    fn fail(&self, error: Error, full: &[Full<CallPart>]) -> Result<()> {
        let words = error.to_string();
        let mut first = Some(error);
        for full in full {
            let error = first.take().unwrap_or_else(|| onehop_gpu::Error::Launch(words.clone()).into());
            full.part.call.note(error.into());
        }
        Ok(())
    }

    fn report(&self, CallPart { call, chunk, bytes, .. }: CallPart) {
        call.finish(chunk, bytes);
    }
}
