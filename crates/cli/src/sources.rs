//! The stores that named files are read from: this machine, or servers.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use onehop_load::{Local, Store};

use crate::error::{CliError, Result};
use crate::stop::StopFlag;

/// The store for these paths and addresses.
pub(crate) fn store(paths: &[PathBuf], stop: &StopFlag) -> Result<Box<dyn Store>> {
    match paths.iter().find(|path| is_address(path)) {
        None => Ok(Box::new(Local)),
        Some(first) => remote_store(first, stop),
    }
}

/// Whether this is an address rather than a path.
fn is_address(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.contains("://"))
}

#[cfg(not(feature = "remote"))]
fn remote_store(first: &Path, _: &StopFlag) -> Result<Box<dyn Store>> {
    Err(CliError::not_possible(
        format!("loading {}", first.display()),
        "this build cannot read from servers",
        "Build it with --features remote",
    ))
}

#[cfg(feature = "remote")]
fn remote_store(_: &Path, stop: &StopFlag) -> Result<Box<dyn Store>> {
    use onehop_load::remote::{Config, Remote};

    let s3 = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.to_str().filter(|name| name.starts_with("AWS_"))?.to_ascii_lowercase();
        Some((name, value.to_str()?.to_owned()))
    });
    let remote = Remote::new(Config { s3: s3.collect(), stopped: stop.shared(), ..Config::default() })?;
    Ok(Box::new(both::LocalOrRemote(remote)))
}

#[cfg(feature = "remote")]
mod both {
    use std::ffi::OsString;
    use std::path::Path;

    use onehop_load::remote::Remote;
    use onehop_load::{Kind, Local, Result, Source, Store};

    /// Reads paths from this machine, and addresses from servers.
    pub(super) struct LocalOrRemote(pub(super) Remote);

    impl LocalOrRemote {
        fn store(&self, path: &Path) -> &dyn Store {
            if super::is_address(path) { &self.0 } else { &Local }
        }
    }

    impl Store for LocalOrRemote {
        fn kind(&self, path: &Path) -> Result<Kind> {
            self.store(path).kind(path)
        }

        fn names(&self, path: &Path) -> Result<Vec<OsString>> {
            self.store(path).names(path)
        }

        fn open(&self, path: &Path) -> Result<Box<dyn Source>> {
            self.store(path).open(path)
        }
    }
}

/// Refuses an output file that is also an input: a file that is read, or the image of the drive.
pub(crate) fn refuse_overwrite(out: &Path, read: &Path) -> Result<()> {
    let identity = |path: &Path| path.metadata().ok().map(|meta| (meta.dev(), meta.ino()));
    if identity(out).is_some() && identity(out) == identity(read) {
        return Err(CliError::Usage(format!(
            "{} is the file that is read, {}",
            out.display(),
            read.display()
        )));
    }
    Ok(())
}
