//! Buffers in GPU memory.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use onehop_gpu::Region;
use onehop_proto::GpuAddr;
use onehop_usrbio::gpu::{AnyGpu, SharedGpuMemory};
use onehop_usrbio::mount::Mount;
use onehop_usrbio::wire::{self, Answer, Ask};
use onehop_usrbio::{Error, Id, Name, Result};

use crate::arguments::{id, mount_point, place, wrong};
use crate::handle::{self, Described, GpuBuffer, gpu_of};
use crate::host;
use crate::state::{self, HANDLES, Level, gpus, guard, tell, variable};
use crate::types::{GPU_MARK, GpuHandle, Iov, PATH_BYTES};

/// Marks a handle of ours.
const MAGIC: [u8; 8] = *b"onehopH1";

/// Whether there are GPUs.
// SAFETY: the name is 3FS's, and this library stands in for its; as all below.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_gdr_available() -> bool {
    hf3fs_gdr_device_count() > 0
}

/// How many.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_gdr_device_count() -> c_int {
    guard("hf3fs_gdr_device_count", || Ok(gpus().count() as c_int)).max(0)
}

/// Tells the daemon of memory.
fn register(mount: &Arc<Mount>, name: Name, memory: SharedGpuMemory, wrapped: bool) -> Result<GpuBuffer> {
    let device = name.gpu.ok_or_else(|| wrong("a buffer in GPU memory has a GPU"))?;
    let ask = Ask::Register { id: name.id, device, block: name.block, offer: memory.offer()? };
    match ask_daemon(mount, ask)? {
        Answer::Registered { secret } => Ok(GpuBuffer {
            memory,
            name,
            mount: mount.clone(),
            device: device as c_int,
            secret,
            wrapped,
            own: AtomicBool::new(true),
        }),
        _ => Err(Error::Broken("the daemon gave another answer than to what it was asked".into())),
    }
}

fn ask_daemon(mount: &Mount, ask: Ask) -> Result<Answer> {
    let socket = mount.socket().ok_or_else(|| Error::NotPossible {
        what: "a buffer in GPU memory",
        why: format!(
            "the daemon of {} takes none; use host memory (hf3fs_iovcreate), or mount by `onehop mount`",
            mount.path().display()
        ),
    })?;
    wire::ask(&socket, ask)
}

fn name_of(id: Id, block_size: usize, device: c_int) -> Result<Name> {
    let gpu =
        u32::try_from(device).map_err(|_| Error::NoDevice { device, why: "numbers begin with 0".into() })?;
    Ok(Name { gpu: Some(gpu), ..Name::buffer(id, block_size as u64) })
}

/// Fills in the caller's structure.
///
/// # Safety
/// `iov` is a place for one.
unsafe fn fill(iov: *mut Iov, copy: &[c_char; PATH_BYTES], gpu: GpuBuffer, size: usize, block_size: usize) {
    let base = gpu.memory.region().addr().0 as *mut u8;
    let described = Described { base, id: gpu.name.id, size, block_size, numa: GPU_MARK };
    // SAFETY: the caller's promise.
    unsafe { handle::fill(iov, HANDLES.add(gpu), copy, &described) };
}

/// Makes a buffer of the GPU's memory.
///
/// # Safety
/// `iov` is null or a place for a buffer, the mount point a string.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovcreate_gpu(
    iov: *mut Iov,
    mount_at: *const c_char,
    size: usize,
    block_size: usize,
    device: c_int,
) -> c_int {
    guard("hf3fs_iovcreate_gpu", || {
        let place = place(iov)?;
        // SAFETY: the caller's promise.
        let (point, copy) = unsafe { mount_point(mount_at) }?;
        if size == 0 || block_size > size {
            return Err(wrong(format!("a buffer of {size} bytes in blocks of {block_size}")));
        }
        let made = (|| {
            let mount = state::mount(point)?;
            let memory = SharedGpuMemory::create(&gpus().open(device)?, size)?;
            register(&mount, name_of(Id::random()?, block_size, device)?, memory, false)
        })();
        match made {
            Ok(gpu) => {
                // SAFETY: as above.
                unsafe { fill(place, &copy, gpu, size, block_size) };
                Ok(0)
            }
            Err(error) if may_fall_back() => {
                tell(Level::Warning, &format!("HF3FS_GDR_FALLBACK: host memory instead of a GPU's: {error}"));
                // SAFETY: as above.
                unsafe { host::create(iov, mount_at, size, block_size, -1) }
            }
            Err(error) => Err(error),
        }
    })
}

