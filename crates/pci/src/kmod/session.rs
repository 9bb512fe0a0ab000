//! A device in the module's hands, and in ours: one process at a time has it.

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
use super::mapper::{ModuleMapper, Rules};
use super::mapping::{Access, Mapping};
use super::refusal::{self, Refusal};
use super::sys;
use crate::bars::{Bars, Source};
use crate::claim::{Claim, Owner};
use crate::{Address, Error, Kind, Result, Root};

/// How long somebody else's hold on the device's lock is waited for: udev, or who reads its files.
const UNLOCKED_WITHIN: Duration = Duration::from_secs(2);

/// A device that this process drives through the module. Clones are the same session; when the last of them, and all that
/// came of it (mappings, BARs, mappers), has gone, the module stops and resets the device, and its driver gets it back.
#[derive(Clone)]
pub struct Session(Arc<ModuleDevice>);

/// Counts how often the module took bus mastering away: who starts a device says which count it knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Epoch(u32);

struct ModuleDevice {
    // Closed before the device is given back.
    file: Option<File>,
    claim: Option<Claim>,
    root: Root,
    address: Address,
    bars: [u64; 6],
}

impl Drop for ModuleDevice {
    fn drop(&mut self) {
        // Closing ends the device's DMA and resets it; only then does the memory go that was mapped.
        self.file = None;
        if let Some(claim) = self.claim.take() {
            // The guardian has said on stderr what it could not do.
            let _ = claim.give_back();
        }
    }
}

impl Session {
    /// Takes a device from its driver and opens it. It cannot reach memory, and is as its last user left it: see
    /// [`Session::reset`].
    ///
    /// A device that the module has already (`onehop drive bind --driver onehop`) stays there afterwards, and may be opened by
    /// users who are not root, where the device can do no harm.
    ///
    /// # Errors
    /// When it is in use, the module is not there, or does not let this user have it: [`Error::Module`].
    pub fn take(root: &Root, kind: Kind, address: Address) -> Result<Self> {
        if !root.exists("/sys/bus/pci/drivers/onehop") && !load(root) {
            return Err(refusal::error(address, "opening", Refusal::NotLoaded));
        }
        let claim = Claim::take(root, kind, address, Owner::Module, &[])?;
        let name = format!("dev/onehop-{address}");
        let at = root.folder().unwrap_or(Path::new("/")).join(&name);
        let refused = |why| refusal::error(address, "opening", why);
        let file = open(&at).map_err(|e| refused(refusal::open(root, address, &e)))?;
        let info = sys::info(&file).map_err(|e| Error::call(format!("OH_INFO of {address}"), e))?;
        if info.abi != sys::ABI {
            return Err(refused(Refusal::Version(info.abi)));
        }
        let root = Root::below(root.folder().unwrap_or(Path::new("/")));
        Ok(Self(Arc::new(ModuleDevice {
            file: Some(file),
            claim: Some(claim),
            root,
            address,
            bars: info.bar_len,
        })))
    }

    pub(super) fn file(&self) -> &File {
        // Taken only by drop.
        self.0.file.as_ref().unwrap_or_else(|| unreachable!("the file is open while the session lives"))
    }

    pub(super) fn root(&self) -> &Root {
        &self.0.root
    }

    /// Where the device is.
    #[must_use]
    pub fn address(&self) -> Address {
        self.0.address
    }

    fn command(&self, call: &'static str, done: io::Result<()>) -> Result<()> {
        let stopped = || self.info().map_or(Stopped::default(), |info| info.stopped);
        done.map_err(|e| refusal::error(self.0.address, call, refusal::command(&e, stopped)))
    }

    /// What the module tells of the device.
    ///
    /// # Errors
    /// When the device has gone.
    pub fn info(&self) -> Result<Info> {
        let info = sys::info(self.file());
        let info = info
            .map_err(|e| refusal::error(self.0.address, "OH_INFO", refusal::command(&e, Stopped::default)))?;
        Ok(info.into())
    }

    /// How often bus mastering has been taken away until now.
    ///
    /// # Errors
    /// When the device has gone.
    pub fn epoch(&self) -> Result<Epoch> {
        Ok(Epoch(self.info()?.epoch))
    }

