//! From what people write after `-d` to a controller.

use std::path::{Path, PathBuf};

use onehop_drive::{Drive, Options};
use onehop_os::ControllerBackend;
use onehop_pci::{DriveName, Root, Via};
use onehop_sim::Media;

use crate::error::{CliError, Result};
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
    Err(CliError::Usage(format!("'{}' is no drive: {WANTED}", spec.escape_debug())))
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
    let what =
        "is no PCI address such as 0000:0b:00.0; only real drives have a kernel driver to be taken from";
    Err(CliError::Usage(format!("'{}' {what}", spec.escape_debug())))
}

/// Takes a real drive from the kernel.
fn real(spec: &str) -> Result<ControllerBackend> {
    let name = address(spec)?;
    let root = Root::here();
    present(&root, &name)?;
    let by_module = name.via == Some(Via::Module);
    if name.via == Some(Via::PageMap) || by_module && !onehop_pci::is_translated(&root, name.address) {
        eprintln!(
            "onehop: {}: driven without an IOMMU that translates its addresses: nothing but our own care keeps it from writing \
             into any memory of this machine",
            name.address
        );
    }
    let port = onehop_pci::open(&root, name)?;
    if let Some(warning) = flushed_late(&root, &name) {
        eprintln!("onehop: {warning}");
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
