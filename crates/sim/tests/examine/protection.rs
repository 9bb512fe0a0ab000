//! Protection information: inserted, stripped and checked.

use onehop_proto::nvm::{self, Range, dsm, flag};
use onehop_proto::{Sqe, Status};

use crate::host::{Buf, Host, pattern};

const ALL: u32 = flag::CHECK_GUARD | flag::CHECK_APPTAG | flag::CHECK_REFTAG;
const LBA: u64 = 7;
const APPTAG: u16 = 0xabcd;

/// The CRC of T10, bit by bit.
fn crc(data: &[u8]) -> u16 {
    data.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| crc << 1 ^ if crc >> 15 == 1 { 0x8bb7 } else { 0 })
    })
}

/// Protection information of a block.
fn info(data: &[u8], others: &[u8], apptag: u16, reftag: u32) -> Vec<u8> {
    let guard = crc(&[data, others].concat());
    [&guard.to_be_bytes()[..], &apptag.to_be_bytes(), &reftag.to_be_bytes()].concat()
}

/// A drive with two blocks' buffers: data, with room for metadata between, and metadata.
struct Bench {
    host: Host,
    kind: u8,
    ms: usize,
    ext: bool,
    data: Buf,
    meta: Buf,
}

impl Bench {
    fn new(kind: u8, ms: usize, ext: bool) -> Self {
        let spec = format!("mem:1M?workers=0&ms={ms}&ext={}&pi={kind}", u8::from(ext));
        let host = Host::new(&spec);
        let (data, meta) = (host.buffer(4096), host.buffer(4096));
        Self { host, kind, ms, ext, data, meta }
    }

    /// A command on two blocks with their tags.
    fn two(&self, sqe: Option<Sqe>, flags: u32) -> Sqe {
        let sqe = sqe.unwrap().with_prps(self.data.addr(), 0).with_mptr(self.meta.addr());
        nvm::with_tags(nvm::with_flags(sqe, flags), LBA as u32, APPTAG, u16::MAX)
    }

    fn write(&mut self, flags: u32) -> Status {
        let sqe = self.two(nvm::write(1, LBA, 2), flags);
        self.host.run(1, sqe).status()
    }

    fn read(&mut self, flags: u32) -> Status {
        let sqe = self.two(nvm::read(1, LBA, 2), flags);
        self.host.run(1, sqe).status()
    }

    /// Without a check the reference tag is arbitrary; with one it matches the type.
    fn checks(&self) -> u32 {
        if self.kind == 3 { flag::CHECK_GUARD | flag::CHECK_APPTAG } else { ALL }
    }

    fn reftag(&self, block: u32) -> u32 {
        LBA as u32 + if self.kind == 3 { 0 } else { block }
    }

    /// Writes two blocks and their metadata to the host's buffers.
    fn put(&self, blocks: [&[u8]; 2], meta: [&[u8]; 2]) {
        for i in 0..2 {
            if self.ext {
                self.data.mem.write(i * (512 + self.ms), &[blocks[i], meta[i]].concat()).unwrap();
            } else {
                self.data.mem.write(i * 512, blocks[i]).unwrap();
                self.meta.mem.write(i * self.ms, meta[i]).unwrap();
            }
        }
    }

    /// The metadata of a block in the host's buffers.
    fn meta_of(&self, i: usize) -> Vec<u8> {
        let (mem, at) = if self.ext {
            (&self.data.mem, i * (512 + self.ms) + 512)
        } else {
            (&self.meta.mem, i * self.ms)
        };
        mem.to_vec(at, self.ms).unwrap()
    }

    fn forget(&self) {
        self.data.mem.fill(0, 4096, 0xee).unwrap();
        self.meta.mem.fill(0, 4096, 0xee).unwrap();
    }
}

fn every(work: impl Fn(Bench)) {
    for kind in 1..=3 {
        for (ms, ext) in [(8, false), (8, true), (64, false), (64, true)] {
            work(Bench::new(kind, ms, ext));
        }
    }
}