    /// Ends the device's DMA and resets the function. DMA stays off.
    ///
    /// # Errors
    /// When it cannot be reset ([`Refusal::NoReset`]), or does not answer.
    pub fn reset(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let done = sys::reset(self.file());
            let again = done.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EAGAIN));
            if !again {
                return self.command("OH_RESET", done);
            }
            if begun.elapsed() >= UNLOCKED_WITHIN {
                return Err(refusal::error(self.0.address, "OH_RESET", Refusal::ResetLater));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Lets the device reach what is mapped for it, and what will be.
    ///
    /// # Errors
    /// When it has not been reset, or its bus mastering was taken away after `epoch` was asked for.
    pub fn start(&self, epoch: Epoch) -> Result<()> {
        self.command("OH_START", sys::start(self.file(), 0, epoch.0))
    }

    /// The same for a device that cannot be reset: the caller vouches that none of its engines is running, so that it
    /// does not go on where its last user left it.
    ///
    /// # Errors
    /// As for [`Session::start`], and for a device that can be reset.
    pub fn start_unreset(&self, epoch: Epoch) -> Result<()> {
        self.command("OH_START", sys::start(self.file(), sys::START_UNRESET, epoch.0))
    }

    /// Resets the function and lets it reach memory. Mappings stay.
    ///
    /// # Errors
    /// As for [`Session::reset`] and [`Session::start`].
    pub fn restart(&self) -> Result<()> {
        self.reset()?;
        self.start(self.epoch()?)
    }

    /// Ends the device's DMA; nothing is on its way any more when this returns.
    ///
    /// # Errors
    /// When the device has gone.
    pub fn stop(&self) -> Result<()> {
        self.command("OH_STOP", sys::stop(self.file()))
    }

    /// From now on the device gets addresses of at most so many bits, 24 to 64. Before anything is mapped.
    ///
    /// # Errors
    /// When something is mapped, or the kernel has no such addresses.
    pub fn set_mask(&self, bits: u32) -> Result<()> {
        let done = sys::mask(self.file(), bits);
        if done.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY)) {
            return Err(refusal::error(self.0.address, "OH_MASK", Refusal::Mapped));
        }
        self.command("OH_MASK", done)
    }

    /// A part of a BAR, in whole pages. A touch of it after the device was unbound is a SIGBUS.
    ///
    /// # Errors
    /// When the device has no such BAR, or it does not reach that far.
    pub fn bar(&self, bar: u8, offset: u64, bytes: u64) -> Result<HostMem> {
        let what = || format!("mapping BAR {bar} of {}", self.0.address);
        let size = self.bytes(bar).unwrap_or(0);
        if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > size) {
            let why = format!("{bytes} bytes from {offset} on are asked for, and {size} can be mapped");
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

    /// What gives the device addresses of memory.
    #[must_use]
    pub fn mapper(&self, rules: Rules) -> Arc<dyn Mapper> {
        Arc::new(ModuleMapper::new(self.clone(), rules))
    }

    /// Lets the device reach host memory, whose first and last byte may lie anywhere in a page.
    ///
    /// # Errors
    /// [`Error::Module`], with what the module refused.
    pub fn map_host(&self, memory: &HostMem, access: Access) -> Result<Mapping> {
        Mapping::of_host(self, memory, access)
    }

    /// Lets the device reach memory that another driver exported. The descriptor is not needed afterwards.
    ///
    /// # Errors
    /// [`Error::Module`], with what the module or the exporter refused.
    pub fn map_dma_buf(&self, buffer: &DmaBuf, access: Access) -> Result<Mapping> {
        Mapping::of_dma_buf(self, buffer, access)
    }

    /// Lets the device reach another device's BAR, in whole pages: for root. Nobody tells whether the machine forwards such
    /// accesses, nor who else uses that memory: try it with data.
    ///
    /// # Errors
    /// [`Error::Module`], with what the module refused.
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

    /// The first `count` interrupts of the device, instead of those that were asked for before. None come while its DMA is
    /// off.
    ///
    /// # Errors
    /// When the device does not have so many.
    pub fn interrupts(&self, count: u32) -> Result<Vec<Arc<dyn Interrupt>>> {
        let has = self.info()?.vectors;
        if count > has {
            let why = format!("{count} are asked for, and it has {has}");
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

    /// Waits until bus mastering is taken away, at most so long; why it was, if it was.
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

impl Source for Session {
    fn bytes(&self, bar: u8) -> Option<u64> {
        self.0.bars.get(usize::from(bar)).copied().filter(|bytes| *bytes > 0)
    }

    fn map(&self, bar: u8, offset: u64, bytes: u64) -> Result<HostMem> {
        self.bar(bar, offset, bytes)
    }
}

/// Loads the module, where this is the running machine and we may.
fn load(root: &Root) -> bool {
    if !root.is_here() {
        return false;
    }
    // Whether it worked is seen by what there is afterwards.
    let _ = std::process::Command::new("modprobe").arg("onehop").output();
    root.exists("/sys/bus/pci/drivers/onehop")
}

/// The file appears a moment after the device was bound.
fn open(at: &Path) -> io::Result<File> {
    let begun = Instant::now();
    loop {
        let file = File::options().read(true).write(true).open(at);
        let missing = file.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        if !missing || begun.elapsed() >= UNLOCKED_WITHIN {
            return file;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
