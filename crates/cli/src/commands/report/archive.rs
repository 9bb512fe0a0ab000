//! A tar.gz of files that are in memory.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::error::{CliError, Result};

/// The folder that it is unpacked to.
const FOLDER: &str = "onehop-report";

/// An archive to write. Its file exists from the start, and is removed if the archive is not finished.
pub(super) struct Archive<'a> {
    path: &'a Path,
    file: File,
    is_whole: bool,
}

impl<'a> Archive<'a> {
    /// Creates the file. An existing one is never overwritten.
    pub(super) fn create(path: &'a Path) -> Result<Self> {
        match File::options().write(true).create_new(true).open(path) {
            Ok(file) => Ok(Self { path, file, is_whole: false }),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Err(CliError::Usage(format!(
                "{} exists: name another file with --out, or remove it",
                path.display()
            ))),
            Err(e) => Err(CliError::file("creating", path, e)),
        }
    }

    /// Writes it; its size.
    pub(super) fn write(mut self, members: &[(String, Vec<u8>)]) -> Result<u64> {
        let failed = |e| CliError::file("writing", self.path, e);
        let bytes = pack(members).map_err(failed)?;
        self.file.write_all(&bytes).and_then(|()| self.file.sync_all()).map_err(failed)?;
        self.is_whole = true;
        Ok(bytes.len() as u64)
    }
}

impl Drop for Archive<'_> {
    fn drop(&mut self) {
        if !self.is_whole {
            let _ = std::fs::remove_file(self.path);
        }
    }
}

fn pack(members: &[(String, Vec<u8>)]) -> std::io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::best()));
    for (name, bytes) in members {
        // Neither owner nor time: they say whose machine it was, and where.
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
