//! The routes of `include/onehop/onehop.h`: loads a file of a drive's file system, or blocks, into GPU memory.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use onehop_files::Which;
use onehop_gpu::Region;
use onehop_transfer::{Chosen, FileOnDrive, Mode, Progress, TransferOutcome, TransferSetup, read_blocks};

use crate::error::{Error, Result, guard, guard_or};
use crate::handles::{Drive, Gpu};
use crate::objects::{close, object};
use crate::{store_handle, text};

/// `onehop_transfer_options.progress`.
// SAFETY: a type, not a call. It is called with the context that came with it.
type ProgressCall = unsafe extern "C" fn(*mut c_void, u64) -> c_int;

/// `struct onehop_transfer_options`: zero selects a default.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TransferOptions {
    size: u32,
    nsid: u32,
    route: *const c_char,
    queues: u32,
    threads: u32,
    depth: u32,
    timeout_ms: u32,
    verify: u32,
    partition: i32,
    progress: Option<ProgressCall>,
    context: *mut c_void,
    reserved: [u64; 4],
}

const _: () = {
    assert!(size_of::<TransferOptions>() == 88 && align_of::<TransferOptions>() == 8);
    assert!(std::mem::offset_of!(TransferOptions, route) == 8);
    assert!(std::mem::offset_of!(TransferOptions, partition) == 36);
    assert!(std::mem::offset_of!(TransferOptions, progress) == 40);
    assert!(std::mem::offset_of!(TransferOptions, reserved) == 56);
};

const WHY_BYTES: usize = 2048;

/// `struct onehop_outcome`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct OutcomeRecord {
    size: u32,
    simulated: u32,
    bytes: u64,
    read_bytes: u64,
    commands: u64,
    retries: u64,
    seconds: f64,
    route: [u8; 16],
    initiator: [u8; 8],
    verified: u32,
    why_not_better_bytes: u32,
    why_not_better: [u8; WHY_BYTES],
    reserved: [u64; 4],
}

const OUTCOME_BYTES: u32 = size_of::<OutcomeRecord>() as u32;

const _: () = {
    assert!(size_of::<OutcomeRecord>() == 2160 && align_of::<OutcomeRecord>() == 8);
    assert!(std::mem::offset_of!(OutcomeRecord, seconds) == 40);
    assert!(std::mem::offset_of!(OutcomeRecord, route) == 48);
    assert!(std::mem::offset_of!(OutcomeRecord, verified) == 72);
    assert!(std::mem::offset_of!(OutcomeRecord, why_not_better) == 80);
    assert!(std::mem::offset_of!(OutcomeRecord, reserved) == 2128);
};

const SIMULATED_DRIVE: u32 = 1;
const SIMULATED_GPU: u32 = 2;

/// Bytes of a drive in GPU memory.
pub struct Bytes(Region);

