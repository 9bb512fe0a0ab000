//! A model of an engine, with an arena of exactly the planned size, in any order.

use std::collections::VecDeque;

use onehop_load::plan::{Chunk, Plan};
use onehop_load::stream::Engine;
use onehop_load::{Model, Result};

use crate::common::Dice;

/// The path of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BytePath {
    /// Everything through a ring in host memory.
    Ring,
    /// The same, each chunk split into parts of this many blocks.
    Parts(u64),
    /// Whole blocks directly to their final place, where the plan allows it; the rest through a ring.
    Direct,
}

/// A step that adds a part of a chunk to the arena.
enum Step {
    /// A block of a direct chunk: file, offset, place.
    Block(usize, u64, u64),
    /// All copies of a chunk.
    Copies,
}

/// Bytes that a drive holds behind a file's end.
const SLACK: u8 = 0xdd;
/// Initial contents of the arena.
pub const FRESH: u8 = 0xee;

pub struct Mover {
    files: Vec<Vec<u8>>,
    block: u64,
    path: BytePath,
    steps: VecDeque<(usize, Step)>,
    chunks: Vec<(Chunk, usize)>,
    pub arena: Vec<u8>,
}

impl Mover {
    pub fn new(model: &Model, plan: &Plan, size: u64, path: BytePath, dice: &mut Dice) -> Self {
        let files = model.files.iter().map(|file| {
            let mut bytes = vec![0; file.bytes() as usize];
            file.read_at(0, &mut bytes).unwrap();
            bytes
        });
        let (mut steps, mut chunks) = (Vec::new(), Vec::new());
        for chunk in plan.chunks(size).unwrap() {
            check(plan, &chunk, size);
            let i = chunks.len();
            let before = steps.len();
            match chunk.direct.filter(|_| path == BytePath::Direct) {
                Some(at) => {
                    assert!(at.is_multiple_of(plan.options.landing));
                    let read = chunk.reads[0];
                    for offset in (0..read.bytes).step_by(plan.options.block as usize) {
                        steps.push((i, Step::Block(chunk.file, read.offset + offset, at + offset)));
                    }
                }
                None => steps.push((i, Step::Copies)),
            }
            chunks.push((chunk, steps.len() - before));
        }
        dice.shuffle(&mut steps);
        let arena = vec![FRESH; plan.gpu_bytes as usize];
        Self { files: files.collect(), block: plan.options.block, path, steps: steps.into(), chunks, arena }
    }

    /// Bytes of a file; the drive's blocks extend behind its end.
    fn read(&self, file: usize, offset: u64, bytes: u64) -> Vec<u8> {
        let byte = |at: u64| self.files[file].get(at as usize).copied().unwrap_or(SLACK);
        (offset..offset + bytes).map(byte).collect()
    }

    fn write(&mut self, at: u64, bytes: &[u8]) {
        self.arena[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    fn copies(&mut self, chunk: &Chunk) {
        let mut slot = vec![SLACK; chunk.bytes() as usize];
        for read in &chunk.reads {
            let bytes = self.read(chunk.file, read.offset, read.bytes);
            slot[read.slot as usize..(read.slot + read.bytes) as usize].copy_from_slice(&bytes);
        }
        for copy in &chunk.copies {
            for row in 0..copy.rows {
                let from = (copy.slot + row * copy.step) as usize;
                let bytes = slot[from..from + copy.row as usize].to_vec();
                self.write(copy.to + row * copy.row, &bytes);
            }
        }
    }
}

/// Invariants of every chunk.
fn check(plan: &Plan, chunk: &Chunk, size: u64) {
    let block = plan.options.block;
    assert!((1..=size).contains(&chunk.bytes()), "{chunk:?}");
    let (mut slot, mut reached) = (0, 0);
    for read in &chunk.reads {
        assert!(read.offset.is_multiple_of(block) && read.bytes.is_multiple_of(block) && read.bytes > 0);
        assert!(
            read.slot == slot && (slot == 0 || read.offset > reached),
            "reads that meet are one: {chunk:?}"
        );
        let length = plan.files[chunk.file].bytes;
        assert_eq!(read.valid, read.bytes.min(length - read.offset));
        (slot, reached) = (slot + read.bytes, read.offset + read.bytes);
    }
    let copied: u64 = chunk.copies.iter().map(onehop_load::plan::Copy::bytes).sum();
    assert!(copied > 0 && copied <= chunk.bytes());
    assert!(chunk.direct.is_none() || chunk.reads.len() == 1);
}

impl Engine for Mover {
    type Arena = Vec<u8>;
    type Error = onehop_load::Error;

    fn arrived(&mut self) -> Result<Option<Chunk>> {
        while let Some((i, step)) = self.steps.pop_front() {
            match step {
                Step::Block(file, offset, at) => {
                    let bytes = self.read(file, offset, self.block);
                    self.write(at, &bytes);
                }
                Step::Copies => {
                    let chunk = self.chunks[i].0.clone();
                    match self.path {
                        BytePath::Parts(blocks) => chunk.parts(blocks * self.block).for_each(|part| {
                            assert_eq!((part.index, part.file, part.direct), (chunk.index, chunk.file, None));
                            assert!((1..=blocks * self.block).contains(&part.bytes()), "{part:?}");
                            for read in &part.reads {
                                let length = self.files[part.file].len() as u64;
                                assert_eq!(read.valid, read.bytes.min(length - read.offset));
                            }
                            self.copies(&part);
                        }),
                        BytePath::Ring | BytePath::Direct => self.copies(&chunk),
                    }
                }
            }
            self.chunks[i].1 -= 1;
            if self.chunks[i].1 == 0 {
                return Ok(Some(self.chunks[i].0.clone()));
            }
        }
        Ok(None)
    }

    fn arena(&self) -> &Vec<u8> {
        &self.arena
    }

    fn finish(self) -> Result<Vec<u8>> {
        Ok(self.arena)
    }
}
