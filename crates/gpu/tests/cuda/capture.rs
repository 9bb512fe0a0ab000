//! Beside a library that captures and replays graphs in the same process, as PyTorch does: no call of onehop fails, no
//! capture is invalidated, and no memory is freed while the GPU uses it.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use onehop_gpu::cuda::{Arg, DeviceKind, Shape};
use onehop_gpu::{Gpu, Place, Rows, Sums};
use onehop_os::HostMem;

use crate::{Bench, bench, bytes_of, ptx, random, raw, report};

/// Rounds of each side.
const ROUNDS: u32 = 1000;
const LONGEST: Duration = Duration::from_secs(100);

/// Everything that a load does, and what follows it.
fn round(bench: &Bench, turn: u32, code: &onehop_gpu::cuda::Code, sums: &mut Sums) -> onehop_gpu::Result<()> {
    const BYTES: usize = 3 << 20;
    let gpu = &bench.gpu;
    let data = random(u64::from(turn) + 1, BYTES);
    let ring = gpu.alloc(Place::PinnedHost, BYTES)?;
    ring.write(0, &data)?;
    let arena = gpu.arena_to_fill(BYTES, &[0..4096, BYTES / 2..BYTES / 2 + 1])?;
    let mut copier = gpu.copier(&ring, &arena)?;
    let half = BYTES / 2;
    let rows = [0, half].map(|at| Rows { from: at, to: at, row: half, rows: 1, step: half });
    copier.copy_all(&rows)?;
    let mark = copier.mark()?;
    copier.wait(mark)?;
    assert!(bytes_of(&arena) == data, "round {turn}: other bytes arrived");
    let plain = gpu.alloc(Place::Vram, BYTES)?;
    let own = gpu.adopt(Place::PinnedHost, HostMem::anonymous(64 << 10)?)?;
    own.write(0, &data[..64 << 10])?;
    let shape = Shape { blocks: 1, threads: 256, shared: 0 };
    let args = [Arg::U64(plain.addr().0), Arg::U64(own.addr().0), Arg::U32(16 << 10)];
    let limit = Duration::from_secs(5);
    // SAFETY: the arguments are those of `copy` in ptx.rs, and both regions have so many words and live until it has ended.
    unsafe { gpu.start_kernel(code, "copy", shape, &args, limit) }?.wait()?;
    assert!(bytes_of(&plain)[..64 << 10] == data[..64 << 10], "round {turn}: the kernel copied other bytes");
    let sum = sums.crc32c(gpu, &arena, &[(0, BYTES as u64)], &|| true)?.unwrap();
    assert_eq!(sum, [crc32c::crc32c(&data)]);
    plain.fill(0, plain.len(), 0x5a)?;
    gpu.memory_info()?;
    // The copies are in progress when everything is dropped.
    copier.copy_all(&rows)?;
    drop((arena, ring, own));
    drop(copier);
    assert!(bytes_of(&plain).iter().all(|byte| *byte == 0x5a));
    if turn.is_multiple_of(50) {
        gpu.load_code(ptx::TOOLS)?.registers("copy")?;
        bench.cuda.open("0")?.alloc(Place::Vram, 4096)?;
        gpu.block_kernels()?;
    }
    Ok(())
}

#[test]
fn captures_of_other_code_and_our_calls_both_work() {
    let Some(bench) = bench("captures_of_other_code_and_our_calls_both_work") else { return };
    let (stop, captures) = (AtomicBool::new(false), AtomicU32::new(0));
    let code = bench.gpu.load_code(ptx::TOOLS).unwrap();
    let mut sums = Sums::new(&bench.gpu).unwrap();
    let (free, _) = bench.gpu.memory_info().unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| raw::capture_and_replay(&stop, &captures));
        let mut turns = 0;
        let mut failed = None;
        while (turns < ROUNDS || captures.load(Ordering::Acquire) < ROUNDS) && !other.is_finished() {
            if let Err(error) = round(&bench, turns, &code, &mut sums) {
                failed = Some(error);
                break;
            }
            turns += 1;
            assert!(start.elapsed() < LONGEST, "{turns} rounds beside {captures:?} captures");
        }
        stop.store(true, Ordering::Release);
        let other = other.join().unwrap();
        report(&format!(
            "{turns} rounds beside {} captures in {:?}",
            captures.load(Ordering::Acquire),
            start.elapsed()
        ));
        assert!(failed.is_none() && other.is_ok(), "round {turns}: ours {failed:?}, the other's {other:?}");
    });
    let (after, _) = bench.gpu.memory_info().unwrap();
    assert!(after + (64 << 20) > free, "{free} bytes were free before, {after} are after");
    assert_eq!(bench.gpu.refusals(), (0, None));
}

