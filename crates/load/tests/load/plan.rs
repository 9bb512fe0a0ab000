//! Plans, executed by a model of an engine: every byte in its place, in any order, and no other byte written.

use std::collections::HashMap;

use crate::common::{Dice, Memory};
use crate::mover::{BytePath, Mover};
use onehop_load::model::Tensor;
use onehop_load::plan::{Landing, PlanOptions};
use onehop_load::stream::Stream;
use onehop_load::{Dtype, Model, Plan, Selection, TensorInfo, Use};
use proptest::prelude::*;

/// A tensor to be made: type, dimensions in blocks, and unused bytes before it.
pub type Sketch = (Dtype, Vec<u64>, u64);

pub fn model(files: &[(u64, Vec<Sketch>)], seed: u64) -> Model {
    let mut dice = Dice(seed);
    let (mut sources, mut tensors): (Vec<Box<dyn onehop_load::Source>>, _) = (Vec::new(), Vec::new());
    for (file, (header, sketches)) in files.iter().enumerate() {
        let mut at = *header;
        for (i, (dtype, dims, hole)) in sketches.iter().enumerate() {
            let mut shape = dims.clone();
            shape.iter_mut().last().into_iter().for_each(|d| *d *= dtype.block().0);
            let scalar = if dims.is_empty() { 1 } else { dims.iter().product() };
            let (bytes, offset) = (scalar * dtype.block().1, at + hole);
            at = offset + bytes;
            let name = format!("{file}.{i}.{}", if i % 3 == 0 { "weight" } else { "bias" });
            tensors.push(Tensor { info: TensorInfo { name, dtype: *dtype, shape, offset, bytes }, file });
        }
        sources.push(Box::new(Memory(format!("{file}"), dice.bytes(at as usize))));
    }
    Model { files: sources, metadata: vec![], tensors, format: "safetensors" }
}

/// Types whose scalar is a whole block, and some with larger blocks.
pub fn sketches() -> impl Strategy<Value = Vec<(u64, Vec<Sketch>)>> {
    let dtype = prop::sample::select(vec![
        Dtype::U8,
        Dtype::Bf16,
        Dtype::F32,
        Dtype::F64,
        Dtype::F4,
        Dtype::F6E2M3,
        Dtype::Q4_0,
    ]);
    let small = prop::collection::vec(0u64..12, 0..4);
    let medium = (1u64..9, prop::sample::select(vec![64u64, 96, 256, 333, 1024]));
    let large = prop::sample::select(vec![3000u64, 4096, 8192, 20_000]);
    let dims = prop_oneof![
        4 => small,
        4 => medium.prop_map(|(a, b)| vec![a * 4, b]),
        2 => large.prop_map(|n| vec![2, n]),
    ];
    let hole = prop_oneof![6 => Just(0u64), 1 => 0u64..40, 1 => 4000u64..9000];
    let tensor = (dtype, dims, hole)
        .prop_filter("a scalar of a type in blocks", |(t, d, _)| t.block().0 == 1 || !d.is_empty());
    let header = prop_oneof![(1u64..700).prop_map(|n| n * 8), 1u64..9000];
    prop::collection::vec((header, prop::collection::vec(tensor, 0..9)), 1..4)
}

pub fn options() -> impl Strategy<Value = PlanOptions> {
    let pick = |list: &[u64]| prop::sample::select(list.to_vec());
    (
        (pick(&[1, 16, 64, 256, 512]), pick(&[1, 1, 16, 1024])),
        pick(&[512, 4096]),
        pick(&[1, 4, 512, 4096]),
        pick(&[0, 64 << 10, 1 << 20]),
        prop::bool::weighted(0.9),
    )
        .prop_map(|((align, small), block, landing, slack, direct)| PlanOptions {
            align,
            small,
            block,
            landing: landing.min(block),
            direct,
            slack,
            staging: 0,
            segment: None,
        })
}

