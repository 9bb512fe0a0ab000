//! libibverbs, loaded at run time, so that onehop also runs without it.
//!
//! This is the only module of the crate with unsafe code. Its objects hold what they were made from, so that they are
//! dropped in the order that the library requires. Several threads may make all of its calls at once; the library
//! locks. Threads that have acted as users have them made by another ([`caller`]).

mod caller;
mod device;
#[cfg(test)]
mod fake;
mod pair;
mod sys;

use std::ffi::CStr;
use std::io;
use std::sync::Arc;

use libloading::Library;
use rustix::io::Errno;

use crate::{Error, Result};
use caller::Caller;
pub(crate) use device::{Domain, Gid, GidKind, Registration, VerbsDevice};
#[cfg(test)]
pub(crate) use fake::Fake;
pub(crate) use pair::{Completion, CompletionQueue, PairRequest, PairState, QueuePair};

/// The library's names.
const NAMES: [&str; 2] = ["libibverbs.so.1", "libibverbs.so"];

/// The library.
#[derive(Clone)]
pub struct Verbs(Arc<sys::Functions>);

impl Verbs {
    /// Loads it.
    ///
    /// # Errors
    /// When the system has none, or too old a version.
    pub fn load() -> Result<Self> {
        let mut why = String::new();
        for name in NAMES {
            // SAFETY: libibverbs's initialisers only set up its own data; it is unloaded when no object of it is
            // left.
            match unsafe { Library::new(name) } {
                Ok(library) => {
                    let functions = sys::Functions::of(library).map_err(|name| {
                        Error::none(format!("libibverbs has no {name}: it is older than rdma-core 32"))
                    })?;
                    return Ok(Self(Arc::new(functions)));
                }
                Err(error) if why.is_empty() => why = error.to_string(),
                Err(_) => {}
            }
        }
        Err(Error::none(format!("{why} (Debian: apt install libibverbs1 ibverbs-providers)")))
    }

    /// The devices for which the library has a provider.
    ///
    /// # Errors
    /// When the system cannot list them.
    pub fn devices(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        self.with_devices(|_, name| {
            names.push(name.to_owned());
            None::<()>
        })?;
        Ok(names)
    }

    /// Opens a device by its name.
    pub(crate) fn open(&self, name: &str) -> Result<VerbsDevice> {
        let caller = Caller::start()?;
        let opened = self.with_devices(|device, found| {
            // SAFETY: the device is one of the list, which outlives this call.
            (found == name).then(|| unsafe { (self.0.open_device)(device) })
        })?;
        match opened {
            None => Err(Error::none(format!(
                "libibverbs knows no device {name}; it knows {}",
                listed(&self.devices()?)
            ))),
            Some(context) => match std::ptr::NonNull::new(context) {
                Some(context) => Ok(VerbsDevice::new(self.clone(), name, context, caller)),
                None => Err(last("ibv_open_device", name)),
            },
        }
    }

    /// Calls `f` with each device until it returns a value.
    fn with_devices<T>(
        &self,
        mut look: impl FnMut(*mut std::ffi::c_void, &str) -> Option<T>,
    ) -> Result<Option<T>> {
        let mut count = 0;
        // SAFETY: `count` lives across the call.
        let list = unsafe { (self.0.get_device_list)(&mut count) };
        if list.is_null() {
            let error = io::Error::last_os_error();
            let hint = if error.raw_os_error() == Some(Errno::NOSYS.raw_os_error()) {
                ": the kernel has no RDMA (module ib_uverbs)"
            } else {
                ""
            };
            return Err(Error::none(format!("devices cannot be listed: {error}{hint}")));
        }
        let mut result = None;
        for at in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` devices, each with a name that ends in a zero.
            let (device, name) = unsafe {
                let device = *list.add(at);
                (device, CStr::from_ptr((self.0.get_device_name)(device)).to_string_lossy().into_owned())
            };
            result = look(device, &name);
            if result.is_some() {
                break;
            }
        }
        // SAFETY: the list came from the call above and is not used any more; devices that were opened stay.
        unsafe { (self.0.free_device_list)(list) };
        Ok(result)
    }

    /// The meaning of a completion's status.
    fn status(&self, status: i32) -> String {
        // SAFETY: the function accepts any number, and returns a static text.
        let text = unsafe { CStr::from_ptr((self.0.wc_status_str)(status)) };
        text.to_string_lossy().into_owned()
    }
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// The failure of a call that leaves its reason in errno.
fn last(call: &'static str, device: &str) -> Error {
    failed(call, device, io::Error::last_os_error())
}

/// The failure of a call that returned its reason.
fn code(call: &'static str, device: &str, result: i32) -> Result<()> {
    match result {
        0 => Ok(()),
        // Some return -1 and leave the reason in errno.
        ..0 => Err(last(call, device)),
        errno => Err(failed(call, device, io::Error::from_raw_os_error(errno))),
    }
}

fn failed(call: &'static str, device: &str, source: io::Error) -> Error {
    let is = |errno: Errno| source.raw_os_error() == Some(errno.raw_os_error());
    let hint = if is(Errno::NOMEM) {
        "; memory that a device reaches counts as locked: ulimit -l, or LimitMEMLOCK= of a service"
    } else if is(Errno::ACCESS) || is(Errno::PERM) {
        "; /dev/infiniband/uverbs* must be readable and writable for this user"
    } else {
        ""
    };
    Error::Call { call, device: device.to_owned(), source, hint }
}

/// The reason of a refusal, without the device.
pub(crate) fn reason(error: &Error) -> String {
    match error {
        Error::Call { call, source, hint, .. } => format!("{call}: {source}{hint}"),
        other => other.to_string(),
    }
}
