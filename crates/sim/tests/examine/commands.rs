//! The NVM command set, in every format.

use onehop_proto::nvm::{self, Range, dsm, flag};
use onehop_proto::sgl::Descriptor;
use onehop_proto::{BusAddr, Status, admin, identify};
use onehop_sim::Rule;

use crate::host::{Host, pattern};

#[test]
fn every_format_reads_back() {
    for lba in [512usize, 4096, 65536] {
        for ms in [0usize, 8, 16, 64] {
            for ext in [0, 1] {
                for dstrd in [0, 4] {
                    format(lba, ms, ext == 1, dstrd);
                }
            }
        }
    }
}

fn format(lba: usize, ms: usize, ext: bool, dstrd: u8) {
    let spec = format!("mem:4M?workers=0&lba={lba}&ms={ms}&ext={}&dstrd={dstrd}&mqes=7", u8::from(ext));
    let mut host = Host::with_queue(&spec, 8);
    let (inline, split) = if ext { (ms, 0) } else { (0, ms) };
    let blocks = 128 * 1024 / (lba + inline);
    let (len, meta_len) = (blocks * (lba + inline), blocks * split);
    let (data, meta) = (pattern(1, len), pattern(2, meta_len));
    let (buf, meta_buf) = (host.buffer(len), host.buffer(meta_len.max(4)));
    for round in 0..3 {
        buf.mem.write(0, &data).unwrap();
        meta_buf.mem.write(0, &meta).unwrap();
        let write = nvm::write(1, round, blocks as u32).unwrap().with_mptr(meta_buf.addr());
        let (write, _list) = host.describe(write, &buf, 0, len as u64);
        assert!(host.run(1, write).status().is_ok());
        let compare = nvm::compare(1, round, blocks as u32).unwrap();
        let compare = compare.with_mptr(meta_buf.addr()).with_prps(write.prp1(), write.prp2());
        assert!(host.run(1, compare).status().is_ok());
        buf.mem.fill(0, len, 0xee).unwrap();
        meta_buf.mem.fill(0, meta_len, 0xee).unwrap();
        let read = nvm::read(1, round, blocks as u32).unwrap();
        let read = read.with_mptr(meta_buf.addr()).with_prps(write.prp1(), write.prp2());
        assert!(host.run(1, read).status().is_ok());
        assert_eq!((buf.read(len), meta_buf.read(meta_len)), (data.clone(), meta.clone()));
        let differs = host.run(1, compare.with_qword(10, round + 1)).status();
        assert!(differs.is(Status::COMPARE_FAILURE), "{differs:?}");
    }
    host.clean();
}

#[test]
fn protection_information_is_reported_and_stored() {
    let mut host = Host::new("mem:1M?workers=0&ms=8&pi=2");
    let (buf, meta) = (host.buffer(4096), host.buffer(4096));
    assert!(
        host.run(0, admin::identify(admin::cns::NAMESPACE, 1, 0, 0).with_prps(buf.addr(), 0))
            .status()
            .is_ok()
    );
    let bytes: [u8; 4096] = buf.read(4096).try_into().unwrap();
    let view = identify::Namespace::new(&bytes);
    assert_eq!((view.dps(), view.dpc(), view.format().unwrap().pi), (2, 0x12, 2));
    meta.mem.write(0, &pattern(3, 8)).unwrap();
    let [write, read] = [nvm::write(1, 7, 1), nvm::read(1, 7, 1)]
        .map(|sqe| sqe.unwrap().with_prps(buf.addr(), 0).with_mptr(meta.addr()));
    assert!(host.run(1, write).status().is_ok());
    meta.mem.fill(0, 8, 0).unwrap();
    assert!(host.run(1, read).status().is_ok());
    assert_eq!(meta.read(8), pattern(3, 8));
    host.clean();
    let text = onehop_sim::Config::parse("mem:1M?pi=1").unwrap_err().to_string();
    assert!(text.contains("pi=1 with ms=0"), "{text}");
}

#[test]
fn metadata_pointers_are_checked() {
    let mut host = Host::new("mem:1M?workers=0&ms=8");
    let buf = host.buffer(4096);
    let read = nvm::read(1, 0, 1).unwrap().with_prps(buf.addr(), 0);
    assert!(host.run(1, read.with_mptr(buf.addr() + 2)).status().is(Status::INVALID_FIELD));
    host.broke_only(Rule::MetadataPointer);
    assert!(host.run(1, read.with_mptr(buf.addr() + 4092)).status().is(Status::DATA_TRANSFER_ERROR));
    host.broke(Rule::DmaPastEnd);
}

