//! Which way each chunk goes: out of the page cache, or past it; or all of them by cuFile.

use std::fs::File;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, Builder, ScopedJoinHandle};

use onehop_os::page_cache::{DirectRules, cached_bytes, is_in_memory, open_direct};

use super::Route;
use crate::error::{Error, Result};
use crate::plan::{Chunk, Plan};
use crate::source::{Fetch, Source};

/// The way of a chunk: by the threads that share what there is to do, who read the page cache, a server, or by cuFile; or by
/// the one that reads past the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Shared,
    Direct,
}

/// A file of the plan, open in every way that it can be.
pub(super) struct Opened {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) origin: Origin,
    pub(super) direct: Option<Arc<File>>,
}

/// Where threads read it.
pub(super) enum Origin {
    Local(Arc<File>),
    Server(Arc<dyn Fetch>),
}

/// The chunks of each way, and what they are read from.
pub(super) struct Choice {
    pub(super) shared: Vec<Chunk>,
    pub(super) direct: Vec<Chunk>,
    pub(super) sources: Vec<Opened>,
    pub(super) why_cached: Option<String>,
}

/// Cuts the plan into chunks and chooses for each.
pub(super) fn choose(plan: &Plan, files: &[Box<dyn Source>], slot: u64, route: Route) -> Result<Choice> {
    let mut why_cached = None;
    let mut sources = Vec::with_capacity(files.len());
    for source in files {
        if let Some(server) = source.fetch().filter(|_| route == Route::Auto) {
            let (name, bytes) = (source.name().into(), source.bytes());
            sources.push(Opened { name, bytes, origin: Origin::Server(server), direct: None });
            continue;
        }
        let file = source.local().ok_or_else(|| Error::NoFile { file: source.name().into() })?;
        let file =
            file.file().try_clone().map_err(|e| Error::Open { file: source.name().into(), source: e })?;
        let direct = match route {
            Route::Cached => None,
            Route::Auto | Route::Pinned | Route::CuFile => match past_the_cache(&file, plan.options.block) {
                Ok(direct) => Some(Arc::new(direct)),
                Err(why) if route == Route::Pinned => {
                    return Err(Error::NotDirect { file: source.name().into(), why });
                }
                Err(why) => {
                    why_cached.get_or_insert(format!("{}: {why}", source.name()));
                    None
                }
            },
        };
        sources.push(Opened {
            name: source.name().into(),
            bytes: source.bytes(),
            origin: Origin::Local(Arc::new(file)),
            direct,
        });
    }
    let way = |chunk: &Chunk| match sources.get(chunk.file) {
        Some(Opened { direct: Some(_), .. }) if route == Route::Pinned => Way::Direct,
        Some(Opened { direct: Some(_), origin: Origin::Local(file), .. }) if !mostly_cached(file, chunk) => {
            Way::Direct
        }
        _ => Way::Shared,
    };
    let all: Vec<Chunk> = plan.chunks(slot)?.collect();
    if sources.iter().all(|source| source.direct.is_none()) || route == Route::CuFile {
        return Ok(Choice { shared: all, direct: Vec::new(), sources, why_cached });
    }
    let ways = if route == Route::Auto { side_by_side(&all, way) } else { all.iter().map(way).collect() };
    let (mut shared, mut direct) = (Vec::with_capacity(all.len()), Vec::new());
    for (way, chunk) in ways.into_iter().zip(all) {
        match way {
            Way::Shared => shared.push(chunk),
            Way::Direct => direct.push(chunk),
        }
    }
    Ok(Choice { shared, direct, sources, why_cached })
}

/// The way of each chunk. The kernel looks at every page of a file to tell what it has of it, which takes milliseconds for
/// gigabytes; several threads may ask it at once.
fn side_by_side(chunks: &[Chunk], way: impl Fn(&Chunk) -> Way + Sync) -> Vec<Way> {
    /// Chunks that are worth a thread.
    const SHARE: usize = 256;
    let share = chunks.len().div_ceil(super::processors()).max(SHARE);
    let way = &way;
    thread::scope(|scope| {
        let parts = chunks.chunks(share).map(|part| {
            let ask = move || part.iter().map(way).collect::<Vec<_>>();
            // Where there can be no more threads this one asks.
            Builder::new().spawn_scoped(scope, ask).map_err(|_| ask())
        });
        let parts: Vec<_> = parts.collect();
        let answer = |part| match part {
            // A panic in one of them is a defect, and goes on here.
            Ok(thread) => ScopedJoinHandle::join(thread).unwrap_or_else(|panic| resume_unwind(panic)),
            Err(answer) => answer,
        };
        parts.into_iter().flat_map(answer).collect()
    })
}

/// The file, open to be read past the page cache in blocks of this size; or why not.
fn past_the_cache(file: &File, block: u64) -> std::result::Result<File, String> {
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
            Ok(direct)
        }
        Ok(None) => Err("its file system does not do O_DIRECT".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether it is sooner out of the page cache: where half of it is not there, the disk is read in any case.
fn mostly_cached(file: &File, chunk: &Chunk) -> bool {
    let (mut bytes, mut cached) = (0, 0);
    for read in &chunk.reads {
        bytes += read.valid;
        match cached_bytes(file, read.offset, read.valid) {
            Ok(there) => cached += there,
            Err(_) => return false,
        }
    }
    cached * 2 >= bytes
}
