//! Detects a virtual machine: by CPU, firmware tables, device tree, virtio, Xen.

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
/// Manufacturers of physical machines: the first word of the name in firmware tables, in lower case.
const VENDORS: [&str; 27] = [
    "adlink",
    "ampere",
    "asrock",
    "asrockrack",
    "asus",
    "asustek",
    "cavium",
    "cisco",
    "dell",
    "foxconn",
    "fujitsu",
    "giga",
    "gigabyte",
    "hewlett",
    "hp",
    "hpe",
    "ingrasys",
    "inspur",
    "inventec",
    "lenovo",
    "mitac",
    "nvidia",
    "quanta",
    "super",
    "supermicro",
    "wistron",
    "wiwynn",
];
/// Prefixes of physical boards in device trees, and the name that only physical POWER machines have.
const BOARD_PREFIXES: [&str; 8] =
    ["nvidia,", "raspberrypi,", "radxa,", "rockchip,", "sifive,", "solidrun,", "starfive,", "ibm,powernv"];
const TREE: &str = "/sys/firmware/devicetree/base";
const DMI: &str = "/sys/class/dmi/id";
/// The BIOS information table (DMI type 0), which only root can read.
const BIOS: &str = "/sys/firmware/dmi/entries/0-0/raw";
const VIRTIO: &str = "/sys/bus/virtio/devices";

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
            by_bios_bit(root),
            by_xen(root),
        ];
        if let Some(mark) = marks.into_iter().flatten().next() {
            return Self::Yes(mark);
        }
        if cpu.hypervisor.is_some() {
            return Self::No("/proc/cpuinfo: no hypervisor".to_owned());
        }
        // Other CPUs have no such flag, and a cloud may name its machines freely. Some physical machines have virtio
        // devices too: cards that emulate them.
        let virtio = root.list(VIRTIO).unwrap_or_default().into_iter().next();
        match (by_vendor(root), virtio) {
            (Some(mark), None) => Self::No(mark),
            (None, Some(device)) => Self::Yes(format!("{VIRTIO}/{device}")),
            (Some(_), Some(_)) | (None, None) => Self::Unknown,
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

/// Evidence of a physical machine: its manufacturer, from firmware or device tree.
fn by_vendor(root: &Root) -> Option<String> {
    if is_metal(root) {
        return Some(format!("{DMI}/product_name: metal"));
    }
    let is_vendor = |text: &str| {
        let text = text.to_lowercase();
        let first = text.split(|c: char| !c.is_ascii_alphanumeric()).next();
        first.is_some_and(|word| VENDORS.contains(&word))
    };
    let by_table = ["sys_vendor", "board_vendor"].into_iter().find_map(|field| {
        let text = root.text(&format!("{DMI}/{field}")).ok().filter(|text| is_vendor(text))?;
        Some(format!("{DMI}/{field}: {text}"))
    });
    by_table.or_else(|| {
        let boards = root.text(&format!("{TREE}/compatible")).ok()?;
        let board =
            boards.split('\0').find(|kind| BOARD_PREFIXES.iter().any(|prefix| kind.starts_with(prefix)))?;
        Some(format!("{TREE}/compatible: {board}"))
    })
}

/// Whether it is one of EC2's physical machines, whose names contain `metal`.
fn is_metal(root: &Root) -> bool {
    let name = root.text(&format!("{DMI}/product_name")).unwrap_or_default();
    name.ends_with(".metal") || name.contains(".metal-")
}

/// The BIOS characteristics bit that marks a virtual machine.
fn by_bios_bit(root: &Root) -> Option<String> {
    let table = root.bytes(BIOS, 256).ok()?;
    // In the short tables of old firmware, text follows there.
    let is_long = matches!(table.as_slice(), [0, length, ..] if *length > 0x13);
    let is_set = is_long && table.get(0x13).is_some_and(|bits| bits & 1 << 4 != 0);
    is_set.then(|| format!("{BIOS}: it describes a virtual machine"))
}

fn by_firmware(root: &Root) -> Option<String> {
    let fields = ["sys_vendor", "product_name", "board_vendor", "board_name", "bios_vendor"];
    let text = |field: &str| root.text(&format!("{DMI}/{field}")).unwrap_or_default();
    if is_metal(root) {
        return None;
    }
    fields.into_iter().find_map(|field| {
        let value = text(field);
        // A match starts at the start of a word.
        let lower = format!(" {}", value.to_lowercase());
        FIRMWARE
            .iter()
            .any(|word| lower.contains(&format!(" {word}")))
            .then(|| format!("{DMI}/{field}: {value}"))
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
    // A device that only QEMU's virtual boards have.
    let nodes = root.list(TREE).unwrap_or_default();
    nodes.into_iter().find(|node| node.starts_with("fw-cfg@")).map(|node| format!("{TREE}/{node}"))
}

fn by_xen(root: &Root) -> Option<String> {
    let kind = root.text("/sys/hypervisor/type").ok().filter(|kind| !kind.is_empty())?;
    Some(format!("/sys/hypervisor/type: {kind}"))
}
