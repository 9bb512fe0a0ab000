//! From a drive's name to its controller.

use std::path::{Path, PathBuf};

use onehop_fabrics::Subsystem;
use onehop_os::{ControllerBackend, StopSignal};
use onehop_pci::{DriveName, Root, Via};

use crate::error::{Error, Result};

const WANTED: &str = "a drive is sim:mem:64M or sim:IMAGE (a simulated one), qtest:SOCKET,MEMORY-FILE (QEMU's), \
                      vfio-user:SOCKET (one that a vfio-user server has), nvme-tcp://HOST:PORT/NQN (one across the network), \
                      or a PCI address such as 0000:0b:00.0";

/// A controller that was found and, if it is a PCI device, claimed. It has not been brought up.
pub struct FoundController {
    /// The argument of [`onehop_drive::Drive::open`].
    pub backend: ControllerBackend,
    /// The files of this machine that hold its blocks and their metadata. An output must not replace them.
    pub files: Vec<PathBuf>,
    /// What the user must know before using it: which protection is missing.
    pub warnings: Vec<String>,
}

impl FoundController {
    fn new(backend: ControllerBackend) -> Self {
        Self { backend, files: Vec::new(), warnings: Vec::new() }
    }
}

/// Finds the controller that `spec` names: `sim:…`, `qtest:…`, `vfio-user:…`, `nvme-tcp://…`, or a PCI address. `stop` ends
/// the wait for a server or a target that does not answer, also later.
///
/// # Errors
/// When `spec` does not name a drive, the drive is in use or not available, or the caller asked for an end.
pub fn find(spec: &str, stop: &StopSignal) -> Result<FoundController> {
    if let Some(rest) = spec.strip_prefix("sim:") {
        if rest.split('?').next() == Some("usdr") && !Path::new("usdr").exists() {
            return Err(Error::NoDrive(format!(
                "'{spec}' is not a drive but a simulated SDR board: see onehop sdr"
            )));
        }
        let sim = onehop_sim::open(rest)?;
        return Ok(FoundController { files: sim.config().media.files(), ..FoundController::new(sim.port()) });
    }
    if let Some(rest) = spec.strip_prefix("qtest:") {
        return Ok(FoundController::new(onehop_qtest::open(rest)?));
    }
    if let Some(socket) = spec.strip_prefix("vfio-user:").filter(|socket| !socket.is_empty()) {
        return Ok(FoundController::new(onehop_vfio_user::client::open(Path::new(socket), stop)?));
    }
    if spec.starts_with(onehop_fabrics::SCHEME) {
        return Ok(FoundController::new(onehop_fabrics::open(&spec.parse()?, stop)?));
    }
    if is_pci_device(spec) {
        return real(spec);
    }
    let unknown = || format!("'{}' is not a drive: {WANTED}", spec.escape_debug());
    Err(Error::NoDrive(block_device(spec).unwrap_or_else(unknown)))
}

/// The subsystems that a target's discovery service lists, if `spec` names a target and no subsystem of it.
///
/// # Errors
/// When the target cannot be reached, or does not answer as it should.
pub fn subsystems(spec: &str, stop: &StopSignal) -> Result<Option<Vec<Subsystem>>> {
    if !spec.starts_with(onehop_fabrics::SCHEME) {
        return Ok(None);
    }
    let target: onehop_fabrics::SubsystemAddress = spec.parse()?;
    if target.nqn.is_some() { Ok(None) } else { Ok(Some(onehop_fabrics::discover(&target, stop)?)) }
}

/// Whether a name is a PCI device's.
fn is_pci_device(spec: &str) -> bool {
    is_pci_address(spec.split('?').next().unwrap_or(spec))
}

/// The PCI device that `spec` names.
///
/// # Errors
/// When it does not name one, or has an unknown option.
pub fn address(spec: &str) -> Result<DriveName> {
    if is_pci_device(spec) {
        return spec.parse().map_err(|error: onehop_pci::Error| Error::NoDrive(error.to_string()));
    }
    if let Some(hint) = block_device(spec) {
        return Err(Error::NoDrive(hint));
    }
    let what =
        "is not a PCI address such as 0000:0b:00.0; only real drives can be detached from a kernel driver";
    Err(Error::NoDrive(format!("'{}' {what}", spec.escape_debug())))
}

