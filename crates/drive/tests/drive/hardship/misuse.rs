//! Callers and controllers that violate their contracts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, GpuJob, GpuMode, GpuSetup, Io, Op, Options, Placement};
use onehop_gpu::{Emulated, Gpu, Place};
use onehop_os::{ControllerBackend, Registers};
use onehop_proto::regs::offset;

use super::{inject, open, options};

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
    let with = |keep, add| ControllerBackend {
        regs: Arc::new(Claims { inner: sim.registers(), keep, add }),
        ..sim.port()
    };
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

/// Blocks of a format's data as they are transferred, with `fill` in the metadata between.
fn travelling(ns: &onehop_drive::Namespace, data: &[u8], fill: u8) -> Vec<u8> {
    let (lba, block) = (ns.format.lba_bytes() as usize, ns.format.transfer_bytes(1).unwrap() as usize);
    let padded = |block_data: &[u8]| [block_data, &vec![fill; block - lba]].concat();
    data.chunks_exact(lba).flat_map(padded).collect()
}

/// The data of transferred blocks.
fn data_of(ns: &onehop_drive::Namespace, mixed: &[u8]) -> Vec<u8> {
    let (lba, block) = (ns.format.lba_bytes() as usize, ns.format.transfer_bytes(1).unwrap() as usize);
    mixed.chunks_exact(block).flat_map(|block| block[..lba].to_vec()).collect()
}

#[test]
fn protection_information_is_made_and_checked_by_the_controller() {
    for (spec, kind, hidden) in [
        ("ms=8&pi=1", 1, true),
        ("ms=8&ext=1&pi=1", 1, true),
        ("ms=8&ext=1&pi=2", 2, true),
        ("ms=64&pi=3", 3, false),
        ("ms=64&ext=1&pi=1", 1, false),
    ] {
        let (sim, drive) = open(&format!("mem:1M?{spec}"));
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        assert_eq!((ns.format.pi, ns.format.metadata == 0, ns.medium.metadata > 0), (kind, hidden, true));
        let bytes = ns.format.transfer_bytes(8).unwrap() as usize;
        let buffer = drive.buffer(bytes).unwrap();
        let host = buffer.host().unwrap();
        let data: Vec<u8> = (0..8 * 512u32).map(|i| (i * 7 + i / 512) as u8).collect();
        // Nothing was written yet, which is not an error; nor are zeroes.
        queue.read(ns, 0, 8, &buffer, 0).unwrap();
        queue.run(ns, &Io { data: None, ..Io::new(Op::WriteZeroes, 90, 8, &buffer, 0) }).unwrap();
        queue.read(ns, 90, 8, &buffer, 0).unwrap();
        assert_eq!(data_of(ns, &host.to_vec(0, bytes).unwrap()), [0; 8 * 512]);
        host.write(0, &travelling(ns, &data, 0xa5)).unwrap();
        queue.write(ns, 100, 8, &buffer, 0).unwrap();
        host.fill(0, bytes, 0xee).unwrap();
        // Each block has its own tags: a reader may begin anywhere.
        queue.read(ns, 103, 5, &buffer, 0).unwrap();
        let got = host.to_vec(0, ns.format.transfer_bytes(5).unwrap() as usize).unwrap();
        assert!(data_of(ns, &got) == data[3 * 512..], "{spec}");
        if hidden {
            let refused = queue.run(ns, &Io::new(Op::Compare, 100, 8, &buffer, 0));
            assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
        }
        sim.write_media(1, 106 * 512 + 9, b"rot").unwrap();
        let found = queue.read(ns, 100, 8, &buffer, 0).unwrap_err();
        assert!(matches!(found, Error::Command { status, .. } if status.code() == 0x282), "{spec}: {found}");
        queue.read(ns, 100, 6, &buffer, 0).unwrap();
        queue.flush(ns).unwrap();
        assert_eq!(sim.violations(), []);
    }
}

