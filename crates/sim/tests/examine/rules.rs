//! Every rule that a driver can violate on its queues and in its commands, and the reaction.

use onehop_proto::log::AsyncEvent;
use onehop_proto::{Sqe, Status, admin, nvm};
use onehop_sim::Rule;

use crate::host::Host;

fn host() -> Host {
    Host::new("mem:1M?workers=0")
}

/// The event that a waiting request gets.
fn event(host: &mut Host) -> AsyncEvent {
    host.submit(0, admin::async_event());
    AsyncEvent(host.wait(0).result())
}

#[test]
fn doorbells_of_no_queue() {
    let mut host = host();
    host.ring_sq(9, 1);
    host.broke_only(Rule::DoorbellUnknownQueue);
    assert!(event(&mut host).is(AsyncEvent::INVALID_DOORBELL_REGISTER));
    host.ring_cq(60000, 1);
    host.regs.write32(0x1002, 1);
    host.broke(Rule::RegisterAccess);
    let host = Host::new("mem:1M?workers=0&dstrd=3");
    host.regs.write32(0x1004, 1);
    host.broke_only(Rule::DoorbellUnknownQueue);
}

#[test]
fn doorbells_with_a_value_out_of_range() {
    let mut host = host();
    host.ring_sq(1, 32);
    host.broke_only(Rule::DoorbellValue);
    let event = event(&mut host);
    assert!(event.is(AsyncEvent::INVALID_DOORBELL_VALUE));
    assert_eq!(event.0, 0x0001_0100);
    host.ring_cq(1, 32);
    assert_eq!(host.rules(), [Rule::DoorbellValue; 2]);
}

#[test]
fn doorbells_with_the_same_value() {
    let mut host = host();
    host.run(1, nvm::flush(1));
    host.ring_sq(1, 1);
    host.ring_cq(1, 1);
    assert_eq!(host.rules(), [Rule::DoorbellSame; 2]);
    assert!(event(&mut host).is(AsyncEvent::INVALID_DOORBELL_VALUE));
}

#[test]
fn tails_that_pass_the_head() {
    let mut host = Host::with_queue("mem:1M?workers=0&fault=lost", 4);
    for _ in 0..3 {
        host.submit(1, nvm::flush(1));
    }
    host.clean();
    // Nothing was completed, so no entry is known to be free, even if it was fetched.
    host.submit(1, nvm::flush(1));
    host.broke_only(Rule::SqOverrun);
}

#[test]
fn heads_past_what_was_posted() {
    let mut host = host();
    host.submit(1, nvm::flush(1));
    host.ring_cq(1, 2);
    host.broke_only(Rule::CqHeadPastPosted);
    assert!(event(&mut host).is(AsyncEvent::INVALID_DOORBELL_VALUE));
    host.wait(1);
}

#[test]
fn completion_queues_that_are_too_small_stall() {
    let mut host = Host::enabled("mem:1M?workers=0");
    let (big, small) = (host.queue(16), host.queue(4));
    let at = |buf: &crate::host::Buf| onehop_proto::BusAddr(buf.addr());
    host.admin_ok(admin::create_cq(1, 3, at(&small.cq), true, None));
    host.admin_ok(admin::create_sq(1, 15, at(&big.sq), 1, true, admin::Priority::Urgent));
    let queue = crate::host::Queue { sq: big.sq, cq: small.cq, ..host.queue(4) };
    host.queues.insert(1, crate::host::Queue { size: 16, ..queue });
    for _ in 0..5 {
        host.push(1, nvm::flush(1));
    }
    host.ring(1);
    host.broke_only(Rule::CqOverrun);
    assert_eq!(host.sim.stats().cq_stalls, 1);
    host.queues.get_mut(&1).unwrap().size = 4;
    for cid in 1..=5 {
        assert_eq!(host.wait(1).cid(), cid);
    }
    host.broke_only(Rule::CqOverrun);
}

