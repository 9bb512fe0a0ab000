//! Writes files from memory into a tar.gz.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::error::{CliError, Result};

/// The top-level folder in the archive.
const FOLDER: &str = "onehop-report";

/// An archive in progress. Its file is created first, and removed if the archive is not completed.
pub(super) struct Archive<'a> {
    path: &'a Path,
    file: File,
    is_complete: bool,
}

impl<'a> Archive<'a> {
    /// Creates the file. An existing file is never overwritten.
    pub(super) fn create(path: &'a Path) -> Result<Self> {
        match File::options().write(true).create_new(true).open(path) {
            Ok(file) => Ok(Self { path, file, is_complete: false }),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Err(CliError::Usage(format!(
                "{} exists: name another file with --out, or remove it",
                path.display()
            ))),
            Err(e) => Err(CliError::file("creating", path, e)),
        }
    }

    /// Writes the archive; returns its size.
    pub(super) fn write(mut self, members: &[(String, Vec<u8>)]) -> Result<u64> {
        let failed = |e| CliError::file("writing", self.path, e);
        let bytes = pack(members).map_err(failed)?;
        self.file.write_all(&bytes).and_then(|()| self.file.sync_all()).map_err(failed)?;
        self.is_complete = true;
        Ok(bytes.len() as u64)
    }
}

impl Drop for Archive<'_> {
    fn drop(&mut self) {
        if !self.is_complete {
            let _ = std::fs::remove_file(self.path);
        }
    }
}

fn pack(members: &[(String, Vec<u8>)]) -> std::io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::best()));
    for (name, bytes) in members {
        // No owner and no time: they could identify the machine.
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        archive.append_data(&mut header, format!("{FOLDER}/{name}"), &bytes[..])?;
    }
    archive.into_inner()?.finish()
}
