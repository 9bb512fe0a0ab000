//! From a file's name to the places of its bytes on a drive.
//!
//! 1. [`Image::open`] opens a drive's image; for a real drive, implement [`Blocks`] or wrap a closure in
//!    [`WholeBlocks`].
//! 2. [`Volume::open`] finds a partition and opens its file system, read-only.
//! 3. [`Volume::lookup`] resolves a path.
//! 4. [`Volume::extents`] returns the [`Extent`]s of a file, which any queue can read.
//! 5. [`Blockwise::add`] turns a part of a file into reads of whole blocks.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use onehop_files::{Blockwise, Image, Volume, Which};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let volume = Volume::open(Arc::new(Image::open("drive.img")?), Which::Auto)?;
//! let file = volume.lookup("models/model.safetensors")?;
//! let extents = volume.extents(&file)?;
//! let mut reads = Blockwise::default();
//! reads.add(extents, 0..file.size(), 0, 512)?;
//! for run in &reads.runs {
//!     println!("{} blocks from {}", run.blocks, run.lba);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A drive that onehop drives cannot be mounted, so its partition tables and file systems are read here. What cannot be
//! read is refused by name, and all contents of an image are checked before use: see `docs/files.md`. [`live`] finds
//! the places of a mounted file, and an [`ExtentMap`] stores places for later.
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
pub use map::{CHUNK_BYTES, DriveId, ExtentMap, MapChunk, MappedFile, NvmeIds};
pub use volume::{Entry, File, FileId, FileKind, Volume, Which};
