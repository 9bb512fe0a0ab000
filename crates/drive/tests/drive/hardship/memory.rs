//! Memory that the controller may still reach is not freed.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_drive::{Drive, Error, Io, Op, Options, Recovery};
use onehop_os::{ControllerBackend, Registers};
use onehop_proto::regs::offset;

use super::{inject, open, options};

#[test]
fn a_dead_drive_keeps_its_host_memory_buffer() {
    let sim = onehop_sim::open("mem:1M?hmb=256&to=1&fault=stuck-rdy@on=disable").unwrap();
    let drive = Drive::open(ControllerBackend { reset: None, ..sim.port() }, options()).unwrap();
    let mapped = sim.mapper().mappings();
    assert!(matches!(drive.reset(), Err(Error::Dead { .. })));
    drop(drive);
    assert_eq!(sim.mapper().mappings(), mapped, "unmapped from a controller that is still enabled");
}

/// As far as the driver knows, the queue was not created: nothing owns it yet.
#[test]
fn a_drive_that_dies_of_a_creation_keeps_the_rings() {
    let sim = onehop_sim::open("mem:1M?to=1&fault=stuck-rdy@on=disable").unwrap();
    let drive = Drive::open(ControllerBackend { reset: None, ..sim.port() }, options()).unwrap();
    let before = sim.mapper().mappings();
    inject(&sim, "lost@op=create-cq,n=1");
    inject(&sim, "abort-ignored");
    assert!(matches!(drive.queue(), Err(Error::Dead { .. })));
    assert!(sim.mapper().mappings() > before, "rings were unmapped from a controller that may use them");
}

#[test]
fn a_dead_drive_that_can_be_disabled_releases_everything() {
    let sim = onehop_sim::open("mem:1M?hmb=64&to=1").unwrap();
    let drive = Drive::open(ControllerBackend { reset: None, ..sim.port() }, options()).unwrap();
    let queue = drive.queue().unwrap();
    inject(&sim, "stuck-rdy@on=enable,count=4");
    assert!(matches!(drive.reset(), Err(Error::Dead { .. })));
    drop(queue);
    drop(drive);
    assert_eq!(sim.mapper().mappings(), 0);
}

#[test]
fn a_drive_that_cannot_be_disabled_keeps_its_admin_queues() {
    let (sim, drive) = open("mem:1M?to=1&fault=stuck-rdy@on=disable");
    drop(drive);
    // An event completes the request that is still posted.
    sim.namespace_changed(1);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(sim.violations(), []);
    assert!(sim.mapper().mappings() > 0);
}

#[test]
fn a_host_memory_buffer_is_in_use_before_the_controller_answers() {
    for n in 1..=5 {
        let sim = onehop_sim::open("mem:1M?hmb=64&to=1").unwrap();
        let drive = Drive::open(ControllerBackend { reset: None, ..sim.port() }, options()).unwrap();
        inject(&sim, &format!("late@op=set-features,n={n},delay=800ms"));
        drive.reset().unwrap();
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(sim.violations(), [], "set-features {n} late");
    }
}

#[test]
fn memory_in_too_many_ranges_is_no_host_memory_buffer() {
    for spec in ["mem:1M?hmb=1024&scatter=1", "mem:1M?hmb=1024"] {
        let (sim, drive) = open(spec);
        drop(drive);
        assert_eq!(sim.violations(), [], "{spec}");
    }
}

#[test]
fn a_queue_whose_creation_was_not_answered_is_not_created_later() {
    let (sim, drive) = open("mem:1M?queues=8&fault=late@op=create-cq,n=1,delay=700ms");
    let queue = drive.queue().unwrap();
    std::thread::sleep(Duration::from_millis(400));
    let buffer = drive.buffer(512).unwrap();
    queue.read(drive.namespace(1).unwrap(), 0, 1, &buffer, 0).unwrap();
    assert_eq!(sim.violations(), []);
}

#[test]
fn data_that_never_came_may_still_come() {
    let sim = onehop_sim::open("mem:1M?fault=torn@delay=600ms").unwrap();
    let drive = Drive::open(sim.port(), Options { retries: 0, ..options() }).unwrap();
    let buffer = drive.buffer(4096).unwrap();
    let queue = drive.queue().unwrap();
    let end = queue.read(drive.namespace(1).unwrap(), 0, 1, &buffer, 0);
    assert!(matches!(end, Err(Error::DataMissing { .. })));
    drop(buffer);
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(sim.violations(), []);
}

