//! NVMe drives: link, power, users, limits.

use onehop_pci::Device;

use crate::check::{Check, CheckGroup, Status, bytes, rate};
use crate::facts::Facts;
use crate::facts::drive::DriveFacts;
use crate::fixes::{unless_used, users_fix, vmd_fix};

pub(super) fn found(facts: &Facts) -> Check {
    let why = "direct routes need an NVMe drive";
    if facts.drives.is_empty() {
        return Check::new(
            "drive.present",
            CheckGroup::Drive,
            Status::Info,
            "no NVMe drive on the PCI bus",
            why,
        )
        .fix("Use a simulated drive (-d sim:mem:64M), or load files by cpu/pinned")
        .by("/sys/bus/pci/devices: class 0x0108");
    }
    let names: Vec<_> = facts.drives.iter().map(|drive| drive.title()).collect();
    Check::new("drive.present", CheckGroup::Drive, Status::Pass, names.join(", "), why)
}

pub(super) fn checks(facts: &Facts, drive: &DriveFacts) -> Vec<Check> {
    let Some(device) = drive.address.and_then(|address| facts.device(address)) else { return Vec::new() };
    let all = [
        Some(users(facts, drive)),
        Some(driver(drive, device)),
        power(drive, device),
        link(facts, device),
        state(drive),
        Some(limits(drive, device, facts.place.root)),
        cmb(drive),
        hmb(drive),
        vmd(facts, device),
    ];
    all.into_iter().flatten().map(|check| check.about(device.address)).collect()
}

fn check(id: &'static str, status: Status, found: impl Into<String>, why: &'static str) -> Check {
    Check::new(id, CheckGroup::Drive, status, found, why)
}

fn users(facts: &Facts, drive: &DriveFacts) -> Check {
    let why = "direct routes detach the drive from the kernel, so nothing on it may be in use";
    let by = "/proc/self/mountinfo, /proc/swaps, holders, an exclusive open";
    match &drive.users {
        None => check("drive.use", Status::Pass, "not in use", why).by(by),
        Some(Ok(users)) => check("drive.use", Status::Info, users.clone(), why)
            .fix("Use another drive for direct routes. cpu/pinned and cpu/cached work on this one as it is")
            .by(by),
        Some(Err(error)) => check("drive.use", Status::Unknown, format!("cannot determine: {error}"), why)
            .fix(users_fix(facts)),
    }
}

fn driver(drive: &DriveFacts, device: &Device) -> Check {
    let why = "files need the kernel's nvme driver; direct routes need vfio-pci or the module onehop";
    match device.driver.as_deref() {
        Some(name @ ("nvme" | "vfio-pci" | "onehop")) => {
            check("drive.driver", Status::Pass, format!("driver {name}"), why)
        }
        Some(name) => {
            check("drive.driver", Status::Warn, format!("driver {name}"), why).fix(bind(drive, device, name))
        }
        None => check("drive.driver", Status::Info, "no driver", why)
            .fix(format!("echo {} > /sys/bus/pci/drivers_probe (root)", device.address)),
    }
}

/// How to rebind the drive to the kernel's nvme driver.
fn bind(drive: &DriveFacts, device: &Device, other: &str) -> String {
    let at = format!("/sys/bus/pci/devices/{}", device.address);
    let commands = format!(
        "echo nvme > {at}/driver_override, echo {0} > {at}/driver/unbind, echo {0} > /sys/bus/pci/drivers_probe (root; this detaches it from {other})",
        device.address
    );
    format!("To bind it to nvme: {}", unless_used(drive, commands))
}

fn power(drive: &DriveFacts, device: &Device) -> Option<Check> {
    let why = "a device that is not in D0 reads as all ones";
    let state = device.power_state.clone().or_else(|| {
        let state = device.config.as_ref()?.power?.state;
        Some(format!("D{state}"))
    })?;
    if device.is_asleep() {
        let wake = format!(
            "echo on > /sys/bus/pci/devices/{}/power/control (root). This turns its power saving off",
            device.address
        );
        let again = unless_used(
            drive,
            format!(
                "echo 1 > /sys/bus/pci/devices/{}/remove, then echo 1 > /sys/bus/pci/rescan. The drive is gone in between, and until the next boot if it does not come back",
                device.address
            ),
        );
        return Some(
            check("drive.power", Status::Warn, state, why)
                .fix(format!("{wake}. If it still reads as all ones: {again}")),
        );
    }
    let cold = device.d3cold_allowed == Some(true) && device.driver.is_none();
    Some(check("drive.power", Status::Pass, state, why).fix_if(
        cold,
        format!(
            "Before binding it to vfio-pci: echo on > /sys/bus/pci/devices/{}/power/control (root). Without a driver it enters D3cold",
            device.address
        ),
    ))
}

