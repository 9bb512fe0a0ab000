//! The kernel: version, P2PDMA, lockdown, io_uring, the module onehop.

use onehop_pci::Address;

use crate::check::{Check, CheckGroup, Status};
use crate::facts::Facts;
use crate::facts::module::Bound;
use crate::fixes::{RELAXED, group_user, translation_fix};

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![version(facts), p2pdma(facts), ring(facts)];
    checks.extend(module(facts));
    checks.extend([lockdown(facts), strict(facts), multipath(facts)].into_iter().flatten());
    checks
}

fn check(id: &'static str, status: Status, found: impl Into<String>, why: &'static str) -> Check {
    Check::new(id, CheckGroup::Kernel, status, found, why)
}

fn version(facts: &Facts) -> Check {
    let why = "5.12 adds dma-bufs for RDMA, 6.2 P2PDMA for user space, 6.19 dma-bufs from VFIO";
    let kernel = &facts.kernel;
    let cpu = if kernel.cpu.name.is_empty() { String::new() } else { format!(", on {}", kernel.cpu.name) };
    if kernel.version() == (0, 0) {
        return check("kernel.version", Status::Unknown, "unknown", why).fix("Mount /proc");
    }
    let old = kernel.version() < (5, 12);
    let status = if old { Status::Warn } else { Status::Pass };
    check("kernel.version", status, format!("{}{cpu}", kernel.release), why)
        .fix_if(old, "Use kernel 6.1 or later")
        .by("/proc/sys/kernel/osrelease, /proc/cpuinfo")
}

fn p2pdma(facts: &Facts) -> Check {
    let why = "peer-to-peer DMA in the kernel; NVIDIA's dma-bufs, and cuFile without nvidia-fs, need it";
    let by = facts.kernel.options_from.clone();
    match facts.kernel.option("CONFIG_PCI_P2PDMA") {
        Some(true) => check("kernel.p2pdma", Status::Pass, "CONFIG_PCI_P2PDMA is on", why).by(by),
        Some(false) => check("kernel.p2pdma", Status::Warn, "CONFIG_PCI_P2PDMA is off", why)
            .fix("Use a kernel with CONFIG_PCI_P2PDMA (most distributions enable it)")
            .by(by),
        None => check("kernel.p2pdma", Status::Unknown, "the kernel's options are unknown", why)
            .fix("Read /boot/config-$(uname -r) on the host"),
    }
}

/// The module's words for what is missing, and their meaning.
const MISSING_WORDS: [(&str, &str); 5] = [
    ("translation", "no IOMMU translates its addresses"),
    ("strict", "translations are flushed lazily (DMA-FQ)"),
    ("alone", "other devices are in its IOMMU group"),
    ("msi", "interrupts are not remapped"),
    ("direct", "the firmware reserves memory that the device can reach"),
];

/// How to provide what the module misses.
fn missing_fix(facts: &Facts, word: &str, address: Address) -> String {
    match word {
        "translation" => translation_fix(facts, address),
        "strict" if group_user(facts, address).is_some() => {
            "Wait until nothing in its IOMMU group is in use, then release it and make the group strict (docs/kernel-module.md)".into()
        }
        "strict" => format!(
            "Release it (onehop drive unbind -d {address}). While no device of its group has a driver: echo DMA > \
             /sys/bus/pci/devices/{address}/iommu_group/type (root); or boot with iommu.strict=1. Each unmap then waits for the IOMMU, which \
             costs throughput"
        ),
        _ if facts.machine.is_virtual() => "Use the device on the host: a virtual machine gets this from its host".into(),
        "alone" => "Use a slot at the CPU, where bridges isolate devices".into(),
        "msi" => "Enable interrupt remapping in the firmware setup".into(),
        "direct" => {
            "Disable what needs that memory in the firmware setup (remote management of storage), or use another slot".into()
        }
        _ => "See docs/kernel-module.md".into(),
    }
}

fn module(facts: &Facts) -> Vec<Check> {
    let why = "lets drives and SDR boards reach GPU memory by dma-bufs, with or without an IOMMU; needs no static BAR1";
    if !facts.module.loaded {
        let peers = facts.drives.iter().any(|drive| drive.address.is_some()) || !facts.sdrs.is_empty();
        let useful = peers && !facts.gpus.is_empty();
        let found = "the kernel module onehop is not loaded";
        let fix = if facts.kernel.locked() {
            "Lockdown requires signed modules: sign it, then run modprobe onehop (docs/kernel-module.md)"
        } else {
            "Build its package with kmod/make-deb, then run modprobe onehop (docs/kernel-module.md)"
        };
        return vec![check("kernel.onehop", Status::Info, found, why).fix_if(useful, fix).by("/sys/module")];
    }
    let devices = &facts.module.devices;
    let found = match devices.len() {
        0 => "loaded; no device bound".to_owned(),
        count => format!("loaded; {} bound", super::gpu::plural(count, "device")),
    };
    let free = facts.drives.iter().find(|drive| drive.may_be_in_use().is_none());
    let bind = free.and_then(|drive| drive.address).map(|at| {
        format!("Run onehop drive bind -d {at} --driver onehop to bind that drive, which is not in use")
    });
    let mut checks = vec![
        check("kernel.onehop", Status::Pass, found, why)
            .fix_if(devices.is_empty() && bind.is_some(), bind.unwrap_or_default())
            .by("/sys/module/onehop"),
    ];
    checks.extend(devices.iter().map(|device| bound(facts, device)));
    checks
}

