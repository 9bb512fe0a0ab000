//! Callers and controllers that do what they should not.

use std::sync::Arc;

use onehop_drive::{Drive, Error, GpuJob, GpuMode, GpuSetup, Io, Op, Options, Placement};
use onehop_gpu::{Emulated, Gpu, Place};
use onehop_os::{Port, Registers};
use onehop_proto::regs::offset;

use crate::{open, options};

#[test]
fn memory_and_namespaces_belong_to_one_drive() {
    let ((_a_sim, a), (_b_sim, b)) = (open("mem:1M"), open("mem:1M?lba=4096"));
    let (theirs, ours) = (a.buffer(4096).unwrap(), b.buffer(4096).unwrap());
    let queue = b.queue().unwrap();
    let end = queue.read(b.namespace(1).unwrap(), 0, 1, &theirs, 0);
    assert!(matches!(end, Err(Error::Foreign { what: "buffer", .. })), "{end:?}");
    let end = queue.read(a.namespace(1).unwrap(), 0, 1, &ours, 0);
    assert!(matches!(end, Err(Error::Foreign { what: "namespace", .. })), "{end:?}");
}

#[test]
fn a_token_belongs_to_one_queue() {
    let (_sim, drive) = open("mem:1M");
    let ns = drive.namespace(1).unwrap();
    let (a, b) = (drive.queue().unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(4096).unwrap();
    let of_a = a.submit(ns, &Io::new(Op::Read, 0, 1, &buffer, 0)).unwrap();
    let of_b = b.submit(ns, &Io::new(Op::Read, 1, 1, &buffer, 512)).unwrap();
    assert!(matches!(b.wait(of_a), Err(Error::Token)));
    assert!(matches!(b.wait(onehop_drive::Token::default()), Err(Error::Token)));
    b.wait(of_b).unwrap();
    assert!(matches!(b.wait(of_b), Err(Error::Token)), "spent");
    a.wait(of_a).unwrap();
}

/// A controller whose capabilities are not what they were.
struct Claims {
    inner: Arc<dyn Registers>,
    keep: u64,
    add: u64,
}

impl Registers for Claims {
    fn read32(&self, at: u32) -> u32 {
        let value = self.inner.read32(at);
        match at {
            0 => value & self.keep as u32 | self.add as u32,
            4 => value & (self.keep >> 32) as u32 | (self.add >> 32) as u32,
            _ => value,
        }
    }
    fn write32(&self, at: u32, value: u32) {
        // A page size (CC.MPS) that it only claims to have is not asked of the drive behind it.
        let value = if at == offset::CC && self.add >> 48 != 0 { value & !(15 << 7) } else { value };
        self.inner.write32(at, value);
    }
    fn size(&self) -> u32 {
        self.inner.size()
    }
}

#[test]
fn capabilities_that_cannot_be_are_refused() {
    let sim = onehop_sim::open("mem:1M").unwrap();
    let with =
        |keep, add| Port { regs: Arc::new(Claims { inner: sim.registers(), keep, add }), ..sim.port() };
    let end = Drive::open(with(!0xffff, 0), options());
    assert!(matches!(end, Err(Error::Unsupported { .. })), "queues of one entry");
    let end = Drive::open(with(!0, 15 << 32), options());
    assert!(matches!(end, Err(Error::Unsupported { .. })), "doorbells beyond the BAR");
    let end = Drive::open(with(!0, 0xff << 48), options());
    let why = end.map(|_| ()).unwrap_err().to_string();
    assert!(why.contains("MPSMIN") && why.contains("128 MiB"), "{why}");
}

#[test]
fn any_longest_transfer_will_do() {
    for spec in ["mem:8M?mdts=0", "mem:8M?mdts=0&mpsmin=1&mpsmax=1", "mem:8M?mdts=0&scatter=1"] {
        for max_transfer in [0, 5000, u64::MAX] {
            let sim = onehop_sim::open(spec).unwrap();
            let options = Options { max_transfer, depth: 16, sgl: false, ..options() };
            let drive = Drive::open(sim.port(), options).unwrap();
            let buffer = drive.buffer(1 << 20).unwrap();
            let queue = drive.queue().unwrap();
            queue.read(drive.namespace(1).unwrap(), 0, 2048, &buffer, 0).unwrap();
            assert_eq!(sim.violations(), []);
        }
    }
}

#[test]
fn a_drive_for_reading_does_not_have_its_features_set() {
    let sim = onehop_sim::open("mem:1M").unwrap();
    let drive = Drive::open(sim.port(), Options::default()).unwrap();
    assert!(matches!(drive.set_feature(6, 0), Err(Error::ReadOnly { .. })));
}

#[test]
fn blocks_are_not_written_without_their_protection_information() {
    for (spec, kind) in [("ms=8&pi=1", 1), ("ms=8&ext=1&pi=2", 2), ("ms=64&pi=3", 3), ("ms=64&ext=1&pi=1", 1)]
    {
        let (sim, drive) = open(&format!("mem:1M?{spec}"));
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let buffer = drive.buffer(8192).unwrap();
        buffer.host().unwrap().write(0, &[0xa5; 8192]).unwrap();
        let refused = |end: Option<Error>| match end {
            Some(Error::Protected { nsid: 1, kind: told, .. }) if told == kind => {}
            other => panic!("{spec}: {other:?}"),
        };
        refused(queue.write(ns, 0, 8, &buffer, 0).err());
        refused(queue.run(ns, &Io::new(Op::WriteZeroes, 0, 8, &buffer, 0)).err());
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        let setup = GpuSetup { mode: GpuMode::Shared { threads: 1 }, ..GpuSetup::new(Placement::TIER1) };
        let (_region, data) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 8192).unwrap();
        let queues = || drive.gpu_queues(gpu.clone(), setup).unwrap();
        let job = [GpuJob { lba: 0, blocks: 8, offset: 0 }];
        refused(queues().write(ns, &job, &data).err());
        refused(queues().lend(ns, &data, true).err());
        queue.read(ns, 0, 8, &buffer, 0).unwrap();
        // What was read is there, with zeroes for protection information.
        queue.run(ns, &Io::new(Op::Compare, 0, 8, &buffer, 0)).unwrap();
        queue.flush(ns).unwrap();
        if ns.format.extended {
            queues().read(ns, &job, &data).unwrap();
            queues().lend(ns, &data, false).unwrap().take_back().unwrap();
        }
        assert!(!sim.stats().io.keys().any(|op| [1, 8].contains(op)), "{spec}: {:?}", sim.stats().io);
        assert_eq!(sim.violations(), []);
    }
}

#[test]
fn registers_end_where_the_bar_does() {
    let (sim, drive) = open("mem:1M");
    assert_eq!(drive.registers(0, u32::MAX).len() as u32, sim.registers().size() / 4);
    assert!(drive.registers(u32::MAX - 3, 100).is_empty());
}
