//! The kernel: version, P2PDMA, lockdown, io_uring, our module.

use crate::check::{Check, Group, Status};
use crate::facts::Facts;
use crate::facts::module::Bound;
use crate::routes::needs::RELAXED;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![version(facts), p2pdma(facts), ring(facts)];
    checks.extend(module(facts));
    checks.extend([lockdown(facts), strict(facts), multipath(facts)].into_iter().flatten());
    checks
}

fn check(id: &'static str, status: Status, found: impl Into<String>, why: &'static str) -> Check {
    Check::new(id, Group::Kernel, status, found, why)
}

fn version(facts: &Facts) -> Check {
    let why = "5.12 brings dma-bufs to RDMA, 6.2 P2PDMA to user space, 6.19 dma-bufs of VFIO";
    let kernel = &facts.kernel;
    let cpu = if kernel.cpu.name.is_empty() { String::new() } else { format!(", on {}", kernel.cpu.name) };
    if kernel.version() == (0, 0) {
        return check("kernel.version", Status::Unknown, "not told", why).fix("Mount /proc");
    }
    let old = kernel.version() < (5, 12);
    let status = if old { Status::Warn } else { Status::Pass };
    check("kernel.version", status, format!("{}{cpu}", kernel.release), why)
        .fix_if(old, "Use kernel 6.1 or later")
        .by("/proc/sys/kernel/osrelease, /proc/cpuinfo")
}

fn p2pdma(facts: &Facts) -> Check {
    let why =
        "the kernel's own peer-to-peer DMA, which NVIDIA's dma-bufs and cuFile without nvidia-fs rest on";
    let by = facts.kernel.options_from.clone();
    match facts.kernel.option("CONFIG_PCI_P2PDMA") {
        Some(true) => check("kernel.p2pdma", Status::Pass, "CONFIG_PCI_P2PDMA is on", why).by(by),
        Some(false) => check("kernel.p2pdma", Status::Warn, "CONFIG_PCI_P2PDMA is off", why)
            .fix("Use a kernel with it (distributions' kernels mostly have it)")
            .by(by),
        None => check("kernel.p2pdma", Status::Unknown, "the kernel's options are not told", why)
            .fix("Look at /boot/config-$(uname -r) on the host"),
    }
}

/// Words of the module for what is missing, what they mean, and what mends it.
const MISSING: [(&str, &str, &str); 5] = [
    (
        "translation",
        "no IOMMU translates its addresses",
        "Switch the IOMMU on, translating: intel_iommu=on, not iommu=pt",
    ),
    (
        "strict",
        "translations are flushed late (DMA-FQ)",
        "Give it back (onehop drive unbind), and while no device of its group has a driver: echo DMA > \
         /sys/bus/pci/devices/ADDRESS/iommu_group/type (root); or boot with iommu.strict=1. Each unmapping then waits for the \
         IOMMU, which costs I/O rate",
    ),
    (
        "alone",
        "other devices are in its IOMMU group",
        "Use a slot at the CPU, where bridges keep devices apart",
    ),
    ("msi", "interrupts are not remapped", "Switch interrupt remapping on in the firmware's setup"),
    (
        "direct",
        "the firmware keeps memory of its own within its reach",
        "Switch off in the firmware's setup what needs that memory (remote management of storage), or use another slot",
    ),
];

fn module(facts: &Facts) -> Vec<Check> {
    let why = "gives drives and SDR boards GPU memory by dma-bufs, IOMMU on or off; the way that needs no static BAR1";
    if !facts.module.loaded {
        let peers = facts.drives.iter().any(|drive| drive.address.is_some()) || !facts.sdrs.is_empty();
        let useful = peers && !facts.gpus.is_empty();
        let found = "the kernel module onehop is not loaded";
        let fix = if facts.kernel.locked() {
            "Lockdown wants modules that are signed: sign it, then modprobe onehop (docs/kernel-module.md)"
        } else {
            "kmod/make-deb makes its package; then modprobe onehop (docs/kernel-module.md)"
        };
        return vec![check("kernel.onehop", Status::Info, found, why).fix_if(useful, fix).by("/sys/module")];
    }
    let devices = &facts.module.devices;
    let found = match devices.len() {
        0 => "loaded; no device was given to it".to_owned(),
        count => format!("loaded, and has {}", super::gpu::plural(count, "device")),
    };
    let free = facts.drives.iter().find(|drive| drive.may_be_in_use().is_none());
    let bind = free.and_then(|drive| drive.address).map(|at| {
        format!("onehop drive bind -d {at} --driver onehop gives it that drive, which nobody uses")
    });
    let mut checks = vec![
        check("kernel.onehop", Status::Pass, found, why)
            .fix_if(devices.is_empty() && bind.is_some(), bind.unwrap_or_default())
            .by("/sys/module/onehop"),
    ];
    checks.extend(devices.iter().map(bound));
    checks
}

