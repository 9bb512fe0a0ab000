//! What FAT and exFAT share: cluster chains, linear directories, local calendar times.

use crate::extent::Builder;
use crate::volume::{FileId, FileKind, FsNode, foreign};
use crate::window::Window;
use crate::{Error, Extent, Result};

/// The volume's clusters; the first has number 2.
pub(crate) struct Heap {
    pub fs: &'static str,
    /// Byte offset of cluster 2 within the volume.
    pub start: u64,
    /// Bytes of a cluster.
    pub cluster: u64,
    pub count: u32,
}

/// What the table says about a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextCluster {
    Next(u32),
    End,
    /// The cluster is marked free or bad, so it is part of no chain.
    Broken(u32),
}

/// Adjacent bytes of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClusterRun {
    pub at: u64,
    pub len: u64,
}

/// How FAT and exFAT find a file again: the contents of its directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FatNode {
    pub kind: FileKind,
    pub id: FileId,
    pub first: u32,
    /// Bytes that were written; the rest reads as zeros.
    pub valid: u64,
    /// Whether the table has a chain for it; otherwise its clusters are contiguous.
    pub chained: bool,
}

impl FatNode {
    /// The root directory, which has no entry.
    pub(crate) fn root(first: u32) -> Self {
        let id = FileId { ino: 0, generation: 0, len: 0, mtime: (0, 0), ctime: (0, 0) };
        Self { kind: FileKind::Directory, id, first, valid: 0, chained: true }
    }

    pub(crate) fn is_root(&self) -> bool {
        // An entry never begins at byte 0, where the boot sector is.
        self.id.ino == 0
    }

    /// The node of a FAT or exFAT volume.
    pub(crate) fn of(node: &FsNode) -> Result<&Self> {
        match node {
            FsNode::Fat(node) => Ok(node),
            FsNode::Ext(_) => Err(foreign()),
        }
    }
}

impl Heap {
    /// The run of one cluster.
    fn run(&self, cluster: u32) -> Result<ClusterRun> {
        match cluster.checked_sub(2).filter(|&index| index < self.count) {
            Some(index) => {
                Ok(ClusterRun { at: self.start + u64::from(index) * self.cluster, len: self.cluster })
            }
            None => {
                Err(Error::damaged(self.fs, format!("a chain leads to cluster {cluster} of {}", self.count)))
            }
        }
    }

    /// `len` contiguous bytes, starting at a cluster.
    pub(crate) fn row(&self, first: u32, len: u64) -> Result<Vec<ClusterRun>> {
        let at = self.run(first)?.at;
        let room = (u64::from(self.count) + 2 - u64::from(first)) * self.cluster;
        if len > room {
            return Err(Error::damaged(
                self.fs,
                format!("{len} bytes from cluster {first} on leave the volume"),
            ));
        }
        Ok(vec![ClusterRun { at, len: len.next_multiple_of(self.cluster) }])
    }

    /// The chain that starts at a cluster: as many clusters as `len` bytes need, or all of at most `most` bytes.
    pub(crate) fn chain(
        &self,
        first: u32,
        len: Option<u64>,
        most: u64,
        next: impl Fn(u32) -> Result<NextCluster>,
    ) -> Result<Vec<ClusterRun>> {
        let bad = |why: String| Error::damaged(self.fs, format!("the chain from cluster {first} on {why}"));
        let wanted = len.map(|len| len.div_ceil(self.cluster));
        let (mut runs, mut at, mut done): (Vec<ClusterRun>, _, _) = (Vec::new(), first, 0_u64);
        // Brent's cycle detection: a loop comes back to the mark.
        let (mut mark, mut leap) = (first, 1_u64);
        loop {
            let run = self.run(at)?;
            match runs.last_mut() {
                Some(last) if last.at + last.len == run.at => last.len += run.len,
                _ => runs.push(run),
            }
            done += 1;
            if wanted == Some(done) {
                return Ok(runs);
            }
            match next(at)? {
                NextCluster::Next(cluster) => at = cluster,
                NextCluster::End if wanted.is_none() => return Ok(runs),
                NextCluster::End => {
                    return Err(bad(format!("has {done} clusters and should have {}", wanted.unwrap_or(0))));
                }
                NextCluster::Broken(value) => {
                    return Err(bad(format!("leads to cluster {at}, which is marked {value:#x}")));
                }
            }
            if at == mark {
                return Err(bad("is a loop".to_owned()));
            }
            if done == leap {
                (mark, leap) = (at, leap * 2);
            }
            if wanted.is_none() && done * self.cluster >= most {
                return Err(bad(format!("is longer than the {most} bytes of the longest directory")));
            }
        }
    }

    /// A file's extents, from its clusters.
    pub(crate) fn extents(
        &self,
        node: &FatNode,
        runs: &[ClusterRun],
        window: &Window,
    ) -> Result<Vec<Extent>> {
        let mut out = Builder::new(self.fs, node.id.len);
        let mut offset = 0;
        for run in runs {
            let len = run.len.min(node.valid.saturating_sub(offset));
            out.push(offset, len, Some(window.start() + run.at))?;
            offset += run.len;
        }
        out.finish(true)
    }
}

/// The first `len` bytes of the runs. The caller bounds `len`.
pub(crate) fn bytes_of(window: &Window, runs: &[ClusterRun], len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for run in runs {
        let part = (len - bytes.len()).min(run.len as usize);
        bytes.extend(window.vec(run.at, part)?);
    }
    Ok(bytes)
}

/// The used bytes of a directory, with their places on the volume.
pub(crate) struct List {
    pub bytes: Vec<u8>,
    runs: Vec<ClusterRun>,
    /// For each run, the byte of the list that it begins with.
    starts: Vec<u64>,
}

