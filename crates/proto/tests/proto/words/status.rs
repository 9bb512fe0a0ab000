//! Statuses: every bit pattern there and back, and names.

use std::collections::HashSet;

use onehop_proto::status::ALL;
use onehop_proto::{Cqe, Status};

#[test]
fn every_pattern_survives_a_completion() {
    for raw in 0..0x8000u16 {
        let status = Status(raw);
        let parts = status.sc() as u16
            | (status.sct() as u16) << 8
            | (status.crd() as u16) << 11
            | (status.more() as u16) << 13
            | (status.dnr() as u16) << 14;
        assert_eq!(parts, raw);
        for phase in [false, true] {
            let cqe = Cqe::new(1, 2, 3, 4, status, phase);
            assert_eq!((cqe.status(), cqe.phase(), cqe.cid()), (status, phase, 4));
        }
        assert!(!status.name().is_empty());
    }
}

#[test]
fn the_table_has_no_twins() {
    let codes: HashSet<u16> = ALL.iter().map(|(status, _)| status.code()).collect();
    let names: HashSet<&str> = ALL.iter().map(|(_, name)| *name).collect();
    assert_eq!(codes.len(), ALL.len());
    assert_eq!(names.len(), ALL.len());
    assert!(ALL.iter().all(|(status, name)| status.name() == *name && status.0 >> 11 == 0));
}

#[test]
fn names() {
    assert_eq!(Status::INVALID_PRP_OFFSET.with_dnr().to_string(), "Invalid PRP Offset (0/13h), do not retry");
    assert_eq!(Status(0x4080), Status::LBA_OUT_OF_RANGE.with_dnr());
    assert_eq!(Status::new(1, 2), Status::INVALID_QUEUE_SIZE);
    assert_eq!(Status::new(2, 0x81), Status::UNRECOVERED_READ);
    assert_eq!(Status::new(7, 1).name(), "Vendor Specific");
    assert_eq!(Status::new(0, 0xc1).name(), "Vendor Specific");
    assert_eq!(Status::new(4, 1).name(), "Unknown Status");
    assert_eq!(
        format!("{:?}", Status::COMMAND_INTERRUPTED.with_crd(2).with_more()),
        "Command Interrupted (0/21h), retry delay 2, more in the error log"
    );
}

#[test]
fn retry() {
    assert!(Status::SUCCESS.is_ok() && !Status::SUCCESS.may_retry());
    assert!(Status::SUCCESS.with_more().is_ok());
    assert!(Status::COMMAND_INTERRUPTED.may_retry());
    assert!(!Status::INVALID_FIELD.with_dnr().may_retry());
    assert!(Status::INVALID_FIELD.with_dnr().is(Status::INVALID_FIELD));
}
