//! Registers: values that QEMU's controller shows, and doorbells there and back.

use onehop_proto::BusAddr;
use onehop_proto::regs::*;
use proptest::prelude::*;

#[test]
fn cap_of_qemu() {
    let cap = Cap(0x0040_0820_0f01_07ff);
    assert_eq!(cap.mqes_z(), 2047);
    assert!(cap.cqr());
    assert_eq!(cap.ams(), 0);
    assert_eq!(cap.timeout_ms(), 7500);
    assert_eq!(cap.dstrd(), 0);
    assert_eq!(cap.css(), 0x41);
    assert_eq!((cap.mpsmin(), cap.mpsmax()), (0, 4));
    assert!(!cap.cmbs() && !cap.pmrs() && !cap.nssrs() && !cap.gone());
    let built = Cap(0).with_mqes_z(2047).with_cqr(true).with_to(15).with_css(0x41).with_mpsmax(4);
    assert_eq!(built, cap);
    assert!(Cap(u64::MAX).gone());
    assert_eq!(Cap(0).with_crwms(true).crms(), 1);
    assert_eq!(Cap(0).with_crims(true).0, 1 << 60);
}

#[test]
fn configuration_and_status() {
    assert_eq!(Cc::enabled(12, Cc::CSS_NVM).0, 0x0046_0001);
    assert_eq!(Cc::enabled(16, Cc::CSS_ALL).0, 0x0046_0261);
    assert_eq!(Cc::enabled(16, 0).page_shift(), 16);
    assert_eq!(Cc(0).with_shn(Cc::SHN_NORMAL).0, 0x4000);
    let shut = Csts(0x9);
    assert!(shut.rdy() && !shut.cfs() && !shut.gone());
    assert_eq!(shut.shst(), Csts::SHST_COMPLETE);
    assert!(Csts(GONE32).gone());
    assert_eq!(Aqa(0).with_asqs_z(4095).with_acqs_z(31).0, 0x001f_0fff);
    assert_eq!(Crto(0x0014_0002).independent_ms(), 10_000);
    assert_eq!(Crto(0x0014_0002).media_ms(), 1000);
    assert_eq!(Nssr::NVME.0, 0x4e56_4d65);
}

#[test]
fn versions_sort_and_print() {
    assert_eq!(Version(0x0001_0400), Version::V1_4);
    assert!(Version::V1_4 < Version::V2_0 && Version::new(1, 2, 1) > Version::V1_2);
    assert_eq!(format!("{} {}", Version::V1_4, Version::new(1, 2, 1)), "1.4 1.2.1");
}

#[test]
fn controller_memory() {
    let size = Cmbsz(0).with_sqs(true).with_szu(2).with_sz(64);
    assert_eq!(size.0, 0x0004_0201);
    assert_eq!(size.bytes(), Some(64 << 20));
    assert_eq!(Cmbsz(0).with_szu(6).with_sz(0xf_ffff).bytes(), Some(0xf_ffff << 36));
    assert_eq!(Cmbsz(0).with_szu(7).with_sz(1).bytes(), None);
    let at = Cmbmsc(0).with_cre(true).with_cmse(true).with_cba(BusAddr(0x1_2345_6fff));
    assert_eq!(at.0, 0x1_2345_6003);
    assert_eq!(at.with_cre(false).cba(), BusAddr(0x1_2345_6000));
    assert_eq!(Cmbloc(0x0000_1002).ofst(), 1);
    assert_eq!(Cmbloc(0x0000_1002).bir(), 2);
}

#[test]
fn doorbells() {
    assert_eq!(doorbell(0, false, 0), 0x1000);
    assert_eq!(doorbell(0, true, 0), 0x1004);
    assert_eq!(doorbell(3, true, 0), 0x101c);
    assert_eq!(doorbell(1, false, 4), 0x1000 + 2 * 64);
    assert_eq!(doorbell(u16::MAX, true, 15), u32::MAX);
    assert_eq!(doorbell_of(0x0fff, 0), None);
    assert_eq!(doorbell_of(0x1002, 0), None);
    assert_eq!(doorbell_of(0x1004, 1), None);
    assert_eq!(doorbell_of(0x1000 + 0x2_0000 * 4, 0), None);
}

proptest! {
    #[test]
    fn doorbells_there_and_back(qid: u16, is_cq: bool, dstrd in 0u8..=13) {
        prop_assert_eq!(doorbell_of(doorbell(qid, is_cq, dstrd), dstrd), Some((qid, is_cq)));
    }

    #[test]
    fn a_doorbell_offset_names_one_queue(at: u32, dstrd: u8) {
        if let Some((qid, is_cq)) = doorbell_of(at, dstrd) {
            prop_assert_eq!(doorbell(qid, is_cq, dstrd), at);
        }
    }

    #[test]
    fn fields_do_not_disturb_each_other(raw: u64, v: u8) {
        let cap = Cap(raw).with_dstrd(v);
        prop_assert_eq!(cap.dstrd(), v & 15);
        prop_assert_eq!(cap.0 & !(15 << 32), raw & !(15 << 32));
    }
}
