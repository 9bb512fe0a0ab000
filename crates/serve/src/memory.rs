//! How much memory and how many mappings this process may use.

use std::path::Path;

/// The mount point of control groups, version 2.
const GROUPS: &str = "/sys/fs/cgroup";
/// The least memory for writes that wait for a thread.
const MIN_WRITE_MEMORY: u64 = 256 << 20;

/// Memory for writes that wait for a thread: a quarter of the available memory. A person may have half of that, which
/// is room for hundreds of the longest writes.
pub(crate) fn write_memory() -> u64 {
    let text = |path: &Path| std::fs::read_to_string(path).ok();
    let of_machine = text(Path::new("/proc/meminfo")).and_then(|text| total(&text));
    let of_groups = text(Path::new("/proc/self/cgroup")).and_then(|groups| of_groups(&groups, text));
    let all = [of_machine, of_groups].into_iter().flatten().min();
    all.map_or(MIN_WRITE_MEMORY, |all| (all / 4).max(MIN_WRITE_MEMORY))
}

/// Mappings for links: half of those that the kernel allows a process, 65 530 by default.
pub(crate) fn link_mappings() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    links_of(text.trim().parse().unwrap_or(0))
}

/// Half of the default is rounded up to 32 768. More than 131 072 would need as many descriptors, if they map GPU
/// memory.
fn links_of(mappings: u64) -> u64 {
    (mappings.div_ceil(64) * 32).clamp(1 << 10, 1 << 17)
}

/// The machine's memory, from `/proc/meminfo`.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The lowest limit of this process's control group and the groups around it.
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
    fn links_have_half_of_the_mappings() {
        let limits = [65_530, 262_144, 1_048_576, 1 << 40, 0];
        assert_eq!(limits.map(links_of), [32_768, 1 << 17, 1 << 17, 1 << 17, 1 << 10]);
        assert!(link_mappings() >= 1 << 10);
    }

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
        assert!(write_memory() >= MIN_WRITE_MEMORY);
    }
}
