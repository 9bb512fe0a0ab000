//! `model.safetensors.index.json`: assigns tensors to shards.

use serde::de::MapAccess;

use super::{MAX_HEADER, fetch, first_duplicate};
use crate::json::{self, Each, Object, Skip, StoredError, StringPairs};
use crate::source::Source;

/// The contents of an index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// The shards' names, unique and sorted.
    pub shards: Vec<String>,
    /// Tensors in the order of the file, each with its shard's index in `shards`.
    pub tensors: Vec<(String, usize)>,
}

/// What is wrong with an index, or with its shards.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not JSON, or not in the form of an index.
    #[error("it is not the JSON of an index: {0}")]
    Json(serde_json::Error),
    /// It has no weight map, so it is not an index.
    #[error("it has no weight_map")]
    NoMap,
    /// A duplicate weight map.
    #[error("it has two weight_maps")]
    MapTwice,
    /// It names no tensor.
    #[error("its weight_map is empty")]
    Empty,
    /// A duplicate tensor.
    #[error("it names the tensor {0:?} twice")]
    Twice(String),
    /// A shard outside of the index's directory.
    #[error("it puts a tensor into {shard:?}, which {why}; shards lie in the directory of their index")]
    Escape {
        /// The shard's name.
        shard: String,
        /// Why the name is refused.
        why: &'static str,
    },
    /// A shard that does not exist, or cannot be opened.
    #[error("its shard {shard:?} is not available: {why}")]
    MissingShard {
        /// The shard's name.
        shard: String,
        /// Why it cannot be opened.
        why: Box<crate::Error>,
    },
    /// A tensor that is not in its shard.
    #[error("it puts the tensor {tensor:?} into {shard:?}, which does not hold it{}", found.as_ref().map(|f| format!("; {f:?} does")).unwrap_or_default())]
    NotInShard {
        /// The tensor.
        tensor: String,
        /// Its shard according to the index.
        shard: String,
        /// The shard that contains it.
        found: Option<String>,
    },
}

/// Reads and parses an index.
///
/// # Errors
/// When it cannot be read, or violates a rule.
pub fn read(file: &dyn Source) -> crate::Result<Index> {
    if file.bytes() > MAX_HEADER {
        return Err(crate::Error::too_long(file.name(), file.bytes(), MAX_HEADER));
    }
    let json = fetch(file, 0, file.bytes())?;
    parse(&json).map_err(|why| crate::Error::Index { file: file.name().into(), why })
}

/// Parses an index.
///
/// # Errors
/// When it violates a rule.
pub fn parse(json: &[u8]) -> Result<Index, Error> {
    let fault = StoredError::new();
    let mut raw = RawIndex { map: None, fault: &fault };
    let parsed = json::parse(json, Object("an index", &mut raw));
    let map = raw.map;
    fault.settle(parsed, Error::Json)?;
    let map = map.ok_or(Error::NoMap)?;
    if let Some(name) = first_duplicate(map.iter().map(|(name, _)| name.as_str())) {
        return Err(Error::Twice(name.into()));
    }
    let mut shards: Vec<String> = map.iter().map(|(_, shard)| shard.clone()).collect();
    shards.sort_unstable();
    shards.dedup();
    if shards.is_empty() {
        return Err(Error::Empty);
    }
    for shard in &shards {
        is_contained_path(shard).map_err(|why| Error::Escape { shard: shard.clone(), why })?;
    }
    let place = |shard| shards.partition_point(|s| *s < shard);
    let tensors = map.into_iter().map(|(name, shard)| (name, place(shard))).collect();
    Ok(Index { shards, tensors })
}

/// Checks that a name stays within its directory.
fn is_contained_path(name: &str) -> Result<(), &'static str> {
    if name.is_empty() {
        return Err("is not a name");
    } else if name.contains('\0') {
        return Err("holds a NUL");
    } else if name.starts_with('/') {
        return Err("is an absolute path");
    }
    for part in name.split('/') {
        match part {
            ".." => return Err("leads out of the directory"),
            "" | "." => return Err("is not a plain path"),
            _ => {}
        }
    }
    Ok(())
}

struct RawIndex<'f> {
    map: Option<Vec<(String, String)>>,
    fault: &'f StoredError<Error>,
}

impl<'de> Each<'de> for RawIndex<'_> {
    fn take<A: MapAccess<'de>>(&mut self, key: String, map: &mut A) -> Result<(), A::Error> {
        if key != "weight_map" {
            let Skip = map.next_value()?;
        } else if self.map.is_some() {
            return Err(self.fault.raise(Error::MapTwice));
        } else {
            let mut pairs = StringPairs::default();
            map.next_value_seed(Object("an object of file names", &mut pairs))?;
            self.map = Some(pairs.0);
        }
        Ok(())
    }
}
