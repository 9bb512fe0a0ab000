//! The path between each GPU and each drive, card or board.

use onehop_pci::Address;

use crate::check::{Check, CheckGroup, Status, rate};
use crate::diagnosis::Only;
use crate::facts::Facts;
use crate::pair::{DevicePair, Passes, list};

pub(super) fn checks(facts: &Facts, only: &Only) -> Vec<Check> {
    let wanted = |only: Option<Address>, address: Address| only.is_none_or(|only| only == address);
    let devices: Vec<_> = facts.peers().into_iter().filter(|at| wanted(only.device, *at)).collect();
    let gpus = facts.gpus.iter().filter(|gpu| wanted(only.gpu, gpu.address));
    let pairs =
        gpus.flat_map(|gpu| devices.iter().filter_map(move |device| DevicePair::new(facts, gpu, *device)));
    pairs.flat_map(|pair| one(&pair)).collect()
}

fn one(pair: &DevicePair<'_>) -> Vec<Check> {
    let name = format!("{} to {}", pair.device.address, pair.gpu_device.address);
    let all =
        [Some(class(pair)), access_control(pair), narrowest(pair), Some(writes(pair)), Some(reads(pair))];
    all.into_iter().flatten().map(|check| check.about(&name)).collect()
}

fn check(id: &'static str, status: Status, found: impl Into<String>, why: &'static str) -> Check {
    Check::new(id, CheckGroup::Path, status, found, why)
}

fn class(pair: &DevicePair<'_>) -> Check {
    let why = "the path between two devices decides whether transfers get through, and how fast";
    let Some(path) = &pair.path else {
        return check("path.class", Status::Unknown, "unknown path", why).fix("Run doctor on the host");
    };
    let bridges: Vec<_> = path.bridges().collect();
    let through = if bridges.is_empty() { String::new() } else { format!(", through {}", list(&bridges)) };
    let far = matches!(path.class, onehop_pci::PathClass::Sys | onehop_pci::PathClass::Node);
    // In a virtual machine or with NVLink-C2C, there is no other slot to move to.
    let fixed = pair.facts.machine.is_virtual() || pair.facts.is_c2c(pair.gpu_device.address);
    let status = match (far, fixed) {
        (true, false) => Status::Warn,
        (true, true) => Status::Info,
        _ => Status::Pass,
    };
    let found = format!("{}: {}{through}", path.class.name(), path.class.text());
    check("path.class", status, found, why)
        .fix_if(status == Status::Warn, closer(path.class))
        .by("/sys/bus/pci/devices: symbolic links; NUMA nodes")
}

fn closer(class: onehop_pci::PathClass) -> &'static str {
    match class {
        onehop_pci::PathClass::Sys => {
            "Move one of them to a slot of the other's CPU, ideally behind the same switch"
        }
        _ => "Move one of them to a slot below the other's host bridge, ideally behind the same switch",
    }
}

fn access_control(pair: &DevicePair<'_>) -> Option<Check> {
    let path = pair.path.as_ref()?;
    let why = "access control (ACS) at a switch port redirects peer-to-peer packets to the root complex";
    let (redirect, unknown) = pair.redirecting();
    if !path.class.below_root() {
        let words = if redirect.is_empty() {
            "no port redirects"
        } else {
            "on; the path crosses the root complex anyway"
        };
        let known = !redirect.is_empty() || unknown.is_empty();
        return known.then(|| check("path.acs", Status::Info, words, why).by("PCI capability 0x0d"));
    }
    if !redirect.is_empty() {
        let modes: Vec<_> = redirect
            .iter()
            .filter_map(|port| {
                let acs = pair.facts.device(*port)?.config.as_ref()?.acs?;
                Some(format!("{port}: {}", acs.names().join(" ")))
            })
            .collect();
        let found = format!("redirects at {}", modes.join("; "));
        if !pair.facts.machine.is_real() {
            let found = if pair.facts.machine.is_virtual() {
                format!("{found}, as this virtual machine shows it")
            } else {
                format!("{found}, as this machine shows it, which may be a virtual one (place.vm)")
            };
            return Some(
                check("path.acs", Status::Info, found, why)
                    .fix("Run doctor on the host: its ports decide")
                    .by("PCI capability 0x0d"),
            );
        }
        return Some(
            check("path.acs", Status::Warn, found, why).fix(acs_off(&redirect)).by("PCI capability 0x0d"),
        );
    }
    if !unknown.is_empty() {
        let found = format!("unknown for {}", list(&unknown));
        return Some(
            check("path.acs", Status::Unknown, found, why)
                .fix("Run as root: ACS lies beyond the first 64 bytes of config space"),
        );
    }
    Some(check("path.acs", Status::Pass, "no port on the path redirects", why).by("PCI capability 0x0d"))
}

/// How to disable ACS at these ports, and what that costs.
fn acs_off(ports: &[Address]) -> String {
    let ports = ports.iter().map(ToString::to_string).collect::<Vec<_>>().join(";");
    format!(
        "Boot with pci=disable_acs_redir={ports} (kernel 4.19 or later), or disable ACS in the firmware setup. This costs isolation: \
         devices below those ports then reach each other past the IOMMU, and their IOMMU groups become one. VFIO claims a \
         group only as a whole, including the GPU (the module onehop claims a drive alone)"
    )
}

fn narrowest(pair: &DevicePair<'_>) -> Option<Check> {
    let why = "the narrowest link limits every route; a result above it is wrong";
    if let Some((reason, by)) = pair.why_unlimited() {
        let found = format!("no limit known: {reason}");
        return Some(check("path.limit", Status::Info, found, why).by(by));
    }
    let (most, link, at) = pair.narrowest()?;
    let mut found = format!("{} at {at} ({})", rate(most), link.now().unwrap_or_default());
    let unknown = pair.unknown_links();
    if !unknown.is_empty() {
        found = format!("at most {found}; the link of {} is unknown", list(&unknown));
    }
    let gpu = pair.gpu_device.best_link();
    if gpu.speed < gpu.max_speed && gpu.speed.is_some() {
        found.push_str("; the GPU's link is idle, and is counted at full speed");
    }
    Some(check("path.limit", Status::Info, found, why).by("current_link_* of every device on the path"))
}

fn writes(pair: &DevicePair<'_>) -> Check {
    let why =
        "a drive that reads blocks writes them into GPU memory, and GPUs write doorbells: posted packets";
    passes("path.p2p_write", pair.writes(), why)
}

fn reads(pair: &DevicePair<'_>) -> Check {
    let why = "a drive reads GPU memory to fetch commands and the data that it writes: non-posted packets";
    passes("path.p2p_read", pair.reads(), why)
}

fn passes(id: &'static str, passes: Passes, why: &'static str) -> Check {
    const TRY: &str = "Test each direction with compared bytes: onehop read and onehop write with --verify and a direct route";
    match passes {
        Passes::Expected(found) => check(id, Status::Pass, format!("expected: {found}"), why),
        Passes::Perhaps(found) => check(id, Status::Unknown, found, why).fix(TRY),
        Passes::Doubtful(found) => check(id, Status::Warn, found, why).fix(
            "Use routes that need writes only (gpu/posted, gpu/tier2, gpu/tier1, or cpu/direct into the GPU)",
        ),
    }
}