#[test]
fn ranges_and_namespaces_are_checked() {
    let mut host = Host::new("mem:1M?workers=0&ns=2");
    let blocks = 1024;
    let buf = host.buffer(4096);
    for (nsid, lba, count, want) in [
        (1, blocks - 1, 1, Status::SUCCESS),
        (2, blocks - 1, 1, Status::SUCCESS),
        (1, blocks, 1, Status::LBA_OUT_OF_RANGE),
        (1, blocks - 1, 2, Status::LBA_OUT_OF_RANGE),
        (1, u64::MAX, 1, Status::LBA_OUT_OF_RANGE),
        (1, 1 << 32, 1, Status::LBA_OUT_OF_RANGE),
        (0, 0, 1, Status::INVALID_NAMESPACE),
        (3, 0, 1, Status::INVALID_NAMESPACE),
        (u32::MAX, 0, 1, Status::INVALID_NAMESPACE),
    ] {
        for sqe in [nvm::read(nsid, lba, count), nvm::write(nsid, lba, count)] {
            let status = host.run(1, sqe.unwrap().with_prps(buf.addr(), 0)).status();
            assert!(status.is(want), "{nsid} {lba} {count}: {status:?}");
        }
    }
    host.clean();
}

#[test]
fn namespaces_are_apart() {
    let mut host = Host::new("mem:1M?workers=0&ns=2");
    let buf = host.buffer(4096);
    for nsid in [1, 2] {
        buf.mem.fill(0, 512, nsid as u8).unwrap();
        assert!(host.run(1, nvm::write(nsid, 0, 1).unwrap().with_prps(buf.addr(), 0)).status().is_ok());
    }
    let mut out = [0; 512];
    host.sim.read_media(1, 0, &mut out).unwrap();
    assert_eq!(out, [1; 512]);
    host.sim.read_media(2, 0, &mut out).unwrap();
    assert_eq!(out, [2; 512]);
    assert!(host.sim.read_media(3, 0, &mut out).is_err());
    assert!(host.sim.read_media(2, (1 << 19) - 511, &mut out).is_err());
}

#[test]
fn blocks_beyond_four_billion_are_reached() {
    let mut host = Host::new("mem:4T?workers=0");
    let far = (8u64 << 30) - 3;
    let data = pattern(9, 1024);
    assert!(host.write(far, &data, 512).is_ok());
    assert_eq!(host.read(far, 2, 512).unwrap(), data);
    assert_eq!(host.read(far & 0xffff_ffff, 2, 512).unwrap(), vec![0; 1024]);
    host.clean();
}

#[test]
fn zeroes_deallocate_and_spoil() {
    let mut host = Host::new("mem:1M?workers=0");
    assert!(host.write(0, &[7; 8192], 512).is_ok());
    let zeroes = nvm::with_flags(nvm::write_zeroes(1, 2, 3).unwrap(), flag::DEAC);
    assert!(host.run(1, zeroes).status().is_ok());
    assert_eq!(host.read(1, 5, 512).unwrap(), [vec![7; 512], vec![0; 1536], vec![7; 512]].concat());
    let buf = host.buffer(4096);
    let range = |lba, blocks| Range { context: 0, blocks, lba }.encode();
    buf.mem.write(0, &[range(8, 1), range(10, 0), range(12, 4)].concat()).unwrap();
    let trim = nvm::dataset_management(1, 2, dsm::DEALLOCATE).with_prps(buf.addr(), 0);
    assert!(host.run(1, trim).status().is_ok());
    assert_eq!(host.read(8, 1, 512).unwrap(), vec![0; 512]);
    assert_eq!(host.read(9, 3, 512).unwrap(), vec![7; 1536]);
    assert_eq!(host.read(12, 4, 512).unwrap(), vec![0; 2048]);
    buf.mem.write(0, &range(2000, 100)).unwrap();
    assert!(host.run(1, trim).status().is(Status::LBA_OUT_OF_RANGE));
    assert!(host.run(1, nvm::write_uncorrectable(1, 9, 1).unwrap()).status().is_ok());
    assert!(host.read(8, 4, 512).unwrap_err().is(Status::UNRECOVERED_READ));
    assert!(host.run(1, nvm::verify(1, 8, 4).unwrap()).status().is(Status::UNRECOVERED_READ));
    assert!(host.write(9, &[1; 512], 512).is_ok());
    assert!(host.run(1, nvm::verify(1, 8, 4).unwrap()).status().is_ok());
    assert_eq!(host.read(9, 1, 512).unwrap(), vec![1; 512]);
    host.clean();
}

