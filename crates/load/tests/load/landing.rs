//! Plans as commands to a drive: random models in random extents, executed block by block in memory.

use onehop_files::{Blockwise, Extent, Place};
use onehop_load::formats::TensorInfo;
use onehop_load::model::Tensor;
use onehop_load::{Dtype, Error, Model, Plan, Selection, Source, landing, plan};

use crate::common::{Dice, Memory};

/// A file with known extents.
struct Placed(Memory, Vec<Extent>);

impl Source for Placed {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> onehop_load::Result<()> {
        self.0.read_at(offset, buffer)
    }

    fn extents(&self) -> Option<&[Extent]> {
        Some(&self.1)
    }
}

const UNIT: u64 = 4096;

/// Scatters a file on a drive in whole units; some are holes, some files end in one. Unused bytes of the drive are A5h.
fn scatter(dice: &mut Dice, file: &mut [u8], drive: &mut Vec<u8>) -> Vec<Extent> {
    let units = (file.len() as u64).div_ceil(UNIT);
    let first = drive.len() as u64 / UNIT;
    let mut places: Vec<u64> = (first..first + units + 3).collect();
    if dice.below(2) == 0 {
        dice.shuffle(&mut places);
    }
    drive.resize(((first + units + 3) * UNIT) as usize, 0xA5);
    let mut extents: Vec<Extent> = Vec::new();
    for unit in 0..units {
        let (offset, at) = (unit * UNIT, places[unit as usize] * UNIT);
        let part = &mut file[offset as usize..];
        let len = part.len().min(UNIT as usize);
        let data = match dice.below(6) {
            0 => 0,
            1 => dice.below(len as u64) as usize,
            _ => len,
        };
        drive[at as usize..][..data].copy_from_slice(&part[..data]);
        part[data..len].fill(0);
        let (data, hole) = (data as u64, (len - data) as u64);
        extents.push(Extent { offset, len: data, place: Place::Drive(at) });
        extents.push(Extent { offset: offset + data, len: hole, place: Place::Zeros });
    }
    extents.retain(|extent| extent.len > 0);
    extents
}

fn tensors(dice: &mut Dice, file: usize, bytes: u64) -> Vec<Tensor> {
    let (mut out, mut at) = (Vec::new(), dice.below(9000));
    while at < bytes {
        let rows = 4 * dice.below(3);
        let row = dice.below(9000).min((bytes - at) / rows.max(1));
        let info = TensorInfo {
            name: format!("{file}.{}", out.len()),
            dtype: Dtype::U8,
            shape: vec![rows, row / 4 * 4],
            offset: at,
            bytes: rows * (row / 4 * 4),
        };
        at += info.bytes + dice.below(300);
        out.push(Tensor { info, file });
    }
    out
}

/// Executes the reads.
fn read(parts: &Blockwise, drive: &[u8], block: u64, memory: &mut [u8]) {
    for run in &parts.runs {
        let (from, bytes) = ((run.lba * block) as usize, (run.blocks * block) as usize);
        memory[run.at as usize..][..bytes].copy_from_slice(&drive[from..from + bytes]);
        assert_eq!(run.at % 8, 0, "no drive writes there, or nobody sees whether all of it has arrived");
    }
    for (at, data) in &parts.inline {
        memory[*at as usize..][..data.len()].copy_from_slice(data);
    }
}

#[test]
fn random_fragmented_models_arrive_in_the_arena() {
    for seed in 1..150 {
        let mut dice = Dice(seed);
        let mut drive = vec![0xA5; UNIT as usize];
        let (mut files, mut infos, mut contents) = (Vec::<Box<dyn Source>>::new(), Vec::new(), Vec::new());
        for number in 0..1 + dice.below(3) as usize {
            let bytes = 1 + dice.below(90_000) as usize;
            let mut file = dice.bytes(bytes);
            let extents = scatter(&mut dice, &mut file, &mut drive);
            infos.extend(tensors(&mut dice, number, bytes as u64));
            contents.push(file.clone());
            files.push(Box::new(Placed(Memory(format!("{number}"), file), extents)));
        }
        let model = Model { files, metadata: Vec::new(), tensors: infos, format: "bytes" };
        let block = [512, 4096][dice.below(2) as usize];
        let slack = [0, 64 << 10, 1 << 20][dice.below(3) as usize];
        let options = plan::PlanOptions { block, slack, ..plan::PlanOptions::default() };
        let ranks = 1 << dice.below(2);
        let selection = Selection::default().cut("*", dice.below(2) as usize).rank(ranks - 1, ranks).unwrap();
        let plan = Plan::new(&model, &selection, options).unwrap();
        let mut arena = vec![0; plan.gpu_bytes as usize];
        read(&landing::direct(&plan, &model.files).unwrap(), &drive, block, &mut arena);
        let mut slot = vec![0x5A; 3 * 4096];
        for staged in landing::staged(&plan, &model.files, slot.len() as u64).unwrap() {
            let staged = staged.unwrap();
            read(&staged.parts, &drive, block, &mut slot);
            for (at, bytes) in &staged.parts.zeros {
                slot[*at as usize..][..*bytes as usize].fill(0);
            }
            for copy in &staged.copies {
                for row in 0..copy.rows {
                    let (from, to) = (copy.slot + row * copy.step, copy.to + row * copy.row);
                    arena[to as usize..][..copy.row as usize]
                        .copy_from_slice(&slot[from as usize..][..copy.row as usize]);
                }
            }
        }
        for placed in &plan.tensors {
            let tensor = model.tensors.iter().find(|t| t.info.name == placed.name).unwrap();
            let part = selection.selector().part(&tensor.info).unwrap();
            let rows = (0..part.rows).flat_map(|row| {
                let from = (part.offset + row * part.step) as usize;
                contents[tensor.file][from..from + part.row as usize].to_vec()
            });
            let got = &arena[placed.at as usize..][..placed.bytes as usize];
            assert!(rows.eq(got.iter().copied()), "seed {seed}: {placed:?}");
        }
    }
}

#[test]
fn files_of_unknown_extents_are_refused() {
    let info = TensorInfo { name: "a".into(), dtype: Dtype::U8, shape: vec![9], offset: 0, bytes: 9 };
    let files: Vec<Box<dyn Source>> = vec![Box::new(Memory("m".into(), vec![0; 9]))];
    let model =
        Model { files, metadata: Vec::new(), tensors: vec![Tensor { info, file: 0 }], format: "bytes" };
    let plan = Plan::new(&model, &Selection::default(), plan::PlanOptions::default()).unwrap();
    assert!(matches!(landing::direct(&plan, &model.files), Err(Error::NoPlaces { .. })));
}
