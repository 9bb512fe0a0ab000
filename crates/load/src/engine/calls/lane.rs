//! The copies of calls: each into the memory that its call names.

use std::sync::Arc;

use onehop_gpu::{Copier, Rows};

use super::SLOT;
use super::call::{Call, CallError};
use crate::engine::slot_pool::{Full, SlotCopier};
use crate::engine::worker_pool::Marks;
use crate::error::Result;

/// What was read into a slot.
pub(super) struct CallPart {
    pub(super) call: Arc<Call>,
    pub(super) chunk: usize,
    /// Bytes of the slot before those that the call wants, and those.
    pub(super) skip: usize,
    pub(super) bytes: usize,
}

/// A copier for each GPU. What fails ends the calls that it is of, and no others.
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
    let to = call.memory.at + (call.range(*chunk).0 - call.at) as usize;
    Rows { from: full.slot * SLOT + skip, to, row: *bytes, rows: 1, step: *bytes }
}

impl SlotCopier for CallLane {
    type Part = CallPart;

    fn slot_bytes(&self) -> usize {
        SLOT
    }

    fn copy(&mut self, full: &[Full<CallPart>]) -> Result<Marks> {
        // Right before: memory that was freed may be another's by now.
        let mut asked: Option<&Arc<Call>> = None;
        for call in full.iter().map(|full| &full.part.call).filter(|call| !call.has_failed()) {
            let is_new = asked.replace(call).is_none_or(|last| !Arc::ptr_eq(last, call));
            if is_new && !call.is_memory_there() {
                call.note(CallError::Gone);
            }
        }
        let mut marks = Vec::with_capacity(1);
        for (gpu, copier) in self.copiers.iter_mut().enumerate() {
            let wanted = |full: &&Full<CallPart>| {
                full.part.call.memory.target.index == gpu && !full.part.call.has_failed()
            };
            let all: Vec<Rows> = full.iter().filter(wanted).map(rows).collect();
            if all.is_empty() {
                continue;
            }
            if copier.copy_all(&all).is_err() {
                // One of them was refused: which, they are asked one by one. To copy one twice does no harm.
                for full in full.iter().filter(wanted) {
                    if let Err(error) = copier.copy(&rows(full)) {
                        full.part.call.note(error.into());
                    }
                }
            }
            match copier.mark() {
                Ok(mark) => marks.push((gpu, mark)),
                Err(error) => note_all(full, gpu, error),
            }
        }
        Ok(marks)
    }

    fn is_over(&mut self, marks: &Marks, full: &[Full<CallPart>]) -> Result<bool> {
        for (gpu, mark) in marks {
            match self.copiers.get_mut(*gpu).map(|copier| copier.is_over(*mark)) {
                Some(Ok(false)) => return Ok(false),
                Some(Err(error)) => note_all(full, *gpu, error),
                Some(Ok(true)) | None => {}
            }
        }
        Ok(true)
    }

    fn tell(&self, CallPart { call, chunk, bytes, .. }: CallPart) {
        call.finish(chunk, bytes);
    }
}

/// The calls to a GPU that failed have failed.
fn note_all(full: &[Full<CallPart>], gpu: usize, error: onehop_gpu::Error) {
    let words = error.to_string();
    let mut first = Some(error);
    for full in full.iter().filter(|full| full.part.call.memory.target.index == gpu) {
        let error = first.take().unwrap_or_else(|| onehop_gpu::Error::Launch(words.clone()));
        full.part.call.note(error.into());
    }
}
