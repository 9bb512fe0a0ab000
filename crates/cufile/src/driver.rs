//! The driver's calls: open, close, properties, settings.

use std::ffi::{c_char, c_int, c_long, c_void};

use onehop_gpu::cuda::Nvml;

use crate::config;
use crate::error::{Code, Failure};
use crate::machine::machine;
use crate::parameters::{Bool, SizeParameter};
use crate::report;
use crate::state::{State, answer, run, with_state};
use crate::types::{CuFileError, DriverProperties};

/// The version of these structures: 1000 per major version, 10 per minor version.
const VERSION: c_int = 1170;
/// Features: dynamic routing, batches, streams, parallel I/O.
const FEATURES: u32 = 0b1111;
/// Control flags, by their bits.
const POLL: u32 = 1 << 0;
const ALLOW_COMPAT: u32 = 1 << 1;

/// Opens the driver for a call that needs it.
pub fn open_for_a_call() {
    if !with_state(|state| std::mem::replace(&mut state.implicit, true)) {
        machine();
        report::at_exit();
    }
}

/// Opens the driver; each open needs a close.
#[unsafe(no_mangle)]
// SAFETY: the name is cuFile's, which this library replaces; as all below.
pub extern "C" fn cuFileDriverOpen() -> CuFileError {
    answer("cuFileDriverOpen", || {
        with_state(|state| state.opens += 1);
        machine();
        report::at_exit();
        Ok(())
    })
}

/// Closes it once.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverClose() -> CuFileError {
    answer("cuFileDriverClose", || {
        with_state(|state| {
            if state.opens == 0 && !std::mem::take(&mut state.implicit) {
                return Err(Code::DriverNotInitialized.into());
            }
            state.opens = state.opens.saturating_sub(1);
            state.implicit = state.implicit && state.opens > 0;
            Ok(())
        })
    })
}

/// The later name of [`cuFileDriverClose`].
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverClose_v2() -> CuFileError {
    cuFileDriverClose()
}

/// How often the driver is open.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileUseCount() -> c_long {
    run("cuFileUseCount", || Ok(with_state(|state| state.opens as c_long))).unwrap_or(0)
}

/// Returns the driver's properties.
///
/// # Safety
/// `out` is null or valid for the properties.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetProperties(out: *mut DriverProperties) -> CuFileError {
    answer("cuFileDriverGetProperties", || {
        let out = place(out)?;
        open_for_a_call();
        let properties = with_state(|state| properties(state));
        // SAFETY: the caller's promise.
        unsafe { out.write(properties) };
        Ok(())
    })
}

fn properties(state: &State) -> DriverProperties {
    let size = |which| state.parameters.size(which);
    let word = |which| u32::try_from(size(which)).unwrap_or(u32::MAX);
    let flag = |which, bit| if state.parameters.bool(which) { bit } else { 0 };
    let (nvfs_major, nvfs_minor) = config::nvfs_version();
    DriverProperties {
        nvfs_major,
        nvfs_minor,
        poll_threshold_kb: size(SizeParameter::PollThreshold),
        max_direct_io_kb: size(SizeParameter::MaxDirectIo),
        status_flags: 0,
        control_flags: flag(Bool::Poll, POLL) | flag(Bool::AllowCompat, ALLOW_COMPAT),
        feature_flags: FEATURES,
        max_cache_kb: word(SizeParameter::MaxCache),
        per_buffer_cache_kb: word(SizeParameter::PerBufferCache),
        max_pinned_kb: word(SizeParameter::MaxPinned),
        max_batch: word(SizeParameter::Batch),
        batch_timeout_ms: word(SizeParameter::BatchTimeout),
    }
}

/// A pointer for an answer.
pub fn place<T>(at: *mut T) -> Result<*mut T, Failure> {
    if at.is_null() || !at.is_aligned() { Err(Code::InvalidValue.into()) } else { Ok(at) }
}

/// Sets a property of the open driver.
fn set(call: &str, which: SizeParameter, kb: usize) -> CuFileError {
    answer(call, || {
        open_for_a_call();
        with_state(|state| state.parameters.set_size(which, kb))
    })
}

/// Sets whether completions are polled for. Stored, without effect.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetPollMode(poll: u8, threshold_kb: usize) -> CuFileError {
    let set = set("cuFileDriverSetPollMode", SizeParameter::PollThreshold, threshold_kb);
    if set.err == 0 {
        with_state(|state| state.parameters.set_bool(Bool::Poll, poll != 0));
    }
    set
}

/// Sets the size of a direct transfer. Stored, without effect.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetMaxDirectIOSize(kb: usize) -> CuFileError {
    set("cuFileDriverSetMaxDirectIOSize", SizeParameter::MaxDirectIo, kb)
}

