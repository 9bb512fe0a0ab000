//! RDMA devices and SDR boards.

use onehop_pci::{Address, Root, Tree};

/// Vendor and device IDs of the uSDR family.
const SDR_VENDOR: u16 = 0x10ee;
const SDR_BOARDS: [u16; 9] = [0x7031, 0x7032, 0x7044, 0x7045, 0x7046, 0x7049, 0x7071, 0x9034, 0x9044];

/// An RDMA device.
#[derive(Clone, Debug)]
pub struct Nic {
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// Its address; `None` for a software device.
    pub address: Option<Address>,
    /// Its first port: state, link layer, rate.
    pub port: Option<String>,
}

impl Nic {
    pub(super) fn all(root: &Root, tree: &Tree) -> Vec<Self> {
        let names = root.list("/sys/class/infiniband").unwrap_or_default();
        let one = |name: String| {
            let at = format!("/sys/class/infiniband/{name}");
            let address = root.link_name(&format!("{at}/device")).and_then(|last| last.parse().ok());
            let port = |file: &str| root.text(&format!("{at}/ports/1/{file}")).ok();
            let words = [port("state"), port("link_layer"), port("rate")];
            let port = words.into_iter().flatten().collect::<Vec<_>>().join(", ");
            Self {
                address: address.filter(|address| tree.get(*address).is_some()),
                port: (!port.is_empty()).then_some(port),
                name,
            }
        };
        names.into_iter().map(one).collect()
    }
}

/// An SDR board of the uSDR family.
#[derive(Clone, Copy, Debug)]
pub struct SdrFacts {
    /// Its address.
    pub address: Address,
}

impl SdrFacts {
    pub(super) fn all(tree: &Tree) -> Vec<Self> {
        let boards =
            tree.devices.values().filter(|d| d.vendor == SDR_VENDOR && SDR_BOARDS.contains(&d.device));
        boards.map(|device| Self { address: device.address }).collect()
    }
}
