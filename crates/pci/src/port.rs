//! Opens a real controller as a backend.

use std::str::FromStr;

use onehop_os::ControllerBackend;

use crate::{Address, Error, Result, Root, kmod, pagemap, vfio};

/// How a device is given access to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Via {
    /// VFIO: needs an IOMMU, and confines the device to mapped memory.
    Vfio,
    /// VFIO with iommufd, on kernels that have it: no mapped BARs, but dma-bufs of vfio-pci.
    Iommufd,
    /// Our kernel module: with or without an IOMMU, and with GPU memory that its driver exports.
    Module,
    /// Physical addresses: needs root and no IOMMU; the device is not confined.
    PageMap,
}

impl Via {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Vfio, Self::Iommufd, Self::Module, Self::PageMap];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vfio => "vfio",
            Self::Iommufd => "iommufd",
            Self::Module => "kmod",
            Self::PageMap => "pagemap",
        }
    }
}

impl FromStr for Via {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|via| via.name() == text);
        found.ok_or_else(|| Error::garbage("via", text, "method: vfio, iommufd, kmod or pagemap"))
    }
}

/// Names a real drive: `0000:0b:00.0`, or with a method `0000:0b:00.0?via=pagemap`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DriveName {
    /// Its address.
    pub address: Address,
    /// The requested method, if any.
    pub via: Option<Via>,
}

impl FromStr for DriveName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (address, options) = text.split_once('?').unwrap_or((text, ""));
        let mut name = Self { address: address.parse()?, via: None };
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let via = option.strip_prefix("via=").filter(|_| name.via.is_none());
            let via = via.ok_or_else(|| {
                Error::garbage(
                    "the drive's name",
                    option,
                    "option: via=vfio, via=iommufd, via=kmod or via=pagemap, once",
                )
            });
            name.via = Some(via?.parse()?);
        }
        Ok(name)
    }
}

/// Detaches an NVMe controller from the kernel's driver. The driver gets it back when everything made from the backend
/// is dropped, or this process ends in any way.
///
/// The default is VFIO. The page map is used only on request.
///
/// # Errors
/// When the drive is in use, or cannot be driven by this method.
pub fn open(root: &Root, name: DriveName) -> Result<ControllerBackend> {
    crate::nvme::ensure_nvme(root, name.address)?;
    match name.via.unwrap_or(Via::Vfio) {
        Via::Vfio => vfio::open(root, name.address),
        Via::Iommufd => vfio::open_by_iommufd(root, name.address),
        Via::Module => kmod::open(root, name.address),
        Via::PageMap => pagemap::open(root, name.address),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_kind_of_device_is_refused_by_what_it_is() {
        let folder = std::env::temp_dir().join(format!("onehop-pci-kinds-{}", std::process::id()));
        let device = folder.join("sys/bus/pci/devices/0000:0b:00.0");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("class"), "0x020000\n").unwrap();
        for via in ["", "?via=vfio", "?via=iommufd", "?via=kmod", "?via=pagemap"] {
            let name = format!("0000:0b:00.0{via}").parse().unwrap();
            let error = open(&Root::below(&folder), name).err().unwrap().to_string();
            assert!(error.contains("another kind of device") && !error.contains("pagemap"), "{via}: {error}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn names_are_addresses_with_options() {
        let name: DriveName = "0b:00.0?via=pagemap".parse().unwrap();
        assert_eq!((name.address.to_string().as_str(), name.via), ("0000:0b:00.0", Some(Via::PageMap)));
        assert_eq!("0000:0b:00.0".parse::<DriveName>().unwrap().via, None);
        let twice = "0b:00.0?via=vfio&via=pagemap";
        for bad in ["", "0b:00", "0b:00.0?via=", "0b:00.0?via=nothing", "0b:00.0?fast", twice, "sim:mem"] {
            assert!(bad.parse::<DriveName>().is_err(), "{bad}");
        }
    }
}
