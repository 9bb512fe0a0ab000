//! Loads for several GPUs at once: plans that overlap in any way, each byte in its place, and none read twice.

use std::collections::HashMap;

use onehop_gpu::Emulated;
use onehop_load::engine::{Options, Prepared, RingEngine, Route};
use onehop_load::plan::{self, Arenas, Chunk, PlanOptions};
use onehop_load::stream::Stream;
use onehop_load::{Arrivals, Local, Model, Plan, Selection};
use proptest::prelude::*;

use crate::common::Dice;
use crate::engine::{Folder, bytes_of, matrices};
use crate::mover::FRESH;
use crate::plan::{model, options, selection, sketches};

/// The bytes that were read into a slot: those of the file, and others behind its end.
fn slot(model: &Model, chunk: &Chunk) -> Vec<u8> {
    let mut slot = vec![0xdd; chunk.bytes() as usize];
    for read in &chunk.reads {
        let into = &mut slot[read.slot as usize..(read.slot + read.valid) as usize];
        model.files[chunk.file].read_at(read.offset, into).unwrap();
    }
    slot
}

/// Executes the copies of a chunk.
fn copy(chunk: &Chunk, slot: &[u8], arenas: &Arenas, memory: &mut [Vec<u8>]) {
    for copy in &chunk.copies {
        let (arena, to) = arenas.place(copy);
        for row in 0..copy.rows {
            let (from, to) = ((copy.slot + row * copy.step) as usize, (to + row * copy.row) as usize);
            let row = &slot[from..from + copy.row as usize];
            memory[arena][to..to + row.len()].copy_from_slice(row);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn plans_that_overlap_read_each_block_once(
        files in sketches(),
        options in options(),
        // Along which dimension each rank cuts; 3 is none.
        dims in prop::collection::vec(0usize..4, 2..5),
        size in prop::sample::select(vec![4096u64, 8192, 20_000, 1 << 20, u64::MAX]),
        parts in prop::bool::ANY,
        seed: u64,
    ) {
        let model = model(&files, seed);
        let ranks = dims.len() as u64;
        let each = dims.iter().enumerate().map(|(rank, dim)| selection(&model, *dim, rank as u64, ranks));
        let (selections, wanted): (Vec<Selection>, Vec<HashMap<String, Vec<u8>>>) = each.unzip();
        let plans: Vec<_> = selections.iter().map(|s| Plan::new(&model, s, options).unwrap()).collect();
        let plans: Vec<&Plan> = plans.iter().collect();
        let arenas = Arenas::new(&plans);
        let mut memory: Vec<_> = plans.iter().map(|plan| vec![FRESH; plan.gpu_bytes as usize]).collect();
        let mut arrivals: Vec<_> = plans.iter().map(|plan| Arrivals::new(plan).0).collect();
        let mut chunks: Vec<_> = Plan::chunks_of_all(&plans, size).unwrap().collect();
        Dice(seed).shuffle(&mut chunks);
        let mut reads = Vec::new();
        for chunk in &chunks {
            prop_assert!(chunk.bytes() <= size);
            reads.extend(chunk.reads.iter().map(|read| (chunk.file, read.offset, read.bytes)));
            if parts {
                for part in chunk.parts(options.block) {
                    copy(&part, &slot(&model, &part), &arenas, &mut memory);
                }
            } else {
                copy(chunk, &slot(&model, chunk), &arenas, &mut memory);
            }
            for (arena, arrivals) in arrivals.iter_mut().enumerate() {
                if let Some(share) = arenas.share(arena, chunk) {
                    arrivals.arrive(&share).unwrap();
                }
            }
        }
        reads.sort_unstable();
        for two in reads.windows(2) {
            prop_assert!(two[0].0 < two[1].0 || two[0].1 + two[0].2 <= two[1].1, "{two:?} overlap");
        }
        let read: u64 = reads.iter().map(|(.., bytes)| bytes).sum();
        prop_assert!(read <= plans.iter().map(|plan| plan.read_bytes).sum());
        prop_assert!(read <= plan::read_bytes(&plans));
        prop_assert!(arrivals.iter().all(Arrivals::done));
        for ((plan, memory), wanted) in plans.iter().zip(&memory).zip(&wanted) {
            for tensor in &plan.tensors {
                let place = tensor.at as usize..(tensor.at + tensor.bytes) as usize;
                prop_assert_eq!(&memory[place], &wanted[&tensor.name][..], "{}", tensor.name);
            }
        }
    }
}

/// Rows, columns and whole tensors in one load; the columns of the narrow ones are packed by the CPU.
#[test]
fn mixed_cuts_read_the_files_once() {
    let folder = Folder::new("mixed-cuts");
    let path = folder.0.join("m.safetensors");
    let shapes = [("rows", 64, 96 << 10), ("wide", 512, 4096), ("narrow", 4096, 128), ("whole", 1, 777_777)];
    let tensors = matrices(&path, &shapes);
    let opened = Model::open(&Local, std::slice::from_ref(&path)).unwrap();
    let gpus: Vec<_> = (0..4).map(|_| Emulated::new()).collect();
    let gpus: Vec<&dyn onehop_gpu::Gpu> = gpus.iter().map(|gpu| gpu as _).collect();
    let plan = |rank| {
        let selection = Selection::default().rank(rank, 4).unwrap();
        let selection = selection.cut("rows", 0).cut("wide", 1).cut("narrow", 1);
        Plan::new(&opened, &selection, PlanOptions::ring()).unwrap()
    };
    let plans: Vec<_> = (0..4).map(plan).collect();
    let plans: Vec<&Plan> = plans.iter().collect();
    let total: u64 = tensors.iter().map(|(_, data)| data.len() as u64).sum();
    for route in [Route::Cached, Route::Pinned] {
        let options = Options { route, slot: Some(256 << 10), threads: Some(3) };
        let prepared = match Prepared::for_all(&plans, &opened.files, &options) {
            Err(onehop_load::Error::NotDirect { .. }) => continue,
            other => other.unwrap(),
        };
        let engines = RingEngine::start_all(&gpus, &plans, prepared).unwrap();
        let streams: Vec<_> =
            engines.into_iter().zip(&plans).map(|(e, plan)| Stream::new((*plan).clone(), e)).collect();
        let mut read = 0;
        for (rank, mut stream) in streams.into_iter().enumerate() {
            while stream.next().unwrap().is_some() {}
            read = stream.engine().account().read_bytes();
            let (plan, arena) = stream.finish().unwrap();
            assert_eq!(plan.tensors.len(), shapes.len());
            for tensor in &plan.tensors {
                let (_, data) = tensors.iter().find(|(name, _)| *name == tensor.name).unwrap();
                let (_, rows, columns) = shapes.iter().find(|(name, ..)| *name == tensor.name).unwrap();
                let wanted: Vec<u8> = match &*tensor.name {
                    "whole" => data.clone(),
                    "rows" => data[data.len() / 4 * rank..][..data.len() / 4].to_vec(),
                    _ => (0..*rows)
                        .flat_map(|r| &data[r * columns + columns / 4 * rank..][..columns / 4])
                        .copied()
                        .collect(),
                };
                assert!(bytes_of(&arena, tensor) == wanted, "{} on {rank} by {route:?}", tensor.name);
            }
        }
        assert!((total..total + (64 << 10)).contains(&read), "{read} of {total}: each byte once");
    }
    assert!((total..total + (64 << 10)).contains(&plan::read_bytes(&plans)));
}
