//! Identifies a map's drive, equally from the kernel's files and from Identify data.

use crate::bytes::uuid_text;

/// Identifies a drive. All fields must match.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveId {
    /// The serial number without padding.
    pub serial: String,
    /// The namespace's number; 0 if it is not an NVMe drive.
    pub nsid: u32,
    /// The namespace's identifier (UUID, NGUID or EUI-64) in Linux's notation; empty if it has none.
    pub wwid: String,
    /// Bytes of a logical block.
    pub lba_bytes: u32,
    /// Bytes of the namespace.
    pub bytes: u64,
}

/// Identify data of an NVMe drive and a namespace.
#[derive(Debug, Clone, Copy)]
pub struct NvmeIds<'a> {
    /// PCI vendor.
    pub vendor: u16,
    /// The serial number field.
    pub serial: &'a [u8],
    /// The model number field.
    pub model: &'a [u8],
    /// The namespace's number.
    pub nsid: u32,
    /// UUID; zeros if none.
    pub uuid: [u8; 16],
    /// NGUID; zeros if none.
    pub nguid: [u8; 16],
    /// EUI-64; zeros if none.
    pub eui64: [u8; 8],
    /// Bytes of a logical block.
    pub lba_bytes: u32,
    /// Number of logical blocks.
    pub blocks: u64,
}

impl DriveId {
    /// The identity that Linux reports for this namespace.
    #[must_use]
    pub fn nvme(ids: &NvmeIds<'_>) -> Self {
        let (serial, model) = (trimmed(ids.serial), trimmed(ids.model));
        let wwid = if ids.uuid != [0; 16] {
            format!("uuid.{}", uuid_text(&ids.uuid))
        } else if ids.nguid != [0; 16] {
            format!("eui.{}", hex(&ids.nguid))
        } else if ids.eui64 != [0; 8] {
            format!("eui.{}", hex(&ids.eui64))
        } else {
            format!("nvme.{:04x}-{}-{}-{:08x}", ids.vendor, hex(serial), hex(model), ids.nsid)
        };
        Self {
            serial: String::from_utf8_lossy(serial).trim().to_owned(),
            nsid: ids.nsid,
            wwid,
            lba_bytes: ids.lba_bytes,
            bytes: ids.blocks.saturating_mul(ids.lba_bytes.into()),
        }
    }
}

/// Removes trailing blanks and zeros.
fn trimmed(field: &[u8]) -> &[u8] {
    let end = field.iter().rposition(|&b| b != b' ' && b != 0).map_or(0, |last| last + 1);
    &field[..end]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_written_as_linux_writes_them() {
        let ids = NvmeIds {
            vendor: 0x1B36,
            serial: b"deadbeef            ",
            model: b"QEMU NVMe Ctrl\0\0  ",
            nsid: 1,
            uuid: [0; 16],
            nguid: [0; 16],
            eui64: [0; 8],
            lba_bytes: 4096,
            blocks: 1000,
        };
        let id = DriveId::nvme(&ids);
        assert_eq!((&id.serial[..], id.nsid, id.bytes), ("deadbeef", 1, 4_096_000));
        assert_eq!(id.wwid, "nvme.1b36-6465616462656566-51454d55204e564d65204374726c-00000001");
        let eui64 = [0, 0x25, 0x38, 1, 2, 3, 4, 5];
        assert_eq!(DriveId::nvme(&NvmeIds { eui64, ..ids }).wwid, "eui.0025380102030405");
        let nguid = std::array::from_fn(|i| i as u8);
        assert_eq!(
            DriveId::nvme(&NvmeIds { eui64, nguid, ..ids }).wwid,
            "eui.000102030405060708090a0b0c0d0e0f"
        );
        let wwid = DriveId::nvme(&NvmeIds { eui64, nguid, uuid: nguid, ..ids }).wwid;
        assert_eq!(wwid, "uuid.00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
