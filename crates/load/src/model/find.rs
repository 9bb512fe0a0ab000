//! Resolves a path to a model: a file, the parts of a split file, an index, or a directory with any of these.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::Error;
use crate::Result;
use crate::source::{Kind, Store};

/// The preferred index if there are several.
const INDEX: &str = "model.safetensors.index.json";
/// Most parts of a split file.
const MAX_PARTS: u64 = 99_999;
const SAFETENSORS: &str = ".safetensors";
const GGUF: &str = ".gguf";

/// What a path leads to.
pub(super) enum ModelPath {
    /// Complete files.
    Files(Vec<PathBuf>),
    /// An index, and the safetensors files next to it, which should all be its shards.
    Index(PathBuf, Vec<OsString>),
    /// A split file.
    Split(Split),
}

/// A split file with parts `BASE-00001-of-00003.gguf` and so on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Split {
    directory: PathBuf,
    base: String,
    ending: &'static str,
    /// Number of parts.
    pub count: u64,
}

impl Split {
    /// The path of part `no`, counted from 0.
    pub fn part(&self, no: u64) -> PathBuf {
        self.directory.join(self.name(no))
    }

    fn name(&self, no: u64) -> String {
        format!("{}-{:05}-of-{:05}{}", self.base, no + 1, self.count, self.ending)
    }

    /// The split file to which a part of this name belongs.
    fn of(directory: &Path, name: &OsStr, ending: &'static str) -> Option<Self> {
        let stem = name.to_str()?.strip_suffix(ending)?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (base, no) = rest.rsplit_once('-')?;
        let number = |text: &str| {
            let digits = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
            if digits { text.parse::<u64>().ok() } else { None }
        };
        let (no, count) = (number(no)?, number(count)?);
        let fits = (1..=count).contains(&no) && count <= MAX_PARTS;
        fits.then(|| Self { directory: directory.into(), base: base.into(), ending, count })
    }

    /// Checks that all of its parts are in the directory.
    fn complete(&self, names: &BTreeSet<OsString>) -> Result<()> {
        let Some(no) = (0..self.count).find(|no| !names.contains(OsStr::new(&self.name(*no)))) else {
            return Ok(());
        };
        let part = self.part(no).display().to_string();
        let why = Box::new(crate::Error::Open { file: part.clone(), source: Errno::NOENT.into() });
        Err(Error::MissingPart { part, count: self.count, why }.into())
    }
}

/// Resolves `path`.
pub(super) fn find(store: &dyn Store, path: &Path) -> Result<ModelPath> {
    if store.kind(path)? == Kind::Directory {
        return directory(store, path);
    }
    let name = path.file_name().unwrap_or_default();
    if ends(name, ".json") {
        return Ok(ModelPath::Index(path.into(), Vec::new()));
    }
    let beside = path.parent().unwrap_or(Path::new(""));
    Ok(Split::of(beside, name, GGUF).map_or_else(|| ModelPath::Files(vec![path.into()]), ModelPath::Split))
}

/// The index if there is one; otherwise the safetensors files, if their names suggest one model; otherwise one GGUF
/// file or the parts of one.
fn directory(store: &dyn Store, path: &Path) -> Result<ModelPath> {
    let shown = |name: &OsString| !name.as_encoded_bytes().starts_with(b".");
    let names: BTreeSet<OsString> = store.names(path)?.into_iter().filter(shown).collect();
    let ending = |end: &str| names.iter().filter(|n| ends(n, end)).cloned().collect::<Vec<_>>();
    let (indexes, shards) = (ending(".safetensors.index.json"), ending(SAFETENSORS));
    if names.contains(OsStr::new(INDEX)) {
        return Ok(ModelPath::Index(path.join(INDEX), Vec::new()));
    } else if let Some(index) = only(path, &indexes)? {
        return Ok(ModelPath::Index(path.join(index), shards));
    }
    if !shards.is_empty() {
        let groups = groups(path, &shards);
        if groups.len() > 1 {
            return Err(Error::apart(path, groups).into());
        }
        // Without an index, only the names show whether the files are complete.
        let splits: HashSet<_> =
            shards.iter().filter_map(|name| Split::of(path, name, SAFETENSORS)).collect();
        splits.iter().try_for_each(|split| split.complete(&names))?;
        return Ok(ModelPath::Files(shards.iter().map(|name| path.join(name)).collect()));
    }
    let mut ggufs = ending(GGUF);
    // The parts of one file count once.
    ggufs.dedup_by(|a, b| Split::of(path, a, GGUF).is_some_and(|a| Split::of(path, b, GGUF) == Some(a)));
    let name = only(path, &ggufs)?
        .ok_or_else(|| Error::Empty { directory: path.display().to_string(), instead: instead(&names) })?;
    Ok(Split::of(path, name, GGUF).map_or_else(|| ModelPath::Files(vec![path.join(name)]), ModelPath::Split))
}

/// The files of a directory that may be one model, each group as a shell pattern: the parts of a split file, or files
/// whose names differ only in numbers.
pub(super) fn groups(directory: &Path, names: &[OsString]) -> BTreeSet<String> {
    let mut groups = BTreeMap::<String, Vec<&OsString>>::new();
    for name in names {
        let pattern = match Split::of(directory, name, SAFETENSORS) {
            Some(Split { base, count, ending, .. }) => format!("{base}-*-of-{count:05}{ending}"),
            None => without_numbers(&name.to_string_lossy()),
        };
        groups.entry(pattern).or_default().push(name);
    }
    let shown = |(pattern, names): (String, Vec<&OsString>)| match &names[..] {
        [one] => one.display().to_string(),
        _ => pattern,
    };
    groups.into_iter().map(shown).collect()
}

/// A name with a `*` for each number.
fn without_numbers(name: &str) -> String {
    let mut pattern = String::with_capacity(name.len());
    for c in name.chars() {
        match c.is_ascii_digit() {
            true if pattern.ends_with('*') => {}
            true => pattern.push('*'),
            false => pattern.push(c),
        }
    }
    pattern
}

/// Whether a name, which may be any bytes, has this suffix.
fn ends(name: &OsStr, end: &str) -> bool {
    name.as_encoded_bytes().ends_with(end.as_bytes())
}

/// What a directory contains instead of a model.
fn instead(names: &BTreeSet<OsString>) -> String {
    let there = |name: &str| names.contains(OsStr::new(name));
    if there("model_index.json") {
        return "; its model_index.json lists several models: name a directory in it".into();
    } else if there("snapshots") && there("blobs") {
        return "; it is a cache of huggingface_hub: name a directory in its snapshots".into();
    }
    let torch = [".bin", ".pt", ".pth", ".ckpt"];
    let others = names.iter().find(|name| torch.iter().any(|end| ends(name, end)));
    others.map_or_else(String::new, |name| {
        format!("; {} and its like are not read: convert them to safetensors", name.display())
    })
}

/// The only one of these names, if there is any.
fn only<'a>(directory: &Path, names: &'a [OsString]) -> Result<Option<&'a OsStr>> {
    match names {
        [] => Ok(None),
        [one] => Ok(Some(one)),
        several => {
            let names = several.iter().take(8).map(|name| name.display().to_string()).collect();
            Err(Error::Several { directory: directory.display().to_string(), names }.into())
        }
    }
}
