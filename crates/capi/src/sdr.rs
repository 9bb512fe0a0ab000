//! What `include/onehop/sdr.h` declares: samples of an SDR board in GPU memory, in the manner of SoapySDR's direct buffers.

use std::ffi::{CString, c_char, c_int, c_long, c_longlong, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_board::{Board, Config};
use onehop_gpu::Region;
use onehop_radio::{Format, Shape};
use onehop_sdr::{Card, Held, Profile, Receiver, RxOptions, Session};

use crate::error::{Error, Result, guard};
use crate::handles::Gpu;
use crate::{give, object, take, text};

/// SoapySDR's answers and flags.
const STREAM_ERROR: c_int = -2;
const TIMEOUT: c_int = -1;
const OVERFLOW: c_int = -4;
const HAS_TIME: c_int = 1 << 2;
const END_ABRUPT: c_int = 1 << 3;

/// A receiver that is open.
pub struct Sdr {
    stream: Mutex<Stream>,
    buffers: Vec<Region>,
    route: CString,
    // Behind the receiver, which stops it.
    board: Board,
}

struct Stream {
    receiver: Receiver,
    /// The buffers that are lent, the oldest first.
    lent: Vec<u32>,
    /// A block before which samples were lost: that is told first.
    pending: Option<Held>,
    samples: u32,
}

impl Sdr {
    fn open(device: &str, gpu: &Gpu, format: &str, bytes: u32) -> Result<Self> {
        let Some(options) = device.strip_prefix("sim:") else {
            let why =
                format!("'{}' is no board that this build drives: it is sim:usdr", device.escape_debug());
            return Err(Error::NotPossible(why));
        };
        let config = Config::parse(options).map_err(|error| Error::Argument(error.to_string()))?;
        let format = Format::ALL.into_iter().find(|known| known.name() == format);
        let format = format.ok_or_else(|| Error::Argument("formats are ci16 and ci12".into()))?;
        let board = Board::new(config).map_err(|error| Error::NotPossible(error.to_string()))?;
        let (limits, config) = (board.limits(), board.config());
        let profile = Profile { rx: limits, tells_time: config.tells_time, ..Profile::SIMULATED };
        let session = Session::open(Card::new(&board.port(), board.interrupt(), profile))?;
        let bytes = if bytes == 0 { limits.max_bytes } else { bytes };
        let shape = Shape::of_bytes(format, &limits, bytes).map_err(onehop_sdr::Error::from)?;
        let block = f64::from(shape.samples()) / config.rate;
        let self_test = Some(Duration::from_secs_f64(4.0 * block) + Duration::from_secs(5));
        let options = RxOptions { shape, only: None, self_test };
        let receiver = Receiver::open(&session, &gpu.gpu, &options)?;
        let (buffers, route) =
            (receiver.buffers()?, CString::new(receiver.route().name()).unwrap_or_default());
        let stream = Stream { receiver, lent: Vec::new(), pending: None, samples: shape.samples() };
        Ok(Self { stream: Mutex::new(stream), buffers, route, board })
    }

    fn stream(&self) -> MutexGuard<'_, Stream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn buffer(&self, handle: usize) -> Result<&Region> {
        self.buffers.get(handle).ok_or_else(|| Error::Argument(format!("there is no buffer {handle}")))
    }
}

impl Stream {
    fn start(&mut self) -> Result<()> {
        (self.lent, self.pending) = (Vec::new(), None);
        Ok(self.receiver.start()?)
    }

    /// The next block, or that samples were lost before it, or nothing in time.
    fn next(&mut self, limit: Duration) -> Result<std::result::Result<Held, c_int>> {
        if let Some(held) = self.pending.take() {
            return Ok(Ok(held));
        }
        let Some(block) = self.receiver.acquire(limit)? else { return Ok(Err(TIMEOUT)) };
        let held = block.hold();
        if held.lost > 0 {
            self.pending = Some(held);
            return Ok(Err(OVERFLOW));
        }
        Ok(Ok(held))
    }

    fn release(&mut self, handle: usize) -> Result<()> {
        if self.lent.first().is_none_or(|first| *first as usize != handle) {
            let why = format!("buffer {handle} is not the oldest that is lent: {:?} are", self.lent);
            return Err(Error::Argument(why));
        }
        self.lent.remove(0);
        self.receiver.release();
        Ok(())
    }
}

/// Opens a receiver.
///
/// # Safety
/// `device` and `format` are strings, `gpu` was given by `onehop_gpu_open`, `sdr` is a place for a pointer.
// SAFETY: the name is this project's alone, as all below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_open(
    device: *const c_char,
    gpu: *const Gpu,
    format: *const c_char,
    buffer_bytes: u32,
    sdr: *mut *mut Sdr,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        give(sdr, "sdr", || {
            let (device, format) = (text(device, "device")?, text(format, "format")?);
            Sdr::open(device, object(gpu, "gpu")?, format, buffer_bytes)
        })
    }
}

/// The way that samples go.
///
/// # Safety
/// `sdr` is null, or was given by [`onehop_sdr_open`] and not closed.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_route(sdr: *const Sdr) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { object(sdr, "sdr") }.map_or(c"".as_ptr(), |sdr| sdr.route.as_ptr())
}

