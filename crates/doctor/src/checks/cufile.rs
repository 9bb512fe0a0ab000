//! NVIDIA's cuFile: which way it would take, and whether it says so.

use crate::check::{Check, Group, Status};
use crate::facts::Facts;

/// Boards whose direct way without nvidia-fs NVIDIA documents.
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
    let why = "a baseline to measure against; nothing here needs it";
    let found = facts
        .cufile
        .library
        .as_ref()
        .map_or("libcufile was not found".into(), |path| format!("found: {path}"));
    Check::new("cufile.library", Group::Cufile, Status::Info, found, why)
}

/// The way that cuFile would take: by nvidia-fs, by the kernel's P2PDMA, or by copies without a word.
fn mode(facts: &Facts) -> Check {
    let why = "where neither of its direct ways works, cuFile copies and does not say so (compat mode)";
    let check = |status, found: &str| Check::new("cufile.mode", Group::Cufile, status, found, why);
    if facts.cufile.nvidia_fs.is_some() {
        return check(
            Status::Pass,
            "nvidia-fs is loaded: direct for files on ext4 (data=ordered), XFS and the file systems it hooks",
        )
        .by("/proc/driver/nvidia-fs/version");
    }
    let board = facts.gpus.iter().any(|gpu| gpu.name.split([' ', '-']).any(|word| BOARDS.contains(&word)));
    let kernel = facts.kernel.version() >= (6, 2) && facts.kernel.option("CONFIG_PCI_P2PDMA") != Some(false);
    let driver = facts.nvidia.open == Some(true) && facts.nvidia.numbers() >= Some((565, 0, 0));
    let fixed = facts.nvidia.has("RMForceStaticBar1");
    let missing: Vec<_> = [
        (board, "a GPU of its list"),
        (kernel, "kernel 6.2 or later with P2PDMA"),
        (driver, "the open driver, 565 or later"),
        (fixed, "static BAR1 (RMForceStaticBar1=1)"),
        (facts.cufile.use_p2pdma, "use_pci_p2pdma in cufile.json"),
    ]
    .into_iter()
    .filter(|(there, _)| !there)
    .map(|(_, name)| name)
    .collect();
    if missing.is_empty() {
        return check(Status::Unknown, "nvidia-fs is not loaded; all that its P2PDMA way needs is there")
            .fix("gdscheck -p tells");
    }
    check(Status::Warn, "it copies: nvidia-fs is not loaded, and its P2PDMA way is not complete")
        .fix(format!("Load nvidia-fs, or add what is missing: {}", missing.join(", ")))
}