fn link(facts: &Facts, device: &Device) -> Option<Check> {
    let link = facts.link(device);
    let why = "the drive's link limits every route";
    if let Some((found, by)) = facts.why_link_sets_no_limit(device) {
        return Some(check("drive.link", Status::Info, found, why).by(by));
    }
    let (Some(now), Some(best)) = (link.now(), link.best()) else {
        let is_known = link.speed.is_some() || link.width.is_some() || device.config.is_some();
        return is_known.then(|| {
            check("drive.link", Status::Unknown, "unknown", why)
                .fix("Run lspci -vv as root (LnkSta); in a virtual machine, run it on the host")
        });
    };
    let speed = link.rate().map(|r| format!(", {}", rate(r))).unwrap_or_default();
    if link.rate() < link.max_rate() && facts.machine.is_virtual() {
        let found =
            format!("{now}, maximum {best}, as this virtual machine shows it; the real link may differ");
        return Some(check("drive.link", Status::Info, found, why).fix("Run lspci -vv on the host"));
    }
    if link.rate() < link.max_rate() && !device.is_asleep() {
        return Some(check("drive.link", Status::Warn, format!("{now}{speed}, maximum {best}"), why)
            .fix("Use a slot with the drive's PCIe generation and lane count. Chipset slots are often older or shared")
            .by("current_link_*, max_link_*"));
    }
    Some(check("drive.link", Status::Pass, format!("{now}{speed}"), why).by("current_link_*, max_link_*"))
}

fn state(drive: &DriveFacts) -> Option<Check> {
    let state = drive.state.as_deref().filter(|state| *state != "live")?;
    let why = "a controller that is not live accepts no commands";
    let name = drive.name.as_ref()?;
    let reset = unless_used(
        drive,
        format!("echo 1 > /sys/class/nvme/{name}/reset_controller (root): commands in flight fail"),
    );
    Some(
        check("drive.state", Status::Warn, state, why)
            .fix(format!("dmesg | grep {name} shows why. To reset it: {reset}")),
    )
}

fn limits(drive: &DriveFacts, device: &Device, root: bool) -> Check {
    let why = "queue depth and transfer size have these limits";
    let mut words = Vec::new();
    words.extend(drive.queue_entries.map(|n| format!("{n} entries per queue (kernel)")));
    words.extend(drive.queues.map(|n| format!("{n} queues, including the admin queue")));
    let block = drive.namespaces.iter().find_map(|ns| ns.block);
    words.extend(block.map(|n| format!("{n}-byte blocks")));
    let kernel = drive.namespaces.iter().find_map(|ns| ns.transfer_kib);
    words.extend(kernel.map(|kib| format!("transfers up to {} (kernel)", bytes(u64::from(kib) * 1024))));
    let identity = drive.identity.as_ref().and_then(|found| found.as_ref().ok());
    if let Some(identity) = identity {
        words.push(match identity.mdts {
            0 => "MDTS 0: no limit".into(),
            // 4 KiB is the smallest page size of a controller.
            mdts => format!("MDTS {mdts}: {} or more", bytes(4096_u64.checked_shl(mdts.into()).unwrap_or(0))),
        });
        words.push(if identity.sgls & 3 != 0 { "SGLs".into() } else { "no SGLs".to_owned() });
        words.extend(identity.vwc.then(|| "volatile write cache".to_owned()));
    }
    if words.is_empty() {
        return check(
            "drive.limits",
            Status::Unknown,
            "unknown: the drive is not bound to the kernel's nvme driver",
            why,
        )
        .fix(format!("Run onehop drive identify -d {} (root)", device.address));
    }
    let identified = identity.is_some();
    let status = if identified { Status::Info } else { Status::Unknown };
    let fix = if root {
        format!(
            "The drive did not answer Identify. Run onehop drive identify -d {} once it is unused, and dmesg | grep nvme",
            device.address
        )
    } else {
        "Run as root: only the drive reports MDTS and SGLs (Identify)".to_owned()
    };
    check("drive.limits", status, words.join(", "), why).fix_if(!identified, fix)
}

fn cmb(drive: &DriveFacts) -> Option<Check> {
    let why = "with queues in the drive's own memory, gpu/posted needs posted writes only";
    drive.name.as_ref()?;
    let Some((_, size)) = drive.cmb else {
        return Some(
            check("drive.cmb", Status::Info, "no controller memory buffer reported", why)
                .by("sysfs: cmb (from NVMe 1.4 on, shown only once enabled)"),
        );
    };
    // Units start at 4 KiB, and each is sixteen times the previous one.
    let unit = 4096_u64.checked_shl(4 * (size >> 8 & 0xf)).unwrap_or(0);
    let total = unit.saturating_mul(u64::from(size >> 12));
    let queues = if size & 1 != 0 { ", including submission queues" } else { ", not for submission queues" };
    Some(check("drive.cmb", Status::Pass, format!("{}{queues}", bytes(total)), why).by("sysfs: cmb"))
}

fn hmb(drive: &DriveFacts) -> Option<Check> {
    let why = "a drive without DRAM uses host memory (HMB), and is slow without it";
    let wants =
        drive.identity.as_ref().and_then(|i| i.as_ref().ok()).is_some_and(|identity| identity.hmpre > 0);
    match (wants, drive.hmb) {
        (true, _) | (_, Some(true)) => {
            let found = "it uses host memory from the kernel, and has none while onehop drives it";
            Some(
                check("drive.hmb", Status::Info, found, why)
                    .fix("Prefer a drive with DRAM for direct routes"),
            )
        }
        _ => None,
    }
}

fn vmd(facts: &Facts, device: &Device) -> Option<Check> {
    device.behind_vmd.then(|| {
        let why = "Intel VMD is a host bridge of its own; VFIO cannot claim drives behind it";
        check("drive.vmd", Status::Warn, "behind Intel VMD", why).fix(vmd_fix(facts))
    })
}
