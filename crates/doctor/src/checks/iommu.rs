//! Address translation: IOMMU, its mode, groups, VFIO.

use std::collections::BTreeMap;

use onehop_pci::{Address, IommuGroup};

use crate::check::{Check, CheckGroup, Status};
use crate::facts::Facts;
use crate::facts::drive::DriveFacts;
use crate::fixes::{group_user, iommu_fix, isolation_fix};
use crate::pair::list;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![mode(facts)];
    checks.extend(lazy(facts));
    checks.extend(shared(facts));
    checks.push(vfio(facts));
    checks
}

fn mode(facts: &Facts) -> Check {
    let why = "VFIO needs an IOMMU. With translation it confines a device to its own memory, and lets 32-bit boards reach high addresses";
    let groups = &facts.tree.groups;
    let check = |status, found: String| {
        let check = Check::new("iommu.mode", CheckGroup::Iommu, status, found, why)
            .by("/sys/kernel/iommu_groups, /sys/class/iommu");
        let words = &facts.kernel.command_line;
        if words.is_empty() { check } else { check.by(format!("command line: {}", words.join(" "))) }
    };
    if facts.tree.devices.is_empty() {
        return check(Status::Unknown, "no PCI devices are visible".into())
            .fix("Run where /sys shows the PCI bus");
    }
    if groups.is_empty() {
        let found = if facts.kernel.iommu_units.is_empty() {
            "no IOMMU"
        } else {
            "an IOMMU with no device behind it"
        };
        return check(Status::Warn, found.into()).fix(iommu_fix(facts));
    }
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for group in groups.values() {
        *kinds.entry(group.kind.as_deref().unwrap_or("unknown type")).or_default() += 1;
    }
    let kinds: Vec<_> = kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    let units =
        if facts.kernel.iommu_units.is_empty() { "IOMMU" } else { &facts.kernel.iommu_units.join(", ") };
    check(
        Status::Pass,
        format!("{units}: {} ({})", super::gpu::plural(groups.len(), "group"), kinds.join(", ")),
    )
}

/// With lazy flushing, a device can still write to memory after it was unmapped.
fn lazy(facts: &Facts) -> Option<Check> {
    let devices =
        facts.drives.iter().filter_map(|drive| drive.address).chain(facts.sdrs.iter().map(|sdr| sdr.address));
    let is_lazy = |address: &Address| {
        let group = facts.device(*address).and_then(|device| facts.tree.group_of(device));
        group.is_some_and(|group| group.kind.as_deref() == Some("DMA-FQ"))
    };
    let lazy: Vec<_> = devices.filter(is_lazy).collect();
    // VFIO creates its own domain; the module uses the existing one.
    (!lazy.is_empty() && facts.module.loaded).then(|| {
        let why = "with lazy flushing, devices were seen to write into memory after it was unmapped";
        let found = format!("translations of {} are flushed lazily (DMA-FQ)", list(&lazy));
        Check::new("iommu.lazy", CheckGroup::Iommu, Status::Warn, found, why)
            .fix(strict(facts, &lazy))
            .by("/sys/kernel/iommu_groups/*/type")
    })
}

/// How to make a group strict, if nothing in it is in use.
fn strict(facts: &Facts, lazy: &[Address]) -> String {
    let free = |address: &&Address| group_user(facts, **address).is_none();
    let group = |address: &Address| Some((*address, facts.device(*address)?.iommu_group?));
    match lazy.iter().find(free).and_then(group) {
        Some((address, group)) => format!(
            "While no device of the group has a driver: echo DMA > /sys/kernel/iommu_groups/{group}/type (root; for {address}). \
             Each unmap then waits for the IOMMU, which costs throughput"
        ),
        None => {
            "Wait until nothing in its group is in use, then make the group strict (docs/kernel-module.md)"
                .into()
        }
    }
}

fn shared(facts: &Facts) -> Vec<Check> {
    let why = "VFIO works on whole groups: all devices of a group are detached together";
    let one = |address| {
        // A device behind VMD cannot be claimed in any group.
        let device = facts.device(address).filter(|device| !device.behind_vmd)?;
        let (number, group) = (device.iommu_group?, facts.tree.group_of(device)?);
        let others: Vec<_> = group
            .devices
            .iter()
            .copied()
            .filter(|other| *other != address && facts.device(*other).is_some_and(|other| !other.is_bridge()))
            .collect();
        let check = |status, found: String| {
            Check::new("iommu.group", CheckGroup::Iommu, status, found, why).about(address)
        };
        Some(if others.is_empty() {
            check(Status::Pass, format!("alone in group {number}"))
        } else {
            let found = format!("group {number} also holds {}", list(&others));
            if facts.has_gpu(&others) && facts.module.loaded {
                return Some(check(
                    Status::Info,
                    format!("{found}. VFIO cannot claim it; the module onehop claims the drive alone"),
                ));
            }
            let users = facts.drive(address).and_then(DriveFacts::may_be_in_use);
            check(Status::Warn, found).fix(match users {
                Some(users) => {
                    format!("Use another drive for direct routes: this one is or may be in use ({users})")
                }
                None => isolation_fix(facts, &others),
            })
        })
    };
    facts.drives.iter().filter_map(|drive| one(drive.address?)).collect()
}

fn vfio(facts: &Facts) -> Check {
    let kernel = &facts.kernel;
    let why = "lets a program drive a device without a kernel module of its own";
    let mut words = Vec::new();
    words.extend(kernel.has("vfio_pci").then_some("vfio-pci is loaded".to_owned()));
    words.extend(kernel.vfio_files.iter().map(|path| format!("{path} exists")));
    words.extend(
        (!kernel.vfio_groups.is_empty()).then(|| format!("groups {}", kernel.vfio_groups.join(", "))),
    );
    let usable = !words.is_empty();
    words.extend(kernel.unsafe_no_iommu.then(|| "unsafe no-IOMMU mode is enabled".to_owned()));
    let check = |status, found: String| {
        Check::new("iommu.vfio", CheckGroup::Iommu, status, found, why)
            .by("/sys/module, /dev/vfio, /dev/iommu")
    };
    // Without an IOMMU a device may write anywhere, even if VFIO simulates groups.
    if kernel.unsafe_no_iommu && kernel.iommu_units.is_empty() {
        let fix = format!(
            "{}. Then echo N > /sys/module/vfio/parameters/enable_unsafe_noiommu_mode",
            iommu_fix(facts)
        );
        return check(Status::Warn, words.join(", ")).fix(fix);
    }
    // VFIO's unsafe mode also creates groups; their type reads as `unknown`.
    let is_real = |group: &IommuGroup| group.kind.as_deref() != Some("unknown");
    if usable && !facts.tree.groups.values().any(is_real) {
        words.push("no device is in an IOMMU group".to_owned());
        return check(Status::Warn, words.join(", ")).fix(iommu_fix(facts));
    }
    match (!usable, kernel.option("CONFIG_VFIO_PCI")) {
        (false, _) => check(Status::Pass, words.join(", ")),
        (true, Some(true)) => {
            check(Status::Info, "available, not loaded".into()).fix("Run modprobe vfio-pci (root)")
        }
        (true, Some(false)) => {
            check(Status::Warn, "this kernel has no vfio-pci".into()).fix("Use a kernel with CONFIG_VFIO_PCI")
        }
        (true, None) => check(Status::Unknown, "not loaded; unknown whether this kernel has it".into())
            .fix("Run modprobe vfio-pci (root)"),
    }
}
