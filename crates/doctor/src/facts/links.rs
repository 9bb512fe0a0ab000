//! Links whose reported speed is not a limit.

use onehop_pci::{Address, Device, Link};

use super::Facts;

/// Boards whose GPU and CPU are connected by NVLink-C2C.
const C2C_BOARDS: [&str; 3] = ["GH200", "GB200", "GB300"];

impl Facts {
    /// Whether a GPU is connected to its CPU by NVLink-C2C.
    #[must_use]
    pub fn is_c2c(&self, address: Address) -> bool {
        let gpu = self.gpus.iter().find(|gpu| gpu.address == address);
        gpu.is_some_and(|gpu| C2C_BOARDS.iter().any(|name| gpu.name.contains(name)))
    }

    /// Why the reported speed of a device's link is not a limit, and the source; `None` if it is one.
    #[must_use]
    pub fn why_link_sets_no_limit(&self, device: &Device) -> Option<(&'static str, &'static str)> {
        if device.behind_cable {
            let why = "behind a cable (Thunderbolt, USB4), whose ports report Gen1 x4 at any speed";
            return Some((why, "removable"));
        }
        let c2c = "connected to its CPU by NVLink-C2C, whose rate its PCIe link does not show";
        self.is_c2c(device.address).then_some((c2c, "the GPU's name"))
    }

    /// A device's link; for a virtual function that of the physical function.
    #[must_use]
    pub fn link(&self, device: &Device) -> Link {
        let owner = device.physical_function.and_then(|address| self.device(address));
        owner.unwrap_or(device).best_link()
    }
}
