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

use crate::arguments::{id, invalid, mount_point, non_null};
use crate::handle::{self, GpuBuffer, IovFields, gpu_of};
use crate::host;
use crate::state::{self, HANDLES, Level, env_var, gpus, guard, log};
use crate::types::{GPU_MARK, GpuHandle, Iov, PATH_BYTES};

/// The prefix of exported handles.
const MAGIC: [u8; 8] = *b"onehopH1";

/// Whether there are any GPUs.
// SAFETY: the symbol is 3FS's, whose library this one replaces. The same holds for the functions below.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_gdr_available() -> bool {
    hf3fs_gdr_device_count() > 0
}

/// The number of GPUs.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn hf3fs_gdr_device_count() -> c_int {
    guard("hf3fs_gdr_device_count", || Ok(gpus().count() as c_int)).max(0)
}

/// Registers memory with the daemon.
fn register(mount: &Arc<Mount>, name: Name, memory: SharedGpuMemory, wrapped: bool) -> Result<GpuBuffer> {
    let device = name.gpu.ok_or_else(|| invalid("a buffer in GPU memory has a GPU"))?;
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
        _ => Err(Error::Broken("the daemon's answer does not match the request".into())),
    }
}

fn ask_daemon(mount: &Mount, ask: Ask) -> Result<Answer> {
    let socket = mount.socket().ok_or_else(|| Error::NotPossible {
        what: "a buffer in GPU memory",
        why: format!(
            "the daemon of {} does not support it; use host memory (hf3fs_iovcreate), or mount with `onehop mount`",
            mount.path().display()
        ),
    })?;
    wire::ask(&socket, ask)
}

fn name_of(id: Id, block_size: usize, device: c_int) -> Result<Name> {
    let gpu = u32::try_from(device)
        .map_err(|_| Error::NoDevice { device, why: "the number must not be negative".into() })?;
    Ok(Name { gpu: Some(gpu), ..Name::buffer(id, block_size as u64) })
}

/// Fills in the caller's structure.
///
/// # Safety
/// `iov` is writable.
unsafe fn fill(iov: *mut Iov, copy: &[c_char; PATH_BYTES], gpu: GpuBuffer, size: usize, block_size: usize) {
    let base = gpu.memory.region().addr().0 as *mut u8;
    let fields = IovFields { base, id: gpu.name.id, size, block_size, numa: GPU_MARK };
    // SAFETY: the caller's promise.
    unsafe { handle::fill(iov, HANDLES.add(gpu), copy, &fields) };
}

/// Creates a buffer in GPU memory.
///
/// # Safety
/// `iov` is null or writable, and the mount point is a string.
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
        let out = non_null(iov)?;
        // SAFETY: the caller's promise.
        let (point, copy) = unsafe { mount_point(mount_at) }?;
        if size == 0 || block_size > size {
            return Err(invalid(format!("a buffer of {size} bytes in blocks of {block_size}")));
        }
        let made = (|| {
            let mount = state::mount(point)?;
            let memory = SharedGpuMemory::create(&gpus().open(device)?, size)?;
            register(&mount, name_of(Id::random()?, block_size, device)?, memory, false)
        })();
        match made {
            Ok(gpu) => {
                // SAFETY: as above.
                unsafe { fill(out, &copy, gpu, size, block_size) };
                Ok(0)
            }
            Err(error) if may_fall_back() => {
                log(
                    Level::Warning,
                    &format!("HF3FS_GDR_FALLBACK: using host memory instead of GPU memory: {error}"),
                );
                // SAFETY: as above.
                unsafe { host::create(iov, mount_at, size, block_size, -1) }
            }
            Err(error) => Err(error),
        }
    })
}

/// Whether the user allows host memory in place of GPU memory.
fn may_fall_back() -> bool {
    matches!(env_var("HF3FS_GDR_FALLBACK").as_deref(), Some("host" | "auto"))
}

