//! A device driven through the module by this process, exclusively.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_os::{DmaBuf, HostMem, Interrupt, Mapper, Registers};
use rustix::event::{EventfdFlags, PollFlags, eventfd};

use super::info::{Info, Stopped};
use super::interrupt::EventFd;
use super::mapper::{MapperRules, ModuleMapper};
use super::mapping::{Access, Mapping};
use super::refusal::{self, Refusal};
use super::sys;
use crate::bars::{BarSource, Bars};
use crate::claim::{Claim, NewDriver};
use crate::{Address, DeviceKind, Error, Result, Root};

/// Time limit for others, such as udev, to release the device's lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// A device that this process drives through the module. Clones share the session. When the last clone and everything
/// made from it (mappings, BARs, mappers) is dropped, the module stops and resets the device, and its driver gets it
/// back.
#[derive(Clone)]
pub struct Session(Arc<ModuleDevice>);

/// Counts how often the module has disabled bus mastering. Starting a device requires the current value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Epoch(u32);

struct ModuleDevice {
    // Dropped in this order: closing the file ends the device's DMA and resets it, and only then may another driver bind.
    file: File,
    _claim: Claim,
    root: Root,
    address: Address,
    bars: [u64; 6],
}

impl Session {
    /// Claims a device and opens it. Its DMA is disabled, and its state is that left by its last user: see
    /// [`Session::reset`].
    ///
    /// A device that is already bound to the module (`onehop drive bind --driver onehop`) stays bound, and may be
    /// opened by users other than root if it is safe.
    ///
    /// # Errors
    /// When it is in use, or the module is missing or refuses this user ([`Error::Module`]).
    pub fn take(root: &Root, kind: DeviceKind, address: Address) -> Result<Self> {
        if !root.exists("/sys/bus/pci/drivers/onehop") && !load(root) {
            return Err(refusal::error(address, "opening", Refusal::NotLoaded));
        }
        let claim = Claim::take(root, kind, address, NewDriver::Module, &[])?;
        let name = format!("dev/onehop-{address}");
        let at = root.folder().unwrap_or(Path::new("/")).join(&name);
        let refused = |why| refusal::error(address, "opening", why);
        let file = open(&at).map_err(|e| refused(refusal::open(root, address, &e)))?;
        let info = sys::info(&file).map_err(|e| Error::call(format!("OH_INFO of {address}"), e))?;
        if info.abi != sys::ABI {
            return Err(refused(Refusal::Version(info.abi)));
        }
        let root = Root::below(root.folder().unwrap_or(Path::new("/")));
        Ok(Self(Arc::new(ModuleDevice { file, _claim: claim, root, address, bars: info.bar_len })))
    }

    pub(super) fn file(&self) -> &File {
        &self.0.file
    }

    pub(super) fn root(&self) -> &Root {
        &self.0.root
    }

    /// The device's address.
    #[must_use]
    pub fn address(&self) -> Address {
        self.0.address
    }

    fn command(&self, call: &'static str, done: io::Result<()>) -> Result<()> {
        done.map_err(|e| refusal::error(self.0.address, call, refusal::command(&e, || self.info().ok())))
    }

    /// The module's view of the device.
    ///
    /// # Errors
    /// When the device has gone.
    pub fn info(&self) -> Result<Info> {
        let info = sys::info(self.file());
        let info =
            info.map_err(|e| refusal::error(self.0.address, "OH_INFO", refusal::command(&e, || None)))?;
        Ok(info.into())
    }

    /// How often bus mastering has been disabled so far.
    ///
    /// # Errors
    /// When the device has gone.
    pub fn epoch(&self) -> Result<Epoch> {
        Ok(Epoch(self.info()?.epoch))
    }

