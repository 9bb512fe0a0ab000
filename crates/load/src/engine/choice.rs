//! What the files of a load are read from, and which way a chunk of one goes: out of the page cache, or past it.

use std::fs::File;
use std::sync::Arc;

use onehop_os::page_cache::{DirectRules, cached_bytes, is_in_memory, open_again, open_direct};
use rustix::fs::{Advice, fadvise};

use super::Route;
use crate::error::{Error, Result};
use crate::plan::Chunk;
use crate::source::{Fetch, Source};

/// A file of the plan, open in every way that the route allows.
pub(super) struct Opened {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) origin: Origin,
    pub(super) direct: Option<Direct>,
    /// Whether there is nothing behind the page cache.
    pub(super) in_memory: bool,
}

/// A file that is read past the page cache, and what reads of it may begin at multiples of.
pub(super) struct Direct {
    pub(super) file: Arc<File>,
    pub(super) block: u64,
}

/// Where threads read it.
pub(super) enum Origin {
    Local(Arc<File>),
    Server(Arc<dyn Fetch>),
}

/// Opens the files, to be read past the page cache in blocks of this size where that can be; and says of the first that
/// cannot be read so, why.
pub(super) fn open(
    files: &[Box<dyn Source>],
    block: u64,
    route: Route,
) -> Result<(Vec<Opened>, Option<String>)> {
    let mut why_cached = None;
    let mut sources = Vec::with_capacity(files.len());
    for source in files {
        let (name, bytes) = (String::from(source.name()), source.bytes());
        if let Some(server) = source.fetch().filter(|_| route == Route::Auto) {
            sources.push(Opened {
                name,
                bytes,
                origin: Origin::Server(server),
                direct: None,
                in_memory: false,
            });
            continue;
        }
        let file = source.local().ok_or_else(|| Error::NoFile { file: name.clone() })?;
        // The advice below is for this load alone: others read the model's file, too. Without /proc they get it as well.
        let file = open_again(file.file()).or_else(|_| file.file().try_clone());
        let file = file.map_err(|e| Error::Open { file: name.clone(), source: e })?;
        let in_memory = is_in_memory(&file);
        let direct = match route {
            Route::Cached => None,
            Route::Auto | Route::Pinned | Route::CuFile => match past_the_cache(&file, block) {
                Ok(direct) => {
                    // What is read ahead would pass for what was there, and chunk after chunk come out of the page cache.
                    // Without it only what is asked for is read; it is no error if that cannot be had.
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
        sources.push(Opened { name, bytes, origin: Origin::Local(Arc::new(file)), direct, in_memory });
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
                    "its file system wants blocks of {offset} bytes, on addresses of {memory}"
                ));
            }
            // Pages at least, which do on every file system.
            Ok(Direct { file: Arc::new(direct), block: u64::from(offset).max(4096) })
        }
        Ok(None) => Err("its file system does not do O_DIRECT".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// How many bytes of a chunk the page cache has.
pub(super) fn cached(source: &Opened, file: &File, chunk: &Chunk) -> onehop_os::Result<u64> {
    if source.in_memory {
        return Ok(chunk.valid());
    }
    chunk.reads.iter().map(|read| cached_bytes(file, read.offset, read.valid)).sum()
}