/// The expected memory of a tensor sliced along `dim`, element by element from its coordinates.
fn expected(model: &Model, tensor: &Tensor, dim: usize, rank: u64, ranks: u64) -> Vec<u8> {
    let TensorInfo { dtype, shape, offset, bytes, .. } = &tensor.info;
    let mut all = vec![0; *bytes as usize];
    model.files[tensor.file].read_at(*offset, &mut all).unwrap();
    let (count, size) = dtype.block();
    let mut dims = shape.clone();
    dims.iter_mut().last().into_iter().for_each(|d| *d /= count);
    if ranks == 1 {
        return all;
    }
    let part = dims[dim] / ranks;
    let mut out = Vec::new();
    for (i, block) in all.chunks(size as usize).enumerate() {
        let inner: u64 = dims[dim + 1..].iter().product();
        let coordinate = i as u64 / inner % dims[dim];
        if coordinate / part == rank {
            out.extend(block);
        }
    }
    out
}

/// Slices every tensor along `dim` where possible.
pub fn selection(model: &Model, dim: usize, rank: u64, ranks: u64) -> (Selection, HashMap<String, Vec<u8>>) {
    let mut selection = Selection::default().rank(rank, ranks).unwrap();
    let mut wanted = HashMap::new();
    for tensor in &model.tensors {
        let TensorInfo { name, shape, dtype, .. } = &tensor.info;
        let last = if dim + 1 == shape.len() { dtype.block().0 } else { 1 };
        let cuts = shape.get(dim).is_some_and(|d| d.is_multiple_of(ranks * last) && *d > 0);
        if cuts {
            selection = selection.cut(name, dim);
        }
        let bytes =
            if cuts { expected(model, tensor, dim, rank, ranks) } else { expected(model, tensor, 0, 0, 1) };
        wanted.insert(name.clone(), bytes);
    }
    (selection, wanted)
}

/// Executes a plan and checks every tensor twice: when it is returned, and at the end.
fn execute(
    model: &Model,
    plan: Plan,
    wanted: &HashMap<String, Vec<u8>>,
    size: u64,
    path: BytePath,
    seed: u64,
) {
    let mover = Mover::new(model, &plan, size, path, &mut Dice(seed));
    let mut stream = Stream::new(plan, mover);
    let mut count = 0;
    while let Some(streamed) = stream.next().unwrap() {
        let (at, bytes) = (streamed.tensor.at as usize, streamed.tensor.bytes as usize);
        assert_eq!(
            streamed.arena[at..at + bytes],
            wanted[&streamed.tensor.name],
            "{} when it arrived",
            streamed.tensor.name
        );
        count += 1;
    }
    assert_eq!(count, stream.plan().tensors.len());
    assert_eq!(stream.bytes(), stream.plan().tensor_bytes);
    let (plan, arena) = stream.finish().unwrap();
    for tensor in &plan.tensors {
        let (at, bytes) = (tensor.at as usize, tensor.bytes as usize);
        assert_eq!(arena[at..at + bytes], wanted[&tensor.name], "{} at the end", tensor.name);
    }
}

