//! The kernel and the CPU: versions, options, modules, lockdown.

use std::collections::BTreeMap;
use std::io::Read;

use onehop_os::{HostMem, Reads};
use onehop_pci::Root;

use super::{number, version};

/// Relevant kernel options.
const OPTIONS: [&str; 11] = [
    "CONFIG_PCI_P2PDMA",
    "CONFIG_VFIO",
    "CONFIG_VFIO_PCI",
    "CONFIG_VFIO_CONTAINER",
    "CONFIG_VFIO_NOIOMMU",
    "CONFIG_IOMMUFD",
    "CONFIG_IO_STRICT_DEVMEM",
    "CONFIG_IO_URING",
    "CONFIG_DMABUF_MOVE_NOTIFY",
    "CONFIG_MODULES",
    "CONFIG_IOMMU_SUPPORT",
];
/// Relevant modules.
const MODULES: [&str; 12] = [
    "nvidia",
    "nouveau",
    "nvidia_fs",
    "nvidia_peermem",
    "gdrdrv",
    "nvme",
    "vfio_pci",
    "vfio_iommu_type1",
    "iommufd",
    "udmabuf",
    "onehop",
    "vmd",
];
/// Prefixes of relevant kernel command-line parameters. Others are not recorded.
const COMMAND_LINE_PREFIXES: [&str; 9] =
    ["iommu", "intel_iommu", "amd_iommu", "pci", "nokaslr", "nvme", "vfio", "hugepage", "default_hugepagesz"];
const MAX_CONFIG: usize = 1 << 20;
const MAX_CPUINFO: usize = 1 << 20;

/// The kernel and the CPU.
#[derive(Clone, Debug, Default)]
pub struct Kernel {
    /// Its release, such as `6.8.0-49-generic`.
    pub release: String,
    /// Relevant options, by name: `y`, `m` or `n`; `None` if the kernel does not report them.
    pub options: Option<BTreeMap<String, String>>,
    /// The source of the options.
    pub options_from: String,
    /// Relevant modules that are present.
    pub modules: Vec<&'static str>,
    /// Relevant parameters of the command line.
    pub command_line: Vec<String>,
    /// The lockdown level: `none`, `integrity`, `confidentiality`.
    pub lockdown: Option<String>,
    /// IOMMU units, such as `dmar0`.
    pub iommu_units: Vec<String>,
    /// Device files for VFIO: container, iommufd, groups.
    pub vfio_files: Vec<&'static str>,
    /// Groups in `/dev/vfio` that can be opened.
    pub vfio_groups: Vec<String>,
    /// Whether VFIO may be used without an IOMMU.
    pub unsafe_no_iommu: bool,
    /// The sysctl `io_uring_disabled`: 0, 1, 2.
    pub io_uring_disabled: Option<u32>,
    /// The result of setting up an io_uring.
    pub io_uring: Option<Result<(), String>>,
    /// Whether NVMe multipath is enabled (`nvme_core.multipath`).
    pub multipath: Option<bool>,
    /// The CPU.
    pub cpu: Cpu,
}

/// The CPU.
#[derive(Clone, Debug, Default)]
pub struct Cpu {
    /// `GenuineIntel`, `AuthenticAMD`.
    pub vendor: String,
    /// Its family.
    pub family: u32,
    /// Its name for display.
    pub name: String,
    /// Whether it reports a hypervisor; `None` for CPUs without such a flag.
    pub hypervisor: Option<bool>,
}

impl Kernel {
    pub(super) fn read(root: &Root) -> Self {
        let release = root.text("/proc/sys/kernel/osrelease").unwrap_or_default();
        let (options, options_from) = options(root, &release);
        let lockdown = root.text("/sys/kernel/security/lockdown").ok();
        let present = |path: &&'static str| root.exists(path);
        let groups = root.list("/dev/vfio").unwrap_or_default();
        Self {
            options,
            options_from,
            release,
            modules: MODULES.into_iter().filter(|name| root.exists(&format!("/sys/module/{name}"))).collect(),
            command_line: command_line(root),
            lockdown: lockdown.and_then(|text| bracketed(&text)),
            iommu_units: root.list("/sys/class/iommu").unwrap_or_default(),
            vfio_files: ["/dev/vfio/vfio", "/dev/iommu"].into_iter().filter(|path| present(path)).collect(),
            vfio_groups: groups.into_iter().filter(|name| name.bytes().all(|b| b.is_ascii_digit())).collect(),
            unsafe_no_iommu: yes(root, "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode"),
            io_uring_disabled: number(root, "/proc/sys/kernel/io_uring_disabled"),
            io_uring: root.answer("io_uring", try_ring),
            multipath: root.text("/sys/module/nvme_core/parameters/multipath").ok().map(|word| word == "Y"),
            cpu: Cpu::read(root),
        }
    }

