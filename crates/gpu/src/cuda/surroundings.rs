//! Facts about this machine that explain why the driver refuses device registers for a GPU.

use std::fs;
use std::path::Path;

/// From this kernel on, the function that the driver used to find a register's page is gone (follow_pfn).
const KERNEL_WITHOUT_FOLLOW_PFN: (u32, u32) = (6, 10);
/// From this one on its successor, follow_pte, is gone as well.
const KERNEL_WITHOUT_FOLLOW_PTE: (u32, u32) = (6, 12);
/// The first driver that uses its replacement, follow_pfnmap_start.
const DRIVER_WITH_PFNMAP: (u32, u32, u32) = (570, 133, 7);

/// Facts about kernel, driver and privileges.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Surroundings {
    kernel: (u32, u32),
    driver: Option<(u32, u32, u32)>,
    open_modules: Option<bool>,
    admin: bool,
    peer_override: bool,
    guest: bool,
    container: bool,
    /// Whether the mapping in question is memory and not a device.
    ordinary: bool,
}

impl Surroundings {
    /// Those of this machine and of the mapping at an address, as far as /proc and /sys report them.
    pub(super) fn of(mapping: usize) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let version = read("/proc/driver/nvidia/version");
        Self {
            kernel: kernel_version(&read("/proc/sys/kernel/osrelease")),
            driver: driver_version(&read("/sys/module/nvidia/version")),
            open_modules: (!version.is_empty()).then(|| version.contains("Open Kernel Module")),
            admin: has_sys_admin(&read("/proc/self/status")),
            peer_override: read("/proc/driver/nvidia/params").contains("PeerMappingOverride=1"),
            guest: read("/proc/cpuinfo").contains(" hypervisor"),
            ordinary: is_ordinary(&read("/proc/self/smaps"), mapping as u64),
            container: Path::new("/.dockerenv").exists() || Path::new("/run/.containerenv").exists(),
        }
    }

    /// Why registering device registers may have failed with this error number; certain reasons come first.
    pub(super) fn why_no_io_memory(&self, code: Option<i32>) -> Vec<String> {
        let mut causes = Vec::new();
        if self.ordinary {
            causes.push(
                "the mapping is of ordinary memory and not of a device's BAR (it lacks the flag pf in                  /proc/self/smaps): map sysfs resource0, or the region that VFIO shows"
                    .into(),
            );
        }
        causes.extend(register_gap(self.kernel, self.driver, self.open_modules));
        if !self.admin && !self.peer_override {
            causes.push(
                "the driver lets only administrators do this: run as root (CAP_SYS_ADMIN), or load the module nvidia \
                 with NVreg_RegistryDwords=\"PeerMappingOverride=1\""
                    .into(),
            );
        }
        if self.container {
            causes.push(
                "this is a container: give it CAP_SYS_ADMIN and the device's files (docker run --privileged)"
                    .into(),
            );
        }
        if self.guest {
            causes.push(
                "this is a virtual machine: its host must let the two devices reach each other (one IOMMU domain for \
                 both, or passthrough with peer-to-peer on)"
                    .into(),
            );
        }
        if code == Some(801) {
            causes.push(
                "this platform or GPU does not support it: use a relayed queue, or a cpu/ route".into(),
            );
        }
        causes.push(
            "the platform refused the peer mapping: the register page must be one uncached range of a BAR (VM_IO, \
             VM_PFNMAP), be populated, and not overlap a GPU's own BAR; `dmesg | grep NVRM` says which"
                .into(),
        );
        causes
    }
}

/// Whether /proc/self/smaps reports pages of memory behind the mapping at an address.
fn is_ordinary(smaps: &str, address: u64) -> bool {
    let mut here = false;
    for line in smaps.lines() {
        let range = line.split(' ').next().and_then(|word| word.split_once('-'));
        let bounds = range.and_then(|(from, to)| {
            Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
        });
        if let Some((from, to)) = bounds {
            here = (from..to).contains(&address);
        } else if here && let Some(flags) = line.strip_prefix("VmFlags:") {
            return !flags.split_whitespace().any(|flag| flag == "pf");
        }
    }
    false
}