/// When a tensor's last reference is dropped, a consumer may have left a kernel running that writes to it, and a
/// capture may be open. The memory has to stay mapped until the kernel has ended.
#[test]
fn memory_stays_mapped_while_a_kernel_of_others_uses_it() {
    const BYTES: usize = 4 << 20;
    let Some(bench) = bench("memory_stays_mapped_while_a_kernel_of_others_uses_it") else { return };
    raw::enter();
    let (worker, captured) = (raw::Stream::new(), raw::Stream::new());
    for (kind, capturing) in [
        (DeviceKind::Exportable, false),
        (DeviceKind::Plain, false),
        (DeviceKind::Exportable, true),
        (DeviceKind::Plain, true),
    ] {
        let region = bench.gpu.alloc_device(kind, BYTES).unwrap();
        worker.launch("late", (1, 256), &mut [region.addr().0, (BYTES / 4) as u64, 400_000_000]);
        if capturing {
            captured.begin_capture();
        }
        let start = Instant::now();
        drop(region);
        let took = start.elapsed();
        // The next allocation may get the same addresses, but not yet.
        let next = bench.gpu.alloc_device(kind, BYTES);
        let capture = if capturing { captured.end_capture().map(|_| ()) } else { Ok(()) };
        while !worker.is_over().expect("the kernel's memory was taken away under it") {
            std::thread::sleep(Duration::from_millis(1));
        }
        report(&format!("{kind:?}, capturing {capturing}: dropped within {took:?}"));
        assert!(capture.is_ok(), "{kind:?}: {capture:?}");
        assert!(bytes_of(&next.unwrap()).iter().all(|byte| *byte == 0), "{kind:?}");
        assert!(took < Duration::from_millis(100), "{kind:?}, capturing {capturing}: dropping took {took:?}");
    }
}

/// Memory that is dropped while another library's kernel runs is freed when that has ended.
#[test]
fn memory_is_freed_later_without_waiting() {
    let Some(bench) = bench("memory_is_freed_later_without_waiting") else { return };
    let gpu = &bench.gpu;
    raw::enter();
    let worker = raw::Stream::new();
    let (free, _) = gpu.memory_info().unwrap();
    let much = gpu.alloc(Place::Vram, 1 << 30).unwrap();
    let pinned = gpu.alloc(Place::PinnedHost, 1 << 20).unwrap();
    let code = gpu.load_code(ptx::TOOLS).unwrap();
    code.registers("copy").unwrap();
    worker.launch("linger", (1, 1), &mut [2_000_000_000]);
    let start = Instant::now();
    drop((much, pinned, code));
    let took = start.elapsed();
    assert!(!worker.is_over().unwrap() && took < Duration::from_millis(500), "dropping took {took:?}");
    worker.wait().unwrap();
    let (after, _) = gpu.memory_info().unwrap();
    assert!(after + (64 << 20) > free, "{free} bytes were free before, {after} are after");
    report(&format!("memory during a kernel of other code: dropped within {took:?}"));
}

#[test]
fn all_work_of_the_process_is_waited_for_during_a_capture() {
    let Some(bench) = bench("all_work_of_the_process_is_waited_for_during_a_capture") else { return };
    raw::enter();
    let (worker, captured) = (raw::Stream::new(), raw::Stream::new());
    let region = bench.gpu.alloc(Place::Vram, 1 << 20).unwrap();
    worker.launch("late", (1, 256), &mut [region.addr().0, 1 << 18, 300_000_000]);
    captured.begin_capture();
    let start = Instant::now();
    let waited = bench.gpu.wait_for_all();
    let took = start.elapsed();
    assert!(captured.end_capture().is_ok() && waited.is_ok(), "{waited:?}");
    assert!(worker.is_over().unwrap(), "it was waited for {took:?}, and the kernel runs");
    assert_eq!(region.word((1 << 20) - 4).unwrap(), 7);
}