/// Invariants of every plan.
fn check(plan: &Plan) {
    let PlanOptions { align, small, block, slack, .. } = plan.options;
    let mut places: Vec<_> =
        plan.tensors.iter().filter(|t| t.bytes > 0).map(|t| (t.at, t.at + t.bytes)).collect();
    for (at, end) in &places {
        let wanted = (end - at).next_power_of_two().max(small).min(align);
        assert!(at.is_multiple_of(wanted), "{at}..{end}");
    }
    places.sort_unstable();
    assert!(places.windows(2).all(|w| w[0].1 <= w[1].0), "tensors overlap");
    assert!(places.last().is_none_or(|(_, end)| *end <= plan.gpu_bytes));
    let gaps = plan.gaps().into_iter().map(|gap| (gap.start, gap.end));
    let mut all: Vec<_> = places.iter().copied().chain(gaps).collect();
    all.sort_unstable();
    let met = all.windows(2).all(|w| w[0].1 == w[1].0);
    assert!(
        met && all[0].0 == 0 && all[all.len() - 1].1 == u64::MAX,
        "tensors and gaps are everything, each byte once"
    );
    let padding = align * plan.extents.len() as u64;
    let holes: u64 = places.len() as u64 * align;
    assert!(plan.gpu_bytes <= plan.tensor_bytes + padding + holes + slack.max(plan.tensor_bytes / 100));
    for range in &plan.ranges {
        assert!(range.start.is_multiple_of(block) && range.end.is_multiple_of(block));
        assert!(range.read_bytes <= range.end - range.start && range.reads > 0);
        let extents = &plan.extents[range.extents.clone()];
        let exact: u64 = extents.iter().map(|p| p.row * p.rows).sum();
        let edges = 2 * block * extents.iter().map(|p| p.rows).sum::<u64>();
        assert!(range.read_bytes <= exact + edges, "{range:?}");
        if let Landing::Direct { at } = range.landing {
            assert_eq!(extents.len(), 1);
            assert!(at + (range.end - range.start) <= plan.gpu_bytes);
            assert!(range.read_bytes < extents[0].row + 2 * block);
        }
    }
    assert_eq!(plan.read_bytes, plan.ranges.iter().map(|r| r.read_bytes).sum::<u64>());
    let whole: u64 = plan.chunks(u64::MAX).unwrap().map(|c| c.bytes()).sum();
    assert!(whole <= plan.read_bytes);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_lands_where_it_belongs(
        files in sketches(),
        options in options(),
        (dim, group) in (0usize..3, prop::sample::select(vec![(0u64, 1u64), (0, 2), (1, 2), (3, 4)])),
        size in prop::sample::select(vec![4096u64, 8192, 20_000, 1 << 20, u64::MAX]),
        path in prop::sample::select(vec![BytePath::Ring, BytePath::Parts(1), BytePath::Parts(3), BytePath::Direct]),
        seed: u64,
    ) {
        let model = model(&files, seed);
        let (selection, wanted) = selection(&model, dim, group.0, group.1);
        let plan = Plan::new(&model, &selection, options).unwrap();
        check(&plan);
        execute(&model, plan, &wanted, size, path, seed);
    }
}

/// A typical checkpoint: all tensors large, with lengths that are multiples of the alignment, behind a header of unusual
/// length.
fn checkpoint() -> Model {
    let large: Vec<Sketch> = (0..12).map(|i| (Dtype::Bf16, vec![64 + 32 * (i % 3), 1024], 0)).collect();
    model(&[(8 * 1237, large.clone()), (8 * 1000, large)], 11)
}

#[test]
fn a_checkpoint_lands_directly_with_hardly_a_gap() {
    let model = checkpoint();
    let plan = Plan::new(&model, &Selection::default(), PlanOptions::default()).unwrap();
    assert_eq!(plan.ranges.len(), 2, "one range for each file");
    assert_eq!(plan.direct_bytes(), plan.read_bytes);
    assert!(plan.gpu_bytes <= plan.tensor_bytes + plan.tensor_bytes / 100);
    assert!(plan.read_bytes <= plan.tensor_bytes + 2 * 8192);
    let (_, wanted) = selection(&model, 0, 0, 1);
    execute(&model, plan, &wanted, 64 << 10, BytePath::Direct, 5);
}

/// A quantised checkpoint: as many scales as tensors. They must cost neither memory nor copies.
#[test]
fn scalars_stay_together() {
    let scales = (0..5000).map(|_| (Dtype::F32, vec![], 0));
    let model = model(&[(8 * 500, scales.chain([(Dtype::U8, vec![1 << 20], 0)]).collect())], 2);
    let plan = Plan::new(&model, &Selection::default(), PlanOptions::default()).unwrap();
    assert_eq!(plan.extents.len(), 2);
    assert!(plan.gpu_bytes < plan.tensor_bytes + 3 * 8192);
    let (_, wanted) = selection(&model, 0, 0, 1);
    execute(&model, plan, &wanted, 64 << 10, BytePath::Direct, 9);
    let apart =
        Plan::new(&model, &Selection::default(), PlanOptions { small: 16, ..PlanOptions::ring() }).unwrap();
    assert!(apart.tensors.iter().all(|t| t.at % 16 == 0));
    assert_eq!(apart.extents.len(), 5001);
}

