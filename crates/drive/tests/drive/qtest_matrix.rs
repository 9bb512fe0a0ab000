//! The same driver suite on QEMU's own NVMe model: a controller that nobody here wrote.

use onehop_drive::{Drive, Options};
use onehop_qtest::bed::{Qemu, QemuOptions as Bed};

use crate::suite::{Case, PLAIN, matrix, run};

fn start(case: &Case) -> Option<Qemu> {
    let options = Bed {
        disk_bytes: 24 << 20,
        ram_bytes: 512 << 20,
        lba: case.lba,
        ms: case.ms,
        extended: case.ext,
        mdts: case.mdts,
        max_ioqpairs: case.queues.into(),
        ..Bed::default()
    };
    Qemu::start_or_skip(&options).unwrap()
}

fn on_qemu(case: Case) {
    let Some(qemu) = start(&case) else { return };
    run(qemu.port().unwrap(), case);
}

#[test]
fn matrix_on_qemu() {
    for case in matrix(64) {
        on_qemu(Case { loses_metadata: true, ..case });
    }
}

#[test]
fn deepest_queue() {
    on_qemu(Case { depth: 2047, queues: 1, ..PLAIN });
}

#[test]
fn no_transfer_limit() {
    on_qemu(Case { mdts: 0, lba: 4096, sgl: false, ..PLAIN });
}

/// Metadata that QEMU's model loses is noticed, though it reports success: 66 blocks have 528 bytes of metadata.
#[test]
fn lost_metadata_is_missed() {
    let case = Case { ms: 8, ext: true, ..PLAIN };
    let Some(qemu) = start(&case) else { return };
    let options = Options {
        writable: true,
        timeout: std::time::Duration::from_millis(50),
        retries: 1,
        ..Options::default()
    };
    let drive = Drive::open(qemu.port().unwrap(), options).unwrap();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(66 * 520).unwrap();
    queue.read(ns, 0, 64, &buffer, 0).unwrap();
    match queue.read(ns, 0, 66, &buffer, 0) {
        Err(onehop_drive::Error::DataMissing { .. }) => {}
        // A later QEMU may not lose it.
        Ok(_) => {
            queue.write(ns, 0, 66, &buffer, 0).unwrap();
            let written = buffer.host().unwrap().to_vec(0, 66 * 520).unwrap();
            buffer.host().unwrap().fill(0, 66 * 520, 0xee).unwrap();
            queue.read(ns, 0, 66, &buffer, 0).unwrap();
            assert_eq!(buffer.host().unwrap().to_vec(0, 66 * 520).unwrap(), written);
        }
        Err(error) => panic!("{error}"),
    }
}

/// A controller that dies is detected and named in the error; nothing waits for ever.
#[test]
fn a_killed_qemu_is_gone() {
    let Some(mut qemu) = start(&PLAIN) else { return };
    let options = Options { timeout: std::time::Duration::from_millis(200), ..Options::default() };
    let drive = Drive::open(qemu.port().unwrap(), options).unwrap();
    let ns = drive.namespace(1).unwrap();
    let queue = drive.queue().unwrap();
    let buffer = drive.buffer(4096).unwrap();
    queue.read(ns, 0, 1, &buffer, 0).unwrap();
    qemu.kill();
    let error = queue.read(ns, 0, 1, &buffer, 0).unwrap_err();
    assert!(matches!(error, onehop_drive::Error::Gone { .. }), "{error}");
}

/// AQA, ASQ and ACQ survive a controller reset here too, so it is not mistaken for a loss of power.
#[test]
fn a_reset_loses_no_writes() {
    let Some(qemu) = start(&PLAIN) else { return };
    let drive = Drive::open(qemu.port().unwrap(), Options { writable: true, ..Options::default() }).unwrap();
    let (ns, queue) = (drive.namespace(1).unwrap(), drive.queue().unwrap());
    let buffer = drive.buffer(4096).unwrap();
    for _ in 0..3 {
        queue.write(ns, 0, 1, &buffer, 0).unwrap();
        drive.reset().unwrap();
        queue.flush(ns).unwrap();
    }
}

/// A bad doorbell value is reported by an asynchronous event, which is handled and requested again.
#[test]
fn asynchronous_events_are_served() {
    let Some(qemu) = start(&PLAIN) else { return };
    let port = qemu.port().unwrap();
    let drive = Drive::open(port.clone(), Options::default()).unwrap();
    let _queue = drive.queue().unwrap();
    for _ in 0..6 {
        port.regs.write32(onehop_proto::regs::doorbell(1, false, 0), 9999);
        // QEMU posts it a moment later.
        let asked = std::time::Instant::now();
        let mut events = Vec::new();
        while events.is_empty() && asked.elapsed() < std::time::Duration::from_secs(5) {
            events = drive.events().unwrap();
        }
        assert_eq!(events.len(), 1);
        assert_eq!((events[0].kind(), events[0].info()), (0, 1), "{}", events[0]);
    }
}
