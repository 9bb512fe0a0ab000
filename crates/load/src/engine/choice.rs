//! Opens the files of a load, and chooses the path of each chunk: through the page cache or past it.

use std::fs::File;
use std::sync::Arc;

use onehop_os::page_cache::{DirectRules, cached_bytes, is_in_memory, open_again, open_direct};
use rustix::fs::{Advice, fadvise};

use super::Route;
use crate::error::{Error, Result};
use crate::plan::Chunk;
use crate::source::{Fetch, Source};

/// A file of the plan, open for every path that the route allows.
pub(super) struct LoadSource {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) origin: Origin,
    pub(super) direct: Option<Direct>,
    /// Whether the file exists only in the page cache.
    pub(super) in_memory: bool,
}

/// A file opened past the page cache, and the required alignment.
pub(super) struct Direct {
    pub(super) file: Arc<File>,
    pub(super) block: u64,
}

/// What threads read from.
pub(super) enum Origin {
    Local(Arc<File>),
    Server(Arc<dyn Fetch>),
}

/// Opens the files, past the page cache in blocks of this size where possible, and returns why the first that cannot be
/// read past it cannot.
pub(super) fn open(
    files: &[Box<dyn Source>],
    block: u64,
    route: Route,
) -> Result<(Vec<LoadSource>, Option<String>)> {
    let mut why_cached = None;
    let mut sources = Vec::with_capacity(files.len());
    for source in files {
        let (name, bytes) = (String::from(source.name()), source.bytes());
        if let Some(server) = source.fetch().filter(|_| route == Route::Auto) {
            sources.push(LoadSource {
                name,
                bytes,
                origin: Origin::Server(server),
                direct: None,
                in_memory: false,
            });
            continue;
        }
        let file = source.local().ok_or_else(|| Error::NoFile { file: name.clone() })?;
        // The advice below must only affect this load: others read the model's file, too. Without /proc it affects them
        // as well.
        let file = open_again(file.file()).or_else(|_| file.file().try_clone());
        let file = file.map_err(|e| Error::Open { file: name.clone(), source: e })?;
        let in_memory = is_in_memory(&file);
        let direct = match route {
            Route::Cached => None,
            Route::Auto | Route::Pinned | Route::CuFile => match past_the_cache(&file, block) {
                Ok(direct) => {
                    // Readahead would look like cached data, and chunk after chunk would be read from the page cache.
                    // Failure is harmless.
                    let _ = fadvise(&file, 0, None, Advice::Random);
                    Some(direct)
                }
                Err(why) if route == Route::Pinned => return Err(Error::NotDirect { file: name, why }),
                Err(why) => {
                    why_cached.get_or_insert(format!("{name}: {why}"));
                    None
                }
            },
        };
        sources.push(LoadSource { name, bytes, origin: Origin::Local(Arc::new(file)), direct, in_memory });
    }
    Ok((sources, why_cached))
}

/// The file, open to be read past the page cache in blocks of this size; or why not.
pub(super) fn past_the_cache(file: &File, block: u64) -> std::result::Result<Direct, String> {
    if is_in_memory(file) {
        return Err("its file system lies in memory".into());
    }
    match open_direct(file) {
        Ok(Some((direct, DirectRules { memory, offset }))) => {
            if u64::from(offset) > block || memory > 4096 {
                return Err(format!(
                    "its file system needs blocks of {offset} bytes, at addresses that are multiples of {memory}"
                ));
            }
            // At least a page, which suffices on every file system.
            Ok(Direct { file: Arc::new(direct), block: u64::from(offset).max(4096) })
        }
        Ok(None) => Err("its file system does not support O_DIRECT".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// Bytes of a chunk that are in the page cache.
pub(super) fn cached(source: &LoadSource, file: &File, chunk: &Chunk) -> onehop_os::Result<u64> {
    if source.in_memory {
        return Ok(chunk.valid());
    }
    chunk.reads.iter().map(|read| cached_bytes(file, read.offset, read.valid)).sum()
}