/// Only who asks for it gets host memory where GPU memory was wanted.
fn may_fall_back() -> bool {
    matches!(variable("HF3FS_GDR_FALLBACK").as_deref(), Some("host" | "auto"))
}

/// Opens a buffer of the same user.
///
/// # Safety
/// As for [`hf3fs_iovcreate_gpu`]; the id has sixteen bytes.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovopen_gpu(
    iov: *mut Iov,
    id_bytes: *const u8,
    mount_at: *const c_char,
    size: usize,
    block_size: usize,
    device: c_int,
) -> c_int {
    guard("hf3fs_iovopen_gpu", || {
        let iov = place(iov)?;
        // SAFETY: the caller's promise.
        let ((point, copy), id) = unsafe { (mount_point(mount_at)?, id(id_bytes)?) };
        let mount = state::mount(point)?;
        gpus().open(device)?;
        let gpu = accept(&mount, Ask::Open { id }, Name::buffer(id, block_size as u64))?;
        if gpu.memory.region().len() < size || size == 0 {
            let have = gpu.memory.region().len();
            return Err(wrong(format!("the buffer has {have} bytes, not {size}")));
        }
        // SAFETY: as above.
        unsafe { fill(iov, &copy, gpu, size, block_size) };
        Ok(0)
    })
}

/// Has the daemon lend a buffer's memory. It is this process's to take back if it got an id of its own.
fn accept(mount: &Arc<Mount>, ask: Ask, name: Name) -> Result<GpuBuffer> {
    let own = matches!(ask, Ask::Import { .. });
    let Answer::Memory { secret, device: theirs, offer } = ask_daemon(mount, ask)? else {
        return Err(Error::Broken("the daemon gave another answer than to what it was asked".into()));
    };
    let name = Name { gpu: Some(theirs), ..name };
    let accepted = gpus().accept(&offer).inspect_err(|_| {
        if own {
            // Of no use to anybody, and the daemon's until this process ends.
            let _ = mount.withdraw(&name);
        }
    });
    let (device, region) = accepted?;
    let number = number_of(&device);
    let memory = SharedGpuMemory::imported(&device, region, offer);
    let own = AtomicBool::new(own);
    Ok(GpuBuffer { memory, name, mount: mount.clone(), device: number, secret, wrapped: false, own })
}

fn number_of(device: &AnyGpu) -> c_int {
    match device {
        AnyGpu::Cuda(gpu) => gpu.device().ordinal as c_int,
        AnyGpu::Emulated(_) => 0,
    }
}

/// Makes a buffer of memory that the program has.
///
/// # Safety
/// As for [`hf3fs_iovopen_gpu`]; the memory is not freed while the daemon reads or writes it or a call of this library uses it,
/// nor after a call with it has failed before the GPU has ended its work.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovwrap_gpu(
    iov: *mut Iov,
    at: *mut c_void,
    id_bytes: *const u8,
    mount_at: *const c_char,
    size: usize,
    block_size: usize,
    device: c_int,
) -> c_int {
    guard("hf3fs_iovwrap_gpu", || {
        let iov = place(iov)?;
        // SAFETY: the caller's promise.
        let ((point, copy), id) = unsafe { (mount_point(mount_at)?, id(id_bytes)?) };
        if at.is_null() || size == 0 || block_size > size {
            return Err(wrong(format!("a buffer of {size} bytes in blocks of {block_size} at {at:p}")));
        }
        let (mount, gpu) = (state::mount(point)?, gpus().open(device)?);
        // SAFETY: as above.
        let region = unsafe { region_at(&gpu, GpuAddr(at as u64), size) }?;
        let memory = SharedGpuMemory::of(&gpu, region)?;
        let buffer = register(&mount, name_of(id, block_size, device)?, memory, true)?;
        // SAFETY: as above.
        unsafe { fill(iov, &copy, buffer, size, block_size) };
        Ok(0)
    })
}

/// # Safety
/// As for [`CudaGpu::borrow`](onehop_gpu::cuda::CudaGpu::borrow), without an owner.
unsafe fn region_at(device: &AnyGpu, at: GpuAddr, size: usize) -> Result<Region> {
    match device {
        AnyGpu::Emulated(gpu) => gpu.at(at, size),
        // SAFETY: the caller's promise.
        AnyGpu::Cuda(gpu) => unsafe { gpu.borrow(at, size, ()) }.map_err(|error| match error {
            onehop_gpu::Error::Driver { .. } | onehop_gpu::Error::Memory(_) => wrong(error.to_string()),
            other => other.into(),
        }),
    }
}

