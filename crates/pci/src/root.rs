//! The source of the system's files: this machine, a folder, or a record. Every read goes through here, so that it can
//! be recorded and replayed elsewhere.

use std::fs;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::record::{Content, Record};
use crate::{Error, Result};

/// Upper limit of a small file.
const SMALL: usize = 64 << 10;
/// Upper limit of names in a folder.
const MAX_NAMES: usize = 1 << 16;
/// The name of a record within a folder.
const RECORD_NAME: &str = "system.json";
/// Upper limit of a record.
const MAX_RECORD: usize = 64 << 20;

/// The system's files. Paths start with `/`, as on the described machine.
pub struct Root {
    source: RootSource,
    log: Option<Mutex<Record>>,
}

enum RootSource {
    Folder(PathBuf),
    Record(Record),
}

impl Root {
    /// This machine.
    #[must_use]
    pub fn here() -> Self {
        Self::below("/")
    }

    /// Files below a folder, which stands for `/`.
    #[must_use]
    pub fn below(folder: impl Into<PathBuf>) -> Self {
        Self { source: RootSource::Folder(folder.into()), log: None }
    }

    /// A record.
    #[must_use]
    pub fn recorded(record: Record) -> Self {
        Self { source: RootSource::Record(record), log: None }
    }

    /// Opens a recorded system: a record's file, a folder with a `system.json`, or a folder that contains `sys`.
    ///
    /// # Errors
    /// When it is none of these.
    pub fn open(path: &Path) -> Result<Self> {
        let shown = path.display().to_string();
        let about = fs::metadata(path).map_err(|e| Error::io(&shown, &e))?;
        let file = if about.is_dir() { path.join(RECORD_NAME) } else { path.to_owned() };
        if about.is_dir() && !file.exists() {
            if path.join("sys").is_dir() {
                return Ok(Self::below(path));
            }
            let why = format!("it holds neither {RECORD_NAME} nor a folder named sys");
            return Err(Error::NoRecord { name: shown, why });
        }
        let name = file.display().to_string();
        let bytes = read(&file, MAX_RECORD).map_err(|e| Error::io(&name, &e))?;
        let record = Record::parse(&bytes).map_err(|why| Error::NoRecord { name, why })?;
        Ok(Self::recorded(record))
    }

    /// Starts recording everything that is read.
    #[must_use]
    pub fn recording(self) -> Self {
        Self { log: Some(Mutex::new(Record::new())), ..self }
    }

    /// The record so far; `None` if nothing is recorded.
    #[must_use]
    pub fn record(&self) -> Option<Record> {
        self.log.as_ref().map(|log| lock(log).clone())
    }

