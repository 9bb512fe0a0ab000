//! What a library does when its process ends.

use crate::{Error, Result};

/// Has a function called when the process ends by `exit` or a return from `main`, on the thread that ends it, and before what was
/// registered earlier and the destructors of libraries. Children that are forked later call it as well. It must not panic.
///
/// # Errors
/// When the system has no memory to note it.
pub fn at_exit(run: extern "C" fn()) -> Result<()> {
    // SAFETY: the function is safe to call on any thread. The C library calls it when the library that it belongs to, which is
    // the one that this call is linked into, is unloaded, and then forgets it.
    if unsafe { libc::atexit(run) } == 0 {
        return Ok(());
    }
    Err(Error::system("atexit", std::io::Error::from(std::io::ErrorKind::OutOfMemory)))
}
