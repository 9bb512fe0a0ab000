//! Files that commands write. All outputs that a user names are checked here.

use std::ffi::OsStr;
use std::fs::{File, FileType};
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser};

use crate::error::{CliError, Result};

/// Parses the path of a file to write, and refuses a bad one before anything is opened or measured.
pub(crate) fn parser() -> impl TypedValueParser<Value = PathBuf> {
    parser_with(&[""])
}

/// Parses the start of the paths of files to write, which differ in their endings.
pub(crate) fn parser_with(endings: &'static [&'static str]) -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(move |path| {
        let refused = endings.iter().find_map(|ending| why_not(&with_ending(&path, ending)));
        refused.map_or(Ok(path), Err)
    })
}

/// A path with something appended to its last name.
pub(crate) fn with_ending(path: &Path, ending: impl AsRef<OsStr>) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Creates or truncates a file.
pub(crate) fn create(path: &Path) -> Result<File> {
    // Checked again: since the arguments were parsed, a minute may have passed.
    match why_not(path) {
        Some(why) => Err(CliError::Usage(why)),
        None => File::create(path).map_err(|e| CliError::file("creating", path, e)),
    }
}

/// Creates or replaces a file.
pub(crate) fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    create(path)?.write_all(bytes.as_ref()).map_err(|e| CliError::file("writing", path, e))
}

/// Why this path cannot be an output. A character device such as `/dev/null` can.
fn why_not(path: &Path) -> Option<String> {
    // These name what this process holds open already: opening a pipe of a shell once more does not wait for a reader.
    if ["/dev/stdout", "/dev/stderr", "/dev/fd", "/proc/self/fd"].iter().any(|held| path.starts_with(held)) {
        return None;
    }
    // What cannot be looked up cannot be created either, and says so itself.
    let kind = kind_of_special(path.metadata().ok()?.file_type())?;
    Some(format!("{} is {kind}; an output is written to a regular file", path.display()))
}

fn kind_of_special(kind: FileType) -> Option<&'static str> {
    match kind {
        // Opening it would wait for a reader, perhaps for ever.
        _ if kind.is_fifo() => Some("a FIFO"),
        _ if kind.is_socket() => Some("a socket"),
        _ if kind.is_block_device() => Some("a block device"),
        _ if kind.is_dir() => Some("a directory"),
        _ => None,
    }
}
