//! Free memory of this machine.

use std::fs;

/// Available bytes of memory; `None` if the machine does not report them.
pub(crate) fn available() -> Option<u64> {
    let all = fs::read_to_string("/proc/meminfo").ok()?;
    let line = all.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