#[test]
fn flush_knows_its_namespaces() {
    let mut host = Host::new("mem:1M?workers=0&ns=2");
    for (nsid, want) in [
        (1, Status::SUCCESS),
        (2, Status::SUCCESS),
        (u32::MAX, Status::SUCCESS),
        (3, Status::INVALID_NAMESPACE),
        (0, Status::INVALID_NAMESPACE),
    ] {
        assert!(host.run(1, nvm::flush(nsid)).status().is(want));
    }
}

#[test]
fn lists_may_be_chained() {
    let mut host = Host::new("mem:16M?workers=0&mdts=0");
    let data = pattern(4, 6 << 20);
    assert!(host.write(1, &data, 512).is_ok());
    assert_eq!(host.read(1, 12288, 512).unwrap(), data);
    let mut host = Host::new("mem:16M?workers=0&mdts=0&scatter=1&lba=4096");
    assert!(host.write(1, &data[..1 << 20], 4096).is_ok());
    assert_eq!(host.read(1, 256, 4096).unwrap(), data[..1 << 20]);
    host.clean();
}

#[test]
fn sgls_where_they_are_offered() {
    let mut host = Host::new("mem:1M?workers=0&sgl=1");
    let data = pattern(5, 8192);
    host.sim.write_media(1, 0, &data).unwrap();
    let buf = host.buffer(65536);
    let at = BusAddr(buf.addr());
    let read = nvm::read(1, 0, 16).unwrap();
    let block = |offset, len| Descriptor::Data { at: at.plus(offset), len };
    assert!(host.run(1, block(4, 8192).put_in(read)).status().is_ok());
    assert_eq!(buf.mem.to_vec(4, 8192).unwrap(), data);
    let list = [block(20000, 100), Descriptor::BitBucket { len: 92 }, block(30000, 8000)];
    for (i, d) in list.iter().enumerate() {
        buf.mem.write(60000 + i * 16, &d.to_bytes()).unwrap();
    }
    let segment = Descriptor::LastSegment { at: at.plus(60000), len: 48 };
    assert!(host.run(1, segment.put_in(read)).status().is_ok());
    assert_eq!(buf.mem.to_vec(20000, 100).unwrap(), data[..100]);
    assert_eq!(buf.mem.to_vec(30000, 8000).unwrap(), data[192..]);
    host.clean();
    for (descriptor, want) in [
        (block(0, 8188), Status::DATA_SGL_LENGTH_INVALID),
        (block(0, 8196), Status::DATA_SGL_LENGTH_INVALID),
        (block(2, 8192), Status::SGL_GRANULARITY_INVALID),
        (Descriptor::LastSegment { at: at.plus(4), len: 16 }, Status::INVALID_SGL_SEGMENT),
        (Descriptor::LastSegment { at, len: 20 }, Status::INVALID_SGL_SEGMENT),
    ] {
        let got = host.run(1, descriptor.put_in(read)).status();
        assert!(got.is(want), "{descriptor:?}: {got:?}");
    }
    assert_eq!(host.rules(), [Rule::Sgl; 5]);
    let identify = onehop_proto::admin::identify(1, 0, 0, 0);
    assert!(host.admin(block(0, 4096).put_in(identify)).status().is(Status::INVALID_FIELD));
    host.broke(Rule::Psdt);
}

#[test]
fn commands_complete_in_order_of_their_time() {
    let mut host = Host::new("mem:1M?workers=0&latency=50us&jitter=5ms&seed=3");
    let mut cids: Vec<_> = (0..16).map(|_| host.push(1, nvm::flush(1))).collect();
    host.ring(1);
    let mut seen = Vec::new();
    while seen.len() < 16 {
        host.sim.step();
        seen.extend(host.poll(1).map(|c| c.cid()));
    }
    assert_ne!(seen, cids, "out of order");
    seen.sort_unstable();
    cids.sort_unstable();
    assert_eq!(seen, cids);
    host.clean();
}

#[test]
fn bandwidth_and_latency_take_their_time() {
    let mut host = Host::new("mem:4M?workers=1&bandwidth=16M&latency=1ms");
    let start = std::time::Instant::now();
    for _ in 0..2 {
        assert!(host.write(0, &vec![1; 128 << 10], 512).is_ok());
    }
    // Two transfers of 1/128 of a second each.
    assert!(start.elapsed().as_micros() > 15_000, "{:?}", start.elapsed());
}