#[test]
fn it_is_made_and_stripped() {
    every(|mut bench| {
        let (one, two, others) = (pattern(1, 512), pattern(2, 512), pattern(3, bench.ms - 8));
        let raw = [&others[..], &[0x77; 8]].concat();
        // Metadata of eight bytes is only protection information, and stays with the controller.
        let hidden = bench.ms == 8;
        if hidden {
            bench.data.mem.write(0, &[&one[..], &two].concat()).unwrap();
        } else {
            bench.put([&one, &two], [&raw, &raw]);
        }
        assert!(bench.write(flag::PRACT).is_ok());
        bench.forget();
        assert!(bench.read(flag::PRACT | bench.checks()).is_ok());
        if hidden {
            assert_eq!(bench.data.read(1024), [&one[..], &two].concat());
            assert_eq!(bench.data.mem.to_vec(1024, 16).unwrap(), [0xee; 16], "nothing else came");
            assert_eq!(bench.meta.read(16), [0xee; 16]);
        }
        bench.forget();
        assert!(bench.read(bench.checks()).is_ok());
        for (i, data) in [&one, &two].into_iter().enumerate() {
            let want = [&others[..], &info(data, &others, APPTAG, bench.reftag(i as u32))].concat();
            assert_eq!(bench.meta_of(i), want, "type {}, {} bytes, block {i}", bench.kind, bench.ms);
        }
        bench.host.clean();
    });
}

#[test]
fn each_field_is_checked_when_asked() {
    every(|mut bench| {
        let (data, others) = (pattern(4, 512), pattern(5, bench.ms - 8));
        let right = |i: u32| [&others[..], &info(&data, &others, APPTAG, bench.reftag(i))].concat();
        let (first, second) = (right(0), right(1));
        let wrong = |at: usize| {
            let mut meta = second.clone();
            meta[bench.ms - 8 + at] ^= 0x10;
            meta
        };
        let kinds = [
            (0, flag::CHECK_GUARD, Status::GUARD_CHECK),
            (3, flag::CHECK_APPTAG, Status::APPTAG_CHECK),
            (7, flag::CHECK_REFTAG, Status::REFTAG_CHECK),
        ];
        let metas: Vec<_> = kinds.iter().map(|(at, ..)| wrong(*at)).collect();
        for ((_, flags, want), meta) in kinds.into_iter().zip(metas) {
            if bench.checks() & flags == 0 {
                continue;
            }
            // The host's own blocks are checked before they are written ...
            bench.put([&data, &data], [&first, &second]);
            assert!(bench.write(bench.checks()).is_ok());
            bench.put([&data, &data], [&first, &meta]);
            let refused = bench.write(flags);
            assert!(refused.is(want) && refused.dnr(), "{refused:?}");
            assert!(bench.read(bench.checks()).is_ok(), "nothing was written");
            // ... and without checks they are written unchanged, which a checking reader finds.
            bench.put([&data, &data], [&first, &meta]);
            assert!(bench.write(0).is_ok() && bench.read(0).is_ok());
            for sqe in [nvm::read(1, LBA, 2), nvm::verify(1, LBA, 2), nvm::compare(1, LBA, 2)] {
                let sqe = bench.two(sqe, flags);
                let sqe =
                    if sqe.opcode() == nvm::opcode::VERIFY { sqe.with_prps(0, 0).with_mptr(0) } else { sqe };
                let end = bench.host.run(1, sqe).status();
                assert!(end.is(want), "type {}, opcode {:#x}: {end:?}", bench.kind, sqe.opcode());
            }
        }
        bench.host.clean();
    });
}

#[test]
fn a_mask_says_which_bits_of_the_application_tag_count() {
    let mut bench = Bench::new(1, 8, false);
    bench.data.mem.write(0, &pattern(6, 1024)).unwrap();
    assert!(bench.write(flag::PRACT).is_ok());
    for (tag, mask, ok) in
        [(APPTAG, 0xffff, true), (0x00cd, 0x00ff, true), (0x00cd, 0x01ff, false), (0, 0, true)]
    {
        let sqe = bench.two(nvm::read(1, LBA, 2), flag::PRACT | ALL);
        let end = bench.host.run(1, nvm::with_tags(sqe, LBA as u32, tag, mask)).status();
        assert_eq!(end.is_ok(), ok, "{tag:#x} {mask:#x}: {end:?}");
    }
    bench.host.clean();
}

#[test]
fn reference_tags_fit_the_type() {
    for (kind, reftag, ok) in [(1, 7, true), (1, 8, false), (2, 8, true), (3, 7, false)] {
        let mut bench = Bench::new(kind, 8, false);
        let sqe = bench.two(nvm::read(1, LBA, 2), flag::CHECK_REFTAG);
        let end = bench.host.run(1, nvm::with_tags(sqe, reftag, 0, 0)).status();
        // Unwritten blocks are exempt from checks, with any tags.
        assert!(if ok { end.is_ok() } else { end.is(Status::INVALID_PROTECTION_INFO) }, "{kind}: {end:?}");
        bench.host.clean();
    }
}

