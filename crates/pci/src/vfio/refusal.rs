//! Why VFIO refuses a device, and how to fix it.

use std::io;

use crate::{Address, Error, PortType, Result, Root, Tree};

/// Drivers that may stay in a group: bridges do not access memory on their own.
const HARMLESS: [&str; 3] = ["vfio-pci", "pcieport", "pci-stub"];

fn refused(address: Address, why: String, fix: impl Into<String>) -> Error {
    Error::Refused { what: format!("driving {address} through VFIO"), why, fix: fix.into() }
}

/// The device's IOMMU group.
pub(super) fn group(root: &Root, address: Address) -> Result<u32> {
    let name = root.link_name(&format!("/sys/bus/pci/devices/{address}/iommu_group"));
    name.and_then(|name| name.parse().ok()).ok_or_else(|| {
        refused(
            address,
            "it is in no IOMMU group: this machine has no IOMMU, or the IOMMU is disabled".into(),
            "Enable the IOMMU (VT-d, AMD-Vi) in the firmware, and on Intel CPUs boot with intel_iommu=on; \
             without it, root may use the page map (`?via=pagemap`)",
        )
    })
}

/// Checks that need no change to the device.
pub(super) fn before(root: &Root, address: Address) -> Result<()> {
    let number = group(root, address)?;
    if root.exists("/sys/bus/pci/drivers/vfio-pci") || load(root) {
        let others = others(root, address, number, false);
        return if others.is_empty() { Ok(()) } else { Err(shared(root, address, number, &others)) };
    }
    Err(refused(
        address,
        "the kernel's driver vfio-pci is not loaded".into(),
        "Load it: `modprobe vfio-pci vfio_iommu_type1`",
    ))
}

/// Loads the driver, if this is the running machine and the user may.
fn load(root: &Root) -> bool {
    if !root.is_here() {
        return false;
    }
    for module in ["vfio_iommu_type1", "vfio-pci"] {
        // The caller checks for the result.
        let _ = std::process::Command::new("modprobe").arg(module).output();
    }
    root.exists("/sys/bus/pci/drivers/vfio-pci")
}

/// Devices of the group with drivers, and those drivers. Includes the device itself before it was claimed.
fn others(root: &Root, address: Address, number: u32, with_own: bool) -> Vec<(String, String)> {
    let members = root.list(&format!("/sys/kernel/iommu_groups/{number}/devices")).unwrap_or_default();
    let driven = |member: String| {
        let driver = root.link_name(&format!("/sys/bus/pci/devices/{member}/driver"))?;
        let foreign = !HARMLESS.contains(&driver.as_str()) && (with_own || member != address.to_string());
        foreign.then_some((member, driver))
    };
    members.into_iter().filter_map(driven).collect()
}

fn shared(root: &Root, address: Address, number: u32, others: &[(String, String)]) -> Error {
    let names: Vec<_> = others.iter().map(|(device, driver)| format!("{device} ({driver})")).collect();
    let ports = open_ports(root, address);
    let because = match &ports[..] {
        [] => "if bridges do not isolate them, or if they are functions of one device".to_owned(),
        ports => {
            format!("if bridges above them do not isolate them, which here are {}", ports.join(", "))
        }
    };
    refused(
        address,
        format!(
            "its IOMMU group {number} is not viable: it holds other devices with drivers: {}",
            names.join(", ")
        ),
        format!(
            "Bind those to vfio-pci as well, or move the drive to a slot of its own: devices share a group {because}"
        ),
    )
}

/// The bridges above a device that do not isolate the devices below, so that these share a group; each with what it
/// lacks.
fn open_ports(root: &Root, address: Address) -> Vec<String> {
    let Ok(tree) = Tree::scan(root) else { return Vec::new() };
    let parents = tree.get(address).map(|device| device.parents.clone()).unwrap_or_default();
    let lacking = |port: &Address| {
        let config = tree.get(*port)?.config.as_ref()?;
        let why = match config.express.map(|express| express.kind) {
            Some(PortType::RootPort | PortType::Downstream) => match config.acs {
                Some(acs) if acs.isolates() => return None,
                Some(acs) if acs.control == 0 => "its ACS is disabled".to_owned(),
                Some(acs) => format!("its ACS has only {}", acs.names().join(" ")),
                None if config.has_extended() => "no ACS".to_owned(),
                None => "only root can read its ACS".to_owned(),
            },
            Some(PortType::Bridge) | None => "a bridge to plain PCI".to_owned(),
            Some(_) => return None,
        };
        Some(format!("{port} ({why})"))
    };
    parents.iter().filter_map(lacking).collect()
}