    /// Ends the device's DMA and resets the function. DMA stays disabled.
    ///
    /// # Errors
    /// When it cannot be reset ([`Refusal::NoReset`]), or does not respond.
    pub fn reset(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let done = sys::reset(self.file());
            let again = done.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EAGAIN));
            if !again {
                return self.command("OH_RESET", done);
            }
            if begun.elapsed() >= LOCK_TIMEOUT {
                return Err(refusal::error(self.0.address, "OH_RESET", Refusal::ResetLater));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Enables the device's DMA, for present and future mappings.
    ///
    /// # Errors
    /// When it has not been reset, or its bus mastering was disabled after `epoch` was read.
    pub fn start(&self, epoch: Epoch) -> Result<()> {
        self.command("OH_START", sys::start(self.file(), 0, epoch.0))
    }

    /// The same for a device that cannot be reset. The caller vouches that none of its engines is running: they would
    /// continue where the last user left them.
    ///
    /// # Errors
    /// As for [`Session::start`], and for a device that can be reset.
    pub fn start_unreset(&self, epoch: Epoch) -> Result<()> {
        self.command("OH_START", sys::start(self.file(), sys::START_UNRESET, epoch.0))
    }

    /// Resets the function and enables its DMA. Mappings stay.
    ///
    /// # Errors
    /// As for [`Session::reset`] and [`Session::start`].
    pub fn restart(&self) -> Result<()> {
        self.reset()?;
        self.start(self.epoch()?)
    }

    /// Ends the device's DMA. No transfer is in flight when this returns.
    ///
    /// # Errors
    /// When the device has gone.
    pub fn stop(&self) -> Result<()> {
        self.command("OH_STOP", sys::stop(self.file()))
    }

    /// Limits the device's addresses to 24 to 64 bits. To be called before anything is mapped.
    ///
    /// # Errors
    /// When something is mapped, or the kernel does not support the limit.
    pub fn set_mask(&self, bits: u32) -> Result<()> {
        let done = sys::mask(self.file(), bits);
        if done.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY)) {
            return Err(refusal::error(self.0.address, "OH_MASK", Refusal::Mapped));
        }
        self.command("OH_MASK", done)
    }

    /// Maps a part of a BAR, in whole pages. Accessing it after the device was unbound raises SIGBUS.
    ///
    /// # Errors
    /// When the device has no such BAR, or it is too short.
    pub fn bar(&self, bar: u8, offset: u64, bytes: u64) -> Result<HostMem> {
        let what = || format!("mapping BAR {bar} of {}", self.0.address);
        let size = self.bytes(bar).unwrap_or(0);
        if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > size) {
            let why = format!("{bytes} bytes from {offset} on were requested, and {size} can be mapped");
            return Err(Error::call(what(), io::Error::other(why)));
        }
        let memory = HostMem::of_device(self.file(), sys::bar_offset(bar) + offset, bytes as usize)
            .map_err(|e| Error::call(what(), io::Error::other(e)))?;
        let hold = self.clone();
        Ok(memory.on_last_drop(move || drop(hold)))
    }

    /// The registers in BAR0, and memory behind the other BARs.
    ///
    /// # Errors
    /// When it has no BAR0 that can be mapped.
    pub fn registers(&self) -> Result<Arc<dyn Registers>> {
        let bars = Bars::of(Arc::new(self.clone()), &self.0.address.to_string())?;
        Ok(Arc::new(bars))
    }

    /// A mapper for the device.
    #[must_use]
    pub fn mapper(&self, rules: MapperRules) -> Arc<dyn Mapper> {
        Arc::new(ModuleMapper::new(self.clone(), rules))
    }

    /// Maps host memory for the device. It need not be page-aligned.
    ///
    /// # Errors
    /// [`Error::Module`], with the module's refusal.
    pub fn map_host(&self, memory: &HostMem, access: Access) -> Result<Mapping> {
        Mapping::of_host(self, memory, access)
    }

    /// Maps memory that another driver exported. The descriptor may be closed afterwards.
    ///
    /// # Errors
    /// [`Error::Module`], with the refusal of the module or the exporter.
    pub fn map_dma_buf(&self, buffer: &DmaBuf, access: Access) -> Result<Mapping> {
        Mapping::of_dma_buf(self, buffer, access)
    }

    /// Maps another device's BAR, in whole pages; needs root. The kernel does not report whether the machine forwards
    /// such accesses, nor who else uses that memory: test it with data.
    ///
    /// # Errors
    /// [`Error::Module`], with the module's refusal.
    pub fn map_peer(
        &self,
        peer: Address,
        bar: u8,
        offset: u64,
        bytes: u64,
        access: Access,
    ) -> Result<Mapping> {
        Mapping::of_peer(self, (peer, bar, offset, bytes), access)
    }

    /// The first `count` interrupts of the device, in place of those requested before. None arrive while DMA is
    /// disabled.
    ///
    /// # Errors
    /// When the device has fewer.
    pub fn interrupts(&self, count: u32) -> Result<Vec<Arc<dyn Interrupt>>> {
        let has = self.info()?.vectors;
        if count > has {
            let why = format!("{count} were requested, and it has {has}");
            return Err(Error::call(format!("interrupts of {}", self.0.address), io::Error::other(why)));
        }
        let new = |_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let fds: Vec<_> = (0..count)
            .map(new)
            .collect::<std::result::Result<_, _>>()
            .map_err(|e| Error::call("eventfd2", e.into()))?;
        let numbers: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        self.command("OH_IRQS", sys::irqs(self.file(), &numbers))?;
        Ok(fds.into_iter().map(|fd| Arc::new(EventFd(fd)) as Arc<dyn Interrupt>).collect())
    }

    /// Waits up to `limit` for bus mastering to be disabled, and returns the reason if it was.
    ///
    /// # Errors
    /// When the device has gone.
    pub fn stopped_within(&self, limit: Duration) -> Result<Option<Stopped>> {
        let limit = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        let call = |e| Error::call(format!("poll of {}", self.0.address), e);
        let events = sys::events(self.file(), limit).map_err(call)?;
        if events.contains(PollFlags::HUP) {
            return Err(refusal::error(self.0.address, "waiting for", Refusal::Gone));
        }
        let stopped = self.info()?.stopped;
        Ok((!stopped.is_empty()).then_some(stopped))
    }
}

impl BarSource for Session {
    fn bytes(&self, bar: u8) -> Option<u64> {
        self.0.bars.get(usize::from(bar)).copied().filter(|bytes| *bytes > 0)
    }

    fn map(&self, bar: u8, offset: u64, bytes: u64) -> Result<HostMem> {
        self.bar(bar, offset, bytes)
    }
}

/// Loads the module, if this is the running machine and the user may.
fn load(root: &Root) -> bool {
    if !root.is_here() {
        return false;
    }
    // The caller checks for the result.
    let _ = std::process::Command::new("modprobe").arg("onehop").output();
    root.exists("/sys/bus/pci/drivers/onehop")
}

/// The file appears a moment after the device was bound.
fn open(at: &Path) -> io::Result<File> {
    let begun = Instant::now();
    loop {
        let file = File::options().read(true).write(true).open(at);
        let missing = file.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        if !missing || begun.elapsed() >= LOCK_TIMEOUT {
            return file;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
