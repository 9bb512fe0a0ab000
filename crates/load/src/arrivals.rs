//! Tracks which tensors are complete, while chunks arrive in any order.

use crate::plan::{Chunk, Error, Plan};

/// The state of a load in progress.
#[derive(Clone, Debug)]
pub struct Arrivals {
    /// Tensors with bytes, in the order of the arena.
    tensors: Vec<Awaited>,
    /// A bit for each chunk that has arrived.
    seen: Vec<u64>,
    missing: u64,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Awaited {
    at: u64,
    end: u64,
    /// Remaining bytes.
    left: u64,
    /// Its index in the plan.
    tensor: usize,
}

impl Arrivals {
    /// The state before anything has arrived, and the tensors without bytes, which are already complete.
    #[must_use]
    pub fn new(plan: &Plan) -> (Self, Vec<usize>) {
        let (mut tensors, mut complete) = (Vec::with_capacity(plan.tensors.len()), Vec::new());
        for (tensor, placed) in plan.tensors.iter().enumerate() {
            match placed.bytes {
                0 => complete.push(tensor),
                left => tensors.push(Awaited { at: placed.at, end: placed.at + left, left, tensor }),
            }
        }
        tensors.sort_unstable_by_key(|t| t.at);
        let missing = tensors.len() as u64;
        (Self { tensors, seen: Vec::new(), missing, bytes: 0 }, complete)
    }

    /// Records that all bytes of `chunk` are in the arena, and returns the tensors that this completes, by their index
    /// in the plan.
    ///
    /// # Errors
    /// When the chunk has already arrived.
    pub fn arrive(&mut self, chunk: &Chunk) -> Result<Vec<usize>, Error> {
        let (word, bit) = ((chunk.index / 64) as usize, 1 << (chunk.index % 64));
        if self.seen.len() <= word {
            self.seen.resize(word + 1, 0);
        }
        match self.seen.get_mut(word) {
            Some(word) if *word & bit == 0 => *word |= bit,
            _ => return Err(Error::Again(chunk.index)),
        }
        let mut complete = Vec::new();
        for copy in &chunk.copies {
            self.bytes_at(copy.to, copy.to + copy.bytes(), &mut complete);
        }
        Ok(complete)
    }

    fn bytes_at(&mut self, from: u64, to: u64, complete: &mut Vec<usize>) {
        let first = self.tensors.partition_point(|t| t.end <= from);
        let awaited = self.tensors.iter_mut().skip(first).take_while(|t| t.at < to);
        for tensor in awaited.filter(|tensor| tensor.left > 0) {
            let bytes = tensor.end.min(to) - tensor.at.max(from);
            self.bytes += bytes;
            tensor.left = tensor.left.saturating_sub(bytes);
            if tensor.left == 0 {
                self.missing -= 1;
                complete.push(tensor.tensor);
            }
        }
    }

    /// Bytes of tensors that have arrived.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether all tensors are complete.
    #[must_use]
    pub fn done(&self) -> bool {
        self.missing == 0
    }
}
