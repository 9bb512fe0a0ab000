//! Which CUDA driver calls are made, and by which thread, on a machine without a GPU: against a model of the driver.
//!
//! Each test runs itself once more in a separate process, in which the loader finds the model in place of the driver.

#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

#[cfg(feature = "arrays")]
mod arrays;
mod contexts;
mod cufile;
mod endings;
mod lifetimes;
mod marks;
mod ordering;

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::io::Write;
use std::mem::ManuallyDrop;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

use libloading::Library;
use onehop_gpu::cuda::{Cuda, CudaGpu, DeviceKind, Span, Ticket};
use onehop_gpu::{Error, Gpu, Place, Region, Rows};
use onehop_os::{DmaMemory, HostMem, Marks};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::{Marking, Permit, Seat, count_marks, run_mark};
use onehop_proto::queue::Memory;

const MODEL: &str = include_str!("libcuda.c");
const CHILD: &str = "ONEHOP_TEST_MODEL";
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// A thread that waits in the driver for ever also counts as a failure.
const LONGEST: Duration = Duration::from_secs(60);

/// The model, in the process that loaded it.
struct Model(Library);

impl Model {
    /// Runs the test in a process with the model; returns the model in that process.
    fn or_child(test: &str) -> Option<Self> {
        Self::or_child_with(test, &[])
    }

    /// The same, with more libraries: their names and sources.
    fn or_child_with(test: &str, more: &[(&str, &str)]) -> Option<Self> {
        if std::env::var_os(CHILD).is_some() {
            // SAFETY: the model's initialisers do nothing.
            let model = Self(unsafe { Library::new("libcuda.so.1") }.unwrap());
            // SAFETY: the model's function of this signature.
            unsafe { model.0.get::<unsafe extern "C" fn(RunKernel)>(b"model_kernel\0").unwrap()(run_kernel) };
            return Some(model);
        }
        // A colon would divide the loader's path.
        let name = test.replace("::", "-");
        let folder = std::env::temp_dir().join(format!("onehop-model-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, text) in [("libcuda", MODEL)].iter().chain(more) {
            let (source, library) =
                (folder.join(name).with_extension("c"), folder.join(name).with_extension("so"));
            std::fs::write(&source, text).unwrap();
            let flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-o"];
            let made = Command::new("cc").args(flags).arg(&library).arg(&source).status();
            if made.is_err() {
                let _ = std::io::stderr().write_all(b"SKIPPED: a C compiler (cc) is not installed\n");
                return None;
            }
            assert!(made.unwrap().success());
            for version in ["so.0", "so.1"] {
                std::os::unix::fs::symlink(&library, library.with_extension(version)).unwrap();
            }
        }
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, "1")
            .env("LD_LIBRARY_PATH", &folder)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        let ended = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if start.elapsed() > LONGEST => break None,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        if ended.is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(
            ended.is_some_and(|status| status.success()),
            "{test}: {ended:?} after {:?}",
            start.elapsed()
        );
        None
    }

    fn ask(&self, what: &str, value: c_long) -> c_long {
        let what = CString::new(what).unwrap();
        // SAFETY: the model's function of this signature; the text lives across the call.
        unsafe {
            let ask =
                self.0.get::<unsafe extern "C" fn(*const c_char, c_long) -> c_long>(b"model\0").unwrap();
            ask(what.as_ptr(), value)
        }
    }

    fn set(&self, what: &str, value: c_long) {
        self.ask(&format!("set {what}"), value);
    }

    fn get(&self, what: &str) -> c_long {
        self.ask(what, 0)
    }

    /// Runs `f`, during which this thread must not call the driver, nor wait for long.
    fn without_calls(&self, f: impl FnOnce()) {
        let start = Instant::now();
        self.set("watched", 1);
        f();
        self.set("watched", 0);
        // SAFETY: the model's function of this signature, which gives a static string.
        let last = unsafe {
            let last =
                self.0.get::<unsafe extern "C" fn() -> *const c_char>(b"model_watched_call\0").unwrap();
            CStr::from_ptr(last()).to_string_lossy().into_owned()
        };
        assert_eq!(self.get("watched_calls"), 0, "the thread called {last}");
        assert!(start.elapsed() < Duration::from_secs(2), "it took {:?}", start.elapsed());
    }

