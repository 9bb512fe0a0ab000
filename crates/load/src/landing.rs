//! A plan as commands to a drive: what lands where it belongs by itself, and what goes through a slot.
//!
//! Whole blocks of a [`Landing::Direct`] range go straight into the arena, each byte once. What no drive can put where it
//! belongs (its distance is no multiple of what drives address, or only a few rows of it are wanted) is read into a
//! slot, and copied from there.

use onehop_files::{Blockwise, Extent};

use crate::error::{Error, Result};
use crate::plan::{Copy, Landing, Plan};
use crate::source::Source;

/// What is read into a slot, and where it goes from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staged {
    /// What comes into the slot. Its holes have to be made zeros, because the slot has been used before.
    pub parts: Blockwise,
    /// From the slot to the arena.
    pub copies: Vec<Copy>,
}

/// What lands in the arena by itself. The arena holds zeros before.
///
/// # Errors
/// When a file is on no drive, or the drive's blocks are larger than its file system's.
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

/// What goes through slots of so many bytes, slot by slot.
///
/// # Errors
/// When not even a block fits; each slot as for [`direct`].
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