/// Submits a read, and closes its queue after the completion has arrived, but before it was taken.
fn close_over_a_completion(spec: &str) -> (onehop_sim::Sim, Drive) {
    let (sim, drive) = open(spec);
    let (buffer, queue) = (drive.buffer(4096).unwrap(), drive.queue().unwrap());
    let before = sim.stats().completions;
    queue.submit(drive.namespace(1).unwrap(), &Io::new(Op::Read, 0, 1, &buffer, 0)).unwrap();
    let start = Instant::now();
    while sim.stats().completions == before {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
    drop(queue);
    (sim, drive)
}

#[test]
fn data_of_a_read_that_completed_unseen_may_still_come() {
    let (sim, _drive) = close_over_a_completion("mem:1M?fault=torn@op=read,delay=600ms");
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(sim.violations(), []);
}

#[test]
fn a_wrong_completion_is_noticed_when_its_queue_is_closed() {
    let (sim, drive) = close_over_a_completion("mem:1M?fault=wrong-cid@op=read,n=1");
    let recoveries: Vec<_> = drive.incidents().iter().map(|incident| incident.recovery).collect();
    assert_eq!(recoveries, [Recovery::ControllerReset]);
    assert_eq!(sim.violations(), []);
}

/// A read that was retried has ended: nothing of its first try may reach memory that the caller owns again.
#[test]
fn data_of_an_earlier_try_never_comes_later() {
    for order in ["whole", "last-first", "random"] {
        let sim = onehop_sim::open(&format!("mem:1M?fault=torn@n=1,delay=300ms,order={order}")).unwrap();
        let drive = Drive::open(sim.port(), options()).unwrap();
        let buffer = drive.buffer(4096).unwrap();
        let queue = drive.queue().unwrap();
        let moved = queue.read(drive.namespace(1).unwrap(), 0, 8, &buffer, 0).unwrap();
        assert_eq!((moved.retries, moved.late_data), (1, 0), "{order}");
        assert_eq!(drive.incidents().len(), 1, "only a reset stops the data of the first try");
        buffer.host().unwrap().fill(0, 4096, 0xa5).unwrap();
        std::thread::sleep(Duration::from_millis(1300));
        assert!(buffer.host().unwrap().to_vec(0, 4096).unwrap().iter().all(|byte| *byte == 0xa5), "{order}");
    }
}

/// Registers that read all ones for a while.
struct Away {
    inner: Arc<dyn Registers>,
    from: Mutex<Option<Instant>>,
    long: Duration,
    /// Writing this register starts it.
    trigger: Option<u32>,
}

impl Registers for Away {
    fn read32(&self, at: u32) -> u32 {
        let from = *self.from.lock().unwrap();
        let away = from.is_some_and(|from| from <= Instant::now() && from.elapsed() < self.long);
        if away { u32::MAX } else { self.inner.read32(at) }
    }
    fn write32(&self, at: u32, value: u32) {
        if self.trigger == Some(at) {
            *self.from.lock().unwrap() = Some(Instant::now());
        }
        self.inner.write32(at, value);
    }
    fn size(&self) -> u32 {
        self.inner.size()
    }
}

fn away(sim: &onehop_sim::Sim, ms: u64, trigger: Option<u32>) -> (Arc<Away>, ControllerBackend) {
    let long = Duration::from_millis(ms);
    let regs = Arc::new(Away { inner: sim.registers(), from: Mutex::default(), long, trigger });
    (regs.clone(), ControllerBackend { regs, reset: None, ..sim.port() })
}

#[test]
fn a_link_that_is_away_for_a_moment_is_no_lost_drive() {
    let sim = onehop_sim::open("mem:1M?fault=late@n=1,delay=300ms").unwrap();
    let (regs, port) = away(&sim, 20, None);
    let drive = Drive::open(port, options()).unwrap();
    let queue = drive.queue().unwrap();
    {
        let buffer = drive.buffer(4096).unwrap();
        *regs.from.lock().unwrap() = Some(Instant::now() + Duration::from_millis(50));
        queue.read(drive.namespace(1).unwrap(), 0, 1, &buffer, 0).unwrap();
    }
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!(sim.violations(), []);
}

#[test]
fn a_subsystem_reset_may_take_its_time() {
    let sim = onehop_sim::open("mem:1M?to=1&nssrs=1").unwrap();
    let drive = Drive::open(away(&sim, 60, Some(offset::NSSR)).1, options()).unwrap();
    inject(&sim, "stuck-rdy@on=enable,n=1");
    drive.reset().unwrap();
}

#[test]
fn a_drive_that_left_is_gone() {
    let sim = onehop_sim::open("mem:1M").unwrap();
    let (regs, port) = away(&sim, 3_600_000, None);
    let drive = Drive::open(port, options()).unwrap();
    let queue = drive.queue().unwrap();
    let buffer = drive.buffer(4096).unwrap();
    inject(&sim, "lost@n=1");
    *regs.from.lock().unwrap() = Some(Instant::now());
    let end = queue.read(drive.namespace(1).unwrap(), 0, 1, &buffer, 0);
    assert!(matches!(end, Err(Error::Gone { .. })), "{end:?}");
}
