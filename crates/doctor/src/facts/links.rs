//! Links whose reported speed is meaningless.

use onehop_pci::{Address, Device, Link};

use super::Facts;

/// Boards whose GPU and CPU are connected by NVLink-C2C.
const BY_C2C: [&str; 3] = ["GH200", "GB200", "GB300"];

impl Facts {
    /// Whether a GPU is connected to its CPU by NVLink-C2C.
    #[must_use]
    pub fn by_c2c(&self, address: Address) -> bool {
        let gpu = self.gpus.iter().find(|gpu| gpu.address == address);
        gpu.is_some_and(|gpu| BY_C2C.iter().any(|name| gpu.name.contains(name)))
    }

    /// Why a device's link sets no limit, regardless of its report, and the source.
    #[must_use]
    pub fn link_that_bounds_nothing(&self, device: &Device) -> Option<(&'static str, &'static str)> {
        if device.behind_cable {
            let why = "behind a cable (Thunderbolt, USB4), whose ports report Gen1 x4 at any speed";
            return Some((why, "removable"));
        }
        let c2c = "connected to its CPU by NVLink-C2C, whose rate its PCIe link does not show";
        self.by_c2c(device.address).then_some((c2c, "the GPU's name"))
    }

    /// A device's link; for a virtual function that of the physical function.
    #[must_use]
    pub fn link(&self, device: &Device) -> Link {
        let owner = device.physical_function.and_then(|address| self.device(address));
        owner.unwrap_or(device).best_link()
    }
}
