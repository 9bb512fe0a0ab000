//! A model: its files and their tensors, opened from a file, an index, a directory, or the parts of a split file.

mod error;
mod find;

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use error::Error;

use crate::Result;
use crate::formats::index::Index;
use crate::formats::{Contents, Metadata, TensorInfo, gguf, index};
use crate::local::LocalFile;
use crate::source::{Source, Store};
use find::{ModelPath, Split};

/// A tensor, and the file that contains it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tensor {
    /// Its description.
    #[serde(flatten)]
    pub info: TensorInfo,
    /// Index of the file in [`Model::files`].
    pub file: usize,
}

/// All open files of a model, and all of its tensors.
pub struct Model {
    /// The files.
    pub files: Vec<Box<dyn Source>>,
    /// The metadata of each file.
    pub metadata: Vec<Metadata>,
    /// The tensors, by file and in the order of their bytes. Names are unique.
    pub tensors: Vec<Tensor>,
    /// The format of the files.
    pub format: &'static str,
}

impl Model {
    /// Opens the model at `paths` in `store`: files, directories, indexes.
    ///
    /// # Errors
    /// When a file is missing or refused, or the files are not one model. Opening never blocks on a device or FIFO.
    pub fn open(store: &dyn Store, paths: &[PathBuf]) -> Result<Self> {
        let mut parts = Parts::default();
        for path in paths {
            match find::find(store, path)? {
                ModelPath::Files(files) => parts.files(store, &files)?,
                ModelPath::Index(path, beside) => parts.index(store, &path, &beside)?,
                ModelPath::Split(split) => parts.split(store, &split)?,
            }
        }
        parts.model()
    }

    /// Total bytes of the tensors.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.info.bytes).sum()
    }

    /// Changes to the files since they were opened that did not affect their bytes, a line each.
    ///
    /// # Errors
    /// When a file's bytes have changed, or that can no longer be determined.
    pub fn still_same(&self) -> Result<Vec<String>> {
        let line = |file: &dyn Source| {
            let change = file.still_same()?;
            Ok(change
                .map(|change| format!("{}: {change}; what was loaded is what it held before", file.name())))
        };
        self.files.iter().filter_map(|file| line(&**file).transpose()).collect()
    }
}

/// A model under construction.
#[derive(Default)]
struct Parts {
    files: Vec<Box<dyn Source>>,
    contents: Vec<Contents>,
}

impl Parts {
    fn add(&mut self, file: Box<dyn Source>) -> Result<()> {
        self.contents.push(Contents::read(&*file)?);
        self.files.push(file);
        Ok(())
    }

    fn files(&mut self, store: &dyn Store, paths: &[PathBuf]) -> Result<()> {
        for path in paths {
            self.add(store.open(path)?)?;
            if let Some(Contents::Gguf(header)) = self.contents.last()
                && let Some(count @ 2..) = says(header, "split.count")
            {
                return Err(Error::LonePart { part: path.display().to_string(), count }.into());
            }
        }
        Ok(())
    }

    /// Adds the shards of an index and checks them against it. The files next to it, `beside`, must not be of another
    /// model.
    fn index(&mut self, store: &dyn Store, path: &Path, beside: &[OsString]) -> Result<()> {
        let index = index::read(&*store.open(path)?)?;
        let is_other =
            |name: &&OsString| !index.shards.iter().any(|shard| OsStr::new(shard) == name.as_os_str());
        let others: Vec<_> = beside.iter().filter(is_other).cloned().collect();
        if let (false, Some(directory), Some(name)) = (others.is_empty(), path.parent(), path.file_name()) {
            let choices = [name.display().to_string()].into_iter().chain(find::groups(directory, &others));
            return Err(Error::apart(directory, choices).into());
        }
        let refused = |why| crate::Error::Index { file: path.display().to_string(), why };
        let first = self.files.len();
        for shard in &index.shards {
            let missing =
                |why| refused(index::Error::MissingShard { shard: shard.clone(), why: Box::new(why) });
            self.add(store.open(&path.with_file_name(shard)).map_err(missing)?)?;
        }
        let shards = self.contents.get(first..).unwrap_or_default();
        agree(&index, shards).map_err(refused)
    }