/// Two files whose tensors would be contiguous if they were one.
#[test]
fn files_are_distinguished() {
    let files = [(4096, vec![(Dtype::U8, vec![4096], 0)]), (8192, vec![(Dtype::U8, vec![4096], 0)])];
    for direct in [false, true] {
        let model = model(&files, 6);
        let options = PlanOptions { direct, ..PlanOptions::default() };
        let plan = Plan::new(&model, &Selection::default(), options).unwrap();
        assert_eq!(plan.ranges.iter().map(|r| r.file).collect::<Vec<_>>(), [0, 1]);
        let (_, wanted) = selection(&model, 0, 0, 1);
        execute(&model, plan, &wanted, 1 << 20, BytePath::Direct, 2);
    }
}

/// A tensor is complete with its last byte and not before, even if that byte is in a block of its own.
#[test]
fn the_last_byte_counts() {
    for header in [4095, 4097] {
        let model = model(&[(header, vec![(Dtype::U8, vec![8192], 0)])], 4);
        let (_, wanted) = selection(&model, 0, 0, 1);
        for seed in 0..20 {
            let plan = Plan::new(&model, &Selection::default(), PlanOptions::ring()).unwrap();
            execute(&model, plan, &wanted, 4096, BytePath::Ring, seed);
        }
    }
}

/// Small tensors of any size, contiguous: one range, and one read per slot.
#[test]
fn a_ring_reads_on_across_runs() {
    let unaligned: Vec<Sketch> = (0..500).map(|i| (Dtype::U8, vec![1 + i * 7 % 900], 0)).collect();
    let model = model(&[(1000, unaligned)], 8);
    let plan = Plan::new(&model, &Selection::default(), PlanOptions::ring()).unwrap();
    assert_eq!((plan.ranges.len(), plan.direct_bytes()), (1, 0));
    assert!(plan.chunks(64 << 10).unwrap().all(|chunk| chunk.reads.len() == 1));
    let (_, wanted) = selection(&model, 0, 0, 1);
    execute(&model, plan, &wanted, 64 << 10, BytePath::Ring, 3);
}

#[test]
fn unaddressable_ranges_are_shifted_and_say_how_far() {
    let large = vec![(Dtype::U8, vec![1 << 20], 0)];
    let by = |header, landing| {
        let options = PlanOptions { landing, ..PlanOptions::default() };
        let plan = Plan::new(&model(&[(header, large.clone())], 1), &Selection::default(), options).unwrap();
        plan.ranges[0].landing
    };
    assert_eq!(by(4001, 4), Landing::Shifted { by: 3 });
    assert!(matches!(by(4001, 1), Landing::Direct { .. }));
    assert!(matches!(by(4004, 4), Landing::Direct { .. }));
    // A word of eight bytes that is half a tensor's cannot be checked for arrival.
    assert_eq!(by(4004, PlanOptions::default().landing), Landing::Shifted { by: 4 });
    // If whole blocks must land at multiples of 4096, only tensors that start at their alignment can.
    assert_eq!(by(4004, 4096), Landing::Shifted { by: 92 });
    assert!(matches!(by(4096 + 256, 4096), Landing::Direct { .. }));
}

#[test]
fn a_rank_reads_its_rows_alone() {
    let model = model(&[(8 * 100, vec![(Dtype::Bf16, vec![64, 32 << 10], 0)])], 3);
    let whole = model.bytes();
    for (dim, rows) in [(0, 1), (1, 64)] {
        let (selection, wanted) = selection(&model, dim, 3, 8);
        let plan = Plan::new(&model, &selection, PlanOptions::default()).unwrap();
        assert_eq!(plan.tensor_bytes, whole / 8);
        assert_eq!(plan.ranges[0].reads, rows);
        assert!(plan.read_bytes <= whole / 8 + rows * 8192, "{} of {whole}", plan.read_bytes);
        assert!(!plan.tensors[0].whole && plan.extents.len() == 1);
        execute(&model, plan, &wanted, 1 << 20, BytePath::Ring, 1);
    }
}

