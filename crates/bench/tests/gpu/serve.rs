//! The owner kernel against the controller that runs on the same GPU: every command once, every byte checked there.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_controller::layout::{DataCheck, flag};
use onehop_controller::{BusMapping, Report, block_of, content};
use onehop_gpu::controllers::{Begin, Common, Pairs, Table};
use onehop_gpu::cuda::Rig as Kernel;
use onehop_gpu::{Gpu, KernelJob, KernelQueue, Launch, Region};
use onehop_proto::kernel::{Exit, ItemOutcome, WorkItem, scratch_bytes};
use onehop_proto::{Status, nvm};

use crate::{Rig, get, number, put};

const ENTRIES: usize = 256;
const BLOCK: usize = 512;
/// Blocks of the namespace.
const BLOCKS: u32 = 1 << 16;
const SEED: u32 = 20_261_121;
/// Bus addresses are other numbers than the GPU's.
const BUS: u64 = 1 << 44;

/// How much is done. compute-sanitizer holds a second launch back until the controller has ended, so it needs a single
/// launch, and a controller that soon ends by itself: `ONEHOP_GPU_ITEMS=1024 ONEHOP_GPU_COMMANDS=1024
/// ONEHOP_GPU_SECONDS=5 ONEHOP_GPU_QUEUES=2`.
#[derive(Clone, Copy)]
struct Scale {
    queues: usize,
    /// Of a launch.
    items: u32,
    limit: Duration,
}

impl Scale {
    fn new() -> Self {
        Self {
            queues: number("ONEHOP_GPU_QUEUES", 64) as usize,
            items: number("ONEHOP_GPU_ITEMS", 1 << 20) as u32,
            limit: Duration::from_secs(number("ONEHOP_GPU_SECONDS", 300)),
        }
    }
}

struct Bed<'a> {
    rig: &'a Rig,
    scale: Scale,
    pairs: Pairs,
    data: Region,
    works: Region,
    outcomes: Region,
    poison: Region,
    queues: Vec<KernelQueue>,
    checks: Region,
    result: Region,
    _keep: Vec<Region>,
}

impl<'a> Bed<'a> {
    fn new(rig: &'a Rig, flags: u32) -> Self {
        let scale = Scale::new();
        let Scale { queues: count, items, limit } = scale;
        let ring = ENTRIES * 64 + ENTRIES * 16;
        let control_bytes = scratch_bytes(ENTRIES as u32 - 1).next_multiple_of(128) as usize;
        let (rings, scratch) = (rig.vram(count * ring), rig.vram(count * control_bytes));
        let (namespace, data) = (rig.vram(BLOCKS as usize * BLOCK), rig.vram(items as usize * BLOCK));
        let words: Vec<u32> = (0..BLOCKS)
            .flat_map(|block| (0..BLOCK as u32 / 4).map(move |word| content(block, word, SEED)))
            .collect();
        put(&namespace, 0, &words);
        let gpu: Arc<dyn Gpu> = Arc::new(rig.gpu.clone());
        let mut table = Table::new(&gpu, 4).unwrap();
        let range = BusMapping { bus: data.addr().0 + BUS, bytes: data.len() as u64, target: data.addr() };
        table.add(range).unwrap();
        let table = Arc::new(Mutex::new(table));
        let blocks = BLOCKS.into();
        let common = Common { namespace, blocks, lba_shift: 9, max_bytes: 1 << 17, limit, flags };
        let pairs = Pairs::new(&gpu, common, &table, count as u16, 4096).unwrap();
        let mut queues = Vec::new();
        for (i, qid) in pairs.numbers().enumerate() {
            let at = |region: &Region, bytes: usize| region.addr().plus((i * bytes) as u64);
            let (sq, [sq_door, cq_door]) = (at(&rings, ring), pairs.doors(qid));
            let (sq_entries, cq_entries) = (ENTRIES as u32, ENTRIES as u32);
            let cq = sq.plus(ENTRIES as u64 * 64);
            let (control, window) = (at(&scratch, control_bytes), ENTRIES as u32 - 1);
            queues.push(KernelQueue {
                sq,
                cq,
                sq_door,
                cq_door,
                control,
                sq_entries,
                cq_entries,
                window,
                zero: 0,
            });
        }
        let poison = rig.vram(4096);
        poison.signal(0, 0).unwrap();
        let bed = Self {
            works: rig.vram(items as usize * WorkItem::BYTES as usize),
            outcomes: rig.vram(items as usize * ItemOutcome::BYTES as usize),
            checks: rig.vram(1024 * DataCheck::BYTES as usize),
            result: rig.vram(4096),
            _keep: vec![rings, scratch],
            rig,
            scale,
            pairs,
            data,
            poison,
            queues,
        };
        rig.gpu.prepare(&Launch::Owner(bed.queues.clone())).unwrap();
        bed.pairs.start().unwrap();
        for (qid, queue) in bed.pairs.numbers().zip(&bed.queues) {
            assert!(bed.pairs.wait(qid, 1).unwrap(), "controller {qid} does not start");
            let KernelQueue { sq, cq, sq_entries, cq_entries, .. } = *queue;
            let begin = Begin { sq, cq, sq_entries, cq_entries, cqid: qid, page_shift: 12, faults: &[] };
            assert!(bed.pairs.begin(qid, &begin).unwrap(), "controller {qid} does not begin");
        }
        bed
    }