/// The error for a group that is not viable.
pub(super) fn not_viable(root: &Root, address: Address, number: u32) -> Error {
    shared(root, address, number, &others(root, address, number, true))
}

/// The error for a container that cannot be opened.
pub(super) fn container(address: Address, error: &io::Error) -> Error {
    refused(address, format!("/dev/vfio/vfio: {error}"), "Load it: `modprobe vfio_iommu_type1`")
}

/// The error for a VFIO without type1.
pub(super) fn no_type1(address: Address) -> Error {
    let why = "the kernel's VFIO has no type1 IOMMU of version 2".to_owned();
    refused(address, why, "Load it: `modprobe vfio_iommu_type1`")
}

/// The error for a group's file that cannot be opened.
pub(super) fn open_group(root: &Root, address: Address, name: &str, error: &io::Error) -> Error {
    let others = || root.list(&format!("{}/devices", name.replace("/dev/vfio", "/sys/kernel/iommu_groups")));
    let (why, fix) = match error.raw_os_error() {
        Some(libc::EBUSY) => {
            let members = others().unwrap_or_default().join(", ");
            (
                format!("{name} is open elsewhere: another program drives one of {members}"),
                "Stop that program",
            )
        }
        Some(libc::EACCES | libc::EPERM) => {
            (format!("{name}: {error}"), "Run as root, or have root give this file to your user (chown)")
        }
        _ => (format!("{name}: {error}"), "See `dmesg`"),
    };
    refused(address, why, fix)
}

/// The error for an IOMMU that cannot be set.
pub(super) fn set_iommu(address: Address, error: &io::Error) -> Error {
    let fix = match error.raw_os_error() {
        Some(libc::EPERM) => {
            "The machine does not isolate interrupts: enable interrupt remapping in the firmware, or accept that \
             with vfio_iommu_type1.allow_unsafe_interrupts=1"
        }
        _ => "See `dmesg`",
    };
    refused(address, format!("VFIO_SET_IOMMU: {error}"), fix)
}

/// The error for a device that the group does not return.
pub(super) fn device(address: Address, error: &io::Error) -> Error {
    let call = format!("VFIO_GROUP_GET_DEVICE_FD: {error}");
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENODEV) => refused(
            address,
            format!("{call}; it is being removed from the bus, or from vfio-pci"),
            format!(
                "Try again; `onehop drive recover -d {address}` rescans for a drive that has left the bus"
            ),
        ),
        _ => refused(address, call, "See `dmesg`"),
    }
}

/// The error for a file of iommufd that cannot be opened.
pub(super) fn iommufd(address: Address, name: &str, error: &io::Error) -> Error {
    let fix = match error.raw_os_error() {
        Some(libc::ENOENT) => {
            "Use a kernel with CONFIG_IOMMUFD (`modprobe iommufd`), or VFIO's groups (`?via=vfio`)"
        }
        Some(libc::EACCES | libc::EPERM) => "Run as root, or have root give this file to your user (chown)",
        _ => "See `dmesg`",
    };
    refused(address, format!("{name}: {error}"), fix)
}

/// The error for a VFIO without device files.
pub(super) fn no_device_file(address: Address) -> Error {
    let why = "the kernel's VFIO has no file for the device, only for its group".to_owned();
    refused(address, why, "Use a kernel with CONFIG_VFIO_DEVICE_CDEV, or VFIO's groups (`?via=vfio`)")
}

/// The error for a device that cannot be bound to iommufd.
pub(super) fn bind(root: &Root, address: Address, error: &io::Error) -> Error {
    let call = format!("VFIO_DEVICE_BIND_IOMMUFD: {error}");
    let number = group(root, address).unwrap_or_default();
    match error.raw_os_error() {
        Some(libc::EPERM) => refused(
            address,
            call,
            "The machine does not isolate interrupts: enable interrupt remapping in the firmware, or accept that with \
             iommufd.allow_unsafe_interrupts=1",
        ),
        Some(libc::EBUSY | libc::EINVAL) => match others(root, address, number, true) {
            others if others.is_empty() => refused(
                address,
                format!("{call}; another program uses it, or the rest of its IOMMU group {number}"),
                "Stop that program",
            ),
            others => shared(root, address, number, &others),
        },
        _ => refused(address, call, "See `dmesg`"),
    }
}

/// The error for a device that cannot be attached to an address space.
pub(super) fn attach(address: Address, error: &io::Error) -> Error {
    refused(address, format!("VFIO_DEVICE_ATTACH_IOMMUFD_PT: {error}"), "See `dmesg`")
}
