//! Turns a plan into commands for a drive: data that lands in its final place, and data that goes through a slot.
//!
//! Whole blocks of a [`Landing::Direct`] range go directly into the arena, each byte once. Data that no drive can write
//! to its final place (its distance is not a multiple of what drives address, or only a few rows of it are needed) is
//! read into a slot and copied from there.

use onehop_files::{Blockwise, Extent};

use crate::error::{Error, Result};
use crate::plan::{Copy, Landing, Plan};
use crate::source::Source;

/// Data that is read into a slot, and its destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staged {
    /// Reads into the slot. Holes must be zeroed, because the slot has been used before.
    pub parts: Blockwise,
    /// Copies from the slot to the arena.
    pub copies: Vec<Copy>,
}

/// Data that lands directly in the arena. The arena must hold zeros before.
///
/// # Errors
/// When a file is not on a drive, or the drive's blocks are larger than its file system's.
pub fn direct(plan: &Plan, files: &[Box<dyn Source>]) -> Result<Blockwise> {
    let mut parts = Blockwise::default();
    for range in &plan.ranges {
        let Landing::Direct { at } = range.landing else { continue };
        let (name, bytes, extents) = places(files, range.file)?;
        let part = range.start..range.end.min(bytes);
        let added = parts.add(extents, part, at, plan.options.block);
        added.map_err(|why| Error::OnDrive { file: name.into(), why })?;
    }
    Ok(parts)
}

/// Data that goes through slots of this size, slot by slot.
///
/// # Errors
/// When a slot is smaller than a block; for each slot as for [`direct`].
pub fn staged<'p>(
    plan: &'p Plan,
    files: &'p [Box<dyn Source>],
    slot: u64,
) -> Result<impl Iterator<Item = Result<Staged>> + 'p> {
    let shifted = plan.chunks(slot)?.filter(|chunk| chunk.direct.is_none());
    Ok(shifted.map(|chunk| {
        let (name, _, extents) = places(files, chunk.file)?;
        let mut parts = Blockwise::default();
        for read in &chunk.reads {
            let part = read.offset..read.offset + read.valid;
            let added = parts.add(extents, part, read.slot, plan.options.block);
            added.map_err(|why| Error::OnDrive { file: name.into(), why })?;
        }
        Ok(Staged { parts, copies: chunk.copies })
    }))
}

fn places(files: &[Box<dyn Source>], file: usize) -> Result<(&str, u64, &[Extent])> {
    let file = files.get(file).ok_or(Error::Incomplete)?;
    let extents = file.extents().ok_or_else(|| Error::NoPlaces { file: file.name().into() })?;
    Ok((file.name(), file.bytes(), extents))
}
