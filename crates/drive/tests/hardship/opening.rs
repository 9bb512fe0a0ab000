//! Drives that lose commands, or fail to be reset, while they are brought up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, Options};
use onehop_os::{ControllerBackend, FunctionReset};

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

/// Nobody waits ten seconds for the answer of a controller whose status says that none will come.
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
