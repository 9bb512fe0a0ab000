//! What `include/onehop/sdr.h` declares: samples of an SDR board in GPU memory, in the manner of SoapySDR's direct buffers.

use std::ffi::{CString, c_char, c_int, c_long, c_longlong, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_board::{Board, Config};
use onehop_gpu::Region;
use onehop_pci::Root;
use onehop_radio::{Format, Shape};
use onehop_sdr::{BoardName, Card, Held, Profile, Receiver, RxOptions, Session};

use crate::error::{Error, Result, guard};
use crate::handles::Gpu;
use crate::{give, object, take, text};

/// SoapySDR's answers and flags.
const STREAM_ERROR: c_int = -2;
const TIMEOUT: c_int = -1;
const OVERFLOW: c_int = -4;
const HAS_TIME: c_int = 1 << 2;
const END_ABRUPT: c_int = 1 << 3;

/// Boards that receive anything sample faster than that.
const SLOWEST: f64 = 1e5;

/// A receiver that is open.
pub struct Sdr {
    stream: Mutex<Stream>,
    buffers: Vec<Region>,
    route: CString,
    /// Samples a second, where that is known.
    rate: Option<f64>,
    // Behind the receiver, which stops it.
    _model: Option<Board>,
}

struct Stream {
    receiver: Receiver,
    /// The buffers that are lent, the oldest first, with the numbers of their first samples.
    lent: Vec<(u32, u64)>,
    /// A block before which samples were lost: that is told first.
    pending: Option<Held>,
    samples: u32,
}

impl Sdr {
    fn open(device: &str, gpu: &Gpu, format: &str, bytes: u32) -> Result<Self> {
        let format = Format::ALL.into_iter().find(|known| known.name() == format);
        let format = format.ok_or_else(|| Error::Argument("formats are ci16 and ci12".into()))?;
        let (card, model, rate) = board(device)?;
        let limits = card.profile.rx;
        let session = Session::open(card)?;
        let bytes = if bytes == 0 { limits.max_bytes } else { bytes };
        let shape = Shape::of_bytes(format, &limits, bytes).map_err(onehop_sdr::Error::from)?;
        let block = f64::from(shape.samples()) / rate.unwrap_or(SLOWEST);
        let self_test = Some(Duration::from_secs_f64(4.0 * block) + Duration::from_secs(5));
        let options = RxOptions { shape, only: None, self_test };
        let receiver = Receiver::open(&session, &gpu.gpu, &options)?;
        let (buffers, route) =
            (receiver.buffers()?, CString::new(receiver.route().name()).unwrap_or_default());
        let stream = Stream { receiver, lent: Vec::new(), pending: None, samples: shape.samples() };
        Ok(Self { stream: Mutex::new(stream), buffers, route, rate, _model: model })
    }

    fn stream(&self) -> MutexGuard<'_, Stream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn buffer(&self, handle: usize) -> Result<&Region> {
        self.buffers.get(handle).ok_or_else(|| Error::Argument(format!("there is no buffer {handle}")))
    }
}

/// What `device` names: a board, the model behind it where there is one, and its rate where that is known.
fn board(device: &str) -> Result<(Card, Option<Board>, Option<f64>)> {
    let Some(options) = device.strip_prefix("sim:") else {
        let name: BoardName = device.parse().map_err(|error: onehop_sdr::Error| {
            let device = device.escape_debug();
            Error::Argument(format!("'{device}' is no board, which is sim:usdr or a PCI address: {error}"))
        })?;
        return Ok((onehop_sdr::open(&Root::here(), name.address)?, None, name.rate));
    };
    let config = Config::parse(options).map_err(|error| Error::Argument(error.to_string()))?;
    let model = Board::new(config).map_err(|error| Error::NotPossible(error.to_string()))?;
    let config = model.config();
    let profile = Profile { rx: model.limits(), tells_time: config.tells_time, ..Profile::SIMULATED };
    let (card, rate) = (Card::new(&model.port(), model.interrupt(), profile), config.rate);
    Ok((card, Some(model), Some(rate)))
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
        if self.lent.first().is_none_or(|(oldest, _)| *oldest as usize != handle) {
            let lent: Vec<_> = self.lent.iter().map(|(handle, _)| handle).collect();
            let why = format!("buffer {handle} is not the oldest that is lent: {lent:?} are");
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
                // Without a rate there is a number, and no time.
                let nanos = sdr.rate.map(|rate| (held.first as f64 / rate * 1e9).round());
                // SAFETY: none is null, and the caller promises that they are places.
                unsafe {
                    put(handle, "handle", held.handle as usize)?;
                    put(buffs, "buffs", held.memory.addr().0 as usize as *const c_void)?;
                    put(time_ns, "time_ns", nanos.unwrap_or(0.0) as c_longlong)?;
                }
                stream.lent.push((held.handle, held.first));
                (nanos.map_or(0, |_| HAS_TIME), stream.samples as c_int)
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

/// The number of the first sample of a block that is lent.
///
/// # Safety
/// `sdr` was given by [`onehop_sdr_open`]; `first` is a place for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_first_sample(sdr: *const Sdr, handle: usize, first: *mut u64) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise.
        let stream = unsafe { object(sdr, "sdr") }?.stream();
        let found = stream.lent.iter().find(|(lent, _)| *lent as usize == handle);
        let (_, number) = found.ok_or_else(|| Error::Argument(format!("buffer {handle} is not lent")))?;
        // SAFETY: the caller's promise.
        unsafe { put(first, "first", *number) }
    })
}

/// What has come since the start, in samples.
///
/// # Safety
/// `sdr` was given by [`onehop_sdr_open`]; the others are places for numbers.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_counts(
    sdr: *const Sdr,
    delivered: *mut u64,
    lost: *mut u64,
    gaps: *mut u64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise.
        let counts = unsafe { object(sdr, "sdr") }?.stream().receiver.counts();
        // SAFETY: the caller's promise.
        unsafe {
            put(delivered, "delivered", counts.delivered)?;
            put(lost, "lost", counts.lost)?;
            put(gaps, "gaps", counts.gaps)
        }
    })
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
