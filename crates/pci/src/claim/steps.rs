//! The writes to sysfs that detach a device from its driver, and those that restore it.

use std::time::Duration;

use crate::iommu::LAZY;
use crate::{Address, Error, Result, Root};

/// The name of no existing driver, which keeps drivers from binding.
const NO_DRIVER: &str = "onehop-none";
/// Offset of the command register in config space, and its bits for decoding memory, for bus mastering and against
/// INTx. The interrupt line is unused here and may be shared; a driver that needs it enables it.
const COMMAND: u64 = 4;
const DECODE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;
const NO_LINE: u16 = 1 << 10;
/// The type of an IOMMU group with strict flushes.
const STRICT: &str = "DMA";
/// Time limit for a device to resume.
const RESUME_TIMEOUT: Duration = Duration::from_secs(1);

/// Who is to drive the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NewDriver {
    /// vfio-pci, for programs that drive a device behind an IOMMU.
    Vfio,
    /// Our kernel module.
    Module,
    /// No driver.
    NoDriver,
}

impl NewDriver {
    pub(crate) fn driver(self) -> Option<&'static str> {
        match self {
            Self::Vfio => Some("vfio-pci"),
            Self::Module => Some("onehop"),
            Self::NoDriver => None,
        }
    }

    /// Whether the device must be detached from its present driver.
    pub(crate) fn is_another(self, before: &Before) -> bool {
        before.driver.as_deref() != self.driver() || self == Self::NoDriver
    }

    fn over(self) -> &'static str {
        self.driver().unwrap_or(NO_DRIVER)
    }
}

/// A device's state before the claim.
#[derive(Clone, Default, Debug)]
pub(crate) struct Before {
    pub(crate) driver: Option<String>,
    pub(crate) driver_override: Option<String>,
    pub(crate) power_control: Option<String>,
    pub(crate) command: u16,
    pub(crate) can_reset: bool,
    /// Its IOMMU group is flushed lazily: unmapped memory can be reached for a while.
    pub(crate) lazy: bool,
}

impl Before {
    pub(crate) fn read(root: &Root, address: Address) -> Result<Self> {
        let folder = format!("/sys/bus/pci/devices/{address}");
        let config = root.bytes(&format!("{folder}/config"), 64)?;
        let word = |at: usize| config.get(at..at + 2).map_or(u16::MAX, |b| u16::from_le_bytes([b[0], b[1]]));
        let text = |name: &str| root.text(&format!("{folder}/{name}")).ok();
        Ok(Self {
            driver: root.link_name(&format!("{folder}/driver")),
            driver_override: text("driver_override").filter(|name| name != "(null)" && !name.is_empty()),
            power_control: text("power/control"),
            command: word(COMMAND as usize),
            can_reset: root.exists(&format!("{folder}/reset")),
            lazy: text("iommu_group/type").is_some_and(|kind| kind == LAZY),
        })
    }

