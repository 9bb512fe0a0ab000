//! Container, virtual machine, user.

use crate::check::{Check, CheckGroup, Status};
use crate::facts::Facts;
use crate::facts::place::capability;
use crate::facts::vm::Virtual;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![user(facts), machine(facts)];
    checks.extend(container(facts));
    checks
}

fn user(facts: &Facts) -> Check {
    let why = "binding drivers, reading PCI capabilities past the first 64 bytes and mapping BARs need root";
    let place = &facts.place;
    let missing: Vec<_> = [
        (capability::SYS_ADMIN, "CAP_SYS_ADMIN"),
        (capability::SYS_RAWIO, "CAP_SYS_RAWIO"),
        (capability::IPC_LOCK, "CAP_IPC_LOCK"),
    ]
    .into_iter()
    .filter(|(bit, _)| !place.can(*bit))
    .map(|(_, name)| name)
    .collect();
    if !place.known {
        let check = Check::new("place.user", CheckGroup::Place, Status::Unknown, "unknown", why);
        return check.fix("Mount /proc, or run doctor on the machine itself");
    }
    let check = match (place.root, missing.is_empty()) {
        (true, true) => Check::new(
            "place.user",
            CheckGroup::Place,
            Status::Pass,
            "root, with all needed capabilities",
            why,
        ),
        (true, false) => {
            let found = format!("root, without {}", missing.join(", "));
            Check::new("place.user", CheckGroup::Place, Status::Warn, found, why)
                .fix("Give the container these capabilities (docker run --cap-add=…). With them it can reach all of the host's devices")
        }
        _ => Check::new("place.user", CheckGroup::Place, Status::Info, "not root", why)
            .fix("Run as root to check access control, drive limits and VFIO"),
    };
    check.by("/proc/self/status")
}

fn machine(facts: &Facts) -> Check {
    let product = facts.place.product.clone();
    let why = "in a virtual machine the host decides which devices reach each other, and the PCI tree is not the real one";
    let check = |status, found| Check::new("place.vm", CheckGroup::Place, status, found, why);
    match &facts.machine {
        Virtual::Yes(by) => {
            let product = product.or_else(|| facts.kernel.is_wsl().then(|| "WSL".to_owned()));
            let what = product.map_or_else(String::new, |name| format!(" ({name})"));
            check(Status::Info, format!("virtual machine{what}"))
                .fix("Pass GPU and drive through with peer-to-peer enabled (one IOMMU domain), or run on the host")
                .by(by)
        }
        Virtual::No(by) => {
            check(Status::Pass, product.unwrap_or_else(|| "not a virtual machine".into())).by(by)
        }
        Virtual::Unknown => check(
            Status::Unknown,
            "unknown: CPU, firmware and device tree do not say".into(),
        )
        .fix("Run systemd-detect-virt. On ARM, dmesg | grep 'started at EL' shows EL1 in a virtual machine"),
    }
}

fn container(facts: &Facts) -> Option<Check> {
    let place = &facts.place;
    let inside = place.container.as_ref()?;
    let mut missing = Vec::new();
    if facts.nvidia.version.is_some() && !facts.nvidia.device_files {
        missing.push("the GPU's device files (--gpus all)");
    }
    if !place.udev {
        missing.push("/run/udev (-v /run/udev:/run/udev:ro), without which cuFile copies");
    }
    if place.sysfs_read_only {
        missing.push("a writable /sys, to bind drivers (--privileged, which exposes all of the host)");
    }
    // Without root, CAP_SYS_ADMIN is missing on the host too.
    if place.root && !place.can(capability::SYS_ADMIN) {
        missing.push("CAP_SYS_ADMIN, to map other devices' registers for GPUs, which gives it much of root's power on the host");
    }
    let why = "a container shows only part of the machine";
    let check = if missing.is_empty() {
        Check::new("place.container", CheckGroup::Place, Status::Info, inside.clone(), why)
    } else {
        let found = format!("{inside}; missing: {}", missing.join(", "));
        Check::new("place.container", CheckGroup::Place, Status::Warn, found, why)
            .fix("Start the container with the missing mounts and rights listed above, or run on the host")
    };
    Some(check)
}