#[test]
fn compare_and_verify_take_no_pract() {
    let mut bench = Bench::new(1, 8, false);
    for sqe in
        [bench.two(nvm::compare(1, LBA, 2), flag::PRACT), bench.two(nvm::verify(1, LBA, 2), flag::PRACT)]
    {
        let sqe = if sqe.opcode() == nvm::opcode::VERIFY { sqe.with_prps(0, 0).with_mptr(0) } else { sqe };
        let end = bench.host.run(1, sqe).status();
        assert!(end.is(Status::INVALID_PROTECTION_INFO), "{end:?}");
    }
    bench.host.clean();
}

#[test]
fn a_medium_that_lost_bytes_is_detected() {
    let mut bench = Bench::new(1, 8, true);
    bench.data.mem.write(0, &pattern(7, 1024)).unwrap();
    assert!(bench.write(flag::PRACT).is_ok());
    bench.host.sim.write_media(1, (LBA + 1) * 512 + 100, b"rot").unwrap();
    let end = bench.read(flag::PRACT | ALL);
    assert!(end.is(Status::GUARD_CHECK), "{end:?}");
    assert!(bench.read(flag::PRACT).is_ok(), "no check was requested");
    bench.host.clean();
}

#[test]
fn unwritten_blocks_are_exempt() {
    every(|mut bench| {
        let checks = bench.checks();
        assert!(bench.read(checks).is_ok());
        assert_eq!(bench.meta_of(1)[bench.ms - 8..], [0xff; 8]);
        bench.put([&[1; 512], &[1; 512]], [&vec![0; bench.ms], &vec![0; bench.ms]]);
        assert!(bench.write(0).is_ok() && !bench.read(checks).is_ok());
        // Deallocated blocks, and zeroes without protection information.
        let range = Range { context: 0, blocks: 2, lba: LBA };
        bench.data.mem.write(0, &range.encode()).unwrap();
        let deallocate = nvm::dataset_management(1, 0, dsm::DEALLOCATE).with_prps(bench.data.addr(), 0);
        assert!(bench.host.run(1, deallocate).status().is_ok());
        assert!(bench.read(checks).is_ok());
        assert_eq!(bench.meta_of(0)[bench.ms - 8..], [0xff; 8]);
        // Zeroes with protection information.
        let zeroes = bench.two(nvm::write_zeroes(1, LBA, 2), flag::PRACT).with_prps(0, 0).with_mptr(0);
        assert!(bench.host.run(1, zeroes).status().is_ok());
        assert!(bench.read(checks).is_ok());
        let want = info(&[0; 512], &vec![0; bench.ms - 8], APPTAG, bench.reftag(1));
        assert_eq!(bench.meta_of(1)[bench.ms - 8..], want);
        bench.host.clean();
    });
}

#[test]
fn it_survives_in_an_image_and_a_power_loss() {
    let path = std::env::temp_dir().join(format!("onehop-protected-{}.img", std::process::id()));
    let spec = format!("{}?size=1M&workers=0&ms=8&pi=1", path.display());
    let tags = |sqe: Sqe, flags| nvm::with_tags(nvm::with_flags(sqe, flags), 3, 0, 0);
    for round in 0..2 {
        let mut host = Host::new(&spec);
        let data = host.buffer(4096);
        let command = |sqe: Option<Sqe>, flags| tags(sqe.unwrap().with_prps(data.addr(), 0), flags);
        if round == 0 {
            data.mem.write(0, &pattern(8, 512)).unwrap();
            assert!(host.run(1, command(nvm::write(1, 3, 1), flag::PRACT)).status().is_ok());
            host.run(1, nvm::flush(1));
            data.mem.write(0, &pattern(9, 512)).unwrap();
            assert!(host.run(1, command(nvm::write(1, 3, 1), flag::PRACT)).status().is_ok());
            host.sim.power_cycle();
            continue;
        }
        let end =
            host.run(1, command(nvm::read(1, 3, 1), flag::PRACT | flag::CHECK_GUARD | flag::CHECK_REFTAG));
        assert!(end.status().is_ok() && data.read(512) == pattern(8, 512), "{:?}", end.status());
    }
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_file(format!("{}.meta", path.display())).unwrap();
}
