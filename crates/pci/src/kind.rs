//! Which kinds of device may be detached from their drivers.

use std::time::{Duration, Instant};

use crate::{Address, Class, Error, Result, Root, Usage, programs};

/// Time limit for a program to close a drive that it has open, and for a new drive to appear completely.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// What the caller expects a device to be. Anything else is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// An NVMe drive that is not in use.
    Drive,
    /// A device that the system does not depend on: an SDR board, an accelerator, a test device.
    Board,
}

impl DeviceKind {
    /// Fails if the device must not be detached.
    pub(crate) fn allows(self, root: &Root, address: Address) -> Result<()> {
        match self {
            Self::Drive => drive(root, address),
            Self::Board => board(root, address),
        }
    }
}

fn drive(root: &Root, address: Address) -> Result<()> {
    let begun = Instant::now();
    loop {
        let usage = Usage::of(root, address)?;
        let Some(refusal) = usage.refusal() else { return Ok(()) };
        if !usage.may_pass() || begun.elapsed() >= CLOSE_TIMEOUT {
            return Err(refusal);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Fails if a user-space program drives the device, of any kind. Callers hold the device's lock, as every onehop
/// process does while it drives one.
pub(crate) fn ensure_no_user_driver(root: &Root, address: Address) -> Result<()> {
    let begun = Instant::now();
    while let Some(refusal) = programs::refusal(root, address)? {
        if begun.elapsed() >= CLOSE_TIMEOUT {
            return Err(refusal);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn board(root: &Root, address: Address) -> Result<()> {
    let path = format!("/sys/bus/pci/devices/{address}/class");
    let text = root.text(&path)?;
    let class = crate::bar::hex(&text).map(|value| Class(value as u32 & 0xff_ffff));
    let class = class.ok_or_else(|| Error::garbage(&path, &text, "class"))?;
    needed(class).map_or(Ok(()), |what| {
        Err(Error::Refused {
            what: format!("detaching {address} from the kernel"),
            why: format!("it is {what} (class {:#06x}), which the system may depend on", class.kind()),
            fix: "Name an SDR board, or another device that the system does not depend on".into(),
        })
    })
}

/// What the system may depend on, by class.
fn needed(class: Class) -> Option<&'static str> {
    let other = class.kind() & 0xff == 0x80;
    Some(match class.base() {
        0x01 => "storage",
        0x02 => "a network card",
        0x03 => "a display",
        // FPGAs often use the "other" subclass of these.
        0x05 if !other => "memory",
        0x06 => "a bridge",
        0x08 if !other => "a part of the machine",
        0x09 => "an input device",
        0x0a | 0x0b => "a part of the machine",
        0x0c => "a serial bus",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_system_runs_on_is_refused_as_a_board() {
        let folder = std::env::temp_dir().join(format!("onehop-pci-kind-{}", std::process::id()));
        let device = folder.join("sys/bus/pci/devices/0000:01:00.0");
        std::fs::create_dir_all(&device).unwrap();
        let (root, address) = (Root::below(&folder), "0000:01:00.0".parse().unwrap());
        let allowed = |class: &str| {
            std::fs::write(device.join("class"), class).unwrap();
            DeviceKind::Board.allows(&root, address)
        };
        for class in ["0x058000\n", "0x070001\n", "0x118000\n", "0x00ff00\n", "0x0d1000\n", "0xff0000\n"] {
            assert_eq!(allowed(class), Ok(()), "{class}");
        }
        for class in ["0x010802", "0x020000", "0x030000", "0x050000", "0x060400", "0x0c0330", "0x080600"] {
            let error = allowed(class).unwrap_err().to_string();
            assert!(error.contains("which the system may depend on"), "{error}");
        }
        assert!(allowed("what").is_err());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