/// Takes a buffer from the daemon.
///
/// # Safety
/// `iov` is null or a structure; as for all that follow.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovunlink_gpu(iov: *mut Iov) {
    // SAFETY: the caller's promise.
    unsafe { host::hf3fs_iovunlink(iov) };
}

/// Gives a buffer back.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`]; nobody uses it any more.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovdestroy_gpu(iov: *mut Iov) {
    // SAFETY: the caller's promise.
    unsafe { host::hf3fs_iovdestroy(iov) };
}

/// Whether a buffer is GPU memory.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iov_is_gpu(iov: *const Iov) -> bool {
    // SAFETY: the caller's promise.
    unsafe { gpu_of(iov) }.is_some()
}

/// Of which GPU; -1 for none.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iov_gpu_device(iov: *const Iov) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { gpu_of(iov) }.map_or(-1, |gpu| gpu.device)
}

/// # Safety
/// As for [`hf3fs_iovunlink_gpu`].
unsafe fn gpu_or_wrong(iov: *const Iov) -> Result<Arc<GpuBuffer>> {
    // SAFETY: the caller's promise.
    unsafe { gpu_of(iov) }.ok_or_else(|| wrong("this buffer is not in GPU memory"))
}

/// Makes what one side wrote ready for the other.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovsync_gpu(iov: *const Iov, direction: c_int) -> c_int {
    guard("hf3fs_iovsync_gpu", || {
        // SAFETY: the caller's promise.
        let gpu = unsafe { gpu_or_wrong(iov) }?;
        if direction != 0 && direction != 1 {
            return Err(wrong(format!("the direction is 0 or 1, not {direction}")));
        }
        gpu.memory.sync(direction == 0)?;
        Ok(0)
    })
}

/// Names a buffer to another program.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`]; `out` is null or a place for a handle.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iov_export_gpu(iov: *const Iov, out: *mut GpuHandle) -> c_int {
    guard("hf3fs_iov_export_gpu", || {
        let out = place(out)?;
        // SAFETY: the caller's promise.
        let gpu = unsafe { gpu_or_wrong(iov) }?;
        gpu.check_current()?;
        let mut data = [0; 80];
        data[..8].copy_from_slice(&MAGIC);
        data[8..24].copy_from_slice(&gpu.name.id.0);
        data[24..40].copy_from_slice(&gpu.secret);
        // SAFETY: as above.
        unsafe { out.write(GpuHandle { data }) };
        Ok(0)
    })
}

/// Makes a buffer of what another program named.
///
/// # Safety
/// `iov` and `from` are null, or a place for a buffer and a handle; the mount point is a string.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iov_import_gpu(
    iov: *mut Iov,
    from: *const GpuHandle,
    mount_at: *const c_char,
) -> c_int {
    guard("hf3fs_iov_import_gpu", || {
        let iov = place(iov)?;
        // SAFETY: the caller's promise.
        let ((point, copy), from) = unsafe { (mount_point(mount_at)?, from.as_ref()) };
        let data = from.map(|handle| handle.data).ok_or_else(|| wrong("a handle is a null pointer"))?;
        if data[..8] != MAGIC {
            return Err(wrong("these bytes are not a handle from hf3fs_iov_export_gpu"));
        }
        let (mut named, mut secret) = ([0; 16], [0; 16]);
        named.copy_from_slice(&data[8..24]);
        secret.copy_from_slice(&data[24..40]);
        let (mount, new) = (state::mount(point)?, Id::random()?);
        let gpu = accept(&mount, Ask::Import { id: Id(named), secret, new }, Name::buffer(new, 0))?;
        let size = gpu.memory.region().len();
        // SAFETY: as above.
        unsafe { fill(iov, &copy, gpu, size, 0) };
        Ok(0)
    })
}

/// The later name of [`hf3fs_iovcreate_gpu`].
///
/// # Safety
/// The same.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovcreate_device(
    iov: *mut Iov,
    mount_at: *const c_char,
    size: usize,
    block_size: usize,
    device: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { hf3fs_iovcreate_gpu(iov, mount_at, size, block_size, device) }
}

/// The later name of [`hf3fs_iovopen_gpu`].
///
/// # Safety
/// The same.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovopen_device(
    iov: *mut Iov,
    id_bytes: *const u8,
    mount_at: *const c_char,
    size: usize,
    block_size: usize,
    device: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { hf3fs_iovopen_gpu(iov, id_bytes, mount_at, size, block_size, device) }
}