/// Why a driver of this version cannot give a device's registers to a GPU under this kernel, on any machine; `None` if
/// it can. From kernel 6.10 on `follow_pfn` is gone, from 6.12 on `follow_pte` as well; 570.133.07 is the first driver
/// that uses the replacement, which is for GPL modules; only the open ones are.
#[must_use]
pub fn register_gap(
    kernel: (u32, u32),
    driver: Option<(u32, u32, u32)>,
    open_modules: Option<bool>,
) -> Option<String> {
    let (major, minor) = kernel;
    if let Some(driver) = driver.filter(|driver| *driver < DRIVER_WITH_PFNMAP)
        && kernel >= KERNEL_WITHOUT_FOLLOW_PFN
    {
        let gone = if kernel >= KERNEL_WITHOUT_FOLLOW_PTE { "follow_pte" } else { "follow_pfn" };
        return Some(format!(
            "the driver {}.{}.{:02} is too old for kernel {major}.{minor}, which no longer has {gone}: install 570.133.07 or \
             later, with the open kernel modules",
            driver.0, driver.1, driver.2
        ));
    }
    (open_modules == Some(false) && kernel >= KERNEL_WITHOUT_FOLLOW_PTE).then(|| {
        format!(
            "the proprietary kernel modules may not use what kernel {major}.{minor} has for this (follow_pfnmap_start is for \
             GPL modules): install the open kernel modules"
        )
    })
}

fn numbers(text: &str) -> impl Iterator<Item = u32> + '_ {
    text.trim().split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse().ok())
}

fn kernel_version(text: &str) -> (u32, u32) {
    let mut parts = numbers(text);
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

fn driver_version(text: &str) -> Option<(u32, u32, u32)> {
    let mut parts = numbers(text);
    let major = parts.next()?;
    Some((major, parts.next().unwrap_or(0), parts.next().unwrap_or(0)))
}

fn has_sys_admin(status: &str) -> bool {
    const SYS_ADMIN: u32 = 21;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    bits & 1 << SYS_ADMIN != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(facts: &Surroundings, code: i32, words: &[&str]) {
        let causes = facts.why_no_io_memory(Some(code));
        assert_eq!(causes.len(), words.len(), "{causes:?}");
        for (cause, word) in causes.iter().zip(words) {
            assert!(cause.contains(word), "'{cause}' does not say '{word}'");
        }
    }

    #[test]
    fn each_cause_is_named_where_it_applies() {
        let fine = Surroundings {
            kernel: (6, 8),
            driver: Some((580, 159, 4)),
            open_modules: Some(true),
            admin: true,
            ..Surroundings::default()
        };
        says(&fine, 1, &["NVRM"]);
        let old = Surroundings { kernel: (6, 11), driver: Some((570, 124, 6)), ..fine.clone() };
        says(&old, 1, &["570.124.06 is too old for kernel 6.11, which no longer has follow_pfn:", "NVRM"]);
        says(&Surroundings { kernel: (6, 9), ..old.clone() }, 1, &["NVRM"]);
        says(&Surroundings { kernel: (6, 12), ..old }, 1, &["has follow_pte:", "NVRM"]);
        let closed = Surroundings { kernel: (6, 12), open_modules: Some(false), ..fine.clone() };
        says(&closed, 1, &["open kernel modules", "NVRM"]);
        let user = Surroundings { admin: false, ..fine.clone() };
        says(&user, 800, &["PeerMappingOverride=1", "NVRM"]);
        says(&Surroundings { peer_override: true, ..user }, 800, &["NVRM"]);
        let boxed = Surroundings { guest: true, container: true, ..fine };
        says(&boxed, 801, &["container", "virtual machine", "does not support", "NVRM"]);
    }

    #[test]
    fn mappings_of_memory_and_devices_are_distinguished() {
        let smaps = "7f0000000000-7f0000004000 rw-s 00000000 00:15 9 /sys/devices/x/resource0\nRss: 0 kB\n\
                     VmFlags: rd wr sh mr mw me ms pf io dc de dd\n\
                     7f0000004000-7f0000008000 rw-p 00000000 00:00 0\nVmFlags: rd wr mr mw me ac\n";
        assert!(!is_ordinary(smaps, 0x7f00_0000_0000) && is_ordinary(smaps, 0x7f00_0000_7fff));
        assert!(!is_ordinary(smaps, 0x7f00_0000_8000) && !is_ordinary("", 0));
        let mem = onehop_os::HostMem::anonymous(4096).unwrap();
        let facts = Surroundings::of(mem.host_ptr() as usize);
        assert!(facts.why_no_io_memory(Some(1))[0].contains("ordinary memory"), "{facts:?}");
    }

    #[test]
    fn the_system_s_words_are_read() {
        assert_eq!(kernel_version("6.18.44-fc-v310-gpu\n"), (6, 18));
        assert_eq!(driver_version("570.133.07\n"), Some((570, 133, 7)));
        assert_eq!(driver_version("580.65\n"), Some((580, 65, 0)));
        assert_eq!((kernel_version(""), driver_version("")), ((0, 0), None));
        assert!(has_sys_admin("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(!has_sys_admin("CapEff:\t00000000a80425fb\n") && !has_sys_admin(""));
    }
}