    /// Its version as numbers.
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        let (major, minor, _) = version(&self.release);
        (major, minor)
    }

    /// Whether an option is enabled, as a module or built in; `None` if unknown.
    #[must_use]
    pub fn option(&self, name: &str) -> Option<bool> {
        Some(self.options.as_ref()?.get(name).is_some_and(|value| value != "n"))
    }

    /// Whether a module is loaded or built in.
    #[must_use]
    pub fn has(&self, module: &str) -> bool {
        self.modules.contains(&module)
    }

    /// Whether this is WSL.
    #[must_use]
    pub fn is_wsl(&self) -> bool {
        self.release.to_ascii_lowercase().contains("microsoft") && self.release.contains("WSL")
    }

    /// Whether lockdown is active.
    #[must_use]
    pub fn locked(&self) -> bool {
        self.lockdown.as_deref().is_some_and(|level| level != "none")
    }
}

impl Cpu {
    /// Reads `/proc/cpuinfo`.
    #[must_use]
    pub fn read(root: &Root) -> Self {
        // All CPUs are the same model, so the first entry suffices.
        let first = |bytes: &[u8]| {
            let text = String::from_utf8_lossy(bytes).into_owned();
            Ok(text.split("\n\n").next().unwrap_or_default().to_owned())
        };
        let text = root.digest("/proc/cpuinfo", MAX_CPUINFO, first).unwrap_or_default();
        let value = |key: &str| {
            let rows = text.lines().filter_map(|line| line.split_once(':'));
            rows.map(|(name, value)| (name.trim(), value.trim()))
                .find(|(name, _)| *name == key)
                .map(|(_, v)| v)
        };
        Self {
            vendor: value("vendor_id").unwrap_or_default().to_owned(),
            family: value("cpu family").and_then(|family| family.parse().ok()).unwrap_or(0),
            name: value("model name").unwrap_or_default().to_owned(),
            hypervisor: value("flags").map(|all| all.split(' ').any(|flag| flag == "hypervisor")),
        }
    }
}

fn yes(root: &Root, path: &str) -> bool {
    root.text(path).is_ok_and(|word| word == "Y" || word == "1")
}

/// The word in brackets, as in `none [integrity] confidentiality`.
pub(super) fn bracketed(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

fn command_line(root: &Root) -> Vec<String> {
    let is_relevant = |word: &&str| {
        COMMAND_LINE_PREFIXES.iter().any(|front| {
            word.strip_prefix(front)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['=', '.', '_', 's']))
        })
    };
    let keep = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes).into_owned();
        Ok(text.split_whitespace().filter(is_relevant).collect::<Vec<_>>().join(" "))
    };
    let text = root.digest("/proc/cmdline", 64 << 10, keep).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// The relevant options, and the file they were read from.
fn options(root: &Root, release: &str) -> (Option<BTreeMap<String, String>>, String) {
    let parse = |bytes: &[u8]| Ok(relevant_options(&String::from_utf8_lossy(bytes)));
    let unpack = |bytes: &[u8]| {
        let mut text = Vec::new();
        let unpacked = flate2::read::GzDecoder::new(bytes).take(MAX_CONFIG as u64).read_to_end(&mut text);
        unpacked.map(|_| relevant_options(&String::from_utf8_lossy(&text))).map_err(|e| e.to_string())
    };
    let boot = format!("/boot/config-{release}");
    let modules = format!("/lib/modules/{release}/config");
    let found = root
        .digest("/proc/config.gz", MAX_CONFIG, unpack)
        .map(|text| (text, "/proc/config.gz".to_owned()))
        .or_else(|_| root.digest(&boot, MAX_CONFIG, parse).map(|text| (text, boot.clone())))
        .or_else(|_| root.digest(&modules, MAX_CONFIG, parse).map(|text| (text, modules.clone())));
    let Ok((text, from)) = found else { return (None, String::new()) };
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    (Some(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()), from)
}

fn relevant_options(text: &str) -> String {
    let value = |name: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        format!("{name}={}\n", found.unwrap_or("n"))
    };
    OPTIONS.iter().map(|name| value(name)).collect()
}

/// Sets up the smallest ring that onehop would use.
fn try_ring() -> Result<(), String> {
    let ring = HostMem::anonymous(4096).and_then(|memory| Reads::new(memory, 2));
    ring.map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_and_options_are_parsed() {
        assert_eq!(bracketed("none [integrity] confidentiality").as_deref(), Some("integrity"));
        assert_eq!((bracketed(""), bracketed("[x")), (None, None));
        let text = relevant_options("# CONFIG_VFIO is not set\nCONFIG_PCI_P2PDMA=y\nCONFIG_VFIO_PCI=m\n");
        assert!(text.contains("CONFIG_PCI_P2PDMA=y\nCONFIG_VFIO=n\nCONFIG_VFIO_PCI=m\n"), "{text}");
    }
}
