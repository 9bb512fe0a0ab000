//! The module's refusals: why, and how to fix it.

use std::io;

use super::info::{Info, Missing, Stopped};
use super::sys;
use crate::{Address, Error, Root};

/// Why the module refused a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The module is not loaded.
    NotLoaded,
    /// The device is unsafe for users other than root, or for anyone under kernel lockdown.
    Unsafe(Missing),
    /// This user may not open the device's file.
    NoPermission,
    /// Another process has the device.
    Busy,
    /// The device was unbound from the module, or has left the bus.
    Gone,
    /// The loaded module has another interface version.
    Version(u32),
    /// The device supports no reset.
    NoReset,
    /// It must be reset before DMA can be enabled.
    ResetNeeded,
    /// Another process holds the device's lock, so it cannot be reset now.
    ResetLater,
    /// Bus mastering was disabled meanwhile.
    Stopped(Stopped),
    /// It does not respond, or has lost its configuration and it cannot be restored.
    Silent,
    /// The request needs all memory to be unmapped.
    Mapped,
    /// An address exceeds the device's mask.
    Mask {
        /// Address bits of the device.
        bits: u32,
        /// Offset of the run in the memory.
        offset: u64,
        /// Its address.
        addr: u64,
    },
    /// A chunk is not contiguous.
    Chunk {
        /// Required chunk size.
        chunk: u64,
        /// Offset of the chunk.
        offset: u64,
        /// Contiguous bytes of it.
        bytes: u64,
    },
    /// The kernel would use a bounce buffer (swiotlb), which nothing would synchronize.
    Bounce {
        /// Offset in the memory.
        offset: u64,
    },
    /// The exporter's list of addresses is shorter than the range.
    Short {
        /// Where it ends.
        offset: u64,
    },
    /// The user's limit of locked memory is exceeded.
    Locked {
        /// Bytes of the mapping.
        bytes: u64,
        /// The limit.
        limit: Option<u64>,
    },
    /// The device has the maximum number of mappings.
    Full,
    /// The memory cannot be pinned, for example because it is read-only for the process.
    NotPinned,
    /// The dma-buf's descriptor is read-only.
    ReadOnly,
    /// The exporter of the dma-buf refuses this device.
    Exporter(String),
    /// Only root may map another device's BAR.
    PeerNotPermitted,
    /// The BAR's driver has given it to the kernel as memory.
    PeerIsMemory,
    /// There is no such BAR, or it is too short.
    NoPeer,
    /// Another error of the system.
    Other(String),
}

impl Refusal {
    /// The reason.
    #[must_use]
    pub fn why(&self) -> String {
        match self {
            Self::NotLoaded => "the kernel module onehop is not loaded".into(),
            Self::Unsafe(missing) => {
                format!("only root may use it, and no one under kernel lockdown: {missing}")
            }
            Self::NoPermission => "this user may not open its file".into(),
            Self::Busy => "another process uses it".into(),
            Self::Gone => "it was unbound from the module, or left the bus".into(),
            Self::Version(found) => {
                format!("the loaded module has interface {found}, and this program needs {}", sys::ABI)
            }
            Self::NoReset => "the device supports no reset".into(),
            Self::ResetNeeded => "it must be reset before its DMA can be enabled".into(),
            Self::ResetLater => "another process holds the device's lock, so it cannot be reset".into(),
            Self::Stopped(stopped) if stopped.is_empty() => "its bus mastering was disabled meanwhile".into(),
            Self::Stopped(stopped) => format!("its bus mastering was disabled: {stopped}"),
            Self::Silent => "it does not respond on the bus, or has lost its configuration".into(),
            Self::Mapped => "memory is mapped for it".into(),
            Self::Mask { bits, offset, addr } => {
                format!(
                    "from byte {offset} on, the memory is at {addr:#x}, beyond the device's {bits}-bit addresses"
                )
            }
            Self::Chunk { chunk, offset, bytes } => {
                format!(
                    "the {chunk} bytes from {offset} on are not contiguous on the bus, only {bytes} of them"
                )
            }
            Self::Bounce { offset } => format!(
                "the kernel would copy the data from byte {offset} on through a bounce buffer (swiotlb)"
            ),
            Self::Short { offset } => format!("its exporter gave addresses for only {offset} bytes"),
            Self::Locked { bytes, limit } => {
                let limit = limit.map_or("any amount".into(), |limit| format!("{} KiB", limit >> 10));
                format!("no memory for {bytes} more bytes: this user may lock {limit}")
            }
            Self::Full => "the device has the maximum number of mappings".into(),
            Self::NotPinned => "the memory cannot be pinned, or is read-only for this process".into(),
            Self::ReadOnly => "the dma-buf was exported read-only".into(),
            Self::Exporter(why) => format!("the driver that exported the memory refuses this device: {why}"),
            Self::PeerNotPermitted => {
                "only root may map another device's BAR, and no one under kernel lockdown".into()
            }
            Self::PeerIsMemory => "the BAR's driver has given it to the kernel as memory".into(),
            Self::NoPeer => "there is no such BAR, or it is too small".into(),
            Self::Other(why) => why.clone(),
        }
    }

