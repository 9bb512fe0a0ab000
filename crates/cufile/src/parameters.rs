//! The parameters that programs may set and query. Few of them affect this engine; all are stored.

use std::ffi::{CStr, c_char, c_int};

use crate::driver::place;
use crate::error::{Code, Failure};
use crate::log::level_of;
use crate::state::{answer, with_state};
use crate::types::CuFileError;

/// Numbers, in the API's order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum SizeParameter {
    Stats,
    QueueDepth,
    Threads,
    MinThreshold,
    Parallelism,
    MaxDirectIo,
    MaxCache,
    PerBufferCache,
    MaxPinned,
    Batch,
    PollThreshold,
    BatchTimeout,
}

/// Switches, in the API's order, as far as they are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Bool {
    Poll = 0,
    AllowCompat = 1,
    ForceCompat = 2,
}

/// Default, minimum and maximum of each number.
const SIZES: [(usize, usize, usize); 12] = [
    (0, 0, 3),
    (128, 1, 1 << 20),
    (4, 0, 1 << 10),
    (8192, 1, 1 << 30),
    (4, 0, 1 << 10),
    (16384, 1, 1 << 30),
    (131_072, 0, u32::MAX as usize),
    (1024, 0, u32::MAX as usize),
    (0xffff_fffc, 0, u32::MAX as usize),
    (128, 1, 256),
    (4, 0, 1 << 30),
    (5, 0, u32::MAX as usize),
];
/// Defaults of the switches: poll, allow_compat, force_compat, api_check, parallel_io, nvtx, system_memory, p2pdma, io_uring,
/// odirect, skip_topology, memops_bypass, posix_mode, fallback.
const BOOLS: [bool; 14] =
    [false, true, false, false, true, false, true, false, true, false, false, false, false, false];
/// Level, log file, log directory, RDMA transport.
const STRINGS: usize = 4;
const LEVEL: usize = 0;
/// The longest string, including its terminator.
const LONGEST: usize = libc::PATH_MAX as usize;
/// Maximum number of slab entries.
const MOST_SLABS: usize = 64;

/// See the module.
pub struct Parameters {
    sizes: [usize; SIZES.len()],
    bools: [bool; BOOLS.len()],
    strings: [String; STRINGS],
    /// Sizes and counts of the pools of host and of GPU memory.
    slabs: [Vec<(usize, usize)>; 2],
}

impl Default for Parameters {
    fn default() -> Self {
        let strings = [String::from("ERROR"), String::new(), String::new(), String::new()];
        Self { sizes: SIZES.map(|(usual, ..)| usual), bools: BOOLS, strings, slabs: Default::default() }
    }
}

impl Parameters {
    /// A number.
    pub fn size(&self, which: SizeParameter) -> usize {
        self.sizes[which as usize]
    }

    /// Sets a number.
    ///
    /// # Errors
    /// When it is not within its bounds.
    pub fn set_size(&mut self, which: SizeParameter, value: usize) -> Result<(), Failure> {
        let (_, least, most) = SIZES[which as usize];
        if value < least || value > most {
            return Err(Code::InvalidValue.into());
        }
        self.sizes[which as usize] = value;
        Ok(())
    }

    /// A switch.
    pub fn bool(&self, which: Bool) -> bool {
        self.bools[which as usize]
    }

    /// Sets a switch.
    pub fn set_bool(&mut self, which: Bool, value: bool) {
        self.bools[which as usize] = value;
    }
}

/// The number of this index.
fn size_index(which: c_int) -> Result<usize, Failure> {
    index(which, SIZES.len())
}

fn index(which: c_int, count: usize) -> Result<usize, Failure> {
    usize::try_from(which).ok().filter(|index| *index < count).ok_or_else(|| Code::InvalidValue.into())
}

/// Sets a parameter; refused once the driver is open.
fn set(call: &str, f: impl FnOnce(&mut Parameters) -> Result<(), Failure>) -> CuFileError {
    answer(call, || {
        with_state(|state| {
            if state.is_open() {
                return Err(Code::DriverAlreadyOpen.into());
            }
            f(&mut state.parameters)
        })
    })
}

/// Returns a number.
///
/// # Safety
/// `out` is null or valid for it; as all below.
// SAFETY: the name is cuFile's, which this library replaces; as all below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterSizeT(which: c_int, out: *mut usize) -> CuFileError {
    answer("cuFileGetParameterSizeT", || {
        let (out, which) = (place(out)?, size_index(which)?);
        let value = with_state(|state| state.parameters.sizes[which]);
        // SAFETY: the caller's promise.
        unsafe { out.write(value) };
        Ok(())
    })
}

/// Sets a number.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileSetParameterSizeT(which: c_int, value: usize) -> CuFileError {
    set("cuFileSetParameterSizeT", |parameters| {
        let which = size_index(which)?;
        let (_, least, most) = SIZES[which];
        if value < least || value > most {
            return Err(Code::InvalidValue.into());
        }
        parameters.sizes[which] = value;
        Ok(())
    })
}

/// Returns a switch.
///
/// # Safety
/// As for [`cuFileGetParameterSizeT`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterBool(which: c_int, out: *mut bool) -> CuFileError {
    answer("cuFileGetParameterBool", || {
        let (out, which) = (place(out)?, index(which, BOOLS.len())?);
        let value = with_state(|state| state.parameters.bools[which]);
        // SAFETY: the caller's promise.
        unsafe { out.write(value) };
        Ok(())
    })
}

/// Sets a switch.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileSetParameterBool(which: c_int, value: u8) -> CuFileError {
    set("cuFileSetParameterBool", |parameters| {
        parameters.bools[index(which, BOOLS.len())?] = value != 0;
        Ok(())
    })
}

