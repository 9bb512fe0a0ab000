//! A report of the process's transfers: a line at its end, and an answer while it runs.

use std::ffi::{c_char, c_int, c_void};
use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};

use onehop_load::engine::calls::CallBytes;
use onehop_os::file_writes::WriteSum;

use crate::audit;
use crate::error::Code;
use crate::files::{RegisteredFile, file};
use crate::machine::if_started;
use crate::state::{run, with_state};
use crate::stats::totals;

/// The process that reports at its end; 0 for none.
static REPORTS: AtomicU32 = AtomicU32::new(0);

/// Writes a line at the end of this process, if `ONEHOP_CUFILE_REPORT` asks for it.
pub fn at_exit() {
    let process = std::process::id();
    if std::env::var_os("ONEHOP_CUFILE_REPORT").is_none() || REPORTS.swap(process, Ordering::AcqRel) != 0 {
        return;
    }
    // Without memory for the handler, the report is dropped.
    let _ = onehop_os::at_exit(write_report);
}

extern "C" fn write_report() {
    // A forked child would report its parent's bytes.
    if REPORTS.load(Ordering::Acquire) != std::process::id() {
        return;
    }
    let _ = run("report", || {
        let Some(to) = std::env::var_os("ONEHOP_CUFILE_REPORT") else { return Ok(()) };
        let line = format!("onehop cufile[{}]: {}\n", std::process::id(), line());
        if to == "stderr" {
            onehop_os::write_to_stderr(line.as_bytes())?;
        } else {
            File::options().append(true).create(true).open(to)?.write_all(line.as_bytes())?;
        }
        Ok(())
    });
}

/// The route of most of the bytes read.
fn route(bytes: &CallBytes, host: u64) -> &'static str {
    let CallBytes { cached, cache_miss, direct, .. } = *bytes;
    let most = (cached + cache_miss).max(direct).max(host);
    match most {
        0 => "none",
        most if most == direct => "cpu/pinned",
        most if most == host => "host",
        _ => "cpu/cached",
    }
}

/// Why bytes did not go directly from the drive to the GPU.
const WHY: &str =
    "the file system has the drive, and the kernel lets no file be read into GPU memory directly";

fn bytes() -> CallBytes {
    let engine = if_started().and_then(|machine| machine.started_engine());
    engine.map(|engine| engine.moved()).unwrap_or_default()
}

fn write_sums() -> Vec<WriteSum> {
    with_state(|state| state.writes.clone()).sums()
}

/// The routes of writes, in words.
fn write_ways() -> String {
    let way = |sum: &WriteSum| match sum.why {
        None => format!(", {} bytes through a mapping", sum.bytes),
        Some(why) => format!(", {} bytes by pwrite because {why}", sum.bytes),
    };
    write_sums().iter().map(way).collect()
}

/// Another library of this name that the process has loaded: calls to it are none of ours.
fn other_library() -> Option<String> {
    let own = audit::own_path().and_then(|path| std::fs::canonicalize(path.to_str().ok()?).ok());
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    // A file that was replaced since has the suffix.
    let path = |line: &'_ str| Some(line[line.find('/')?..].trim_end_matches(" (deleted)").to_owned());
    let paths = maps.lines().filter_map(path);
    let mut others = paths.filter(|path| audit::is_cufile(path.as_bytes()));
    others.find(|path| std::fs::canonicalize(path).ok() != own)
}

fn line() -> String {
    let (totals, bytes) = (totals(), bytes());
    let seconds = totals.busy.as_secs_f64();
    let rate = (totals.read_bytes + totals.written_bytes) as f64 / seconds.max(1e-9) / 1e9;
    let CallBytes { cached, cache_miss, direct, written } = bytes;
    let other = other_library().map(|path| format!("; {path} is loaded, too, and its calls are not counted"));
    format!(
        "route {}; {} reads of {} bytes ({cached} out of the page cache, {cache_miss} through it, {direct} past it), \
         {} writes of {} bytes ({written} out of GPU memory{}), {} bytes of host memory, {} errors, \
         {seconds:.3} s busy, {rate:.2} GB/s; why not direct: {WHY}{}",
        route(&bytes, totals.host_bytes),
        totals.reads,
        totals.read_bytes,
        totals.writes,
        totals.written_bytes,
        write_ways(),
        totals.host_bytes,
        totals.errors,
        other.unwrap_or_default(),
    )
}

fn json(file: Option<&RegisteredFile>) -> String {
    let (totals, bytes) = (totals(), bytes());
    let CallBytes { cached, cache_miss, direct, written } = bytes;
    let writes = write_sums().into_iter().map(
        |sum| serde_json::json!({ "by": sum.by(), "why": sum.why, "writes": sum.writes, "bytes": sum.bytes }),
    );
    serde_json::json!({
        "route": route(&bytes, totals.host_bytes),
        "reads": totals.reads,
        "read_bytes": totals.read_bytes,
        "cached_bytes": cached,
        "cache_miss_bytes": cache_miss,
        "direct_bytes": direct,
        "writes": totals.writes,
        "written_bytes": totals.written_bytes,
        "gpu_written_bytes": written,
        "gpu_writes": writes.collect::<Vec<_>>(),
        "host_bytes": totals.host_bytes,
        "errors": totals.errors,
        "busy_seconds": totals.busy.as_secs_f64(),
        "why_not_better": WHY,
        "other_library": other_library(),
        "why_cached": file.and_then(|file| file.file.why_cached()),
    })
    .to_string()
}

/// Writes a JSON text with the route of this process's bytes and, given a handle, why its file is not read past the
/// page cache. Returns the text's length without its terminator; the text is cut to the room. Returns -1 for an invalid
/// handle.
///
/// # Safety
/// `out` is null or has room for `bytes` bytes.
// SAFETY: the name is unique to this project.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_cufile_route(handle: *mut c_void, out: *mut c_char, bytes: usize) -> c_int {
    let written = run("onehop_cufile_route", || {
        let file = if handle.is_null() { None } else { Some(file(handle)?) };
        let text = json(file.as_deref());
        if !out.is_null() && bytes > 0 {
            let count = text.len().min(bytes - 1);
            // SAFETY: the caller's promise: there is room for the bytes and the zero behind them.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), count);
                out.add(count).write(0);
            }
        }
        c_int::try_from(text.len()).map_err(|_| Code::Internal.into())
    });
    written.unwrap_or(-1)
}
