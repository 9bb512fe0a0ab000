//! NVIDIA's cuFile: which library programs load, and which path it takes.

use crate::check::{Check, CheckGroup, Status};
use crate::facts::Facts;
use crate::fixes::RELOAD;

/// Boards for which NVIDIA documents a direct path without nvidia-fs.
const BOARDS: [&str; 9] = ["A100", "A40", "L4", "L40S", "H100", "H200", "B100", "B200", "B300"];

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    if facts.gpus.is_empty() {
        return Vec::new();
    }
    let mut checks = vec![library(facts)];
    if facts.cufile.library.is_some() {
        checks.push(mode(facts));
    }
    checks
}

fn library(facts: &Facts) -> Check {
    let why = "programs written for cuFile load the system's library, unless they are started with another";
    let found = facts.cufile.library.as_ref().map_or_else(
        || "programs find no libcufile; onehop cufile run starts them with onehop's".into(),
        |path| format!("programs get {path}; onehop cufile run starts them with onehop's"),
    );
    Check::new("cufile.library", CheckGroup::Cufile, Status::Info, found, why)
}

/// The path that cuFile would take: by nvidia-fs, by the kernel's P2PDMA, or by copies that it does not report.
fn mode(facts: &Facts) -> Check {
    let why = "where neither of its direct paths works, cuFile copies through host memory without reporting it (compat mode)";
    let check = |status, found: &str| Check::new("cufile.mode", CheckGroup::Cufile, status, found, why);
    if facts.cufile.nvidia_fs.is_some() {
        return check(
            Status::Pass,
            "nvidia-fs is loaded: direct for files on ext4 (data=ordered), XFS and the file systems that it supports",
        )
        .by("/proc/driver/nvidia-fs/version");
    }
    let listed_gpu =
        facts.gpus.iter().any(|gpu| gpu.name.split([' ', '-']).any(|word| BOARDS.contains(&word)));
    let kernel = facts.kernel.version() >= (6, 2) && facts.kernel.option("CONFIG_PCI_P2PDMA") != Some(false);
    let driver = facts.nvidia.open == Some(true) && facts.nvidia.numbers() >= Some((565, 0, 0));
    let static_bar1 = facts.nvidia.has("RMForceStaticBar1");
    let missing: Vec<_> = [
        (listed_gpu, "a GPU that NVIDIA lists for it"),
        (kernel, "kernel 6.2 or later with P2PDMA"),
        (driver, "the open driver, 565 or later"),
        (static_bar1, "static BAR1 (RMForceStaticBar1=1)"),
        (facts.cufile.use_p2pdma, "use_pci_p2pdma in cufile.json"),
    ]
    .into_iter()
    .filter(|(present, _)| !present)
    .map(|(_, name)| name)
    .collect();
    if missing.is_empty() {
        return check(
            Status::Unknown,
            "nvidia-fs is not loaded; the requirements of its P2PDMA path are met",
        )
        .fix("Run gdscheck -p");
    }
    let cost = if driver && static_bar1 {
        String::new()
    } else {
        format!(". The module nvidia must be reloaded, {RELOAD}")
    };
    check(
        Status::Warn,
        "it copies through host memory: nvidia-fs is not loaded, and its P2PDMA path is incomplete",
    )
    .fix(format!("Load nvidia-fs, or add what is missing: {}{cost}", missing.join(", ")))
}
