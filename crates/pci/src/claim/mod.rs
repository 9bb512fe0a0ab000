//! Claims a device from the kernel's driver, and releases it however this process ends.
//!
//! [`Claim::take`] refuses what [`DeviceKind`] does not allow, records the device's state, starts a guardian process that
//! will restore it, and only then changes anything.

#[allow(unsafe_code, reason = "a process is forked")]
mod guard;
mod steps;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::kind::ensure_no_user_driver;
use crate::{Address, DeviceKind, Error, Result, Root};
use guard::Guard;
pub(crate) use steps::NewDriver;
use steps::{Before, SysfsWrite, claim_steps, release_steps};

/// Time limit for another onehop process to release the device.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for a driver to bind or unbind.
const BIND_TIMEOUT: Duration = Duration::from_secs(5);

/// A device detached from the kernel's driver. Dropping the claim releases it.
pub(crate) struct Claim {
    #[cfg_attr(not(test), expect(dead_code, reason = "dropping it releases the device"))]
    guard: Guard,
    // Released after the guardian has finished.
    _lock: File,
}

impl Claim {
    /// Claims the device. The descriptors in `hold` stay open until it has been released, even if this process is
    /// killed.
    pub(crate) fn take(
        root: &Root,
        kind: DeviceKind,
        address: Address,
        owner: NewDriver,
        hold: &[BorrowedFd<'_>],
    ) -> Result<Self> {
        let machine = MachineFiles::of(root)?;
        let lock = machine.lock(root, kind, address)?;
        let before = Before::read(root, address)?;
        before.present(root, address)?;
        // If it stays with its driver, VFIO and our module admit only one program.
        if owner.is_another(&before) {
            ensure_no_user_driver(root, address)?;
        }
        let back: Vec<_> = release_steps(address, &before, owner);
        let mut kept = vec![lock.as_fd()];
        kept.extend(hold);
        let guard = Guard::start(&machine.folder, address, &back, &kept)?;
        // From here on, dropping the guard undoes everything.
        machine.apply(address, &claim_steps(address, &before, owner))?;
        machine.wait_for_driver(root, address, owner)?;
        Ok(Self { guard, _lock: lock })
    }

    /// Releases the device now; dropping the claim does the same, but returns no error.
    #[cfg(test)]
    pub(crate) fn release(mut self) -> Result<()> {
        self.guard.finish()
    }
}

/// Binds a device permanently to a driver, or to the one that the kernel chooses, and returns its name. If the driver
/// does not accept the device, the former state is restored.
///
/// # Errors
/// When the device is in use, there is no such driver, or the driver does not accept the device, which includes a
/// failure to restore.
pub fn bind(root: &Root, kind: DeviceKind, address: Address, driver: Option<&str>) -> Result<Option<String>> {
    let machine = MachineFiles::of(root)?;
    let _lock = machine.lock(root, kind, address)?;
    if let Some(driver) = driver {
        loaded(root, address, driver)?;
    }
    let before = Before::read(root, address)?;
    before.present(root, address)?;
    if driver.is_some() && before.driver.as_deref() == driver {
        return Ok(before.driver);
    }
    ensure_no_user_driver(root, address)?;
    let wanted = |now: &Option<String>| driver.is_none_or(|driver| now.as_deref() == Some(driver));
    let handed = machine
        .apply(address, &steps::bind_steps(address, &before, driver))
        .and_then(|()| machine.wait(root, address, wanted));
    let failed = match (handed, driver) {
        (Ok(now), Some(driver)) if !wanted(&now) => not_taken(address, driver, now.as_deref()),
        (Ok(now), _) => return Ok(now),
        (Err(error), _) => error,
    };
    let now = root.link_name(&format!("/sys/bus/pci/devices/{address}/driver"));
    Err(match machine.apply(address, &steps::undo_bind_steps(address, &before, now.as_deref())) {
        Ok(()) => failed,
        Err(then) => Error::NotReleased { first: failed.into(), then: then.into() },
    })
}

/// Fails if no such driver is loaded. It is checked before the device is detached.
fn loaded(root: &Root, address: Address, driver: &str) -> Result<()> {
    let is_name = !driver.is_empty() && !driver.contains('/') && !driver.starts_with('.');
    if is_name && root.exists(&format!("/sys/bus/pci/drivers/{driver}")) {
        return Ok(());
    }
    Err(Error::Refused {
        what: format!("binding {address} to {}", driver.escape_debug()),
        why: "no driver of this name is loaded".into(),
        fix: format!("Load it (`modprobe {}`) and try again", driver.escape_debug()),
    })
}

/// Removes a device from the bus and rescans: for a device that reads as all ones.
///
/// # Errors
/// When it is in use, another onehop process drives it, it cannot be removed, or it does not come back.
pub fn rescan(root: &Root, address: Address, patience: Duration) -> Result<()> {
    let machine = MachineFiles::of(root)?;
    let folder = format!("/sys/bus/pci/devices/{address}");
    if root.exists(&folder) {
        // A process that drives it must not lose it; with VFIO, the kernel would wait for that process forever.
        let _lock = machine.lock(root, DeviceKind::Drive, address)?;
        ensure_no_user_driver(root, address)?;
        machine.apply(address, &[SysfsWrite::must(format!("{folder}/remove"), "1")])?;
    }
    machine.apply(address, &[SysfsWrite::must("/sys/bus/pci/rescan".into(), "1")])?;
    let begun = Instant::now();
    while !is_present(root, address) {
        if begun.elapsed() >= patience {
            return Err(Error::Refused {
                what: format!("bringing {address} back"),
                why: format!("it did not respond within {patience:?} of a bus rescan"),
                fix: "Power-cycle the machine: only that restores a dead link".into(),
            });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Whether a device responds on the bus.
#[must_use]
pub fn is_present(root: &Root, address: Address) -> bool {
    let config = root.bytes(&format!("/sys/bus/pci/devices/{address}/config"), 4);
    config.is_ok_and(|bytes| bytes.len() == 4 && bytes != [0xff; 4])
}

fn not_taken(address: Address, driver: &str, now: Option<&str>) -> Error {
    Error::Refused {
        what: format!("binding {address} to {driver}"),
        why: match now {
            Some(other) => format!("it is bound to {other}"),
            None => "no driver claimed it; see `dmesg`".into(),
        },
        fix: format!("Load the driver (`modprobe {driver}`) and try again"),
    }
}

/// Write access to the machine's files.
struct MachineFiles {
    folder: PathBuf,
}

impl MachineFiles {
    fn of(root: &Root) -> Result<Self> {
        let folder = root.folder().map(Path::to_owned).ok_or_else(|| Error::Refused {
            what: "changing a device".into(),
            why: "this is a recorded machine".into(),
            fix: "Run it on the machine itself".into(),
        })?;
        Ok(Self { folder })
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.join(path.trim_start_matches('/'))
    }

    /// Locks a device that may be claimed against other onehop processes. The lock is on a file of the kernel, so none
    /// is left behind.
    fn lock(&self, root: &Root, kind: DeviceKind, address: Address) -> Result<File> {
        // A refused caller must neither block others nor wait to be refused.
        kind.allows(root, address)?;
        let path = format!("/sys/bus/pci/devices/{address}/config");
        let file = File::open(self.at(&path)).map_err(|e| Error::io(&path, &e))?;
        let begun = Instant::now();
        while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            if begun.elapsed() >= HANDOVER_TIMEOUT {
                return Err(Error::Refused {
                    what: format!("using {address}"),
                    why: "another onehop process uses it".into(),
                    fix: "Wait for it to end".into(),
                });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // The former holder may have released it meanwhile, and another program may use it now.
        kind.allows(root, address)?;
        Ok(file)
    }

    fn apply(&self, address: Address, steps: &[SysfsWrite]) -> Result<()> {
        for step in steps {
            match self.write(step) {
                Err(e) if step.must => return Err(refused(address, step, &e)),
                _ => {}
            }
        }
        Ok(())
    }

    fn write(&self, step: &SysfsWrite) -> std::io::Result<()> {
        let mut file = File::options().write(true).open(self.at(&step.path))?;
        match step.offset {
            Some(offset) => file.write_all_at(&step.bytes, offset),
            None => file.write_all(&step.bytes),
        }
    }

    /// The device's driver, as soon as it is the expected one or time is up.
    fn wait(
        &self,
        root: &Root,
        address: Address,
        done: impl Fn(&Option<String>) -> bool,
    ) -> Result<Option<String>> {
        let begun = Instant::now();
        loop {
            let now = root.link_name(&format!("/sys/bus/pci/devices/{address}/driver"));
            if done(&now) || begun.elapsed() >= BIND_TIMEOUT {
                return Ok(now);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn wait_for_driver(&self, root: &Root, address: Address, owner: NewDriver) -> Result<()> {
        let wanted = owner.driver();
        let now = self.wait(root, address, |now| now.as_deref() == wanted)?;
        if now.as_deref() == wanted {
            return Ok(());
        }
        Err(not_taken(address, wanted.unwrap_or("nobody"), now.as_deref()))
    }
}

fn refused(address: Address, step: &SysfsWrite, error: &std::io::Error) -> Error {
    let text = String::from_utf8_lossy(&step.bytes);
    let (path, text) = (&step.path, text.trim());
    Error::Refused {
        what: format!("detaching {address} from the kernel"),
        why: format!("writing {text:?} into {path}: {error}"),
        fix: match error.kind() {
            std::io::ErrorKind::PermissionDenied => {
                "Run as root. Or have root run `onehop drive bind` once and give your user the device's file: /dev/vfio/GROUP, or \
                 /dev/onehop-ADDRESS"
            }
            std::io::ErrorKind::NotFound => "Load the driver to bind it to: `modprobe vfio-pci`, `modprobe onehop`",
            _ => "See `dmesg`",
        }
        .into(),
    }
}
