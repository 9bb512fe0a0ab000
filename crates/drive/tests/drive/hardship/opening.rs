//! Drives that lose commands, or fail to reset, while they are opened.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, Options};
use onehop_os::{ControllerBackend, FunctionReset, StopSignal};
use onehop_proto::regs::{Cc, Csts, offset};

use super::{inject, options};

#[test]
fn one_lost_admin_command_does_not_keep_a_drive_from_being_opened() {
    for op in ["identify", "set-features"] {
        for n in 1..=4 {
            let sim = onehop_sim::open(&format!("mem:1M?to=1&fault=lost@op={op},n={n}")).unwrap();
            let drive = Drive::open(sim.port(), options()).unwrap_or_else(|e| panic!("{op} {n}: {e}"));
            let buffer = drive.buffer(4096).unwrap();
            drive.queue().unwrap().read(drive.namespace(1).unwrap(), 0, 8, &buffer, 0).unwrap();
            assert_eq!(sim.violations(), [], "{op} {n}");
        }
    }
}

#[test]
fn a_drive_that_never_answers_is_given_up() {
    let sim = onehop_sim::open("mem:1M?to=1&fault=lost@op=set-features").unwrap();
    let end = Drive::open(sim.port(), options()).map(|_| ());
    assert!(matches!(end, Err(Error::NoAnswer { .. })), "{end:?}");
}

/// The driver does not wait ten seconds for an answer when the controller's status shows that none will come.
#[test]
fn a_controller_that_stops_at_an_admin_command_is_noticed_at_once() {
    for (fault, opens) in [("cfs", true), ("power-loss", true), ("gone", false)] {
        for n in [1, 3] {
            let sim = onehop_sim::open(&format!("mem:1M?to=1&fault={fault}@q=0,n={n}")).unwrap();
            let patient = Options { admin_timeout: Duration::from_secs(60), ..options() };
            let began = Instant::now();
            let end = Drive::open(sim.port(), patient).map(|_| ());
            assert!(began.elapsed() < Duration::from_secs(30), "{fault} {n}: {:?}", began.elapsed());
            match opens {
                true => assert!(end.is_ok(), "{fault} {n}: {end:?}"),
                false => assert!(matches!(end, Err(Error::Gone { .. })), "{fault} {n}: {end:?}"),
            }
        }
    }
}

/// A function reset that fails, as often as it is tried.
struct Broken(Arc<AtomicU32>);

impl FunctionReset for Broken {
    fn function_reset(&self) -> onehop_os::Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Err(onehop_os::Error::CannotMap { mapper: "the test".into(), why: "no reset".into() })
    }
}

#[test]
fn a_function_reset_that_fails_is_a_failed_try() {
    let sim = onehop_sim::open("mem:1M?to=1&fault=lost@op=identify,n=1").unwrap();
    let tried = Arc::<AtomicU32>::default();
    let port = ControllerBackend { reset: Some(Arc::new(Broken(tried.clone()))), ..sim.port() };
    let drive = Drive::open(port, options()).unwrap();
    assert_eq!(tried.load(Ordering::Relaxed), 1);
    let (queue, buffer) = (drive.queue().unwrap(), drive.buffer(4096).unwrap());
    inject(&sim, "lost@op=identify,count=2");
    drive.reset().unwrap();
    assert_eq!(tried.load(Ordering::Relaxed), 3);
    queue.read(drive.namespace(1).unwrap(), 0, 8, &buffer, 0).unwrap();
}

/// Options with which only a request to stop ends anything within the test.
fn patient(stop: &StopSignal) -> Options {
    let long = Duration::from_secs(3600);
    Options { admin_timeout: long, ready_limit: long, stop: stop.clone(), ..options() }
}

/// Opens a drive, and requests a stop once `is_waited_for` returns true.
fn stopped_opening(port: &ControllerBackend, is_waited_for: impl Fn(Cc, Csts) -> bool) -> Error {
    let stop = StopSignal::default();
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| Drive::open(port.clone(), patient(&stop)).map(|_| ()));
        let read = |at| port.regs.read32(at);
        while !is_waited_for(Cc(read(offset::CC)), Csts(read(offset::CSTS))) && !opening.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.set();
        opening.join().unwrap().unwrap_err()
    })
}

#[test]
fn a_request_to_stop_ends_an_opening() {
    for fault in ["stuck-rdy@on=enable", "lost@op=identify", "lost@op=set-features"] {
        let sim = onehop_sim::open(&format!("mem:1M?to=120&fault={fault}")).unwrap();
        let port = sim.port();
        let never_ready = fault.starts_with("stuck-rdy");
        let error = stopped_opening(&port, |cc, csts| cc.en() && (never_ready || csts.rdy()));
        assert!(matches!(error, Error::Interrupted { .. }), "{fault}: {error}");
        // It reaches no memory any more.
        let (cc, csts) = (Cc(port.regs.read32(offset::CC)), Csts(port.regs.read32(offset::CSTS)));
        assert!(!cc.en() && !csts.rdy(), "{fault}: {cc:?}, {csts:?}");
        // Without a wait for RDY, EN is cleared earlier than the specification wants it.
        assert!(never_ready || sim.violations().is_empty(), "{fault}: {:?}", sim.violations());
    }
}

/// It has no memory of the driver, so the end does not wait for it once more.
#[test]
fn a_request_to_stop_ends_the_wait_for_a_controller_that_somebody_left_enabled() {
    let sim = onehop_sim::open("mem:1M?to=120").unwrap();
    let port = sim.port();
    std::mem::forget(Drive::open(port.clone(), options()).unwrap());
    inject(&sim, "stuck-rdy@on=disable");
    let error = stopped_opening(&port, |cc, csts| !cc.en() && csts.rdy());
    assert!(matches!(error, Error::Interrupted { .. }), "{error}");
}

#[test]
fn a_request_to_stop_ends_a_reset() {
    let sim = onehop_sim::open("mem:1M?to=1").unwrap();
    let stop = StopSignal::default();
    let drive = Drive::open(sim.port(), patient(&stop)).unwrap();
    inject(&sim, "lost@op=identify");
    let error = std::thread::scope(|scope| {
        let reset = scope.spawn(|| drive.reset());
        stop.set();
        reset.join().unwrap().unwrap_err()
    });
    assert!(matches!(error, Error::Interrupted { .. }), "{error}");
    let after = drive.events().unwrap_err();
    assert!(matches!(after, Error::Interrupted { .. }), "{after}");
}
