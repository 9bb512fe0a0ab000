//! The order in which chunks for several GPUs are read: their links stay equally busy.
//!
//! In the order of the file, the halves of a large tensor would go to one GPU after the other.

use std::collections::VecDeque;

use crate::plan::{Arenas, Chunk, Chunks};

/// Chunks that may wait for their turn: 2 GiB of the largest.
const AHEAD: usize = 1024;

/// The chunks of several plans; next is one for the GPU that has the fewest bytes so far.
pub(super) struct FairChunks {
    chunks: Chunks,
    arenas: Arenas,
    /// Bytes given to each GPU.
    given: Vec<u64>,
    /// Chunks found on the way to another, by the GPU that gets most of their bytes.
    waiting: Vec<VecDeque<Chunk>>,
    ahead: usize,
}

impl FairChunks {
    pub(super) fn new(chunks: Chunks, arenas: Arenas) -> Self {
        let gpus = arenas.len();
        Self { chunks, arenas, given: vec![0; gpus], waiting: vec![VecDeque::new(); gpus], ahead: 0 }
    }

    /// A chunk's bytes for each GPU.
    fn bytes(&self, chunk: &Chunk) -> Vec<u64> {
        let mut bytes = vec![0; self.given.len()];
        for copy in &chunk.copies {
            if let Some(bytes) = bytes.get_mut(self.arenas.place(copy).0) {
                *bytes += copy.bytes();
            }
        }
        bytes
    }

    /// The GPU with the fewest bytes, of those with a chunk that waits.
    fn next_waiting(&self) -> Option<usize> {
        let waiting = self.waiting.iter().zip(&self.given).enumerate();
        let waiting = waiting.filter(|(_, (chunks, _))| !chunks.is_empty());
        waiting.min_by_key(|(_, (_, given))| **given).map(|(gpu, _)| gpu)
    }
}

impl Iterator for FairChunks {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        if self.given.len() == 1 {
            return self.chunks.next();
        }
        let (behind, _) = self.given.iter().enumerate().min_by_key(|(_, given)| **given)?;
        while self.waiting.get(behind)?.is_empty()
            && self.ahead < AHEAD
            && let Some(chunk) = self.chunks.next()
        {
            let bytes = self.bytes(&chunk);
            let most = bytes.iter().zip(&self.given).enumerate();
            let most = most.min_by_key(|(_, (bytes, given))| (std::cmp::Reverse(**bytes), **given));
            let (gpu, _) = most?;
            self.waiting.get_mut(gpu)?.push_back(chunk);
            self.ahead += 1;
        }
        let gpu = self.next_waiting()?;
        let chunk = self.waiting.get_mut(gpu)?.pop_front()?;
        self.ahead -= 1;
        let bytes = self.bytes(&chunk);
        self.given.iter_mut().zip(bytes).for_each(|(given, bytes)| *given += bytes);
        Some(chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Landing, Plan, PlanOptions, PlannedFile, Range, StridedExtent};

    const MIB: u64 = 1 << 20;

    /// A plan that wants these bytes of a file of 1 GiB.
    fn plan(wanted: std::ops::Range<u64>) -> Plan {
        let (from, bytes) = (wanted.start, wanted.end - wanted.start);
        let range = Range {
            file: 0,
            start: from,
            end: wanted.end,
            read_bytes: bytes,
            reads: 1,
            landing: Landing::Shifted { by: 0 },
            extents: 0..1,
        };
        Plan {
            options: PlanOptions::ring(),
            files: vec![PlannedFile { name: "one".into(), bytes: 1 << 30 }],
            tensors: Vec::new(),
            tensor_bytes: bytes,
            gpu_bytes: bytes,
            ranges: vec![range],
            extents: vec![StridedExtent { from, to: 0, row: bytes, rows: 1, step: bytes }],
            read_bytes: bytes,
            segments: Vec::new(),
        }
    }

    /// The GPUs of each chunk, in the order of reading.
    fn order(plans: &[Plan]) -> Vec<Vec<usize>> {
        let plans: Vec<&Plan> = plans.iter().collect();
        let arenas = Arenas::new(&plans);
        let chunks = Plan::chunks_of_all(&plans, 2 * MIB).unwrap();
        let gpus = |chunk: Chunk| chunk.copies.iter().map(|copy| arenas.place(copy).0).collect();
        FairChunks::new(chunks, arenas.clone()).map(gpus).collect()
    }

    #[test]
    fn halves_of_a_large_tensor_take_turns() {
        let order = order(&[plan(0..512 * MIB), plan(512 * MIB..1024 * MIB)]);
        assert_eq!(order.len(), 512);
        for turn in order.chunks(2) {
            assert_eq!(turn.concat(), [0, 1]);
        }
    }

    #[test]
    fn shared_bytes_are_read_once_and_the_rest_of_one_does_not_wait_for_the_other() {
        let mut order = order(&[plan(0..8 * MIB), plan(4 * MIB..32 * MIB)]);
        assert_eq!(order.len(), 16);
        order.sort();
        assert_eq!(order[..4], [vec![0], vec![0], vec![0, 1], vec![0, 1]]);
        assert!(order[4..].iter().all(|gpus| *gpus == [1]));
    }

    #[test]
    fn a_gpu_without_any_bytes_holds_up_no_other() {
        let mut nothing = plan(0..MIB);
        (nothing.ranges, nothing.extents, nothing.gpu_bytes) = (Vec::new(), Vec::new(), 0);
        let order = order(&[nothing.clone(), plan(0..4 * MIB), nothing]);
        assert_eq!(order, [[1], [1]]);
    }
}