impl List {
    /// Bytes of an entry; an entry that begins with zero ends the directory.
    pub(crate) const ENTRY: usize = 32;
    /// Bytes read at a time. A directory's stated length is no reason to read all of it at once.
    const STEP: u64 = 32 << 10;

    /// Reads bounded runs, up to the end of the directory.
    pub(crate) fn read(window: &Window, runs: Vec<ClusterRun>) -> Result<Self> {
        let mut bytes = Vec::new();
        'runs: for run in &runs {
            for at in (0..run.len).step_by(Self::STEP as usize) {
                let part = window.vec(run.at + at, (run.len - at).min(Self::STEP) as usize)?;
                bytes.extend_from_slice(&part);
                if part.chunks_exact(Self::ENTRY).any(|entry| entry[0] == 0) {
                    break 'runs;
                }
            }
        }
        Ok(Self::new(bytes, runs))
    }

    fn new(bytes: Vec<u8>, runs: Vec<ClusterRun>) -> Self {
        let mut next = 0;
        let start = |run: &ClusterRun| {
            next += run.len;
            next - run.len
        };
        let starts = runs.iter().map(start).collect();
        Self { bytes, runs, starts }
    }

    /// Place on the volume of a byte of the list. Called for each entry, and a list may have a run per cluster.
    pub(crate) fn position(&self, at: usize) -> u64 {
        let run = self.starts.partition_point(|&start| start <= at as u64).saturating_sub(1);
        self.runs.get(run).map_or(0, |found| found.at + (at as u64 - self.starts[run]))
    }
}

/// The upper case of a character, if that is one character: `ß` stays as it is.
pub(crate) fn upper(c: char) -> char {
    let mut upper = c.to_uppercase();
    match (upper.next(), upper.next()) {
        (Some(one), None) => one,
        _ => c,
    }
}

/// Converts a DOS date and time, taken as UTC, to seconds since 1970; 0 for an invalid date.
pub(crate) fn dos_time(date: u16, time: u16) -> i64 {
    let (year, month, day) = (1980 + i64::from(date >> 9), i64::from(date >> 5 & 15), i64::from(date & 31));
    if !(1..=12).contains(&month) || day == 0 {
        return 0;
    }
    // Days since 1970 in the Gregorian calendar, with years that begin in March.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1 - 719_468;
    let seconds = i64::from(time >> 11) * 3600 + i64::from(time >> 5 & 63) * 60 + i64::from(time & 31) * 2;
    days * 86_400 + seconds
}

/// A serial number in the notation of `blkid`.
pub(crate) fn serial_text(serial: u32) -> String {
    format!("{:04X}-{:04X}", serial >> 16, serial & 0xFFFF)
}

/// Refuses names that would leave their directory when they become part of a path.
pub(crate) fn check_name(fs: &'static str, name: &str) -> Result<()> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(Error::damaged(fs, format!("a directory has the name {name:?}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAP: Heap = Heap { fs: "FAT", start: 1000, cluster: 512, count: 100 };

    fn walk(first: u32, len: Option<u64>, table: &[(u32, u32)]) -> Result<Vec<ClusterRun>> {
        HEAP.chain(first, len, 20 * 512, |at| {
            Ok(table
                .iter()
                .find(|(from, _)| *from == at)
                .map_or(NextCluster::End, |(_, to)| NextCluster::Next(*to)))
        })
    }

    #[test]
    fn chains_are_merged_and_bounded() {
        let runs = walk(2, None, &[(2, 3), (3, 10)]).unwrap();
        assert_eq!(runs, [ClusterRun { at: 1000, len: 1024 }, ClusterRun { at: 1000 + 8 * 512, len: 512 }]);
        assert_eq!(walk(2, Some(513), &[(2, 3), (3, 10)]).unwrap(), [ClusterRun { at: 1000, len: 1024 }]);
        let error = |first, len, table: &[_]| walk(first, len, table).unwrap_err().to_string();
        assert!(error(2, Some(1025), &[(2, 3)]).contains("has 2 clusters and should have 3"));
        assert!(error(2, None, &[(2, 3), (3, 4), (4, 3)]).contains("loop"));
        assert!(error(2, Some(1 << 40), &[(2, 2)]).contains("loop"));
        assert!(error(2, Some(5000), &[(2, 102)]).contains("cluster 102 of 100"));
        let long: Vec<_> = (2..90).map(|i| (i, i + 1)).collect();
        assert!(error(2, None, &long).contains("longest"));
        assert!(HEAP.row(101, 512).is_ok() && HEAP.row(101, 513).is_err() && HEAP.row(1, 1).is_err());
    }

    /// Scanning all runs for each entry would take more than a minute.
    #[test]
    fn entries_of_a_fragmented_directory_are_found_quickly() {
        let runs: Vec<_> = (1..200_000_u64).map(|i| ClusterRun { at: i * 1024, len: 512 }).collect();
        let count = runs.len();
        let list = List::new(Vec::new(), runs);
        let start = std::time::Instant::now();
        for at in (0..count * 512).step_by(List::ENTRY) {
            assert_eq!(list.position(at), (at as u64 / 512 + 1) * 1024 + at as u64 % 512);
        }
        assert!(start.elapsed().as_secs() < 30);
    }

    #[test]
    fn dates() {
        assert_eq!(dos_time((20 << 9) | (2 << 5) | 29, (12 << 11) | (30 << 5) | 5), 951_827_410);
        assert_eq!(dos_time((1 << 5) | 1, 0), 315_532_800);
        assert_eq!(dos_time(0, 0), 0);
    }
}
