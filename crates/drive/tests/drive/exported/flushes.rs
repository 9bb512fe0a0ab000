//! What a flush reports about blocks that kernels wrote through an exported queue.

use onehop_drive::{Error, ExportedQueue, IoQueue};
use onehop_proto::kernel::{Answer, DeviceOp, DeviceQueue};

use super::{Bed, bed};

struct Writer {
    bed: Bed,
    exported: ExportedQueue,
    queue: IoQueue,
}

impl Writer {
    fn new() -> Self {
        let bed = bed("?vwc=1&to=2");
        let exported = bed.export(true);
        let queue = bed.drive.queue().unwrap();
        Self { bed, exported, queue }
    }

    fn write(&self, lba: u64) {
        let write = move |mem: &_, queue: &DeviceQueue<_>, _| queue.run(mem, DeviceOp::Write, lba, 1, 0);
        assert_eq!(self.bed.run(&self.exported, 1, write), [Answer::Done]);
    }

    fn read(&self, lba: u64) {
        let read = move |mem: &_, queue: &DeviceQueue<_>, _| queue.run(mem, DeviceOp::Read, lba, 1, 0);
        assert_eq!(self.bed.run(&self.exported, 1, read), [Answer::Done]);
    }

    /// Whether a flush reports that everything is durable.
    fn flush(&self) -> bool {
        match self.queue.flush(self.bed.drive.namespace(1).unwrap()) {
            Ok(()) => true,
            Err(Error::WritesLost { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn writes_that_a_flush_covered_are_not_lost() {
    let writer = Writer::new();
    writer.write(1);
    assert!(writer.flush());
    writer.bed.sim.power_cycle();
    assert!(writer.flush());
    // Another recovery does not report losses that did not happen.
    writer.bed.drive.reset().unwrap();
    writer.bed.sim.power_cycle();
    assert!(writer.flush());
}

#[test]
fn reads_after_a_flush_lose_nothing() {
    let writer = Writer::new();
    writer.write(1);
    assert!(writer.flush());
    writer.read(1);
    writer.bed.sim.power_cycle();
    assert!(writer.flush());
    // Nor do reads hide a write.
    writer.write(2);
    writer.read(2);
    writer.bed.sim.power_cycle();
    assert!(!writer.flush());
}

#[test]
fn writes_that_no_flush_covered_are_reported_lost() {
    let writer = Writer::new();
    writer.write(1);
    writer.bed.sim.power_cycle();
    assert!(!writer.flush());
    assert!(writer.flush());
    // In a later life of the queue, which has taken as many completions as the one before.
    writer.write(2);
    writer.bed.sim.power_cycle();
    assert!(!writer.flush());
    writer.write(3);
    assert!(writer.flush());
    writer.write(4);
    writer.bed.sim.power_cycle();
    // A write makes the queue notice the loss of power.
    writer.write(5);
    assert!(!writer.flush());
    assert!(writer.flush());
}

#[test]
fn writes_are_accounted_for_when_the_queue_has_been_taken_back() {
    for covered in [false, true] {
        let writer = Writer::new();
        writer.write(1);
        assert!(!covered || writer.flush());
        let Writer { bed, exported, queue } = writer;
        exported.revoke().unwrap();
        bed.sim.power_cycle();
        let end = queue.flush(bed.drive.namespace(1).unwrap());
        assert_eq!(end.is_ok(), covered, "{end:?}");
    }
}

#[test]
fn an_exported_queue_that_nobody_used_loses_nothing() {
    let writer = Writer::new();
    writer.bed.sim.power_cycle();
    assert!(writer.flush());
}
