//! Checks FIEMAP's extents: flags that are allowed, that mean zeros, and that are refused.

use std::fs::File;

use onehop_os::file::{self as ioctls, FileExtent, extent_flag};

use crate::{Error, Result};

/// Flags of extents that cannot be read from the device, with the reason.
const REFUSED: [(u32, &str); 5] = [
    (extent_flag::DATA_ENCRYPTED, "DATA_ENCRYPTED: it is encrypted"),
    (extent_flag::DATA_INLINE, "DATA_INLINE: it is stored inline in metadata; read it through the kernel"),
    (extent_flag::DATA_TAIL, "DATA_TAIL: its end shares a block with other data"),
    (extent_flag::NOT_ALIGNED, "NOT_ALIGNED: its bytes are not block-aligned"),
    (extent_flag::ENCODED, "ENCODED: it is compressed or otherwise transformed"),
];
/// No place yet, although FIEMAP was asked to write everything out first.
const UNSETTLED: u32 = extent_flag::UNKNOWN | extent_flag::DELALLOC;
const KNOWN: u32 = extent_flag::LAST | extent_flag::UNWRITTEN | extent_flag::MERGED | extent_flag::SHARED;
/// A writer that goes on writing may make a second call necessary.
const TRIES: u32 = 2;

/// Bytes of the file on the file system's device; `None` for zeros that are not read from the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FsExtent {
    pub offset: u64,
    pub len: u64,
    pub position: Option<u64>,
}

/// The file system's extents of the first `len` bytes of a file, in order, without holes. The last one may extend
/// beyond `len`.
pub(super) fn read(file: &File, len: u64, path: &str) -> Result<Vec<FsExtent>> {
    let mut left = TRIES;
    loop {
        left -= 1;
        let list = all(|start| ioctls::extents(file, start), len, path)?;
        if left == 0 || !list.iter().any(|e| e.flags & UNSETTLED != 0) {
            return judge(&list, path);
        }
    }
}

/// All extents that begin before byte `len`; XFS allocates and frees space behind it at any time. `more` returns
/// extents from a byte on.
fn all(
    more: impl Fn(u64) -> onehop_os::Result<Vec<FileExtent>>,
    len: u64,
    path: &str,
) -> Result<Vec<FileExtent>> {
    let mut list: Vec<FileExtent> = Vec::new();
    loop {
        let start = list.last().map_or(0, |e| e.logical.saturating_add(e.len));
        let some = more(start).map_err(|source| Error::Kernel { path: path.to_owned(), source })?;
        // A file without data has no extents; otherwise the last one is marked.
        let (end, last) = some.last().map_or((start, start == 0), |e| {
            (e.logical.saturating_add(e.len), e.flags & extent_flag::LAST != 0)
        });
        list.extend(some.into_iter().filter(|e| e.logical < len));
        if last || end >= len {
            return Ok(list);
        }
        if end <= start {
            let why = format!("the kernel reports no extents beyond byte {start}");
            return Err(Error::NotByBlocks { path: path.to_owned(), why });
        }
    }
}

fn judge(list: &[FileExtent], path: &str) -> Result<Vec<FsExtent>> {
    let refuse = |why: String| Error::NotByBlocks { path: path.to_owned(), why };
    let mut end = 0;
    let mut kept = Vec::new();
    for extent in list {
        if let Some((_, why)) = REFUSED.iter().find(|(flag, _)| extent.flags & flag != 0) {
            return Err(refuse(format!("its extent at byte {} is marked {why}", extent.logical)));
        }
        if extent.flags & UNSETTLED != 0 {
            return Err(refuse(format!(
                "its bytes from {} on are not allocated yet (DELALLOC): another process is writing it",
                extent.logical
            )));
        }
        if extent.flags & !KNOWN != 0 {
            return Err(refuse(format!(
                "its extent at byte {} has unknown flags {:#x}",
                extent.logical, extent.flags
            )));
        }
        let next = extent.logical.checked_add(extent.len).filter(|_| extent.logical >= end && extent.len > 0);
        end = next.ok_or_else(|| refuse(format!("its extent at byte {} is out of order", extent.logical)))?;
        let written = extent.flags & extent_flag::UNWRITTEN == 0;
        kept.push(FsExtent {
            offset: extent.logical,
            len: extent.len,
            position: written.then_some(extent.physical),
        });
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn flags_are_judged() {
        let judged = |flags| judge(&[FileExtent::new(0, 4096, 8192, flags)], "f");
        for flags in [0x1, 0x1001, 0x2000, 0x3001] {
            assert_eq!(judged(flags).unwrap(), [FsExtent { offset: 0, len: 8192, position: Some(4096) }]);
        }
        assert_eq!(judged(0x801).unwrap()[0].position, None);
        for (flags, name) in [
            (0x7, "DELALLOC"),
            (0x2, "DELALLOC"),
            (0x8, "ENCODED"),
            (0x88, "DATA_ENCRYPTED"),
            (0x100, "NOT_ALIGNED"),
            (0x301, "DATA_INLINE"),
            (0x500, "DATA_TAIL"),
            (0x4000, "0x4000"),
        ] {
            let error = judged(flags).unwrap_err().to_string();
            assert!(error.contains(name), "{flags:#x}: {error}");
        }
        let order = [FileExtent::new(4096, 0, 4096, 0), FileExtent::new(4096, 8192, 4096, 1)];
        assert!(judge(&order, "f").unwrap_err().to_string().contains("out of order"));
        assert!(judge(&[FileExtent::new(u64::MAX, 0, 2, 1)], "f").is_err());
    }

    /// Calls that return these extents, and then none.
    fn extents_of(calls: &[&[FileExtent]], len: u64) -> Result<Vec<FileExtent>> {
        let calls = RefCell::new(calls.iter());
        let next = |_| Ok(calls.borrow_mut().next().map_or_else(Vec::new, |list| list.to_vec()));
        all(next, len, "f")
    }

    #[test]
    fn a_call_that_gets_no_further_is_an_error() {
        let first = FileExtent::new(0, 4096, 4096, 0);
        let second = FileExtent::new(8192, 65536, 4096, extent_flag::LAST);
        assert_eq!(extents_of(&[], 1 << 20).unwrap(), []);
        assert_eq!(extents_of(&[&[first], &[second]], 1 << 20).unwrap(), [first, second]);
        let earlier = FileExtent::new(0, 0, 2048, 0);
        for stuck in [&[][..], &[first], &[FileExtent::new(4096, 0, 0, 0)], &[second, earlier]] {
            let error = extents_of(&[&[first], stuck, &[second]], 1 << 20).unwrap_err().to_string();
            assert!(error.contains("beyond byte 4096"), "{error}");
        }
    }

    #[test]
    fn extents_behind_the_end_are_ignored() {
        let data = FileExtent::new(0, 4096, 65536, 0);
        let behind = FileExtent::new(65536, 0, 1 << 20, extent_flag::DELALLOC | extent_flag::LAST);
        for len in [65536, 65535, 61441] {
            assert_eq!(judge(&extents_of(&[&[data, behind]], len).unwrap(), "f").unwrap().len(), 1);
            assert_eq!(extents_of(&[&[data], &[behind]], len).unwrap(), [data]);
        }
        assert!(judge(&extents_of(&[&[data, behind]], 65537).unwrap(), "f").is_err());
    }
}
