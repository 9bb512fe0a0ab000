//! QEMU's NVMe model, located and prepared.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use onehop_os::{ControllerBackend, FunctionReset, Mapper, Registers};

use crate::bar::BarWindow;
use crate::link::QemuLink;
use crate::pci::{BUS_MASTER, COMMAND, MEMORY, MemoryBar, PciFunction};
use crate::ram::{FIRST, Ram};
use crate::reset::Flr;
use crate::spec::Spec;
use crate::{Error, Result};

/// Time limit for QEMU's answers. They take microseconds, but disabling a controller waits for the disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// BAR0 of device and function `n` is placed here plus `n` times [`BAR0_ROOM`]: above RAM, below the I/O APIC, without
/// overlap. The room suffices for the most doorbells that a controller can have.
const BAR0_PLACE: u64 = 0xe000_0000;
const BAR0_ROOM: u64 = 1 << 20;

/// Likewise for the controller memory buffer, BAR2: far above all RAM.
const CMB_PLACE: u64 = 0x40_0000_0000;
const CMB_ROOM: u64 = 1 << 31;

/// NVMe's register CC; clearing bit 0 disables the controller, which forgets its queues.
const CONTROLLER_CONFIGURATION: u32 = 0x14;

/// A drive in QEMU, with what its [`ControllerBackend`] does not show.
pub struct QemuDrive {
    port: ControllerBackend,
    cmb: Option<Arc<dyn Registers>>,
    link: Arc<QemuLink>,
}

impl QemuDrive {
    /// Opens the drive whose name, behind `qtest:`, is `SOCKET,MEMORY-FILE[,bdf=DD.F]`.
    ///
    /// # Errors
    /// When QEMU, the memory file or the controller cannot be opened, with a fix.
    pub fn open(spec: &str) -> Result<Self> {
        Self::open_within(spec, ANSWER_TIMEOUT)
    }

    /// As [`QemuDrive::open`], with a time limit for each of QEMU's answers.
    ///
    /// # Errors
    /// As for [`QemuDrive::open`].
    pub fn open_within(spec: &str, answer: Duration) -> Result<Self> {
        let name = format!("qtest:{spec}");
        let spec = Spec::parse(spec)?;
        let ram = Ram::open(&spec.memory, name.clone())?;
        let link = Arc::new(QemuLink::connect(&spec.socket, answer)?);
        let function = choose(&link, spec.devfn)?;
        let reset = Flr::of(&function)?;
        let (regs, cmb) = place(&function)?;
        same_memory(&link, &ram, &spec.memory)?;
        let reset = reset.map(|flr| Arc::new(flr) as Arc<dyn FunctionReset>);
        let mapper: Arc<dyn Mapper> = Arc::new(ram);
        Ok(Self {
            port: ControllerBackend { regs: Arc::new(regs), mapper, reset, name, simulated: true },
            cmb,
            link,
        })
    }

    /// The controller's backend.
    #[must_use]
    pub fn port(&self) -> ControllerBackend {
        self.port.clone()
    }

    /// The CPU's view of the controller memory buffer, if QEMU has one (`cmb_size_mb`).
    #[must_use]
    pub fn cmb(&self) -> Option<Arc<dyn Registers>> {
        self.cmb.clone()
    }

    /// Why registers read as ones: what QEMU did last before the connection failed. `None` while it responds.
    #[must_use]
    pub fn why_gone(&self) -> Option<String> {
        self.link.why_gone()
    }
}

/// Selects the controller.
fn choose(link: &Arc<QemuLink>, devfn: Option<u8>) -> Result<PciFunction> {
    let none = |why: String| Error::Controller { socket: link.socket().into(), why };
    let found = PciFunction::controllers(link)?;
    let names = found.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let wanted = found.iter().find(|f| devfn.is_none_or(|wanted| f.devfn == wanted));
    match (wanted, devfn, found.len()) {
        (_, _, 0) => Err(none("there is no NVMe controller on bus 0; start QEMU with -device nvme,…".into())),
        (_, None, 2..) => {
            Err(none(format!("there are several NVMe controllers; add ,bdf=DD.F with one of {names}")))
        }
        (None, ..) => Err(none(format!("that is not an NVMe controller; add ,bdf=DD.F with one of {names}"))),
        (Some(function), ..) => Ok(function.clone()),
    }
}

/// Checks that the file is this QEMU's RAM, at its start and its end: DMA to another file would be lost. QEMU writes
/// and this process reads, so a wrong file is not modified.
fn same_memory(link: &QemuLink, ram: &Ram, file: &Path) -> Result<()> {
    for at in [FIRST, ram.whole().len() - 4] {
        let mark = onehop_os::cycles() as u32;
        for mark in [mark, !mark] {
            link.write32(at as u64, mark)?;
            // The answer comes after the write has taken effect.
            let kept = link.read32(at as u64)?;
            let seen = ram.whole().word(at)?.load(Ordering::SeqCst);
            if kept != mark || seen != mark {
                let why = format!(
                    "it is not the memory of QEMU at {}, or not all of it (QEMU wrote {mark:#x} at {at:#x}, the file \
                     has {seen:#x}); start QEMU with memory-backend-file,share=on on this file, of its whole size",
                    link.socket().display()
                );
                return Err(Error::Memory { file: file.into(), why });
            }
        }
    }
    Ok(())
}

/// Places BAR0 and the controller memory buffer, disables the controller, and enables bus mastering.
fn place(function: &PciFunction) -> Result<(BarWindow, Option<Arc<dyn Registers>>)> {
    let bad = |why: &str| Error::Controller {
        socket: function.link.socket().into(),
        why: format!("{function} {why}"),
    };
    function.write(COMMAND, 0)?;
    let bar0 = function.bar(0)?.ok_or_else(|| bad("has no BAR0"))?;
    let regs = window(function, bar0, BAR0_PLACE, BAR0_ROOM)?.ok_or_else(|| bad("has a BAR0 above 1 MiB"))?;
    let cmb = match function.bar(2)? {
        None => None,
        Some(bar) => Some(
            window(function, bar, CMB_PLACE, CMB_ROOM)?
                .ok_or_else(|| bad("has a BAR2 that cannot be placed; use a cmb_size_mb of at most 2048"))?,
        ),
    };
    function.write(COMMAND, MEMORY)?;
    // An earlier user may have left it enabled, with queues in memory that is about to be allocated.
    regs.write32(CONTROLLER_CONFIGURATION, 0);
    function.write(COMMAND, MEMORY | BUS_MASTER)?;
    let cmb = cmb.map(|window| Arc::new(window) as Arc<dyn Registers>);
    Ok((regs, cmb))
}

/// Places a BAR; `None` if it does not fit.
fn window(function: &PciFunction, bar: MemoryBar, place: u64, room: u64) -> Result<Option<BarWindow>> {
    let base = place + room * u64::from(function.devfn);
    if bar.size > room || (!bar.wide && base > u64::from(u32::MAX)) {
        return Ok(None);
    }
    function.place(bar, base)?;
    Ok(Some(BarWindow::new(function.link.clone(), base, bar.size as u32)))
}