    /// How to fix it.
    #[must_use]
    pub fn fix(&self) -> String {
        match self {
            Self::NotLoaded => "Install it (docs/kernel-module.md) and load it: `modprobe onehop`".into(),
            Self::Unsafe(missing) => format!("Run as root (without lockdown), or fix this: {}", missing.fix()),
            Self::NoPermission => "Run as root, or as a member of the file's group (onehop)".into(),
            Self::Busy => "Wait for it to end; dev/dev/onehop-*` shows it".into(),
            Self::Gone => "Start again; `onehop drive list` shows which driver has the device".into(),
            Self::Version(_) => "Install the module and the program of the same release".into(),
            Self::NoReset => "The program that drives it has to confirm that its engines are stopped".into(),
            Self::ResetNeeded | Self::Stopped(_) => "Reset it, and map and start again".into(),
            Self::ResetLater => "Try again".into(),
            Self::Silent => {
                "Remove it from the bus and rescan: `onehop drive recover`. For a device other than a drive, write 1 to `remove` in \
                 its folder in sysfs, then to /sys/bus/pci/rescan"
                    .into()
            }
            Self::Mapped => "Unmap it first".into(),
            Self::Mask { .. } => {
                "Enable the IOMMU with translation (not iommu=pt): it maps the memory at addresses within reach".into()
            }
            Self::Chunk { .. } => {
                "Enable the IOMMU with translation, which makes pages contiguous; without it, use huge pages".into()
            }
            Self::Bounce { .. } => {
                "Boot without swiotlb=force; an untrusted device (Thunderbolt) cannot be driven this way".into()
            }
            Self::Short { .. } => "Report this with the exporter's driver and version".into(),
            Self::Locked { .. } => "Raise the limit (`ulimit -l`), or run as root".into(),
            Self::Full => "Map fewer, larger ranges".into(),
            Self::NotPinned => "Use writable memory of the process".into(),
            Self::ReadOnly => "Export it for writing".into(),
            Self::Exporter(_) => {
                "See `dmesg`. pci_p2pdma forwards between devices below one switch, and on root complexes that the kernel \
                 knows. Otherwise use data in host memory"
                    .into()
            }
            Self::PeerNotPermitted => "Run as root, or use a dma-buf of that memory".into(),
            Self::PeerIsMemory => "Use a dma-buf of that memory".into(),
            Self::NoPeer => "`lspci -v` shows the BARs of a device".into(),
            Self::Other(_) => "See `dmesg`".into(),
        }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}. {}", self.why(), self.fix())
    }
}

/// An error for a refused request.
pub(super) fn error(address: Address, call: &'static str, refusal: Refusal) -> Error {
    Error::Module { call, address, refusal }
}