#[test]
fn identifiers_that_are_in_use() {
    let mut host = Host::new("mem:1M?workers=0&fault=late@n=1,delay=9s");
    host.push(1, nvm::flush(1));
    host.ring(1);
    host.queues.get_mut(&1).unwrap().next_cid = 1;
    let cqe = host.run(1, nvm::flush(1));
    assert!(cqe.status().is(Status::CID_CONFLICT));
    host.broke_only(Rule::CidInUse);
    assert!(host.sim.step());
    let cqe = host.wait(1);
    assert!(cqe.cid() == 1 && cqe.status().is_ok());
    assert!(host.run(1, nvm::flush(1)).status().is_ok());
}

#[test]
fn the_identifier_that_is_reserved() {
    let mut host = host();
    host.queues.get_mut(&1).unwrap().next_cid = u16::MAX;
    assert!(host.run(1, nvm::flush(1)).status().is_ok());
    host.broke_only(Rule::CidReserved);
}

/// Runs a command that must fail with a status and violate a rule.
fn refused(sqe: Sqe, status: Status, rule: Rule) {
    let mut host = host();
    let cqe = host.run(1, sqe);
    assert!(cqe.status().is(status) && cqe.status().dnr(), "{:?}", cqe.status());
    host.broke_only(rule);
}

#[test]
fn commands_that_are_malformed() {
    let flush = nvm::flush(1);
    refused(Sqe::new(0x7f, 1), Status::INVALID_OPCODE, Rule::Opcode);
    refused(flush.with_dw(0, 3 << 14), Status::INVALID_FIELD, Rule::Psdt);
    refused(flush.with_dw(0, 1 << 10), Status::INVALID_FIELD, Rule::ReservedField);
    refused(flush.with_dw(0, 1 << 8), Status::INVALID_FIELD, Rule::ReservedField);
    refused(flush.with_dw(2, 1), Status::INVALID_FIELD, Rule::ReservedField);
    refused(flush.with_dw(11, 1), Status::INVALID_FIELD, Rule::ReservedField);
    let read = nvm::read(1, 0, 1).unwrap();
    refused(read.with_dw(12, 1 << 20), Status::INVALID_FIELD, Rule::ReservedField);
    refused(read.with_dw(13, 1 << 8), Status::INVALID_FIELD, Rule::ReservedField);
    refused(read.with_dw(0, nvm::opcode::READ as u32 | 1 << 14), Status::INVALID_FIELD, Rule::Psdt);
}

#[test]
fn admin_commands_that_are_malformed() {
    let mut host = host();
    assert!(host.admin(Sqe::new(0x70, 0)).status().is(Status::INVALID_OPCODE));
    host.broke(Rule::Opcode);
    assert!(host.admin(admin::abort(0, 7).with_dw(11, 1)).status().is(Status::INVALID_FIELD));
    host.broke(Rule::ReservedField);
}

#[test]
fn data_pointers_that_are_wrong() {
    let read = |blocks| nvm::read(1, 0, blocks).unwrap();
    refused(read(1).with_prps(0x10_0000_0002, 0), Status::INVALID_PRP_OFFSET, Rule::Prp1);
    let mut host = host();
    let buf = host.buffer(65536);
    let at = buf.addr();
    let tried = |host: &mut Host, sqe: Sqe, status: Status| {
        let got = host.run(1, sqe).status();
        assert!(got.is(status), "{got:?}");
    };
    // Two pages: PRP2 is a page and has no offset.
    tried(&mut host, read(16).with_prps(at, at + 4096 + 8), Status::INVALID_PRP_OFFSET);
    assert_eq!(host.rules(), [Rule::Prp2]);
    // More pages: PRP2 is a list, aligned to a qword.
    tried(&mut host, read(24).with_prps(at, at + 4), Status::INVALID_PRP_OFFSET);
    assert_eq!(host.rules(), [Rule::Prp2; 2]);
    // Entries of the list have no offset.
    buf.mem.write(32768, &(at + 4096).to_le_bytes()).unwrap();
    buf.mem.write(32776, &(at + 8192 + 512).to_le_bytes()).unwrap();
    tried(&mut host, read(24).with_prps(at, at + 32768), Status::INVALID_PRP_OFFSET);
    assert_eq!(host.rules()[2..], [Rule::PrpList]);
    // A page that starts in the middle is valid, and so is such a list.
    buf.mem.write(32776, &(at + 8192).to_le_bytes()).unwrap();
    tried(&mut host, read(24).with_prps(at, at + 32768), Status::SUCCESS);
    buf.mem.write(32784, &(at + 12288).to_le_bytes()).unwrap();
    tried(&mut host, read(24).with_prps(at + 4, at + 32768), Status::SUCCESS);
    assert_eq!(host.rules().len(), 3);
}