/// Sets the size of the cache. Stored, without effect.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetMaxCacheSize(kb: usize) -> CuFileError {
    set("cuFileDriverSetMaxCacheSize", SizeParameter::MaxCache, kb)
}

/// Sets how much GPU memory may be pinned. Stored, without effect.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetMaxPinnedMemSize(kb: usize) -> CuFileError {
    set("cuFileDriverSetMaxPinnedMemSize", SizeParameter::MaxPinned, kb)
}

/// The version of the API.
///
/// # Safety
/// `out` is null or valid for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetVersion(out: *mut c_int) -> CuFileError {
    answer("cuFileGetVersion", || {
        // SAFETY: the caller's promise.
        unsafe { place(out)?.write(VERSION) };
        Ok(())
    })
}

/// Whether transfers between devices are used: they are not.
///
/// # Safety
/// `out` is null or valid for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetP2PFlags(_which: c_int, out: *mut c_int) -> CuFileError {
    answer("cuFileDriverGetP2PFlags", || {
        // SAFETY: the caller's promise.
        unsafe { place(out)?.write(0) };
        Ok(())
    })
}

/// Transfers between devices cannot be switched on.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetP2PFlags(_which: c_int, flags: c_int) -> CuFileError {
    answer("cuFileDriverSetP2PFlags", || {
        if flags == 0 { Ok(()) } else { Err(Code::PlatformNotSupported.into()) }
    })
}

/// Not supported: `onehop topo` shows how devices are connected.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileExportPCIeTopology(_path: *const c_char) -> CuFileError {
    answer("cuFileExportPCIeTopology", || Err(Code::PlatformNotSupported.into()))
}

/// The size of a GPU's BAR 1 in KiB.
///
/// # Safety
/// `out` is null or valid for a size.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetBARSizeInKB(gpu: c_int, out: *mut usize) -> CuFileError {
    answer("cuFileGetBARSizeInKB", || {
        let out = place(out)?;
        let gpu = usize::try_from(gpu).map_err(|_| Code::InvalidValue)?;
        let device = machine().devices()?.into_iter().nth(gpu).ok_or(Code::InvalidValue)?;
        let kb = bar_bytes(&device.pci).ok_or(Code::PlatformNotSupported)? >> 10;
        // SAFETY: the caller's promise.
        unsafe { out.write(kb as usize) };
        Ok(())
    })
}

/// As NVIDIA's management library reports it; otherwise as sysfs does.
fn bar_bytes(pci: &str) -> Option<u64> {
    if let Ok(bytes) = Nvml::load().and_then(|nvml| nvml.bar_bytes(pci)) {
        return Some(bytes);
    }
    let place = format!("/sys/bus/pci/devices/{}/resource", pci.to_ascii_lowercase());
    second_bar(&std::fs::read_to_string(place).ok()?)
}

/// The size of a device's second memory range, as sysfs lists it: the first six lines are BARs, and a 64-bit one leaves
/// the next line empty.
fn second_bar(listed: &str) -> Option<u64> {
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let bytes = |line: &str| {
        let mut words = line.split_whitespace();
        let (start, end) = (number(words.next()?)?, number(words.next()?)?);
        (end > start).then(|| end - start + 1)
    };
    listed.lines().take(6).filter_map(bytes).nth(1)
}

/// Registers a stream. Operations may also use other streams; the flags say which of their words are fixed.
///
/// # Safety
/// The stream has not been destroyed, or is one of CUDA's numbers for default streams.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileStreamRegister(stream: *mut c_void, flags: u32) -> CuFileError {
    // SAFETY: the caller's promise.
    unsafe { crate::async_io::register(stream, flags) }
}

/// Deregisters a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStreamDeregister(stream: *mut c_void) -> CuFileError {
    crate::async_io::deregister(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_bar_is_behind_an_empty_line_where_the_first_has_64_bits() {
        let line = |start: u64, bytes: u64| match bytes {
            0 => "0x0000000000000000 0x0000000000000000 0x0000000000000000\n".to_owned(),
            _ => format!("0x{start:016x} 0x{:016x} 0x000000000014220c\n", start + bytes - 1),
        };
        let list = |bars: &[u64]| bars.iter().map(|bytes| line(1 << 40, *bytes)).collect::<String>();
        assert_eq!(second_bar(&list(&[16 << 20, 0, 128 << 30, 0, 32 << 20, 0, 1 << 19])), Some(128 << 30));
        assert_eq!(second_bar(&list(&[16 << 20, 64 << 30, 0, 32 << 20, 0, 128])), Some(64 << 30));
        // The seventh is a ROM.
        assert_eq!(second_bar(&list(&[16 << 20, 0, 0, 0, 0, 0, 1 << 19])), None);
        assert_eq!(second_bar("0x0 zero\n"), None);
    }
}
