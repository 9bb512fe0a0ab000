//! What is asked of the kernel when a mount begins.

use fuser::{InitFlags, KernelConfig};

/// Requests that the kernel hands over while earlier ones are not answered and nobody waits for each alone.
const MOST_BACKGROUND: u16 = 1024;

/// Asks for what the daemon builds on. Without local locks, the kernel asks the daemon for each lock.
pub(super) fn request(config: &mut KernelConfig, local_locks: bool) {
    if rustix::process::geteuid().is_root() {
        // The kernel then also checks access control lists, which it asks us for.
        let _ = config.add_capabilities(InitFlags::FUSE_POSIX_ACL);
    }
    if !local_locks {
        // The kernel asks for every lock.
        let _ = config.add_capabilities(InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_FLOCK_LOCKS);
    }
    // Not FUSE_ATOMIC_O_TRUNC: with it the kernel has a program cut short before it finds that the program is running (ETXTBSY).
    // Those that a kernel does not have are no loss.
    for wish in [
        InitFlags::FUSE_AUTO_INVAL_DATA,
        InitFlags::FUSE_PARALLEL_DIROPS,
        InitFlags::FUSE_HAS_IOCTL_DIR,
        InitFlags::FUSE_MAX_PAGES,
        // The kernel below takes set-id bits away from what is written, and knows where a folder's list replaces a umask.
        InitFlags::FUSE_HANDLE_KILLPRIV,
        InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        InitFlags::FUSE_DONT_MASK,
    ] {
        let _ = config.add_capabilities(wish);
    }
    // A mebibyte each: every thread has room for the longest.
    let _ = config.set_max_write(1 << 20);
    // Reads of cached files wait in the kernel beyond so many, in one row for all users; here users have turns.
    let _ = config.set_max_background(MOST_BACKGROUND);
    let _ = config.set_max_readahead(1 << 20);
}
