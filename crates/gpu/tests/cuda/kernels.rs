//! Launches: doorbells reach a controller, limits hold, failures are reported.

use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onehop_controller::layout::DataCheck;
use onehop_gpu::cuda::{Arg, Cuda, CudaGpu, Rig, Shape};
use onehop_gpu::{
    BlockJob, Doorbells, Emulated, Error, Gpu, Instruments, KernelJob, KernelQueue, Launch, Place, Region,
};
use onehop_os::{HostMem, MmioWindow, Registers};
use onehop_proto::GpuAddr;
use onehop_proto::kernel::Exit;
use onehop_radio::Format;

use crate::{bench, bytes_of, ptx, raw, report, run};

/// Registers that record writes, and answer in a word that the GPU polls.
struct Heard {
    writes: Mutex<Vec<(u32, u32)>>,
    ack: Region,
}

impl Registers for Heard {
    fn read32(&self, _offset: u32) -> u32 {
        0
    }
    fn write32(&self, offset: u32, value: u32) {
        self.writes.lock().unwrap().push((offset, value));
        self.ack.signal(0, value).unwrap();
    }
    fn size(&self) -> u32 {
        16384
    }
}

#[test]
fn every_doorbell_of_a_kernel_reaches_the_registers_in_order() {
    const TIMES: u32 = 20_000;
    let Some(bench) = bench("every_doorbell_of_a_kernel_reaches_the_registers_in_order") else { return };
    let ack = bench.gpu.alloc(Place::PinnedHost, 4096).unwrap();
    let heard = Arc::new(Heard { writes: Mutex::default(), ack: ack.clone() });
    let doorbells = bench.gpu.map_registers(heard.clone()).unwrap();
    assert!(doorbells.is_relayed());
    let door = doorbells.at(0x1008);
    let args = [Arg::U64(door.0), Arg::U64(ack.addr().0), Arg::U32(TIMES), Arg::U64(15_000_000_000)];
    let start = Instant::now();
    run(&bench.gpu, "ring", 1, &args);
    let each = start.elapsed() / TIMES;
    report(&format!("a doorbell by way of the relay and the answer to it: {each:?}"));
    let writes: Vec<_> = heard.writes.lock().unwrap().drain(..).collect();
    assert_eq!(writes.len(), TIMES as usize);
    assert!(writes.iter().zip(1..).all(|(write, turn)| *write == (0x1008, turn)));

    // A newly created queue may be rung with the last value of the old one.
    let [door, word, _, limit] = args;
    let once = [door, word, Arg::U32(1), limit];
    ack.signal(0, 0).unwrap();
    run(&bench.gpu, "ring", 1, &once);
    ack.signal(0, 0).unwrap();
    run(&bench.gpu, "ring", 1, &once);
    drop(doorbells);
    assert_eq!(*heard.writes.lock().unwrap(), [(0x1008, 1), (0x1008, 1)]);
}

#[test]
fn a_completion_doorbell_is_relayed_before_the_submission() {
    const TIMES: u32 = 50_000;
    let Some(bench) = bench("a_completion_doorbell_is_relayed_before_the_submission") else { return };
    let ack = bench.gpu.alloc(Place::PinnedHost, 4096).unwrap();
    let heard = Arc::new(Heard { writes: Mutex::default(), ack });
    let doorbells = bench.gpu.map_registers(heard.clone()).unwrap();
    let (sq, cq) = (doorbells.at(0x1010), doorbells.at(0x1014));
    run(&bench.gpu, "pair", 1, &[Arg::U64(sq.0), Arg::U64(cq.0), Arg::U32(TIMES)]);
    drop(doorbells);
    let writes = heard.writes.lock().unwrap();
    let (mut freed, mut submitted) = (0, 0);
    for (offset, value) in writes.iter() {
        let last = if *offset == 0x1014 { &mut freed } else { &mut submitted };
        assert!(*value > *last, "{offset:#x} went from {last} to {value}");
        *last = *value;
        assert!(submitted <= freed, "submission {submitted} was relayed after completion {freed}");
    }
    assert_eq!((freed, submitted), (TIMES, TIMES));
    report(&format!("{} of {} doorbells were passed on, the rest were overtaken", writes.len(), 2 * TIMES));
}

