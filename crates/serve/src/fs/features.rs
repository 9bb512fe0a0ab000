//! FUSE features and limits that are requested at mount time.

use fuser::{InitFlags, KernelConfig};

/// Background requests that the kernel sends before it waits for answers.
const MAX_BACKGROUND: u16 = 1024;

/// Requests the features that the daemon relies on. Without `local_locks`, the kernel forwards each lock to the daemon.
pub(super) fn request(config: &mut KernelConfig, local_locks: bool) {
    if rustix::process::geteuid().is_root() {
        // The kernel also checks access control lists, which it reads from the daemon.
        let _ = config.add_capabilities(InitFlags::FUSE_POSIX_ACL);
    }
    if !local_locks {
        let _ = config.add_capabilities(InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_FLOCK_LOCKS);
    }
    // Not FUSE_ATOMIC_O_TRUNC: the kernel would truncate a running program before it detects ETXTBSY. Features that a
    // kernel lacks are optional.
    for feature in [
        InitFlags::FUSE_AUTO_INVAL_DATA,
        InitFlags::FUSE_PARALLEL_DIROPS,
        InitFlags::FUSE_HAS_IOCTL_DIR,
        InitFlags::FUSE_MAX_PAGES,
        // The kernel below removes set-id bits on writes, and knows whether a folder's default ACL replaces the umask.
        InitFlags::FUSE_HANDLE_KILLPRIV,
        InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        InitFlags::FUSE_DONT_MASK,
    ] {
        let _ = config.add_capabilities(feature);
    }
    // 1 MiB each: every session thread has a buffer of this size.
    let _ = config.set_max_write(1 << 20);
    // Beyond this, reads wait in the kernel in one queue for all users; here each user gets a turn.
    let _ = config.set_max_background(MAX_BACKGROUND);
    let _ = config.set_max_readahead(1 << 20);
}
