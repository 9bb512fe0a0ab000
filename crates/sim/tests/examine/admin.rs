//! Identify, Abort, and asynchronous events.

use onehop_proto::admin::{self, cns, csi};
use onehop_proto::identify::{self, NamespaceId};
use onehop_proto::log::{AsyncEvent, id};
use onehop_proto::{Sqe, Status, feature, nvm};
use onehop_sim::{Fault, Rule};

use crate::host::Host;

fn fault(text: &str) -> Fault {
    Fault::parse(text).unwrap()
}

#[test]
fn controller_data_says_what_was_configured() {
    let mut host = Host::enabled("mem:1M?workers=0&aerl=1&acl=7&dbbuf=1&hmb=64&crdt=4,5,6&sgl=1&vwc=0&ns=3");
    let bytes = host.admin_data(admin::identify(cns::CONTROLLER, 0, 0, 0), 4096).unwrap();
    let id = identify::Controller::parse(&bytes).unwrap();
    assert_eq!((id.aer_limit(), id.abort_limit(), id.hmpre(), id.nn()), (2, 8, 64, 3));
    assert_eq!((id.crdt1(), id.crdt2(), id.crdt3()), (4, 5, 6));
    assert!(id.oacs().doorbell_buffer() && id.sgls().usable() && !id.vwc().present());
    assert!(id.sqes().allows(6) && id.cqes().allows(4) && id.log_offsets());
    assert!(id.power_state(4).unwrap().non_operational() && id.power_state(5).is_none());
    assert!(id.subnqn().as_str().unwrap().starts_with("nqn."));
    assert_eq!(id.cntrltype(), 1);
    host.clean();
}

#[test]
fn namespaces_are_listed_and_described() {
    let mut host = Host::enabled("mem:12M?workers=0&ns=3&lba=4096&ms=16&ext=1");
    let list = |host: &mut Host, above| {
        let bytes = host.admin_data(admin::identify(cns::ACTIVE_NAMESPACES, above, 0, 0), 4096)?;
        Ok::<_, Status>(identify::active_namespaces(bytes.first_chunk().unwrap()).collect::<Vec<_>>())
    };
    assert_eq!(list(&mut host, 0).unwrap(), [1, 2, 3]);
    assert_eq!(list(&mut host, 2).unwrap(), [3]);
    assert_eq!(list(&mut host, 3).unwrap(), []);
    assert_eq!(list(&mut host, 1000).unwrap(), []);
    assert!(list(&mut host, u32::MAX).unwrap_err().is(Status::INVALID_NAMESPACE));
    let bytes = host.admin_data(admin::identify(cns::NAMESPACE, 3, 0, 0), 4096).unwrap();
    let ns = identify::Namespace::parse(&bytes).unwrap();
    let format = ns.format().unwrap();
    assert_eq!((format.lba_bytes(), format.metadata, format.extended), (4096, 16, true));
    assert_eq!((ns.nsze(), ns.dlfeat() & 7), (1024, 1));
    let bytes = host.admin_data(admin::identify(cns::NAMESPACE_DESCRIPTORS, 2, 0, 0), 4096).unwrap();
    let names: Vec<_> = identify::descriptors(bytes.first_chunk().unwrap()).map(Result::unwrap).collect();
    assert!(matches!(names[..], [NamespaceId::Eui64(_), NamespaceId::Nguid(_)]));
    for nsid in [0, 4, u32::MAX] {
        let got = host.admin_data(admin::identify(cns::NAMESPACE, nsid, 0, 0), 4096).unwrap_err();
        assert!(got.is(Status::INVALID_NAMESPACE));
    }
    host.clean();
}

