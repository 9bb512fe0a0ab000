//! Controllers that may not have ended.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};

use onehop_controller::BusMapping;
use onehop_os::{HostMem, Registers};

use super::*;
use crate::ControllerHost;
use crate::copier::Copier;
use crate::{Doorbells, Emulated, KernelJob, Launch, Running};

/// An emulated GPU that never reports whether its controllers have ended.
struct Uncertain {
    gpu: Emulated,
    fails: Arc<AtomicBool>,
    /// Held for controllers.
    hold: Arc<()>,
    /// If set, holding reports here, and takes a while.
    holding: Option<Sender<()>>,
}

struct Controllers(Box<dyn Resident>, Arc<AtomicBool>);

impl Resident for Controllers {
    fn is_over(&self) -> bool {
        self.0.is_over()
    }

    fn join(self: Box<Self>) -> Result<()> {
        self.0.join()?;
        if self.1.load(Ordering::Acquire) {
            return Err(Error::Unended { what: "controllers".into(), seconds: 1 });
        }
        Ok(())
    }
}

impl Gpu for Uncertain {
    fn name(&self) -> &str {
        self.gpu.name()
    }

    fn simulated(&self) -> bool {
        true
    }

    fn alloc(&self, place: Place, bytes: usize) -> Result<Region> {
        self.gpu.alloc(place, bytes)
    }

    fn adopt(&self, place: Place, mem: HostMem) -> Result<Region> {
        self.gpu.adopt(place, mem)
    }

    fn copier(&self, from: &Region, to: &Region) -> Result<Box<dyn Copier>> {
        self.gpu.copier(from, to)
    }

    fn map_registers(&self, regs: Arc<dyn Registers>) -> Result<Doorbells> {
        self.gpu.map_registers(regs)
    }

    fn prepare(&self, launch: &Launch) -> Result<()> {
        self.gpu.prepare(launch)
    }

    fn launch(&self, launch: &Launch, job: &KernelJob) -> Result<Box<dyn Running>> {
        self.gpu.launch(launch, job)
    }

    fn controllers(&self) -> Result<&dyn ControllerHost> {
        Ok(self)
    }
}

impl ControllerHost for Uncertain {
    fn hold(&self, _what: &'static str, _at: GpuAddr, _bytes: u64) -> Result<Hold> {
        if let Some(holding) = &self.holding {
            let _ = holding.send(());
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(self.hold.clone())
    }

    fn serve(&self, serving: Serving) -> Result<Box<dyn Resident>> {
        Ok(Box::new(Controllers(self.gpu.controllers()?.serve(serving)?, self.fails.clone())))
    }
}

/// Controllers that run, and a pair for them whose rings lie in this memory.
fn started(gpu: &Arc<dyn Gpu>, table: &Arc<Mutex<Table>>, memory: &Region) -> (Pairs, Begin<'static>) {
    let namespace = gpu.alloc(Place::Vram, 4096).unwrap();
    let limit = Duration::from_secs(60);
    let common = Common { namespace, blocks: 8, lba_shift: 9, max_bytes: 4096, limit, flags: 0 };
    let pairs = Pairs::new(gpu, common, table, 1, 4096).unwrap();
    pairs.start().unwrap();
    let (sq, cq) = (memory.addr(), memory.addr().plus(4096));
    let begin = Begin { sq, cq, sq_entries: 4, cq_entries: 4, cqid: 1, page_shift: 12, faults: &[] };
    (pairs, begin)
}

#[test]
fn memory_of_controllers_that_may_run_is_kept() {
    for fails in [false, true] {
        let (flag, hold) = (Arc::new(AtomicBool::new(fails)), Arc::new(()));
        let gpu: Arc<dyn Gpu> = Arc::new(Uncertain {
            gpu: Emulated::new(),
            fails: flag.clone(),
            hold: hold.clone(),
            holding: None,
        });
        let table = Arc::new(Mutex::new(Table::new(&gpu, 3).unwrap()));
        let memory = gpu.alloc(Place::Vram, 8192).unwrap();
        let range = |bus| BusMapping { bus, bytes: 4096, target: memory.addr() };
        for bus in [0x10000, 0x20000, 0x30000] {
            locked(&table).add(range(bus)).unwrap();
        }
        let (pairs, begin) = started(&gpu, &table, &memory);
        assert!(pairs.begin(1, &begin).unwrap());
        // A mapping removed meanwhile keeps its slot and its memory.
        locked(&table).remove(0x10000).unwrap();
        // This test's and the GPU's; three mappings; two rings.
        assert_eq!(Arc::strong_count(&hold), 2 + 3 + 2);
        assert_eq!(matches!(pairs.stop(), Err(Error::Unended { .. })), fails);
        assert_eq!(Arc::strong_count(&hold), if fails { 2 + 3 + 2 } else { 2 + 2 });
        // Entries move, and room is freed, only while no warp searches.
        assert_eq!(locked(&table).add(range(0x40000)).is_err(), fails);
        assert_eq!([pairs.start().is_err(), pairs.stop().is_err()], [fails; 2]);
        assert!(!pairs.are_started());
        drop((pairs, table, gpu));
        assert_eq!(Arc::strong_count(&hold), if fails { 1 + 3 + 2 } else { 1 });
    }
}

/// Otherwise the rings would be released that a warp is about to run on.
#[test]
fn controllers_do_not_stop_while_a_pair_begins() {
    let (holding, is_holding) = channel();
    let (fails, hold) = (Arc::new(AtomicBool::new(false)), Arc::new(()));
    let gpu: Arc<dyn Gpu> = Arc::new(Uncertain { gpu: Emulated::new(), fails, hold, holding: Some(holding) });
    let table = Arc::new(Mutex::new(Table::new(&gpu, 3).unwrap()));
    let memory = gpu.alloc(Place::Vram, 8192).unwrap();
    let (pairs, begin) = started(&gpu, &table, &memory);
    std::thread::scope(|scope| {
        let begun = scope.spawn(|| pairs.begin(1, &begin).unwrap());
        is_holding.recv().unwrap();
        pairs.stop().unwrap();
        assert!(begun.join().unwrap(), "they were stopped first");
    });
}

#[test]
fn one_table_is_searched_by_one_set_of_controllers() {
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let table = Arc::new(Mutex::new(Table::new(&gpu, 3).unwrap()));
    let pairs = [(); 2].map(|()| {
        let namespace = gpu.alloc(Place::Vram, 4096).unwrap();
        let limit = Duration::from_secs(60);
        let common = Common { namespace, blocks: 8, lba_shift: 9, max_bytes: 4096, limit, flags: 0 };
        Pairs::new(&gpu, common, &table, 1, 4096).unwrap()
    });
    pairs[0].start().unwrap();
    assert!(matches!(pairs[1].start(), Err(Error::Launch(_))) && !pairs[1].are_started());
    // Dropping them ends them.
    let [first, second] = pairs;
    let begun = Instant::now();
    drop(first);
    second.start().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(30));
}
