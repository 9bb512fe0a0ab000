//! What is freed, when, and by which thread.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::time::Instant;

use super::*;

const TEST_TIMEOUT: Duration = Duration::from_secs(120);

#[test]
fn tasks_are_over_when_a_drop_returns_and_none_runs_on_its_thread() {
    let reclaimer = Reclaimer::default();
    let own = std::thread::current().id();
    for _ in 0..200 {
        let (sender, receiver) = channel();
        reclaimer.enqueue(move || {
            sender.send(std::thread::current().id()).unwrap();
            Freed::Done
        });
        assert_ne!(receiver.recv_timeout(TEST_TIMEOUT).unwrap(), own);
    }
    assert!(reclaimer.settle(TEST_TIMEOUT));
}

/// As with Python's GIL: the task ends only when the dropping thread has released a lock.
#[test]
fn a_task_that_waits_for_the_dropping_thread_does_not_keep_it() {
    let reclaimer = Reclaimer::default();
    let lock = Arc::new(Mutex::new(()));
    let held = lock.lock().unwrap();
    let start = Instant::now();
    for _ in 0..100 {
        let wanted = lock.clone();
        reclaimer.enqueue(move || {
            drop(wanted.lock());
            Freed::Done
        });
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert!(!reclaimer.settle(Duration::from_millis(1)));
    drop(held);
    assert!(reclaimer.settle(TEST_TIMEOUT));
}

#[test]
fn what_is_refused_for_now_is_tried_again_and_holds_nothing_up() {
    let reclaimer = Reclaimer::default();
    let (capturing, tries) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU32::new(0)));
    let (is_capturing, tried) = (capturing.clone(), tries.clone());
    reclaimer.enqueue(move || {
        tried.fetch_add(1, Ordering::AcqRel);
        if is_capturing.load(Ordering::Acquire) { Freed::NotNow } else { Freed::Done }
    });
    let (sender, receiver) = channel();
    reclaimer.enqueue(move || {
        sender.send(()).unwrap();
        Freed::Done
    });
    receiver.recv_timeout(TEST_TIMEOUT).unwrap();
    assert!(!reclaimer.settle(Duration::from_millis(20)) && tries.load(Ordering::Acquire) > 1);
    capturing.store(false, Ordering::Release);
    assert!(reclaimer.settle(TEST_TIMEOUT));
    assert_eq!(reclaimer.refusals().count, 0);
}

#[test]
fn what_is_refused_for_good_is_left_and_counted() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("it was dropped under the GPU");
        }
    }
    let reclaimer = Reclaimer::default();
    let bomb = Bomb;
    reclaimer.enqueue(move || {
        let _ = &bomb;
        Freed::Refused("no such address".into())
    });
    assert!(reclaimer.settle(TEST_TIMEOUT));
    let refusals = reclaimer.refusals();
    assert_eq!((refusals.count, refusals.last.as_deref()), (1, Some("no such address")));
}

/// An owner of memory whose code panics.
struct PanickingOwner(Arc<AtomicU32>);

impl Drop for PanickingOwner {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
        panic!("this is part of a test");
    }
}

#[test]
fn an_owner_that_panics_ends_neither_the_thread_nor_what_comes_after() {
    let (reclaimer, gone, done) = (Reclaimer::default(), Arc::default(), Arc::<AtomicU32>::default());
    let owner = PanickingOwner(Arc::clone(&gone));
    reclaimer.enqueue(move || {
        let _ = &owner;
        Freed::Done
    });
    let owner = PanickingOwner(Arc::clone(&gone));
    reclaimer.outlasted(move || {
        let _ = &owner;
        true
    });
    let start = Instant::now();
    while (gone.load(Ordering::Acquire), reclaimer.refusals().count) != (2, 1) {
        assert!(start.elapsed() < TEST_TIMEOUT, "{:?}", reclaimer.refusals());
        std::thread::sleep(Duration::from_millis(1));
    }
    // A kernel that never reports its end.
    reclaimer.outlasted(|| panic!("this is part of a test"));
    counted(&reclaimer, &done);
    assert!(!reclaimer.settle(Duration::from_millis(50)) && reclaimer.has_unfinished_work());
    assert_eq!(done.load(Ordering::Acquire), 0);
    let (sender, receiver) = channel();
    reclaimer.dispose(move || {
        sender.send(()).unwrap();
        Freed::Done
    });
    receiver.recv_timeout(TEST_TIMEOUT).unwrap();
}

