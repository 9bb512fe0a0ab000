//! NVMe drives: limits, and who uses them.

use onehop_pci::{Address, Root, Tree};
use serde::{Deserialize, Serialize};

use super::number;

/// The PCI class of NVMe controllers.
const NVME: u16 = 0x0108;

/// An NVMe drive.
#[derive(Clone, Debug, Default)]
pub struct Drive {
    /// Where it is; none for a controller that is not of this bus.
    pub address: Option<Address>,
    /// The kernel's name for it: `nvme0`.
    pub name: Option<String>,
    /// Its model.
    pub model: Option<String>,
    /// Its firmware.
    pub firmware: Option<String>,
    /// Its state, by the kernel: `live`.
    pub state: Option<String>,
    /// Entries of a queue, as the kernel uses them: its own bound, or the drive's MQES if that is lower.
    pub queue_entries: Option<u32>,
    /// Queues that the kernel has.
    pub queues: Option<u32>,
    /// CMBLOC and CMBSZ, where the drive has memory of its own for queues.
    pub cmb: Option<(u32, u32)>,
    /// Whether the kernel lends it host memory.
    pub hmb: Option<bool>,
    /// What it said when it was asked, where this user may.
    pub identity: Option<Result<Identity, String>>,
    /// Its namespaces.
    pub namespaces: Vec<Namespace>,
}

/// A namespace, as the kernel offers it.
#[derive(Clone, Debug, Default)]
pub struct Namespace {
    /// `nvme0n1`.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// Bytes of a block.
    pub block: Option<u32>,
    /// Most KiB of a transfer, as the kernel has it.
    pub transfer_kib: Option<u32>,
    /// Where it, or a part of it, is mounted.
    pub mounted: Vec<String>,
    /// Devices built on it.
    pub held_by: Vec<String>,
    /// Whether it is swapped to.
    pub swap: bool,
}

/// What a controller says of itself (Identify).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// The longest transfer, as a power of two of pages; 0 for no limit.
    pub mdts: u8,
    /// Whether it takes scatter-gather lists.
    pub sgls: u32,
    /// Pages of host memory that it would like to borrow.
    pub hmpre: u32,
    /// Whether it has a volatile cache.
    pub vwc: bool,
}

impl Drive {
    pub(super) fn all(root: &Root, tree: &Tree) -> Vec<Self> {
        let used = Used::read(root);
        let controllers = tree.devices.values().filter(|device| device.class.kind() == NVME);
        controllers.map(|device| Self::one(root, device.address, &used)).collect()
    }

    fn one(root: &Root, address: Address, used: &Used) -> Self {
        let folder = format!("/sys/bus/pci/devices/{address}/nvme");
        let Some(name) =
            root.list(&folder).ok().and_then(|names| names.into_iter().find(|n| is_controller(n)))
        else {
            return Self { address: Some(address), ..Self::default() };
        };
        let at = format!("{folder}/{name}");
        let text = |file: &str| root.text(&format!("{at}/{file}")).ok().filter(|text| !text.is_empty());
        let entries = root.list(&at).unwrap_or_default();
        Self {
            address: Some(address),
            model: text("model"),
            firmware: text("firmware_rev"),
            state: text("state"),
            queue_entries: number::<u32>(root, &format!("{at}/sqsize")).map(|last| last.saturating_add(1)),
            queues: number(root, &format!("{at}/queue_count")),
            cmb: text("cmb").and_then(|text| cmb(&text)),
            hmb: text("hmb").map(|word| word == "1"),
            identity: identity(root, &name),
            namespaces: entries.iter().filter_map(|entry| namespace(root, entry, used)).collect(),
            name: Some(name),
        }
    }

    /// What keeps it from being taken away from the kernel; empty if nothing does.
    #[must_use]
    pub fn users(&self) -> Vec<String> {
        let mut users = Vec::new();
        for ns in &self.namespaces {
            users.extend(ns.mounted.iter().map(|place| format!("{} is mounted on {place}", ns.name)));
            users.extend(ns.held_by.iter().map(|holder| format!("{} is held by {holder}", ns.name)));
            users.extend(ns.swap.then(|| format!("{} is used for swap", ns.name)));
        }
        users
    }

    /// What people call it.
    #[must_use]
    pub fn title(&self) -> String {
        self.model.clone().unwrap_or_else(|| "NVMe drive".into())
    }
}

fn is_controller(name: &str) -> bool {
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    name.strip_prefix("nvme").is_some_and(digits)
}

