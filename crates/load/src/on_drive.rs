//! Files on a drive that onehop drives: those of its file system, and those of extent maps.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use onehop_files::{Blocks, DriveId, Extent, ExtentMap, File, FileKind, Volume, read_extents};

use crate::error::{Error, Result};
use crate::source::{Kind, Source, Store};

/// The file system of a drive.
pub struct OnVolume {
    volume: Volume,
    drive: Arc<dyn Blocks>,
}

impl OnVolume {
    /// Wraps a volume on this drive.
    #[must_use]
    pub fn new(volume: Volume, drive: Arc<dyn Blocks>) -> Self {
        Self { volume, drive }
    }

    /// The extent map of a file. Reads the file once, for its checksums.
    ///
    /// # Errors
    /// When it does not exist, or cannot be read.
    pub fn map(&self, path: &Path, drive: DriveId) -> Result<ExtentMap> {
        let file = self.lookup(path)?;
        ExtentMap::of_volume(&self.volume, &file, path, drive).map_err(|why| failed(path, why))
    }

    fn lookup(&self, path: &Path) -> Result<File> {
        self.volume.lookup(path.as_os_str().as_bytes()).map_err(|why| failed(path, why))
    }
}

impl Store for OnVolume {
    fn kind(&self, path: &Path) -> Result<Kind> {
        match self.lookup(path)?.kind {
            FileKind::File => Ok(Kind::File),
            FileKind::Directory => Ok(Kind::Directory),
            other => Err(Error::NotRegular { file: path.display().to_string(), what: other.name() }),
        }
    }

    fn names(&self, path: &Path) -> Result<Vec<OsString>> {
        let entries = self.volume.list(&self.lookup(path)?).map_err(|why| failed(path, why))?;
        Ok(entries.into_iter().map(|entry| OsString::from_vec(entry.name)).collect())
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Source>> {
        let file = self.lookup(path)?;
        if file.kind != FileKind::File {
            return Err(Error::NotRegular { file: path.display().to_string(), what: file.kind.name() });
        }
        let extents = self.volume.extents(&file).map_err(|why| failed(path, why))?.to_vec();
        let (name, drive) = (path.display().to_string(), self.drive.clone());
        Ok(Box::new(DriveFile { name, bytes: file.size(), extents, drive }))
    }
}

/// The files of extent maps, in the directories where they were mapped.
pub struct OnMaps {
    files: BTreeMap<PathBuf, ExtentMap>,
    drive: Arc<dyn Blocks>,
}

impl OnMaps {
    /// Wraps maps of files on this drive.
    ///
    /// # Errors
    /// When two of them have the same path.
    pub fn new(maps: Vec<ExtentMap>, drive: Arc<dyn Blocks>) -> Result<Self> {
        let mut files = BTreeMap::new();
        for map in maps {
            let file = map.file.path.clone();
            if files.insert(file.clone(), map).is_some() {
                return Err(Error::MappedTwice { file: file.display().to_string() });
            }
        }
        Ok(Self { files, drive })
    }

    /// What can be loaded: the only file, or the directories of the files.
    #[must_use]
    pub fn roots(&self) -> Vec<PathBuf> {
        if self.files.len() == 1 {
            return self.files.keys().cloned().collect();
        }
        directories(self.files.keys())
    }
}

/// The directories of these files. The shards of an index may be in directories below its own; those are not listed.
fn directories<'a>(files: impl Iterator<Item = &'a PathBuf>) -> Vec<PathBuf> {
    let all: BTreeSet<&Path> = files.filter_map(|path| path.parent()).collect();
    let below = |root: &Path| root.ancestors().skip(1).any(|above| all.contains(above));
    all.iter().filter(|root| !below(root)).map(|root| root.to_path_buf()).collect()
}

impl Store for OnMaps {
    fn kind(&self, path: &Path) -> Result<Kind> {
        let within = || self.files.keys().any(|file| file.parent() == Some(path));
        match self.files.contains_key(path) {
            true => Ok(Kind::File),
            false if within() => Ok(Kind::Directory),
            false => Err(Error::NotMapped { file: path.display().to_string() }),
        }
    }

    fn names(&self, path: &Path) -> Result<Vec<OsString>> {
        let within = self.files.keys().filter(|file| file.parent() == Some(path));
        Ok(within.filter_map(|file| Some(file.file_name()?.to_owned())).collect())
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Source>> {
        let not_there = || Error::NotMapped { file: path.display().to_string() };
        let map = self.files.get(path).ok_or_else(not_there)?;
        let extents = map.extents().map_err(|why| failed(path, why))?;
        let (name, drive) = (path.display().to_string(), self.drive.clone());
        Ok(Box::new(DriveFile { name, bytes: map.file.id.len, extents, drive }))
    }
}

/// A file on a drive, with its extents.
struct DriveFile {
    name: String,
    bytes: u64,
    extents: Vec<Extent>,
    drive: Arc<dyn Blocks>,
}

impl Source for DriveFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let (file, bytes) = (|| self.name.clone(), buffer.len() as u64);
        match read_extents(&*self.drive, &self.extents, offset, buffer) {
            Ok(got) if got == buffer.len() => Ok(()),
            Ok(_) => Err(Error::Ended { file: file(), offset, bytes, length: self.bytes }),
            Err(why) => Err(Error::OnDrive { file: file(), why }),
        }
    }

    fn extents(&self) -> Option<&[Extent]> {
        Some(&self.extents)
    }
}

fn failed(path: &Path, why: onehop_files::Error) -> Error {
    Error::OnDrive { file: path.display().to_string(), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_directory_once_and_none_below_another() {
        let files = ["/m/a", "/m/b/x", "/m/c", "/n/o/p/q", "/n/o/r", "/mm/s"].map(PathBuf::from);
        let roots = directories(files.iter());
        assert_eq!(roots, ["/m", "/mm", "/n/o"].map(PathBuf::from));
        assert_eq!(directories([PathBuf::from("/a"), "/b/c".into()].iter()), [PathBuf::from("/")]);
    }
}