    /// Fails if the device does not respond. A suspended device is woken by the steps.
    pub(crate) fn present(&self, root: &Root, address: Address) -> Result<()> {
        let begun = std::time::Instant::now();
        // A resuming device does not respond for a moment.
        while !super::is_present(root, address) {
            if begun.elapsed() >= RESUME_TIMEOUT {
                return Err(Error::Refused {
                    what: format!("using {address}"),
                    why: "its registers read as all ones: it has no power, or its link is down".into(),
                    fix: format!(
                        "Try `onehop drive recover -d {address}`; if that does not help, power-cycle the machine"
                    ),
                });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

/// A write to a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SysfsWrite {
    pub(crate) path: String,
    pub(crate) bytes: Vec<u8>,
    /// Offset in the file, for config space.
    pub(crate) offset: Option<u64>,
    /// Whether failure aborts the whole operation.
    pub(crate) must: bool,
}

impl SysfsWrite {
    pub(crate) fn must(path: String, text: &str) -> Self {
        Self { path, bytes: text.as_bytes().to_vec(), offset: None, must: true }
    }

    pub(crate) fn may(path: String, text: &str) -> Self {
        Self { must: false, ..Self::must(path, text) }
    }

    fn command(address: Address, value: u16) -> Self {
        Self {
            path: format!("/sys/bus/pci/devices/{address}/config"),
            bytes: value.to_le_bytes().to_vec(),
            offset: Some(COMMAND),
            must: true,
        }
    }
}

/// The steps that claim a device.
pub(crate) fn claim_steps(address: Address, before: &Before, owner: NewDriver) -> Vec<SysfsWrite> {
    let folder = format!("/sys/bus/pci/devices/{address}");
    // A suspended device is resumed first and kept awake: its registers read as ones otherwise.
    let mut steps = vec![SysfsWrite::may(format!("{folder}/power/control"), "on")];
    if owner.is_another(before) {
        steps.extend(change(address, before, owner.over()));
        if owner != NewDriver::NoDriver {
            steps.push(SysfsWrite::must("/sys/bus/pci/drivers_probe".into(), &address.to_string()));
        }
    }
    if owner == NewDriver::NoDriver {
        // Restores power and memory decoding, which a driver disables as it unbinds.
        steps.push(SysfsWrite::must(format!("{folder}/enable"), "1"));
        steps.push(SysfsWrite::command(address, before.command | DECODE | BUS_MASTER | NO_LINE));
    }
    steps
}

/// The steps that restore a device.
pub(crate) fn release_steps(address: Address, before: &Before, owner: NewDriver) -> Vec<SysfsWrite> {
    let folder = format!("/sys/bus/pci/devices/{address}");
    let mut steps = Vec::new();
    if owner == NewDriver::NoDriver {
        // DMA is stopped first. VFIO and the module do that themselves.
        steps.push(SysfsWrite::command(address, (before.command | DECODE | NO_LINE) & !BUS_MASTER));
        if before.can_reset {
            steps.push(SysfsWrite::may(format!("{folder}/reset"), "1"));
        }
        steps.push(SysfsWrite::may(format!("{folder}/enable"), "0"));
    }
    if owner.is_another(before) {
        if let Some(driver) = owner.driver() {
            steps
                .push(SysfsWrite::may(format!("/sys/bus/pci/drivers/{driver}/unbind"), &address.to_string()));
        }
        let over = before.driver_override.as_deref().unwrap_or("\n");
        steps.push(SysfsWrite::must(format!("{folder}/driver_override"), over));
        if before.lazy && owner == NewDriver::Module {
            steps.push(SysfsWrite::may(format!("{folder}/iommu_group/type"), LAZY));
        }
        if let Some(driver) = &before.driver {
            let path = format!("/sys/bus/pci/drivers/{driver}/bind");
            steps.push(SysfsWrite::must(path, &address.to_string()));
        }
    }
    if let Some(power) = &before.power_control {
        steps.push(SysfsWrite::may(format!("{folder}/power/control"), power));
    }
    steps
}

/// The steps that bind a device permanently to a driver, or to the one that the kernel chooses.
pub(crate) fn bind_steps(address: Address, before: &Before, driver: Option<&str>) -> Vec<SysfsWrite> {
    let mut steps = change(address, before, driver.unwrap_or("\n"));
    steps.push(SysfsWrite::must("/sys/bus/pci/drivers_probe".into(), &address.to_string()));
    steps
}

/// The steps that undo those of `bind_steps`, as far as they got: `now` is the present driver, if any.
pub(crate) fn undo_bind_steps(address: Address, before: &Before, now: Option<&str>) -> Vec<SysfsWrite> {
    let over = before.driver_override.as_deref().unwrap_or("\n");
    let mut steps = vec![SysfsWrite::may(format!("/sys/bus/pci/devices/{address}/driver_override"), over)];
    if now == before.driver.as_deref() {
        return steps;
    }
    if let Some(driver) = now {
        steps.push(SysfsWrite::may(format!("/sys/bus/pci/drivers/{driver}/unbind"), &address.to_string()));
    }
    if before.lazy {
        steps.push(SysfsWrite::may(format!("/sys/bus/pci/devices/{address}/iommu_group/type"), LAZY));
    }
    if let Some(driver) = &before.driver {
        steps.push(SysfsWrite::must(format!("/sys/bus/pci/drivers/{driver}/bind"), &address.to_string()));
    }
    steps
}

/// Reserves the device for a driver and unbinds its present one. While it is unbound, its IOMMU group can be made
/// strict, for our module; kernels that cannot do that, and groups of several devices, are left as they are.
fn change(address: Address, before: &Before, to: &str) -> Vec<SysfsWrite> {
    let folder = format!("/sys/bus/pci/devices/{address}");
    let mut steps = vec![SysfsWrite::must(format!("{folder}/driver_override"), to)];
    if let Some(driver) = &before.driver {
        steps.push(SysfsWrite::must(format!("/sys/bus/pci/drivers/{driver}/unbind"), &address.to_string()));
    }
    if before.lazy && Some(to) == NewDriver::Module.driver() {
        steps.push(SysfsWrite::may(format!("{folder}/iommu_group/type"), STRICT));
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(steps: &[SysfsWrite]) -> Vec<String> {
        let of = |step: &SysfsWrite| {
            let name = step.path.rsplit("/sys/bus/pci/").next().unwrap_or_default();
            let text = String::from_utf8_lossy(&step.bytes);
            match step.offset {
                Some(at) => format!("{name}@{at} {:02x?}", step.bytes),
                None => format!("{name} {}", text.trim()),
            }
        };
        steps.iter().map(of).collect()
    }

    fn address() -> Address {
        "0000:0b:00.0".parse().unwrap()
    }

    fn used_by(driver: Option<&str>) -> Before {
        Before {
            driver: driver.map(Into::into),
            power_control: Some("auto".into()),
            command: 0x406,
            can_reset: true,
            driver_override: None,
            lazy: false,
        }
    }

    #[test]
    fn what_the_kernel_had_goes_to_vfio_and_back() {
        let before = used_by(Some("nvme"));
        assert_eq!(
            shown(&claim_steps(address(), &before, NewDriver::Vfio)),
            [
                "devices/0000:0b:00.0/power/control on",
                "devices/0000:0b:00.0/driver_override vfio-pci",
                "drivers/nvme/unbind 0000:0b:00.0",
                "drivers_probe 0000:0b:00.0",
            ]
        );
        assert_eq!(
            shown(&release_steps(address(), &before, NewDriver::Vfio)),
            [
                "drivers/vfio-pci/unbind 0000:0b:00.0",
                "devices/0000:0b:00.0/driver_override ",
                "drivers/nvme/bind 0000:0b:00.0",
                "devices/0000:0b:00.0/power/control auto",
            ]
        );
    }

    #[test]
    fn the_module_takes_and_gives_as_vfio_does() {
        let before = used_by(Some("nvme"));
        let as_module = |steps: Vec<SysfsWrite>| -> Vec<_> {
            shown(&steps).into_iter().map(|step| step.replace("vfio-pci", "onehop")).collect()
        };
        let taken = shown(&claim_steps(address(), &before, NewDriver::Module));
        assert_eq!(taken, as_module(claim_steps(address(), &before, NewDriver::Vfio)));
        let given = shown(&release_steps(address(), &before, NewDriver::Module));
        assert_eq!(given, as_module(release_steps(address(), &before, NewDriver::Vfio)));
    }

    #[test]
    fn the_module_gets_a_group_that_is_flushed_at_once() {
        let before = Before { lazy: true, ..used_by(Some("nvme")) };
        let taken = shown(&claim_steps(address(), &before, NewDriver::Module));
        let unbound = taken.iter().position(|step| step.starts_with("drivers/nvme/unbind")).unwrap();
        assert_eq!(taken[unbound + 1], "devices/0000:0b:00.0/iommu_group/type DMA");
        let given = shown(&release_steps(address(), &before, NewDriver::Module));
        let at = |what: &str| given.iter().position(|step| step.ends_with(what)).unwrap();
        let (lazy, bound) = (at("iommu_group/type DMA-FQ"), at("nvme/bind 0000:0b:00.0"));
        assert!(at("onehop/unbind 0000:0b:00.0") < lazy && lazy < bound, "{given:?}");
        // VFIO flushes by itself.
        let taken = shown(&claim_steps(address(), &before, NewDriver::Vfio));
        assert!(!taken.iter().any(|step| step.contains("iommu_group")), "{taken:?}");
        let bound = shown(&bind_steps(address(), &before, Some("onehop")));
        assert!(bound.contains(&"devices/0000:0b:00.0/iommu_group/type DMA".into()), "{bound:?}");
    }

    #[test]
    fn what_vfio_had_stays_there() {
        let before = used_by(Some("vfio-pci"));
        assert_eq!(
            shown(&claim_steps(address(), &before, NewDriver::Vfio)),
            ["devices/0000:0b:00.0/power/control on"]
        );
        assert_eq!(
            shown(&release_steps(address(), &before, NewDriver::Vfio)),
            ["devices/0000:0b:00.0/power/control auto"]
        );
    }

    #[test]
    fn without_a_driver_bus_mastering_ends_before_all_else() {
        let before = Before { driver_override: Some("mine".into()), ..used_by(Some("nvme")) };
        let taken = shown(&claim_steps(address(), &before, NewDriver::NoDriver));
        assert_eq!(taken.last().unwrap(), "devices/0000:0b:00.0/config@4 [06, 04]");
        assert!(taken.contains(&"devices/0000:0b:00.0/driver_override onehop-none".into()));
        let given = shown(&release_steps(address(), &before, NewDriver::NoDriver));
        assert_eq!(given[0], "devices/0000:0b:00.0/config@4 [02, 04]");
        assert_eq!(given[1], "devices/0000:0b:00.0/reset 1");
        assert!(given.contains(&"devices/0000:0b:00.0/driver_override mine".into()), "{given:?}");
        assert!(given.contains(&"drivers/nvme/bind 0000:0b:00.0".into()));
        // A device that had no driver gets none, and is left disabled as after an unbind.
        let none = Before { command: 0, ..used_by(None) };
        let taken = shown(&claim_steps(address(), &none, NewDriver::NoDriver));
        assert_eq!(taken.last().unwrap(), "devices/0000:0b:00.0/config@4 [06, 04]");
        assert_eq!(
            shown(&release_steps(address(), &none, NewDriver::NoDriver))[0],
            "devices/0000:0b:00.0/config@4 [02, 04]"
        );
        let given = shown(&release_steps(address(), &used_by(None), NewDriver::NoDriver));
        assert!(!given.iter().any(|step| step.ends_with("bind 0000:0b:00.0")), "{given:?}");
    }

    #[test]
    fn unclaimed_devices_go_back() {
        let back = |before: &Before, now: Option<&str>| shown(&undo_bind_steps(address(), before, now));
        let over = "devices/0000:0b:00.0/driver_override ";
        assert_eq!(back(&used_by(Some("nvme")), None), [over, "drivers/nvme/bind 0000:0b:00.0"]);
        assert_eq!(back(&used_by(None), Some("other")), [over, "drivers/other/unbind 0000:0b:00.0"]);
        let lazy = Before { lazy: true, driver_override: Some("mine".into()), ..used_by(Some("mine")) };
        let mine = "devices/0000:0b:00.0/driver_override mine";
        // It was never unbound.
        assert_eq!(back(&lazy, Some("mine")), [mine]);
        assert_eq!(
            back(&lazy, None),
            [mine, "devices/0000:0b:00.0/iommu_group/type DMA-FQ", "drivers/mine/bind 0000:0b:00.0"]
        );
    }

    #[test]
    fn bind_permanently() {
        let to = |from: Option<&str>, to: Option<&str>| shown(&bind_steps(address(), &used_by(from), to));
        assert_eq!(
            to(Some("nvme"), Some("vfio-pci")),
            [
                "devices/0000:0b:00.0/driver_override vfio-pci",
                "drivers/nvme/unbind 0000:0b:00.0",
                "drivers_probe 0000:0b:00.0"
            ]
        );
        assert_eq!(
            to(Some("vfio-pci"), None),
            [
                "devices/0000:0b:00.0/driver_override ",
                "drivers/vfio-pci/unbind 0000:0b:00.0",
                "drivers_probe 0000:0b:00.0"
            ]
        );
    }
}