/// The name to use in place of a block device's: `/dev/nvme0n1`, `nvme0n1p2`, `/dev/nvme0`.
#[must_use]
pub fn block_device(spec: &str) -> Option<String> {
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

/// The NVMe controller of a namespace, partition or controller name.
fn controller(root: &Root, name: &str) -> Option<onehop_pci::Address> {
    if let Some(at) = root.link_name(&format!("/sys/class/nvme/{name}/device")) {
        return at.parse().ok();
    }
    // A namespace may have its subsystem's number, so each controller's list is searched.
    let of = |namespace: &str| match name.strip_prefix(namespace) {
        Some(rest) => rest.is_empty() || rest.starts_with('p'),
        None => false,
    };
    let all = onehop_pci::Usage::all(root).ok()?;
    all.into_iter().find(|one| one.namespaces.iter().any(|ns| of(&ns.name))).map(|one| one.address)
}

/// Claims a real drive from the kernel.
fn real(spec: &str) -> Result<FoundController> {
    let name = address(spec)?;
    let root = Root::here();
    present(&root, &name)?;
    let unprotected = unprotected(&root, &name);
    let backend = onehop_pci::open(&root, name)?;
    // Only now is it known whether its group is strict.
    let warnings = unprotected.into_iter().chain(flushed_late(&root, &name)).collect();
    Ok(FoundController { warnings, ..FoundController::new(backend) })
}

/// The warning for a drive that is not confined by an IOMMU.
fn unprotected(root: &Root, name: &DriveName) -> Option<String> {
    let by_module = name.via == Some(Via::Module);
    let none = name.via == Some(Via::PageMap) || by_module && !onehop_pci::is_translated(root, name.address);
    none.then(|| {
        format!(
            "{}: no IOMMU translates this drive's addresses: only onehop's own checks keep it from writing into any memory \
             of this machine",
            name.address
        )
    })
}

/// The warning for a drive that is driven through the module in a group that could not be made strict.
fn flushed_late(root: &Root, name: &DriveName) -> Option<String> {
    (name.via == Some(Via::Module) && onehop_pci::is_lazy(root, name.address)).then(|| {
        format!(
            "{}: its IOMMU group is flushed lazily, and was not made strict: for a while the drive still reaches memory that was unmapped, \
             when it may belong to another program. A slot of its own, or booting with iommu.strict=1, fixes that",
            name.address
        )
    })
}

/// Checks that the device exists.
///
/// # Errors
/// When it does not.
pub fn present(root: &Root, name: &DriveName) -> Result<()> {
    if root.exists(&format!("/sys/bus/pci/devices/{}", name.address)) {
        return Ok(());
    }
    Err(Error::not_possible(
        format!("using {}", name.address),
        "this machine has no PCI device of this address",
        "`onehop drive list` shows its drives; one that has left the bus may come back by `onehop drive recover`",
    ))
}

/// Whether this is the address of a PCI function: `0000:0b:00.0`, or `0b:00.0`.
#[must_use]
pub fn is_pci_address(text: &str) -> bool {
    let part = |part: &str, most: usize| {
        (1..=most).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit())
    };
    let Some((front, function)) = text.rsplit_once('.') else { return false };
    if !part(function, 1) {
        return false;
    }
    match front.split(':').collect::<Vec<_>>()[..] {
        [bus, device] => part(bus, 2) && part(device, 2),
        [domain, bus, device] => part(domain, 8) && part(bus, 2) && part(device, 2),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses() {
        for good in ["0000:0b:00.0", "0b:00.0", "10000:e1:00.0", "0000:AB:1f.7"] {
            assert!(is_pci_address(good), "{good}");
        }
        for bad in ["", ".", "0b:00", "0000:0b:00.10", "x:0b:00.0", ":0b:00.0", "1:2:3:4.5"] {
            assert!(!is_pci_address(bad), "{bad}");
        }
    }

    #[test]
    fn invalid_drive_names_are_refused() {
        for bad in ["", "nothing", "vfio-user:", "mem:64M", "0b:00"] {
            assert!(matches!(find(bad, &StopSignal::default()), Err(Error::NoDrive(_))), "{bad}");
        }
        assert!(find("sim:mem:1M", &StopSignal::default()).unwrap().files.is_empty());
        assert!(matches!(find("sim:mem:1M?mdts=x", &StopSignal::default()), Err(Error::Sim(_))));
        let named = |spec| match find(spec, &StopSignal::default()) {
            Err(error) => (error.kind(), error.to_string()),
            Ok(_) => panic!("{spec} was found"),
        };
        let (kind, said) = named("nvme-tcp://store/models");
        assert!(kind == crate::ErrorKind::Request && said.contains("not an NQN"), "{said}");
        let (kind, said) = named("nvme-tcp://127.0.0.1:1/nqn.x");
        assert!(kind == crate::ErrorKind::Drive && said.contains("no connection to 127.0.0.1:1"), "{said}");
    }

    #[test]
    fn names_of_the_kernel_lead_to_the_controller() {
        let folder = std::env::temp_dir().join(format!("onehop-transfer-names-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let put = |path: &str, text: &str| {
            let path = folder.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let device = "sys/bus/pci/devices/0000:0b:00.0";
        put(&format!("{device}/class"), "0x010802\n");
        // With multipath, the namespace has the number of its subsystem, 3, and not that of its controller, 0.
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
    fn a_group_that_stays_lazy_is_reported() {
        let folder = std::env::temp_dir().join(format!("onehop-transfer-lazy-{}", std::process::id()));
        let device = folder.join("sys/bus/pci/devices/0000:0b:00.0");
        let group = folder.join("sys/kernel/iommu_groups/3");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::create_dir_all(&group).unwrap();
        let root = Root::below(&folder);
        let is_reported = |spec: &str| flushed_late(&root, &address(spec).unwrap()).is_some();
        let bare = |spec: &str| unprotected(&root, &address(spec).unwrap()).is_some();
        assert!(!is_reported("0000:0b:00.0?via=kmod") && bare("0000:0b:00.0?via=kmod"));
        std::os::unix::fs::symlink("../../../../kernel/iommu_groups/3", device.join("iommu_group")).unwrap();
        for (kind, late) in [("DMA-FQ\n", true), ("DMA\n", false), ("identity\n", false)] {
            std::fs::write(group.join("type"), kind).unwrap();
            // VFIO flushes by itself.
            assert_eq!(
                (is_reported("0000:0b:00.0?via=kmod"), is_reported("0000:0b:00.0?via=vfio")),
                (late, false),
                "{kind}"
            );
            assert_eq!(bare("0000:0b:00.0?via=kmod"), kind == "identity\n", "{kind}");
            assert!(bare("0000:0b:00.0?via=pagemap") && !bare("0000:0b:00.0?via=vfio"));
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
