//! NVMe drives: limits and users.

use onehop_pci::{Address, NVME_CLASS, Root, Tree, Usage};
use serde::{Deserialize, Serialize};

use super::number;

/// An NVMe drive.
#[derive(Clone, Debug, Default)]
pub struct DriveFacts {
    /// Its address; `None` for a controller that is not on the PCI bus.
    pub address: Option<Address>,
    /// The kernel's name, such as `nvme0`.
    pub name: Option<String>,
    /// Its model.
    pub model: Option<String>,
    /// Its firmware.
    pub firmware: Option<String>,
    /// The kernel's state, such as `live`.
    pub state: Option<String>,
    /// Entries of the kernel's queues: its own limit, or the drive's MQES if that is lower.
    pub queue_entries: Option<u32>,
    /// Number of the kernel's queues.
    pub queues: Option<u32>,
    /// CMBLOC and CMBSZ, if the drive has a controller memory buffer.
    pub cmb: Option<(u32, u32)>,
    /// Whether the kernel provides a host memory buffer.
    pub hmb: Option<bool>,
    /// Its Identify data, if this user may read it.
    pub identity: Option<Result<IdentifyFacts, String>>,
    /// Its namespaces.
    pub namespaces: Vec<NamespaceFacts>,
    /// Its users, if any; or why they cannot be determined.
    pub users: Option<Result<String, String>>,
}

/// A namespace as a block device of the kernel.
#[derive(Clone, Debug, Default)]
pub struct NamespaceFacts {
    /// Its name, such as `nvme0n1`.
    pub name: String,
    /// Block size in bytes.
    pub block: Option<u32>,
    /// The kernel's limit for one transfer, in KiB.
    pub transfer_kib: Option<u32>,
}

/// Identify data of a controller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IdentifyFacts {
    /// Maximum transfer size (MDTS), as a power of two of pages; 0 for no limit.
    pub mdts: u8,
    /// Support of scatter-gather lists (SGLS).
    pub sgls: u32,
    /// Preferred size of the host memory buffer, in pages (HMPRE).
    pub hmpre: u32,
    /// Whether it has a volatile write cache.
    pub vwc: bool,
}

impl DriveFacts {
    pub(super) fn all(root: &Root, tree: &Tree) -> Vec<Self> {
        let controllers = tree.devices.values().filter(|device| device.class.kind() == NVME_CLASS);
        controllers.map(|device| Self::one(root, device.address)).collect()
    }

    fn one(root: &Root, address: Address) -> Self {
        let folder = format!("/sys/bus/pci/devices/{address}/nvme");
        let usage = Usage::of(root, address);
        let users = match &usage {
            Err(error) => Some(Err(error.to_string())),
            Ok(usage) => {
                let unknown = || (!usage.undetermined.is_empty()).then(|| Err(usage.undetermined.join("; ")));
                usage.users().map(Ok).or_else(unknown)
            }
        };
        let names = root.list(&folder).unwrap_or_default();
        let Some(name) = names.into_iter().find(|name| is_controller(name)) else {
            return Self { address: Some(address), users, ..Self::default() };
        };
        let at = format!("{folder}/{name}");
        let text = |file: &str| root.text(&format!("{at}/{file}")).ok().filter(|text| !text.is_empty());
        let known = usage.map(|usage| usage.namespaces).unwrap_or_default();
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
            namespaces: known.into_iter().map(|ns| namespace(root, ns.name)).collect(),
            users,
            name: Some(name),
        }
    }

    /// Its known or possible users. Fixes that would disrupt them are withheld.
    #[must_use]
    pub fn may_be_in_use(&self) -> Option<String> {
        match self.users.as_ref()? {
            Ok(users) => Some(users.clone()),
            Err(why) => Some(format!("cannot determine who uses it: {why}")),
        }
    }

    /// Its name for display.
    #[must_use]
    pub fn title(&self) -> String {
        // 40 is the size of the Identify field; a file may contain anything.
        let model = self.model.as_ref().map(|model| model.chars().take(40).collect());
        model.unwrap_or_else(|| "NVMe drive".into())
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

/// Sends Identify, which only root may do.
fn identity(root: &Root, name: &str) -> Option<Result<IdentifyFacts, String>> {
    root.answer(&format!("identify:{name}"), || {
        let bytes = onehop_os::nvme::identify(&format!("/dev/{name}")).map_err(|error| error.to_string())?;
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Ok(IdentifyFacts { mdts: bytes[77], sgls: word(536), hmpre: word(272), vwc: bytes[525] & 1 != 0 })
    })
}

fn namespace(root: &Root, name: String) -> NamespaceFacts {
    let at = format!("/sys/class/block/{name}/queue");
    NamespaceFacts {
        block: number(root, &format!("{at}/logical_block_size")),
        transfer_kib: number(root, &format!("{at}/max_hw_sectors_kb")),
        name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cmb_registers_and_controller_names_are_parsed() {
        assert_eq!(cmb("cmbloc : 0x00000062\ncmbsz  : 0x0001021d\n"), Some((0x62, 0x1021d)));
        assert_eq!((cmb(""), cmb("cmbloc : 0x0\ncmbsz : 0x0\n"), cmb("cmbloc : x")), (None, None, None));
        assert!(is_controller("nvme12") && !is_controller("nvme") && !is_controller("nvme0n1"));
    }
}
