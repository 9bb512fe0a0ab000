//! The environment: container, virtual machine, user, and memory limits.

use onehop_pci::Root;

use super::kernel::bracketed;
use super::{number, version};

/// Container, virtual machine, user.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// The container, and how it was detected.
    pub container: Option<String>,
    /// The machine's vendor and product, from its firmware.
    pub product: Option<String>,
    /// Capabilities of this process, one bit each.
    pub capabilities: u64,
    /// Whether this is root.
    pub root: bool,
    /// Whether user and capabilities are known.
    pub known: bool,
    /// Whether udev's data, which cuFile needs, can be read.
    pub udev: bool,
    /// Whether sysfs is mounted read-only.
    pub sysfs_read_only: bool,
}

/// Numbers of capabilities.
pub mod capability {
    /// Pinning memory beyond the limit.
    pub const IPC_LOCK: u32 = 14;
    /// Access to I/O ports, BARs and raw memory.
    pub const SYS_RAWIO: u32 = 17;
    /// Nearly everything.
    pub const SYS_ADMIN: u32 = 21;
}

impl Environment {
    pub(super) fn read(root: &Root) -> Self {
        let status = root.text("/proc/self/status").unwrap_or_default();
        let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        let capabilities = value("CapEff:").and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(0);
        let uid = value("Uid:").and_then(|ids| ids.split_whitespace().nth(1)?.parse::<u32>().ok());
        let dmi = |file: &str| root.text(&format!("/sys/class/dmi/id/{file}")).ok().filter(|t| !t.is_empty());
        let product = [dmi("sys_vendor"), dmi("product_name"), dmi("board_name")];
        let product = product.into_iter().flatten().collect::<Vec<_>>().join(" ");
        let mounts = root.text("/proc/self/mountinfo").unwrap_or_default();
        Self {
            container: container(root),
            product: (!product.is_empty()).then_some(product),
            capabilities,
            root: uid == Some(0),
            known: uid.is_some(),
            udev: root.exists("/run/udev/data"),
            sysfs_read_only: mounts.lines().any(|line| {
                let words: Vec<_> = line.split(' ').collect();
                words.get(4) == Some(&"/sys") && words.get(5).is_some_and(|o| o.split(',').any(|o| o == "ro"))
            }),
        }
    }

    /// Whether this process has a capability.
    #[must_use]
    pub fn can(&self, capability: u32) -> bool {
        self.capabilities & 1 << capability != 0
    }
}

fn container(root: &Root) -> Option<String> {
    let marks = [
        ("/.dockerenv", "docker"),
        ("/run/.containerenv", "podman"),
        ("/run/systemd/container", "systemd-nspawn"),
    ];
    if let Some((path, name)) = marks.into_iter().find(|(path, _)| root.exists(path)) {
        return Some(format!("probably {name} ({path} exists)"));
    }
    let groups = root.text("/proc/self/cgroup").unwrap_or_default();
    let words = ["docker", "kubepods", "containerd", "lxc", "libpod", "crio"];
    let word = words.into_iter().find(|word| groups.contains(word))?;
    Some(format!("probably {word} (/proc/self/cgroup)"))
}

/// Memory and its limits.
#[derive(Clone, Debug, Default)]
pub struct MemoryFacts {
    /// Bytes that this process may lock; `None` if unlimited or unknown.
    pub lock_limit: Option<u64>,
    /// Whether the limit is known.
    pub lock_known: bool,
    /// Total memory in bytes.
    pub total: Option<u64>,
    /// Huge pages by NUMA node: node, size in KiB, total, free.
    pub huge: Vec<(u32, u64, u64, u64)>,
    /// Transparent huge pages: `always`, `madvise`, `never`.
    pub transparent: Option<String>,
    /// Maximum number of mappings per process.
    pub mappings: Option<u64>,
}

impl MemoryFacts {
    pub(super) fn read(root: &Root) -> Self {
        let limits = root.text("/proc/self/limits").unwrap_or_default();
        let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
        let soft = line.and_then(|rest| rest.split_whitespace().next());
        let meminfo = root.text("/proc/meminfo").unwrap_or_default();
        let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib = |text: &str| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024);
        Self {
            lock_limit: soft.and_then(|limit| limit.parse().ok()),
            lock_known: soft.is_some(),
            total: total.and_then(kib),
            huge: huge(root),
            transparent: root
                .text("/sys/kernel/mm/transparent_hugepage/enabled")
                .ok()
                .and_then(|text| bracketed(&text)),
            mappings: number(root, "/proc/sys/vm/max_map_count"),
        }
    }
}

fn huge(root: &Root) -> Vec<(u32, u64, u64, u64)> {
    let nodes = root.list("/sys/devices/system/node").unwrap_or_default();
    let nodes = nodes.iter().filter_map(|name| Some((name.strip_prefix("node")?.parse().ok()?, name)));
    let mut found = Vec::new();
    for (node, name) in nodes {
        let folder = format!("/sys/devices/system/node/{name}/hugepages");
        for size in root.list(&folder).unwrap_or_default() {
            let Some(kib) = size.strip_prefix("hugepages-").map(|rest| u64::from(version(rest).0)) else {
                continue;
            };
            let count = |file: &str| number(root, &format!("{folder}/{size}/{file}")).unwrap_or(0);
            found.push((node, kib, count("nr_hugepages"), count("free_hugepages")));
        }
    }
    found
}
