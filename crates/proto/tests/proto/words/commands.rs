//! Commands: hand-made vectors, and what is built must be read back.

use onehop_proto::admin::{self, Priority, Select, cns};
use onehop_proto::feature::{self, EventConfig, HostMemory, HostMemoryEntry, Queues, Timestamp};
use onehop_proto::{BusAddr, Sqe, nvm};
use proptest::prelude::*;

#[test]
fn admin_vectors() {
    let sqe = admin::identify(cns::CSI_CONTROLLER, 7, 0x1234, 2);
    assert_eq!((sqe.dw[0], sqe.dw[1], sqe.dw[10], sqe.dw[11]), (6, 7, 0x1234_0006, 0x0200_0000));
    let sqe = admin::create_cq(3, 255, BusAddr(0x1_0000_2000), true, Some(5));
    assert_eq!((sqe.dw[6], sqe.dw[7], sqe.dw[10], sqe.dw[11]), (0x2000, 1, 0x00ff_0003, 0x0005_0003));
    assert_eq!(admin::create_cq(3, 255, BusAddr(0), true, None).dw[11], 1);
    let sqe = admin::create_sq(4, 63, BusAddr(0x3000), 3, true, Priority::Medium);
    assert_eq!((sqe.dw[0], sqe.dw[10], sqe.dw[11]), (1, 0x003f_0004, 0x0003_0005));
    assert_eq!(admin::set_features(7, true, 0x000f_000f).dw[10], 0x8000_0007);
    assert_eq!(admin::get_features(6, Select::Supported, 0).dw[10], 0x306);
    let sqe = admin::get_log_page(2, u32::MAX, 512, 0, true, 0);
    assert_eq!((sqe.dw[10], sqe.dw[11], sqe.dw[12]), (0x007f_8002, 0, 0));
    let sqe = admin::get_log_page(7, u32::MAX, 1 << 20, 0x1_0000_0200, false, 1);
    assert_eq!((sqe.dw[10], sqe.dw[11], sqe.dw[12], sqe.dw[13]), (0xffff_0107, 3, 0x200, 1));
    assert_eq!(admin::abort(2, 0x55).dw[10], 0x0055_0002);
    let sqe = admin::doorbell_buffer_config(BusAddr(0x1000), BusAddr(0x2000));
    assert_eq!((sqe.opcode(), sqe.prp1(), sqe.prp2()), (0x7c, 0x1000, 0x2000));
}

#[test]
fn log_page_sizes_at_the_edges() {
    for (asked, got) in [(0, 4), (1, 4), (4, 4), (5, 8), (u32::MAX, 1 << 32)] {
        let page = admin::GetLogPage::from(&admin::get_log_page(1, 0, asked, 0, false, 0));
        assert_eq!(page.bytes, got);
    }
}

