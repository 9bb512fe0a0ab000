//! Get Features and Set Features.

use onehop_proto::admin::{self, Select};
use onehop_proto::feature::{HostMemory, HostMemoryEntry, Queues, TemperatureThreshold, behavior, id};
use onehop_proto::{Status, nvm};
use onehop_sim::Rule;

use crate::host::Host;

fn get(host: &mut Host, fid: u8, select: Select) -> u32 {
    host.admin_ok(admin::get_features(fid, select, 0)).result()
}

#[test]
fn queues_are_granted_before_any_is_made() {
    let mut host = Host::enabled("mem:1M?workers=0&queues=8");
    let ask = |n| admin::set_features(id::NUMBER_OF_QUEUES, false, Queues::ask(n, n).0);
    for n in [1, 8, 100] {
        let granted = Queues(host.admin_ok(ask(n)).result());
        assert_eq!((granted.sqs(), granted.cqs()), (8, 8));
    }
    let bad = admin::set_features(id::NUMBER_OF_QUEUES, false, 0xffff_0000);
    assert!(host.admin(bad).status().is(Status::INVALID_FIELD));
    host.create_pair(8, 4);
    host.clean();
    assert!(host.admin(ask(4)).status().is(Status::COMMAND_SEQUENCE_ERROR));
    host.broke_only(Rule::NumberOfQueuesLate);
    assert_eq!(Queues(get(&mut host, id::NUMBER_OF_QUEUES, Select::Current)).sqs(), 8);
}

#[test]
fn values_are_current_default_saved_and_supported() {
    let mut host = Host::enabled("mem:1M?workers=0");
    let fid = id::ARBITRATION;
    let standard = get(&mut host, fid, Select::Default);
    host.admin_ok(admin::set_features(fid, false, 3));
    assert_eq!(get(&mut host, fid, Select::Current), 3);
    assert_eq!(get(&mut host, fid, Select::Saved), standard);
    assert_eq!(get(&mut host, fid, Select::Supported), 0b101);
    host.admin_ok(admin::set_features(fid, true, 2));
    host.admin_ok(admin::set_features(fid, false, 1));
    host.disable();
    host.enable();
    assert_eq!(get(&mut host, fid, Select::Current), 2, "the saved value comes back");
    host.sim.power_cycle();
    host.enable();
    assert_eq!(get(&mut host, fid, Select::Current), 2);
    host.clean();
}

#[test]
fn wrong_features_are_refused() {
    let mut host = Host::enabled("mem:1M?workers=0&vwc=0");
    for (sqe, want) in [
        (admin::set_features(0x55, false, 0), Status::INVALID_FIELD),
        (admin::set_features(id::VOLATILE_WRITE_CACHE, false, 1), Status::INVALID_FIELD),
        (admin::set_features(id::HOST_MEMORY_BUFFER, false, 1), Status::INVALID_FIELD),
        (admin::set_features(id::ARBITRATION, false, 8), Status::INVALID_FIELD),
        (admin::set_features(id::POWER_MANAGEMENT, false, 5), Status::INVALID_FIELD),
        (admin::set_features(id::NUMBER_OF_QUEUES, true, 0), Status::FEATURE_NOT_SAVEABLE),
        (admin::get_features(0x55, Select::Current, 0), Status::INVALID_FIELD),
        (admin::get_features(id::ARBITRATION, Select::Current, 0).with_dw(10, 0x401), Status::INVALID_FIELD),
    ] {
        let got = host.admin(sqe).status();
        assert!(got.is(want), "{sqe:?}: {got:?}");
    }
    let mut per_namespace = admin::set_features(id::ARBITRATION, false, 1);
    per_namespace.dw[1] = 1;
    assert!(host.admin(per_namespace).status().is(Status::FEATURE_NOT_NAMESPACE_SPECIFIC));
    host.clean();
}

#[test]
fn a_silent_host_times_out() {
    let mut host = Host::new("mem:1M?workers=0&latency=700ms");
    let raw = host.admin_data(admin::identify(admin::cns::CONTROLLER, 0, 0, 0), 4096).unwrap();
    let raw: [u8; 4096] = raw.try_into().unwrap();
    assert_eq!(onehop_proto::identify::Controller::new(&raw).kas(), 1);
    let set = |milliseconds| admin::set_features(id::KEEP_ALIVE, false, milliseconds);
    assert_eq!(get(&mut host, id::KEEP_ALIVE, Select::Current), 0);
    host.admin_ok(admin::keep_alive());
    assert!(host.admin(set(u32::MAX)).status().is(Status::KEEP_ALIVE_INVALID));
    host.admin_ok(set(901));
    assert_eq!(get(&mut host, id::KEEP_ALIVE, Select::Current), 1000, "in steps of 100 ms");
    // Each flush takes 700 ms; one keep-alive between two of them suffices, none does not.
    for _ in 0..3 {
        host.submit(1, nvm::flush(1));
        assert!(host.sim.step() && host.poll(1).is_some());
        host.admin_ok(admin::keep_alive());
    }
    host.submit(1, nvm::flush(1));
    assert!(host.sim.step() && host.poll(1).is_some());
    host.submit(1, nvm::flush(1));
    assert!(host.sim.step() && host.csts().cfs());
    assert!(!host.sim.step() && host.poll(1).is_none(), "it has stopped");
    host.disable();
    host.enable();
    assert_eq!(get(&mut host, id::KEEP_ALIVE, Select::Current), 0);
    let log = host.admin_data(admin::get_log_page(1, admin::ALL_NAMESPACES, 64, 0, false, 0), 64).unwrap();
    let entry = onehop_proto::log::ErrorEntry::new(log.as_slice().try_into().unwrap());
    assert!(entry.status().is(Status::KEEP_ALIVE_EXPIRED), "{:?}", entry.status());
    host.clean();
}

