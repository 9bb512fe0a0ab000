//! Functions that run when the process ends.

use crate::{Error, Result};

/// Calls a function when the process ends by `exit` or a return from `main`, on the thread that ends it, before earlier
/// registrations and the destructors of libraries. Children forked later call it as well. It must not panic.
///
/// # Errors
/// When memory is short.
pub fn at_exit(run: extern "C" fn()) -> Result<()> {
    // SAFETY: the function is safe to call on any thread. When the library that contains it, which is the one that this
    // call is linked into, is unloaded, the C library calls it and then forgets it.
    if unsafe { libc::atexit(run) } == 0 {
        return Ok(());
    }
    Err(Error::system("atexit", std::io::Error::from(std::io::ErrorKind::OutOfMemory)))
}
