//! A real controller behind the seams.

use std::str::FromStr;

use onehop_os::ControllerBackend;

use crate::{Address, Error, Result, Root, kmod, pagemap, vfio};

/// Who lets a device reach memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Via {
    /// VFIO: needs an IOMMU, and keeps the device inside of what it is given.
    Vfio,
    /// VFIO by iommufd, on kernels that have it: no mapped BARs, but dma-bufs of vfio-pci.
    Iommufd,
    /// Our kernel module: with an IOMMU or without, and GPU memory whose driver exports it.
    Module,
    /// Physical addresses: needs root and no IOMMU, and nothing keeps the device anywhere.
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
        found.ok_or_else(|| Error::garbage("via", text, "way: vfio, iommufd, kmod or pagemap"))
    }
}

/// What people call a real drive: `0000:0b:00.0`, or with the way that is to be taken `0000:0b:00.0?via=pagemap`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DriveName {
    /// Where it is.
    pub address: Address,
    /// The way, where one was asked for.
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

/// Takes an NVMe controller from the kernel's driver, which gets it back when everything that came of the port has gone,
/// or this process has ended in whatever way.
///
/// Unless told otherwise it is VFIO: the page map is never chosen, it has to be asked for.
///
/// # Errors
/// When the drive is in use, or cannot be had this way, with the reason.
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
