//! What `include/onehop/sdr.h` declares: samples of an SDR board in GPU memory, in the manner of SoapySDR's direct buffers.

use std::collections::VecDeque;
use std::ffi::{CString, c_char, c_int, c_long, c_longlong, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_board::{Board, BoardConfig};
use onehop_gpu::Region;
use onehop_os::Deadline;
use onehop_pci::Root;
use onehop_radio::{Format, Shape};
use onehop_sdr::{BoardName, Card, DetachedBlock, Profile, Receiver, RxOptions, Session};

use crate::error::{Error, Result, guard, guard_or};
use crate::handles::Gpu;
use crate::objects::{close, object};
use crate::{store_handle, text};

/// SoapySDR's return codes and flags.
const STREAM_ERROR: c_int = -2;
const TIMEOUT: c_int = -1;
const OVERFLOW: c_int = -4;
const HAS_TIME: c_int = 1 << 2;
const END_ABRUPT: c_int = 1 << 3;
/// The first of the flags that SoapySDR leaves to drivers.
const MISSING: c_int = 1 << 16;

/// How soon a waiting thread notices that another has stopped the stream.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Every real board samples faster than this.
const SLOWEST: f64 = 1e5;

/// Consecutive samples of a block.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SdrExtent {
    first: u64,
    at: u32,
    samples: u32,
}

/// An open receiver.
pub struct Sdr {
    stream: Mutex<SampleStream>,
    session: Arc<Session>,
    buffers: Vec<Region>,
    route: CString,
    /// Samples per second, if known.
    rate: Option<f64>,
    // Dropped after the receiver, which stops it.
    _model: Option<Board>,
}

struct SampleStream {
    receiver: Receiver,
    /// The blocks that the caller holds, oldest first.
    held_blocks: VecDeque<DetachedBlock>,
    /// A block preceded by lost samples: the loss is reported first.
    pending: Option<DetachedBlock>,
    flowing: bool,
}

/// The result of an acquisition.
enum Acquired {
    Block(DetachedBlock),
    /// Samples were lost before the next block.
    Overflow,
    Timeout,
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
        let stream = Mutex::new(SampleStream {
            receiver,
            held_blocks: VecDeque::new(),
            pending: None,
            flowing: false,
        });
        Ok(Self { stream, session, buffers, route, rate, _model: model })
    }

    /// The next block, or the loss before it. Other threads can use the receiver meanwhile.
    fn next(&self, limit: Duration) -> Result<Acquired> {
        let deadline = Deadline::after(limit);
        loop {
            let mut stream = self.stream();
            if let Some(answer) = stream.next()? {
                return Ok(answer);
            }
            // With every buffer held, none can arrive.
            if !stream.flowing || stream.held_blocks.len() >= self.buffers.len() || deadline.passed() {
                return Ok(Acquired::Timeout);
            }
            drop(stream);
            self.session.wait_filled(deadline.left().min(POLL_INTERVAL))?;
        }
    }

    fn stream(&self) -> MutexGuard<'_, SampleStream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn buffer(&self, handle: usize) -> Result<&Region> {
        self.buffers.get(handle).ok_or_else(|| Error::Argument(format!("there is no buffer {handle}")))
    }
}

/// The board that `device` names, its simulation if there is one, and its rate if known.
fn board(device: &str) -> Result<(Card, Option<Board>, Option<f64>)> {
    let Some(options) = device.strip_prefix("sim:") else {
        let name: BoardName = device.parse().map_err(|error: onehop_sdr::Error| {
            let device = device.escape_debug();
            Error::Argument(format!("'{device}' is not an SDR board (sim:usdr or a PCI address): {error}"))
        })?;
        return Ok((onehop_sdr::open(&Root::here(), name.address)?, None, name.rate));
    };
    let config = BoardConfig::parse(options).map_err(|error| Error::Argument(error.to_string()))?;
    let model = Board::new(config).map_err(|error| Error::NotPossible(error.to_string()))?;
    let config = model.config();
    let (rx, tx) = (model.limits(), model.tx_limits());
    let profile = Profile { rx, tx, reports_time: config.reports_time, ..Profile::SIMULATED };
    let (card, rate) = (Card::new(&model.port(), model.interrupt(), profile), config.rate);
    Ok((card, Some(model), Some(rate)))
}

