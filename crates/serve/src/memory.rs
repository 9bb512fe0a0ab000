//! How much memory this process may use.

use std::path::Path;

/// Where version 2 of control groups is mounted.
const GROUPS: &str = "/sys/fs/cgroup";
/// Writes that wait for a thread have so much memory at least.
const LEAST: u64 = 256 << 20;

/// Memory for writes that wait for a thread: a quarter of what there is, so that a person who may have half of that has room for
/// hundreds of the longest writes.
pub(crate) fn write_memory() -> u64 {
    let text = |path: &Path| std::fs::read_to_string(path).ok();
    let of_machine = text(Path::new("/proc/meminfo")).and_then(|text| total(&text));
    let of_groups = text(Path::new("/proc/self/cgroup")).and_then(|groups| of_groups(&groups, text));
    let all = [of_machine, of_groups].into_iter().flatten().min();
    all.map_or(LEAST, |all| (all / 4).max(LEAST))
}

/// The memory of this machine, as `/proc/meminfo` has it.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The least that a control group of this process allows, or one around it.
fn of_groups(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let (top, all) = (Path::new(GROUPS), Path::new(GROUPS).join(group));
    let around = all.ancestors().take_while(|path| path.starts_with(top));
    around.filter_map(|path| read(&path.join("memory.max"))?.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_counts() {
        assert_eq!(total("MemFree:  1 kB\nMemTotal:       16384 kB\n"), Some(16 << 20));
        assert_eq!(total("MemTotal: much"), None);
        let read = |path: &Path| match path.to_str()? {
            "/sys/fs/cgroup/system.slice/onehop.service/memory.max" => Some("max\n".to_owned()),
            "/sys/fs/cgroup/system.slice/memory.max" => Some("1000\n".to_owned()),
            "/sys/fs/cgroup/memory.max" => Some("2000\n".to_owned()),
            _ => None,
        };
        assert_eq!(of_groups("1:cpu:/x\n0::/system.slice/onehop.service\n", read), Some(1000));
        assert_eq!(of_groups("0::/\n", read), Some(2000));
        assert_eq!(of_groups("4:memory:/x\n", read), None);
        assert!(write_memory() >= LEAST);
    }
}
