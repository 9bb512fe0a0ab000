//! Registers, statuses and commands: every bit pattern is decoded or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_proto::feature::{HostMemory, HostMemoryEntry};
use onehop_proto::format::{Flbas, Format, LbaFormat};
use onehop_proto::nvm::{DatasetManagement, Range, Rw};
use onehop_proto::regs::{self, Cap, Cc, Cmbloc, Cmbsz, Crto, Version};
use onehop_proto::{Sqe, Status, admin};

fuzz_target!(|input: (u64, [u32; 16], [u8; 16])| {
    let (long, dw, bytes) = input;
    let (low, high) = (long as u32, (long >> 32) as u32);
    registers(long, low);
    for qid in [0, 1, low as u16, u16::MAX] {
        for dstrd in 0..=15 {
            for is_cq in [false, true] {
                let at = regs::doorbell(qid, is_cq, dstrd);
                // Far doorbells of a wide stride exceed the 32-bit offset; none may be mistaken for another's.
                let back = regs::doorbell_of(at, dstrd);
                assert!(dstrd > 13 || back == Some((qid, is_cq)), "{qid} {is_cq} {dstrd}: {back:?}");
                let _ = regs::doorbell_of(high, dstrd);
            }
        }
    }

    let status = Status(low as u16);
    let _ = (status.name(), status.to_string(), status.may_retry(), format!("{status:?}"));
    let _ = Format::new(Flbas(low as u8), LbaFormat(high), (low >> 8) as u8).map_err(|e| e.to_string());

    let sqe = Sqe { dw };
    let rw = Rw::from(&sqe);
    assert!((1..=65536).contains(&rw.blocks));
    assert!(DatasetManagement::from(&sqe).list_bytes() <= 4096);
    let _ = (admin::deleted_queue(&sqe), format!("{sqe:?}"));
    let memory = HostMemory::decode(&[dw[0], dw[1], dw[2], dw[3], dw[4]]);
    assert_eq!(HostMemory::decode(&memory.encode()), memory);
    assert_eq!(
        HostMemoryEntry::decode(&HostMemoryEntry::decode(&bytes).encode()),
        HostMemoryEntry::decode(&bytes)
    );
    assert_eq!(Range::decode(&bytes).encode(), bytes);
});

fn registers(long: u64, low: u32) {
    let cap = Cap(long);
    let _ = (cap.timeout_ms(), cap.gone(), format!("{cap:?}"));
    let _ = (Version(low).to_string(), Cc(low).page_shift(), Cmbloc(low).ofst());
    let size = Cmbsz(low);
    assert_eq!(size.bytes().is_some(), size.unit_bytes().is_some());
    let _ = (Crto(low).media_ms(), Crto(low).independent_ms());
}
