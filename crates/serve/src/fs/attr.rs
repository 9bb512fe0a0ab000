//! File attributes in FUSE's form.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};
use onehop_target::wire::{Attr, FileKind, Time, TimeChange};

/// The first inode number of `3fs-virt`.
pub(super) const VIRTUAL: u64 = 1 << 63;

fn time((seconds, nanos): Time) -> SystemTime {
    let nanos = Duration::from_nanos(nanos.into());
    let since = Duration::from_secs(seconds.unsigned_abs());
    let whole = if seconds < 0 { UNIX_EPOCH.checked_sub(since) } else { UNIX_EPOCH.checked_add(since) };
    // A target may send any number.
    whole.and_then(|whole| whole.checked_add(nanos)).unwrap_or(UNIX_EPOCH)
}

/// A time to set, from FUSE's form.
pub(super) fn time_change(time: TimeOrNow) -> TimeChange {
    let TimeOrNow::SpecificTime(time) = time else { return TimeChange::Now };
    TimeChange::To(match time.duration_since(UNIX_EPOCH) {
        Ok(since) => (since.as_secs() as i64, since.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            let seconds = before.as_secs() as i64 + i64::from(before.subsec_nanos() > 0);
            (-seconds, (1_000_000_000 - before.subsec_nanos()) % 1_000_000_000)
        }
    })
}

/// The file type in FUSE's form.
pub(super) fn kind(kind: FileKind) -> FileType {
    match kind {
        FileKind::Regular => FileType::RegularFile,
        FileKind::Folder => FileType::Directory,
        FileKind::Link => FileType::Symlink,
        FileKind::Pipe => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::Char => FileType::CharDevice,
        FileKind::Block => FileType::BlockDevice,
    }
}

pub(super) fn attr(of: &Attr) -> FileAttr {
    let [atime, mtime, ctime] = of.times.map(time);
    FileAttr {
        ino: INodeNo(of.node),
        size: of.size,
        blocks: of.blocks,
        atime,
        mtime,
        ctime,
        crtime: ctime,
        kind: kind(of.kind),
        perm: of.perm & 0o7777,
        nlink: of.links,
        uid: of.uid,
        gid: of.gid,
        rdev: of.rdev as u32,
        blksize: of.block_size,
        flags: 0,
    }
}

/// Attributes of an entry in `3fs-virt`.
pub(super) fn pseudo_attr(
    inode: u64,
    kind: FileType,
    perm: u16,
    (uid, gid): (u32, u32),
    size: u64,
) -> FileAttr {
    let when = SystemTime::now();
    FileAttr {
        ino: INodeNo(inode),
        size,
        blocks: 0,
        atime: when,
        mtime: when,
        ctime: when,
        crtime: when,
        kind,
        perm,
        nlink: if kind == FileType::Directory { 2 } else { 1 },
        uid,
        gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_round_trip() {
        for wanted in [(0, 0), (1, 5), (981_158_400, 999_999_999), (-1, 0), (-5, 999_999_999), (-1, 1)] {
            let TimeChange::To(back) = time_change(TimeOrNow::SpecificTime(time(wanted))) else { panic!() };
            assert_eq!(back, wanted);
        }
        // Any number from a target becomes some time.
        assert_eq!(time((i64::MAX, u32::MAX)), UNIX_EPOCH);
        assert!(time((i64::MIN, 0)) <= UNIX_EPOCH);
    }
}