/// The refusal for a failure to open the device's file.
pub(super) fn open(root: &Root, address: Address, error: &io::Error) -> Refusal {
    match error.raw_os_error() {
        Some(libc::EBUSY) => Refusal::Busy,
        Some(libc::EACCES) => Refusal::NoPermission,
        Some(libc::EPERM) => {
            let missing = root.text(&format!("/sys/bus/pci/devices/{address}/onehop_missing"));
            let missing = missing.map_or(Missing::default(), |text| Missing::parse(&text));
            if missing.is_empty() { Refusal::NoPermission } else { Refusal::Unsafe(missing) }
        }
        Some(libc::ENODEV | libc::ENXIO) => Refusal::Gone,
        _ => Refusal::Other(error.to_string()),
    }
}

/// What is missing now, if anything is.
fn missing_of(info: Option<Info>) -> Option<Missing> {
    info.map(|info| info.missing).filter(|missing| !missing.is_empty())
}

/// The refusal for a failed call that maps nothing.
pub(super) fn command(error: &io::Error, info: impl FnOnce() -> Option<Info>) -> Refusal {
    match error.raw_os_error() {
        Some(libc::EPERM) => match missing_of(info()) {
            Some(missing) => Refusal::Unsafe(missing),
            None => Refusal::Other(error.to_string()),
        },
        Some(libc::ENODEV) => Refusal::Gone,
        Some(libc::EOPNOTSUPP) => Refusal::NoReset,
        Some(libc::EBUSY) => Refusal::ResetNeeded,
        Some(libc::EAGAIN) => Refusal::Stopped(info().map_or(Stopped::default(), |info| info.stopped)),
        Some(libc::EIO) => Refusal::Silent,
        _ => Refusal::Other(error.to_string()),
    }
}