#[test]
fn version_two_knows_more_structures() {
    let asks = [
        admin::identify(cns::CSI_NAMESPACE, 1, 0, csi::NVM),
        admin::identify(cns::CSI_CONTROLLER, 0, 0, csi::NVM),
        admin::identify(cns::CSI_ACTIVE, 0, 0, csi::NVM),
        admin::identify(cns::INDEPENDENT_NAMESPACE, 1, 0, 0),
    ];
    let mut old = Host::enabled("mem:1M?workers=0");
    let mut new = Host::enabled("mem:1M?workers=0&version=2.0");
    for ask in asks {
        assert!(old.admin_data(ask, 4096).unwrap_err().is(Status::INVALID_FIELD));
        assert!(new.admin_data(ask, 4096).is_ok());
    }
    let zoned = admin::identify(cns::CSI_CONTROLLER, 0, 0, csi::ZONED);
    assert!(new.admin_data(zoned, 4096).unwrap_err().is(Status::INVALID_FIELD));
    assert!(new.admin_data(admin::identify(0x55, 0, 0, 0), 4096).unwrap_err().is(Status::INVALID_FIELD));
    let bytes = new.admin_data(admin::identify(cns::INDEPENDENT_NAMESPACE, 1, 0, 0), 4096).unwrap();
    assert_eq!(identify::IndependentNamespace::parse(&bytes).unwrap().nstat() & 1, 1);
}

#[test]
fn abort_cancels_waiting_commands() {
    let mut host = Host::new("mem:1M?workers=0&fault=lost@n=1&fault=late@n=2,delay=9s");
    for _ in 0..2 {
        let cid = host.submit(1, nvm::flush(1));
        let abort = host.admin_ok(admin::abort(1, cid));
        assert_eq!(abort.result() & 1, 0, "it was aborted");
        let cqe = host.wait(1);
        assert!(cqe.cid() == cid && cqe.status().is(Status::ABORT_REQUESTED) && !cqe.status().dnr());
    }
    assert_eq!(host.admin_ok(admin::abort(1, 1)).result() & 1, 1, "it had completed");
    assert_eq!(host.admin_ok(admin::abort(9, 1)).result() & 1, 1);
    assert!(!host.sim.step());
    host.clean();
}

#[test]
fn abort_can_be_ignored() {
    let mut host = Host::new("mem:1M?workers=0&fault=lost&fault=abort-ignored@n=1");
    let cid = host.submit(1, nvm::flush(1));
    assert_eq!(host.admin_ok(admin::abort(1, cid)).result() & 1, 1);
    assert_eq!(host.poll(1), None);
    assert_eq!(host.admin_ok(admin::abort(1, cid)).result() & 1, 0);
    assert_eq!(host.wait(1).cid(), cid);
}

#[test]
fn aborts_are_limited() {
    let mut host = Host::new("mem:1M?workers=0&acl=1&fault=late@op=abort,count=2,delay=9s");
    host.submit(0, admin::abort(1, 7));
    host.submit(0, admin::abort(1, 8));
    assert_eq!(host.poll(0), None);
    assert!(host.admin(admin::abort(1, 9)).status().is(Status::ABORT_LIMIT_EXCEEDED));
    host.broke_only(Rule::AbortLimit);
}

#[test]
fn event_requests_are_limited_and_abortable() {
    let mut host = Host::enabled("mem:1M?workers=0&aerl=1");
    let first = host.submit(0, admin::async_event());
    host.submit(0, admin::async_event());
    host.clean();
    assert!(host.admin(admin::async_event()).status().is(Status::AER_LIMIT_EXCEEDED));
    host.broke_only(Rule::AerLimit);
    host.push(0, admin::abort(0, first));
    host.ring(0);
    let aborted = host.wait(0);
    assert!(aborted.cid() == first && aborted.status().is(Status::ABORT_REQUESTED));
    assert_eq!(host.wait(0).result() & 1, 0);
}

