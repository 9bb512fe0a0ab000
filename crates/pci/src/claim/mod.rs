//! A device taken from the kernel's driver, and given back however this process ends.
//!
//! [`Claim::take`] refuses what [`Kind`] does not allow, writes down how the device was, starts a guardian
//! process that will put it back, and only then changes anything.

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
use crate::{Address, Error, Kind, Result, Root};
use guard::Guard;
pub(crate) use steps::Owner;
use steps::{Before, Step, give, take};

/// How long another program that has the device may take to give it back.
const HANDED_OVER_WITHIN: Duration = Duration::from_secs(3);
/// How long a driver may take to come or to go.
const BOUND_WITHIN: Duration = Duration::from_secs(5);

/// A device that the kernel's driver does not have. Dropping it gives the device back to whoever had it.
pub(crate) struct Claim {
    guard: Guard,
    // Released after the guardian has done its work.
    _turn: File,
}

impl Claim {
    /// Takes it. The descriptors in `hold` stay open until the device has been given back, even if this process is killed.
    pub(crate) fn take(
        root: &Root,
        kind: Kind,
        address: Address,
        owner: Owner,
        hold: &[BorrowedFd<'_>],
    ) -> Result<Self> {
        let machine = Machine::of(root)?;
        let turn = machine.turn(root, kind, address)?;
        let before = Before::read(root, address)?;
        before.present(root, address)?;
        // Where it stays with its driver, VFIO and our module let nobody in beside another.
        if owner.is_another(&before) {
            ensure_no_user_driver(root, address)?;
        }
        let back: Vec<_> = give(address, &before, owner);
        let mut kept = vec![turn.as_fd()];
        kept.extend(hold);
        let guard = Guard::start(&machine.folder, address, &back, &kept)?;
        // Whatever fails from here on is undone when the guard goes.
        machine.carry_out(address, &take(address, &before, owner))?;
        machine.wait_for_driver(root, address, owner)?;
        Ok(Self { guard, _turn: turn })
    }

    /// Gives it back now.
    pub(crate) fn give_back(mut self) -> Result<()> {
        self.guard.finish()
    }
}

/// Gives a device to a driver, or back to the one that the kernel chooses, to stay. If the driver does not take it, all is as it
/// was before.
///
/// # Errors
/// When it is in use, there is no such driver, or it does not take it; and when nor does the one that had it.
pub fn bind(root: &Root, kind: Kind, address: Address, driver: Option<&str>) -> Result<Option<String>> {
    let machine = Machine::of(root)?;
    let _turn = machine.turn(root, kind, address)?;
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
        .carry_out(address, &steps::hand_to(address, &before, driver))
        .and_then(|()| machine.wait(root, address, wanted));
    let failed = match (handed, driver) {
        (Ok(now), Some(driver)) if !wanted(&now) => not_taken(address, driver, now.as_deref()),
        (Ok(now), _) => return Ok(now),
        (Err(error), _) => error,
    };
    let now = root.link_name(&format!("/sys/bus/pci/devices/{address}/driver"));
    Err(match machine.carry_out(address, &steps::put_back(address, &before, now.as_deref())) {
        Ok(()) => failed,
        Err(then) => Error::NotGivenBack { first: failed.into(), then: then.into() },
    })
}

/// An error for a driver that the kernel does not have. Nothing is taken from another for it.
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

/// Removes a device from the bus and rescans: for one that reads as all ones.
///
/// # Errors
/// When it is in use, another program of onehop drives it, it cannot be taken off, or it does not come back.
pub fn rescan(root: &Root, address: Address, patience: Duration) -> Result<()> {
    let machine = Machine::of(root)?;
    let folder = format!("/sys/bus/pci/devices/{address}");
    if root.exists(&folder) {
        // Who drives it must not lose it, and by VFIO the kernel would wait for them without an end.
        let _turn = machine.turn(root, Kind::Drive, address)?;
        ensure_no_user_driver(root, address)?;
        machine.carry_out(address, &[Step::must(format!("{folder}/remove"), "1")])?;
    }
    machine.carry_out(address, &[Step::must("/sys/bus/pci/rescan".into(), "1")])?;
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

/// Whether a device answers on the bus.
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

/// The files of the machine, to be written.
struct Machine {
    folder: PathBuf,
}

impl Machine {
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

    /// A device that may be taken, to ourselves among programs of ours. The lock is on one of the kernel's own files, so nothing
    /// is left.
    fn turn(&self, root: &Root, kind: Kind, address: Address) -> Result<File> {
        // Who is refused does not stand in the way of others, and waits for nobody to be told why.
        kind.allows(root, address)?;
        let path = format!("/sys/bus/pci/devices/{address}/config");
        let file = File::open(self.at(&path)).map_err(|e| Error::io(&path, &e))?;
        let begun = Instant::now();
        while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            if begun.elapsed() >= HANDED_OVER_WITHIN {
                return Err(Error::Refused {
                    what: format!("using {address}"),
                    why: "another onehop process uses it".into(),
                    fix: "Wait for it to end".into(),
                });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // Who had it may have given it back meanwhile, and somebody put it to use.
        kind.allows(root, address)?;
        Ok(file)
    }

    fn carry_out(&self, address: Address, steps: &[Step]) -> Result<()> {
        for step in steps {
            match self.write(step) {
                Err(e) if step.must => return Err(refused(address, step, &e)),
                _ => {}
            }
        }
        Ok(())
    }

    fn write(&self, step: &Step) -> std::io::Result<()> {
        let mut file = File::options().write(true).open(self.at(&step.path))?;
        match step.offset {
            Some(offset) => file.write_all_at(&step.bytes, offset),
            None => file.write_all(&step.bytes),
        }
    }

    /// The driver of a device, once it is the one that is waited for, or time is over.
    fn wait(
        &self,
        root: &Root,
        address: Address,
        done: impl Fn(&Option<String>) -> bool,
    ) -> Result<Option<String>> {
        let begun = Instant::now();
        loop {
            let now = root.link_name(&format!("/sys/bus/pci/devices/{address}/driver"));
            if done(&now) || begun.elapsed() >= BOUND_WITHIN {
                return Ok(now);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn wait_for_driver(&self, root: &Root, address: Address, owner: Owner) -> Result<()> {
        let wanted = owner.driver();
        let now = self.wait(root, address, |now| now.as_deref() == wanted)?;
        if now.as_deref() == wanted {
            return Ok(());
        }
        Err(not_taken(address, wanted.unwrap_or("nobody"), now.as_deref()))
    }
}

fn refused(address: Address, step: &Step, error: &std::io::Error) -> Error {
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