impl SampleStream {
    fn start(&mut self) -> Result<()> {
        self.held_blocks.clear();
        (self.pending, self.flowing) = (None, false);
        self.receiver.start()?;
        self.flowing = true;
        Ok(())
    }

    fn stop(&mut self) -> Result<()> {
        self.flowing = false;
        Ok(self.receiver.stop()?)
    }

    /// The next block or the loss before it, if one is ready.
    fn next(&mut self) -> Result<Option<Acquired>> {
        let held = match self.pending.take() {
            Some(held) => held,
            None => {
                let Some(block) = self.receiver.acquire(Duration::ZERO)? else { return Ok(None) };
                let held = block.hold();
                if held.lost > 0 {
                    self.pending = Some(held);
                    return Ok(Some(Acquired::Overflow));
                }
                held
            }
        };
        self.held_blocks.push_back(held.clone());
        Ok(Some(Acquired::Block(held)))
    }

    /// A block that the caller holds.
    fn held(&self, handle: usize) -> Result<&DetachedBlock> {
        let found = self.held_blocks.iter().find(|held| held.handle as usize == handle);
        found.ok_or_else(|| Error::Argument(format!("buffer {handle} is not acquired")))
    }

    fn release(&mut self, handle: usize) -> Result<()> {
        if self.held_blocks.front().is_none_or(|oldest| oldest.handle as usize != handle) {
            let held: Vec<_> = self.held_blocks.iter().map(|held| held.handle).collect();
            let why = format!("buffer {handle} is not the oldest that is acquired: {held:?} are");
            return Err(Error::Argument(why));
        }
        self.held_blocks.pop_front();
        self.receiver.release();
        Ok(())
    }
}

/// The number of the first sample that arrived of a block.
fn first_there(held: &DetachedBlock) -> u64 {
    held.first + held.extents().next().map_or(0, |extent| u64::from(extent.first))
}

/// Opens a receiver.
///
/// # Safety
/// `device` and `format` are null or strings, `sdr` is null or a place for a pointer.
// SAFETY: the name is unique to this project, as all below.
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
        store_handle(sdr, "sdr", || {
            let (device, format) = (text(device, "device")?, text(format, "format")?);
            Sdr::open(device, &*object(gpu, "gpu")?, format, buffer_bytes)
        })
    }
}

/// The samples' route.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_sdr_route(sdr: *const Sdr) -> *const c_char {
    guard_or(c"".as_ptr(), || Ok(object(sdr, "sdr")?.route.as_ptr()))
}

/// Number of buffers for blocks.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_sdr_num_direct_access_buffers(sdr: *const Sdr) -> usize {
    guard_or(0, || Ok(object(sdr, "sdr")?.buffers.len()))
}

/// A buffer's GPU address.
///
/// # Safety
/// `buffs` is null, or a place for a pointer.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_direct_access_buffer_addrs(
    sdr: *const Sdr,
    handle: usize,
    buffs: *mut *mut c_void,
) -> c_int {
    guard(|| {
        let sdr = object(sdr, "sdr")?;
        let addr = sdr.buffer(handle)?.addr().0 as usize as *mut c_void;
        // SAFETY: the caller's promise.
        unsafe { put(buffs, "buffs", addr) }
    })
}

/// Starts the stream.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_sdr_activate(sdr: *const Sdr) -> c_int {
    guard(|| object(sdr, "sdr")?.stream().start())
}

/// Stops the stream.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_sdr_deactivate(sdr: *const Sdr) -> c_int {
    guard(|| object(sdr, "sdr")?.stream().stop())
}