/// A C string of at most `N - 1` bytes, cut at a character boundary.
fn c_text<const N: usize>(text: &str) -> [u8; N] {
    let end = (0..=text.len().min(N - 1)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    let mut out = [0; N];
    out[..end].copy_from_slice(&text.as_bytes()[..end]);
    out
}

impl OutcomeRecord {
    fn new(went: &TransferOutcome, read_bytes: u64) -> Self {
        let flag = |part, bit| if went.simulated.contains(&part) { bit } else { 0 };
        let each = |no: &onehop_transfer::BetterRoute| format!("{}: {}\n", no.route, no.why(". "));
        let why: String = went.why_not_better.iter().map(each).collect();
        Self {
            size: OUTCOME_BYTES,
            simulated: flag("drive", SIMULATED_DRIVE) | flag("gpu", SIMULATED_GPU),
            bytes: went.bytes,
            read_bytes,
            commands: went.commands,
            retries: went.retries,
            seconds: went.seconds,
            route: c_text(went.route),
            initiator: c_text(went.initiator),
            verified: u32::from(went.verified == Some(true)),
            why_not_better_bytes: u32::try_from(why.len()).unwrap_or(u32::MAX),
            why_not_better: c_text(&why),
            reserved: [0; 4],
        }
    }
}

/// Calls the caller's function, on the caller's thread.
struct CallerProgress {
    call: Option<ProgressCall>,
    context: *mut c_void,
    cancelled: std::cell::Cell<bool>,
}

impl Progress for CallerProgress {
    fn moved(&self, bytes: u64) {
        let Some(call) = self.call else { return };
        // SAFETY: the caller's promise: a function of this type, which takes this context, and returns in this process.
        if unsafe { call(self.context, bytes) } != 0 {
            self.cancelled.set(true);
        }
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.get()
    }
}

/// The caller's options, checked.
struct TransferRequest {
    options: onehop_transfer::RouteOptions,
    nsid: u32,
    partition: Option<Which>,
    verify: bool,
    watch: CallerProgress,
}

impl TransferRequest {
    /// # Safety
    /// `at` is null, or options whose `size` is correct; their texts and their function are as the header says.
    unsafe fn read(at: *const TransferOptions) -> Result<Self> {
        let mut options = onehop_transfer::RouteOptions::default();
        let watch = |call, context| CallerProgress { call, context, cancelled: std::cell::Cell::new(false) };
        if at.is_null() {
            let watch = watch(None, std::ptr::null_mut());
            return Ok(Self { options, nsid: 1, partition: None, verify: false, watch });
        }
        // SAFETY: the caller's promise: every version of the structure begins with its size.
        let size = unsafe { at.cast::<u32>().read() };
        if (size as usize) < size_of::<TransferOptions>() {
            return Err(Error::Argument(format!("`size` of the options is {size}: set it to their sizeof")));
        }
        // SAFETY: as above, and it is as long.
        let given = unsafe { at.read() };
        let number = |what: &str, value: u32, most: u32| match value {
            0 => Ok(None),
            value if value <= most => Ok(Some(value)),
            value => Err(Error::Argument(format!("`{what}` is {value}, which is more than {most}"))),
        };
        if !given.route.is_null() {
            // SAFETY: as above.
            options.route = unsafe { text(given.route, "route") }?.parse()?;
        }
        options.queues = number("queues", given.queues, 1024)?.map(|queues| queues as u16);
        options.threads = number("threads", given.threads, 1024)?;
        options.mode = options.threads.map(|_| Mode::Shared);
        options.depth = number("depth", given.depth, 65535)?.unwrap_or(options.depth);
        let timeout = number("timeout_ms", given.timeout_ms, 3_600_000)?;
        options.timeout = timeout.map(|ms| Duration::from_millis(ms.into()));
        let partition = match given.partition {
            0 => None,
            -1 => Some(Which::Whole),
            n => Some(Which::Partition(
                u32::try_from(n).map_err(|_| Error::Argument(format!("there is no partition {n}")))?,
            )),
        };
        options.gpu_mode()?;
        let nsid = given.nsid.max(1);
        let watch = watch(given.progress, given.context);
        Ok(Self { options, nsid, partition, verify: given.verify != 0, watch })
    }
}

/// Loads bytes, and stores their handle and the outcome.
///
/// # Safety
/// `options` as for [`TransferRequest::read`]; `bytes` null or a place for a pointer; `outcome` null or a structure
/// with a correct `size`.
unsafe fn load(
    (drive, gpu): (*const Drive, *const Gpu),
    options: *const TransferOptions,
    bytes: *mut *mut Bytes,
    outcome: *mut OutcomeRecord,
    read: impl FnOnce(&TransferRequest, &TransferSetup<'_>) -> Result<(Region, OutcomeRecord)>,
) -> c_int {
    let make = || {
        // SAFETY: the caller's promise.
        if let Some(size) = unsafe { outcome.cast::<u32>().as_ref() }.filter(|size| **size < OUTCOME_BYTES) {
            return Err(Error::Argument(format!("`size` of the outcome is {size}: set it to its sizeof")));
        }
        // SAFETY: the caller's promise.
        let request = unsafe { TransferRequest::read(options) }?;
        let (drive, gpu) = (object(drive, "drive")?, object(gpu, "gpu")?);
        let chosen = Chosen { gpu: gpu.gpu.clone(), why: "as requested".into() };
        let ns = drive.drive.namespace(request.nsid)?;
        let setup = TransferSetup { drive: &drive.drive, ns, gpu: &chosen, options: &request.options };
        let (region, went) = read(&request, &setup)?;
        if !outcome.is_null() {
            // SAFETY: the caller's promise, and it is long enough.
            unsafe { outcome.write(went) };
        }
        Ok(Bytes(region))
    };
    // SAFETY: the caller's promise.
    unsafe { store_handle(bytes, "bytes", make) }
}

/// Loads a part of a file of the drive's own file system.
///
/// # Safety
/// `path` is null or a string; the others as for [`load`].
// SAFETY: the name is unique to this project, as all below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_load_file(
    drive: *const Drive,
    gpu: *const Gpu,
    path: *const c_char,
    offset: u64,
    len: u64,
    options: *const TransferOptions,
    bytes: *mut *mut Bytes,
    outcome: *mut OutcomeRecord,
) -> c_int {
    let read = |request: &TransferRequest, setup: &TransferSetup<'_>| {
        if path.is_null() {
            return Err(Error::Null("path"));
        }
        // SAFETY: the caller's promise. Names may contain any bytes.
        let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()));
        let file = FileOnDrive::by_file_system(setup.drive, setup.ns, path, request.partition)?;
        let len = if len == 0 { None } else { Some(len) };
        let mut read = file.read(setup, offset, len, &request.watch)?;
        if request.verify
            && let Some(wrong) = file.verify(&mut read, &request.watch)?
        {
            return Err(wrong.into());
        }
        Ok((read.data, OutcomeRecord::new(&read.outcome, read.read_bytes)))
    };
    // SAFETY: the caller's promise.
    unsafe { load((drive, gpu), options, bytes, outcome, read) }
}

