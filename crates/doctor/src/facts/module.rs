//! The kernel module onehop: whether it is loaded, and which devices are bound to it.

use onehop_pci::{Address, Root, Tree};

/// The name of module and driver.
pub(crate) const NAME: &str = "onehop";

/// The kernel module onehop.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// Whether it is loaded.
    pub loaded: bool,
    /// The devices bound to it.
    pub devices: Vec<Bound>,
}

/// A device bound to the module.
#[derive(Clone, Debug)]
pub struct Bound {
    /// Its address.
    pub address: Address,
    /// Whether its device file exists.
    pub file: bool,
    /// What unprivileged access still requires, in the module's words; `None` if not reported.
    pub missing: Option<Vec<String>>,
}

impl Module {
    pub(super) fn read(root: &Root, tree: &Tree) -> Self {
        let one = |address: Address| Bound {
            address,
            file: root.exists(&format!("/dev/onehop-{address}")),
            missing: root.text(&format!("/sys/bus/pci/devices/{address}/onehop_missing")).ok().map(|words| {
                words
                    .split_whitespace()
                    .filter(|word| *word != "nothing")
                    .take(16)
                    .map(str::to_owned)
                    .collect()
            }),
        };
        let ours = tree.devices.values().filter(|device| device.driver.as_deref() == Some(NAME));
        Self {
            loaded: root.exists("/sys/module/onehop"),
            devices: ours.map(|device| one(device.address)).collect(),
        }
    }

    /// The device at this address, if it is bound to the module.
    #[must_use]
    pub fn device(&self, address: Address) -> Option<&Bound> {
        self.devices.iter().find(|bound| bound.address == address)
    }
}