#[test]
fn nvm_vectors() {
    let sqe = nvm::read(1, 0x1_2345_6789, 8).unwrap();
    assert_eq!((sqe.dw[0], sqe.dw[1], sqe.dw[10], sqe.dw[11], sqe.dw[12]), (2, 1, 0x2345_6789, 1, 7));
    assert_eq!(nvm::with_flags(nvm::write(1, 0, 65536).unwrap(), nvm::flag::FUA).dw[12], 0x4000_ffff);
    assert_eq!(nvm::flush(9), Sqe::new(0, 9));
    let sqe = nvm::dataset_management(1, 255, nvm::dsm::DEALLOCATE);
    assert_eq!((sqe.dw[10], sqe.dw[11]), (255, 4));
    assert_eq!(nvm::DatasetManagement::from(&sqe).list_bytes(), 4096);
    for blocks in [0, 65537, u32::MAX] {
        assert_eq!(nvm::read(1, 0, blocks), None);
    }
    let range = nvm::Range { context: 0, blocks: 0x0102, lba: 0x0807 };
    assert_eq!(range.encode(), [0, 0, 0, 0, 2, 1, 0, 0, 7, 8, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn features() {
    assert_eq!(Queues::ask(16, 16).0, 0x000f_000f);
    assert_eq!((Queues(0x003f_003f).sqs(), Queues(0x003f_003f).cqs()), (64, 64));
    assert_eq!((Queues::ask(0, 1 << 20).sqs(), Queues::ask(0, 1 << 20).cqs()), (1, 65535));
    assert_eq!(EventConfig(0).with_critical(0x1f).with_namespace(true).with_firmware(true).0, 0x31f);
    assert_eq!(feature::Timestamp(0x0002_0000_0000_0001).origin(), 1);
    assert_eq!(Timestamp(u64::MAX).millis(), (1 << 48) - 1);
    let memory = HostMemory {
        enable: true,
        memory_return: false,
        pages: 0x4000,
        list: BusAddr(0x1_0000_0010),
        entries: 3,
    };
    let sqe = memory.command();
    assert_eq!((sqe.dw[10], sqe.dw[11], sqe.dw[12]), (0x0d, 1, 0x4000));
    assert_eq!((sqe.dw[13], sqe.dw[14], sqe.dw[15]), (0x10, 1, 3));
    assert_eq!(HostMemory::decode(&memory.encode()), memory);
    let entry = HostMemoryEntry { at: BusAddr(0x1000), pages: 2 };
    assert_eq!(entry.encode(), [0, 16, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(HostMemoryEntry::decode(&entry.encode()), entry);
}

proptest! {
    #[test]
    fn queues_there_and_back(qid: u16, size_z: u16, base: u64, cqid: u16, contiguous: bool, prio in 0u32..4) {
        let base = BusAddr(base);
        let cq = admin::CreateCq { qid, size_z, base, contiguous, interrupt: contiguous.then_some(cqid) };
        prop_assert_eq!(admin::CreateCq::from(&admin::create_cq(qid, size_z, base, contiguous, cq.interrupt)), cq);
        let priority = Priority::from_bits(prio);
        let sq = admin::CreateSq { qid, size_z, base, cqid, contiguous, priority, nvmsetid: 0 };
        prop_assert_eq!(admin::CreateSq::from(&admin::create_sq(qid, size_z, base, cqid, contiguous, priority)), sq);
        prop_assert_eq!(admin::deleted_queue(&admin::delete_sq(qid)), qid);
    }

    #[test]
    fn log_pages_there_and_back(lid: u8, nsid: u32, dwords in 1u32..1 << 30, offset: u64, rae: bool, lsp in 0u8..128) {
        let page = admin::GetLogPage::from(&admin::get_log_page(lid, nsid, dwords * 4, offset, rae, lsp));
        prop_assert_eq!((page.lid, page.nsid, page.bytes), (lid, nsid, dwords as u64 * 4));
        prop_assert_eq!((page.offset, page.rae, page.lsp), (offset & !3, rae, lsp));
        prop_assert!(!page.offset_is_index);
    }

    #[test]
    fn block_commands_there_and_back(nsid: u32, lba: u64, blocks in 1u32..=65536, flags: u32, cid: u16) {
        let sqe = nvm::command(nvm::opcode::WRITE, nsid, lba, blocks, flags).unwrap().with_cid(cid);
        let rw = nvm::Rw::decode(&sqe);
        prop_assert_eq!((rw.nsid, rw.lba, rw.blocks, sqe.cid()), (nsid, lba, blocks, cid));
        prop_assert_eq!(rw.fua, flags & nvm::flag::FUA != 0);
        prop_assert_eq!(rw.prchk as u32, flags >> 26 & 7);
    }

    #[test]
    fn ranges_there_and_back(context: u32, blocks: u32, lba: u64) {
        let range = nvm::Range { context, blocks, lba };
        prop_assert_eq!(nvm::Range::decode(&range.encode()), range);
    }

    #[test]
    fn any_entry_can_be_taken_apart(dw: [u32; 16]) {
        let sqe = Sqe { dw };
        let _ = (admin::Identify::from(&sqe), admin::CreateCq::from(&sqe), admin::CreateSq::from(&sqe));
        let _ = (admin::GetFeatures::from(&sqe), admin::SetFeatures::from(&sqe), admin::GetLogPage::from(&sqe));
        let _ = (admin::Abort::from(&sqe), admin::DoorbellBuffers::from(&sqe), nvm::DatasetManagement::from(&sqe));
        prop_assert!((1..=65536).contains(&nvm::Rw::decode(&sqe).blocks));
    }
}
