//! Files: their file system and drives, and whether O_DIRECT reads work.

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
    /// Why it cannot be examined: it cannot be opened, or is not a regular file.
    pub trouble: Option<Trouble>,
    /// Its file system.
    pub fs: Option<String>,
    /// Its layout, if the file system reports physical extents; or why not.
    #[serde(rename = "places")]
    pub layout: Option<Result<FileLayout, String>>,
    /// Whether it can be opened and read with O_DIRECT.
    pub direct: Option<Result<(), String>>,
    /// The kernel's alignment for direct reads: memory, offset.
    pub direct_align: Option<(u32, u32)>,
}

/// Why a file cannot be examined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Trouble {
    /// It does not exist.
    Missing,
    /// It is not a regular file; this is its kind.
    #[serde(rename = "Odd")]
    NotRegular(String),
    /// Permission denied.
    Refused,
    /// Another error of the system.
    Failed(String),
}

/// Where a file's bytes are stored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FileLayout {
    /// File size in bytes.
    pub bytes: u64,
    /// Number of extents.
    pub extents: usize,
    /// The drives: the kernel's name, and the PCI address if there is one.
    pub disks: Vec<(String, Option<String>)>,
    /// How reliable the extents are.
    pub rung: String,
}

/// Examines a file, or returns its recorded facts.
pub(super) fn query(root: &Root, path: &Path) -> Option<FileFacts> {
    root.answer(&format!("file:{}", path.display()), || inspect(path))
}

/// The files whose facts a record contains.
#[must_use]
pub fn recorded(root: &Root) -> Vec<std::path::PathBuf> {
    root.questions("file:").into_iter().map(Into::into).collect()
}

fn inspect(path: &Path) -> FileFacts {
    if let Some(trouble) = trouble(path) {
        return FileFacts {
            path: path.display().to_string(),
            trouble: Some(trouble),
            ..FileFacts::default()
        };
    }
    let live = LiveFile::open(path, &System::default());
    let (fs, layout) = match live {
        Ok(file) => (Some(file.fs_name().to_owned()), Ok(layout(&file))),
        Err(error) => (None, Err(error.to_string())),
    };
    FileFacts {
        path: path.display().to_string(),
        trouble: None,
        fs,
        layout: Some(layout),
        direct: Some(read_direct(path).map_err(|error| error.to_string())),
        direct_align: align(path),
    }
}

fn layout(file: &LiveFile) -> FileLayout {
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
        Ok(kind) => kind.map(|kind| Trouble::NotRegular(oddity(kind).into())),
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

/// Reads one page with O_DIRECT. Some file systems accept O_DIRECT at open but fail the read.
fn read_direct(path: &Path) -> std::io::Result<()> {
    let file = open(path, OFlags::DIRECT)?;
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("it is no longer a regular file"));
    }
    let mut buffer = vec![0_u8; 2 * 4096];
    let start = buffer.as_ptr().align_offset(4096);
    rustix::io::pread(&file, &mut buffer[start..start + 4096], 0).map(drop).map_err(Into::into)
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
    fn files_that_cannot_be_examined_have_a_reason() {
        let trouble = |path: &str| inspect(Path::new(path)).trouble;
        assert_eq!(trouble("/"), Some(Trouble::NotRegular("a directory".into())));
        assert_eq!(trouble("/dev/null"), Some(Trouble::NotRegular("a character device".into())));
        assert_eq!(trouble("/nobody/has/this"), Some(Trouble::Missing));
        assert!(matches!(trouble("/proc/version/x"), Some(Trouble::Failed(_))));
        let here = inspect(Path::new("/proc/self/exe"));
        assert!(here.trouble.is_none() && here.layout.is_some() && here.direct.is_some());
    }
}
