//! Files that hold secrets, and random bytes.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::rand::{GetRandomFlags, getrandom};

/// Reads a file of at most `most` bytes that no other user can read or change.
///
/// # Errors
/// Why it cannot be used: it does not exist, is not a regular file, is longer, or others may use it.
pub fn read_secret(path: &Path, most: u64) -> Result<Vec<u8>, String> {
    let failed = |error: std::io::Error| error.to_string();
    // Do not wait for a pipe or a terminal of this name.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let about = file.metadata().map_err(failed)?;
    if !about.is_file() {
        return Err("it is not a file".into());
    }
    if about.uid() != rustix::process::geteuid().as_raw() && about.uid() != 0 {
        return Err(format!("it belongs to user {}, who could change it; it has to be ours", about.uid()));
    }
    if about.mode() & 0o077 != 0 {
        let mode = about.mode() & 0o777;
        return Err(format!("its mode is {mode:o}, so that others may use it: chmod 600"));
    }
    if about.len() > most {
        return Err(format!("it is longer than {most} bytes"));
    }
    let mut secret = Vec::new();
    file.take(most).read_to_end(&mut secret).map_err(failed)?;
    Ok(secret)
}

/// Fills a buffer with random bytes.
///
/// # Errors
/// When the system has none.
pub fn fill_random(bytes: &mut [u8]) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(())
}
