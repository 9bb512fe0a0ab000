//! One suite for every controller: it reads back what was written.
#![allow(missing_docs, dead_code, clippy::unwrap_used)]

#[path = "../common/mod.rs"]
pub mod common;

use std::collections::VecDeque;

use onehop_drive::{
    Buffer, Drive, Error, GpuJob, GpuMode, GpuSetup, Io, IoQueue, Namespace, Op, Options, Placement,
};
use onehop_os::ControllerBackend;

/// The properties of a controller.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub lba: u32,
    pub ms: u16,
    pub ext: bool,
    pub mdts: u8,
    pub queues: u16,
    pub depth: u32,
    pub sgl: bool,
    /// QEMU's model (7.2) loses extended metadata when a command has more than 512 bytes of it and not a multiple of
    /// 512: such commands are compared without.
    pub loses_metadata: bool,
    /// The controller reaches the memory of a real GPU.
    pub reaches_vram: bool,
    /// The controller ends a command for a namespace that it does not have with a status from which the driver
    /// concludes that the namespace was removed (SPDK's target: Invalid Namespace or Format, without DNR).
    pub unknown_is_removed: bool,
    /// Compare works where the controller offers it: with SPDK's delay and error bdevs it does not.
    pub compares: bool,
}

pub const PLAIN: Case = Case {
    lba: 512,
    ms: 0,
    ext: false,
    mdts: 5,
    queues: 2,
    depth: 31,
    sgl: true,
    loses_metadata: false,
    reaches_vram: false,
    unknown_is_removed: false,
    compares: true,
};

/// Every parameter at its ends and in between, each with different companions.
pub fn matrix(most_entries: u32) -> Vec<Case> {
    let full = most_entries - 1;
    vec![
        PLAIN,
        Case { mdts: 1, depth: 1, queues: 1, sgl: false, ..PLAIN },
        Case { mdts: 2, lba: 4096, depth: 2, queues: 3, sgl: false, ..PLAIN },
        Case { mdts: 3, depth: 3, queues: 64, ..PLAIN },
        Case { mdts: 4, lba: 4096, depth: full, queues: 1, ..PLAIN },
        Case { mdts: 5, ms: 8, ext: true, depth: 63, ..PLAIN },
        Case { mdts: 6, ms: 8, ext: false, depth: 64, sgl: false, ..PLAIN },
        Case { mdts: 7, lba: 4096, ms: 16, ext: true, queues: 8, ..PLAIN },
        Case { mdts: 8, lba: 4096, ms: 16, ext: false, depth: 7, ..PLAIN },
        Case { mdts: 8, depth: full, queues: 4, sgl: false, ..PLAIN },
        Case { mdts: 1, lba: 4096, ms: 8, ext: false, depth: 2, ..PLAIN },
        Case { mdts: 3, ms: 16, ext: true, queues: 16, sgl: false, ..PLAIN },
    ]
}

/// A stream of numbers from a seed.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(count + 8);
        while out.len() < count {
            out.extend(self.next().to_le_bytes());
        }
        out.truncate(count);
        out
    }
}

/// All tests, on one controller.
pub fn run(port: ControllerBackend, case: Case) {
    let options = Options {
        writable: true,
        queues: case.queues,
        depth: case.depth,
        sgl: case.sgl,
        // A guarded read would say that the lost metadata is missing.
        canary: !(case.loses_metadata && case.ext),
        ..Options::default()
    };
    let drive = Drive::open(port, options).unwrap();
    let ns = drive.namespace(1).unwrap().clone();
    assert_eq!(ns.format.lba_bytes(), u64::from(case.lba));
    assert_eq!(ns.format.metadata, case.ms);
    assert!(drive.identity().queues >= 1);
    let mut rng = Rng(u64::from(case.lba) << 32 | u64::from(case.mdts) << 16 | u64::from(case.depth));
    lengths_and_offsets(&drive, &ns, &mut rng, case);
    single_commands(&drive, &ns, &mut rng, case);
    if case.ms > 0 && !case.ext {
        separate_metadata(&drive, &ns, &mut rng);
    }
    many_queues(&drive, &ns, case);
    if !drive.is_remote() {
        gpu(&drive, &ns, &mut rng, case);
    }
    errors(&drive, &ns, case);
    drive.reset().unwrap();
    lengths_and_offsets(&drive, &ns, &mut rng, case);
    drive.log_page(0x02, u32::MAX, 512).unwrap();
}

