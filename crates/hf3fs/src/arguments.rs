//! Checks of the arguments that callers pass.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use onehop_usrbio::{Error, Id, Result};

use crate::types::PATH_BYTES;

/// An error for an invalid argument.
pub fn invalid(what: impl Into<String>) -> Error {
    Error::Argument(what.into())
}

/// A path.
///
/// # Errors
/// When it is null or empty.
///
/// # Safety
/// Null, or a string that lives as long as the result.
pub unsafe fn path<'a>(at: *const c_char) -> Result<&'a Path> {
    if at.is_null() {
        return Err(invalid("a path is a null pointer"));
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(at) }.to_bytes();
    if bytes.is_empty() {
        return Err(invalid("a path is empty"));
    }
    Ok(Path::new(OsStr::from_bytes(bytes)))
}

/// A mount point, and a copy that fits a structure.
///
/// # Errors
/// When it is null, empty or too long.
///
/// # Safety
/// As for [`path`].
pub unsafe fn mount_point<'a>(at: *const c_char) -> Result<(&'a Path, [c_char; PATH_BYTES])> {
    // SAFETY: the caller's promise.
    let path = unsafe { path(at) }?;
    let bytes = path.as_os_str().as_bytes();
    let mut copy = [0; PATH_BYTES];
    if bytes.len() >= copy.len() {
        return Err(invalid(format!("a mount point of {} bytes does not fit", bytes.len())));
    }
    for (to, from) in copy.iter_mut().zip(bytes) {
        *to = *from as c_char;
    }
    Ok((path, copy))
}

/// An ID.
///
/// # Errors
/// When it is null.
///
/// # Safety
/// Null, or sixteen bytes.
pub unsafe fn id(at: *const u8) -> Result<Id> {
    if at.is_null() {
        return Err(invalid("an ID is a null pointer"));
    }
    // SAFETY: the caller's promise.
    Ok(Id(unsafe { at.cast::<[u8; 16]>().read() }))
}

/// Checks a pointer to a structure that the call fills in.
///
/// # Errors
/// When it is null.
pub fn non_null<T>(at: *mut T) -> Result<*mut T> {
    if at.is_null() { Err(invalid("a structure is a null pointer")) } else { Ok(at) }
}
