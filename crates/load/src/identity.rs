//! The state of a file when it was opened, to detect changes during a load.

use std::fmt;

use rustix::fs::Stat;
use serde::{Deserialize, Serialize};

/// Distinguishes the states of a file.
///
/// Writing and truncating change the length or the modification time, so either counts as a change of the bytes. A
/// changed change time alone does not: links, renames, modes and owners set it too, and are common during a load (a
/// backup that makes hard links, a downloader that renames). A writer that resets the modification time, or writes
/// through an unsynchronised mapping, shows as [`Change::Touched`] or not at all; checksums ([`crate::manifest`]) and
/// comparing the bytes detect it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Its file system's device number.
    pub device: u64,
    /// Its inode number.
    pub inode: u64,
    /// Its length.
    pub bytes: u64,
    /// Time of the last change of its contents: seconds and nanoseconds.
    pub modified: (i64, u32),
    /// Time of the last change of its contents or attributes, which programs cannot set.
    pub changed: (i64, u32),
}

/// How a file has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Its path no longer exists.
    Removed,
    /// Its path names another file: device and inode, before and now.
    Replaced((u64, u64), (u64, u64)),
    /// It was truncated: length before and now.
    Shrunk(u64, u64),
    /// It grew: length before and now.
    Grew(u64, u64),
    /// Its contents were written.
    Written,
    /// Its attributes or links were changed.
    Touched,
    /// Its path can no longer be resolved: error number.
    Hidden(i32),
}

impl Change {
    /// Whether its bytes may have changed. Other changes concern names and attributes.
    #[must_use]
    pub fn is_of_bytes(&self) -> bool {
        match self {
            Self::Shrunk(..) | Self::Grew(..) | Self::Written => true,
            Self::Removed | Self::Replaced(..) | Self::Touched | Self::Hidden(_) => false,
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Removed => f.write_str("it was removed"),
            Self::Replaced((d0, i0), (d1, i1)) => {
                write!(f, "it is another file (inode {i0} on device {d0:x}, now inode {i1} on device {d1:x})")
            }
            Self::Shrunk(from, to) => write!(f, "it shrank from {from} bytes to {to}"),
            Self::Grew(from, to) => write!(f, "it grew from {from} bytes to {to}"),
            Self::Written => f.write_str("it was written (its modification time has changed)"),
            Self::Touched => {
                f.write_str("its attributes or links were changed (its change time has changed)")
            }
            Self::Hidden(number) => {
                let error = std::io::Error::from_raw_os_error(*number);
                write!(f, "its path can no longer be followed ({error})")
            }
        }
    }
}

impl Identity {
    pub(crate) fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            bytes: stat.st_size.max(0) as u64,
            modified: (stat.st_mtime, stat.st_mtime_nsec as u32),
            changed: (stat.st_ctime, stat.st_ctime_nsec as u32),
        }
    }

    /// The change, if it is another file.
    pub(crate) fn replaced(&self, now: &Self) -> Option<Change> {
        let (before, after) = ((self.device, self.inode), (now.device, now.inode));
        (before != after).then_some(Change::Replaced(before, after))
    }

    /// The most significant change since.
    #[must_use]
    pub fn change(&self, now: &Self) -> Option<Change> {
        if let Some(replaced) = self.replaced(now) {
            Some(replaced)
        } else if now.bytes < self.bytes {
            Some(Change::Shrunk(self.bytes, now.bytes))
        } else if now.bytes > self.bytes {
            Some(Change::Grew(self.bytes, now.bytes))
        } else if now.modified != self.modified {
            Some(Change::Written)
        } else if now.changed != self.changed {
            Some(Change::Touched)
        } else {
            None
        }
    }
}
