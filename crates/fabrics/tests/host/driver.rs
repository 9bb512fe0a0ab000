//! The test suite of every controller, across a network: on the test target, or manually on another, whose first
//! namespace is overwritten: `ONEHOP_TEST_NVME_TCP=nvme-tcp://HOST:PORT/NQN cargo test -p onehop-fabrics --
//! --test-threads 1 another_target`.

use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, Options};
use onehop_os::{ControllerBackend, StopSignal};

use crate::suite::{Case, PLAIN, Rng, run};
use crate::target::{Config, Target};

fn connect(name: &str) -> ControllerBackend {
    onehop_fabrics::open(&name.parse().unwrap(), &StopSignal::default()).unwrap()
}

#[test]
fn the_target_of_the_tests_is_a_drive_like_any_other() {
    for (options, config) in [
        ("", Config::default()),
        ("?digests=all", Config { success: false, split: 5000, max_h2c: 8192, ..Config::default() }),
        ("", Config { capsule: 0, mdts: 1, ..Config::default() }),
    ] {
        let target = Target::start(config.clone());
        let case = Case { mdts: config.mdts, queues: 4, ..PLAIN };
        run(connect(&format!("{}{options}", target.name())), case);
        assert_eq!(target.breaches(), Vec::<String>::new());
    }
}

/// The name of another target.
fn other() -> Option<String> {
    let name = std::env::var("ONEHOP_TEST_NVME_TCP").ok();
    if name.is_none() {
        eprintln!("skipped: ONEHOP_TEST_NVME_TCP names no target");
    }
    name
}

#[test]
fn suite_on_another_target() {
    let Some(name) = other() else { return };
    let drive = Drive::open(connect(&name), Options::default()).unwrap();
    let lba = drive.namespace(1).unwrap().format.lba_bytes() as u32;
    drop(drive);
    for options in ["", "?digests=header", "?digests=data", "?digests=all"] {
        let backend = connect(&format!("{name}{options}"));
        // The number of queues is the requested one: targets grant more.
        run(backend, Case { lba, unknown_is_removed: true, ..PLAIN });
    }
}

/// Writes blocks and reads them back for this many seconds, while another program may kill and restart the target.
#[test]
fn another_target_keeps_what_was_written() {
    let Some(name) = other() else { return };
    let seconds = std::env::var("ONEHOP_TEST_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    let drive = Drive::open(connect(&name), Options { writable: true, ..Options::default() }).unwrap();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let block = ns.format.lba_bytes();
    let blocks = (1 << 20) / block;
    let (from, to) = (drive.buffer(1 << 20).unwrap(), drive.buffer(1 << 20).unwrap());
    let mut rng = Rng(7);
    let (start, mut writes, mut unknown) = (Instant::now(), 0, 0);
    while start.elapsed() < Duration::from_secs(seconds) {
        let data = rng.bytes(1 << 20);
        from.host().unwrap().write(0, &data).unwrap();
        let lba = rng.below(ns.blocks - blocks);
        writes += 1;
        match queue.write(ns, lba, blocks, &from, 0).and_then(|_| queue.flush(ns)) {
            Ok(()) => {}
            Err(Error::OutcomeUnknown { .. } | Error::WritesLost { .. }) => {
                // The same bytes again: the result is the same whenever the target executes the first write.
                unknown += 1;
                queue.write(ns, lba, blocks, &from, 0).unwrap();
            }
            Err(error) => panic!("{error}"),
        }
        queue.read(ns, lba, blocks, &to, 0).unwrap();
        assert!(to.host().unwrap().to_vec(0, 1 << 20).unwrap() == data, "block {lba}");
    }
    eprintln!("{writes} writes, {unknown} of unknown outcome, {} recoveries", drive.incidents().len());
}