/// Registers that falsely claim to be device memory.
struct NoDevice(HostMem);

impl Registers for NoDevice {
    fn read32(&self, _offset: u32) -> u32 {
        0
    }
    fn write32(&self, _offset: u32, _value: u32) {}
    fn size(&self) -> u32 {
        self.0.len() as u32
    }
    fn mmio(&self) -> Option<MmioWindow> {
        Some(MmioWindow::new(self.0.clone()))
    }
}

#[test]
fn registers_that_cannot_be_mapped_say_why() {
    let Some(bench) = bench("registers_that_cannot_be_mapped_say_why") else { return };
    let regs = Arc::new(NoDevice(HostMem::touched(16384).unwrap()));
    match bench.gpu.map_registers(regs) {
        Ok(_) => report("ordinary memory is registered as a device's here"),
        Err(error) => {
            report(&format!("{error}"));
            assert!(matches!(error, Error::Registers { .. }), "{error}");
            assert!(error.to_string().contains("IOMEMORY") && error.to_string().contains("NVRM"), "{error}");
        }
    }
}

/// A page of host memory stands in for registers: reads return its words, all ones included.
#[test]
fn registers_are_read_one_by_one_up_to_the_first_that_is_all_ones() {
    let Some(bench) = bench("registers_are_read_one_by_one_up_to_the_first_that_is_all_ones") else { return };
    let page = bench.gpu.alloc(Place::PinnedHost, 4096).unwrap();
    let words: Vec<u32> = (0..16).map(|i| 0x2014_07ff + i).collect();
    words.iter().zip((8..).step_by(4)).for_each(|(word, at)| page.signal(at, *word).unwrap());
    let registers = Doorbells::of_memory(&page);
    let peek = |count, limit| bench.gpu.peek(&registers, 8, count, limit);
    let second = Duration::from_secs(1);
    let start = Instant::now();
    assert_eq!(peek(3, second).unwrap(), words[..3]);
    report(&format!("three registers by a kernel, loading it included: {:?}", start.elapsed()));
    assert_eq!(peek(16, second).unwrap(), words);
    assert!(peek(0, second).is_err() && peek(17, second).is_err());
    // Zero is a valid value, and all ones ends the reads.
    page.signal(8, 0).unwrap();
    page.signal(12, u32::MAX).unwrap();
    assert_eq!(peek(3, second).unwrap(), [0, u32::MAX]);
    page.signal(8, u32::MAX).unwrap();
    assert_eq!(peek(3, second).unwrap(), [u32::MAX]);
}

#[test]
fn relayed_doorbells_are_not_registers() {
    let Some(bench) = bench("relayed_doorbells_are_not_registers") else { return };
    let ack = bench.gpu.alloc(Place::PinnedHost, 4096).unwrap();
    let doorbells = bench.gpu.map_registers(Arc::new(Heard { writes: Mutex::default(), ack })).unwrap();
    assert!(doorbells.is_relayed());
    // What is read there is the relay's page, not the registers: callers first check whether it is relayed.
    assert_eq!(bench.gpu.peek(&doorbells, 0, 3, Duration::from_secs(1)).unwrap(), [u32::MAX]);
}

/// A queue in its control memory's second half, including rings and doorbells.
fn queue(control: &Region) -> KernelQueue {
    let at = |offset| control.addr().plus(offset);
    let (sq, cq, sq_door, cq_door) = (at(16 << 10), at(24 << 10), at(28 << 10), at((28 << 10) + 4));
    let control = control.addr();
    KernelQueue { sq, cq, sq_door, cq_door, control, sq_entries: 64, cq_entries: 64, window: 63, zero: 0 }
}