fn fill(buffer: &Buffer, offset: u64, data: &[u8]) {
    buffer.host().unwrap().write(offset as usize, data).unwrap();
}

fn bytes(buffer: &Buffer, offset: u64, count: u64) -> Vec<u8> {
    buffer.host().unwrap().to_vec(offset as usize, count as usize).unwrap()
}

/// Compares what was read with what was written.
fn check(ns: &Namespace, got: &[u8], want: &[u8], at_once: u64, case: Case, what: &str) {
    let (block, ms) = (ns.format.transfer_bytes(1).unwrap() as usize, usize::from(case.ms));
    let blocks = got.len() / block;
    let is_lost = |i: usize| {
        let first = i / at_once as usize * at_once as usize;
        let bytes = (blocks - first).min(at_once as usize) * ms;
        case.loses_metadata && case.ext && bytes > 512 && !bytes.is_multiple_of(512)
    };
    for (i, (got, want)) in got.chunks_exact(block).zip(want.chunks_exact(block)).enumerate() {
        let count = if is_lost(i) { block - ms } else { block };
        assert!(got[..count] == want[..count], "{what}: block {i} of {blocks} is not what was written");
    }
}

/// From one block to past MDTS, at every kind of offset in a page.
fn lengths_and_offsets(drive: &Drive, ns: &Namespace, rng: &mut Rng, case: Case) {
    let queue = drive.queue().unwrap();
    let at_once = ns.format.blocks_within(drive.identity().max_transfer);
    let page_blocks = ns.format.blocks_within(4096).max(1);
    let mut lengths =
        vec![1, 2, page_blocks, page_blocks + 1, at_once - 1, at_once, at_once + 1, 3 * at_once + 2];
    lengths.retain(|blocks| *blocks > 0 && ns.format.transfer_bytes(*blocks).unwrap() <= 5 << 20);
    for (i, blocks) in lengths.into_iter().enumerate() {
        for offset in [0, 4, 508, 2048, 4092] {
            let len = ns.format.transfer_bytes(blocks).unwrap();
            let buffer = drive.buffer((offset + len + 4096) as usize).unwrap();
            let data = rng.bytes(len as usize);
            fill(&buffer, offset, &data);
            let lba = 3 + i as u64 * 5;
            let moved = queue.write(ns, lba, blocks, &buffer, offset).unwrap();
            assert_eq!((moved.bytes, moved.commands), (len, blocks.div_ceil(at_once.min(1 << 16))));
            let back = drive.buffer((len + 8192) as usize).unwrap();
            fill(&back, 0, &vec![0xee; len as usize + 8192]);
            let into = (offset + 1024) & !3;
            queue.read(ns, lba, blocks, &back, into).unwrap();
            check(
                ns,
                &bytes(&back, into, len),
                &data,
                at_once,
                case,
                &format!("{blocks} blocks at offset {offset}"),
            );
            assert!(bytes(&back, 0, into).iter().all(|b| *b == 0xee), "bytes before the buffer were written");
            assert!(
                bytes(&back, into + len, 64).iter().all(|b| *b == 0xee),
                "bytes after the buffer were written"
            );
        }
    }
}

