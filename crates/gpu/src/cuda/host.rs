//! Host memory that kernels reach: our own pages, other code's mappings, and device registers.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use onehop_os::HostMem;

use super::capabilities::Capabilities;
use super::context::Context;
use super::driver::{DevicePtr, Failure};
use super::reclaim::Freed;
use crate::{Error, Result};

/// Valid in every context of the process, and with a GPU address.
const PORTABLE: u32 = 1;
const DEVICE_MAP: u32 = 2;
const IO_MEMORY: u32 = 4;
const READ_ONLY: u32 = 8;

const PAGE: usize = 4096;

/// The kind of a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MappingKind {
    /// Memory, which is locked.
    Memory,
    /// A device's registers or its memory.
    Io,
}

/// How long to wait for pages that are being unregistered.
const UNREGISTER_TIMEOUT: Duration = Duration::from_secs(1);

/// A range of pages that is registered with the driver, and how many regions use it.
pub(super) struct RegisteredPages {
    /// Distinguishes it from other registrations of the same pages.
    identity: Arc<()>,
    start: usize,
    end: usize,
    users: usize,
    /// It is being unregistered: no region joins it any more.
    leaving: bool,
    /// Keeps the pages mapped until they are no longer registered.
    _mem: HostMem,
    /// The context that they are registered in. The registration ends with it, even for other GPUs' contexts that use
    /// it.
    context: Arc<Context>,
}

impl RegisteredPages {
    fn is(&self, identity: &Arc<()>) -> bool {
        Arc::ptr_eq(&self.identity, identity)
    }
}

/// One use of registered pages. The last one unregisters them.
pub(super) struct PageRegistration {
    // It may be the context's last reference, and the thread that drops it must not call the driver.
    context: ManuallyDrop<Arc<Context>>,
    identity: Arc<()>,
}

impl PageRegistration {
    fn new(context: &Arc<Context>, identity: &Arc<()>) -> Self {
        Self { context: ManuallyDrop::new(context.clone()), identity: identity.clone() }
    }
}

impl Drop for PageRegistration {
    fn drop(&mut self) {
        // SAFETY: it is not used after this, in which self goes.
        let context = unsafe { ManuallyDrop::take(&mut self.context) };
        let (identity, mut counted) = (self.identity.clone(), true);
        let reclaimer = context.driver.reclaimer.clone();
        reclaimer.enqueue(move || {
            if std::mem::take(&mut counted) && !leave(&context, &identity) {
                return Freed::Done;
            }
            unregister(&context, &identity)
        });
    }
}

/// Removes one user; returns whether it was the last.
fn leave(context: &Context, identity: &Arc<()>) -> bool {
    let mut all = registrations(context);
    let Some(one) = all.iter_mut().find(|one| one.is(identity)) else { return false };
    one.users -= 1;
    one.leaving = one.users == 0;
    one.leaving
}

/// Unregisters pages without users. No lock is held while the driver waits for kernels, or their owner's code runs.
fn unregister(context: &Context, identity: &Arc<()>) -> Freed {
    let find = |one: &RegisteredPages| one.is(identity).then(|| (one.start, one.context.clone()));
    let found = registrations(context).iter().find_map(find);
    let Some((start, registered_in)) = found else { return Freed::Done };
    let pointer = start as *mut c_void;
    // SAFETY: the pages were registered at this address, no region uses them any more, and no region joins a range that
    // is leaving.
    let answer = registered_in.attempt(|driver| unsafe { driver.host_unregister(pointer) });
    let freed = context.freed(answer, "unregistering host memory");
    if matches!(freed, Freed::Done) {
        let mut all = registrations(context);
        let gone = all.iter().position(|one| one.is(identity)).map(|at| all.swap_remove(at));
        drop(all);
        drop(gone);
    }
    freed
}

fn registrations(context: &Context) -> MutexGuard<'_, Vec<RegisteredPages>> {
    context.driver.registrations.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers our memory so that copies to and from it are faster; none if that fails.
pub(super) fn pin(context: &Arc<Context>, mem: &HostMem) -> Option<PageRegistration> {
    register_pages(context, mem, PORTABLE).ok()
}

/// Registers the pages of `mem`, or joins a registration that covers them; returns the GPU address.
pub(super) fn register(
    context: &Arc<Context>,
    can: &Capabilities,
    mem: &HostMem,
    kind: MappingKind,
) -> Result<(PageRegistration, DevicePtr)> {
    let flags = flags(can, mem, kind).map_err(|why| Error::NotSupported { what: registering(mem), why })?;
    register_with(context, mem, kind, flags)
}

fn registering(mem: &HostMem) -> String {
    format!("registering {} bytes of host memory with the GPU", mem.len())
}

fn register_with(
    context: &Arc<Context>,
    mem: &HostMem,
    kind: MappingKind,
    flags: u32,
) -> Result<(PageRegistration, DevicePtr)> {
    let what = || registering(mem);
    let pages = register_pages(context, mem, flags).map_err(|refused| match refused {
        Refused::Overlaps => Error::NotSupported {
            what: what(),
            why: "a part of its pages is registered already; register all of it at once".into(),
        },
        Refused::Driver(failure) => context.driver.error_with(what(), failure, hint(mem, kind, failure)),
    })?;
    let mut at = 0;
    let pointer = mem.host_ptr().cast::<c_void>();
    // SAFETY: `at` lives across the call, and the page that the pointer lies in is registered.
    context.call(&what(), |driver| unsafe { driver.host_pointer(&mut at, pointer, 0) })?;
    Ok((pages, at))
}