fn counted(reclaimer: &Reclaimer, done: &Arc<AtomicU32>) {
    let done = done.clone();
    reclaimer.enqueue(move || {
        done.fetch_add(1, Ordering::AcqRel);
        Freed::Done
    });
}

#[test]
fn nothing_is_freed_during_a_persistent_kernel() {
    let (reclaimer, done) = (Reclaimer::default(), Arc::<AtomicU32>::default());
    reclaimer.begin().unwrap();
    reclaimer.begin().unwrap();
    let start = Instant::now();
    (0..100).for_each(|_| counted(&reclaimer, &done));
    assert!(!reclaimer.settle(TEST_TIMEOUT) && start.elapsed() < Duration::from_secs(2));
    reclaimer.end();
    // Tasks that wait for no kernel are not blocked.
    let (sender, receiver) = channel();
    reclaimer.dispose(move || {
        sender.send(()).unwrap();
        Freed::Done
    });
    receiver.recv_timeout(TEST_TIMEOUT).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(done.load(Ordering::Acquire), 0);
    reclaimer.end();
    assert!(reclaimer.settle(TEST_TIMEOUT));
    assert_eq!(done.load(Ordering::Acquire), 100);
}

#[test]
fn nothing_is_freed_until_an_overdue_kernel_ends() {
    let (reclaimer, done) = (Reclaimer::default(), Arc::<AtomicU32>::default());
    let running = Arc::new(AtomicBool::new(true));
    let (is_running, used) = (running.clone(), Arc::new(()));
    let use_of_it = used.clone();
    reclaimer.outlasted(move || {
        let _ = &use_of_it;
        !is_running.load(Ordering::Acquire)
    });
    counted(&reclaimer, &done);
    assert!(!reclaimer.settle(Duration::from_millis(50)));
    assert_eq!((done.load(Ordering::Acquire), Arc::strong_count(&used)), (0, 2));
    running.store(false, Ordering::Release);
    let start = Instant::now();
    while !reclaimer.settle(TEST_TIMEOUT) {
        assert!(start.elapsed() < TEST_TIMEOUT);
    }
    assert_eq!((done.load(Ordering::Acquire), Arc::strong_count(&used)), (1, 1));
}

#[test]
fn no_persistent_kernel_starts_during_a_free() {
    let reclaimer = Reclaimer::default();
    let (sender, receiver) = channel::<()>();
    let free = Arc::new(AtomicBool::new(false));
    let is_free = free.clone();
    let mut receiver = Some(receiver);
    reclaimer.enqueue(move || {
        let _ = receiver.take().map(|receiver| receiver.recv());
        is_free.store(true, Ordering::Release);
        Freed::Done
    });
    let ender = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        drop(sender);
    });
    reclaimer.begin().unwrap();
    assert!(free.load(Ordering::Acquire));
    reclaimer.end();
    ender.join().unwrap();
}

#[test]
fn a_call_during_a_persistent_kernel_has_a_time_limit() {
    let (reclaimer, own) = (Reclaimer::default(), std::thread::current().id());
    let of_call = |limit| reclaimer.load_with_time_limit("a call", limit, || Ok(std::thread::current().id()));
    assert_eq!(of_call(Duration::ZERO).unwrap(), own);
    reclaimer.begin().unwrap();
    assert_ne!(of_call(TEST_TIMEOUT).unwrap(), own);
    let (sender, receiver) = channel::<()>();
    let late = reclaimer.load_with_time_limit("a call", Duration::from_millis(20), move || {
        let _ = receiver.recv();
        Ok(())
    });
    assert!(matches!(late, Err(Error::Silent { .. })));
    drop(sender);
    reclaimer.end();
    let failed = reclaimer
        .load_with_time_limit("a call", Duration::ZERO, || Err::<(), _>(Error::Launch(String::new())));
    assert!(matches!(failed, Err(Error::Launch(_))));
    // Nor do those after a call wait for one that has ended.
    reclaimer.begin().unwrap();
    reclaimer.end();
}

/// A task's memory may run its owner's code when it is dropped, and that may drop GPU memory.
#[test]
fn a_task_may_leave_tasks() {
    let (reclaimer, done) = (Reclaimer::default(), Arc::<AtomicU32>::default());
    let (inner, inner_done) = (reclaimer.clone(), done.clone());
    reclaimer.enqueue(move || {
        counted(&inner, &inner_done);
        assert!(!inner.settle(TEST_TIMEOUT), "the thread waited for itself");
        Freed::Done
    });
    assert!(reclaimer.settle(TEST_TIMEOUT) && reclaimer.settle(TEST_TIMEOUT));
    assert_eq!(done.load(Ordering::Acquire), 1);
}