#[test]
fn events_are_masked_until_their_page_is_read() {
    let mut host = Host::enabled("mem:1M?workers=0&ns=2");
    host.sim.namespace_changed(2);
    host.submit(0, admin::async_event());
    let event = AsyncEvent(host.wait(0).result());
    assert!(event.is(AsyncEvent::NAMESPACE_CHANGED) && event.page() == id::CHANGED_NAMESPACES);
    host.submit(0, admin::async_event());
    host.sim.namespace_changed(1);
    assert_eq!(host.poll(0), None, "masked");
    let read = |rae| admin::get_log_page(id::CHANGED_NAMESPACES, 0, 4096, 0, rae, 0);
    let kept = host.admin_data(read(true), 4096).unwrap();
    assert_eq!((kept[0], kept[4]), (1, 2));
    assert_eq!(host.poll(0), None, "still masked");
    host.admin_data(read(false), 4096).unwrap();
    assert_eq!(host.admin_data(read(false), 4096).unwrap(), vec![0; 4096]);
    host.sim.namespace_changed(1);
    assert!(AsyncEvent(host.wait(0).result()).is(AsyncEvent::NAMESPACE_CHANGED));
    host.clean();
}

#[test]
fn events_come_only_if_they_are_wanted() {
    let mut host = Host::enabled("mem:1M?workers=0");
    host.admin_ok(admin::set_features(feature::id::ASYNC_EVENT, false, 0));
    host.submit(0, admin::async_event());
    host.sim.namespace_changed(1);
    host.sim.set_temperature(400);
    assert_eq!(host.poll(0), None);
    host.admin_ok(admin::set_features(feature::id::ASYNC_EVENT, false, 2));
    host.sim.set_temperature(401);
    assert!(AsyncEvent(host.wait(0).result()).is(AsyncEvent::TEMPERATURE));
}

#[test]
fn admin_commands_are_only_hit_when_they_are_meant() {
    let mut host = Host::enabled("mem:1M?workers=0&fault=fail");
    let identify = admin::identify(cns::CONTROLLER, 0, 0, 0);
    assert!(host.admin_data(identify, 4096).is_ok());
    host.sim.inject(fault("fail@q=0,status=0/1c,count=1"));
    assert!(host.admin_data(identify, 4096).unwrap_err().is(Status::SANITIZE_FAILED));
    host.sim.inject(fault("fail@op=identify,count=1"));
    host.admin_ok(admin::get_features(feature::id::ARBITRATION, admin::Select::Current, 0));
    assert!(host.admin_data(identify, 4096).unwrap_err().is(Status::INTERNAL_ERROR));
    assert!(host.admin_data(identify, 4096).is_ok());
}

#[test]
fn commands_that_are_not_offered_are_refused() {
    let mut host = Host::enabled("mem:1M?workers=0");
    let offered = [0u8, 1, 2, 4, 5, 6, 8, 9, 0xa, 0xc, 0x18, 0x7c];
    for opcode in (0..=255).filter(|op| !offered.contains(op)) {
        assert!(host.admin(Sqe::new(opcode, 0)).status().is(Status::INVALID_OPCODE), "{opcode:#x}");
    }
    let config = admin::doorbell_buffer_config(onehop_proto::BusAddr(0), onehop_proto::BusAddr(0));
    assert!(host.admin(config).status().is(Status::INVALID_OPCODE));
}

/// A host that writes in the preferred granularity writes the optimal size in whole units of it.
#[test]
fn the_optimal_write_size_is_a_multiple_of_the_preferred_one() {
    for lba in [512, 4096, 65536] {
        let mut host = Host::enabled(&format!("mem:1M?workers=0&lba={lba}"));
        let raw = host.admin_data(admin::identify(admin::cns::NAMESPACE, 1, 0, 0), 4096).unwrap();
        let raw: [u8; 4096] = raw.try_into().unwrap();
        let ns = onehop_proto::identify::Namespace::new(&raw);
        assert!(ns.granularities());
        let (preferred, optimal) = (u32::from(ns.npwg_z()) + 1, u32::from(ns.nows_z()) + 1);
        assert_eq!((optimal % preferred, preferred * lba), (0, lba.max(4096)), "{lba}");
    }
}