#[test]
fn memory_that_is_not_mapped() {
    let mut host = host();
    let read = nvm::read(1, 0, 1).unwrap();
    let gone = {
        let buf = host.buffer(4096);
        buf.addr()
    };
    assert!(host.run(1, read.with_prps(gone, 0)).status().is(Status::DATA_TRANSFER_ERROR));
    host.broke_only(Rule::DmaUnmapped);
    let part = host.buffer(4096);
    let part_mem = part.mem.slice(0..256).unwrap();
    let map = onehop_os::Mapper::map(&*host.mapper, &part_mem).unwrap();
    let sqe = read.with_prps(map.contiguous().unwrap().0, 0);
    assert!(host.run(1, sqe).status().is(Status::DATA_TRANSFER_ERROR));
    host.broke(Rule::DmaPastEnd);
    let list = nvm::read(1, 0, 64).unwrap().with_prps(part.addr(), gone);
    assert!(host.run(1, list).status().is(Status::DATA_TRANSFER_ERROR));
    assert_eq!(host.rules().len(), 3);
}

#[test]
fn memory_that_is_unmapped_while_a_command_runs() {
    let mut host = Host::new("mem:1M?workers=0&fault=late@n=1,delay=9s");
    let buf = host.buffer(4096);
    host.submit(1, nvm::read(1, 0, 1).unwrap().with_prps(buf.addr(), 0));
    drop(buf);
    host.sim.step();
    assert!(host.wait(1).status().is(Status::DATA_TRANSFER_ERROR));
    host.broke_only(Rule::DmaUnmapped);
}

#[test]
fn queues_whose_memory_goes_are_fatal() {
    let mut host = host();
    let queue = host.queues.remove(&1).unwrap();
    drop(queue.sq);
    host.ring_sq(1, 1);
    assert!(host.csts().cfs());
    host.broke_only(Rule::DmaUnmapped);
    host.disable();
    host.enable();
    assert!(!host.csts().cfs());
}

#[test]
fn transfers_longer_than_mdts() {
    let mut host = Host::new("mem:1M?workers=0&mdts=1");
    assert!(host.write(0, &[1; 8192], 512).is_ok());
    assert!(host.write(0, &[1; 8192 + 512], 512).is(Status::INVALID_FIELD));
    host.broke_only(Rule::Mdts);
    let mut host = Host::new("mem:64M?workers=0&mdts=0");
    assert!(host.write(0, &vec![1; 32 << 20], 512).is_ok());
    host.clean();
}

#[test]
fn doorbells_before_ready() {
    let mut host = Host::raw("mem:1M?workers=0");
    host.set_admin_queue();
    host.ring_sq(0, 1);
    host.broke_only(Rule::DoorbellNotReady);
    host.ring_cq(0, 1);
    let details: Vec<_> = host.sim.violations().into_iter().map(|v| v.detail).collect();
    assert_eq!(
        details,
        [
            "tail 1 of queue 0 was written while CSTS.RDY was 0",
            "head 1 of queue 0 was written while CSTS.RDY was 0"
        ]
    );
}

#[test]
fn rules_have_names_and_sections() {
    let mut names: Vec<_> = Rule::ALL.iter().map(|r| r.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Rule::ALL.len());
    assert!(Rule::ALL.iter().all(|r| !r.section().is_empty()));
}