#[test]
fn gpus_read_and_write_protected_blocks() {
    for spec in ["ms=8&pi=1", "ms=8&ext=1&pi=2", "ms=64&ext=1&pi=1", "ms=8&pi=3"] {
        let (sim, drive) = open(&format!("mem:1M?{spec}"));
        let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
        let bytes = ns.format.transfer_bytes(8).unwrap() as usize;
        let buffer = drive.buffer(bytes).unwrap();
        let data: Vec<u8> = (0..8 * 512u32).map(|i| (i * 13 + i / 512) as u8).collect();
        buffer.host().unwrap().write(0, &travelling(ns, &data, 0)).unwrap();
        queue.write(ns, 8, 8, &buffer, 0).unwrap();
        let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
        let setup = GpuSetup { mode: GpuMode::Shared { threads: 1 }, ..GpuSetup::new(Placement::TIER1) };
        let room = ns.medium.transfer_bytes(8).unwrap() as usize;
        let (region, memory) = drive.gpu_buffer(&*gpu, Place::PinnedHost, room).unwrap();
        let queues = || drive.gpu_queues(gpu.clone(), setup).unwrap();
        let job = [GpuJob { lba: 8, blocks: 8, offset: 0 }];
        let refused = |end: Option<Error>| {
            assert!(matches!(end, Some(Error::Protected { nsid: 1, .. })), "{spec}: {end:?}");
        };
        refused(queues().export(ns, &memory, true).err());
        queues().read(ns, &job, &memory).unwrap();
        let mut got = vec![0; bytes];
        region.read(0, &mut got).unwrap();
        assert!(data_of(ns, &got) == data, "{spec}");
        // What the GPU writes, both sides read with their checks.
        let other: Vec<u8> = data.iter().map(|byte| byte ^ 0x5a).collect();
        region.write(0, &travelling(ns, &other, 0)).unwrap();
        queues().write(ns, &job, &memory).unwrap();
        queue.read(ns, 8, 8, &buffer, 0).unwrap();
        assert!(data_of(ns, &buffer.host().unwrap().to_vec(0, bytes).unwrap()) == other, "{spec}");
        queues().read(ns, &job, &memory).unwrap();
        region.read(0, &mut got).unwrap();
        assert!(data_of(ns, &got) == other, "{spec}");
        if ns.medium.extended {
            queues().export(ns, &memory, false).unwrap().revoke().unwrap();
        }
        sim.write_media(1, 9 * 512, b"rot").unwrap();
        assert!(queues().read(ns, &job, &memory).is_err(), "{spec}");
        assert_eq!(sim.violations(), []);
    }
}

#[test]
fn registers_end_where_the_bar_does() {
    let (sim, drive) = open("mem:1M");
    assert_eq!(drive.registers(0, u32::MAX).len() as u32, sim.registers().size() / 4);
    assert!(drive.registers(u32::MAX - 3, 100).is_empty());
}

/// Kernels that do not measure times store none. Their launch gives up a late command, which then writes nothing any
/// more.
#[test]
fn a_launch_without_times_leaves_nothing_in_flight() {
    let (sim, drive) = open("mem:1M");
    let (ns, gpu) = (drive.namespace(1).unwrap(), Arc::new(Emulated::new()));
    let setup = GpuSetup { stall: Duration::from_millis(250), ..GpuSetup::new(Placement::TIER1) };
    let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
    let (region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
    inject(&sim, "late@op=read,n=1,delay=2s");
    let start = Instant::now();
    let end = queues.timed(&*gpu, Op::Read, ns, &[GpuJob { lba: 0, blocks: 8, offset: 0 }], &buffer);
    assert!(matches!(&end, Err(Error::Gpu(why)) if why.contains("clocks")), "{end:?}");
    region.fill(0, 4096, 0xee).unwrap();
    std::thread::sleep(Duration::from_millis(2500).saturating_sub(start.elapsed()));
    let mut bytes = [0; 4096];
    region.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0xee), "the controller went on to write");
    assert_eq!(drive.incidents().len(), 1, "{:?}", drive.incidents());
    assert_eq!(sim.violations(), []);
}
