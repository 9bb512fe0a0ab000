//! Files: their file system and drives, and whether they can be read past the page cache.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use onehop_files::live::{LiveFile, System};
use onehop_os::file::oddity;
use onehop_pci::Root;
use rustix::fs::{AtFlags, CWD, FileType, OFlags, StatxFlags};
use serde::{Deserialize, Serialize};

/// Facts about a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FileFacts {
    /// Its path.
    pub path: String,
    /// Why nothing more is known: it cannot be opened, or is not a regular file.
    pub trouble: Option<Trouble>,
    /// Its file system.
    pub fs: Option<String>,
    /// Its extents, if the file system reports physical ones; or why not.
    pub places: Option<Result<FileLayout, String>>,
    /// Whether it can be opened and read past the page cache.
    pub direct: Option<Result<(), String>>,
    /// The kernel's alignment for direct reads: memory, offset.
    pub direct_align: Option<(u32, u32)>,
}

/// Why a file cannot be examined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Trouble {
    /// It does not exist.
    Missing,
    /// Its kind, if it is not a regular file.
    Odd(String),
    /// Permission denied.
    Refused,
    /// Another error of the system.
    Failed(String),
}

/// The places of a file's bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FileLayout {
    /// Bytes of the file.
    pub bytes: u64,
    /// Number of extents.
    pub extents: usize,
    /// The drives: the kernel's name, and the PCI address if there is one.
    pub disks: Vec<(String, Option<String>)>,
    /// How reliable the places are.
    pub rung: String,
}

/// Examines a file, or returns what was recorded of it.
pub(super) fn ask(root: &Root, path: &Path) -> Option<FileFacts> {
    root.answer(&format!("file:{}", path.display()), || look(path))
}

/// The files of a record.
#[must_use]
pub fn recorded(root: &Root) -> Vec<std::path::PathBuf> {
    root.questions("file:").into_iter().map(Into::into).collect()
}

fn look(path: &Path) -> FileFacts {
    if let Some(trouble) = trouble(path) {
        return FileFacts {
            path: path.display().to_string(),
            trouble: Some(trouble),
            ..FileFacts::default()
        };
    }
    let live = LiveFile::open(path, &System::default());
    let (fs, places) = match live {
        Ok(file) => (Some(file.fs_name().to_owned()), Ok(places(&file))),
        Err(error) => (None, Err(error.to_string())),
    };
    FileFacts {
        path: path.display().to_string(),
        trouble: None,
        fs,
        places: Some(places),
        direct: Some(read_direct(path).map_err(|error| error.to_string())),
        direct_align: align(path),
    }
}

fn places(file: &LiveFile) -> FileLayout {
    FileLayout {
        bytes: file.size(),
        extents: file.extents().len(),
        disks: file.disks().iter().map(|disk| (disk.name.clone(), disk.pci.clone())).collect(),
        rung: file.rung().text().to_owned(),
    }
}

/// Only regular files are opened: opening a device may have side effects.
fn trouble(path: &Path) -> Option<Trouble> {
    let opened = std::fs::metadata(path).and_then(|about| match about.file_type() {
        kind if kind.is_file() => open(path, OFlags::empty()).map(|_| None),
        _ => Ok(Some(FileType::from_raw_mode(about.mode()))),
    });
    match opened {
        Ok(kind) => kind.map(|kind| Trouble::Odd(oddity(kind).into())),
        Err(error) => Some(match error.kind() {
            ErrorKind::NotFound => Trouble::Missing,
            ErrorKind::PermissionDenied => Trouble::Refused,
            _ => Trouble::Failed(error.to_string()),
        }),
    }
}

fn open(path: &Path, flags: OFlags) -> std::io::Result<File> {
    let flags = (flags | OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    File::options().read(true).custom_flags(flags).open(path)
}

/// Opening is not enough: some file systems open a file with O_DIRECT but refuse to read it.
fn read_direct(path: &Path) -> std::io::Result<()> {
    let file = open(path, OFlags::DIRECT)?;
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("it is no longer a regular file"));
    }
    let mut room = vec![0_u8; 2 * 4096];
    let start = room.as_ptr().align_offset(4096);
    rustix::io::pread(&file, &mut room[start..start + 4096], 0).map(drop).map_err(Into::into)
}

fn align(path: &Path) -> Option<(u32, u32)> {
    let about = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::DIOALIGN).ok()?;
    let reported = about.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && about.stx_dio_offset_align != 0;
    reported.then_some((about.stx_dio_mem_align, about.stx_dio_offset_align))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_cannot_be_examined_say_why() {
        let trouble = |path: &str| look(Path::new(path)).trouble;
        assert_eq!(trouble("/"), Some(Trouble::Odd("a directory".into())));
        assert_eq!(trouble("/dev/null"), Some(Trouble::Odd("a character device".into())));
        assert_eq!(trouble("/nobody/has/this"), Some(Trouble::Missing));
        assert!(matches!(trouble("/proc/version/x"), Some(Trouble::Failed(_))));
        let here = look(Path::new("/proc/self/exe"));
        assert!(here.trouble.is_none() && here.places.is_some() && here.direct.is_some());
    }
}