/// `cmbloc : 0x00000062`, `cmbsz  : 0x0001021d`
fn cmb(text: &str) -> Option<(u32, u32)> {
    let value = |name: &str| {
        let line = text.lines().find(|line| line.trim_start().starts_with(name))?;
        u32::from_str_radix(line.rsplit_once("0x")?.1.trim(), 16).ok()
    };
    Some((value("cmbloc")?, value("cmbsz")?)).filter(|(_, size)| *size != 0)
}

/// Asks the controller, which is root's to do.
fn identity(root: &Root, name: &str) -> Option<Result<Identity, String>> {
    root.answer(&format!("identify:{name}"), || {
        let bytes = onehop_os::nvme::identify(&format!("/dev/{name}")).map_err(|error| error.to_string())?;
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Ok(Identity { mdts: bytes[77], sgls: word(536), hmpre: word(272), vwc: bytes[525] & 1 != 0 })
    })
}

/// A namespace among the entries of a controller. With multipath the entry is `nvme0c0n1`, the device `nvme0n1`.
fn namespace(root: &Root, entry: &str, used: &Used) -> Option<Namespace> {
    let (controller, number_of) = entry.strip_prefix("nvme")?.split_once('n')?;
    let subsystem = controller.split('c').next()?;
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !digits(subsystem) || !digits(number_of) {
        return None;
    }
    let name = format!("nvme{subsystem}n{number_of}");
    let at = format!("/sys/class/block/{name}");
    let size: u64 = number(root, &format!("{at}/size")).unwrap_or(0);
    let mut found = Namespace {
        bytes: size.saturating_mul(512),
        block: number(root, &format!("{at}/queue/logical_block_size")),
        transfer_kib: number(root, &format!("{at}/queue/max_hw_sectors_kb")),
        name: name.clone(),
        ..Namespace::default()
    };
    let inside = root.list(&at).unwrap_or_default();
    let parts = inside.iter().filter(|part| part.starts_with(&format!("{name}p")));
    for part in std::iter::once(at.clone()).chain(parts.map(|part| format!("{at}/{part}"))) {
        let own = part.rsplit('/').next().unwrap_or_default();
        let device = root.text(&format!("{part}/dev")).unwrap_or_default();
        found.mounted.extend(used.mounts_of(own, &device));
        found.held_by.extend(root.list(&format!("{part}/holders")).unwrap_or_default());
        found.swap |= used.swaps.contains(&format!("/dev/{own}"));
    }
    Some(found)
}

/// What the kernel says is mounted and swapped to.
struct Used {
    /// Device number, source, mount point.
    mounts: Vec<(String, String, String)>,
    swaps: Vec<String>,
}

impl Used {
    fn read(root: &Root) -> Self {
        let mounts = root.text("/proc/self/mountinfo").unwrap_or_default();
        let swaps = root.text("/proc/swaps").unwrap_or_default();
        Self {
            mounts: mounts.lines().filter_map(mount).collect(),
            swaps: swaps
                .lines()
                .filter_map(|line| line.split_whitespace().next())
                .map(str::to_owned)
                .collect(),
        }
    }

    fn mounts_of<'a>(&'a self, name: &str, device: &'a str) -> impl Iterator<Item = String> + 'a {
        // File systems on several devices (btrfs) have a device number of their own: the source tells.
        let source = format!("/dev/{name}");
        self.mounts.iter().filter(move |m| m.0 == device || m.1 == source).map(|m| m.2.clone())
    }
}

/// A line of mountinfo: `ID PARENT MAJOR:MINOR ROOT MOUNTPOINT OPTIONS … - TYPE SOURCE …`.
fn mount(line: &str) -> Option<(String, String, String)> {
    let (front, back) = line.split_once(" - ")?;
    let front: Vec<_> = front.split(' ').collect();
    let source = back.split(' ').nth(1)?;
    Some(((*front.get(2)?).to_owned(), source.to_owned(), (*front.get(4)?).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_read() {
        assert_eq!(cmb("cmbloc : 0x00000062\ncmbsz  : 0x0001021d\n"), Some((0x62, 0x1021d)));
        assert_eq!((cmb(""), cmb("cmbloc : 0x0\ncmbsz : 0x0\n"), cmb("cmbloc : x")), (None, None, None));
        assert!(is_controller("nvme12") && !is_controller("nvme") && !is_controller("nvme0n1"));
        assert_eq!(mount("1 0 259:1 / /data rw - ext4 /dev/x rw").unwrap().2, "/data");
        assert_eq!(mount("nonsense"), None);
    }
}
