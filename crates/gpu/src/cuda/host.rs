//! Host memory that kernels reach: own pages, other people's mappings, and devices' registers.

use std::ffi::c_void;
use std::sync::{Arc, PoisonError};

use onehop_os::HostMem;

use super::capabilities::Capabilities;
use super::context::Context;
use super::driver::{DevicePtr, Driver, Failure};
use crate::{Error, Result};

/// For every context of the process, and with an address on the GPU.
const PORTABLE: u32 = 1;
const DEVICE_MAP: u32 = 2;
const IO_MEMORY: u32 = 4;
const READ_ONLY: u32 = 8;

const PAGE: usize = 4096;

/// What is behind a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Memory, which gets locked.
    Memory,
    /// A device's registers or its memory.
    Io,
}

/// A stretch of pages that is registered with the driver, and how many regions use it.
pub(super) struct Registered {
    start: usize,
    end: usize,
    users: usize,
    /// Keeps the pages mapped until they are no longer registered.
    mem: HostMem,
}

/// One use of registered pages. The last one to go takes the registration away.
pub(super) struct Registration {
    context: Arc<Context>,
    start: usize,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let driver = &self.context.driver;
        let mut all = driver.registrations.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = all.iter().position(|one| one.start == self.start) else { return };
        all[at].users -= 1;
        let last = all[at].users == 0;
        drop(all);
        if last {
            let context = self.context.clone();
            driver.residents.give_back(move || unregister_unused(&context));
        }
    }
}

/// Takes away the registrations that nobody uses; gives their memory, which may run somebody's code when it goes.
fn unregister_unused(context: &Context) -> Vec<HostMem> {
    let mut all = context.driver.registrations.lock().unwrap_or_else(PoisonError::into_inner);
    let unused = all.extract_if(.., |one| one.users == 0);
    let unregister = |gone: Registered| {
        let pointer = gone.start as *mut c_void;
        // Under the lock: whoever wants these pages next must find them unregistered.
        // SAFETY: the pages were registered at this address, and no region uses them any more.
        let _ = context.attempt(|driver| unsafe { driver.host_unregister(pointer) });
        gone.mem
    };
    unused.map(unregister).collect()
}

/// Registers the pages of `mem`, or joins a registration that covers them; gives the address on the GPU.
pub(super) fn register(
    context: &Arc<Context>,
    can: &Capabilities,
    mem: &HostMem,
    kind: Kind,
) -> Result<(Registration, DevicePtr)> {
    let what = || format!("registering {} bytes of host memory with the GPU", mem.len());
    let flags = flags(can, mem, kind).map_err(|why| Error::NotSupported { what: what(), why })?;
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

/// Registers registers; the failure is for the caller to explain.
pub(super) fn register_io(
    context: &Arc<Context>,
    mem: &HostMem,
) -> std::result::Result<(Registration, DevicePtr), Option<Failure>> {
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
) -> std::result::Result<Registration, Refused> {
    let first = mem.host_ptr() as usize;
    let (start, end) = (first - first % PAGE, (first + mem.len()).next_multiple_of(PAGE));
    let driver: &Driver = &context.driver;
    let mut all = driver.registrations.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(one) = all.iter_mut().find(|one| one.start <= start && end <= one.end) {
        one.users += 1;
        return Ok(Registration { context: context.clone(), start: one.start });
    }
    if all.iter().any(|one| one.start < end && start < one.end) {
        return Err(Refused::Overlaps);
    }
    let pointer = start as *mut c_void;
    let registered = context.attempt(|driver| {
        // SAFETY: the pages are mapped, and `mem` keeps them so until they are unregistered. What a device writes there
        // is only ever read by copy.
        unsafe { driver.host_register(pointer, end - start, flags) }
    });
    registered.map_err(Refused::Driver)?;
    all.push(Registered { start, end, users: 1, mem: mem.clone() });
    Ok(Registration { context: context.clone(), start })
}

fn flags(can: &Capabilities, mem: &HostMem, kind: Kind) -> std::result::Result<u32, String> {
    if !can.can_map_host_memory {
        return Err("this GPU cannot reach host memory".into());
    }
    match kind {
        Kind::Io => Ok(PORTABLE | DEVICE_MAP | IO_MEMORY),
        Kind::Memory if !can.host_register => Err("this GPU cannot register memory that it did not \
                                                   allocate (HOST_REGISTER_SUPPORTED is 0)"
            .into()),
        Kind::Memory if mem.is_writable() => Ok(PORTABLE | DEVICE_MAP),
        Kind::Memory if can.read_only_host_register => Ok(PORTABLE | DEVICE_MAP | READ_ONLY),
        Kind::Memory => Err("the mapping is read-only, and this GPU registers only writable ones \
                             (READ_ONLY_HOST_REGISTER_SUPPORTED is 0); copy it, or map a memfd"
            .into()),
    }
}

fn hint(mem: &HostMem, kind: Kind, failure: Failure) -> &'static str {
    match (failure.code(), kind) {
        (Some(1), Kind::Memory) if mem.is_writable() => {
            "a file on a disk can only be registered read-only (HostMem::of_file_read_only), because the kernel lets \
             nobody lock its pages for writing; memfds, /dev/shm and anonymous memory can be registered for both"
        }
        (Some(1), Kind::Memory) => "the mapping is no memory that can be locked; copy it to a memfd",
        (Some(2), _) => "the kernel could not lock so many pages: free memory, or register less at a time",
        (Some(712), _) => {
            "somebody else in this process has registered these pages; use theirs, or register before they do"
        }
        (Some(801), Kind::Memory) => "this platform does not let the GPU register memory",
        _ => "",
    }
}
