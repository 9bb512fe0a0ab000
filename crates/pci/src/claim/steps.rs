//! What is written into which files of sysfs to take a device from its driver, and to give it back.

use std::time::Duration;

use crate::iommu::LAZY;
use crate::{Address, Error, Result, Root};

/// A driver's name that no driver has: it keeps the others away.
const NOBODY: &str = "onehop-none";
/// Offset of the command register in config space, and its bits that let a device answer, write to memory, and that keep it from
/// its interrupt line. Nobody waits for that line, which others may share; a driver that wants it switches it on as it comes.
const COMMAND: u64 = 4;
const DECODE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;
const NO_LINE: u16 = 1 << 10;
/// The type of an IOMMU group that is flushed at once.
const STRICT: &str = "DMA";
/// How long a device may take to wake up.
const AWAKE_WITHIN: Duration = Duration::from_secs(1);

/// Who is to have the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    /// The driver that lets programs drive a device behind an IOMMU.
    Vfio,
    /// Our kernel module.
    Module,
    /// No driver.
    Nobody,
}

impl Owner {
    pub(crate) fn driver(self) -> Option<&'static str> {
        match self {
            Self::Vfio => Some("vfio-pci"),
            Self::Module => Some("onehop"),
            Self::Nobody => None,
        }
    }

    /// Whether the device is to be taken from whoever has it.
    pub(crate) fn is_another(self, before: &Before) -> bool {
        before.driver.as_deref() != self.driver() || self == Self::Nobody
    }

    fn over(self) -> &'static str {
        self.driver().unwrap_or(NOBODY)
    }
}

/// How a device was found.
#[derive(Clone, Default, Debug)]
pub(crate) struct Before {
    pub(crate) driver: Option<String>,
    pub(crate) driver_override: Option<String>,
    pub(crate) power_control: Option<String>,
    pub(crate) command: u16,
    pub(crate) can_reset: bool,
    /// Its IOMMU group flushes lazily: what was unmapped is still reached for a while.
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

