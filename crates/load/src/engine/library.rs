//! Threads that let NVIDIA's cuFile read. It gets the files and the arena, and does not report its path, so the account
//! only has what is known in advance.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use onehop_gpu::{Gpu, GpuFile, GpuFiles, Region};

use super::choice::{LoadSource, Origin};
use super::worker_pool::LoadShared;
use crate::error::{Error, Result};
use crate::plan::Chunk;

/// cuFile, and what was registered with it.
pub(super) struct Library {
    files: Vec<Box<dyn GpuFile>>,
    arena: Region,
    /// The registered arena; or why cuFile refused it, and copies through a buffer of its own.
    registered: onehop_gpu::Result<Box<dyn Send + Sync>>,
    library: Arc<dyn GpuFiles>,
}

/// The error for a load to several GPUs.
pub(super) fn one_gpu() -> Error {
    let why = "it opens a file once, and for one GPU; load one by one, or by another route";
    Error::NotByCuFile { what: "several GPUs in one load".into(), why: why.into() }
}

impl Library {
    /// Opens cuFile, and registers the arena and the files.
    pub(super) fn open(gpu: &dyn Gpu, arena: &Region, sources: &[LoadSource]) -> Result<Self> {
        let library = gpu.files().map_err(|error| match error {
            onehop_gpu::Error::NotSupported { why, .. } => {
                Error::NotByCuFile { what: format!("GPU {}", gpu.name()), why }
            }
            other => other.into(),
        })?;
        let give = |source: &LoadSource| {
            let Origin::Local(cached) = &source.origin else {
                return Err(Error::NoFile { file: source.name.clone() });
            };
            let file = source.direct.as_ref().map_or(cached, |direct| &direct.file).clone();
            let refused = |why: onehop_gpu::Error| Error::NotByCuFile {
                what: source.name.clone(),
                why: why.to_string(),
            };
            library.open(file).map_err(refused)
        };
        let files = sources.iter().map(give).collect::<Result<_>>()?;
        let registered = library.register(arena);
        Ok(Self { files, arena: arena.clone(), registered, library })
    }

    /// Why the arena is not registered, if so.
    pub(super) fn why_unregistered(&self) -> Option<String> {
        self.registered.as_ref().err().map(ToString::to_string)
    }

    /// What is known about the path of the bytes.
    pub(super) fn way(&self) -> &'static str {
        self.library.how()
    }
}

/// Reads chunk after chunk.
pub(super) fn run(shared: &LoadShared, library: &Library, arrived: &Sender<Chunk>) -> Result<()> {
    while let Some(chunk) = shared.next() {
        let (Some(source), Some(file)) = (shared.sources.get(chunk.file), library.files.get(chunk.file))
        else {
            return Err(Error::Incomplete);
        };
        for (offset, to, bytes) in chunk.file_ranges() {
            read(&**file, &library.arena, source, offset, to, bytes)?;
            shared.cufile_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        // The receiver may be gone if the load was cancelled.
        let _ = arrived.send(chunk);
    }
    Ok(())
}

/// Reads a range of the file, which cuFile may split.
fn read(
    file: &dyn GpuFile,
    arena: &Region,
    source: &LoadSource,
    offset: u64,
    to: u64,
    bytes: u64,
) -> Result<()> {
    let mut done = 0;
    while done < bytes {
        let into = arena.slice((to + done) as usize..(to + bytes) as usize)?;
        let failed = |e: onehop_gpu::Error| Error::Read {
            file: source.name.clone(),
            offset: offset + done,
            bytes: bytes - done,
            source: std::io::Error::other(e),
        };
        match file.read(&into, offset + done).map_err(failed)? {
            0 => {
                let (file, length) = (source.name.clone(), source.bytes);
                return Err(Error::Ended { file, offset: offset + done, bytes: bytes - done, length });
            }
            got => done += (got as u64).min(bytes - done),
        }
    }
    Ok(())
}