#[test]
fn launches_are_prepared_poisoned_bounded_and_read_back() {
    let Some(bench) = bench("launches_are_prepared_poisoned_bounded_and_read_back") else { return };
    // SAFETY: the stand-ins write exits and the control words below.
    let gpu = unsafe { bench.cuda.open_with_code("0", ptx::STAND_IN) }.unwrap();
    let controls: Vec<Region> = (0..3).map(|_| gpu.alloc(Place::Vram, 32 << 10).unwrap()).collect();
    let owner = Launch::Owner(controls.iter().map(queue).collect());
    gpu.prepare(&owner).unwrap();
    let marks: Vec<u32> = controls.iter().map(|control| control.word(0).unwrap()).collect();
    assert_eq!(marks, [100, 101, 102]);
    let poison = gpu.alloc(Place::PinnedHost, 4096).unwrap();
    let job = KernelJob {
        works: GpuAddr(0),
        outcomes: GpuAddr(0),
        count: 0,
        nsid: 1,
        stall: KernelJob::nanos(Duration::from_secs(1)),
        limit: KernelJob::nanos(Duration::from_millis(200)),
        poison: poison.addr(),
        ..KernelJob::default()
    };
    // By its own limit.
    let start = Instant::now();
    let running = gpu.launch(&owner, &job).unwrap();
    assert!(!running.is_done());
    assert_eq!(running.join().unwrap(), [Exit::TimedOut; 3]);
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(190) && took < Duration::from_secs(5), "{took:?}");
    // By the host, while it runs; memory in use stays until the end even if the outcome is not needed.
    let long = KernelJob { limit: KernelJob::nanos(Duration::from_secs(20)), ..job };
    let mut slowest = Duration::ZERO;
    for code in 1..50 {
        poison.signal(0, 0).unwrap();
        let running = gpu.launch(&owner, &long).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        assert!(!running.is_done());
        let start = Instant::now();
        poison.signal(0, code).unwrap();
        while !running.is_done() {
            assert!(start.elapsed() < Duration::from_secs(5));
        }
        slowest = slowest.max(start.elapsed());
        if code % 2 == 0 {
            assert_eq!(running.join().unwrap(), [Exit::Poisoned(code); 3]);
        }
    }
    report(&format!("from the poison word to the end of the launch, the slowest of 49: {slowest:?}"));
    assert!(slowest < Duration::from_millis(10), "{slowest:?}");

    let shared = Launch::Shared(vec![queue(&controls[0])], 1000);
    gpu.prepare(&shared).unwrap();
    assert_eq!(controls[0].word(0).unwrap(), 200);
    // 1000 threads are 32 warps, and each has an exit.
    assert_eq!(gpu.launch(&shared, &job).unwrap().join().unwrap(), vec![Exit::Finished; 32]);
    assert!(gpu.launch(&Launch::Owner(vec![]), &job).is_err());
    assert!(gpu.launch(&Launch::Shared(vec![queue(&controls[0])], 0), &job).is_err());
}

