//! Boards on the PCI bus, driven through the kernel module. The module maps memory, and disables the board's DMA when
//! this process ends for any reason.

use std::str::FromStr;

use onehop_os::ControllerBackend;
use onehop_pci::{Address, DeviceKind, Root, kmod};
use onehop_radio::{ids, regs};

use crate::session::{stop_rx, stop_tx};
use crate::{Card, Error, Profile, Result};

/// Names a board on the PCI bus: its address and, after a `?`, properties that cannot be read from the board.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct BoardName {
    /// Its address.
    pub address: Address,
    /// Its configured sample rate per second.
    pub rate: Option<f64>,
    /// Whether it is known to send a counter, so that every sample can be checked.
    pub counter: bool,
}

impl FromStr for BoardName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (address, options) = text.split_once('?').unwrap_or((text, ""));
        let mut name = Self { address: address.parse()?, rate: None, counter: false };
        for option in options.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=').unwrap_or((option, "")) {
                ("rate", value) => name.rate = Some(rate(value).ok_or_else(|| bad(option))?),
                ("signal", "counter") => name.counter = true,
                _ => return Err(bad(option)),
            }
        }
        Ok(name)
    }
}

fn bad(option: &str) -> Error {
    let why = format!(
        "'{}' is not an option of a real board. Options are rate=10M (samples per second, 1k to 4G) and signal=counter",
        option.escape_debug()
    );
    Error::NotPossible { what: "opening this board", why }
}

/// Parses samples per second, with a suffix k, M or G.
fn rate(text: &str) -> Option<f64> {
    let units = [('k', 1e3), ('M', 1e6), ('G', 1e9)];
    let unit = units.into_iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)));
    let (digits, unit) = unit.unwrap_or((text, 1.0));
    digits.parse::<f64>().ok().map(|n| n * unit).filter(|n| (1e3..=4e9).contains(n))
}

/// Claims a board from its driver, stops its engines, connects its interrupt and enables its DMA. The driver gets the
/// board back when the card and everything created from it are dropped, or when this process ends.
///
/// # Errors
/// When it is not a supported board, is in use, or cannot be opened through the module.
pub fn open(root: &Root, address: Address) -> Result<Card> {
    if !root.exists(&format!("/sys/bus/pci/devices/{address}")) {
        let why = format!("this machine has no PCI device {address}; `onehop topo --all` lists all");
        return Err(Error::NotPossible { what: "opening this board", why });
    }
    let number = |file: &str| read(root, address, file);
    let (id, subsystem) =
        ((number("vendor")?, number("device")?), (number("subsystem_vendor")?, number("subsystem_device")?));
    if !ids::BOARDS.contains(&id) {
        let known = ids::BOARDS.map(|(vendor, device)| format!("{vendor:04x}:{device:04x}")).join(", ");
        let why = format!("{address} is {:04x}:{:04x}; boards with this engine are {known}", id.0, id.1);
        return Err(Error::NotPossible { what: "driving this device", why });
    }
    let simulated = subsystem == ids::SIMULATED;
    let profile = if simulated { Profile::SIMULATED } else { Profile::USDR };
    let module = kmod::Session::take(root, DeviceKind::Board, address)?;
    let info = module.info()?;
    // Behind an IOMMU the kernel chooses addresses within the board's mask. Without one, addresses are fixed, and
    // `RingAddresses::plan` reports buffers that the board cannot address.
    if !info.missing.names().contains(&"translation") {
        module.set_mask(profile.rx.mask_bits.into())?;
    }
    let no_interrupt =
        || Error::NotPossible { what: "driving this board", why: "it has no interrupt".into() };
    let interrupt = module.interrupts(1)?.pop().ok_or_else(no_interrupt)?;
    let port = ControllerBackend {
        regs: module.registers()?,
        mapper: module.mapper(kmod::MapperRules::default()),
        reset: None,
        name: address.to_string(),
        simulated,
    };
    let mut card = Card::new(&port, interrupt, profile);
    (card.module, card.id) = (Some(module.clone()), Some(id));
    start(&card, &module, info.can_reset)?;
    Ok(card)
}

/// Enables the board's DMA, after a reset or after its engines were stopped.
fn start(card: &Card, module: &kmod::Session, can_reset: bool) -> Result<()> {
    if can_reset {
        return Ok(module.restart()?);
    }
    let epoch = module.epoch()?;
    stop_rx(card)?;
    stop_tx(card)?;
    // Addresses of its last user's memory are cleared, too.
    for base in [regs::RX_BASE, regs::TX_BASE] {
        for buffer in 0..onehop_radio::BUFFERS {
            card.write(base + regs::ADDRESSES + buffer, 0);
        }
    }
    card.write(regs::NOTIFY_PAGE, 0);
    Ok(module.start_unreset(epoch)?)
}

/// Reads a number from sysfs.
fn read(root: &Root, address: Address, file: &str) -> Result<u16> {
    let path = format!("/sys/bus/pci/devices/{address}/{file}");
    let text = root.text(&path)?;
    let digits = text.trim().trim_start_matches("0x");
    u16::from_str_radix(digits, 16).map_err(|_| {
        let why = format!("{path} holds '{}', which is not a number", text.trim().escape_debug());
        Error::NotPossible { what: "driving this device", why }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        let name: BoardName = "0c:00.0?rate=2.5M&signal=counter".parse().unwrap();
        assert_eq!(
            (name.address.to_string().as_str(), name.rate, name.counter),
            ("0000:0c:00.0", Some(2.5e6), true)
        );
        let name: BoardName = "0000:0c:00.0".parse().unwrap();
        assert_eq!((name.rate, name.counter), (None, false));
        for bad in ["", "usdr", "0c:00.0?rate=1", "0c:00.0?rate=é", "0c:00.0?signal=tone", "0c:00.0?fast"] {
            assert!(bad.parse::<BoardName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn other_devices_are_not_claimed() {
        let folder = std::env::temp_dir().join(format!("onehop-sdr-ids-{}", std::process::id()));
        let device = folder.join("sys/bus/pci/devices/0000:01:00.0");
        std::fs::create_dir_all(&device).unwrap();
        let (root, address) = (Root::below(&folder), "0000:01:00.0".parse().unwrap());
        let refused = || open(&root, address).map(|_| ()).unwrap_err().to_string();
        let files = ["vendor", "device", "subsystem_vendor", "subsystem_device"];
        for (file, text) in files.into_iter().zip(["0x8086\n", "0x1234\n", "0x0000\n", "0x0000\n"]) {
            std::fs::write(device.join(file), text).unwrap();
        }
        assert!(refused().contains("8086:1234; boards with this engine are 10ee:7031"), "{}", refused());
        std::fs::write(device.join("vendor"), "Xilinx\n").unwrap();
        assert!(refused().contains("not a number"), "{}", refused());
        std::fs::write(device.join("vendor"), "0x10ee\n").unwrap();
        std::fs::write(device.join("device"), "0x7045\n").unwrap();
        // The module, which is missing here, checks the rest.
        assert!(refused().contains("module"), "{}", refused());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
