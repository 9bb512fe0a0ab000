//! Output files. Every output path that a user names is checked here.

use std::ffi::OsStr;
use std::fs::{File, FileType};
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser};

use crate::error::{CliError, Result};

/// Parses the path of an output file. A bad one is refused before anything is opened or measured.
pub(crate) fn parser() -> impl TypedValueParser<Value = PathBuf> {
    parser_with(&[""])
}

/// Parses the common part of several output paths, which differ in their endings.
pub(crate) fn parser_with(endings: &'static [&'static str]) -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(move |path| {
        let refused = endings.iter().find_map(|ending| refusal(&with_ending(&path, ending)));
        refused.map_or(Ok(path), Err)
    })
}

/// Appends to the last component of a path.
pub(crate) fn with_ending(path: &Path, ending: impl AsRef<OsStr>) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Creates or truncates a file.
pub(crate) fn create(path: &Path) -> Result<File> {
    // Checked again: the file may have been created since the arguments were parsed.
    match refusal(path) {
        Some(why) => Err(CliError::Usage(why)),
        None => File::create(path).map_err(|e| CliError::file("creating", path, e)),
    }
}

/// Creates or replaces a file.
pub(crate) fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    create(path)?.write_all(bytes.as_ref()).map_err(|e| CliError::file("writing", path, e))
}

/// Why this path cannot be an output; `None` if it can. Character devices such as `/dev/null` can.
fn refusal(path: &Path) -> Option<String> {
    // These name descriptors that are already open: opening a pipe again through them does not wait for a reader.
    if ["/dev/stdout", "/dev/stderr", "/dev/fd", "/proc/self/fd"]
        .iter()
        .any(|folder| path.starts_with(folder))
    {
        return None;
    }
    // If the lookup fails, creating the file reports why.
    let kind = kind_of_special(path.metadata().ok()?.file_type())?;
    Some(format!("{} is {kind}; an output is written to a regular file", path.display()))
}

fn kind_of_special(kind: FileType) -> Option<&'static str> {
    match kind {
        // Opening a FIFO waits for a reader, perhaps forever.
        _ if kind.is_fifo() => Some("a FIFO"),
        _ if kind.is_socket() => Some("a socket"),
        _ if kind.is_block_device() => Some("a block device"),
        _ if kind.is_dir() => Some("a directory"),
        _ => None,
    }
}