/// Returns a string.
///
/// # Safety
/// `out` is null or has room for `bytes` bytes.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterString(
    which: c_int,
    out: *mut c_char,
    bytes: c_int,
) -> CuFileError {
    answer("cuFileGetParameterString", || {
        let (out, which) = (place(out)?, index(which, STRINGS)?);
        let text = with_state(|state| state.parameters.strings[which].clone());
        let room = usize::try_from(bytes).map_err(|_| Code::InvalidValue)?;
        if text.len() >= room {
            return Err(Code::InvalidValue.into());
        }
        // SAFETY: the caller's promise: there is room for the text and the zero behind it.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), text.len());
            out.add(text.len()).write(0);
        }
        Ok(())
    })
}

/// Sets a string.
///
/// # Safety
/// `value` is null or a string.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetParameterString(which: c_int, value: *const c_char) -> CuFileError {
    set("cuFileSetParameterString", |parameters| {
        let which = index(which, STRINGS)?;
        if value.is_null() {
            return Err(Code::InvalidValue.into());
        }
        // SAFETY: the caller's promise.
        let text = unsafe { CStr::from_ptr(value) }.to_str().map_err(|_| Code::InvalidValue)?;
        if text.is_empty() || text.len() >= LONGEST || (which == LEVEL && level_of(text).is_none()) {
            return Err(Code::InvalidValue.into());
        }
        parameters.strings[which] = text.into();
        Ok(())
    })
}

/// Returns the bounds of a number.
///
/// # Safety
/// Both are null or valid for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterMinMaxValue(
    which: c_int,
    least_out: *mut usize,
    most_out: *mut usize,
) -> CuFileError {
    answer("cuFileGetParameterMinMaxValue", || {
        let (_, least, most) = SIZES[size_index(which)?];
        let (least_out, most_out) = (place(least_out)?, place(most_out)?);
        // SAFETY: the caller's promise.
        unsafe {
            least_out.write(least);
            most_out.write(most);
        }
        Ok(())
    })
}

/// Sets the slabs of a pool.
///
/// # Safety
/// Both are null or arrays of this length.
unsafe fn set_slabs(
    call: &str,
    pool: usize,
    (sizes, counts): (*const usize, *const usize),
    entries: c_int,
) -> CuFileError {
    set(call, |parameters| {
        let entries = slab_entries(entries)?;
        let (sizes, counts) = (place(sizes.cast_mut())?, place(counts.cast_mut())?);
        // SAFETY: the caller's promise.
        let slabs: Vec<_> =
            (0..entries).map(|i| unsafe { (sizes.add(i).read(), counts.add(i).read()) }).collect();
        if slabs.iter().any(|(size, _)| *size == 0) {
            return Err(Code::InvalidValue.into());
        }
        parameters.slabs[pool] = slabs;
        Ok(())
    })
}

/// Returns the slabs of a pool.
///
/// # Safety
/// Both are null or have room for this many numbers.
unsafe fn get_slabs(
    call: &str,
    pool: usize,
    (sizes, counts): (*mut usize, *mut usize),
    entries: c_int,
) -> CuFileError {
    answer(call, || {
        let entries = slab_entries(entries)?;
        let (sizes, counts) = (place(sizes)?, place(counts)?);
        let slabs = with_state(|state| state.parameters.slabs[pool].clone());
        for i in 0..entries {
            let (size, count) = slabs.get(i).copied().unwrap_or((0, 0));
            // SAFETY: the caller's promise.
            unsafe {
                sizes.add(i).write(size);
                counts.add(i).write(count);
            }
        }
        Ok(())
    })
}

fn slab_entries(entries: c_int) -> Result<usize, Failure> {
    let entries = usize::try_from(entries).ok().filter(|entries| (1..=MOST_SLABS).contains(entries));
    entries.ok_or_else(|| Code::InvalidValue.into())
}

/// Sets the slabs of the pool of host memory. Stored, without effect.
///
/// # Safety
/// Both are null or arrays of this length; as all below.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetParameterPosixPoolSlabArray(
    sizes: *const usize,
    counts: *const usize,
    entries: c_int,
) -> CuFileError {
    // SAFETY: the caller's promise.
    unsafe { set_slabs("cuFileSetParameterPosixPoolSlabArray", 0, (sizes, counts), entries) }
}

/// Returns them.
///
/// # Safety
/// Both are null or have room for this many numbers.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterPosixPoolSlabArray(
    sizes: *mut usize,
    counts: *mut usize,
    entries: c_int,
) -> CuFileError {
    // SAFETY: the caller's promise.
    unsafe { get_slabs("cuFileGetParameterPosixPoolSlabArray", 0, (sizes, counts), entries) }
}

/// Sets the slabs of the pool of GPU memory. Stored, without effect.
///
/// # Safety
/// As for [`cuFileSetParameterPosixPoolSlabArray`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetParameterGpuBounceBufferSlabArray(
    sizes: *const usize,
    counts: *const usize,
    entries: c_int,
) -> CuFileError {
    // SAFETY: the caller's promise.
    unsafe { set_slabs("cuFileSetParameterGpuBounceBufferSlabArray", 1, (sizes, counts), entries) }
}

/// Returns them.
///
/// # Safety
/// As for [`cuFileGetParameterPosixPoolSlabArray`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterGpuBounceBufferSlabArray(
    sizes: *mut usize,
    counts: *mut usize,
    entries: c_int,
) -> CuFileError {
    // SAFETY: the caller's promise.
    unsafe { get_slabs("cuFileGetParameterGpuBounceBufferSlabArray", 1, (sizes, counts), entries) }
}
