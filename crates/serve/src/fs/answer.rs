//! Replies to the kernel.

use std::time::Duration;

use fuser::{FileAttr, Generation, INodeNo, ReplyAttr, ReplyEmpty, ReplyEntry, ReplyXattr};
use rustix::io::Errno;

use super::{is_virtual, virt};

/// How long the kernel may cache attributes and names. Writes by rings invalidate its cache at once.
pub(super) const ATTR_TIMEOUT: Duration = Duration::from_secs(1);
/// For entries that never change while the daemon runs.
const FIXED_TIMEOUT: Duration = Duration::from_secs(3600);

pub(super) fn errno(error: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(error.raw_os_error())
}

pub(super) fn io(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// How long the kernel may cache an answer about a file.
fn cache_time(inode: INodeNo) -> Duration {
    match inode {
        inode if virt::is_fixed(inode.0) => FIXED_TIMEOUT,
        inode if is_virtual(inode) => Duration::ZERO,
        _ => ATTR_TIMEOUT,
    }
}

/// Replies with an entry or an error.
pub(super) fn entry(reply: ReplyEntry, found: Result<FileAttr, Errno>) {
    match found {
        Ok(attr) => {
            reply.entry(&cache_time(attr.ino), &attr, Generation(0));
        }
        Err(error) => reply.error(errno(error)),
    }
}

/// Replies with attributes or an error.
pub(super) fn attributes(reply: ReplyAttr, found: Result<FileAttr, Errno>) {
    match found {
        Ok(attr) => reply.attr(&cache_time(attr.ino), &attr),
        Err(error) => reply.error(errno(error)),
    }
}

pub(super) fn empty(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    }
}

/// Replies with an attribute's value, or with its size if that is asked for.
pub(super) fn xattr(reply: ReplyXattr, size: u32, found: Result<Vec<u8>, Errno>) {
    match found {
        Err(error) => reply.error(errno(error)),
        Ok(bytes) if size == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() > size as usize => reply.error(errno(Errno::RANGE)),
        Ok(bytes) => reply.data(&bytes),
    }
}
