//! Options that are out of bounds for every drive.

use std::sync::Arc;
use std::time::Duration;

use onehop_drive::{Drive, Error, GpuMode, GpuSetup, Options, Placement};
use onehop_gpu::Emulated;

use super::{open, options};

/// Which option an error names, with its value.
fn refused<T>(end: Result<T, Error>) -> (&'static str, String) {
    match end.map(|_| ()) {
        Err(error @ Error::Option { .. }) => {
            let text = error.to_string();
            let Error::Option { option, value, limit } = error else { unreachable!() };
            assert!(text.contains(option) && text.contains(&value) && text.contains(&limit), "{text}");
            (option, value)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn options_out_of_bounds_are_named() {
    let none = Duration::ZERO;
    let with = |set: &dyn Fn(&mut Options)| {
        let sim = onehop_sim::open("mem:1M").unwrap();
        let mut options = options();
        set(&mut options);
        refused(Drive::open(sim.port(), options))
    };
    assert_eq!(with(&|o| o.queues = 0), ("queues", "0".into()));
    assert_eq!(with(&|o| o.depth = 0), ("depth", "0".into()));
    assert_eq!(with(&|o| o.retries = 256), ("retries", "256".into()));
    assert_eq!(with(&|o| o.timeout = none), ("timeout", "0ns".into()));
    assert_eq!(with(&|o| o.admin_timeout = none), ("admin_timeout", "0ns".into()));
    assert_eq!(with(&|o| o.abort_wait = none), ("abort_wait", "0ns".into()));
    assert_eq!(with(&|o| o.ready_limit = none), ("ready_limit", "0ns".into()));
}

#[test]
fn and_so_are_those_of_gpu_queues() {
    let (_sim, drive) = open("mem:1M");
    let plain = GpuSetup::new(Placement::TIER1);
    let with = |setup| refused(drive.gpu_queues(Arc::new(Emulated::new()), setup)).0;
    assert_eq!(with(GpuSetup { queues: 0, ..plain }), "queues");
    assert_eq!(with(GpuSetup { mode: GpuMode::Shared { threads: 0 }, ..plain }), "threads");
    assert_eq!(with(GpuSetup { depth: 0, ..plain }), "depth");
    assert_eq!(with(GpuSetup { stall: Duration::ZERO, ..plain }), "stall");
    assert_eq!(with(GpuSetup { limit: Duration::ZERO, ..plain }), "limit");
}

/// The largest that are allowed work with a drive that allows less.
#[test]
fn the_largest_options_are_no_overflow() {
    let sim = onehop_sim::open("mem:1M?queues=2").unwrap();
    let (queues, depth, retries) = (u16::MAX, u32::MAX, 255);
    let (timeout, max_transfer, host_memory) = (Duration::MAX, u64::MAX, u64::MAX);
    let options = Options { queues, depth, retries, timeout, max_transfer, host_memory, ..options() };
    let drive = Drive::open(sim.port(), options).unwrap();
    let buffer = drive.buffer(1 << 20).unwrap();
    drive.queue().unwrap().read(drive.namespace(1).unwrap(), 0, 2048, &buffer, 0).unwrap();
    assert_eq!(sim.violations(), []);
}
