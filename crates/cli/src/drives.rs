//! From what people write after `-d` to a controller.

use std::path::{Path, PathBuf};

use onehop_drive::{Drive, Options};
use onehop_os::ControllerBackend;
use onehop_pci::{DriveName, Root, Via};
use onehop_sim::Media;

use crate::error::{CliError, Result};
use crate::report;
use crate::units;

const WANTED: &str = "a drive is sim:mem:64M or sim:IMAGE (a simulated one), qtest:SOCKET,MEMORY-FILE (QEMU's), \
                      vfio-user:SOCKET (one that a vfio-user server has), or a PCI address such as 0000:0b:00.0";

/// Which drive.
#[derive(clap::Args)]
pub(crate) struct DriveArg {
    /// The drive: 0000:0b:00.0 (a PCI address), sim:mem:64M, sim:IMAGE?lba=4096&mdts=5, qtest:SOCKET,MEMORY-FILE,
    /// vfio-user:SOCKET
    #[arg(short = 'd', long = "drive", value_name = "DRIVE")]
    pub drive: String,
}

/// A controller that was found, not yet brought up.
pub(crate) struct FoundController {
    pub port: ControllerBackend,
    /// The file that holds its blocks, where that is a file of this machine.
    pub image: Option<PathBuf>,
}

/// Finds the controller that a description names.
pub(crate) fn find(spec: &str) -> Result<FoundController> {
    if let Some(rest) = spec.strip_prefix("sim:") {
        let sim = onehop_sim::open(rest)?;
        let image = match &sim.config().media {
            Media::Image { path, .. } => Some(path.clone()),
            Media::Memory(_) => None,
        };
        return Ok(FoundController { port: sim.port(), image });
    }
    if let Some(rest) = spec.strip_prefix("qtest:") {
        return Ok(FoundController { port: onehop_qtest::open(rest)?, image: None });
    }
    if let Some(socket) = spec.strip_prefix("vfio-user:").filter(|socket| !socket.is_empty()) {
        return Ok(FoundController { port: onehop_vfio_user::client::open(Path::new(socket))?, image: None });
    }
    if is_real(spec) {
        return Ok(FoundController { port: real(spec)?, image: None });
    }
    let unknown = || format!("'{}' is no drive: {WANTED}", spec.escape_debug());
    Err(CliError::Usage(block_device(spec).unwrap_or_else(unknown)))
}

/// Finds a controller and brings it up, for reading only.
pub(crate) fn open(spec: &str) -> Result<Drive> {
    Ok(Drive::open(find(spec)?.port, Options::default())?)
}

/// Whether a description names a PCI device.
fn is_real(spec: &str) -> bool {
    units::is_pci_address(spec.split('?').next().unwrap_or(spec))
}

/// The PCI device that a description names, which is to be one.
pub(crate) fn address(spec: &str) -> Result<DriveName> {
    if is_real(spec) {
        return spec.parse().map_err(|error: onehop_pci::Error| CliError::Usage(error.to_string()));
    }
    if let Some(hint) = block_device(spec) {
        return Err(CliError::Usage(hint));
    }
    let what =
        "is no PCI address such as 0000:0b:00.0; only real drives have a kernel driver to be taken from";
    Err(CliError::Usage(format!("'{}' {what}", spec.escape_debug())))
}

/// What to write in the place of a kernel's name of a drive: `/dev/nvme0n1`, `nvme0n1p2`, `/dev/nvme0`.
pub(crate) fn block_device(spec: &str) -> Option<String> {
    let name = spec.strip_prefix("/dev/").unwrap_or(spec);
    let is_known =
        name.strip_prefix("nvme").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    if spec.starts_with("/dev/") && is_plain && !is_known {
        return Some(format!("'{spec}' is not an NVMe drive; to read a file on it: onehop read FILE"));
    }
    (is_plain && is_known).then(|| {
        let address = controller(&Root::here(), name).map_or_else(
            || "the PCI address of its controller, which `onehop drive list` shows".to_owned(),
            |address| format!("the PCI address of its controller: -d {address}"),
        );
        format!(
            "'{spec}' is a device file of the kernel; -d takes {address}. To read a file: onehop read FILE"
        )
    })
}

/// The NVMe controller that has this namespace, partition or name.
fn controller(root: &Root, name: &str) -> Option<onehop_pci::Address> {
    if let Some(at) = root.link_name(&format!("/sys/class/nvme/{name}/device")) {
        return at.parse().ok();
    }
    // A namespace's own name may be its subsystem's, so each controller's list is asked.
    let of = |namespace: &str| match name.strip_prefix(namespace) {
        Some(rest) => rest.is_empty() || rest.starts_with('p'),
        None => false,
    };
    let all = onehop_pci::Usage::all(root).ok()?;
    all.into_iter().find(|one| one.namespaces.iter().any(|ns| of(&ns.name))).map(|one| one.address)
}

