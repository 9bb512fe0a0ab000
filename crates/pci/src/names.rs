//! Names of vendors and devices: a small table, and the system's list if it has one.

use crate::root::Root;

/// Paths of the list of PCI names in distributions.
const LISTS: [&str; 3] = ["/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids", "/usr/local/share/pci.ids"];
const MAX_LIST: usize = 8 << 20;

/// Relevant vendors, for systems without a list.
const VENDORS: &[(u16, &str)] = &[
    (0x1000, "Broadcom / LSI"),
    (0x1002, "AMD"),
    (0x1022, "AMD"),
    (0x10b5, "PLX"),
    (0x10de, "NVIDIA"),
    (0x10ec, "Realtek"),
    (0x10ee, "Xilinx"),
    (0x11f8, "Microchip"),
    (0x1234, "QEMU"),
    (0x126f, "Silicon Motion"),
    (0x1344, "Micron"),
    (0x144d, "Samsung"),
    (0x14e4, "Broadcom"),
    (0x15b3, "Mellanox"),
    (0x15b7, "SanDisk"),
    (0x1987, "Phison"),
    (0x1ae0, "Google"),
    (0x1af4, "virtio"),
    (0x1b21, "ASMedia"),
    (0x1b36, "QEMU"),
    (0x1c5c, "SK hynix"),
    (0x1cc1, "ADATA"),
    (0x1d0f, "Amazon"),
    (0x1e0f, "KIOXIA"),
    (0x2646, "Kingston"),
    (0x025e, "Solidigm"),
    (0x8086, "Intel"),
    (0xc0a9, "Crucial"),
];

/// Common devices, and those of test fixtures and documents.
const DEVICES: &[(u16, u16, &str)] = &[
    (0x10de, 0x2204, "GeForce RTX 3090"),
    (0x10de, 0x2684, "GeForce RTX 4090"),
    (0x10de, 0x2b85, "GeForce RTX 5090"),
    (0x10de, 0x2330, "H100 80GB HBM3"),
    (0x10de, 0x2335, "H200 141GB HBM3e"),
    (0x15b7, 0x5009, "WD Blue SN550 / SN530"),
    (0x144d, 0xa80a, "NVMe SSD 980 PRO / PM9A1"),
    (0x144d, 0xa80c, "NVMe SSD 990 PRO"),
    (0x15b3, 0x1021, "ConnectX-7"),
    (0x1b36, 0x0010, "NVMe controller"),
    (0x1af4, 0x1110, "ivshmem"),
];

/// The system's list, if it has one.
pub(crate) struct Names(Option<Vec<u8>>);

impl Names {
    pub(crate) fn load(root: &Root) -> Self {
        Self(LISTS.iter().find_map(|path| root.unrecorded(path, MAX_LIST)))
    }

    /// A vendor's name.
    pub(crate) fn vendor(&self, root: &Root, vendor: u16) -> Option<String> {
        let known = || VENDORS.iter().find(|(id, _)| *id == vendor).map(|(_, name)| (*name).to_owned());
        let listed = || self.listed(vendor, None);
        root.named(&format!("{vendor:04x}"), || known().or_else(listed))
    }

    /// A device's name.
    pub(crate) fn device(&self, root: &Root, vendor: u16, device: u16) -> Option<String> {
        let same = |row: &&(u16, u16, &str)| (row.0, row.1) == (vendor, device);
        let known = || DEVICES.iter().find(same).map(|(.., name)| (*name).to_owned());
        let listed = || self.listed(vendor, Some(device));
        root.named(&format!("{vendor:04x}:{device:04x}"), || known().or_else(listed))
    }

    fn listed(&self, vendor: u16, device: Option<u16>) -> Option<String> {
        let text = std::str::from_utf8(self.0.as_deref()?).ok()?;
        lookup(text, vendor, device)
    }
}

/// In the list, vendors start a line, their devices follow behind a tab, and device classes come last.
fn lookup(text: &str, vendor: u16, device: Option<u16>) -> Option<String> {
    let name = |line: &str, id: u16| {
        let (digits, name) = line.split_once("  ")?;
        (digits == format!("{id:04x}")).then(|| name.trim().to_owned())
    };
    let mut lines = text.lines().skip_while(|line| name(line, vendor).is_none());
    let found = name(lines.next()?, vendor)?;
    let Some(device) = device else { return Some(found) };
    lines
        .take_while(|line| line.starts_with(['\t', '#']) || line.is_empty())
        .find_map(|line| name(line.strip_prefix('\t')?, device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_read() {
        let list = "# names\n10de  NVIDIA Corporation\n\t2204  GA102 [GeForce RTX 3090]\n\t\t10de 147d  Founders\n\
                    # more\n\t2208  GA102\n1022  AMD\n\t1480  Root Complex\nC 01  Mass storage\n";
        assert_eq!(lookup(list, 0x10de, None).as_deref(), Some("NVIDIA Corporation"));
        assert_eq!(lookup(list, 0x10de, Some(0x2208)).as_deref(), Some("GA102"));
        assert_eq!(lookup(list, 0x10de, Some(0x1480)), None);
        assert_eq!(lookup(list, 0xffff, Some(1)), None);
        assert_eq!(lookup("", 0, None), None);
    }
}