    /// The folder that stands for `/`; `None` for a record, which cannot be written to.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        match &self.source {
            RootSource::Folder(folder) => Some(folder),
            RootSource::Record(_) => None,
        }
    }

    /// Whether this is the running machine, which answers more than files.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.folder() == Some(Path::new("/"))
    }

    /// A record's description.
    #[must_use]
    pub fn about(&self) -> Option<&str> {
        match &self.source {
            RootSource::Folder(_) => None,
            RootSource::Record(record) => Some(&record.about),
        }
    }

    /// The bytes of a file.
    ///
    /// # Errors
    /// When it does not exist, or cannot be read.
    pub fn bytes(&self, path: &str, most: usize) -> Result<Vec<u8>> {
        let found = match &self.source {
            RootSource::Folder(folder) => read(&at(folder, path)?, most).map_err(|e| Error::io(path, &e)),
            RootSource::Record(record) => record.bytes(path, most),
        };
        self.note(|log| log.put(path, &found));
        found
    }

    /// The text of a small file, trimmed.
    ///
    /// # Errors
    /// As for [`Self::bytes`].
    pub fn text(&self, path: &str) -> Result<String> {
        let bytes = self.bytes(path, SMALL)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// What `make` extracts from a long file. Only the result is recorded.
    ///
    /// # Errors
    /// When the file cannot be read, or `make` returns nothing.
    pub fn digest(
        &self,
        path: &str,
        most: usize,
        make: impl FnOnce(&[u8]) -> std::result::Result<String, String>,
    ) -> Result<String> {
        let found = match &self.source {
            RootSource::Record(record) => {
                record.bytes(path, most).map(|b| String::from_utf8_lossy(&b).into_owned())
            }
            RootSource::Folder(folder) => {
                let bytes = read(&at(folder, path)?, most).map_err(|e| Error::io(path, &e));
                let made = |bytes: Vec<u8>| {
                    make(&bytes).map_err(|why| Error::Unreadable { path: path.to_owned(), why })
                };
                bytes.and_then(made)
            }
        };
        self.note(|log| log.put(path, &found.clone().map(String::into_bytes)));
        found
    }

    /// The names in a folder, sorted.
    ///
    /// # Errors
    /// When it does not exist, or cannot be read.
    pub fn list(&self, path: &str) -> Result<Vec<String>> {
        let found = match &self.source {
            RootSource::Folder(folder) => names(&at(folder, path)?).map_err(|e| Error::io(path, &e)),
            RootSource::Record(record) => record.list(path),
        };
        self.note(|log| log.put_list(path, &found));
        found
    }

    /// The target of a symbolic link, as written.
    ///
    /// # Errors
    /// When there is no such link.
    pub fn link(&self, path: &str) -> Result<String> {
        let found = match &self.source {
            RootSource::Folder(folder) => fs::read_link(at(folder, path)?)
                .map(|target| target.to_string_lossy().into_owned())
                .map_err(|e| Error::io(path, &e)),
            RootSource::Record(record) => record.link(path),
        };
        self.note(|log| log.put_link(path, &found));
        found
    }

    /// The last component of a symbolic link's target; `None` if there is no link.
    #[must_use]
    pub fn link_name(&self, path: &str) -> Option<String> {
        let target = self.link(path).ok()?;
        target.rsplit('/').find(|part| !part.is_empty()).map(str::to_owned)
    }

    /// Whether the path exists.
    #[must_use]
    pub fn exists(&self, path: &str) -> bool {
        let found = match &self.source {
            RootSource::Folder(folder) => at(folder, path).is_ok_and(|at| at.exists()),
            RootSource::Record(record) => record.exists(path),
        };
        self.note(|log| log.put_presence(path, found));
        found
    }

    /// The machine's answer to a query that is not a file: asked here, or recorded. `None` if neither is possible.
    pub fn answer<T: Serialize + DeserializeOwned>(
        &self,
        question: &str,
        ask: impl FnOnce() -> T,
    ) -> Option<T> {
        let found = match &self.source {
            RootSource::Folder(_) => self.is_here().then(ask),
            RootSource::Record(record) => {
                record.answers.get(question).and_then(|value| serde_json::from_value(value.clone()).ok())
            }
        };
        if let Some(value) = found.as_ref().and_then(|found| serde_json::to_value(found).ok()) {
            self.note(|log| {
                log.answers.insert(question.to_owned(), value);
            });
        }
        found
    }

    /// The recorded queries with this prefix, without the prefix.
    #[must_use]
    pub fn questions(&self, start: &str) -> Vec<String> {
        let RootSource::Record(record) = &self.source else { return Vec::new() };
        record.answers.keys().filter_map(|question| question.strip_prefix(start)).map(str::to_owned).collect()
    }

    /// The name of a vendor or device (`10de`, `10de:2204`): looked up in this machine's list of PCI names, or
    /// recorded.
    pub(crate) fn named(&self, id: &str, look: impl FnOnce() -> Option<String>) -> Option<String> {
        let found = match &self.source {
            RootSource::Record(record) => record.names.get(id).cloned().or_else(look),
            RootSource::Folder(_) => look(),
        };
        if let Some(name) = &found {
            self.note(|log| {
                log.names.insert(id.to_owned(), name.clone());
            });
        }
        found
    }

    /// Reads a long file without recording it.
    pub(crate) fn unrecorded(&self, path: &str, most: usize) -> Option<Vec<u8>> {
        read(&at(self.folder()?, path).ok()?, most).ok()
    }

    fn note(&self, f: impl FnOnce(&mut Record)) {
        if let Some(log) = &self.log {
            f(&mut lock(log));
        }
    }
}