/// All memory of a launch must be this GPU's, and is held until the launch has ended.
#[test]
fn launches_over_freed_memory_are_refused() {
    let Some(bench) = bench("launches_over_freed_memory_are_refused") else { return };
    // SAFETY: the stand-ins write exits and the control words below.
    let gpu = unsafe { bench.cuda.open_with_code("0", ptx::STAND_IN) }.unwrap();
    let memory = gpu.alloc(Place::Vram, 64 << 10).unwrap();
    let (lists, poison) =
        (gpu.alloc(Place::Vram, 64 << 10).unwrap(), gpu.alloc(Place::PinnedHost, 4096).unwrap());
    let job = KernelJob {
        works: lists.addr(),
        outcomes: lists.addr().plus(32 << 10),
        count: 1000,
        nsid: 1,
        stall: KernelJob::nanos(Duration::from_secs(1)),
        limit: KernelJob::nanos(Duration::from_millis(300)),
        poison: poison.addr(),
        ..KernelJob::default()
    };
    let launch = |queue: KernelQueue, job: &KernelJob| gpu.launch(&Launch::Owner(vec![queue]), job);
    let good = queue(&memory);
    launch(good, &job).unwrap().join().unwrap();
    let emulated = Emulated::new().alloc(Place::Vram, 32 << 10).unwrap();
    let beyond = memory.addr().plus(memory.len() as u64 - 2);
    let queues = [
        KernelQueue { control: GpuAddr(0), ..good },
        KernelQueue { control: beyond, ..good },
        KernelQueue { control: emulated.addr(), ..good },
        KernelQueue { window: 0, ..good },
        KernelQueue { sq: beyond, ..good },
        KernelQueue { cq: GpuAddr(u64::MAX - 5), ..good },
        KernelQueue { sq_door: GpuAddr(8), ..good },
        KernelQueue { cq_door: beyond, ..good },
        KernelQueue { sq_entries: 1 << 20, ..good },
        KernelQueue { cq_entries: 0, ..good },
    ];
    for queue in queues {
        let error = launch(queue, &job).err().unwrap();
        assert!(matches!(error, Error::Launch(_)), "{error}");
    }
    for queue in &queues[..4] {
        assert!(matches!(gpu.prepare(&Launch::Owner(vec![*queue])), Err(Error::Launch(_))));
    }
    for job in [
        KernelJob { works: emulated.addr(), ..job },
        KernelJob { count: 1025 * 4, ..job },
        KernelJob { outcomes: GpuAddr(0), ..job },
        KernelJob { poison: GpuAddr(4), ..job },
    ] {
        assert!(matches!(launch(good, &job), Err(Error::Launch(_))), "{job:?}");
    }
    // A launch keeps its memory; freed memory is refused.
    let running = launch(good, &job).unwrap();
    let (free, _) = gpu.memory_info().unwrap();
    drop(memory);
    assert!(launch(good, &job).is_ok(), "it is there as long as the first launch runs");
    running.join().unwrap();
    assert!(matches!(launch(good, &job), Err(Error::Launch(_))), "{free}");
    // And the memory that a descriptor refers to.
    let (rig, list) = (gpu.load_rig().unwrap(), gpu.alloc(Place::Vram, 4096).unwrap());
    let check = DataCheck {
        data: list.addr(),
        result: list.addr(),
        count: 1,
        blocks: 1,
        block_words: 4,
        ..DataCheck::default()
    };
    let start = |check: &DataCheck| {
        let words: Vec<u8> = check.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        list.write(0, &words).unwrap();
        gpu.start_rig(&rig, Rig::Check, &list, 1, Duration::from_secs(1))
    };
    for check in [
        DataCheck { data: beyond, ..check },
        DataCheck { result: emulated.addr(), ..check },
        DataCheck { count: 1 << 20, ..check },
    ] {
        assert!(matches!(start(&check).err(), Some(Error::Launch(_))), "{check:?}");
    }
    start(&check).unwrap().wait().unwrap();
}

/// An emulated GPU's addresses are invalid here, or belong to other memory.
#[test]
fn memory_of_an_emulated_gpu_is_refused() {
    let Some(bench) = bench("memory_of_an_emulated_gpu_is_refused") else { return };
    let gpu = &bench.gpu;
    let emulated = Emulated::new();
    let theirs = emulated.alloc(Place::Vram, 1 << 20).unwrap();
    let rows = gpu.alloc(Place::Vram, BlockJob::CHECKED_BYTES).unwrap();
    let job = BlockJob::check((&theirs, Format::Ci16), &rows, 4, 1).unwrap();
    let error = gpu.block_kernels().unwrap().run(&[job]).unwrap_err();
    assert!(error.to_string().contains("emulated"), "{error}");
    let registers = emulated.map_registers(Arc::new(NoDevice(HostMem::touched(4096).unwrap()))).unwrap();
    let error = gpu.peek(&registers, 0, 1, Duration::from_secs(1)).unwrap_err();
    assert!(error.to_string().contains("emulated"), "{error}");
    if let Ok(files) = gpu.files() {
        let error = files.register(&theirs).err().unwrap();
        assert!(error.to_string().contains("emulated"), "{error}");
    }
    // Within host memory the CPU copies: that needs no address of this GPU.
    let ring = gpu.alloc(Place::PinnedHost, 4096).unwrap();
    gpu.copier(&ring, &theirs).unwrap();
}

/// Longer than the wait for a kernel whose limit is zero.
const LINGER: u64 = 12_000_000_000;

