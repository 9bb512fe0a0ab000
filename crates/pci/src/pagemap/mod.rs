//! The last resort, without an IOMMU: the device gets physical addresses of pages from `/proc/self/pagemap`.
//!
//! Nothing confines the device to the memory it was given. Pages are pinned by registering them with an io_uring, which
//! the guardian process also holds open: if this process is killed, they stay pinned until the guardian has disabled
//! the device's bus mastering and reset it.

mod pin;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use onehop_os::{BusRange, ControllerBackend, DmaMemory, FunctionReset, HostMem, Mapped, Mapper};
use onehop_proto::BusAddr;

use crate::bars::{Bars, Sysfs};
use crate::claim::{Claim, NewDriver};
use crate::pages::{PAGE, PageSpan, trim};
use crate::places::ProcessMaps;
use crate::{Address, DeviceKind, Error, Result, Root, iommu};
use pin::{Pinned, Pins};

/// A page map entry: the page frame number, and whether the page is present.
const NUMBER: u64 = (1 << 55) - 1;
const PRESENT: u64 = 1 << 63;
/// No CPU that Linux supports has larger physical addresses.
const ADDRESSES: u64 = 1 << 56;

/// Opens a device of this machine.
pub(crate) fn open(root: &Root, address: Address) -> Result<ControllerBackend> {
    refuse_translation(root, address)?;
    let pins = Pins::new()?;
    let claim =
        Arc::new(Claim::take(root, DeviceKind::Drive, address, NewDriver::NoDriver, &[pins.as_fd()])?);
    let name = address.to_string();
    let bars = Bars::of(Arc::new(Sysfs::of(root, address, Some(claim.clone()))?), &name)?;
    let reset = SysfsReset::of(root, address, claim.clone());
    let mapper = PageMapper::new(root, &name, pins, claim)?;
    let reset = reset.map(|reset| Arc::new(reset) as Arc<dyn FunctionReset>);
    Ok(ControllerBackend { regs: Arc::new(bars), mapper: Arc::new(mapper), reset, name, simulated: false })
}

/// Where an IOMMU translates, physical addresses are meaningless to the device.
fn refuse_translation(root: &Root, address: Address) -> Result<()> {
    match iommu::group_type(root, address).as_deref() {
        None | Some("identity") => Ok(()),
        Some(kind) => Err(Error::Refused {
            what: format!("driving {address} by the page map"),
            why: format!("the IOMMU translates its addresses (its group is of type {kind:?})"),
            fix: "Use VFIO or the module onehop, which is also safer (`?via=vfio`, `?via=kmod`)".into(),
        }),
    }
}

/// A mapper that returns physical addresses.
struct PageMapper {
    name: String,
    pagemap: File,
    root: Root,
    pins: Arc<Pins>,
    claim: Arc<Claim>,
}

impl PageMapper {
    fn new(root: &Root, name: &str, pins: Pins, claim: Arc<Claim>) -> Result<Self> {
        let path = "/proc/self/pagemap";
        let pagemap = File::open(path).map_err(|e| Error::io(path, &e))?;
        let folder = root.folder().unwrap_or(std::path::Path::new("/"));
        let name = format!("the page map, for {name}");
        Ok(Self { name, pagemap, root: Root::below(folder), pins: Arc::new(pins), claim })
    }

    fn cannot(&self, why: impl Into<String>) -> onehop_os::Error {
        onehop_os::Error::CannotMap { mapper: self.name.clone(), why: why.into() }
    }

    /// The physical addresses of pages from `start` on, neighbours joined.
    fn pages(&self, start: usize, count: usize) -> onehop_os::Result<Vec<BusRange>> {
        let failed = |e: std::io::Error| self.cannot(format!("reading /proc/self/pagemap: {e}"));
        let mut entries = vec![0; count * 8];
        self.pagemap.read_exact_at(&mut entries, (start / PAGE * 8) as u64).map_err(failed)?;
        runs(&entries).map_err(|why| self.cannot(why))
    }
}

/// The physical addresses in entries of the page map, neighbours joined.
pub(crate) fn runs(entries: &[u8]) -> std::result::Result<Vec<BusRange>, &'static str> {
    let mut runs = Vec::new();
    for entry in entries.chunks_exact(8) {
        let entry = entry.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
        if entry & PRESENT == 0 {
            return Err("a pinned page of it is not in memory");
        }
        if entry & NUMBER == 0 {
            return Err("the kernel shows page numbers to root only");
        }
        let addr = (entry & NUMBER).checked_mul(PAGE as u64).filter(|&addr| addr < ADDRESSES);
        join(&mut runs, addr.ok_or("the kernel reports a page beyond any physical address")?, PAGE as u64);
    }
    Ok(runs)
}