/// A device of the module's, and who may have it.
fn bound(device: &Bound) -> Check {
    let why = "without all of these only privileged processes may open it, as the device could reach other memory than theirs";
    let check =
        |status, found: String| check("kernel.onehop_device", status, found, why).about(device.address);
    let by = format!("/dev/onehop-{}, onehop_missing", device.address);
    if !device.file {
        let found = "the module has it, and there is no device file".into();
        return check(Status::Warn, found)
            .fix("Let udev or devtmpfs make /dev/onehop-*, and show it to the container")
            .by(by);
    }
    let Some(missing) = &device.missing else {
        let found = "its device file is there; what it lacks is not told".into();
        return check(Status::Unknown, found).fix("Load the module of this version").by(by);
    };
    if missing.is_empty() {
        return check(Status::Pass, "members of the group onehop may open it".into()).by(by);
    }
    let known = |word: &String| MISSING.iter().find(|(name, ..)| name == word);
    let words: Vec<_> =
        missing.iter().map(|word| known(word).map_or(word.as_str(), |(_, means, _)| means)).collect();
    let fix = missing.iter().find_map(known).map_or("See docs/kernel-module.md", |(.., fix)| fix);
    let fix = fix.replace("ADDRESS", &device.address.to_string());
    check(Status::Info, format!("privileged processes only: {}", words.join("; "))).fix(fix).by(by)
}

const URING_ON: &str = "sysctl kernel.io_uring_disabled=0 (root): every user may then make rings, which some distributions forbid as a risk";

fn ring(facts: &Facts) -> Check {
    let why = "files are read past the page cache by io_uring (cpu/pinned); without it by one call after the other in each thread";
    match (&facts.kernel.io_uring, facts.kernel.io_uring_disabled) {
        (Some(Ok(())), _) => {
            check("kernel.io_uring", Status::Pass, "a ring was made", why).by("tried: io_uring_setup")
        }
        (Some(Err(error)), limit) => {
            let fix = match limit {
                Some(0) | None => {
                    "A sandbox's or container's seccomp filter forbids it: allow io_uring_setup, _enter, _register"
                }
                Some(_) => URING_ON,
            };
            check("kernel.io_uring", Status::Warn, error.clone(), why).fix(fix).by("tried: io_uring_setup")
        }
        (None, Some(0)) => check("kernel.io_uring", Status::Info, "allowed; not tried", why),
        (None, Some(_)) => {
            check("kernel.io_uring", Status::Warn, "switched off by the sysctl kernel.io_uring_disabled", why)
                .fix(URING_ON)
        }
        (None, None) => {
            check("kernel.io_uring", Status::Unknown, "not tried", why).fix("Look on the machine itself")
        }
    }
}

fn lockdown(facts: &Facts) -> Option<Check> {
    let level = facts.kernel.lockdown.as_deref()?;
    let why = "lockdown, as Secure Boot brings it, forbids mapping BARs from user space and unsigned kernel modules";
    let locked = facts.kernel.locked();
    let status = if locked { Status::Warn } else { Status::Pass };
    Some(
        check("kernel.lockdown", status, level, why)
            .fix_if(locked, "Use VFIO, which stays allowed, or sign the module onehop (docs/kernel-module.md): both keep Secure Boot on")
            .by("/sys/kernel/security/lockdown"),
    )
}

/// Who may map a BAR that has a driver.
fn strict(facts: &Facts) -> Option<Check> {
    let on = facts.kernel.option("CONFIG_IO_STRICT_DEVMEM")?;
    let why = "with it nobody maps the BAR of a device whose driver has claimed it, the GPU's BAR1 too";
    on.then(|| {
        let relaxed = facts.kernel.command_line.iter().any(|word| word == "iomem=relaxed");
        let status = if relaxed { Status::Info } else { Status::Warn };
        check("kernel.strict_devmem", status, "CONFIG_IO_STRICT_DEVMEM is on", why).fix_if(!relaxed, RELAXED)
    })
}

fn multipath(facts: &Facts) -> Option<Check> {
    let on = facts.kernel.multipath?;
    let why = "cuFile's way without nvidia-fs needs it off (nvme_core.multipath=N); onehop does not mind";
    Some(
        check("kernel.nvme_multipath", Status::Info, if on { "on" } else { "off" }, why)
            .by("/sys/module/nvme_core/parameters/multipath"),
    )
}