    /// The items of one launch, from `first` on in the order of all of them.
    fn write_works(&self, opcode: u8) {
        let mut words = Vec::with_capacity(self.scale.items as usize * 8);
        for i in 0..self.scale.items {
            let prp1 = self.data.addr().0 + BUS + u64::from(i) * BLOCK as u64;
            let lba = block_of(i, BLOCKS).into();
            words.extend(WorkItem { lba, prp1, prp2: 0, blocks: 1, control: opcode.into() }.words());
        }
        put(&self.works, 0, &words);
    }

    fn launch(&self) {
        self.outcomes.fill(0, self.outcomes.len(), 0).unwrap();
        let job = KernelJob {
            works: self.works.addr(),
            outcomes: self.outcomes.addr(),
            count: self.scale.items,
            nsid: 1,
            retries: 3,
            stall: KernelJob::nanos(Duration::from_secs(5)),
            limit: KernelJob::nanos(Duration::from_secs(60)),
            poison: self.poison.addr(),
            ..KernelJob::default()
        };
        let launch = Launch::Owner(self.queues.clone());
        let exits = self.rig.gpu.launch(&launch, &job).unwrap().join().unwrap();
        assert!(exits.iter().all(|exit| *exit == Exit::Finished), "{exits:?} {:?}", self.reports());
        let mut bytes = vec![0; self.scale.items as usize * 8];
        self.outcomes.read(0, &mut bytes).unwrap();
        let good = u64::from(ItemOutcome::Done(Status::SUCCESS).word()).to_le_bytes();
        let bad = bytes.chunks_exact(8).position(|outcome| outcome != good);
        assert_eq!(bad, None, "an item that failed the first time: {:?}", self.reports());
    }

    /// Has the GPU compare all data with what should be there; returns how many words differ.
    fn check(&self) -> u32 {
        let chunks = self.scale.items.min(1024);
        let each = self.scale.items / chunks;
        self.result.fill(0, 4096, 0).unwrap();
        for chunk in 0..chunks {
            let check = DataCheck {
                data: self.data.addr(),
                result: self.result.addr(),
                first: chunk * each,
                count: each,
                blocks: BLOCKS,
                block_words: BLOCK as u32 / 4,
                seed: SEED,
                ..DataCheck::default()
            };
            put(&self.checks, (chunk * DataCheck::BYTES) as usize, &check.words());
        }
        let (rig, limit) = (self.rig, self.scale.limit);
        rig.gpu.start_rig(&rig.code, Kernel::Check, &self.checks, chunks, limit).unwrap().wait().unwrap();
        get::<1>(&self.result, 0)[0]
    }

    fn reports(&self) -> Vec<Report> {
        self.pairs.numbers().map(|qid| self.pairs.report(qid).unwrap()).collect()
    }
}

#[test]
fn many_commands_each_once_and_every_byte_right() {
    let Some(rig) = Rig::open("many_commands_each_once_and_every_byte_right") else { return };
    let wanted = number("ONEHOP_GPU_COMMANDS", 8 << 20);
    for (flags, order) in [(0, "in order"), (flag::REVERSE, "reversed")] {
        let bed = Bed::new(&rig, flags);
        bed.write_works(nvm::opcode::READ);
        let (start, mut commands) = (Instant::now(), 0);
        while commands < wanted / 2 {
            bed.data.fill(0, bed.data.len(), 0xa5).unwrap();
            bed.launch();
            assert_eq!(bed.check(), 0, "words that are not those of the block");
            commands += u64::from(bed.scale.items);
        }
        bed.pairs.stop().unwrap();
        let reports = bed.reports();
        let sum = |f: fn(&Report) -> u64| reports.iter().map(f).sum::<u64>();
        println!(
            "{commands} reads of 512 bytes completed {order} on {} queues in {:.1?}: {} fetched, {} completed, {} \
             errors, {} violations, every byte checked on the GPU",
            bed.scale.queues,
            start.elapsed(),
            sum(|r| r.commands),
            sum(|r| r.completions),
            sum(|r| r.errors),
            sum(|r| r.violations.into()),
        );
        assert_eq!((sum(|r| r.commands), sum(|r| r.completions)), (commands, commands));
        assert_eq!((sum(|r| r.errors), sum(|r| r.violations.into())), (0, 0));
    }
}
