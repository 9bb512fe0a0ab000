//! Takes the place of other libraries of this name for a program that the dynamic linker audits (`LD_AUDIT`, rtld-audit(7)).
//!
//! A program that opens NVIDIA's library by its path, as torch does, gets this one. The linker loads this library a second
//! time for that, in a namespace of its own, where only these two functions run.

use std::ffi::{CStr, CString, OsStr, c_char, c_uint, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

/// The interface that has these functions in the form below: the first.
const VERSION: c_uint = 1;

/// Accepts the linker's interface.
// SAFETY: the linker calls it by this name; as below.
#[unsafe(no_mangle)]
pub extern "C" fn la_version(_offered: c_uint) -> c_uint {
    VERSION
}

/// Returns the path of the library that the linker is to look for: this one's, if the name is cuFile's.
///
/// # Safety
/// `name` is a C string.
// SAFETY: the linker calls it by this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn la_objsearch(
    name: *const c_char,
    _cookie: *mut usize,
    _flag: c_uint,
) -> *mut c_char {
    // SAFETY: the caller's promise.
    let wanted = unsafe { CStr::from_ptr(name) };
    match own_path().filter(|_| is_cufile(wanted.to_bytes())) {
        Some(own) => own.as_ptr().cast_mut(),
        None => name.cast_mut(),
    }
}

/// Whether a path's last part is `libcufile.so`, with or without a version.
pub fn is_cufile(path: &[u8]) -> bool {
    let name = Path::new(OsStr::from_bytes(path)).file_name().map_or(&[][..], OsStrExt::as_bytes);
    name.strip_prefix(b"libcufile.so").is_some_and(|rest| rest.is_empty() || rest.starts_with(b"."))
}

/// This library's file. The linker keeps the pointer.
pub fn own_path() -> Option<&'static CStr> {
    static PATH: OnceLock<Option<CString>> = OnceLock::new();
    let find = || {
        let (mut found, own) = (MaybeUninit::<libc::Dl_info>::zeroed(), la_version as *const c_void);
        // SAFETY: the information lives across the call, and is plain data, for which zeros are valid.
        let found = unsafe { (libc::dladdr(own, found.as_mut_ptr()) != 0).then(|| found.assume_init()) }?;
        // SAFETY: the linker's name of a library that is loaded lives as long as it.
        (!found.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(found.dli_fname) }.to_owned())
    };
    PATH.get_or_init(find).as_deref()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_cufile_is_replaced() {
        for path in ["libcufile.so", "libcufile.so.0", "/opt/nvidia/lib/libcufile.so.1.15.1"] {
            assert!(is_cufile(path.as_bytes()), "{path}");
        }
        for path in
            ["", "/", "libcufile_rdma.so.1", "libcufile.sox", "/libcufile.so/libc.so.6", "libcuda.so.1"]
        {
            assert!(!is_cufile(path.as_bytes()), "{path}");
        }
    }
}
