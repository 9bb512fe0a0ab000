//! What a rank loads, as it tells the others: they must agree on the files, and need its plan.

use serde::{Deserialize, Serialize};

use crate::identity::Identity;
use crate::plan::{Landing, Plan, PlanOptions, PlannedFile, Range, StridedExtent};
use crate::source::Source;

/// Longest arena, such that the sum of all ranks' lengths is far from overflowing.
const MOST_BYTES: u64 = 1 << 48;

/// What the ranks must agree on.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Terms {
    pub(super) files: Vec<FileTerms>,
    /// The cuts, as text: only their equality counts.
    pub(super) cuts: Vec<String>,
    /// Bytes of a slot that would suit this rank: the least one counts.
    pub(super) slot: u64,
    /// Unit of reads.
    pub(super) block: u64,
}

/// A file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileTerms {
    name: String,
    bytes: u64,
    /// Of a file of this machine.
    identity: Option<Identity>,
}

impl FileTerms {
    pub(super) fn of(file: &dyn Source) -> Self {
        Self { name: file.name().into(), bytes: file.bytes(), identity: file.identity() }
    }

    /// What is different about it there, if anything.
    fn difference(&self, there: &Self) -> Option<String> {
        let name = &self.name;
        if self.bytes != there.bytes {
            return Some(format!("{name} has {} bytes here, {} there", self.bytes, there.bytes));
        }
        match (&self.identity, &there.identity) {
            (Some(here), Some(there)) => {
                let change = here.change(there).filter(|change| *change != crate::Change::Touched)?;
                Some(format!("{name} is not the same file: seen from here, {change}"))
            }
            (None, None) if *name == there.name => None,
            (None, None) => Some(format!("{name} is {} there", there.name)),
            _ => Some(format!("{name} is a file of this machine for one of them alone")),
        }
    }
}

fn listed(cuts: &[String]) -> String {
    if cuts.is_empty() { "nothing".into() } else { cuts.join(", ") }
}

impl Terms {
    /// What another rank has different, if anything.
    pub(super) fn difference(&self, there: &Self) -> Option<String> {
        if self.files.len() != there.files.len() {
            return Some(format!("it loads {} files, this one {}", there.files.len(), self.files.len()));
        }
        let mut pairs = self.files.iter().zip(&there.files);
        if let Some(difference) = pairs.find_map(|(here, there)| here.difference(there)) {
            return Some(difference);
        }
        if self.cuts != there.cuts {
            return Some(format!("it cuts {}, this one {}", listed(&there.cuts), listed(&self.cuts)));
        }
        (self.block != there.block)
            .then(|| format!("it reads blocks of {}, this one of {}", there.block, self.block))
    }

    /// The message: these terms, and a plan.
    pub(super) fn to_bytes(&self, plan: &Plan) -> serde_json::Result<Vec<u8>> {
        let head = serde_json::to_vec(self)?;
        let mut out = Vec::with_capacity(64 + head.len() + 40 * (plan.extents.len() + plan.ranges.len()));
        let mut put = |number: u64| out.extend_from_slice(&number.to_le_bytes());
        put(head.len() as u64);
        put(plan.gpu_bytes);
        put(plan.read_bytes);
        put(plan.ranges.len() as u64);
        put(plan.extents.len() as u64);
        for range in &plan.ranges {
            let file = range.file as u64;
            let numbers = [file, range.start, range.end, range.read_bytes, range.extents.len() as u64];
            numbers.into_iter().for_each(&mut put);
        }
        for extent in &plan.extents {
            [extent.from, extent.to, extent.row, extent.rows, extent.step].into_iter().for_each(&mut put);
        }
        out.extend_from_slice(&head);
        Ok(out)
    }

    /// The terms of another rank, and of its plan what it takes to divide the chunks. `files` are those of this rank,
    /// on which the two must agree. Errors say what is wrong, or what is different.
    pub(super) fn from_bytes(
        bytes: &[u8],
        own: &Self,
        files: &[PlannedFile],
    ) -> Result<(Self, Plan), String> {
        let mut numbers = bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        let mut next = || numbers.next().ok_or("its plan ends early");
        let [head, gpu_bytes, read_bytes, ranges, extents] = [next()?, next()?, next()?, next()?, next()?];
        let body = ranges.checked_add(extents).and_then(|lists| lists.checked_mul(40)?.checked_add(40));
        let start = body.and_then(|body| usize::try_from(body).ok()).filter(|start| *start <= bytes.len());
        let start = start.ok_or("its plan ends early")?;
        let terms =
            bytes.get(start..).filter(|rest| rest.len() as u64 == head).ok_or("its terms end early")?;
        let terms: Self = serde_json::from_slice(terms).map_err(|e| format!("its terms are invalid: {e}"))?;
        if let Some(difference) = own.difference(&terms) {
            return Err(difference);
        }
        if gpu_bytes > MOST_BYTES || read_bytes > MOST_BYTES {
            return Err(format!("its plan has {gpu_bytes} bytes"));
        }
        let mut first = 0_usize;
        let mut list = Vec::with_capacity(ranges as usize);
        for _ in 0..ranges {
            let [file, start, end, read_bytes, count] = [next()?, next()?, next()?, next()?, next()?];
            let last = list.last().map_or(0, |range: &Range| range.file);
            let file = usize::try_from(file).ok().filter(|file| (last..files.len()).contains(file));
            let file = file.ok_or("its plan reads a file that there is not")?;
            let after = usize::try_from(count).ok().and_then(|count| first.checked_add(count));
            let after = after.filter(|after| count > 0 && *after as u64 <= extents);
            let after = after.ok_or("its plan's ranges are inconsistent")?;
            let landing = Landing::Shifted { by: 0 };
            list.push(Range { file, start, end, read_bytes, reads: 1, landing, extents: first..after });
            first = after;
        }
        if first as u64 != extents {
            return Err("its plan's ranges are inconsistent".into());
        }
        let mut all = Vec::with_capacity(extents as usize);
        let (mut file, mut reached) = (0, 0);
        for range in &list {
            let length = files.get(range.file).map_or(0, |file| file.bytes);
            if file != range.file {
                (file, reached) = (range.file, 0);
            }
            for _ in range.extents.clone() {
                let [from, to, row, rows, step] = [next()?, next()?, next()?, next()?, next()?];
                let extent = StridedExtent { from, to, row, rows, step };
                let span = rows.checked_sub(1).and_then(|rows| rows.checked_mul(step)?.checked_add(row));
                let ends = span.and_then(|span| from.checked_add(span)).is_some_and(|end| end <= length);
                let packed = row.checked_mul(rows).and_then(|bytes| to.checked_add(bytes));
                let fits = packed.is_some_and(|end| end <= gpu_bytes);
                if !ends || !fits || row == 0 || (rows > 1 && step < row) || from < reached {
                    return Err("its plan has an extent outside of its file or its memory".into());
                }
                reached = from + span.unwrap_or(0);
                all.push(extent);
            }
        }
        let plan = Plan {
            options: PlanOptions { block: terms.block, ..PlanOptions::ring() },
            files: files.to_vec(),
            tensors: Vec::new(),
            tensor_bytes: 0,
            gpu_bytes,
            ranges: list,
            extents: all,
            read_bytes,
            segments: Vec::new(),
        };
        Ok((terms, plan))
    }
}
