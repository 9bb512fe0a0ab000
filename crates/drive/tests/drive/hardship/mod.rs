//! Regressions: each test is a sequence of events that once led to lost memory, wrong data or a hang.

mod arrival;
mod batches;
mod delays;
mod durability;
mod gpu;
mod memory;
mod misuse;
mod mixed_up;
mod opening;
mod out_of_bounds;
mod power;
mod recreation;
mod replaced;
mod stalls;
mod stopping;

use std::time::Duration;

use onehop_drive::{Drive, Options};
use onehop_sim::{Fault, Sim};

/// Short limits, so that tests of time-outs are quick.
fn options() -> Options {
    Options {
        writable: true,
        timeout: Duration::from_millis(60),
        abort_wait: Duration::from_millis(40),
        admin_timeout: Duration::from_millis(500),
        ready_limit: Duration::from_millis(600),
        retries: 2,
        ..Options::default()
    }
}

fn open(spec: &str) -> (Sim, Drive) {
    let sim = onehop_sim::open(spec).unwrap();
    let drive = Drive::open(sim.port(), options()).unwrap();
    (sim, drive)
}

fn inject(sim: &Sim, fault: &str) {
    sim.inject(Fault::parse(fault).unwrap());
}

/// Runs something that once hung.
fn within(limit: Duration, f: impl FnOnce() + Send + 'static) {
    let (done, wait) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        f();
        let _ = done.send(());
    });
    match wait.recv_timeout(limit) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("not over after {limit:?}"),
        _ => thread.join().unwrap(),
    }
}
