//! Memory for GPU-driven queues: in VRAM, in host memory, in the controller's own buffer.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use onehop_gpu::{Gpu, Place, Region};
use onehop_os::{BusRange, HostMem, Mapped};
use onehop_proto::BusAddr;
use onehop_proto::regs::{Cmbloc, Cmbmsc, Cmbsts, Cmbsz, Version, offset};

use crate::core::AdminState;
use crate::drive::DriveInner;
use crate::{Error, Result};

/// The bus address of the controller memory buffer: far from any memory.
const CMB_AT: BusAddr = BusAddr(1 << 46);

/// An enabled controller memory buffer, and its allocated ranges.
pub(crate) struct Cmb {
    mem: HostMem,
    size: Cmbsz,
    taken: Arc<Mutex<Vec<Range<usize>>>>,
}

impl Cmb {
    /// Allocates the first free range that is long enough. It is freed when its last clone is dropped.
    fn take(&self, bytes: usize) -> Option<(usize, HostMem)> {
        let mut taken = self.taken.lock().unwrap_or_else(|e| e.into_inner());
        let mut start = 0;
        let mut index = 0;
        for range in taken.iter() {
            if range.start - start >= bytes {
                break;
            }
            start = range.end;
            index += 1;
        }
        let range = start..start.checked_add(bytes)?;
        let mem = self.mem.slice(range.clone()).ok()?;
        taken.insert(index, range);
        let all = self.taken.clone();
        let free = move || all.lock().unwrap_or_else(|e| e.into_inner()).retain(|range| range.start != start);
        Some((start, mem.on_last_drop(free)))
    }
}

/// Ring memory: a region for the GPU, bus addresses for the controller.
pub(crate) struct RingMemory {
    // The mapping is dropped before the memory.
    pub(crate) map: Mapped,
    pub(crate) region: Region,
}

impl RingMemory {
    pub(crate) fn alloc(
        drive: &DriveInner,
        state: &mut AdminState,
        gpu: &dyn Gpu,
        part: &'static str,
        place: Place,
        bytes: usize,
    ) -> Result<Self> {
        if place == Place::Cmb {
            return in_cmb(drive, state, gpu, part, bytes);
        }
        let region = reachable(drive, gpu, part, place, bytes)?;
        let map = drive.control.port.mapper.map(&region)?;
        Ok(Self { region, map })
    }

    pub(crate) fn bus(&self) -> Result<BusAddr> {
        Ok(self.map.contiguous()?)
    }

    pub(crate) fn zero(&self) -> Result<()> {
        // Copied, not filled: a GPU fills its memory by a kernel, which may have to wait for other kernels.
        Ok(self.region.write(0, &vec![0; self.region.len()])?)
    }
}

/// GPU memory for data that the drive can reach.
pub(crate) fn region(drive: &DriveInner, gpu: &dyn Gpu, place: Place, bytes: usize) -> Result<Region> {
    reachable(drive, gpu, "data", place, bytes)
}

/// GPU memory that the drive can reach. Host memory comes from the mapper, which allocates what it can map, and is
/// registered with the GPU. An emulated GPU without memory of its own uses host memory as its own.
fn reachable(
    drive: &DriveInner,
    gpu: &dyn Gpu,
    part: &'static str,
    place: Place,
    bytes: usize,
) -> Result<Region> {
    let mapper = &drive.control.port.mapper;
    if !gpu.own_memory() || place == Place::PinnedHost {
        return Ok(gpu.adopt(place, mapper.alloc(bytes)?)?);
    }
    let region = gpu.alloc(place, bytes)?;
    // Tried here, where the failing part is known: routes are chosen by this error.
    let refuse = |e: onehop_os::Error| Error::Placement { part, place: place.name(), why: e.to_string() };
    mapper.map(&region).map_err(refuse)?;
    Ok(region)
}

fn in_cmb(
    drive: &DriveInner,
    state: &mut AdminState,
    gpu: &dyn Gpu,
    part: &'static str,
    bytes: usize,
) -> Result<RingMemory> {
    let refuse = |why: String| Error::Placement { part, place: "cmb", why };
    if state.cmb.is_none() {
        state.cmb = Some(switch_on(drive).map_err(refuse)?);
    }
    let Some(cmb) = &mut state.cmb else { return Err(refuse("it is off".into())) };
    let allowed = if part == "sq" { cmb.size.sqs() } else { cmb.size.cqs() };
    if !allowed {
        return Err(refuse("the controller does not take this kind of queue there (CMBSZ)".into()));
    }
    let bytes = bytes.next_multiple_of(1 << drive.control.page_shift);
    let (start, mem) = cmb
        .take(bytes)
        .ok_or_else(|| refuse(format!("none of its {} bytes are free for it", cmb.mem.len())))?;
    let run = BusRange { addr: CMB_AT.plus(start as u64), len: bytes as u64 };
    Ok(RingMemory { region: gpu.adopt(Place::Cmb, mem)?, map: Mapped::new(vec![run], Box::new(())) })
}

/// Enables the buffer again after a reset, at the same address and with its content.
pub(crate) fn restore_cmb(drive: &DriveInner) -> Result<()> {
    let refuse = |why| Error::Placement { part: "sq", place: "cmb", why };
    claim(drive).map(|_| ()).map_err(refuse)
}

/// Has the controller decode the buffer at an address of our choice; returns its BAR and its offset there.
fn claim(drive: &DriveInner) -> std::result::Result<(Cmbloc, Cmbsz), String> {
    let regs = &drive.control.port.regs;
    regs.write64(offset::CMBMSC, Cmbmsc(0).with_cre(true).0);
    let (location, size) = (Cmbloc(regs.read32(offset::CMBLOC)), Cmbsz(regs.read32(offset::CMBSZ)));
    regs.write64(offset::CMBMSC, Cmbmsc(0).with_cre(true).with_cmse(true).with_cba(CMB_AT).0);
    if Cmbsts(regs.read32(offset::CMBSTS)).cbai() {
        return Err(format!("the controller refused {CMB_AT} as its address (CMBSTS.CBAI)"));
    }
    Ok((location, size))
}

fn switch_on(drive: &DriveInner) -> std::result::Result<Cmb, String> {
    let control = &drive.control;
    if !control.cap.cmbs() {
        return Err("the controller has no memory buffer (CAP.CMBS)".into());
    }
    if control.version < Version::V1_4 {
        return Err(format!(
            "a controller of NVMe {} fixes its bus address, which is not known here",
            control.version
        ));
    }
    let (location, size) = claim(drive)?;
    let (Some(bytes), Some(unit)) = (size.bytes(), size.unit_bytes()) else {
        return Err(format!("CMBSZ {:#x} has an undefined unit", size.0));
    };
    let at = unit * u64::from(location.ofst());
    let mem = control.port.regs.window(location.bir(), at, bytes).ok_or("its BAR cannot be mapped here")?;
    Ok(Cmb { mem, size, taken: Arc::default() })
}
