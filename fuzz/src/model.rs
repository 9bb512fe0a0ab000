//! Synthetic models, planned and executed.

use arbitrary::Arbitrary;
use onehop_load::model::Tensor;
use onehop_load::plan::{Chunk, PlanOptions};
use onehop_load::{Model, Plan, Selection, Source, TensorInfo};

/// A file whose bytes are a function of their offset.
struct File(u64);

fn byte(at: u64) -> u8 {
    (at ^ (at >> 8).wrapping_mul(151) ^ (at >> 16)) as u8
}

impl Source for File {
    fn name(&self) -> &str {
        "file"
    }

    fn bytes(&self) -> u64 {
        self.0
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> onehop_load::Result<()> {
        buffer.iter_mut().zip(offset..).for_each(|(b, at)| *b = byte(at));
        Ok(())
    }
}

fn model(tensors: Vec<TensorInfo>, length: u64) -> Model {
    let tensors = tensors.into_iter().map(|info| Tensor { info, file: 0 }).collect();
    Model { files: vec![Box::new(File(length))], metadata: vec![], tensors, format: "safetensors" }
}

/// Parameters of a plan.
#[derive(Arbitrary, Debug)]
pub struct Asked {
    /// The options, as exponents.
    align: u8,
    block: u8,
    landing: u8,
    slack: u16,
    /// The slice: dimension, rank, ranks.
    dim: u8,
    rank: u8,
    ranks: u8,
    /// Size of a slot.
    slot: u16,
    /// Whether whole blocks go directly to the arena if the plan allows it.
    direct: bool,
    /// The order of the chunks.
    order: u64,
}

/// Plans everything, whole, and checks the chunks that result from an untrusted header.
pub fn walk(tensors: Vec<TensorInfo>, length: u64) {
    let model = model(tensors, length);
    let plan = Plan::new(&model, &Selection::default(), PlanOptions::default()).expect("sizes were checked");
    assert_eq!(plan.tensor_bytes, model.bytes());
    assert!(plan.tensors.iter().all(
        |t| t.at.is_multiple_of(t.bytes.next_power_of_two().min(256)) && t.at + t.bytes <= plan.gpu_bytes
    ));
    for chunk in plan.chunks(64 << 10).expect("a slot of some blocks").take(64) {
        assert!(chunk.copies.iter().all(|c| c.to + c.bytes() <= plan.gpu_bytes));
    }
}

/// Plans as requested, and moves all bytes in some order into an arena of exactly the planned size.
pub fn carry_out(tensors: Vec<TensorInfo>, length: u64, asked: &Asked) {
    let model = model(tensors, length);
    let block = 1u64 << (asked.block % 13);
    let options = PlanOptions {
        align: 1 << (asked.align % 13),
        small: 1 << (asked.align / 13 % 13),
        block,
        landing: (1 << (asked.landing % 13)).min(block),
        direct: asked.slack % 8 != 0,
        slack: asked.slack.into(),
        staging: 0,
        segment: None,
    };
    let (dim, ranks) = (usize::from(asked.dim % 4), u64::from(asked.ranks % 8) + 1);
    let selection = Selection::default().cut("*", dim).rank(u64::from(asked.rank) % ranks, ranks);
    let selection = selection.expect("the rank is below the ranks");
    let Ok(plan) = Plan::new(&model, &selection, options) else { return };
    // Large enough that one input does not take thousands of chunks.
    let slot = block.max(asked.slot.into()).max(length / 64);
    let mut chunks: Vec<_> = plan.chunks(slot).expect("a block fits").collect();
    let mut order = asked.order | 1;
    chunks.sort_by_cached_key(|_| {
        order = order.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        order >> 32
    });
    let mut arena = vec![0xee; plan.gpu_bytes as usize];
    chunks.iter().for_each(|chunk| put(chunk, asked.direct, &mut arena));
    let selector = selection.selector();
    for (placed, tensor) in plan.tensors.iter().filter(|t| t.bytes > 0).map(|t| (t, find(&model, &t.name))) {
        let part = selector.part(tensor).expect("it was planned");
        let from = (0..part.rows).flat_map(|r| (0..part.row).map(move |b| part.offset + r * part.step + b));
        let at = placed.at as usize;
        assert!(from.map(byte).eq(arena[at..at + placed.bytes as usize].iter().copied()), "{}", placed.name);
    }
}

fn find<'a>(model: &'a Model, name: &str) -> &'a TensorInfo {
    model.tensors.iter().map(|t| &t.info).find(|t| t.name == name).expect("a tensor of the model")
}

fn put(chunk: &Chunk, direct: bool, arena: &mut [u8]) {
    if let Some(at) = chunk.direct.filter(|_| direct) {
        let read = chunk.reads[0];
        let whole = arena[at as usize..(at + read.bytes) as usize].iter_mut();
        whole.zip(read.offset..).for_each(|(b, from)| *b = byte(from));
        return;
    }
    let slot: Vec<u8> = chunk.reads.iter().flat_map(|r| (r.offset..r.offset + r.bytes).map(byte)).collect();
    for copy in &chunk.copies {
        for row in 0..copy.rows {
            let (from, to) = ((copy.slot + row * copy.step) as usize, (copy.to + row * copy.row) as usize);
            arena[to..to + copy.row as usize].copy_from_slice(&slot[from..from + copy.row as usize]);
        }
    }
}