/// Takes a real drive from the kernel.
fn real(spec: &str) -> Result<ControllerBackend> {
    let name = address(spec)?;
    let root = Root::here();
    present(&root, &name)?;
    let by_module = name.via == Some(Via::Module);
    if name.via == Some(Via::PageMap) || by_module && !onehop_pci::is_translated(&root, name.address) {
        report::note(&format!(
            "{}: no IOMMU translates this drive's addresses: only onehop's own checks keep it from writing into any memory of \
             this machine",
            name.address
        ));
    }
    let port = onehop_pci::open(&root, name)?;
    if let Some(warning) = flushed_late(&root, &name) {
        report::note(&warning);
    }
    Ok(port)
}

/// What is said of a drive that the module has, in a group that could not be made strict.
fn flushed_late(root: &Root, name: &DriveName) -> Option<String> {
    (name.via == Some(Via::Module) && onehop_pci::is_lazy(root, name.address)).then(|| {
        format!(
            "{}: its IOMMU group is flushed lazily, and was not made strict: what was unmapped the drive still reaches for a while, \
             when it may be somebody else's. A slot of its own, or booting with iommu.strict=1, mends that",
            name.address
        )
    })
}

/// An error where there is no such device.
pub(crate) fn present(root: &Root, name: &DriveName) -> Result<()> {
    if root.exists(&format!("/sys/bus/pci/devices/{}", name.address)) {
        return Ok(());
    }
    Err(CliError::not_possible(
        format!("using {}", name.address),
        "this machine has no PCI device of this address",
        "`onehop drive list` shows its drives; one that has left the bus may come back by `onehop drive recover`",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_kernel_lead_to_the_controller() {
        let folder = std::env::temp_dir().join(format!("onehop-cli-names-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let put = |path: &str, text: &str| {
            let path = folder.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let device = "sys/bus/pci/devices/0000:0b:00.0";
        put(&format!("{device}/class"), "0x010802\n");
        // With multipath, the namespace is named after its subsystem, 3, and not its controller, 0.
        put(&format!("{device}/nvme/nvme0/nvme3c0n1/size"), "8\n");
        put("sys/class/block/nvme3n1/size", "8\n");
        put("proc/self/mountinfo", "");
        std::fs::create_dir_all(folder.join("sys/class/nvme/nvme0")).unwrap();
        let link = folder.join("sys/class/nvme/nvme0/device");
        std::os::unix::fs::symlink("../../../bus/pci/devices/0000:0b:00.0", link).unwrap();
        let root = Root::below(&folder);
        let known = |name: &str| controller(&root, name).map(|at| at.to_string());
        for name in ["nvme0", "nvme3n1", "nvme3n1p2"] {
            assert_eq!(known(name).as_deref(), Some("0000:0b:00.0"), "{name}");
        }
        for name in ["nvme3", "nvme0n1", "nvme3n11", "nvme1"] {
            assert_eq!(known(name), None, "{name}");
        }
        std::fs::remove_dir_all(folder).unwrap();
        let said = |spec| block_device(spec).unwrap_or_default();
        assert!(said("/dev/nvme99n1").contains("onehop drive list") && said("nvme99").contains("-d takes"));
        assert!(block_device("nonsense").is_none() && block_device("0000:0b:00.0").is_none());
    }

    #[test]
    fn a_group_that_stays_lazy_is_told() {
        let folder = std::env::temp_dir().join(format!("onehop-cli-lazy-{}", std::process::id()));
        let device = folder.join("sys/bus/pci/devices/0000:0b:00.0");
        let group = folder.join("sys/kernel/iommu_groups/3");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::create_dir_all(&group).unwrap();
        let root = Root::below(&folder);
        let told = |spec: &str| flushed_late(&root, &address(spec).unwrap()).is_some();
        assert!(!told("0000:0b:00.0?via=kmod"));
        std::os::unix::fs::symlink("../../../../kernel/iommu_groups/3", device.join("iommu_group")).unwrap();
        for (kind, late) in [("DMA-FQ\n", true), ("DMA\n", false), ("identity\n", false)] {
            std::fs::write(group.join("type"), kind).unwrap();
            // VFIO flushes by itself.
            assert_eq!(
                (told("0000:0b:00.0?via=kmod"), told("0000:0b:00.0?via=vfio")),
                (late, false),
                "{kind}"
            );
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
