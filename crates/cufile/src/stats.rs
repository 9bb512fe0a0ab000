//! Counters for `cuFileGetStats*` and the library's own report.

use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::driver::place;
use crate::error::{Code, Failure};
use crate::machine::if_started;
use crate::parameters::SizeParameter;
use crate::state::{answer, with_state};
use crate::stats_types::{Level1, Level2, Level3, MOST_GPUS, OpCounter, PerGpu};
use crate::types::CuFileError;

/// Calls that are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CountedCall {
    HandleRegister,
    HandleDeregister,
    BufferRegister,
    BufferDeregister,
    BatchSetup,
    BatchSubmit,
    BatchCancel,
    BatchDestroy,
    BatchComplete,
}

/// The memory side of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemorySide {
    /// Host memory.
    Host,
    /// The memory of this GPU.
    Gpu(u32),
}

/// A finished transfer.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    pub bytes: usize,
    pub is_ok: bool,
    pub writes: bool,
    pub took: Duration,
    pub way: MemorySide,
}

/// The data of the process's own report, counted at every level.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub reads: u64,
    pub writes: u64,
    pub errors: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// Of both, the bytes of host memory.
    pub host_bytes: u64,
    /// Time during which at least one transfer was in progress.
    pub busy: Duration,
    active: u32,
    since: Option<Instant>,
}

struct CallStats {
    runs: bool,
    levels: Level2,
    by_gpu: [PerGpu; MOST_GPUS],
    totals: Totals,
}

static STATS: Mutex<Option<Box<CallStats>>> = Mutex::new(None);

/// The lock, for a thread that forks.
pub struct HeldStats(MutexGuard<'static, Option<Box<CallStats>>>);

impl HeldStats {
    /// Resets a child's report: transfers in progress in its parent never end there.
    pub fn disown(&mut self) {
        if let Some(stats) = &mut *self.0 {
            stats.totals = Totals::default();
        }
    }
}

/// Takes the lock.
pub fn hold() -> HeldStats {
    HeldStats(STATS.lock().unwrap_or_else(PoisonError::into_inner))
}

fn with<R>(f: impl FnOnce(&mut CallStats) -> R) -> R {
    let mut stats = STATS.lock().unwrap_or_else(PoisonError::into_inner);
    f(stats.get_or_insert_with(|| {
        Box::new(CallStats {
            runs: true,
            levels: Level2::default(),
            by_gpu: [PerGpu::default(); MOST_GPUS],
            totals: Totals::default(),
        })
    }))
}

fn level() -> usize {
    with_state(|state| state.parameters.size(SizeParameter::Stats))
}

fn add(counter: &mut OpCounter, is_ok: bool) {
    if is_ok { counter.ok += 1 } else { counter.err += 1 }
}

/// Counts a call.
pub fn count(which: CountedCall, is_ok: bool) {
    if level() == 0 {
        return;
    }
    with(|stats| {
        let basic = &mut stats.levels.basic;
        if !stats.runs {
            return;
        }
        let counter = match which {
            CountedCall::HandleRegister => &mut basic.handle_register,
            CountedCall::HandleDeregister => &mut basic.handle_deregister,
            CountedCall::BufferRegister => &mut basic.buffer_register,
            CountedCall::BufferDeregister => &mut basic.buffer_deregister,
            CountedCall::BatchSetup => &mut basic.batch_setup,
            CountedCall::BatchSubmit => &mut basic.batch_submit,
            CountedCall::BatchCancel => &mut basic.batch_cancel,
            CountedCall::BatchDestroy => &mut basic.batch_destroy,
            CountedCall::BatchComplete => &mut basic.batch_complete,
        };
        add(counter, is_ok);
    });
}

/// Counts as a transfer in progress while it lives.
pub struct Busy(());

/// See [`Busy`].
pub fn busy() -> Busy {
    with(|CallStats { totals, .. }| {
        totals.active += 1;
        totals.since.get_or_insert_with(Instant::now);
    });
    Busy(())
}

impl Drop for Busy {
    fn drop(&mut self) {
        with(|CallStats { totals, .. }| {
            totals.active = totals.active.saturating_sub(1);
            if totals.active == 0
                && let Some(since) = totals.since.take()
            {
                totals.busy += since.elapsed();
            }
        });
    }
}

/// Counts a transfer.
pub fn moved(moved: &Moved) {
    let level = level();
    with(|stats| {
        let Moved { is_ok, writes, way, .. } = *moved;
        let (bytes, us) = (moved.bytes as u64, moved.took.as_micros() as u64);
        let totals = &mut stats.totals;
        if writes {
            totals.writes += 1;
            totals.written_bytes += bytes;
        } else {
            totals.reads += 1;
            totals.read_bytes += bytes;
        }
        totals.errors += u64::from(!is_ok);
        if way == MemorySide::Host {
            totals.host_bytes += bytes;
        }
        if level == 0 || !stats.runs {
            return;
        }
        let Level2 { basic, reads_by_size, writes_by_size } = &mut stats.levels;
        // Buckets for 0, 1, 2 to 3, 4 to 7 KiB and so on.
        let place = (u64::BITS - (bytes >> 10).leading_zeros()).min(31) as usize;
        if writes {
            add(&mut basic.write, is_ok);
            basic.write_bytes += bytes;
            basic.write_latency_sum_us += us;
        } else {
            add(&mut basic.read, is_ok);
            basic.read_bytes += bytes;
            basic.read_latency_sum_us += us;
        }
        if level >= 2 {
            let histogram = if writes { writes_by_size } else { reads_by_size };
            histogram[place] += 1;
        }
        let MemorySide::Gpu(gpu) = way else { return };
        let Some(gpu) = stats.by_gpu.get_mut(gpu as usize).filter(|_| level >= 3) else { return };
        if writes {
            gpu.writes += 1;
            gpu.posix_writes += 1;
            gpu.write_errors += u64::from(!is_ok);
            gpu.write_bytes += bytes;
            gpu.write_us += us;
        } else {
            gpu.reads += 1;
            gpu.posix_reads += 1;
            gpu.read_errors += u64::from(!is_ok);
            gpu.read_bytes += bytes;
            gpu.read_us += us;
        }
    });
}

/// The totals of the process.
pub fn totals() -> Totals {
    with(|stats| {
        let mut totals = stats.totals;
        if let Some(since) = totals.since {
            totals.busy += since.elapsed();
        }
        totals
    })
}

/// Averages, from the sums.
fn averaged(mut levels: Level2) -> Level2 {
    let basic = &mut levels.basic;
    let rate =
        |bytes: u64, us: u64| (u128::from(bytes) * 1_000_000).checked_div(us.into()).unwrap_or(0) as u64;
    basic.read_latency_us = basic.read_latency_sum_us.checked_div(basic.read.ok).unwrap_or(0);
    basic.write_latency_us = basic.write_latency_sum_us.checked_div(basic.write.ok).unwrap_or(0);
    basic.read_rate = rate(basic.read_bytes, basic.read_latency_sum_us);
    basic.write_rate = rate(basic.write_bytes, basic.write_latency_sum_us);
    basic.reads_per_second = rate(basic.read.ok, basic.read_latency_sum_us);
    basic.writes_per_second = rate(basic.write.ok, basic.write_latency_sum_us);
    levels
}

fn needs(least: usize) -> Result<(), Failure> {
    if level() < least { Err(Code::InvalidValue.into()) } else { Ok(()) }
}

/// Sets the statistics level: 0 to 3.
// SAFETY: the name is cuFile's, which this library replaces; as all below.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileSetStatsLevel(level: c_int) -> CuFileError {
    answer("cuFileSetStatsLevel", || {
        let level = usize::try_from(level).map_err(|_| Code::InvalidValue)?;
        with_state(|state| state.parameters.set_size(SizeParameter::Stats, level))
    })
}