/// Rows at equal distances in a slot are one copy, as the copy engine supports.
#[test]
fn rows_become_one_copy() {
    let copies = |header| {
        let model = model(&[(header, vec![(Dtype::U8, vec![256, 16 << 10], 0)])], 3);
        let (selection, _) = selection(&model, 1, 1, 2);
        let plan = Plan::new(&model, &selection, PlanOptions::default()).unwrap();
        let chunk = plan.chunks(120 << 12).unwrap().next().unwrap();
        let copies: Vec<_> = chunk.copies.iter().map(|c| (c.row, c.rows, c.step)).collect();
        (chunk.reads.len(), copies)
    };
    assert_eq!(copies(4196), (40, vec![(8192, 40, 12288)]));
    // Rows of whole blocks are already contiguous in the slot.
    assert_eq!(copies(4096), (60, vec![(60 * 8192, 1, 60 * 8192)]));
}

/// A tensor of a billion rows must not need a billion of anything.
#[test]
fn fine_slices_stay_small() {
    let info = TensorInfo {
        name: "fine".into(),
        dtype: Dtype::U8,
        shape: vec![1 << 30, 2],
        offset: 800,
        bytes: 2 << 30,
    };
    let model = Model {
        files: vec![Box::new(Huge)],
        metadata: vec![],
        tensors: vec![Tensor { info, file: 0 }],
        format: "safetensors",
    };
    let selection = Selection::default().cut("fine", 1).rank(0, 2).unwrap();
    let plan = Plan::new(&model, &selection, PlanOptions::default()).unwrap();
    assert_eq!((plan.ranges.len(), plan.extents.len(), plan.ranges[0].reads), (1, 1, 1));
    let chunk = plan.chunks(16 << 10).unwrap().next().unwrap();
    assert_eq!((chunk.copies.len(), chunk.copies[0].row, chunk.copies[0].step), (1, 1, 2));
}

struct Huge;

impl onehop_load::Source for Huge {
    fn name(&self) -> &str {
        "huge"
    }
    fn bytes(&self) -> u64 {
        (2 << 30) + 800
    }
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> onehop_load::Result<()> {
        Memory("huge".into(), Vec::new()).read_at(offset, buffer)
    }
}

#[test]
fn cuts_that_cannot_be_made_are_refused() {
    use onehop_load::plan::Error;
    let model = model(
        &[(
            800,
            vec![(Dtype::Bf16, vec![6, 10], 0), (Dtype::Q4_0, vec![4, 3], 0), (Dtype::F4, vec![2, 5], 0)],
        )],
        1,
    );
    let plan = |pattern: &str, dim, ranks| {
        let selection = Selection::default().only(pattern).cut("*", dim).rank(1, ranks).unwrap();
        Plan::new(&model, &selection, PlanOptions::default())
    };
    assert!(matches!(plan("0.0.*", 1, 4), Err(Error::Uneven { length: 10, ranks: 4, .. })));
    assert!(matches!(plan("0.0.*", 2, 2), Err(Error::Dimension { dim: 2, rank: 2, .. })));
    assert!(matches!(plan("0.1.*", 1, 2), Err(Error::WithinBlock { dtype: Dtype::Q4_0, .. })));
    assert!(matches!(plan("0.2.*", 1, 2), Err(Error::WithinBlock { dtype: Dtype::F4, .. })));
    assert!(plan("0.1.*", 1, 3).is_ok());
    assert!(matches!(Selection::default().rank(2, 2), Err(Error::Rank { .. })));
    assert!(matches!(Selection::default().rank(0, 0), Err(Error::Rank { .. })));
}