#[test]
fn a_kernel_that_does_not_end_in_time_is_left_alone() {
    let Some(bench) = bench("a_kernel_that_does_not_end_in_time_is_left_alone") else { return };
    let gpu = &bench.gpu;
    let (free, _) = gpu.memory_info().unwrap();
    let much = gpu.alloc(Place::Vram, 1 << 30).unwrap();
    let start = Instant::now();
    let shape = Shape { blocks: 1, threads: 1, shared: 0 };
    let code = gpu.load_code(ptx::TOOLS).unwrap();
    // SAFETY: the kernel takes this argument and touches no memory.
    let started =
        unsafe { gpu.start_kernel(&code, "linger", shape, &[Arg::U64(LINGER)], Duration::ZERO) }.unwrap();
    // Polling ends, too.
    while !started.is_over() {
        std::thread::sleep(Duration::from_millis(1));
        assert!(start.elapsed() < Duration::from_millis(11_500), "it is never said to be over");
    }
    let (error, took) = (started.wait().unwrap_err(), start.elapsed());
    report(&format!("after {took:?}: {error}"));
    assert!(took < Duration::from_millis(11_500) && error.to_string().contains("did not end"), "{error}");
    assert!(matches!(error, Error::Unended { .. }), "{error:?}");
    // The GPU keeps working meanwhile: neither this copy nor freeing memory waits for the kernel.
    let region = gpu.alloc(Place::PinnedHost, 4096).unwrap();
    region.write(0, &[1; 8]).unwrap();
    let plain = gpu.alloc(Place::Vram, 1 << 20).unwrap();
    plain.write(0, &[7; 8]).unwrap();
    let dropping = Instant::now();
    drop((much, plain, region, code));
    let dropped = dropping.elapsed();
    assert!(start.elapsed() < Duration::from_nanos(LINGER), "the kernel has ended meanwhile");
    assert!(dropped < Duration::from_millis(500), "giving memory back took {dropped:?}");
    wait_for_free_memory(gpu, free);
}

