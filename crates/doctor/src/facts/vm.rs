//! Detects a virtual machine: by CPU, firmware tables, device tree, Xen.

use onehop_pci::Root;

use super::kernel::Cpu;

/// Words in firmware tables of virtual machines, in lower case.
const FIRMWARE: [&str; 24] = [
    "qemu",
    "kvm",
    "vmware",
    "innotek",
    "virtualbox",
    "xen",
    "bochs",
    "bhyve",
    "parallels",
    "virtual machine",
    "virtual platform",
    "vserver",
    "google compute engine",
    "amazon ec2",
    "openstack",
    "kubevirt",
    "alibaba cloud",
    "huaweicloud",
    "tencent cloud",
    "digitalocean",
    "apple virtualization",
    "nutanix",
    "ovirt",
    "cloud hypervisor",
];
/// Placeholders in firmware tables that nobody filled in, in lower case.
const UNFILLED: [&str; 9] = [
    "to be filled by o.e.m.",
    "to be filled by oem",
    "default string",
    "not specified",
    "not applicable",
    "system product name",
    "unknown",
    "none",
    "n/a",
];
const TREE: &str = "/sys/firmware/devicetree/base";
const DMI: &str = "/sys/class/dmi/id";

/// Whether this is a virtual machine, and the evidence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Virtual {
    /// It is one.
    Yes(String),
    /// It is a physical machine.
    No(String),
    /// No evidence either way.
    #[default]
    Unknown,
}

impl Virtual {
    /// Looks for evidence of a virtual machine first, then of a physical one.
    #[must_use]
    pub fn read(root: &Root) -> Self {
        let cpu = Cpu::read(root);
        let marks = [
            cpu.hypervisor.filter(|flag| *flag).map(|_| "/proc/cpuinfo: hypervisor".to_owned()),
            by_device_tree(root),
            by_firmware(root),
            by_xen(root),
        ];
        if let Some(mark) = marks.into_iter().flatten().next() {
            return Self::Yes(mark);
        }
        match cpu.hypervisor {
            Some(_) => Self::No("/proc/cpuinfo: no hypervisor".to_owned()),
            // Other CPUs have no such flag. A guest's firmware or device tree names its hypervisor.
            None if root.text(&format!("{DMI}/product_name")).is_ok_and(|name| is_a_name(&name)) => {
                Self::No(format!("{DMI}: no hypervisor"))
            }
            None if root.text(&format!("{TREE}/compatible")).is_ok_and(|name| is_a_name(&name)) => {
                Self::No(format!("{TREE}: no hypervisor"))
            }
            None => Self::Unknown,
        }
    }

    /// Whether it is known to be a virtual machine.
    #[must_use]
    pub fn is_virtual(&self) -> bool {
        matches!(self, Self::Yes(_))
    }

    /// Whether it is known to be a physical machine.
    #[must_use]
    pub fn is_real(&self) -> bool {
        matches!(self, Self::No(_))
    }
}

/// Whether a word of the firmware is a product name, not a placeholder.
fn is_a_name(text: &str) -> bool {
    let text = text.trim_matches(|c: char| c == '\0' || c.is_whitespace()).to_lowercase();
    !text.is_empty() && !UNFILLED.contains(&text.as_str())
}

fn by_firmware(root: &Root) -> Option<String> {
    let fields = ["sys_vendor", "product_name", "board_vendor", "board_name", "bios_vendor"];
    let text = |field: &str| root.text(&format!("{DMI}/{field}")).unwrap_or_default();
    // EC2 also offers physical machines, and marks them in their names.
    if text("product_name").ends_with(".metal") || text("product_name").contains(".metal-") {
        return None;
    }
    fields.into_iter().find_map(|field| {
        let said = text(field);
        // Only whole words count.
        let lower = format!(" {}", said.to_lowercase());
        FIRMWARE
            .iter()
            .any(|word| lower.contains(&format!(" {word}")))
            .then(|| format!("{DMI}/{field}: {said}"))
    })
}

fn by_device_tree(root: &Root) -> Option<String> {
    let text = |path: &str| root.text(&format!("{TREE}/{path}")).ok();
    if let Some(kind) = text("hypervisor/compatible") {
        return Some(format!("{TREE}/hypervisor: {}", kind.trim_matches('\0')));
    }
    let machine = text("compatible").unwrap_or_default();
    if let Some(kind) = machine.split('\0').find(|kind| ["linux,dummy-virt", "qemu,pseries"].contains(kind)) {
        return Some(format!("{TREE}/compatible: {kind}"));
    }
    // A device of QEMU's own virtual boards.
    let nodes = root.list(TREE).unwrap_or_default();
    nodes.into_iter().find(|node| node.starts_with("fw-cfg@")).map(|node| format!("{TREE}/{node}"))
}

fn by_xen(root: &Root) -> Option<String> {
    let kind = root.text("/sys/hypervisor/type").ok().filter(|kind| !kind.is_empty())?;
    Some(format!("/sys/hypervisor/type: {kind}"))
}
