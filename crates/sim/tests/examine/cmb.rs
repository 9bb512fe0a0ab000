//! The controller memory buffer: enabled, placed, and used for queues, lists and data.

use onehop_proto::admin::{self, Priority};
use onehop_proto::regs::{Cmbloc, Cmbmsc, Cmbsts, Cmbsz, offset};
use onehop_proto::{BusAddr, Status, nvm};
use onehop_sim::Rule;

use crate::host::{Host, pattern};

const CBA: u64 = 0x7_0000_0000;

fn placed(spec: &str) -> (Host, u32) {
    let host = Host::enabled(spec);
    host.regs.write64(offset::CMBMSC, Cmbmsc(0).with_cre(true).0);
    let (loc, size) = (Cmbloc(host.regs.read32(offset::CMBLOC)), Cmbsz(host.regs.read32(offset::CMBSZ)));
    assert!(size.sqs() && size.cqs() && size.lists() && size.rds() && size.wds());
    assert_eq!(loc.bir(), 0);
    let at = loc.ofst() * size.unit_bytes().unwrap() as u32;
    assert!(u64::from(at) + size.bytes().unwrap() <= u64::from(host.regs.size()));
    let placed = Cmbmsc(0).with_cre(true).with_cmse(true).with_cba(BusAddr(CBA));
    host.regs.write64(offset::CMBMSC, placed.0);
    assert!(!Cmbsts(host.regs.read32(offset::CMBSTS)).cbai());
    (host, at)
}

#[test]
fn registers_show_it_only_when_enabled() {
    let host = Host::raw("mem:1M?workers=0&cmb=64K");
    assert!(host.cap().cmbs());
    assert_eq!((host.regs.read32(offset::CMBLOC), host.regs.read32(offset::CMBSZ)), (0, 0));
    let (host, _) = placed("mem:1M?workers=0&cmb=64K");
    assert_eq!(Cmbsz(host.regs.read32(offset::CMBSZ)).bytes(), Some(65536));
    host.clean();
    let bad = Cmbmsc(0).with_cre(true).with_cmse(true).with_cba(BusAddr(u64::MAX - 4095));
    host.regs.write64(offset::CMBMSC, bad.0);
    assert!(Cmbsts(host.regs.read32(offset::CMBSTS)).cbai());
    host.regs.write64(offset::CMBMSC, Cmbmsc(0).with_cmse(true).0);
    host.broke(Rule::Cmb);
    let host = Host::raw("mem:1M?workers=0");
    host.regs.write32(offset::CMBMSC, 1);
    host.broke_only(Rule::Cmb);
}

#[test]
fn bar_and_buffer_are_the_same_memory() {
    let (host, at) = placed("mem:1M?workers=0&cmb=64K&queues=300&dstrd=2");
    let cmb = host.sim.cmb().unwrap();
    host.regs.write32(at + 40, 0x1234_5678);
    assert_eq!(cmb.to_vec(40, 4).unwrap(), 0x1234_5678u32.to_le_bytes());
    cmb.write(65532, &[1, 2, 3, 4]).unwrap();
    assert_eq!(host.regs.read32(at + 65532), 0x0403_0201);
    host.clean();
    host.sim.power_cycle();
    assert_ne!(host.regs.read32(at + 40), 0x1234_5678);
}

#[test]
fn queues_lists_and_data_may_lie_in_it() {
    let (mut host, at) = placed("mem:1M?workers=0&cmb=256K");
    let cmb = host.sim.cmb().unwrap();
    let queue = host.queue(16);
    host.admin_ok(admin::create_cq(1, 15, BusAddr(queue.cq.addr()), true, None));
    host.admin_ok(admin::create_sq(1, 15, BusAddr(CBA), 1, true, Priority::Urgent));
    host.queues.insert(1, queue);
    // The submission queue is written through the BAR, as a CPU without a mapping would.
    let data = pattern(8, 16384);
    cmb.write(65536, &data).unwrap();
    for i in 0..4u64 {
        cmb.write(8192 + i as usize * 8, &(CBA + 65536 + (i + 1) * 4096).to_le_bytes()).unwrap();
    }
    let write = nvm::write(1, 5, 32).unwrap().with_cid(9).with_prps(CBA + 65536, CBA + 8192);
    for (i, dword) in write.dw.iter().enumerate() {
        host.regs.write32(at + 4 * i as u32, *dword);
    }
    host.ring_sq(1, 1);
    let cqe = host.wait(1);
    assert!(cqe.status().is_ok() && cqe.cid() == 9);
    let mut out = vec![0; 16384];
    host.sim.read_media(1, 5 * 512, &mut out).unwrap();
    assert_eq!(out, data);
    host.clean();
    // Disabled, its addresses are unmapped.
    host.regs.write64(offset::CMBMSC, Cmbmsc(0).with_cre(true).0);
    host.ring_sq(1, 2);
    host.broke_only(Rule::DmaUnmapped);
}

#[test]
fn it_is_placed_until_the_function_is_reset() {
    let (mut host, _) = placed("mem:1M?workers=0&cmb=64K");
    host.disable();
    host.enable();
    assert!(Cmbmsc(host.regs.read64(offset::CMBMSC)).cmse());
    host.port.reset.as_ref().unwrap().function_reset().unwrap();
    assert_eq!(host.regs.read64(offset::CMBMSC), 0);
    assert_eq!(host.regs.read32(offset::CMBSZ), 0);
}

#[test]
fn it_is_used_only_for_what_it_offers() {
    let mut host = Host::enabled("mem:1M?workers=0&cmb=64K&cmb_uses=sqs");
    let placed = Cmbmsc(0).with_cre(true).with_cmse(true).with_cba(BusAddr(CBA));
    host.regs.write64(offset::CMBMSC, placed.0);
    let size = Cmbsz(host.regs.read32(offset::CMBSZ));
    assert!(size.sqs() && !size.cqs() && !size.lists() && !size.rds() && !size.wds());
    host.create_pair(1, 8);
    let (buf, data) = (host.buffer(65536), nvm::read(1, 0, 1).unwrap());
    let in_cmb = [
        data.with_prps(CBA, 0),
        nvm::write(1, 0, 1).unwrap().with_prps(CBA, 0),
        nvm::read(1, 0, 16).unwrap().with_prps(buf.addr(), CBA),
    ];
    for sqe in in_cmb {
        assert!(host.run(1, sqe).status().is(Status::INVALID_CMB_USE));
    }
    let cq = admin::create_cq(2, 7, BusAddr(CBA), true, None);
    assert!(host.admin(cq).status().is(Status::INVALID_CMB_USE));
    assert_eq!(host.rules(), [Rule::Cmb; 4]);
    host.admin_ok(admin::create_sq(2, 7, BusAddr(CBA), 1, true, Priority::Urgent));
}