/// Waits until as much memory is free as before.
fn wait_for_free_memory(gpu: &CudaGpu, free: u64) {
    let start = Instant::now();
    while gpu.memory_info().unwrap().0 + (64 << 20) < free {
        assert!(start.elapsed() < Duration::from_secs(10), "{:?} are free of {free}", gpu.memory_info());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(gpu.refusals(), (0, None));
}

#[test]
fn kernels_on_data_that_cannot_start_keep_their_code_and_their_memory() {
    let Some(bench) = bench("kernels_on_data_that_cannot_start_keep_their_code_and_their_memory") else {
        return;
    };
    let gpu = &bench.gpu;
    let (free, _) = gpu.memory_info().unwrap();
    // Zeros are no counter from 1 on: every sample is wrong.
    let samples = gpu.alloc(Place::Vram, 1 << 20).unwrap();
    let rows = gpu.alloc(Place::Vram, BlockJob::CHECKED_BYTES).unwrap();
    let job = BlockJob::check((&samples, Format::Ci16), &rows, 1 << 18, 1).unwrap();
    let mut kernels = gpu.block_kernels().unwrap();
    raw::enter();
    // The other kernels take all threads of the GPU.
    let worker = raw::Stream::new();
    let blocks = gpu.capabilities().multiprocessors as u32 * 2048 / 256;
    worker.launch("linger", (blocks, 256), &mut [LINGER]);
    let start = Instant::now();
    let error = kernels.run(std::slice::from_ref(&job)).unwrap_err();
    report(&format!("after {:?}: {error}", start.elapsed()));
    assert!(matches!(error, Error::Unended { .. }), "{error:?}");
    let again = kernels.run(std::slice::from_ref(&job)).unwrap_err();
    assert!(again.to_string().contains("did not end"), "{again}");
    let dropping = Instant::now();
    drop((kernels, job, samples));
    let dropped = dropping.elapsed();
    assert!(!worker.is_over().unwrap() && dropped < Duration::from_millis(500), "dropping took {dropped:?}");
    worker.wait().unwrap();
    wait_for_free_memory(gpu, free);
    // It has run after all, with its code and its memory.
    assert!(bytes_of(&rows).iter().any(|byte| *byte != 0));
}

const LEAVER: &str = "ONEHOP_TEST_LEAVER";

/// At the end of the process, the thread that frees memory waits for a kernel.
#[test]
fn a_process_may_end_while_memory_is_being_freed() {
    if bench("a_process_may_end_while_memory_is_being_freed").is_none() {
        return;
    }
    for _ in 0..3 {
        let children: Vec<_> = (0..8)
            .map(|_| {
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "kernels::the_process_that_ends", "--nocapture"])
                    .env(LEAVER, "1")
                    .stderr(Stdio::piped())
                    .stdout(Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            assert!(
                output.status.success(),
                "{:?}: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
}

/// The other process of the test above; nothing when it runs by itself.
#[test]
fn the_process_that_ends() {
    if std::env::var_os(LEAVER).is_none() {
        return;
    }
    let gpu = Cuda::load().unwrap().open("0").unwrap();
    let regions = [
        gpu.alloc(Place::Vram, 1 << 20).unwrap(),
        gpu.arena(4 << 20).unwrap(),
        gpu.alloc(Place::PinnedHost, 1 << 20).unwrap(),
    ];
    raw::enter();
    let worker = raw::Stream::new();
    worker.launch("linger", (1, 1), &mut [200_000_000]);
    drop((regions, gpu));
}

#[test]
fn wrong_device_code_says_what_the_compiler_said() {
    let Some(bench) = bench("wrong_device_code_says_what_the_compiler_said") else { return };
    let shape = Shape { blocks: 1, threads: 1, shared: 0 };
    let limit = Duration::from_secs(1);
    let broken = ptx::TOOLS.replace("add.u64 %d0, %d0, %d1;", "add.nonsense %d0;");
    // SAFETY: kernels that do not compile, or are not found, do not run.
    let errors = [
        unsafe { bench.gpu.run_ptx(&broken, "linger", shape, &[], limit) },
        unsafe { bench.gpu.run_ptx("", "linger", shape, &[], limit) },
        unsafe { bench.gpu.run_ptx(ptx::TOOLS, "no_such_kernel", shape, &[], limit) },
    ];
    let texts = errors.map(|error| error.unwrap_err().to_string());
    texts.iter().for_each(|text| report(text));
    assert!(texts[0].contains("the compiler said") && texts[0].contains("nonsense"), "{}", texts[0]);
    assert!(texts[2].contains("no_such_kernel"), "{}", texts[2]);
    let wide = Shape { threads: 5000, ..shape };
    // SAFETY: the driver refuses the shape.
    let error = unsafe { bench.gpu.run_ptx(ptx::TOOLS, "invalid_store", wide, &[], limit) }.unwrap_err();
    assert!(matches!(error, Error::Driver { .. }), "{error}");
}

const CHILD: &str = "ONEHOP_TEST_INVALID_STORE";

#[test]
fn a_wrong_address_ends_the_context_with_an_error() {
    if bench("a_wrong_address_ends_the_context_with_an_error").is_none() {
        return;
    }
    // In a separate process: the context is unusable afterwards.
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kernels::the_process_whose_context_ends", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    report(said.trim());
    assert!(output.status.success(), "{said}");
    assert!(said.contains("CUDA_ERROR_ILLEGAL_ADDRESS") && said.contains("restart the program"), "{said}");
}

/// The other process of the test above; nothing when it runs by itself.
#[test]
fn the_process_whose_context_ends() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let gpu = Cuda::load().unwrap().open("0").unwrap();
    let held = gpu.alloc(Place::Vram, 4096).unwrap();
    let pinned = gpu.alloc(Place::PinnedHost, 4096).unwrap();
    let shape = Shape { blocks: 1, threads: 1, shared: 0 };
    // SAFETY: the address it writes is invalid: the GPU stops it.
    let result = unsafe { gpu.run_ptx(ptx::TOOLS, "invalid_store", shape, &[], Duration::from_secs(5)) };
    report(&format!("{}", result.unwrap_err()));
    // Every later call fails with an error, and nothing hangs or panics.
    report(&format!("{}", held.read(0, &mut [0; 4]).unwrap_err()));
    report(&format!("{:?}", gpu.alloc(Place::Vram, 4096).err().map(|error| error.to_string())));
    pinned.write(0, &[1]).unwrap();
    drop((held, pinned, gpu));
}