/// A device bound to the module, and who may open it.
fn bound(facts: &Facts, device: &Bound) -> Check {
    let why =
        "without these, only privileged processes may open it: the device could reach other programs' memory";
    let check =
        |status, found: String| check("kernel.onehop_device", status, found, why).about(device.address);
    let by = format!("/dev/onehop-{}, onehop_missing", device.address);
    if !device.file {
        let found = "bound to the module, but its device file is missing".into();
        return check(Status::Warn, found)
            .fix("Let udev or devtmpfs create /dev/onehop-*, and pass it to the container")
            .by(by);
    }
    let Some(missing) = &device.missing else {
        let found = "its device file exists; what it lacks is unknown".into();
        return check(Status::Unknown, found).fix("Load the module of the same version as onehop").by(by);
    };
    if missing.is_empty() {
        return check(Status::Pass, "members of the group onehop may open it".into()).by(by);
    }
    let means = |word: &String| MISSING_WORDS.iter().find(|(name, _)| name == word).map(|(_, means)| *means);
    let words: Vec<_> = missing.iter().map(|word| means(word).unwrap_or(word)).collect();
    let first = missing.iter().find(|word| means(word).is_some());
    let fix = missing_fix(facts, first.map_or("", String::as_str), device.address);
    check(Status::Info, format!("privileged processes only: {}", words.join("; "))).fix(fix).by(by)
}

const URING_ON: &str = "Run sysctl kernel.io_uring_disabled=0 (root). Every user may then create rings, which some distributions disable as a security risk";

fn ring(facts: &Facts) -> Check {
    let why = "cpu/pinned reads files past the page cache by io_uring; without it, each thread makes one call at a time";
    match (&facts.kernel.io_uring, facts.kernel.io_uring_disabled) {
        (Some(Ok(())), _) => {
            check("kernel.io_uring", Status::Pass, "created a ring", why).by("tried: io_uring_setup")
        }
        (Some(Err(error)), limit) => {
            let fix = match limit {
                Some(0) | None => {
                    "A seccomp filter of a sandbox or container blocks it: allow io_uring_setup, io_uring_enter and io_uring_register. Every \
                     program in it may then create rings, which such filters block as a security risk"
                }
                Some(_) => URING_ON,
            };
            check("kernel.io_uring", Status::Warn, error.clone(), why).fix(fix).by("tried: io_uring_setup")
        }
        (None, Some(0)) => check("kernel.io_uring", Status::Info, "allowed; not tested", why),
        (None, Some(_)) => {
            check("kernel.io_uring", Status::Warn, "disabled by the sysctl kernel.io_uring_disabled", why)
                .fix(URING_ON)
        }
        (None, None) => check("kernel.io_uring", Status::Unknown, "not tested", why)
            .fix("Run doctor on the machine itself"),
    }
}

fn lockdown(facts: &Facts) -> Option<Check> {
    let level = facts.kernel.lockdown.as_deref()?;
    let why = "lockdown, which Secure Boot enables, forbids mapping BARs from user space and loading unsigned modules";
    let locked = facts.kernel.locked();
    let status = if locked { Status::Warn } else { Status::Pass };
    Some(
        check("kernel.lockdown", status, level, why)
            .fix_if(locked, "Use VFIO, which lockdown allows, or sign the module onehop (docs/kernel-module.md). Both keep Secure Boot on")
            .by("/sys/kernel/security/lockdown"),
    )
}

/// Whether the kernel forbids mapping the BAR of a device that has a driver.
fn strict(facts: &Facts) -> Option<Check> {
    let on = facts.kernel.option("CONFIG_IO_STRICT_DEVMEM")?;
    let why = "it forbids mapping the BAR of a device that a driver has claimed, including the GPU's BAR1";
    on.then(|| {
        let relaxed = facts.kernel.command_line.iter().any(|word| word == "iomem=relaxed");
        let status = if relaxed { Status::Info } else { Status::Warn };
        check("kernel.strict_devmem", status, "CONFIG_IO_STRICT_DEVMEM is on", why).fix_if(!relaxed, RELAXED)
    })
}

fn multipath(facts: &Facts) -> Option<Check> {
    let on = facts.kernel.multipath?;
    let why = "cuFile without nvidia-fs needs it off (nvme_core.multipath=N); onehop works with either";
    Some(
        check("kernel.nvme_multipath", Status::Info, if on { "on" } else { "off" }, why)
            .by("/sys/module/nvme_core/parameters/multipath"),
    )
}