/// Returns the statistics level.
///
/// # Safety
/// `out` is null or valid for the answer; as all below.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsLevel(out: *mut c_int) -> CuFileError {
    answer("cuFileGetStatsLevel", || {
        // SAFETY: the caller's promise.
        unsafe { place(out)?.write(level() as c_int) };
        Ok(())
    })
}

/// Starts counting.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsStart() -> CuFileError {
    answer("cuFileStatsStart", || {
        needs(1)?;
        with(|stats| stats.runs = true);
        Ok(())
    })
}

/// Stops counting.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsStop() -> CuFileError {
    answer("cuFileStatsStop", || {
        needs(1)?;
        with(|stats| stats.runs = false);
        Ok(())
    })
}

/// Resets the counters.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsReset() -> CuFileError {
    answer("cuFileStatsReset", || {
        with(|stats| {
            stats.levels = Level2::default();
            stats.by_gpu = [PerGpu::default(); MOST_GPUS];
        });
        Ok(())
    })
}

/// Returns the counters.
///
/// # Safety
/// As for [`cuFileGetStatsLevel`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL1(out: *mut Level1) -> CuFileError {
    answer("cuFileGetStatsL1", || {
        let out = place(out)?;
        needs(1)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(averaged(with(|stats| stats.levels)).basic) };
        Ok(())
    })
}

/// Returns counters and histograms.
///
/// # Safety
/// As for [`cuFileGetStatsLevel`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL2(out: *mut Level2) -> CuFileError {
    answer("cuFileGetStatsL2", || {
        let out = place(out)?;
        needs(2)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(averaged(with(|stats| stats.levels))) };
        Ok(())
    })
}

/// Returns everything, by GPU.
///
/// # Safety
/// As for [`cuFileGetStatsLevel`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL3(out: *mut Level3) -> CuFileError {
    answer("cuFileGetStatsL3", || {
        let out = place(out)?;
        needs(3)?;
        let devices = if_started().and_then(|machine| machine.devices().ok()).unwrap_or_default();
        let (levels, mut by_gpu) = with(|stats| (stats.levels, stats.by_gpu));
        for (gpu, device) in by_gpu.iter_mut().zip(&devices) {
            gpu.uuid = device.uuid;
        }
        let gpus = devices.len().min(MOST_GPUS) as u32;
        // SAFETY: the caller's promise.
        unsafe { out.write(Level3 { detailed: averaged(levels), gpus, by_gpu }) };
        Ok(())
    })
}
