//! What a library does when its process forks.

use crate::{Error, Result};

/// Has functions called around every fork of this process from now on: one in the thread that forks, before it does; one in
/// the same thread when it has; one in the child. They must not panic. A program that is started by `posix_spawn` or `vfork`
/// calls none.
///
/// # Errors
/// When the system has no memory to note them.
pub fn at_fork(before: extern "C" fn(), after: extern "C" fn(), in_child: extern "C" fn()) -> Result<()> {
    // SAFETY: the functions are safe to call on any thread. The C library forgets them when the library that they belong to,
    // which is the one that this call is linked into, is unloaded.
    let error = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(in_child)) };
    if error == 0 {
        return Ok(());
    }
    Err(Error::system("pthread_atfork", std::io::Error::from_raw_os_error(error)))
}
