//! Work whose end the driver does not report.

use onehop_gpu::{KernelQueue, Launch};

use super::*;

const UNKNOWN: c_long = 999;
const LOST: c_long = 719;

#[test]
fn a_copy_is_over_only_when_the_driver_says_so_or_the_context_is_lost() {
    let Some(model) =
        Model::or_child("endings::a_copy_is_over_only_when_the_driver_says_so_or_the_context_is_lost")
    else {
        return;
    };
    let gpu = gpu();
    let [_, arena, ring, _] = one_of_each(&gpu);
    let mut copier = gpu.copier(&ring, &arena).unwrap();
    let rows = Rows { from: 0, to: 0, row: 4096, rows: 1, step: 4096 };
    copier.copy(&rows).unwrap();
    let mark = copier.mark().unwrap();
    model.set("answer", UNKNOWN);
    for error in [copier.is_over(mark).unwrap_err(), copier.wait(mark).unwrap_err()] {
        assert!(matches!(error, Error::OutcomeUnknown { .. }) && error.is_under_way(), "{error}");
    }
    model.set("answer", LOST);
    assert!(!copier.is_over(mark).unwrap_err().is_under_way());
    model.set("answer", 0);
    assert!(copier.is_over(mark).unwrap());
    // The same if it cannot be marked; a later mark covers it.
    copier.copy(&rows).unwrap();
    model.set("record_answer", UNKNOWN);
    assert!(copier.mark().unwrap_err().is_under_way());
    model.set("record_answer", LOST);
    assert!(!copier.mark().unwrap_err().is_under_way());
    model.set("record_answer", 0);
    let mark = copier.mark().unwrap();
    assert!(copier.is_over(mark).unwrap());
    drop((copier, arena, ring, gpu));
    model.wait_for("live", 0);
}

#[test]
fn memory_is_settled_when_its_copies_have_ended() {
    let Some(model) = Model::or_child("endings::memory_is_settled_when_its_copies_have_ended") else {
        return;
    };
    let gpu = gpu();
    let region = gpu.alloc(Place::Vram, 1 << 20).unwrap();
    assert!(region.is_settled().unwrap());
    // The copy is in progress, and neither its mark nor its stream reports the end.
    model.set("record_answer", UNKNOWN);
    model.set("answer", UNKNOWN);
    assert!(region.write(0, &[7; 4096]).unwrap_err().is_under_way());
    assert!(region.is_settled().unwrap_err().is_under_way());
    model.set("record_answer", 0);
    model.set("answer", 600);
    assert!(!region.is_settled().unwrap());
    model.set("answer", LOST);
    assert!(region.is_settled().unwrap(), "it has ended with its context");
    model.set("answer", 0);
    assert!(region.slice(0..4096).unwrap().is_settled().unwrap());
    drop((region, gpu));
    model.wait_for("live", 0);
}

/// The kernel has been started when the record fails.
#[test]
fn a_launch_whose_end_cannot_be_marked_keeps_its_memory() {
    let Some(model) = Model::or_child("endings::a_launch_whose_end_cannot_be_marked_keeps_its_memory") else {
        return;
    };
    let gpu = gpu();
    let control = gpu.alloc_device(DeviceKind::Plain, 1 << 20).unwrap();
    let queue = KernelQueue {
        control: control.addr(),
        sq_entries: 16,
        cq_entries: 16,
        window: 4,
        ..KernelQueue::default()
    };
    let launch = Launch::Owner(vec![queue]);
    gpu.prepare(&launch).unwrap();
    // It has ended before it is marked, so it keeps nothing.
    model.set("records", 1);
    model.set("record_answer", UNKNOWN);
    assert!(!gpu.prepare(&launch).unwrap_err().is_under_way());
    model.set("records", 1);
    model.set("full", 1);
    model.set("answer", UNKNOWN);
    let error = gpu.prepare(&launch).unwrap_err();
    assert!(error.is_under_way(), "{error}");
    model.set("record_answer", 0);
    model.set("answer", 0);
    let live = settled(&model, "live");
    drop(control);
    std::thread::sleep(Duration::from_millis(100));
    // The events of the launch may have been freed.
    assert!(model.get("live") >= live - 2, "something was freed that the kernel may use");
    model.set("full", 0);
    drop(gpu);
    model.wait_for("live", 0);
}

/// A number that has not changed for a while: by then everything freed in the background is gone.
fn settled(model: &Model, what: &str) -> c_long {
    let mut last = (model.get(what), Instant::now());
    while last.1.elapsed() < Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(5));
        let now = model.get(what);
        if now != last.0 {
            last = (now, Instant::now());
        }
    }
    last.0
}