    /// Drops a value in a forked process; returns the number of driver calls that made there, or more than 99 if it did
    /// not end.
    fn dropped_in_fork<T>(&self, dropped: T) -> c_int {
        // SAFETY: called once, with the pointer below.
        unsafe extern "C" fn run<T>(with: *mut c_void) {
            // SAFETY: the pointer is that of a T, of which this process has a copy of its own.
            drop(unsafe { with.cast::<T>().read() });
        }
        let mut kept = ManuallyDrop::new(dropped);
        // SAFETY: the model's function of this signature. The parent's T is dropped below, the child's there.
        let calls = unsafe {
            type Fork = unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void) -> c_int;
            let fork = self.0.get::<Fork>(b"model_forked\0").unwrap();
            fork(run::<T>, (&raw mut kept).cast())
        };
        drop(ManuallyDrop::into_inner(kept));
        calls
    }

    /// Drops a value as a thread's last act: by then the standard library no longer knows the thread.
    fn dropped_at_thread_end<T: Send>(&self, dropped: T) {
        // SAFETY: called once, with the pointer below.
        unsafe extern "C" fn run<T>(with: *mut c_void) {
            // SAFETY: the pointer is that of a box, which nobody else has.
            drop(unsafe { Box::from_raw(with.cast::<T>()) });
        }
        let dropped = Box::new(dropped);
        let ended = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // The thread has an identity from now on, which is dropped before the thread ends.
                let _ = std::thread::current();
                // SAFETY: the model's function of this signature; the box is the destructor's.
                unsafe {
                    type AtEnd =
                        unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void) -> c_int;
                    let at_end = self.0.get::<AtEnd>(b"model_at_thread_end\0").unwrap();
                    at_end(run::<T>, Box::into_raw(dropped).cast())
                }
            });
            thread.join().unwrap()
        });
        assert_eq!(ended, 0);
    }

    /// Waits until a number of the model is at most this.
    fn wait_for(&self, what: &str, value: c_long) {
        let start = Instant::now();
        while self.get(what) != value {
            assert!(start.elapsed() < TEST_TIMEOUT, "{what} is {} and not {value}", self.get(what));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A launch of a kernel for marks, as the model hands it over.
#[repr(C)]
struct ModelLaunch {
    kernel: c_int,
    args: [u64; 5],
    blocks: u32,
    stream: *mut c_void,
}

// SAFETY: called with a launch that lives across the call.
type RunKernel = unsafe extern "C" fn(c_int, *const ModelLaunch);

/// A GPU's part in the kernels for marks; with `begins` it gets stuck in its first block.
unsafe extern "C" fn run_kernel(begins: c_int, launch: *const ModelLaunch) {
    // SAFETY: the model hands over a launch that lives across the call.
    let &ModelLaunch { kernel, args: [first, word, shared, count, launch], blocks, .. } = unsafe { &*launch };
    let (first, shared, count) = (GpuAddr(first), GpuAddr(shared), count as u32);
    let seats = (0..blocks).map(|block| Seat { block: (block, blocks), thread: (0, 1) });
    match (kernel, begins) {
        (1, 0) => {
            let marking = Marking { first, count, word, permit: shared, launch: launch as u32 };
            seats.for_each(|seat| run_mark(&Raw, &marking, seat, || ()));
        }
        (1, _) => Raw.store(shared.plus(Permit::block(0).into()), 1),
        (2, 0) => {
            let left: u32 = seats.map(|seat| count_marks(&Raw, (first, count), word, seat)).sum();
            Raw.fetch_add(shared, left);
        }
        _ => {}
    }
}

/// Memory by address, as the model's GPU sees it.
struct Raw;

impl Raw {
    fn word(&self, at: GpuAddr) -> &AtomicU32 {
        // SAFETY: the code under test gives kernels addresses of memory that is there, on multiples of four.
        unsafe { AtomicU32::from_ptr(at.0 as *mut u32) }
    }
}

impl Memory for Raw {
    type Addr = GpuAddr;
    type Door = GpuAddr;

    fn load(&self, at: GpuAddr) -> u32 {
        self.word(at).load(Ordering::Relaxed)
    }
    fn load_acquire(&self, at: GpuAddr) -> u32 {
        self.word(at).load(Ordering::Acquire)
    }
    fn store(&self, at: GpuAddr, value: u32) {
        self.word(at).store(value, Ordering::Relaxed);
    }
    fn store_release(&self, at: GpuAddr, value: u32) {
        self.word(at).store(value, Ordering::Release);
    }
    fn store_entry(&self, _: GpuAddr, _: &[u32; 16]) {
        unreachable!("kernels for marks submit nothing")
    }
    fn fetch_add(&self, at: GpuAddr, value: u32) -> u32 {
        self.word(at).fetch_add(value, Ordering::AcqRel)
    }
    fn fetch_or(&self, at: GpuAddr, bits: u32) -> u32 {
        self.word(at).fetch_or(bits, Ordering::AcqRel)
    }
    fn fetch_and(&self, at: GpuAddr, mask: u32) -> u32 {
        self.word(at).fetch_and(mask, Ordering::AcqRel)
    }
    fn compare_exchange(&self, at: GpuAddr, old: u32, new: u32) -> u32 {
        let done = self.word(at).compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        done.unwrap_or_else(|seen| seen)
    }
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
    fn ring(&self, _: GpuAddr, _: u32) {
        unreachable!("kernels for marks ring nothing")
    }
    fn pause(&self) {}
    fn now(&self) -> u64 {
        0
    }
}

fn gpu() -> CudaGpu {
    Cuda::load().unwrap().open("0").unwrap()
}

fn one_of_each(gpu: &CudaGpu) -> [Region; 4] {
    [
        gpu.alloc_device(DeviceKind::Plain, 1 << 20).unwrap(),
        gpu.alloc_device(DeviceKind::Exportable, 1 << 20).unwrap(),
        gpu.alloc(Place::PinnedHost, 1 << 20).unwrap(),
        gpu.adopt(Place::PinnedHost, HostMem::anonymous(1 << 20).unwrap()).unwrap(),
    ]
}

#[test]
fn every_call_is_relaxed_and_the_thread_s_mode_comes_back() {
    let Some(model) = Model::or_child("every_call_is_relaxed_and_the_thread_s_mode_comes_back") else {
        return;
    };
    model.set("capturing", 1);
    let gpu = gpu();
    let data: Vec<u8> = (0..3 << 20).map(|i: usize| (i * 131 + i / 509) as u8).collect();
    for round in 0..3 {
        let [plain, arena, ring, adopted] = one_of_each(&gpu);
        let large = gpu.arena(data.len()).unwrap();
        let mut bytes = vec![0; data.len()];
        for (at, length) in [(0, data.len()), (1, (512 << 10) + 3), (5, 512 << 10), (9, 1), (0, 0)] {
            large.fill(0, data.len(), 0).unwrap();
            large.write(at, &data[..length]).unwrap();
            large.read(0, &mut bytes).unwrap();
            assert!(bytes[at..at + length] == data[..length], "round {round}, {length} bytes at {at}");
            assert!(bytes[..at].iter().chain(&bytes[at + length..]).all(|byte| *byte == 0));
        }
        ring.write(0, &data[..1 << 20]).unwrap();
        let mut copier = gpu.copier(&ring, &arena).unwrap();
        copier.copy(&Rows { from: 0, to: 0, row: 1 << 20, rows: 1, step: 1 << 20 }).unwrap();
        let mark = copier.mark().unwrap();
        copier.wait(mark).unwrap();
        arena.read(0, &mut bytes[..1 << 20]).unwrap();
        assert!(bytes[..1 << 20] == data[..1 << 20]);
        ring.fill(0, 1 << 20, 0).unwrap();
        let mut back = gpu.copier(&arena, &ring).unwrap();
        let half = |at| Rows { from: at, to: at, row: 1 << 19, rows: 1, step: 1 << 19 };
        back.copy_all(&[half(0), half(1 << 19)]).unwrap();
        back.mark().and_then(|mark| back.wait(mark)).unwrap();
        assert!(ring.host().unwrap().to_vec(0, 1 << 20).unwrap() == data[..1 << 20]);
        plain.mark(&Marks { first: 504, count: 100, word: 7 }, TEST_TIMEOUT).unwrap();
        gpu.memory_info().unwrap();
        gpu.wait_for_all().unwrap();
        drop((adopted, copier, back));
        assert_eq!([model.get("invalidated"), model.get("unrelaxed"), model.get("mode")], [0; 3], "{round}");
    }
    drop(gpu);
    model.wait_for("live", 0);
    assert_eq!([model.get("invalidated"), model.get("unrelaxed"), model.get("early")], [0; 3]);
}

#[test]
fn what_a_capture_refuses_is_freed_later_and_nothing_is_unmapped_before() {
    let test = "what_a_capture_refuses_is_freed_later_and_nothing_is_unmapped_before";
    let Some(model) = Model::or_child(test) else { return };
    let gpu = gpu();
    for code in [900, 901, 906] {
        let all = one_of_each(&gpu);
        model.set("refusal", code);
        model.set("refuse", 10);
        drop(all);
        model.wait_for("refuse", 0);
        assert!(gpu.memory_info().is_ok());
    }
    let refusals = gpu.refusals();
    drop(gpu);
    model.wait_for("live", 0);
    assert_eq!((refusals, model.get("early")), ((0, None), 0));
}

#[test]
fn what_is_refused_for_good_is_counted_and_stays() {
    let Some(model) = Model::or_child("what_is_refused_for_good_is_counted_and_stays") else { return };
    let gpu = gpu();
    let before = model.get("live");
    let region = gpu.alloc_device(DeviceKind::Exportable, 1 << 20).unwrap();
    let with_it = model.get("live");
    model.set("refusal", 1);
    model.set("refuse", 1);
    drop(region);
    model.wait_for("refuse", 0);
    let start = Instant::now();
    while gpu.refusals().0 == 0 {
        assert!(start.elapsed() < TEST_TIMEOUT);
    }
    let (count, why) = gpu.refusals();
    assert!(count == 1 && why.as_ref().is_some_and(|why| why.contains("cuMemFree")), "{why:?}");
    assert!(model.get("live") >= with_it && with_it > before && model.get("early") == 0);
}

/// Another library's kernel runs, and may wait for this thread. A drop makes no driver call, not even for the last
/// handles.
#[test]
fn dropping_calls_no_driver_and_waits_for_no_kernel() {
    let Some(model) = Model::or_child("dropping_calls_no_driver_and_waits_for_no_kernel") else { return };
    for last in [false, true] {
        let kept = gpu();
        let all = one_of_each(&kept);
        all[0].write(0, &[1; 4096]).unwrap();
        let gpu = if last {
            drop(kept);
            None
        } else {
            Some(kept)
        };
        model.set("busy", 1);
        model.without_calls(|| drop(all));
        assert_eq!(model.get("early"), 0);
        model.without_calls(|| drop(gpu));
        model.set("busy", 0);
        model.wait_for("live", 0);
    }
}

/// CUDA does not work in a forked process, which has no freeing thread either. The parent's memory stays the parent's.
#[test]
fn a_forked_process_frees_nothing_and_the_parent_does() {
    let Some(model) = Model::or_child("a_forked_process_frees_nothing_and_the_parent_does") else { return };
    for busy in [0, 1] {
        let gpu = gpu();
        let all = one_of_each(&gpu);
        all[0].write(0, &[1; 4096]).unwrap();
        drop(gpu);
        if busy > 0 {
            // The freeing thread is busy at the moment of the fork.
            model.set("busy", 1);
            drop(one_of_each(&self::gpu()));
        } else {
            // It has ended; the forked process would start one.
            std::thread::sleep(Duration::from_millis(1500));
        }
        assert_eq!(model.dropped_in_fork(all), 0);
        model.set("busy", 0);
        model.wait_for("live", 0);
        let (gpu, again) = (self::gpu(), self::gpu());
        let [_, arena, ring, _] = one_of_each(&gpu);
        let mut copier = gpu.copier(&ring, &arena).unwrap();
        copier.copy(&Rows { from: 0, to: 0, row: 4096, rows: 1, step: 4096 }).unwrap();
        copier.mark().unwrap();
        assert_eq!(model.dropped_in_fork(copier), 0);
        assert_eq!(model.dropped_in_fork((gpu, arena, ring)), 0);
        assert_eq!(model.dropped_in_fork(again), 0);
        model.wait_for("live", 0);
    }
}

/// The allocation behind memory that cannot be mapped is freed, and not by the requesting thread.
#[test]
fn a_failed_allocation_waits_for_no_kernel() {
    let Some(model) = Model::or_child("a_failed_allocation_waits_for_no_kernel") else { return };
    let gpu = gpu();
    let before = model.get("live");
    model.set("busy", 1);
    model.set("map_answer", 1);
    let start = Instant::now();
    let refused = gpu.alloc_device(DeviceKind::Exportable, 1 << 20);
    assert!(matches!(refused, Err(Error::Driver { code: 1, .. })));
    assert!(start.elapsed() < Duration::from_secs(2), "it took {:?}", start.elapsed());
    assert!(model.get("live") > before, "something was freed during a kernel");
    model.set("busy", 0);
    model.wait_for("live", before);
    model.set("map_answer", 0);
    assert!(gpu.alloc_device(DeviceKind::Exportable, 1 << 20).is_ok());
}

/// Calls of a forked process on the parent's GPU are refused without calling the driver.
#[test]
fn a_forked_process_gets_the_reason() {
    struct Asks(CudaGpu, Region, u32);
    impl Drop for Asks {
        fn drop(&mut self) {
            if std::process::id() == self.2 {
                return;
            }
            let refused = [
                self.0.memory_info().map(drop),
                self.0.alloc_device(DeviceKind::Plain, 1).map(drop),
                self.1.write(0, &[1; 4]),
                self.1.read(0, &mut [0; 4]),
            ];
            for answer in refused {
                let why = answer.expect_err("CUDA worked in a forked process").to_string();
                assert!(why.contains("forked"), "{why}");
            }
        }
    }
    let Some(model) = Model::or_child("a_forked_process_gets_the_reason") else { return };
    let gpu = gpu();
    let region = gpu.alloc_device(DeviceKind::Plain, 4096).unwrap();
    assert_eq!(model.dropped_in_fork(Asks(gpu, region, std::process::id())), 0);
    model.wait_for("live", 0);
}

#[test]
fn a_capture_s_errors_do_not_end_a_copy() {
    let Some(model) = Model::or_child("a_capture_s_errors_do_not_end_a_copy") else { return };
    let gpu = gpu();
    let region = gpu.alloc(Place::Vram, 1 << 20).unwrap();
    for code in [600, 900, 907] {
        model.set("answer", code);
        std::thread::scope(|scope| {
            let write = scope.spawn(|| region.write(0, &[7; 4096]));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!write.is_finished(), "{code}");
            model.set("answer", 0);
            write.join().unwrap().unwrap();
        });
    }
}

#[test]
fn memory_of_unfinished_work_is_freed_with_its_end_or_its_context() {
    let test = "memory_of_unfinished_work_is_freed_with_its_end_or_its_context";
    let Some(model) = Model::or_child(test) else { return };
    for ended in [0, 719] {
        let gpu = gpu();
        let region = gpu.alloc(Place::Vram, 1 << 20).unwrap();
        // The driver reports neither the reason nor whether the copy continues.
        model.set("answer", 999);
        assert!(matches!(region.write(0, &[7; 4096]), Err(Error::OutcomeUnknown { .. })));
        let live = model.get("live");
        drop((region, gpu));
        std::thread::sleep(Duration::from_millis(100));
        assert!(model.get("live") >= live - 2, "something was freed that the GPU may use");
        model.set("answer", ended);
        model.wait_for("live", 0);
        model.set("answer", 0);
    }
}

/// Two parts of a program each start the driver, and register the same pages: the driver accepts them once.
#[test]
fn two_that_started_the_driver_share_registered_pages() {
    let Some(model) = Model::or_child("two_that_started_the_driver_share_registered_pages") else { return };
    let (first, second) = (gpu(), gpu());
    let before = model.get("live");
    let pages = HostMem::anonymous(64 << 10).unwrap();
    let whole = first.adopt(Place::PinnedHost, pages.clone()).unwrap();
    let part = second.adopt(Place::PinnedHost, pages.slice(4096..12_288).unwrap()).unwrap();
    assert_eq!(part.addr().0 - whole.addr().0, 4096);
    assert_eq!(model.get("live"), before + 1, "registered twice");
    drop((whole, first));
    // The part keeps the whole alive, which another region joins.
    drop(second.adopt(Place::PinnedHost, pages.clone()).unwrap());
    drop(part);
    drop(second);
    model.wait_for("live", 0);
    assert!(gpu().adopt(Place::PinnedHost, pages).is_ok(), "the pages are still registered");
}

/// Exports of another GPU's memory would describe that GPU's memory as this one's.
#[test]
fn a_gpu_exports_only_its_own_memory() {
    let Some(model) = Model::or_child("a_gpu_exports_only_its_own_memory") else { return };
    let cuda = Cuda::load().unwrap();
    let (gpu, other) = (cuda.open("0").unwrap(), cuda.open("1").unwrap());
    let theirs = other.alloc_device(DeviceKind::Plain, 1 << 20).unwrap();
    let of_another = |error: Error| {
        assert!(matches!(&error, Error::NotSupported { why, .. } if why.contains("another GPU")), "{error}");
    };
    of_another(gpu.export_ipc(&theirs).unwrap_err());
    of_another(gpu.export_dma_buf(&theirs, Span::Allocation, false).unwrap_err());
    let ring = gpu.alloc(Place::PinnedHost, 4096).unwrap();
    of_another(gpu.copier(&ring, &theirs).err().unwrap());
    // SAFETY: the memory lives until the end of the test.
    let borrow = |gpu: &CudaGpu, at: GpuAddr, bytes| unsafe { gpu.borrow(at, bytes, ()) };
    assert_eq!(borrow(&other, theirs.addr().plus(4096), 4096).unwrap().addr(), theirs.addr().plus(4096));
    of_another(borrow(&gpu, theirs.addr(), 4096).err().unwrap());
    assert!(borrow(&other, ring.addr(), 4096).is_err(), "host memory was taken for a GPU's");
    drop((theirs, ring, gpu, other));
    model.wait_for("live", 0);
}

/// Tickets come from other programs: a false one is an error, and nothing of it stays open.
#[test]
fn forged_tickets_are_refused_and_leave_nothing_open() {
    let Some(model) = Model::or_child("forged_tickets_are_refused_and_leave_nothing_open") else { return };
    let cuda = Cuda::load().unwrap();
    let (gpu, other) = (cuda.open("0").unwrap(), cuda.open("1").unwrap());
    let theirs = other.alloc_device(DeviceKind::Plain, 4 << 20).unwrap();
    let mut elsewhere = [0; 64];
    elsewhere[..8].copy_from_slice(&theirs.addr().0.to_le_bytes());
    let bytes = 4 << 20;
    let whole = gpu.alloc_device(DeviceKind::Plain, bytes).unwrap();
    let mut handle = [0; 64];
    handle[..8].copy_from_slice(&whole.addr().0.to_le_bytes());
    let [allocation, offset, length] = [bytes as u64, 70_000, 4096];
    let uuid = gpu.device().uuid;
    let ticket = Ticket { by_fd: false, gpu: uuid, allocation, offset, bytes: length, buffer: 1, handle };
    let live = model.get("live");
    let opened = gpu.import_ipc(&ticket, None).unwrap();
    assert_eq!((opened.addr().0 - whole.addr().0, opened.len()), (70_000, 4096));
    drop(opened);
    model.wait_for("live", live);
    let mut nowhere = handle;
    nowhere[0] ^= 1;
    let lies = [
        Ticket { gpu: [9; 16], ..ticket },
        Ticket { handle: elsewhere, ..ticket },
        // Of an allocation that was freed, was replaced, or never existed.
        Ticket { allocation: allocation + (2 << 20), ..ticket },
        Ticket { allocation: allocation - (2 << 20), ..ticket },
        Ticket { handle: nowhere, ..ticket },
        Ticket { handle: [0; 64], ..ticket },
        Ticket { handle: [0xff; 64], ..ticket },
        // Past the allocation, and past all numbers.
        Ticket { offset: allocation - 4095, ..ticket },
        Ticket { offset: u64::MAX, bytes: 2, ..ticket },
        Ticket { offset: 1, bytes: u64::MAX, ..ticket },
        Ticket { by_fd: true, ..ticket },
    ];
    for lie in lies {
        let error = gpu.import_ipc(&lie, None).err().unwrap_or_else(|| panic!("{lie:?} was taken"));
        assert!(!matches!(error, Error::Silent { .. }), "{error}");
        model.wait_for("live", live);
    }
    drop(whole);
    model.wait_for("live", live - 1);
    assert!(gpu.import_ipc(&ticket, None).is_err(), "freed memory was opened");
}
