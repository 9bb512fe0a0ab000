//! Every fault by its name, with every trigger.

use std::time::Duration;

use onehop_proto::regs::{Cc, Csts};
use onehop_proto::{Status, admin, feature, nvm};
use onehop_sim::{Config, Fault, FaultKind, Rule};

use crate::host::{Host, pattern};

fn host(fault: &str) -> Host {
    Host::new(&format!("mem:1M?workers=0&{fault}"))
}

fn fault(text: &str) -> Fault {
    Fault::parse(text).unwrap()
}

fn flush(host: &mut Host) -> u16 {
    host.submit(1, nvm::flush(1))
}

#[test]
fn late_completes_later_and_out_of_order() {
    let mut host = host("fault=late@n=2,delay=9s");
    let cids: Vec<_> = (0..3).map(|_| flush(&mut host)).collect();
    assert_eq!((host.wait(1).cid(), host.wait(1).cid()), (cids[0], cids[2]));
    assert_eq!(host.poll(1), None);
    assert!(host.sim.step());
    assert_eq!(host.wait(1).cid(), cids[1]);
    host.clean();
}

#[test]
fn late_comes_by_itself() {
    for mode in ["workers=0", "workers=1"] {
        let mut host = Host::new(&format!("mem:1M?{mode}&fault=late@n=1,delay=5ms"));
        let start = std::time::Instant::now();
        assert!(host.run(1, nvm::flush(1)).status().is_ok());
        assert!(start.elapsed() >= Duration::from_millis(5));
    }
}

#[test]
fn late_data_is_not_there_before() {
    let mut host = host("fault=late@op=read,delay=9s");
    host.sim.write_media(1, 0, &[7; 512]).unwrap();
    let buf = host.buffer(4096);
    host.submit(1, nvm::read(1, 0, 1).unwrap().with_prps(buf.addr(), 0));
    assert_eq!(buf.read(512), [0; 512]);
    host.sim.step();
    host.wait(1);
    assert_eq!(buf.read(512), [7; 512]);
}

#[test]
fn reorder_waits_for_others() {
    let mut host = host("fault=reorder@n=1,by=2,delay=9s");
    let cids: Vec<_> = (0..3).map(|_| flush(&mut host)).collect();
    let seen: Vec<_> = (0..3).map(|_| host.wait(1).cid()).collect();
    assert_eq!(seen, [cids[1], cids[2], cids[0]]);
    // Without others, it only waits for the time.
    host.sim.inject(fault("reorder@n=1,delay=9s"));
    flush(&mut host);
    assert_eq!(host.poll(1), None);
    assert!(host.sim.step());
    host.wait(1);
    host.clean();
}

#[test]
fn lost_never_completes_but_can_be_aborted() {
    let mut host = host("fault=lost@n=1");
    let cid = flush(&mut host);
    host.nothing_comes(1);
    assert!(!host.sim.step());
    assert_eq!(host.admin_ok(admin::abort(1, cid)).result() & 1, 0);
    assert!(host.wait(1).status().is(Status::ABORT_REQUESTED));
    host.clean();
}

#[test]
fn torn_posts_the_completion_before_the_data() {
    let mut host = host("fault=torn@n=1,delay=9s");
    let data = pattern(1, 8192);
    host.sim.write_media(1, 0, &data).unwrap();
    let buf = host.buffer(8192);
    let sqe = nvm::read(1, 0, 16).unwrap().with_prps(buf.addr(), buf.addr() + 4096);
    assert!(host.run(1, sqe).status().is_ok());
    assert_eq!(buf.read(8192), vec![0; 8192]);
    assert!(host.sim.step());
    assert_eq!(buf.read(8192), data);
    host.clean();
}

#[test]
fn torn_data_survives_its_queue_but_no_reset() {
    for reset in [false, true] {
        let mut host = host("fault=torn@n=1,delay=9s");
        let data = pattern(1, 4096);
        host.sim.write_media(1, 0, &data).unwrap();
        let buf = host.buffer(4096);
        assert!(host.run(1, nvm::read(1, 0, 8).unwrap().with_prps(buf.addr(), 0)).status().is_ok());
        host.delete_pair(1);
        if reset {
            host.disable();
        }
        assert_eq!(host.sim.step(), !reset);
        assert_eq!(buf.read(4096), if reset { vec![0; 4096] } else { data });
        host.clean();
    }
}

#[test]
fn fail_once_works_when_retried() {
    let mut host = host("fault=fail-once@n=1,status=0/21");
    let first = host.run(1, nvm::flush(1)).status();
    assert!(first.is(Status::COMMAND_INTERRUPTED) && first.may_retry() && first.crd() == 0);
    assert!(host.run(1, nvm::flush(1)).status().is_ok());
    host.clean();
    // Every command fails the first time.
    host.sim.inject(fault("fail-once@every=1"));
    for lba in 0..4 {
        let sqe = nvm::write_zeroes(1, lba, 1).unwrap();
        assert!(host.run(1, sqe).status().may_retry());
        assert!(host.run(1, sqe).status().is_ok());
    }
    host.clean();
}