/// Compare, Write Zeroes, Flush and FUA, where the controller has them.
fn single_commands(drive: &Drive, ns: &Namespace, rng: &mut Rng, case: Case) {
    let queue = drive.queue().unwrap();
    let len = ns.format.transfer_bytes(2).unwrap();
    let buffer = drive.buffer(len as usize).unwrap();
    fill(&buffer, 0, &rng.bytes(len as usize));
    queue.run(ns, &Io { fua: true, ..Io::new(Op::Write, 9, 2, &buffer, 0) }).unwrap();
    queue.flush(ns).unwrap();
    let oncs = drive.identity().controller().oncs();
    if case.compares && oncs.compare() && !ns.format.has_separate_metadata() {
        queue.run(ns, &Io::new(Op::Compare, 9, 2, &buffer, 0)).unwrap();
        fill(&buffer, 5, &[bytes(&buffer, 5, 1)[0] ^ 1]);
        let error = queue.run(ns, &Io::new(Op::Compare, 9, 2, &buffer, 0)).unwrap_err();
        assert!(matches!(error, Error::Command { status, .. } if status.code() == 0x285), "{error}");
    }
    if oncs.write_zeroes() && ns.format.metadata == 0 {
        queue.run(ns, &Io { data: None, ..Io::new(Op::WriteZeroes, 9, 2, &buffer, 0) }).unwrap();
        queue.read(ns, 9, 2, &buffer, 0).unwrap();
        assert!(bytes(&buffer, 0, len).iter().all(|b| *b == 0));
    }
}

fn separate_metadata(drive: &Drive, ns: &Namespace, rng: &mut Rng) {
    let queue = drive.queue().unwrap();
    let (len, meta_len) = (ns.format.transfer_bytes(2).unwrap(), ns.format.metadata_bytes(2).unwrap());
    let (data, meta) = (drive.buffer(len as usize).unwrap(), drive.buffer(4096).unwrap());
    let (want, want_meta) = (rng.bytes(len as usize), rng.bytes(meta_len as usize));
    fill(&data, 0, &want);
    fill(&meta, 12, &want_meta);
    queue.run(ns, &Io { metadata: Some((&meta, 12)), ..Io::new(Op::Write, 40, 2, &data, 0) }).unwrap();
    fill(&data, 0, &vec![0; len as usize]);
    queue.run(ns, &Io { metadata: Some((&meta, 1024)), ..Io::new(Op::Read, 40, 2, &data, 0) }).unwrap();
    assert!(bytes(&data, 0, len) == want && bytes(&meta, 1024, meta_len) == want_meta);
}

/// A thread on each queue, each with blocks of its own, many laps around the rings.
fn many_queues(drive: &Drive, ns: &Namespace, case: Case) {
    let mut queues = Vec::new();
    let granted = drive.identity().queues.min(u32::from(case.queues));
    for _ in 0..granted {
        queues.push(drive.queue().unwrap());
    }
    assert!(matches!(drive.queue(), Err(Error::NoQueue { .. })), "more queues than were granted");
    let share = ns.blocks / u64::from(granted);
    let laps = if granted > 8 { 1 } else { 3 };
    std::thread::scope(|scope| {
        for (i, queue) in queues.iter().enumerate() {
            scope.spawn(move || {
                let count = u64::from(queue.depth() + 2).min(share) * laps;
                churn(drive, queue, ns, i as u64 * share, share.min(count), count);
            });
        }
    });
}