/// Opens a buffer of the same user.
///
/// # Safety
/// As for [`hf3fs_iovcreate_gpu`]; the ID has sixteen bytes.
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
        let iov = non_null(iov)?;
        // SAFETY: the caller's promise.
        let ((point, copy), id) = unsafe { (mount_point(mount_at)?, id(id_bytes)?) };
        let mount = state::mount(point)?;
        gpus().open(device)?;
        let gpu = accept(&mount, Ask::Open { id }, Name::buffer(id, block_size as u64))?;
        if gpu.memory.region().len() < size || size == 0 {
            let have = gpu.memory.region().len();
            return Err(invalid(format!("the buffer has {have} bytes, not {size}")));
        }
        // SAFETY: as above.
        unsafe { fill(iov, &copy, gpu, size, block_size) };
        Ok(0)
    })
}

/// Gets a buffer's memory from the daemon. This process withdraws it if it was imported under an ID of its own.
fn accept(mount: &Arc<Mount>, ask: Ask, name: Name) -> Result<GpuBuffer> {
    let own = matches!(ask, Ask::Import { .. });
    let Answer::Memory { secret, device: theirs, offer } = ask_daemon(mount, ask)? else {
        return Err(Error::Broken("the daemon's answer does not match the request".into()));
    };
    let name = Name { gpu: Some(theirs), ..name };
    let accepted = gpus().accept(&offer).inspect_err(|_| {
        if own {
            // It cannot be used, but the daemon would keep it until this process ends.
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

/// Makes a buffer of memory that the program allocated.
///
/// # Safety
/// As for [`hf3fs_iovopen_gpu`]. The memory is not freed while the daemon transfers or a call of this library
/// uses it. If a call fails, it is not freed before the GPU is idle.
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
        let iov = non_null(iov)?;
        // SAFETY: the caller's promise.
        let ((point, copy), id) = unsafe { (mount_point(mount_at)?, id(id_bytes)?) };
        if at.is_null() || size == 0 || block_size > size {
            return Err(invalid(format!("a buffer of {size} bytes in blocks of {block_size} at {at:p}")));
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
            onehop_gpu::Error::Driver { .. } | onehop_gpu::Error::Memory(_) => invalid(error.to_string()),
            other => other.into(),
        }),
    }
}

/// Unregisters a buffer.
///
/// # Safety
/// `iov` is null or a structure. The same holds for the functions below.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovunlink_gpu(iov: *mut Iov) {
    // SAFETY: the caller's promise.
    unsafe { host::hf3fs_iovunlink(iov) };
}

/// Destroys a buffer.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`]; the buffer is no longer in use.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovdestroy_gpu(iov: *mut Iov) {
    // SAFETY: the caller's promise.
    unsafe { host::hf3fs_iovdestroy(iov) };
}

/// Whether a buffer is in GPU memory.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iov_is_gpu(iov: *const Iov) -> bool {
    // SAFETY: the caller's promise.
    unsafe { gpu_of(iov) }.is_some()
}

/// The buffer's GPU; -1 for host memory.
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
unsafe fn gpu_or_error(iov: *const Iov) -> Result<Arc<GpuBuffer>> {
    // SAFETY: the caller's promise.
    unsafe { gpu_of(iov) }.ok_or_else(|| invalid("this buffer is not in GPU memory"))
}

/// Makes one side's writes visible to the other.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iovsync_gpu(iov: *const Iov, direction: c_int) -> c_int {
    guard("hf3fs_iovsync_gpu", || {
        // SAFETY: the caller's promise.
        let gpu = unsafe { gpu_or_error(iov) }?;
        if direction != 0 && direction != 1 {
            return Err(invalid(format!("the direction is 0 or 1, not {direction}")));
        }
        gpu.memory.sync(direction == 0)?;
        Ok(0)
    })
}