#[test]
fn names_and_types_are_filtered() {
    let model = model(
        &[(800, vec![(Dtype::Bf16, vec![6], 0), (Dtype::F32, vec![4], 0), (Dtype::Bf16, vec![2], 0)])],
        1,
    );
    let names = |selection: Selection| {
        let plan = Plan::new(&model, &selection, PlanOptions::default()).unwrap();
        plan.tensors.into_iter().map(|t| t.name).collect::<Vec<_>>()
    };
    assert_eq!(names(Selection::default()).len(), 3);
    assert_eq!(names(Selection::default().only("*.weight")), ["0.0.weight"]);
    assert_eq!(names(Selection::default().only("0.*").except("0.?.weight")), ["0.1.bias", "0.2.bias"]);
    assert_eq!(names(Selection::default().dtype(Dtype::F32)), ["0.1.bias"]);
    use onehop_load::plan::Error;
    let refused = |selection: Selection| Plan::new(&model, &selection, PlanOptions::default()).unwrap_err();
    for (selection, used) in [
        (Selection::default().only("*.weight").only("no such"), Use::Load),
        (Selection::default().except("no such"), Use::LeaveOut),
        // Without a rank, too.
        (Selection::default().cut("no such", 0), Use::Cut),
    ] {
        assert_eq!(refused(selection), Error::NoMatch { pattern: "no such".into(), used });
    }
    // A slice may concern tensors that are not selected.
    assert_eq!(names(Selection::default().only("*.weight").cut("*.bias", 0)), ["0.0.weight"]);
    for nothing in [Selection::default().only("0.0.*").except("*"), Selection::default().dtype(Dtype::I8)] {
        assert_eq!(refused(nothing), Error::NothingLeft);
    }
}

#[test]
fn invalid_options_are_refused() {
    use onehop_load::plan::Error;
    let model = checkpoint();
    let plan = |options| Plan::new(&model, &Selection::default(), options);
    for align in [0, 3, 4 << 20, u64::MAX] {
        assert!(matches!(
            plan(PlanOptions { align, ..PlanOptions::default() }),
            Err(Error::NoPower { what: "align", .. })
        ));
    }
    assert!(matches!(
        plan(PlanOptions { landing: 4096, block: 512, ..PlanOptions::default() }),
        Err(Error::Landing { .. })
    ));
    let plan = plan(PlanOptions::default()).unwrap();
    assert!(matches!(plan.chunks(4095), Err(Error::Chunk { bytes: 4095, block: 4096 })));
}

#[test]
fn the_fit_counts_memory_beside_the_arena() {
    let plan = Plan::new(
        &checkpoint(),
        &Selection::default(),
        PlanOptions { staging: 1000, ..PlanOptions::default() },
    )
    .unwrap();
    let peak = plan.gpu_bytes + 1000;
    assert_eq!(plan.fit(peak).peak_gpu_bytes, peak);
    assert!(plan.fit(peak).fits && !plan.fit(peak - 1).fits);
    assert_eq!(plan.fit(peak - 1).missing_bytes, 1);
}

#[test]
fn a_chunk_counts_once() {
    let model = checkpoint();
    let plan = Plan::new(&model, &Selection::default(), PlanOptions::default()).unwrap();
    let (mut arrivals, complete) = onehop_load::Arrivals::new(&plan);
    assert!(complete.is_empty());
    let chunk = plan.chunks(8192).unwrap().nth(70).unwrap();
    arrivals.arrive(&chunk).unwrap();
    assert!(matches!(arrivals.arrive(&chunk), Err(onehop_load::plan::Error::Again(70))));
}

/// The output of `--plan --json`.
#[test]
fn a_plan_has_a_json_form() {
    let model = checkpoint();
    let plan = Plan::new(&model, &Selection::default(), PlanOptions::default()).unwrap();
    let json = serde_json::to_value(&plan).unwrap();
    assert_eq!(json["ranges"].as_array().unwrap().len(), 2);
    assert!(json["ranges"][0]["landing"]["direct"]["at"].is_u64());
    for key in ["gpu_bytes", "tensor_bytes", "read_bytes"] {
        assert!(json[key].is_u64(), "{key}");
    }
    assert_eq!(json["tensors"][0]["dtype"], "BF16");
    assert_eq!(json["files"][1]["name"], "1");
    let fit = serde_json::to_value(plan.fit(0)).unwrap();
    assert_eq!(fit["fits"], false);
}
