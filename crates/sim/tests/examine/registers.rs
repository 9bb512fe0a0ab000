//! Registers, enable, disable, shutdown and resets.

use std::time::Duration;

use onehop_proto::regs::{Aqa, Cc, Crto, Csts, Nssr, Version, offset};
use onehop_sim::Rule;

use crate::host::Host;

#[test]
fn capabilities_say_what_was_configured() {
    let host = Host::raw("mem:1M?workers=0&mqes=63&dstrd=2&cqr=0&mpsmin=1&mpsmax=3&to=9&nssrs=1&cmb=64K");
    let cap = host.cap();
    assert_eq!((cap.mqes_z(), cap.dstrd(), cap.mpsmin(), cap.mpsmax(), cap.to()), (63, 2, 1, 3, 9));
    assert!(!cap.cqr() && cap.nssrs() && cap.cmbs() && cap.css() == 1 && cap.crms() == 0);
    assert_eq!(host.regs.read32(offset::VS), Version::V1_4.0);
    assert_eq!(host.regs.read32(offset::CRTO), 0);
    let host = Host::raw("mem:1M?workers=0&version=2.0&to=2&crto=40");
    assert!(host.cap().crwms());
    assert_eq!(host.cap().to(), 40);
    assert_eq!(Crto(host.regs.read32(offset::CRTO)).media_ms(), 20_000);
    host.clean();
}

#[test]
fn reserved_registers_read_zero_and_take_no_writes() {
    let host = Host::raw("mem:1M?workers=0");
    let cap = host.cap();
    for at in [0x18, offset::CMBLOC, offset::CMBSZ, offset::BPINFO, offset::PMRCAP, 0x800, 0xffc] {
        assert_eq!(host.regs.read32(at), 0, "{at:#x}");
    }
    host.clean();
    host.regs.write32(offset::CAP, 0);
    host.broke_only(Rule::ReadOnlyRegister);
    host.regs.write32(offset::CSTS, 1);
    host.regs.write32(0x800, 7);
    assert_eq!(host.cap(), cap);
    assert_eq!(host.csts(), Csts(0));
    assert_eq!(host.rules(), [Rule::ReadOnlyRegister; 3]);
}

#[test]
fn accesses_have_to_fit() {
    let host = Host::raw("mem:1M?workers=0");
    assert_eq!(host.regs.read32(2), u32::MAX);
    assert_eq!(host.regs.read32(host.regs.size()), u32::MAX);
    host.regs.write32(offset::CC + 1, 1);
    assert_eq!(host.rules(), [Rule::RegisterAccess; 3]);
    let host = Host::raw("mem:1M?workers=0");
    assert_eq!(host.regs.read32(offset::DOORBELLS), 0);
    host.broke_only(Rule::DoorbellRead);
}

#[test]
fn interrupt_masks_are_set_and_cleared() {
    let host = Host::raw("mem:1M?workers=0");
    host.regs.write32(offset::INTMS, 0xf0);
    host.regs.write32(offset::INTMC, 0x30);
    assert_eq!(host.regs.read32(offset::INTMS), 0xc0);
    assert_eq!(host.regs.read32(offset::INTMC), 0xc0);
}

#[test]
fn ready_follows_enable_after_its_time() {
    for mode in ["workers=0", "workers=1"] {
        let mut host = Host::raw(&format!("mem:1M?{mode}&to=120&ready=60s"));
        host.set_admin_queue();
        host.regs.write32(offset::CC, Cc::enabled(12, 0).0);
        assert!(!host.csts().rdy());
        assert!(host.sim.step());
        assert!(host.csts().rdy());
        host.regs.write32(offset::CC, Cc::enabled(12, 0).with_en(false).0);
        assert!(host.csts().rdy());
        assert!(host.sim.step());
        assert!(!host.csts().rdy());
        host.clean();
    }
}

#[test]
fn ready_comes_by_itself() {
    for mode in ["workers=0", "workers=1"] {
        let mut host = Host::raw(&format!("mem:1M?{mode}&ready=3ms"));
        let start = std::time::Instant::now();
        host.enable();
        assert!(start.elapsed() >= Duration::from_millis(3));
        host.disable();
        assert!(start.elapsed() >= Duration::from_millis(6));
        assert!(!host.sim.step());
        host.clean();
    }
}

#[test]
fn enable_and_disable_wait_for_each_other() {
    let mut host = Host::raw("mem:1M?workers=0&to=120&ready=60s");
    host.set_admin_queue();
    host.regs.write32(offset::CC, Cc::enabled(12, 0).0);
    host.regs.write32(offset::CC, 0);
    host.broke_only(Rule::EnableSequence);
    assert!(!host.csts().rdy());
    host.regs.write32(offset::CC, Cc::enabled(12, 0).0);
    assert!(host.sim.step() && host.csts().rdy());
    host.regs.write32(offset::CC, 0);
    assert!(host.csts().rdy());
    host.regs.write32(offset::CC, Cc::enabled(12, 0).0);
    assert_eq!(host.rules(), [Rule::EnableSequence; 2]);
}

#[test]
fn queue_registers_hold_still_while_enabled() {
    let host = Host::enabled("mem:1M?workers=0");
    let asq = host.regs.read64(offset::ASQ);
    host.regs.write32(offset::AQA, 0);
    host.regs.write32(offset::ASQ, 0x1000);
    host.regs.write32(offset::ACQ + 4, 7);
    assert_eq!(host.regs.read64(offset::ASQ), asq);
    assert_eq!(Aqa(host.regs.read32(offset::AQA)).asqs_z(), 31);
    assert_eq!(host.rules(), [Rule::QueueRegisterWhileEnabled; 3]);
}

