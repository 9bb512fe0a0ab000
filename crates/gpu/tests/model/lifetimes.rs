//! Which thread drops memory last, and when.

use std::sync::{Arc, Mutex};

use super::*;

/// Destructors of C libraries' thread-local data drop memory, too.
#[test]
fn memory_can_be_the_last_that_a_thread_drops() {
    let Some(model) = Model::or_child("lifetimes::memory_can_be_the_last_that_a_thread_drops") else {
        return;
    };
    let gpu = gpu();
    let all = one_of_each(&gpu);
    // The freeing thread is busy meanwhile, so the drop has to determine which thread this is.
    model.set("busy", 1);
    drop(gpu.alloc(Place::Vram, 1 << 20).unwrap());
    model.dropped_at_thread_end(all);
    model.dropped_at_thread_end(gpu);
    model.set("busy", 0);
    model.wait_for("live", 0);
}

/// Sets its number when it is dropped.
struct Owner(Arc<AtomicU32>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Release);
    }
}

/// Borrowed memory returns to its owner as soon as neither a region nor the GPU uses it.
#[test]
fn the_owner_of_lent_memory_goes_with_its_last_use() {
    let Some(model) = Model::or_child("lifetimes::the_owner_of_lent_memory_goes_with_its_last_use") else {
        return;
    };
    let gpu = gpu();
    let memory = gpu.alloc(Place::Vram, 1 << 20).unwrap();
    let gone = Arc::<AtomicU32>::default();
    let borrow = || {
        gone.store(0, Ordering::Release);
        // SAFETY: the memory lives until the end of the test.
        unsafe { gpu.borrow(memory.addr(), 4096, Owner(gone.clone())) }.unwrap()
    };
    let is_gone = || gone.load(Ordering::Acquire) == 1;
    let region = borrow();
    let part = region.slice(0..4).unwrap();
    drop(region);
    assert!(!is_gone());
    // Even while another library's kernel runs, which may wait for this thread.
    model.set("busy", 1);
    model.without_calls(|| drop(part));
    assert!(is_gone());
    model.set("busy", 0);
    // The driver does not report whether the copy continues.
    let region = borrow();
    model.set("answer", 999);
    assert!(region.write(0, &[7; 4096]).is_err());
    drop(region);
    std::thread::sleep(Duration::from_millis(100));
    assert!(!is_gone(), "the GPU may use it");
    model.set("answer", 0);
    let start = Instant::now();
    while !is_gone() {
        assert!(start.elapsed() < TEST_TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
    drop((memory, gpu));
    model.wait_for("live", 0);
}

/// Pages are registered in one context for all contexts: it is not released while another GPU uses them.
#[test]
fn a_context_stays_as_long_as_others_use_its_pages() {
    let Some(model) = Model::or_child("lifetimes::a_context_stays_as_long_as_others_use_its_pages") else {
        return;
    };
    let cuda = Cuda::load().unwrap();
    let (gpu, other) = (cuda.open("0").unwrap(), cuda.open("1").unwrap());
    let pages = HostMem::anonymous(64 << 10).unwrap();
    let first = gpu.adopt(Place::PinnedHost, pages.clone()).unwrap();
    let second = other.adopt(Place::PinnedHost, pages).unwrap();
    assert_eq!(model.get("retained"), 2);
    drop((first, gpu));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(model.get("retained"), 2, "the pages went with the context");
    drop(second);
    model.wait_for("retained", 1);
    drop(other);
    model.wait_for("live", 0);
}

/// Dropped by a handler while the process ends.
static DROPPED_LATE: Mutex<Option<(Region, CudaGpu)>> = Mutex::new(None);

extern "C" fn drop_late() {
    drop(DROPPED_LATE.lock().map(|mut dropped| dropped.take()));
}

/// The driver's library is unloaded while the process ends: no thread may be in it then, nor call it.
#[test]
fn a_process_ends_when_nothing_is_being_freed() {
    let Some(model) = Model::or_child("lifetimes::a_process_ends_when_nothing_is_being_freed") else {
        return;
    };
    // Handlers that are registered first run last.
    onehop_os::at_exit(drop_late).unwrap();
    let gpu = gpu();
    let [first, second, third] = [(); 3].map(|()| gpu.alloc(Place::Vram, 1 << 20).unwrap());
    model.set("slow", 100);
    // The first is being freed, and the second is queued.
    drop((first, second));
    *DROPPED_LATE.lock().unwrap() = Some((third, gpu));
    std::process::exit(0);
}

/// Loads CUDA in a forked process when dropped.
struct LoadsInFork(u32);

impl Drop for LoadsInFork {
    fn drop(&mut self) {
        if std::process::id() != self.0 {
            let refused = Cuda::load().err().unwrap().to_string();
            assert!(refused.contains("forked"), "{refused}");
        }
    }
}

#[test]
fn a_process_that_was_forked_while_the_driver_started_is_refused_it_at_once() {
    let Some(model) = Model::or_child(
        "lifetimes::a_process_that_was_forked_while_the_driver_started_is_refused_it_at_once",
    ) else {
        return;
    };
    model.set("start_held", 1);
    std::thread::scope(|scope| {
        let started = scope.spawn(|| Cuda::load().unwrap());
        model.wait_for("starting", 1);
        // A signal ends a child that hangs.
        assert_eq!(model.dropped_in_fork(LoadsInFork(std::process::id())), 0);
        model.set("start_held", 0);
        drop(started.join().unwrap());
    });
}

/// Pinning memory takes longer than a copy: it is done once for each thread that copies at the same time as others.
#[test]
fn many_threads_that_copy_pin_memory_once() {
    const THREADS: usize = 16;
    const HANDLES: c_long = 3;
    let Some(model) = Model::or_child("lifetimes::many_threads_that_copy_pin_memory_once") else { return };
    let gpu = gpu();
    let region = gpu.alloc(Place::Vram, 1 << 20).unwrap();
    let before = model.get("live");
    for _ in 0..3 {
        model.set("answer", 600);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let region = &region;
                scope.spawn(move || region.write(thread * 4096, &[7; 4096]).unwrap());
            }
            // All of them copy.
            model.wait_for("live", before + THREADS as c_long * HANDLES);
            model.set("answer", 0);
        });
        assert_eq!(model.get("live"), before + THREADS as c_long * HANDLES);
    }
}

/// Once it is unmapped, another allocation may be mapped at its address.
#[test]
fn memory_is_unmapped_once() {
    let Some(model) = Model::or_child("lifetimes::memory_is_unmapped_once") else { return };
    let gpu = gpu();
    let region = gpu.alloc_device(DeviceKind::Exportable, 1 << 20).unwrap();
    // As for a capture, after which other calls are tried again.
    model.set("unreserve_answer", 900);
    drop(region);
    let start = Instant::now();
    while gpu.refusals().0 == 0 {
        assert!(start.elapsed() < TEST_TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(model.get("unmapped"), 1);
}