#[test]
fn retry_delays_are_reported_if_enabled_and_then_enforced() {
    for (unit, broken) in [("1ms", 0), ("900s", 1)] {
        let mut host = host(&format!("crdt=1,2,3&crdt_unit={unit}&fault=fail-once@n=1,crd=2"));
        assert_eq!(host.run(1, nvm::flush(1)).status().crd(), 0, "the host has not set ACRE");
        let buf = host.buffer(4096);
        buf.mem.write(feature::behavior::ACRE, &[1]).unwrap();
        host.admin_ok(admin::set_features(feature::id::HOST_BEHAVIOR, false, 0).with_prps(buf.addr(), 0));
        host.sim.inject(fault("fail-once@n=1,crd=2"));
        let status = host.run(1, nvm::write_zeroes(1, 0, 1).unwrap()).status();
        assert!(status.crd() == 2 && !status.dnr());
        std::thread::sleep(Duration::from_millis(3));
        assert!(host.run(1, nvm::write_zeroes(1, 0, 1).unwrap()).status().is_ok());
        assert_eq!(host.rules(), vec![Rule::RetryTooSoon; broken]);
    }
}

#[test]
fn fail_always_fails() {
    let mut host = host("fault=fail@op=write,lba=4-5,status=2/80");
    for _ in 0..3 {
        let status = host.write(5, &[1; 512], 512);
        assert!(status.is(Status::WRITE_FAULT) && status.dnr());
    }
    assert!(host.write(6, &[1; 512], 512).is_ok());
    assert!(host.write(0, &[1; 4 * 512], 512).is_ok());
    assert!(host.write(0, &[1; 5 * 512], 512).is(Status::WRITE_FAULT));
    assert!(host.read(4, 2, 512).is_ok());
}

#[test]
fn media_cannot_be_read_but_written() {
    let mut host = host("fault=media@lba=100-200");
    assert!(host.read(90, 10, 512).is_ok());
    let status = host.read(90, 11, 512).unwrap_err();
    assert!(status.is(Status::UNRECOVERED_READ) && status.dnr());
    assert!(host.read(200, 1, 512).is_err() && host.read(201, 1, 512).is_ok());
    assert!(host.write(150, &[1; 512], 512).is_ok());
}

#[test]
fn wrong_cid_is_not_outstanding() {
    let mut host = host("fault=wrong-cid@n=2&fault=lost@n=1");
    let (lost, cid) = (flush(&mut host), flush(&mut host));
    let cqe = host.wait(1);
    assert!(cqe.cid() != cid && cqe.cid() != lost && cqe.status().is_ok());
    // A host may use any identifier near its own for its next command; that one would collide.
    assert!(cqe.cid().abs_diff(cid) > 0x4000, "{cid:#x} became {:#x}", cqe.cid());
    host.nothing_comes(1);
    assert_eq!(host.admin_ok(admin::abort(1, cid)).result() & 1, 0);
    assert_eq!(host.wait(1).cid(), cid);
}

#[test]
fn dup_comes_twice() {
    let mut host = host("fault=dup@n=1");
    let cid = flush(&mut host);
    let (one, two) = (host.wait(1), host.wait(1));
    assert_eq!((one.cid(), two.cid()), (cid, cid));
    assert_eq!(host.poll(1), None);
    host.run(1, nvm::flush(1));
    host.clean();
}

#[test]
fn stale_phase_is_corrected_later() {
    for turns in [1, 4] {
        let mut host = Host::with_queue("mem:1M?workers=0", 4);
        for _ in 1..turns {
            host.run(1, nvm::flush(1));
        }
        host.sim.inject(fault("stale-phase@n=1,delay=9s"));
        let (first, second) = (flush(&mut host), flush(&mut host));
        assert_eq!(host.poll(1), None);
        assert!(host.sim.step());
        assert_eq!((host.wait(1).cid(), host.wait(1).cid()), (first, second));
        host.clean();
    }
}

#[test]
fn sqhd_lags_but_never_goes_back() {
    let mut host = host("fault=sqhd-lag@q=1,by=3");
    let heads: Vec<_> = (0..40).map(|_| host.run(1, nvm::flush(1)).sqhd()).collect();
    assert_eq!(heads[..5], [0, 0, 0, 1, 2]);
    assert_eq!(heads[33..37], [31, 0, 1, 2]);
    host.clean();
}

#[test]
fn cfs_stops_everything_until_reset() {
    let mut host = host("fault=cfs@n=2");
    host.run(1, nvm::flush(1));
    flush(&mut host);
    host.nothing_comes(1);
    assert!(host.csts().cfs() && host.csts().rdy());
    flush(&mut host);
    host.nothing_comes(1);
    host.disable();
    host.enable();
    host.create_pair(1, 8);
    host.run(1, nvm::flush(1));
    host.clean();
}

