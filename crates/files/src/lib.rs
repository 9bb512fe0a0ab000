//! From a file's name to the places of its bytes on a drive.
//!
//! A drive that onehop owns cannot be mounted, so its partition tables and file systems are read here, read-only:
//! [`partitions::read`] and [`Volume`] turn a path into [`Extent`]s, which any queue can then fetch. The drive is only
//! seen through [`Blocks`]. Whatever is not understood is refused by name, and nothing that an image says is believed
//! before it was checked: see `docs/files.md`.
#![forbid(unsafe_code)]

mod blocks;
mod blockwise;
mod bytes;
mod clusters;
mod detect;
mod error;
mod exfat;
mod ext;
mod extent;
mod fat;
pub mod live;
mod map;
mod members;
pub mod partitions;
mod volume;
mod window;

pub use blocks::{Blocks, Image, WholeBlocks};
pub use blockwise::{BlockRun, Blockwise};
pub use error::{Error, Result};
pub use extent::{Extent, Place, read_extents};
pub use map::{DriveId, ExtentMap, MappedFile, NvmeIds, PIECE_BYTES, Piece};
pub use volume::{Entry, File, FileId, FileKind, Volume, Which};