/// The later name of [`hf3fs_iovwrap_gpu`].
///
/// # Safety
/// The same.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovwrap_device(
    iov: *mut Iov,
    at: *mut c_void,
    id_bytes: *const u8,
    mount_at: *const c_char,
    size: usize,
    block_size: usize,
    device: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { hf3fs_iovwrap_gpu(iov, at, id_bytes, mount_at, size, block_size, device) }
}

/// What memory a buffer is: 0 for host memory, 1 for a GPU's.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iov_mem_type(iov: *const Iov) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(unsafe { gpu_of(iov) }.is_some())
}

/// The later name of [`hf3fs_iov_gpu_device`].
///
/// # Safety
/// The same.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iov_device_id(iov: *const Iov) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { hf3fs_iov_gpu_device(iov) }
}

/// As [`hf3fs_iovsync_gpu`], of buffers of either kind.
///
/// # Safety
/// The same.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovsync(iov: *const Iov, direction: c_int) -> c_int {
    // SAFETY: the caller's promise.
    if unsafe { iov.as_ref() }.is_some_and(|iov| iov.numa != GPU_MARK) {
        return 0;
    }
    // SAFETY: as above.
    unsafe { hf3fs_iovsync_gpu(iov, direction) }
}

/// The memory of a GPU buffer that was not freed, with a range that lies within it.
fn within(gpu: &GpuBuffer, offset: usize, bytes: usize) -> Result<&Region> {
    gpu.check_current()?;
    let region = gpu.memory.region();
    let len = region.len();
    if offset.checked_add(bytes).is_none_or(|end| end > len) {
        return Err(wrong(format!("{bytes} bytes from {offset} on are not within a buffer of {len}")));
    }
    Ok(region)
}

/// Copies out of a GPU buffer.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`]; `to` is null, or has room for the bytes, which nobody else uses during the call.
// SAFETY: the name is this project's alone, as those that follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_iov_read(
    iov: *const Iov,
    offset: usize,
    to: *mut c_void,
    bytes: usize,
) -> c_int {
    guard("onehop_iov_read", || {
        let to = place(to.cast::<u8>())?;
        // SAFETY: the caller's promise.
        let gpu = unsafe { gpu_or_wrong(iov) }?;
        let region = within(&gpu, offset, bytes)?;
        // SAFETY: the caller's promise; a region holds as many bytes. Zeroed first: what C lends may never have been written.
        let out = unsafe {
            to.write_bytes(0, bytes);
            std::slice::from_raw_parts_mut(to, bytes)
        };
        region.read(offset, out)?;
        Ok(0)
    })
}

/// Copies into one.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`]; `from` is null, or has the bytes: initialised, and written by nobody during the call.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_iov_write(
    iov: *const Iov,
    offset: usize,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    guard("onehop_iov_write", || {
        if from.is_null() {
            return Err(wrong("there is nothing to copy from"));
        }
        // SAFETY: the caller's promise.
        let gpu = unsafe { gpu_or_wrong(iov) }?;
        let region = within(&gpu, offset, bytes)?;
        // SAFETY: the caller's promise; a region holds as many bytes.
        let data = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        region.write(offset, data)?;
        Ok(0)
    })
}

/// Allocates memory of the emulated GPU.
///
/// # Safety
/// `out` is null or a place for an address.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_emulated_alloc(out: *mut *mut c_void, bytes: usize) -> c_int {
    guard("onehop_emulated_alloc", || {
        let out = place(out)?;
        let at = emulated(|gpu| gpu.alloc(bytes))?.addr().0;
        // SAFETY: the caller's promise.
        unsafe { out.write(at as *mut c_void) };
        Ok(0)
    })
}

/// Frees it.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_emulated_free(at: *mut c_void) -> c_int {
    guard("onehop_emulated_free", || {
        let freed = emulated(|gpu| Ok(gpu.free(GpuAddr(at as u64))))?;
        if freed { Ok(0) } else { Err(wrong(format!("nothing was allocated at {at:p}"))) }
    })
}

fn emulated<R>(f: impl FnOnce(&onehop_usrbio::gpu::EmulatedGpu) -> Result<R>) -> Result<R> {
    match &*gpus().open(0)? {
        AnyGpu::Emulated(gpu) => f(gpu),
        AnyGpu::Cuda(_) => Err(Error::NotPossible {
            what: "emulated memory",
            why: "GPU 0 is a real one; HF3FS_GDR_ENABLED=emulated gives an emulated GPU".into(),
        }),
    }
}