#[test]
fn gone_reads_all_ones() {
    for mode in ["workers=0", "workers=1"] {
        let mut host = Host::new(&format!("mem:1M?{mode}&fault=gone@n=1&cmb=4K"));
        flush(&mut host);
        host.wait_for(|h| h.csts().gone());
        assert!(host.cap().gone());
        assert_eq!(host.regs.read32(host.regs.size() - 4), u32::MAX);
        assert_eq!(host.poll_silently(1), None);
        assert!(host.port.reset.as_ref().unwrap().function_reset().is_err());
        host.sim.power_cycle();
        host.enable();
        host.create_pair(1, 8);
        assert!(host.run(1, nvm::flush(1)).status().is_ok());
        host.clean();
    }
}

#[test]
fn stuck_rdy_never_follows() {
    let mut stuck = Host::raw("mem:1M?workers=0&to=0&fault=stuck-rdy@on=enable,n=1");
    stuck.set_admin_queue();
    stuck.regs.write32(onehop_proto::regs::offset::CC, Cc::enabled(12, 0).0);
    assert!(!stuck.sim.step() && !stuck.csts().rdy());
    stuck.regs.write32(onehop_proto::regs::offset::CC, 0);
    stuck.enable();
    stuck.clean();

    let stuck = host("fault=stuck-rdy@on=disable");
    stuck.regs.write32(onehop_proto::regs::offset::CC, 0);
    assert!(!stuck.sim.step() && stuck.csts().rdy());
    stuck.port.reset.as_ref().unwrap().function_reset().unwrap();
    assert_eq!(stuck.csts(), Csts(0));
}

#[test]
fn slow_start_takes_its_time() {
    let mut host = Host::raw("mem:1M?workers=0&fault=slow-start@delay=5s,count=1");
    host.set_admin_queue();
    host.regs.write32(onehop_proto::regs::offset::CC, Cc::enabled(12, 0).0);
    assert!(!host.csts().rdy());
    host.sim.step();
    assert!(host.csts().rdy());
    host.disable();
    host.enable();
    host.clean();
}

#[test]
fn power_loss_forgets_what_was_not_flushed() {
    let mut host = host("fault=power-loss@n=4");
    assert!(host.write(0, &[1; 512], 512).is_ok());
    assert!(host.run(1, nvm::flush(1)).status().is_ok());
    assert!(host.write(0, &[2; 512], 512).is_ok());
    host.submit(1, nvm::flush(1));
    assert_eq!(host.csts(), Csts(0));
    host.enable();
    host.create_pair(1, 8);
    assert_eq!(host.read(0, 1, 512).unwrap(), [1; 512]);
    host.clean();
}

#[test]
fn triggers_have_many_forms() {
    let hits = |spec: &str, commands: u32| -> Vec<u32> {
        let mut host = host(&format!("seed=5&fault=fail@{spec}"));
        (1..=commands).filter(|_| !host.run(1, nvm::flush(1)).status().is_ok()).collect()
    };
    assert_eq!(hits("n=3", 10), [3]);
    assert_eq!(hits("every=4", 10), [4, 8]);
    assert_eq!(hits("every=2,count=2", 10), [2, 4]);
    assert_eq!(hits("count=1", 3), [1]);
    assert_eq!(hits("q=1,n=1", 3), [1]);
    assert_eq!(hits("q=2", 3), []);
    assert_eq!(hits("op=read", 3), []);
    assert_eq!(hits("op=read|flush,n=2", 3), [2]);
    assert_eq!(hits("op=0x00,n=2", 3), [2]);
    assert_eq!(hits("after=9s", 3), []);
    assert_eq!(hits("p=0", 50), []);
    assert_eq!(hits("p=1", 3), [1, 2, 3]);
    let some = hits("p=0.2", 200);
    assert!((20..60).contains(&some.len()), "{some:?}");
    assert_eq!(some, hits("p=0.2", 200), "chance repeats itself");
}

#[test]
fn faults_of_the_controller_may_wait_for_the_clock() {
    for mode in ["workers=0", "workers=1"] {
        let host = Host::new(&format!("mem:1M?{mode}&fault=cfs@after=900s"));
        assert!(!host.csts().cfs() && host.sim.step() && host.csts().cfs());
        let host = Host::new(&format!("mem:1M?{mode}"));
        host.sim.inject(fault("cfs@after=3ms"));
        host.wait_for(|h| h.csts().cfs());
        let host = Host::new(&format!("mem:1M?{mode}"));
        host.sim.inject(fault("gone"));
        assert!(host.csts().gone());
        assert_eq!(host.sim.stats().faults, 1);
    }
}

#[test]
fn all_faults_can_be_configured_and_have_a_meaning() {
    // Blocks only apply to commands, and media errors require them.
    let blocks = |kind: FaultKind| if kind == FaultKind::Media { ",lba=1" } else { "" };
    let spec: Vec<_> =
        FaultKind::ALL.iter().map(|k| format!("fault={}@n=9{}", k.name(), blocks(*k))).collect();
    let config = Config::parse(&format!("mem:1M?{}", spec.join("&"))).unwrap();
    assert_eq!(config.faults.len(), FaultKind::ALL.len());
    assert!(FaultKind::ALL.iter().all(|k| k.means().len() > 10));
    let text = Config::parse("mem:1M?fault=gnoe").unwrap_err().to_string();
    assert!(text.contains("gnoe") && text.contains("gone"), "{text}");
}