/// Registers our memory for communication between host and kernels; returns the GPU address.
pub(super) fn share(context: &Arc<Context>, mem: &HostMem) -> Result<(PageRegistration, DevicePtr)> {
    register_with(context, mem, MappingKind::Memory, PORTABLE | DEVICE_MAP)
}

/// Registers device registers; the caller explains a failure.
pub(super) fn register_io(
    context: &Arc<Context>,
    mem: &HostMem,
) -> std::result::Result<(PageRegistration, DevicePtr), Option<Failure>> {
    let refused = |refused| match refused {
        Refused::Overlaps => None,
        Refused::Driver(failure) => Some(failure),
    };
    let pages = register_pages(context, mem, PORTABLE | DEVICE_MAP | IO_MEMORY).map_err(refused)?;
    let mut at = 0;
    let pointer = mem.host_ptr().cast::<c_void>();
    // SAFETY: `at` lives across the call, and the page that the pointer lies in is registered.
    context.attempt(|driver| unsafe { driver.host_pointer(&mut at, pointer, 0) }).map_err(Some)?;
    Ok((pages, at))
}

enum Refused {
    Overlaps,
    Driver(Failure),
}

fn register_pages(
    context: &Arc<Context>,
    mem: &HostMem,
    flags: u32,
) -> std::result::Result<PageRegistration, Refused> {
    let first = mem.host_ptr() as usize;
    let (start, end) = (first - first % PAGE, (first + mem.len()).next_multiple_of(PAGE));
    // Dropped after the lock is released.
    let _destroyed: Vec<RegisteredPages>;
    let mut all = registrations(context);
    // Those ended with their context, and the pages may be registered again.
    _destroyed = all.extract_if(.., |one| one.context.is_destroyed()).collect();
    let overlaps = |one: &RegisteredPages| one.start < end && start < one.end;
    let whole = |one: &RegisteredPages| !one.leaving && one.start <= start && end <= one.end;
    if all.iter().any(overlaps) && !all.iter().any(whole) {
        // What was just dropped may be in the way.
        drop(all);
        context.driver.reclaimer.settle(UNREGISTER_TIMEOUT);
        all = registrations(context);
    }
    if let Some(one) = all.iter_mut().find(|one| whole(one)) {
        one.users += 1;
        return Ok(PageRegistration::new(context, &one.identity));
    }
    if all.iter().any(overlaps) {
        return Err(Refused::Overlaps);
    }
    let pointer = start as *mut c_void;
    let registered = context.attempt(|driver| {
        // SAFETY: the pages are mapped, and `mem` keeps them so until they are unregistered. What a device writes there
        // is only ever read by copy.
        unsafe { driver.host_register(pointer, end - start, flags) }
    });
    registered.map_err(Refused::Driver)?;
    let (identity, _mem, context) = (Arc::default(), mem.clone(), context.clone());
    let registration = PageRegistration::new(&context, &identity);
    all.push(RegisteredPages { identity, start, end, users: 1, leaving: false, _mem, context });
    Ok(registration)
}

fn flags(can: &Capabilities, mem: &HostMem, kind: MappingKind) -> std::result::Result<u32, String> {
    if !can.can_map_host_memory {
        return Err("this GPU cannot reach host memory".into());
    }
    match kind {
        MappingKind::Io => Ok(PORTABLE | DEVICE_MAP | IO_MEMORY),
        MappingKind::Memory if !can.host_register => Err("this GPU cannot register memory that it did not \
                                                   allocate (HOST_REGISTER_SUPPORTED is 0)"
            .into()),
        MappingKind::Memory if mem.is_writable() => Ok(PORTABLE | DEVICE_MAP),
        MappingKind::Memory if can.read_only_host_register => Ok(PORTABLE | DEVICE_MAP | READ_ONLY),
        MappingKind::Memory => Err("the mapping is read-only, and this GPU registers only writable ones \
                             (READ_ONLY_HOST_REGISTER_SUPPORTED is 0); copy it, or map a memfd"
            .into()),
    }
}

fn hint(mem: &HostMem, kind: MappingKind, failure: Failure) -> &'static str {
    match (failure.code(), kind) {
        (Some(1), MappingKind::Memory) if mem.is_writable() => {
            "a file on a disk can only be registered read-only (HostMem::of_file_read_only), because the kernel lets \
             nobody lock its pages for writing; memfds, /dev/shm and anonymous memory can be registered for both"
        }
        (Some(1), MappingKind::Memory) => "the mapping is not memory that can be locked; copy it to a memfd",
        (Some(2), _) => "the kernel could not lock so many pages: free memory, or register less at a time",
        (Some(712), _) => {
            "other code in this process has registered these pages; use its memory, or register earlier"
        }
        (Some(801), MappingKind::Memory) => "this platform does not let the GPU register memory",
        _ => "",
    }
}
