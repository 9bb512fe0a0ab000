//! Answers to the kernel.

use std::time::Duration;

use fuser::{FileAttr, Generation, INodeNo, ReplyAttr, ReplyEmpty, ReplyEntry, ReplyXattr};
use rustix::io::Errno;

use super::{ALWAYS, BELIEVE, NEVER, is_virtual, virt};

pub(super) fn errno(error: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(error.raw_os_error())
}

pub(super) fn io(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// How long the kernel may rely on an answer about a file.
fn believed(inode: INodeNo) -> Duration {
    match inode {
        inode if virt::is_fixed(inode.0) => ALWAYS,
        inode if is_virtual(inode) => NEVER,
        _ => BELIEVE,
    }
}

/// Answers with an entry, or with why there is none.
pub(super) fn entry(reply: ReplyEntry, found: Result<FileAttr, Errno>) {
    match found {
        Ok(attr) => {
            reply.entry(&believed(attr.ino), &attr, Generation(0));
        }
        Err(error) => reply.error(errno(error)),
    }
}

/// Answers with attributes, or with why they are not known.
pub(super) fn attributes(reply: ReplyAttr, found: Result<FileAttr, Errno>) {
    match found {
        Ok(attr) => reply.attr(&believed(attr.ino), &attr),
        Err(error) => reply.error(errno(error)),
    }
}

pub(super) fn empty(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    }
}

/// Answers with bytes, or with how many there are where that is asked for.
pub(super) fn xattr(reply: ReplyXattr, size: u32, found: Result<Vec<u8>, Errno>) {
    match found {
        Err(error) => reply.error(errno(error)),
        Ok(bytes) if size == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() > size as usize => reply.error(errno(Errno::RANGE)),
        Ok(bytes) => reply.data(&bytes),
    }
}