    /// An error for a device that does not answer; one that only sleeps is woken by the steps.
    pub(crate) fn present(&self, root: &Root, address: Address) -> Result<()> {
        let begun = std::time::Instant::now();
        // A device that is waking up answers nothing for a moment.
        while !super::is_present(root, address) {
            if begun.elapsed() >= AWAKE_WITHIN {
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

/// Something that is written into a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Step {
    pub(crate) path: String,
    pub(crate) bytes: Vec<u8>,
    /// Where in the file, for config space.
    pub(crate) offset: Option<u64>,
    /// Whether all is lost if this fails.
    pub(crate) must: bool,
}

impl Step {
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

/// The steps that take a device.
pub(crate) fn take(address: Address, before: &Before, owner: Owner) -> Vec<Step> {
    let folder = format!("/sys/bus/pci/devices/{address}");
    // A sleeping device is woken first, and kept awake: its registers read as ones otherwise.
    let mut steps = vec![Step::may(format!("{folder}/power/control"), "on")];
    if owner.is_another(before) {
        steps.extend(change(address, before, owner.over()));
        if owner != Owner::Nobody {
            steps.push(Step::must("/sys/bus/pci/drivers_probe".into(), &address.to_string()));
        }
    }
    if owner == Owner::Nobody {
        // Gives it its power and its memory back, which a driver that goes takes from it.
        steps.push(Step::must(format!("{folder}/enable"), "1"));
        steps.push(Step::command(address, before.command | DECODE | BUS_MASTER | NO_LINE));
    }
    steps
}

/// The steps that put a device back to where it was.
pub(crate) fn give(address: Address, before: &Before, owner: Owner) -> Vec<Step> {
    let folder = format!("/sys/bus/pci/devices/{address}");
    let mut steps = Vec::new();
    if owner == Owner::Nobody {
        // First of all it must not write to memory any more. VFIO and the module see to that by themselves.
        steps.push(Step::command(address, (before.command | DECODE | NO_LINE) & !BUS_MASTER));
        if before.can_reset {
            steps.push(Step::may(format!("{folder}/reset"), "1"));
        }
        steps.push(Step::may(format!("{folder}/enable"), "0"));
    }
    if owner.is_another(before) {
        if let Some(driver) = owner.driver() {
            steps.push(Step::may(format!("/sys/bus/pci/drivers/{driver}/unbind"), &address.to_string()));
        }
        let over = before.driver_override.as_deref().unwrap_or("\n");
        steps.push(Step::must(format!("{folder}/driver_override"), over));
        if before.lazy && owner == Owner::Module {
            steps.push(Step::may(format!("{folder}/iommu_group/type"), LAZY));
        }
        if let Some(driver) = &before.driver {
            let path = format!("/sys/bus/pci/drivers/{driver}/bind");
            steps.push(Step::must(path, &address.to_string()));
        }
    }
    if let Some(power) = &before.power_control {
        steps.push(Step::may(format!("{folder}/power/control"), power));
    }
    steps
}

/// The steps that give a device to a driver to stay, or to the one that the kernel chooses.
pub(crate) fn hand_to(address: Address, before: &Before, driver: Option<&str>) -> Vec<Step> {
    let mut steps = change(address, before, driver.unwrap_or("\n"));
    steps.push(Step::must("/sys/bus/pci/drivers_probe".into(), &address.to_string()));
    steps
}

/// The steps that undo those of `hand_to`, as far as they went: a driver has the device `now`, or none has.
pub(crate) fn put_back(address: Address, before: &Before, now: Option<&str>) -> Vec<Step> {
    let over = before.driver_override.as_deref().unwrap_or("\n");
    let mut steps = vec![Step::may(format!("/sys/bus/pci/devices/{address}/driver_override"), over)];
    if now == before.driver.as_deref() {
        return steps;
    }
    if let Some(driver) = now {
        steps.push(Step::may(format!("/sys/bus/pci/drivers/{driver}/unbind"), &address.to_string()));
    }
    if before.lazy {
        steps.push(Step::may(format!("/sys/bus/pci/devices/{address}/iommu_group/type"), LAZY));
    }
    if let Some(driver) = &before.driver {
        steps.push(Step::must(format!("/sys/bus/pci/drivers/{driver}/bind"), &address.to_string()));
    }
    steps
}

/// Reserves it for a driver, and takes it from the one that has it. While no driver has it, its IOMMU group can be made
/// strict, which our module is to have: kernels that cannot do that, or groups of several devices, stay as they are.
fn change(address: Address, before: &Before, to: &str) -> Vec<Step> {
    let folder = format!("/sys/bus/pci/devices/{address}");
    let mut steps = vec![Step::must(format!("{folder}/driver_override"), to)];
    if let Some(driver) = &before.driver {
        steps.push(Step::must(format!("/sys/bus/pci/drivers/{driver}/unbind"), &address.to_string()));
    }
    if before.lazy && Some(to) == Owner::Module.driver() {
        steps.push(Step::may(format!("{folder}/iommu_group/type"), STRICT));
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(steps: &[Step]) -> Vec<String> {
        let of = |step: &Step| {
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
            shown(&take(address(), &before, Owner::Vfio)),
            [
                "devices/0000:0b:00.0/power/control on",
                "devices/0000:0b:00.0/driver_override vfio-pci",
                "drivers/nvme/unbind 0000:0b:00.0",
                "drivers_probe 0000:0b:00.0",
            ]
        );
        assert_eq!(
            shown(&give(address(), &before, Owner::Vfio)),
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
        let as_module = |steps: Vec<Step>| -> Vec<_> {
            shown(&steps).into_iter().map(|step| step.replace("vfio-pci", "onehop")).collect()
        };
        let taken = shown(&take(address(), &before, Owner::Module));
        assert_eq!(taken, as_module(take(address(), &before, Owner::Vfio)));
        let given = shown(&give(address(), &before, Owner::Module));
        assert_eq!(given, as_module(give(address(), &before, Owner::Vfio)));
    }

    #[test]
    fn the_module_gets_a_group_that_is_flushed_at_once() {
        let before = Before { lazy: true, ..used_by(Some("nvme")) };
        let taken = shown(&take(address(), &before, Owner::Module));
        let unbound = taken.iter().position(|step| step.starts_with("drivers/nvme/unbind")).unwrap();
        assert_eq!(taken[unbound + 1], "devices/0000:0b:00.0/iommu_group/type DMA");
        let given = shown(&give(address(), &before, Owner::Module));
        let at = |what: &str| given.iter().position(|step| step.ends_with(what)).unwrap();
        let (lazy, bound) = (at("iommu_group/type DMA-FQ"), at("nvme/bind 0000:0b:00.0"));
        assert!(at("onehop/unbind 0000:0b:00.0") < lazy && lazy < bound, "{given:?}");
        // VFIO flushes by itself.
        let taken = shown(&take(address(), &before, Owner::Vfio));
        assert!(!taken.iter().any(|step| step.contains("iommu_group")), "{taken:?}");
        let bound = shown(&hand_to(address(), &before, Some("onehop")));
        assert!(bound.contains(&"devices/0000:0b:00.0/iommu_group/type DMA".into()), "{bound:?}");
    }

    #[test]
    fn what_vfio_had_stays_there() {
        let before = used_by(Some("vfio-pci"));
        assert_eq!(shown(&take(address(), &before, Owner::Vfio)), ["devices/0000:0b:00.0/power/control on"]);
        assert_eq!(
            shown(&give(address(), &before, Owner::Vfio)),
            ["devices/0000:0b:00.0/power/control auto"]
        );
    }

    #[test]
    fn without_a_driver_bus_mastering_ends_before_all_else() {
        let before = Before { driver_override: Some("mine".into()), ..used_by(Some("nvme")) };
        let taken = shown(&take(address(), &before, Owner::Nobody));
        assert_eq!(taken.last().unwrap(), "devices/0000:0b:00.0/config@4 [06, 04]");
        assert!(taken.contains(&"devices/0000:0b:00.0/driver_override onehop-none".into()));
        let given = shown(&give(address(), &before, Owner::Nobody));
        assert_eq!(given[0], "devices/0000:0b:00.0/config@4 [02, 04]");
        assert_eq!(given[1], "devices/0000:0b:00.0/reset 1");
        assert!(given.contains(&"devices/0000:0b:00.0/driver_override mine".into()), "{given:?}");
        assert!(given.contains(&"drivers/nvme/bind 0000:0b:00.0".into()));
        // One that nobody had is bound to nobody, and is as silent as one that a driver had left.
        let none = Before { command: 0, ..used_by(None) };
        let taken = shown(&take(address(), &none, Owner::Nobody));
        assert_eq!(taken.last().unwrap(), "devices/0000:0b:00.0/config@4 [06, 04]");
        assert_eq!(
            shown(&give(address(), &none, Owner::Nobody))[0],
            "devices/0000:0b:00.0/config@4 [02, 04]"
        );
        let given = shown(&give(address(), &used_by(None), Owner::Nobody));
        assert!(!given.iter().any(|step| step.ends_with("bind 0000:0b:00.0")), "{given:?}");
    }

    #[test]
    fn what_no_driver_took_goes_back() {
        let back = |before: &Before, now: Option<&str>| shown(&put_back(address(), before, now));
        let over = "devices/0000:0b:00.0/driver_override ";
        assert_eq!(back(&used_by(Some("nvme")), None), [over, "drivers/nvme/bind 0000:0b:00.0"]);
        assert_eq!(back(&used_by(None), Some("other")), [over, "drivers/other/unbind 0000:0b:00.0"]);
        let lazy = Before { lazy: true, driver_override: Some("mine".into()), ..used_by(Some("mine")) };
        let mine = "devices/0000:0b:00.0/driver_override mine";
        // It never left.
        assert_eq!(back(&lazy, Some("mine")), [mine]);
        assert_eq!(
            back(&lazy, None),
            [mine, "devices/0000:0b:00.0/iommu_group/type DMA-FQ", "drivers/mine/bind 0000:0b:00.0"]
        );
    }

    #[test]
    fn handing_over_to_stay() {
        let to = |from: Option<&str>, to: Option<&str>| shown(&hand_to(address(), &used_by(from), to));
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