/// Exports a buffer to another program.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`]; `out` is null or writable.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iov_export_gpu(iov: *const Iov, out: *mut GpuHandle) -> c_int {
    guard("hf3fs_iov_export_gpu", || {
        let out = non_null(out)?;
        // SAFETY: the caller's promise.
        let gpu = unsafe { gpu_or_error(iov) }?;
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

/// Imports a buffer that another program exported.
///
/// # Safety
/// `iov` is null or writable, `from` is null or a handle, and the mount point is a string.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iov_import_gpu(
    iov: *mut Iov,
    from: *const GpuHandle,
    mount_at: *const c_char,
) -> c_int {
    guard("hf3fs_iov_import_gpu", || {
        let iov = non_null(iov)?;
        // SAFETY: the caller's promise.
        let ((point, copy), from) = unsafe { (mount_point(mount_at)?, from.as_ref()) };
        let data = from.map(|handle| handle.data).ok_or_else(|| invalid("a handle is a null pointer"))?;
        if data[..8] != MAGIC {
            return Err(invalid("these bytes are not a handle from hf3fs_iov_export_gpu"));
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

/// The newer name of [`hf3fs_iovcreate_gpu`].
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

/// The newer name of [`hf3fs_iovopen_gpu`].
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

/// The newer name of [`hf3fs_iovwrap_gpu`].
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

/// The memory type of a buffer: 0 for host memory, 1 for GPU memory.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`].
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iov_mem_type(iov: *const Iov) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(unsafe { gpu_of(iov) }.is_some())
}

/// The newer name of [`hf3fs_iov_gpu_device`].
///
/// # Safety
/// The same.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hf3fs_iov_device_id(iov: *const Iov) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { hf3fs_iov_gpu_device(iov) }
}

/// Like [`hf3fs_iovsync_gpu`], but also for host memory.
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

/// The memory of a GPU buffer that has not been freed, checked for a range.
fn within(gpu: &GpuBuffer, offset: usize, bytes: usize) -> Result<&Region> {
    gpu.check_current()?;
    let region = gpu.memory.region();
    let len = region.len();
    if offset.checked_add(bytes).is_none_or(|end| end > len) {
        return Err(invalid(format!("{bytes} bytes at offset {offset} exceed a buffer of {len} bytes")));
    }
    Ok(region)
}

/// Copies bytes out of a GPU buffer.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`]; `to` is null, or has room for the bytes, and nothing else uses that memory
/// during the call.
// SAFETY: the symbol is used by this project only. The same holds for the functions below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_iov_read(
    iov: *const Iov,
    offset: usize,
    to: *mut c_void,
    bytes: usize,
) -> c_int {
    guard("onehop_iov_read", || {
        let to = non_null(to.cast::<u8>())?;
        // SAFETY: the caller's promise.
        let gpu = unsafe { gpu_or_error(iov) }?;
        let region = within(&gpu, offset, bytes)?;
        // SAFETY: the caller's promise. Zeroed first, because memory from C may be uninitialised.
        let out = unsafe {
            to.write_bytes(0, bytes);
            std::slice::from_raw_parts_mut(to, bytes)
        };
        region.read(offset, out)?;
        Ok(0)
    })
}

/// Copies bytes into a GPU buffer.
///
/// # Safety
/// As for [`hf3fs_iovunlink_gpu`]; `from` is null, or points to initialised bytes that nothing writes during the call.
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
            return Err(invalid("the source is a null pointer"));
        }
        // SAFETY: the caller's promise.
        let gpu = unsafe { gpu_or_error(iov) }?;
        let region = within(&gpu, offset, bytes)?;
        // SAFETY: the caller's promise.
        let data = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        region.write(offset, data)?;
        Ok(0)
    })
}

/// Allocates memory of the emulated GPU.
///
/// # Safety
/// `out` is null or writable.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn onehop_emulated_alloc(out: *mut *mut c_void, bytes: usize) -> c_int {
    guard("onehop_emulated_alloc", || {
        let out = non_null(out)?;
        let at = emulated(|gpu| gpu.alloc(bytes))?.addr().0;
        // SAFETY: the caller's promise.
        unsafe { out.write(at as *mut c_void) };
        Ok(0)
    })
}

/// Frees memory of the emulated GPU.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn onehop_emulated_free(at: *mut c_void) -> c_int {
    guard("onehop_emulated_free", || {
        let freed = emulated(|gpu| Ok(gpu.free(GpuAddr(at as u64))))?;
        if freed { Ok(0) } else { Err(invalid(format!("nothing was allocated at {at:p}"))) }
    })
}

fn emulated<R>(f: impl FnOnce(&onehop_usrbio::gpu::EmulatedGpu) -> Result<R>) -> Result<R> {
    match &*gpus().open(0)? {
        AnyGpu::Emulated(gpu) => f(gpu),
        AnyGpu::Cuda(_) => Err(Error::NotPossible {
            what: "emulated memory",
            why: "GPU 0 is a real GPU; HF3FS_GDR_ENABLED=emulated selects the emulated one".into(),
        }),
    }
}
