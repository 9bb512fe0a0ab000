//! Copies of many pieces between several memories.

use crate::{Error, Region, Result};

/// Bytes to copy from one memory of a list to another of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The number of the memory that is copied from, and the offset in it.
    pub from: (usize, usize),
    /// The same for the memory that is copied to.
    pub to: (usize, usize),
    /// How many bytes.
    pub bytes: usize,
}

impl Piece {
    /// Checks that it lies within two of these memories.
    pub(crate) fn check(&self, memories: &[Region]) -> Result<()> {
        for (number, offset) in [self.from, self.to] {
            let len = memories.get(number).map_or(0, Region::len);
            if offset > len || self.bytes > len - offset {
                return Err(onehop_os::Error::OutOfRange { offset, bytes: self.bytes, len }.into());
            }
        }
        Ok(())
    }
}

/// Copies pieces in any order. Dropping it waits for all of them.
pub trait PieceCopier: Send {
    /// Starts copies between these memories, which are kept until they have ended.
    ///
    /// # Errors
    /// When a piece does not lie within its memories, the GPU does not reach one of them, or it fails. Some of the copies may
    /// have been started.
    fn start(&mut self, memories: &[Region], pieces: &[Piece]) -> Result<()>;
    /// Waits until all copies have ended.
    ///
    /// # Errors
    /// When one failed. They have ended unless [`Error::is_under_way`].
    fn wait(&mut self) -> Result<()>;
}

/// Copies at once, for memory that the CPU reaches.
pub(crate) struct PiecesAtOnce;

/// Bytes copied at a time.
const CHUNK: usize = 64 << 10;

impl PieceCopier for PiecesAtOnce {
    fn start(&mut self, memories: &[Region], pieces: &[Piece]) -> Result<()> {
        pieces.iter().try_for_each(|piece| piece.check(memories))?;
        let most = pieces.iter().map(|piece| piece.bytes).max().unwrap_or(0);
        let mut buffer = vec![0; most.min(CHUNK)];
        for piece in pieces {
            let ((from, from_at), (to, to_at)) = (piece.from, piece.to);
            for at in (0..piece.bytes).step_by(CHUNK) {
                let part = &mut buffer[..CHUNK.min(piece.bytes - at)];
                memories[from].read(from_at + at, part)?;
                memories[to].write(to_at + at, part)?;
            }
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The error of a GPU that has no such copier.
pub(crate) fn none(name: &str) -> Error {
    let why = format!("{name} has no copies of pieces");
    Error::NotSupported { what: "copying pieces of memory".into(), why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Emulated, Gpu, Place};

    #[test]
    fn pieces_are_kept_within_bounds() {
        let gpu = Emulated::new();
        let memories = [Place::PinnedHost, Place::Vram, Place::Vram]
            .map(|place| gpu.alloc(place, 200_000).unwrap().slice(0..200_000).unwrap());
        let data: Vec<u8> = (0..200_000_u32).map(|i| (i * 7 >> 3) as u8).collect();
        memories[0].write(0, &data).unwrap();
        let mut copier = gpu.piece_copier().unwrap();
        let piece = |from, to, bytes| Piece { from, to, bytes };
        let pieces =
            [piece((0, 3), (1, 5), 150_001), piece((0, 0), (2, 199_999), 1), piece((0, 9), (2, 0), 0)];
        copier.start(&memories, &pieces).unwrap();
        copier.start(&memories, &[piece((1, 5), (2, 0), 4)]).unwrap();
        copier.wait().unwrap();
        let mut found = vec![0; 150_001];
        memories[1].read(5, &mut found).unwrap();
        assert!(found == data[3..150_004]);
        let mut found = [0; 4];
        memories[2].read(0, &mut found).unwrap();
        assert_eq!(found, data[3..7]);
        memories[2].read(199_996, &mut found).unwrap();
        assert_eq!(found, [0, 0, 0, data[0]]);
        for bad in [
            piece((0, 0), (3, 0), 1),
            piece((0, 199_999), (1, 0), 2),
            piece((0, 0), (1, 200_001), 0),
            piece((0, usize::MAX), (1, 0), 2),
            piece((0, 2), (1, 0), usize::MAX),
        ] {
            assert!(copier.start(&memories, &[bad]).is_err(), "{bad:?}");
        }
    }
}