/// The next block of samples, in GPU memory.
///
/// # Safety
/// All but `sdr` are null, or places for what their names say.
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
        let sdr = object(sdr, "sdr")?;
        if handle.is_null() || buffs.is_null() || flags.is_null() || time_ns.is_null() {
            return Err(Error::Null("handle, buffs, flags or time_ns"));
        }
        let limit = Duration::from_micros(timeout_us.try_into().unwrap_or(0));
        let (flag, count) = match sdr.next(limit)? {
            Acquired::Block(held) => {
                let first = first_there(&held);
                // Without a rate, the time is unknown.
                let nanos = sdr.rate.map(|rate| (first as f64 / rate * 1e9).round());
                // SAFETY: none is null, and the caller promises that they are valid.
                unsafe {
                    put(handle, "handle", held.handle as usize)?;
                    put(buffs, "buffs", held.memory.addr().0 as usize as *const c_void)?;
                    put(time_ns, "time_ns", nanos.unwrap_or(0.0) as c_longlong)?;
                }
                let missing = if held.missing > 0 { MISSING } else { 0 };
                (missing | nanos.map_or(0, |_| HAS_TIME), held.extents().samples() as c_int)
            }
            Acquired::Overflow => (END_ABRUPT, OVERFLOW),
            Acquired::Timeout => (0, TIMEOUT),
        };
        // SAFETY: as above.
        unsafe { put(flags, "flags", flag) }?;
        answer = count;
        Ok(())
    });
    answer
}

/// Releases the oldest block that the caller holds.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_sdr_release_read_buffer(sdr: *const Sdr, handle: usize) -> c_int {
    guard(|| object(sdr, "sdr")?.stream().release(handle))
}

/// The number of the first sample of a held block.
///
/// # Safety
/// `first` is null, or a place for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_first_sample(sdr: *const Sdr, handle: usize, first: *mut u64) -> c_int {
    guard(|| {
        let sdr = object(sdr, "sdr")?;
        let number = first_there(sdr.stream().held(handle)?);
        // SAFETY: the caller's promise.
        unsafe { put(first, "first", number) }
    })
}

/// The samples that arrived of a held block.
///
/// # Safety
/// `extents` has room for so many, and may be null only for zero; `count` is null, or a place for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_extents(
    sdr: *const Sdr,
    handle: usize,
    extents: *mut SdrExtent,
    room: usize,
    count: *mut usize,
) -> c_int {
    guard(|| {
        let sdr = object(sdr, "sdr")?;
        let stream = sdr.stream();
        let held = stream.held(handle)?;
        if room > 0 && extents.is_null() {
            return Err(Error::Null("extents"));
        }
        for (n, extent) in held.extents().take(room).enumerate() {
            let first = held.first + u64::from(extent.first);
            let extent = SdrExtent { first, at: extent.at, samples: extent.samples };
            // SAFETY: not null, and `n` is below `room`, for which the caller has places.
            unsafe { extents.add(n).write(extent) };
        }
        // SAFETY: the caller's promise.
        unsafe { put(count, "count", held.extents().count()) }
    })
}

/// Samples received and lost since the start.
///
/// # Safety
/// All but `sdr` are null, or places for numbers.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_counts(
    sdr: *const Sdr,
    delivered: *mut u64,
    lost: *mut u64,
    gaps: *mut u64,
) -> c_int {
    guard(|| {
        let counts = object(sdr, "sdr")?.stream().receiver.counts();
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
/// `to` is null, or has room for so many bytes.
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
        let sdr = object(sdr, "sdr")?;
        let buffer = sdr.buffer(handle)?;
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

/// Stops the board and closes a receiver. A call of another thread that waits for samples ends, and drops the receiver.
///
/// # Safety
/// No kernel uses its buffers any more.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_sdr_close(sdr: *mut Sdr) {
    guard(|| match close(sdr, "sdr")? {
        Some(sdr) => sdr.stream().stop(),
        None => Ok(()),
    });
}

/// Writes to a caller's pointer.
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