/// Loads blocks of the drive.
///
/// # Safety
/// As for [`load`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_load_blocks(
    drive: *const Drive,
    gpu: *const Gpu,
    lba: u64,
    blocks: u64,
    options: *const TransferOptions,
    bytes: *mut *mut Bytes,
    outcome: *mut OutcomeRecord,
) -> c_int {
    let read = |request: &TransferRequest, setup: &TransferSetup<'_>| {
        if blocks == 0 {
            return Err(Error::Argument("`blocks` is 0".into()));
        }
        let mut read = read_blocks(setup, lba, blocks, &request.watch)?;
        if request.verify
            && let Some(wrong) = read.verify(setup.drive, setup.ns, &request.watch)?
        {
            return Err(wrong.into());
        }
        let read_bytes = read.outcome.bytes;
        Ok((read.data, OutcomeRecord::new(&read.outcome, read_bytes)))
    };
    // SAFETY: the caller's promise.
    unsafe { load((drive, gpu), options, bytes, outcome, read) }
}

/// The bytes' address for kernels; null if `bytes` is not an open handle.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_bytes_data(bytes: *const Bytes) -> *mut c_void {
    guard_or(std::ptr::null_mut(), || Ok(object(bytes, "bytes")?.0.addr().0 as *mut c_void))
}

/// Number of bytes; 0 if `bytes` is not an open handle.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_bytes_size(bytes: *const Bytes) -> u64 {
    guard_or(0, || Ok(object(bytes, "bytes")?.0.len() as u64))
}

/// Copies bytes out of GPU memory.
///
/// # Safety
/// `to` is null, or has room for them.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_bytes_read(
    bytes: *const Bytes,
    offset: u64,
    to: *mut c_void,
    count: usize,
) -> c_int {
    guard(|| {
        let region = &object(bytes, "bytes")?.0;
        if to.is_null() {
            return Err(Error::Null("to"));
        }
        let offset = crate::export::range_within(region, offset, count)?;
        // Zeroed first: the caller's memory may be uninitialised.
        // SAFETY: the caller's promise. `range_within` has found the bytes within a region, so their number is no more
        // than isize::MAX.
        let out = unsafe {
            to.cast::<u8>().write_bytes(0, count);
            std::slice::from_raw_parts_mut(to.cast::<u8>(), count)
        };
        Ok(region.read(offset, out)?)
    })
}

/// Frees the memory.
///
/// # Safety
/// No kernel uses it any more.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_bytes_close(bytes: *mut Bytes) {
    guard(|| close(bytes, "bytes").map(drop));
}

/// Warnings for the drive's user: a line for each missing protection, cut to `room` bytes.
///
/// # Safety
/// `to` is null, or has room for so many bytes.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_drive_warnings(drive: *const Drive, to: *mut c_char, room: usize) -> c_int {
    guard(|| {
        let lines: String = object(drive, "drive")?.warnings.iter().map(|line| format!("{line}\n")).collect();
        if to.is_null() {
            return Err(Error::Null("to"));
        }
        if room == 0 {
            return Err(Error::Argument("`room` is 0".into()));
        }
        let end = (0..=lines.len().min(room - 1)).rev().find(|end| lines.is_char_boundary(*end)).unwrap_or(0);
        // SAFETY: the caller's promise: there is room for these bytes and the zero behind them.
        unsafe {
            to.cast::<u8>().copy_from_nonoverlapping(lines.as_ptr(), end);
            to.add(end).write(0);
        }
        Ok(())
    })
}