/// Writes `count` single blocks and reads them back, as deep as the queue is.
fn churn(drive: &Drive, queue: &IoQueue, ns: &Namespace, first: u64, share: u64, count: u64) {
    let size = ns.format.transfer_bytes(1).unwrap();
    let (from, to) =
        (drive.buffer((share * size) as usize).unwrap(), drive.buffer((share * size) as usize).unwrap());
    let data = Rng(first ^ count).bytes((share * size) as usize);
    fill(&from, 0, &data);
    for (op, buffer) in [(Op::Write, &from), (Op::Read, &to)] {
        let mut tokens = VecDeque::new();
        for i in 0..count {
            let io = Io::new(op, first + i % share, 1, buffer, i % share * size);
            loop {
                match queue.submit(ns, &io) {
                    Ok(token) => break tokens.push_back(token),
                    Err(Error::Full(_)) => {
                        queue.wait(tokens.pop_front().unwrap()).unwrap();
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
        for token in tokens {
            queue.wait(token).unwrap();
        }
    }
    assert!(bytes(&to, 0, share * size) == data);
}

/// The GPU reads and writes in both modes, with changing placements.
fn gpu(drive: &Drive, ns: &Namespace, rng: &mut Rng, case: Case) {
    let gpu = common::gpu();
    let blocks = (ns.format.blocks_within(drive.identity().max_transfer) * 3 + 1).min(ns.blocks / 2);
    let len = ns.format.transfer_bytes(blocks).unwrap() as usize;
    let setups = [
        (GpuMode::Owner, Placement::TIER1),
        (GpuMode::Owner, Placement::TIER3),
        (GpuMode::Shared { threads: 5 }, Placement::POSTED),
        (GpuMode::Shared { threads: 8 }, Placement::TIER2),
        (GpuMode::Shared { threads: 64 }, Placement::TIER3),
    ];
    for (i, (mode, placement)) in setups.into_iter().enumerate() {
        let depth = [1, 40, 3, 16, 40][i];
        let queues = drive.identity().queues.min(2) as u16;
        let placement = common::placed(&*gpu, placement, case.reaches_vram);
        let setup = GpuSetup { mode, depth, queues, ..GpuSetup::new(placement) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        let (region, buffer) =
            drive.gpu_buffer(&*gpu, common::data_at(&*gpu, case.reaches_vram), len + 4096).unwrap();
        let data = rng.bytes(len);
        region.write(0, &data).unwrap();
        let job = |offset| [GpuJob { lba: 7, blocks, offset }];
        if ns.format.has_separate_metadata() {
            assert!(matches!(queues.write(ns, &job(0), &buffer), Err(Error::Unsupported { .. })));
            continue;
        }
        queues.write(ns, &job(0), &buffer).unwrap();
        region.write(0, &vec![0; len + 4096]).unwrap();
        let report = queues.read(ns, &job(2048), &buffer).unwrap();
        assert_eq!((report.bytes, report.retries, report.launches), (len as u64, 0, 1));
        let mut got = vec![0; len];
        region.read(2048, &mut got).unwrap();
        let at_once = ns.format.blocks_within(drive.identity().max_transfer);
        check(ns, &got, &data, at_once, case, &format!("{mode:?} {placement:?}"));
    }
}

/// Invalid commands are refused, by the driver or by the controller, and the queue keeps working.
fn errors(drive: &Drive, ns: &Namespace, case: Case) {
    let queue = drive.queue().unwrap();
    let buffer = drive.buffer(4096 * 4).unwrap();
    let beyond = queue.read(ns, ns.blocks - 1, 2, &buffer, 0).unwrap_err();
    assert!(matches!(beyond, Error::Range { .. }), "{beyond}");
    assert!(matches!(queue.read(ns, u64::MAX, 1, &buffer, 0), Err(Error::Range { .. })));
    assert!(matches!(queue.read(ns, 0, 1, &buffer, 4096 * 4), Err(Error::Buffer { .. })));
    // Only controllers that read memory by themselves care where a buffer begins.
    match queue.read(ns, 0, 1, &buffer, 2) {
        Ok(_) => assert!(drive.is_remote()),
        Err(error) => assert!(matches!(error, Error::Prp(_)), "{error}"),
    }
    let mut other = ns.clone();
    other.blocks = ns.blocks * 2;
    let refused = queue.read(&other, ns.blocks, 1, &buffer, 0).unwrap_err();
    // Linux's target hands such a command to its block layer, which calls it an internal error.
    let is_expected = |code| code == 0x80 || drive.is_remote() && code == 0x06;
    assert!(matches!(refused, Error::Command { status, .. } if is_expected(status.code())), "{refused}");
    other.nsid = 77;
    let refused = queue.read(&other, 0, 1, &buffer, 0).unwrap_err();
    match refused {
        Error::NamespaceChanged { nsid: 77, .. } => assert!(case.unknown_is_removed, "{refused}"),
        refused => assert!(matches!(refused, Error::Command { .. }), "{refused}"),
    }
    queue.read(ns, 0, 1, &buffer, 0).unwrap();
    assert!(matches!(drive.namespace(77), Err(Error::NoNamespace { .. })));
}
