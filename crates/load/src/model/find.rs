//! What a path means: a file, the parts of a split file, an index, or whatever of these a directory holds.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::Error;
use crate::Result;
use crate::source::{Kind, Store};

/// The index that wins where there are several.
const INDEX: &str = "model.safetensors.index.json";
/// Most parts of a split file.
const MAX_PARTS: u64 = 99_999;

/// What there is at a path.
pub(super) enum Found {
    /// Files that are whole.
    Files(Vec<PathBuf>),
    /// An index of shards beside it.
    Index(PathBuf),
    /// A file that was split.
    Split(Split),
}

/// The parts `BASE-00001-of-00003.gguf` and so on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Split {
    directory: PathBuf,
    base: String,
    /// How many parts there are.
    pub count: u64,
}

impl Split {
    /// The path of part `no`, from 0.
    pub fn part(&self, no: u64) -> PathBuf {
        self.directory.join(format!("{}-{:05}-of-{:05}.gguf", self.base, no + 1, self.count))
    }

    /// The split file that a part of this name belongs to.
    fn of(directory: &Path, name: &str) -> Option<Self> {
        let stem = name.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (base, no) = rest.rsplit_once('-')?;
        let number = |text: &str| {
            let digits = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
            if digits { text.parse::<u64>().ok() } else { None }
        };
        let (no, count) = (number(no)?, number(count)?);
        let fits = (1..=count).contains(&no) && count <= MAX_PARTS;
        fits.then(|| Self { directory: directory.into(), base: base.into(), count })
    }
}

/// Finds out what `path` means.
pub(super) fn find(store: &dyn Store, path: &Path) -> Result<Found> {
    if store.kind(path)? == Kind::Directory {
        return directory(store, path);
    }
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    if name.ends_with(".json") {
        return Ok(Found::Index(path.into()));
    }
    let beside = path.parent().unwrap_or(Path::new(""));
    Ok(Split::of(beside, name).map_or_else(|| Found::Files(vec![path.into()]), Found::Split))
}

/// The index if there is one; else all safetensors files; else one GGUF file or the parts of one.
fn directory(store: &dyn Store, path: &Path) -> Result<Found> {
    let names: BTreeSet<String> = store.names(path)?.into_iter().filter(|n| !n.starts_with('.')).collect();
    let ending = |end: &str| names.iter().filter(|n| n.ends_with(end)).cloned().collect::<Vec<_>>();
    let indexes = ending(".safetensors.index.json");
    if names.contains(INDEX) {
        return Ok(Found::Index(path.join(INDEX)));
    } else if let Some(index) = only(path, &indexes)? {
        return Ok(Found::Index(path.join(index)));
    }
    let shards = ending(".safetensors");
    if !shards.is_empty() {
        return Ok(Found::Files(shards.iter().map(|name| path.join(name)).collect()));
    }
    let mut ggufs = ending(".gguf");
    // The parts of one file count as one.
    ggufs.dedup_by(|a, b| Split::of(path, a).is_some_and(|a| Split::of(path, b) == Some(a)));
    let name = only(path, &ggufs)?.ok_or_else(|| Error::Empty { directory: path.display().to_string() })?;
    Ok(Split::of(path, name).map_or_else(|| Found::Files(vec![path.join(name)]), Found::Split))
}

/// The only one of these names, if there is any.
fn only<'a>(directory: &Path, names: &'a [String]) -> Result<Option<&'a str>> {
    match names {
        [] => Ok(None),
        [one] => Ok(Some(one)),
        several => {
            let names = several.iter().take(8).cloned().collect();
            Err(Error::Several { directory: directory.display().to_string(), names }.into())
        }
    }
}