#[test]
fn configuration_holds_still_while_enabled() {
    let host = Host::enabled("mem:1M?workers=0");
    host.regs.write32(offset::CC, Cc::enabled(13, 0).0);
    host.broke_only(Rule::ConfigWhileEnabled);
    assert_eq!(Cc(host.regs.read32(offset::CC)).mps(), 0);
    host.regs.write32(offset::CC, Cc::enabled(12, 0).0 | 1 << 30);
    host.broke(Rule::ReservedRegisterBit);
    let host = Host::new("mem:1M?workers=0");
    host.regs.write32(offset::CC, Cc::enabled(12, 0).with_iosqes(7).0);
    host.broke_only(Rule::ConfigWhileEnabled);
}

#[test]
fn enabling_is_checked() {
    type Spoil = fn(&mut Host);
    let tries: [(Rule, Spoil); 4] = [
        (Rule::PageSize, |h| h.page_shift = 12),
        (Rule::AdminQueue, |h| {
            h.page_shift = 13;
            h.regs.write32(offset::AQA, Aqa(0).with_asqs_z(0).with_acqs_z(3).0);
        }),
        (Rule::AdminQueue, |h| {
            h.page_shift = 13;
            h.regs.write64(offset::ASQ, 0x10_0000_1000);
        }),
        (Rule::PageSize, |h| h.page_shift = 15),
    ];
    for (rule, spoil) in tries {
        let mut host = Host::raw("mem:1M?workers=0&mpsmin=1&mpsmax=2");
        host.set_admin_queue();
        spoil(&mut host);
        host.regs.write32(offset::CC, Cc::enabled(host.page_shift, 0).0);
        host.broke_only(rule);
        assert!(host.csts().cfs() && !host.csts().rdy());
        host.page_shift = 13;
        host.disable();
        assert!(!host.csts().cfs());
        host.enable();
        assert_eq!(host.rules(), [rule]);
    }
    let mut host = Host::raw("mem:1M?workers=0");
    host.set_admin_queue();
    host.regs.write32(offset::CC, Cc::enabled(12, Cc::CSS_ALL).0);
    host.broke_only(Rule::CommandSet);
    let host = Host::raw("mem:1M?workers=0");
    host.regs.write32(offset::ASQ, 0x1234);
    host.broke_only(Rule::AdminQueue);
}

#[test]
fn every_page_size_works() {
    for shift in 12..=16 {
        let mut host = Host::raw("mem:4M?workers=0&mdts=8");
        host.page_shift = shift;
        host.enable();
        host.create_pair(1, 8);
        let data = crate::host::pattern(1, 300 << 10);
        assert!(host.write(3, &data, 512).is_ok());
        assert_eq!(host.read(3, 600, 512).unwrap(), data);
        host.clean();
    }
}

#[test]
fn shutdown_flushes_and_ends_submission() {
    for shn in [Cc::SHN_NORMAL, Cc::SHN_ABRUPT] {
        let mut host = Host::raw("mem:1M?workers=0&to=120&ready=60s");
        host.set_admin_queue();
        host.regs.write32(offset::CC, Cc::enabled(12, 0).0);
        assert!(host.sim.step());
        host.create_pair(1, 8);
        let data = vec![7; 512];
        assert!(host.write(0, &data, 512).is_ok());
        host.regs.write32(offset::CC, Cc::enabled(12, 0).with_shn(shn).0);
        assert_eq!(host.csts().shst(), Csts::SHST_OCCURRING);
        assert!(host.sim.step());
        assert_eq!(host.csts().shst(), Csts::SHST_COMPLETE);
        host.clean();
        host.push(1, onehop_proto::nvm::flush(1));
        host.ring(1);
        host.broke_only(Rule::DoorbellAfterShutdown);
        host.sim.power_cycle();
        let mut out = vec![0; 512];
        host.sim.read_media(1, 0, &mut out).unwrap();
        assert_eq!(out, data);
    }
}

#[test]
fn subsystem_and_function_reset_forget_registers() {
    let host = Host::new("mem:1M?workers=0&nssrs=1");
    host.regs.write32(offset::NSSR, 1);
    assert!(host.csts().rdy());
    host.regs.write32(offset::NSSR, Nssr::NVME.0);
    assert_eq!(host.csts(), Csts(0).with_nssro(true));
    assert_eq!(host.regs.read64(offset::ASQ), 0);
    host.regs.write32(offset::CSTS, Csts(0).with_nssro(true).0);
    assert_eq!(host.csts(), Csts(0));
    host.clean();

    let mut host = Host::new("mem:1M?workers=0");
    host.regs.write32(offset::NSSR, Nssr::NVME.0);
    host.broke_only(Rule::ReadOnlyRegister);
    host.port.reset.as_ref().unwrap().function_reset().unwrap();
    assert_eq!((host.csts(), host.regs.read32(offset::CC)), (Csts(0), 0));
    assert_eq!(host.regs.read32(offset::AQA), 0);
    host.enable();
    host.create_pair(1, 4);
    assert!(host.write(0, &[1; 512], 512).is_ok());
}

#[test]
fn controller_reset_keeps_admin_queue_registers_only() {
    let mut host = Host::new("mem:1M?workers=0");
    let asq = host.regs.read64(offset::ASQ);
    host.regs.write32(offset::CC, 0);
    assert_eq!(host.csts(), Csts(0));
    assert_eq!(host.regs.read64(offset::ASQ), asq);
    host.enable();
    host.ring_sq(1, 1);
    host.broke_only(Rule::DoorbellUnknownQueue);
    assert_eq!(host.sim.stats().resets, 1);
}