#[test]
fn keep_alive_ends_with_the_controller() {
    let mut host = Host::enabled("mem:1M?workers=0");
    host.admin_ok(admin::set_features(id::KEEP_ALIVE, false, 100));
    host.disable();
    assert!(!host.sim.step(), "there is nothing to wait for");
    host.enable();
    host.admin_ok(admin::set_features(id::KEEP_ALIVE, false, 100));
    host.admin_ok(admin::set_features(id::KEEP_ALIVE, false, 0));
    assert!(!host.sim.step(), "it was switched off");
    host.clean();
}

#[test]
fn temperature_thresholds_raise_events() {
    let mut host = Host::enabled("mem:1M?workers=0");
    host.submit(0, admin::async_event());
    let threshold = TemperatureThreshold(0).with_kelvins(300);
    host.push(0, admin::set_features(id::TEMPERATURE_THRESHOLD, false, threshold.0));
    host.ring(0);
    let (one, two) = (host.wait(0), host.wait(0));
    assert!(one.result() == 0x0002_0101 || two.result() == 0x0002_0101);
    let cold = TemperatureThreshold(0).with_kind(1).with_kelvins(250);
    host.admin_ok(admin::set_features(id::TEMPERATURE_THRESHOLD, false, cold.0));
    let ask = admin::get_features(id::TEMPERATURE_THRESHOLD, Select::Current, cold.with_kelvins(0).0);
    assert_eq!(host.admin_ok(ask).result(), 250);
}

#[test]
fn features_with_data_keep_it() {
    let mut host = Host::enabled("mem:1M?workers=0");
    for (fid, dw11, bytes) in [
        (id::APST, 1, 256),
        (id::TIMESTAMP, 0, 8),
        (id::HOST_BEHAVIOR, 0, behavior::BYTES),
        (id::HOST_ID, 1, 16),
    ] {
        let buf = host.buffer(4096);
        buf.mem.write(0, &vec![1; bytes]).unwrap();
        host.admin_ok(admin::set_features(fid, false, dw11).with_prps(buf.addr(), 0));
        let got = host.admin_data(admin::get_features(fid, Select::Current, dw11), 4096).unwrap();
        assert_eq!(got[..bytes], vec![1; bytes]);
        assert!(got[bytes..].iter().all(|b| *b == 0));
    }
    let buf = host.buffer(4096);
    buf.mem.write(behavior::ACRE, &[2]).unwrap();
    let bad = admin::set_features(id::HOST_BEHAVIOR, false, 0).with_prps(buf.addr(), 0);
    assert!(host.admin(bad).status().is(Status::INVALID_FIELD));
    host.clean();
}

#[test]
fn the_host_memory_buffer_is_used() {
    let mut host = Host::new("mem:1M?workers=0&hmb=16");
    let (list, ranges) = (host.buffer(4096), [host.buffer(32768), host.buffer(32768)]);
    for (i, range) in ranges.iter().enumerate() {
        let entry = HostMemoryEntry { at: onehop_proto::BusAddr(range.addr()), pages: 8 };
        list.mem.write(i * 16, &entry.encode()).unwrap();
    }
    let enable = HostMemory {
        enable: true,
        memory_return: false,
        pages: 16,
        list: onehop_proto::BusAddr(list.addr()),
        entries: 2,
    };
    let short = HostMemory { pages: 15, ..enable };
    assert!(host.admin(short.command()).status().is(Status::INVALID_FIELD));
    host.admin_ok(enable.command());
    assert!(host.admin(enable.command()).status().is(Status::COMMAND_SEQUENCE_ERROR));
    let got = host.admin_data(admin::get_features(id::HOST_MEMORY_BUFFER, Select::Current, 0), 16).unwrap();
    assert_eq!(got[..4], 16u32.to_le_bytes());
    assert!(ranges.iter().all(|p| p.read(8) != [0; 8]), "the controller uses it");
    host.run(1, nvm::flush(1));
    host.clean();
    drop(ranges);
    host.run(1, nvm::flush(1));
    host.broke(Rule::DmaUnmapped);
    host.admin_ok(HostMemory::default().command());
    let broken = host.rules().len();
    host.run(1, nvm::flush(1));
    assert_eq!(host.rules().len(), broken, "it was disabled");
}