/// The refusal for a failed mapping. `info` is only called if needed.
pub(super) fn map(
    error: &io::Error,
    kind: sys::MemoryKind,
    map: &sys::Map,
    info: impl Fn() -> Option<Info>,
) -> Refusal {
    let offset = map.bad_offset;
    match (error.raw_os_error(), kind) {
        (Some(libc::ERANGE), _) if map.why == sys::WHY_MASK => {
            let bits = info().map_or(64, |info| info.mask_bits);
            Refusal::Mask { bits, offset, addr: map.bad_addr }
        }
        (Some(libc::EMSGSIZE), _) if map.why == sys::WHY_CHUNK => {
            Refusal::Chunk { chunk: map.chunk, offset, bytes: map.bad_len }
        }
        (Some(libc::EIO), _) if map.why == sys::WHY_BOUNCE => Refusal::Bounce { offset },
        (Some(libc::EIO), _) if map.why == sys::WHY_SHORT => Refusal::Short { offset },
        (Some(libc::ENOMEM), _) => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            Refusal::Locked { bytes: map.len, limit }
        }
        (Some(libc::EMFILE), _) => Refusal::Full,
        (Some(libc::ENODEV), _) if info().is_none() => Refusal::Gone,
        (Some(libc::EPERM), kind) => match (missing_of(info()), kind) {
            (Some(missing), _) => Refusal::Unsafe(missing),
            (None, sys::MemoryKind::Peer) => Refusal::PeerNotPermitted,
            (None, sys::MemoryKind::DmaBuf) => Refusal::Exporter(error.to_string()),
            (None, sys::MemoryKind::User) => Refusal::Other(error.to_string()),
        },
        (Some(libc::EFAULT), sys::MemoryKind::User) => Refusal::NotPinned,
        (Some(libc::EACCES), sys::MemoryKind::DmaBuf) => Refusal::ReadOnly,
        (_, sys::MemoryKind::DmaBuf) => Refusal::Exporter(error.to_string()),
        (Some(libc::EBUSY), sys::MemoryKind::Peer) => Refusal::PeerIsMemory,
        (Some(libc::EINVAL | libc::ENODEV), sys::MemoryKind::Peer) => Refusal::NoPeer,
        _ => Refusal::Other(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(missing: u32) -> Info {
        Info { mask_bits: 28, missing: Missing::of(missing), ..sys::RawInfo::default().into() }
    }

    fn refusal_of(errno: i32, kind: sys::MemoryKind, why: u32) -> Refusal {
        refusal_with(&info(0), errno, kind, why)
    }

    fn refusal_with(info: &Info, errno: i32, kind: sys::MemoryKind, why: u32) -> Refusal {
        let error = io::Error::from_raw_os_error(errno);
        let call = sys::Map {
            why,
            chunk: 65536,
            len: 8192,
            bad_offset: 4096,
            bad_addr: 0xf_0000_0000,
            bad_len: 100,
            ..sys::Map::default()
        };
        map(&error, kind, &call, || Some(info.clone()))
    }

    #[test]
    fn each_answer_of_the_module_has_its_meaning() {
        use sys::MemoryKind::{DmaBuf, Peer, User};
        assert_eq!(
            refusal_of(libc::ERANGE, User, sys::WHY_MASK),
            Refusal::Mask { bits: 28, offset: 4096, addr: 0xf_0000_0000 }
        );
        assert_eq!(
            refusal_of(libc::EMSGSIZE, DmaBuf, sys::WHY_CHUNK),
            Refusal::Chunk { chunk: 65536, offset: 4096, bytes: 100 }
        );
        assert_eq!(refusal_of(libc::EIO, User, sys::WHY_BOUNCE), Refusal::Bounce { offset: 4096 });
        assert_eq!(refusal_of(libc::EIO, DmaBuf, sys::WHY_SHORT), Refusal::Short { offset: 4096 });
        assert_eq!(refusal_of(libc::EPERM, Peer, 0), Refusal::PeerNotPermitted);
        assert_eq!(refusal_of(libc::EACCES, DmaBuf, 0), Refusal::ReadOnly);
        assert_eq!(refusal_of(libc::EFAULT, User, 0), Refusal::NotPinned);
        assert!(matches!(refusal_of(libc::EINVAL, DmaBuf, 0), Refusal::Exporter(_)));
        assert!(matches!(refusal_of(libc::EINVAL, User, 0), Refusal::Other(_)));
        assert!(matches!(refusal_of(libc::ENOMEM, User, 0), Refusal::Locked { bytes: 8192, .. }));
    }

    #[test]
    fn a_session_that_must_end_reports_what_is_missing() {
        let shares = info(4);
        for kind in [sys::MemoryKind::User, sys::MemoryKind::DmaBuf, sys::MemoryKind::Peer] {
            assert_eq!(refusal_with(&shares, libc::EPERM, kind, 0), Refusal::Unsafe(Missing::of(4)));
        }
        let refusal = command(&io::Error::from_raw_os_error(libc::EPERM), || Some(shares));
        assert_eq!(refusal, Refusal::Unsafe(Missing::of(4)));
    }

    #[test]
    fn a_refusal_comes_with_a_fix() {
        let folder = std::env::temp_dir().join(format!("onehop-pci-missing-{}", std::process::id()));
        let device = folder.join("sys/bus/pci/devices/0000:01:00.0");
        std::fs::create_dir_all(&device).unwrap();
        let (root, address) = (Root::below(&folder), "0000:01:00.0".parse().unwrap());
        let refusal_of = |errno| open(&root, address, &io::Error::from_raw_os_error(errno));
        std::fs::write(device.join("onehop_missing"), "strict alone\n").unwrap();
        let refusal = refusal_of(libc::EPERM);
        assert_eq!(refusal, Refusal::Unsafe(Missing::of(6)));
        assert!(refusal.to_string().contains("iommu.strict=1"), "{refusal}");
        std::fs::write(device.join("onehop_missing"), "nothing\n").unwrap();
        assert_eq!(refusal_of(libc::EPERM), Refusal::NoPermission);
        assert_eq!(refusal_of(libc::EBUSY), Refusal::Busy);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