fn lock(log: &Mutex<Record>) -> MutexGuard<'_, Record> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The place of a file. Names come from the described machine and must not lead out of its folder.
fn at(folder: &Path, path: &str) -> Result<PathBuf> {
    if path.split('/').any(|part| part == "..") || path.contains('\0') {
        return Err(Error::garbage("a name in the system's files", path, "plain path"));
    }
    Ok(folder.join(path.trim_start_matches('/')))
}

/// Reads up to `most` bytes. Does not wait for a pipe or device in the place of a file.
fn read(path: &Path, most: usize) -> std::io::Result<Vec<u8>> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = fs::File::options().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(most as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn names(path: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)?.take(MAX_NAMES) {
        if let Ok(name) = entry?.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Maps "not found" to the default value.
pub(crate) fn if_there<T: Default>(found: Result<T>) -> Result<T> {
    match found {
        Err(error) if error.is_missing() => Ok(T::default()),
        found => found,
    }
}

/// The folder that contains a path.
#[must_use]
pub fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(front, _)| front)
}

/// A link's target relative to the link's folder: `/a/b` and `../c` make `/a/c`.
#[must_use]
pub fn resolve(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> = if target.starts_with('/') { Vec::new() } else { folder.split('/').collect() };
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    format!("/{}", parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/"))
}

impl Content {
    pub(crate) fn of(found: &Result<Vec<u8>>) -> Option<Self> {
        match found {
            Ok(bytes) => Some(Self::from_bytes(bytes)),
            Err(Error::Missing { .. }) => None,
            Err(Error::Denied { .. }) => Some(Self::Denied { denied: true }),
            Err(error) => Some(Self::Failed { failed: error.to_string() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_by_their_text() {
        assert_eq!(
            resolve("/sys/bus/pci/devices", "../../../devices/pci0000:00/0000:00:01.0"),
            "/sys/devices/pci0000:00/0000:00:01.0"
        );
        assert_eq!(resolve("/a", "/b/./c"), "/b/c");
        assert_eq!(resolve("/a", "../../../b"), "/b");
        assert_eq!(parent("/a/b/c"), "/a/b");
    }

    #[test]
    fn what_was_recorded_reads_as_it_did() {
        let folder = std::env::temp_dir().join(format!("onehop-pci-root-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("sys/x")).unwrap();
        fs::write(folder.join("sys/x/a"), " 12\n").unwrap();
        fs::write(folder.join("sys/x/config"), [1, 0, 0, 0xff]).unwrap();
        std::os::unix::fs::symlink("../x/a", folder.join("sys/x/l")).unwrap();
        let look = |root: &Root| {
            (
                root.text("/sys/x/a"),
                root.bytes("/sys/x/config", 3),
                root.link("/sys/x/l"),
                root.list("/sys/x"),
                (root.exists("/sys/x"), root.exists("/sys/y")),
                (root.text("/sys/y"), root.text("/sys/../etc/passwd"), root.text("/sys/x")),
                root.answer("q", || 7_u32),
            )
        };
        let live = Root::below(&folder).recording();
        let mut seen = look(&live);
        assert_eq!((seen.0.as_deref(), seen.6), (Ok("12"), None));
        let mut record = live.record().unwrap();
        record.answers.insert("q".into(), 8.into());
        let again = Root::recorded(Record::parse(&record.to_bytes()).unwrap());
        seen.6 = Some(8);
        // The text of a recorded error comes from the record.
        let replayed = look(&again);
        assert_eq!(
            (&replayed.0, &replayed.1, &replayed.2, &replayed.3),
            (&seen.0, &seen.1, &seen.2, &seen.3)
        );
        assert_eq!((replayed.4, replayed.6), (seen.4, seen.6));
        assert!(replayed.5.0.unwrap_err().is_missing() && replayed.5.1.is_err() && replayed.5.2.is_err());
        fs::remove_dir_all(folder).unwrap();
    }
}
