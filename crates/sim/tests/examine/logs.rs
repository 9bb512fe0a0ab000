//! Get Log Page.

use onehop_proto::admin::{self, get_log_page};
use onehop_proto::log::{self, id};
use onehop_proto::{Status, nvm};

use crate::host::Host;

fn page(host: &mut Host, lid: u8, bytes: usize) -> Vec<u8> {
    host.admin_data(get_log_page(lid, u32::MAX, bytes as u32, 0, false, 0), bytes).unwrap()
}

#[test]
fn errors_are_logged_with_their_particulars() {
    let mut host = Host::new("mem:1M?workers=0&fault=media@lba=5");
    assert!(host.read(3, 4, 512).unwrap_err().is(Status::UNRECOVERED_READ));
    host.ring_sq(1, 99);
    let bytes = page(&mut host, id::ERROR, 4096);
    let entries: Vec<_> = log::error_entries(&bytes).collect();
    assert_eq!(entries.len(), 2);
    assert_eq!((entries[0].error_count(), entries[0].sqid(), entries[0].cid()), (2, 1, u16::MAX));
    let media = entries[1];
    assert!(media.status().is(Status::UNRECOVERED_READ));
    assert_eq!((media.lba(), media.nsid(), media.sqid(), media.error_count()), (5, 1, 1, 1));
}

#[test]
fn errors_say_that_there_is_more() {
    let mut host = Host::new("mem:1M?workers=0");
    let status = host.run(1, nvm::read(1, 1 << 40, 1).unwrap()).status();
    assert!(status.is(Status::LBA_OUT_OF_RANGE) && status.more() && status.dnr());
}

#[test]
fn health_counts() {
    let mut host = Host::new("mem:4M?workers=0");
    assert!(host.write(0, &vec![1; 64 << 10], 512).is_ok());
    for _ in 0..20 {
        host.read(0, 128, 512).unwrap();
    }
    host.sim.spoil(1, 500, 1).unwrap();
    assert!(host.read(500, 1, 512).is_err());
    let bytes = page(&mut host, id::HEALTH, 512);
    let health = log::Health::parse(&bytes).unwrap();
    assert_eq!((health.host_writes(), health.host_reads()), (1, 21));
    assert_eq!((health.data_units_written(), health.data_units_read()), (1, 3));
    assert_eq!((health.media_errors(), health.error_entries(), health.power_cycles()), (1, 1, 1));
    assert_eq!(health.temperature(), 313);
    host.sim.power_cycle();
    host.enable();
    let bytes = page(&mut host, id::HEALTH, 512);
    let health = log::Health::parse(&bytes).unwrap();
    assert_eq!((health.power_cycles(), health.unsafe_shutdowns()), (2, 1));
}

#[test]
fn offsets_and_lengths() {
    let mut host = Host::enabled("mem:1M?workers=0");
    let whole = page(&mut host, id::FIRMWARE, 512);
    let slots = log::FirmwareSlots::parse(&whole).unwrap();
    assert_eq!(slots.active(), 1);
    assert!(slots.slot1().as_str().unwrap().starts_with("SIM"));
    let part = host.admin_data(get_log_page(id::FIRMWARE, 0, 16, 8, false, 0), 16).unwrap();
    assert_eq!(part, whole[8..24]);
    let past = get_log_page(id::FIRMWARE, 0, 16, 516, false, 0);
    assert!(host.admin_data(past, 16).unwrap_err().is(Status::INVALID_FIELD));
    let misaligned = get_log_page(id::FIRMWARE, 0, 16, 0, false, 0).with_dw(12, 2);
    assert!(host.admin_data(misaligned, 16).unwrap_err().is(Status::INVALID_FIELD));
    let unknown = get_log_page(0x77, 0, 16, 0, false, 0);
    assert!(host.admin_data(unknown, 16).unwrap_err().is(Status::INVALID_LOG_PAGE));
    host.clean();
}

#[test]
fn supported_pages_are_listed_from_version_two_on() {
    let ask = get_log_page(id::SUPPORTED, 0, 1024, 0, false, 0);
    let mut old = Host::enabled("mem:1M?workers=0");
    assert!(old.admin_data(ask, 1024).unwrap_err().is(Status::INVALID_LOG_PAGE));
    let mut new = Host::enabled("mem:1M?workers=0&version=2.0");
    let bytes = new.admin_data(ask, 1024).unwrap();
    let bytes = bytes.first_chunk().unwrap();
    assert!(log::log_support(bytes, id::HEALTH).supported());
    assert!(!log::log_support(bytes, id::ANA).supported());
}

#[test]
fn effects_name_the_commands_that_there_are() {
    let mut host = Host::enabled("mem:1M?workers=0");
    let page = page(&mut host, id::EFFECTS, 4096);
    let of = |is_io: usize, opcode: u8| page[is_io * 1024 + usize::from(opcode) * 4];
    assert_eq!((of(0, admin::opcode::IDENTIFY), of(0, admin::opcode::FORMAT), of(0, 0x7f)), (1, 0, 0));
    assert_eq!((of(1, nvm::opcode::READ), of(1, nvm::opcode::WRITE), of(1, 0x7f)), (1, 3, 0));
    assert_eq!(of(0, admin::opcode::DOORBELL_BUFFER), 0);
    host.clean();
}
