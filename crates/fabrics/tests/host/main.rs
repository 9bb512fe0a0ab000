//! The host against a test target that checks its input, and violates the protocol on request; and its queue without a
//! connection.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod comeback;
mod driver;
mod loss;
mod misbehaviour;
mod paths;
mod reads;
mod stream;
#[path = "../../../drive/tests/suite/mod.rs"]
mod suite;
mod target;

use std::time::Duration;

use onehop_drive::{Drive, Options};
use onehop_os::StopSignal;
use target::Target;

/// Opens the target's namespace for writing.
fn open(target: &Target, options: &str) -> Drive {
    try_open(target, options).unwrap_or_else(|error| panic!("{error}; {:?}", target.breaches()))
}

fn try_open(target: &Target, options: &str) -> Result<Drive, String> {
    let name: onehop_fabrics::SubsystemAddress = format!("{}{options}", target.name()).parse().unwrap();
    let backend = onehop_fabrics::open(&name, &StopSignal::default()).map_err(|error| error.to_string())?;
    Drive::open(backend, quick()).map_err(|error| error.to_string())
}

fn open_with(target: &Target, options: Options) -> Drive {
    let backend = onehop_fabrics::open(&target.name().parse().unwrap(), &StopSignal::default()).unwrap();
    Drive::open(backend, options).unwrap()
}

/// Driver options with time limits of seconds.
fn quick() -> Options {
    Options {
        writable: true,
        timeout: Duration::from_secs(2),
        admin_timeout: Duration::from_secs(2),
        abort_wait: Duration::from_millis(100),
        depth: 31,
        ..Options::default()
    }
}