/// Appends a range, merged with the last one if adjacent.
fn join(runs: &mut Vec<BusRange>, addr: u64, len: u64) {
    match runs.last_mut() {
        Some(last) if last.addr.0 + last.len == addr => last.len += len,
        _ => runs.push(BusRange { addr: BusAddr(addr), len }),
    }
}

/// Keeps pages pinned and memory mapped. The claim is released last.
struct PinnedMapping {
    _pinned: Option<Pinned>,
    _memory: HostMem,
    _claim: Arc<Claim>,
}

impl Mapper for PageMapper {
    fn name(&self) -> &str {
        &self.name
    }

    fn alloc(&self, bytes: usize) -> onehop_os::Result<HostMem> {
        HostMem::touched(bytes)
    }

    fn map(&self, memory: &dyn DmaMemory) -> onehop_os::Result<Mapped> {
        let host = memory.host().ok_or_else(|| {
            self.cannot(
                "it is memory of a GPU that this process has not mapped; use our kernel module (`?via=kmod`)",
            )
        })?;
        if host.is_empty() {
            return Err(self.cannot("it has no bytes"));
        }
        let PageSpan { start, len, skip } = PageSpan::of(host);
        // A BAR has no pages to pin; its addresses are known and do not change.
        let (pinned, mut runs) = match ProcessMaps::read()?.device_memory(&self.root, start, len) {
            Some(place) => {
                let place = place.map_err(|why| self.cannot(why))?;
                (None, vec![BusRange { addr: BusAddr(place.bus), len: len as u64 }])
            }
            None => {
                let pinned = self.pins.pin(start, len).map_err(|why| self.cannot(why))?;
                (Some(pinned), self.pages(start, len / PAGE)?)
            }
        };
        trim(&mut runs, skip as u64, host.len() as u64);
        let hold = PinnedMapping { _pinned: pinned, _memory: host.clone(), _claim: self.claim.clone() };
        Ok(Mapped::new(runs, Box::new(hold)))
    }
}

/// Function reset through sysfs, which restores the config space.
struct SysfsReset {
    path: std::path::PathBuf,
    _claim: Arc<Claim>,
}

impl SysfsReset {
    fn of(root: &Root, address: Address, claim: Arc<Claim>) -> Option<Self> {
        let path = format!("/sys/bus/pci/devices/{address}/reset");
        let at = root.folder()?.join(path.trim_start_matches('/'));
        root.exists(&path).then_some(Self { path: at, _claim: claim })
    }
}

impl FunctionReset for SysfsReset {
    fn function_reset(&self) -> onehop_os::Result<()> {
        std::fs::write(&self.path, "1").map_err(|source| onehop_os::Error::System {
            call: format!("writing 1 into {}", self.path.display()),
            source,
            hint: "; `onehop drive recover` removes the device from the bus and rescans",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_joined_and_ends_are_taken_off() {
        let mut runs = Vec::new();
        for page in [5, 6, 9, 10, 11, 4] {
            join(&mut runs, page * 4096, 4096);
        }
        assert_eq!(runs.len(), 3);
        trim(&mut runs, 100, 4096 * 5);
        let want = [(5 * 4096 + 100, 2 * 4096 - 100), (9 * 4096, 3 * 4096), (4 * 4096, 100)];
        let shown: Vec<_> = runs.iter().map(|run| (run.addr.0, run.len)).collect();
        assert_eq!(shown, want);
        trim(&mut runs, 0, 7);
        assert_eq!(runs.len(), 1);
    }

    #[test]
    fn entries_that_lead_nowhere_are_refused() {
        let entry = |number: u64| (PRESENT | number).to_le_bytes();
        assert_eq!(runs(&entry(5)).unwrap()[0].addr, BusAddr(5 * PAGE as u64));
        for (bad, why) in
            [(5_u64.to_le_bytes(), "not in memory"), (entry(0), "root only"), (entry(NUMBER), "beyond")]
        {
            assert!(runs(&bad).unwrap_err().contains(why), "{why}");
        }
        assert!(runs(&entry(ADDRESSES / PAGE as u64)).is_err());
    }

    #[test]
    fn a_translating_iommu_is_a_refusal() {
        let folder = std::env::temp_dir().join(format!("onehop-pci-pagemap-{}", std::process::id()));
        let device = folder.join("sys/bus/pci/devices/0000:01:00.0");
        let group = folder.join("sys/kernel/iommu_groups/3");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::create_dir_all(&group).unwrap();
        let (root, address) = (Root::below(&folder), "0000:01:00.0".parse().unwrap());
        assert!(refuse_translation(&root, address).is_ok());
        std::os::unix::fs::symlink("../../../../kernel/iommu_groups/3", device.join("iommu_group")).unwrap();
        for (kind, fine) in [("DMA-FQ\n", false), ("identity\n", true), ("DMA\n", false)] {
            std::fs::write(group.join("type"), kind).unwrap();
            assert_eq!(refuse_translation(&root, address).is_ok(), fine, "{kind}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