/// How many buffers blocks are lent out of.
///
/// # Safety
/// As for [`onehop_sdr_route`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_num_direct_access_buffers(sdr: *const Sdr) -> usize {
    // SAFETY: the caller's promise.
    unsafe { object(sdr, "sdr") }.map_or(0, |sdr| sdr.buffers.len())
}

/// Where a buffer lies on the GPU.
///
/// # Safety
/// `sdr` was given by [`onehop_sdr_open`]; `buffs` is a place for a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_direct_access_buffer_addrs(
    sdr: *const Sdr,
    handle: usize,
    buffs: *mut *mut c_void,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise.
        let sdr = unsafe { object(sdr, "sdr") }?;
        let addr = sdr.buffer(handle)?.addr().0 as usize as *mut c_void;
        // SAFETY: the caller's promise.
        unsafe { put(buffs, "buffs", addr) }
    })
}

/// Lets samples flow.
///
/// # Safety
/// `sdr` was given by [`onehop_sdr_open`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_activate(sdr: *const Sdr) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| unsafe { object(sdr, "sdr") }?.stream().start())
}

/// Ends the flow.
///
/// # Safety
/// `sdr` was given by [`onehop_sdr_open`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_deactivate(sdr: *const Sdr) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| Ok(unsafe { object(sdr, "sdr") }?.stream().receiver.stop()?))
}

/// The next block of samples, in GPU memory.
///
/// # Safety
/// `sdr` was given by [`onehop_sdr_open`]; the others are places for what their names say.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_acquire_read_buffer(
    sdr: *const Sdr,
    handle: *mut usize,
    buffs: *mut *const c_void,
    flags: *mut c_int,
    time_ns: *mut c_longlong,
    timeout_us: c_long,
) -> c_int {
    let mut answer = STREAM_ERROR;
    guard(|| {
        // SAFETY: the caller's promise.
        let sdr = unsafe { object(sdr, "sdr") }?;
        if handle.is_null() || buffs.is_null() || flags.is_null() || time_ns.is_null() {
            return Err(Error::Null("handle, buffs, flags or time_ns"));
        }
        let mut stream = sdr.stream();
        let limit = Duration::from_micros(timeout_us.try_into().unwrap_or(0));
        let (flag, count) = match stream.next(limit)? {
            Ok(held) => {
                let nanos = (held.first as f64 / sdr.board.config().rate * 1e9).round();
                // SAFETY: none is null, and the caller promises that they are places.
                unsafe {
                    put(handle, "handle", held.handle as usize)?;
                    put(buffs, "buffs", held.memory.addr().0 as usize as *const c_void)?;
                    put(time_ns, "time_ns", nanos as c_longlong)?;
                }
                stream.lent.push(held.handle);
                (HAS_TIME, stream.samples as c_int)
            }
            Err(OVERFLOW) => (END_ABRUPT, OVERFLOW),
            Err(other) => (0, other),
        };
        // SAFETY: as above.
        unsafe { put(flags, "flags", flag) }?;
        answer = count;
        Ok(())
    });
    answer
}

/// Gives the oldest block that is lent back.
///
/// # Safety
/// `sdr` was given by [`onehop_sdr_open`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_release_read_buffer(sdr: *const Sdr, handle: usize) -> c_int {
    // SAFETY: the caller's promise.
    guard(|| unsafe { object(sdr, "sdr") }?.stream().release(handle))
}

/// Copies bytes of a buffer out of GPU memory.
///
/// # Safety
/// `sdr` was given by [`onehop_sdr_open`]; `to` has room for so many bytes.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_copy_out(
    sdr: *const Sdr,
    handle: usize,
    offset: usize,
    to: *mut c_void,
    bytes: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise.
        let buffer = unsafe { object(sdr, "sdr") }?.buffer(handle)?;
        if to.is_null() {
            return Err(Error::Null("to"));
        }
        if offset.checked_add(bytes).is_none_or(|end| end > buffer.len()) {
            return Err(Error::Argument(format!("{bytes} bytes from {offset} on are not within a buffer")));
        }
        let mut copy = vec![0; bytes];
        buffer.read(offset, &mut copy)?;
        // SAFETY: the caller has room for so many, and `copy` is memory of our own.
        unsafe { std::ptr::copy_nonoverlapping(copy.as_ptr(), to.cast(), bytes) };
        Ok(())
    })
}

/// Closes a receiver.
///
/// # Safety
/// `sdr` is null, or was given by [`onehop_sdr_open`] and not closed.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_close(sdr: *mut Sdr) {
    guard(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { take(sdr) });
        Ok(())
    });
}

/// Writes to a place that a caller gave.
///
/// # Safety
/// Null, or a place for a value.
unsafe fn put<T>(at: *mut T, what: &'static str, value: T) -> Result<()> {
    if at.is_null() {
        return Err(Error::Null(what));
    }
    // SAFETY: the caller's promise.
    unsafe { at.write(value) };
    Ok(())
}
