//! Memory: the limit of locked memory, huge pages.

use crate::check::{Check, CheckGroup, Status, bytes};
use crate::facts::Facts;
use crate::facts::place::capability;

/// Size of a pinned ring and its queues.
const PINNED_RING: u64 = 256 << 20;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![lock(facts), huge(facts)];
    checks.extend([transparent(facts), mappings(facts)].into_iter().flatten());
    checks
}

fn check(id: &'static str, status: Status, found: impl Into<String>, why: &'static str) -> Check {
    Check::new(id, CheckGroup::Memory, status, found, why)
}

fn lock(facts: &Facts) -> Check {
    let why = "memory that devices access is locked: VFIO, io_uring's registered buffers and the module onehop count it";
    let memory = &facts.memory;
    let by = "/proc/self/limits: Max locked memory";
    match (memory.lock_limit, memory.lock_known) {
        _ if facts.place.can(capability::IPC_LOCK) => check("memory.lock", Status::Pass, "no limit for this user (CAP_IPC_LOCK)", why).by(by),
        (None, true) => check("memory.lock", Status::Pass, "no limit", why).by(by),
        (Some(limit), _) if limit >= PINNED_RING => check("memory.lock", Status::Pass, bytes(limit), why).by(by),
        (Some(limit), _) => check("memory.lock", Status::Warn, format!("only {}", bytes(limit)), why)
            .fix(if facts.place.container.is_some() {
                "Start the container with a higher limit (docker run --ulimit memlock=-1): its programs may then lock all memory"
            } else {
                "Run ulimit -l unlimited, or set memlock in /etc/security/limits.conf or LimitMEMLOCK= in the service: its programs may \
                 then lock all memory"
            })
            .by(by),
        (None, false) => check("memory.lock", Status::Unknown, "unknown", why).fix("Run ulimit -l"),
    }
}

fn huge(facts: &Facts) -> Check {
    let why =
        "huge pages are contiguous, so drive and IOMMU need fewer entries; onehop does not require them";
    let rows: Vec<_> = facts
        .memory
        .huge
        .iter()
        .filter(|(.., all, _)| *all > 0)
        .map(|(node, kib, all, free)| format!("node {node}: {all} of {} ({free} free)", bytes(kib * 1024)))
        .collect();
    let found = if rows.is_empty() { "none reserved".to_owned() } else { rows.join(", ") };
    check("memory.huge_pages", Status::Info, found, why).by("/sys/devices/system/node/*/hugepages")
}

fn transparent(facts: &Facts) -> Option<Check> {
    let mode = facts.memory.transparent.as_deref()?;
    let why = "pinned memory in huge pages is allocated ten times faster";
    let never = mode == "never";
    let status = if never { Status::Warn } else { Status::Pass };
    Some(
        check("memory.transparent_huge_pages", status, mode, why)
            .fix_if(never, "Run echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (root)")
            .by("/sys/kernel/mm/transparent_hugepage/enabled"),
    )
}

fn mappings(facts: &Facts) -> Option<Check> {
    let most = facts.memory.mappings.filter(|most| *most < 65530)?;
    let why = "loaders map many files and buffers";
    Some(
        check("memory.mappings", Status::Warn, format!("vm.max_map_count is {most}"), why)
            .fix("Run sysctl vm.max_map_count=65530 (root)"),
    )
}
