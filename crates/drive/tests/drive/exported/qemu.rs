//! A queue exported on QEMU's controller, which nobody here wrote: it must accept the prebuilt lists.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use onehop_drive::{Drive, GpuSetup, Options};
use onehop_gpu::{Emulated, Place};
use onehop_proto::kernel::{Answer, DeviceOp, DeviceQueue};
use onehop_qtest::bed::{Qemu as Machine, QemuOptions as Qemu};

use super::setup;

#[test]
fn what_threads_write_through_qemu_comes_back() {
    let options = Qemu { disk_bytes: 24 << 20, ram_bytes: 512 << 20, mdts: 7, ..Qemu::default() };
    let Some(qemu) = Machine::start_or_skip(&options).unwrap() else { return };
    let drive = Drive::open(qemu.port().unwrap(), Options { writable: true, ..Options::default() }).unwrap();
    let (ns, gpu) = (drive.namespace(1).unwrap(), Emulated::new());
    let block = ns.format.transfer_bytes(1).unwrap();
    let bytes = 16usize << 20;
    let (region, buffer) = drive.gpu_buffer(&gpu, Place::PinnedHost, bytes).unwrap();
    let data: Vec<u8> = (0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    region.write(0, &data).unwrap();
    let queues = drive
        .gpu_queues(Arc::new(gpu.clone()), GpuSetup { stall: Duration::from_secs(10), ..setup() })
        .unwrap();
    let exported = queues.export(ns, &buffer, true).unwrap();
    let handle = exported.handle();

    // Each thread writes from a place that is on no page's boundary, and reads back to another one, across the boundaries of
    // list pages: those lie every MiB.
    let (sender, results) = mpsc::channel();
    let running = gpu.start(6, move |mem, index| {
        let queue = DeviceQueue::open(mem, handle).unwrap();
        let blocks = queue.most_blocks(mem) - index;
        let (lba, from) = (u64::from(index) * 2048, u64::from(index) * 700_004);
        let to = 8 * (1 << 20) + u64::from(index) * (1 << 20) + 4 * u64::from(index);
        let wrote = queue.run(mem, DeviceOp::Write, lba, blocks, from);
        let read = queue.run(mem, DeviceOp::Read, lba, blocks, to);
        sender.send((wrote, read, from as usize, to as usize, blocks)).unwrap();
    });
    running.unwrap().join().unwrap();
    for (wrote, read, from, to, blocks) in results {
        assert_eq!((wrote, read), (Answer::Done, Answer::Done));
        let mut back = vec![0; blocks as usize * block as usize];
        region.read(to, &mut back).unwrap();
        assert!(back == data[from..from + back.len()], "{blocks} blocks from {from} to {to}");
    }
    assert_eq!(exported.recoveries(), 0);
    exported.revoke().unwrap();
}