    /// Adds the parts of a split GGUF file and checks what they state.
    fn split(&mut self, store: &dyn Store, split: &Split) -> Result<()> {
        let first = self.contents.len();
        for no in 0..split.count {
            let path = split.part(no);
            let file = store.open(&path).map_err(|why| Error::MissingPart {
                part: path.display().to_string(),
                count: split.count,
                why: Box::new(why),
            })?;
            self.add(file)?;
            let Some(Contents::Gguf(header)) = self.contents.last() else {
                return Err(Error::NoGguf { part: path.display().to_string() }.into());
            };
            let said = (says(header, "split.no"), says(header, "split.count"));
            if said != (Some(no), Some(split.count)) {
                let part = path.display().to_string();
                return Err(Error::WrongPart { part, no, count: split.count, said }.into());
            }
        }
        let parts = self.contents.get(first..).unwrap_or_default();
        let found = parts.iter().map(|part| part.tensors().len() as u64).sum();
        for (no, part) in (0..).zip(parts) {
            let Contents::Gguf(header) = part else { continue };
            if let Some(said) = header.value("split.tensors.count").filter(|n| n.whole() != Some(found)) {
                let (part, said) = (split.part(no).display().to_string(), said.brief());
                return Err(Error::TensorsMissing { part, said, found }.into());
            }
        }
        Ok(())
    }

    fn model(self) -> Result<Model> {
        let Self { files, contents } = self;
        let format = contents.first().map(Contents::format).ok_or(Error::Nothing)?;
        if let Some((file, other)) = files.iter().zip(&contents).find(|(_, c)| c.format() != format) {
            return Err(Error::Mixed { format, file: file.name().into(), other: other.format() }.into());
        }
        // The model may be replaced by another version, file by file, while its files are being opened.
        if files.len() > 1 {
            files.iter().filter_map(|file| file.local()).try_for_each(LocalFile::check_path)?;
        }
        let (mut tensors, mut metadata) = (Vec::new(), Vec::new());
        for (file, contents) in contents.into_iter().enumerate() {
            let (infos, beside) = contents.into_parts();
            tensors.extend(infos.into_iter().map(|info| Tensor { info, file }));
            metadata.push(beside);
        }
        let mut seen: HashMap<&str, usize> = HashMap::with_capacity(tensors.len());
        for tensor in &tensors {
            if let Some(other) = seen.insert(&tensor.info.name, tensor.file) {
                let name = |i: usize| files.get(i).map(|f| f.name().to_owned()).unwrap_or_default();
                let tensor_name = tensor.info.name.clone();
                return Err(
                    Error::TwoFiles { tensor: tensor_name, files: [name(other), name(tensor.file)] }.into()
                );
            }
        }
        Ok(Model { files, metadata, tensors, format })
    }
}

/// Checks that every tensor is in the shard that the index names.
fn agree(index: &Index, shards: &[Contents]) -> Result<(), index::Error> {
    let mut held = HashSet::new();
    for (i, contents) in shards.iter().enumerate() {
        held.extend(contents.tensors().iter().map(|t| (t.name.as_str(), i)));
    }
    let holds = |tensor: &str, i: usize| held.contains(&(tensor, i));
    let Some((tensor, i)) = index.tensors.iter().find(|(tensor, i)| !holds(tensor, *i)) else {
        return Ok(());
    };
    let shard = |i: usize| index.shards.get(i).cloned().unwrap_or_default();
    let found = (0..shards.len()).find(|j| holds(tensor, *j)).map(shard);
    Err(index::Error::NotInShard { tensor: tensor.clone(), shard: shard(*i), found })
}

/// A number that a part of a split file states.
fn says(header: &gguf::Header, key: &str) -> Option<u64> {
    header.value(key).and_then(gguf::Value::whole)
}
