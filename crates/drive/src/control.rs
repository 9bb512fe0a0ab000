//! The controller's registers: disabling, enabling and shutting down, from any state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_os::{ControllerBackend, StopSignal, Transport};
use onehop_proto::BusAddr;
use onehop_proto::regs::{Aqa, Cap, Cc, Crto, Csts, GONE32, Nssr, Version, offset};

use crate::identity::LONGEST_TRANSFER;
use crate::{Error, Options, Result};

/// How long registers may read all ones before a device counts as gone: links are retrained within less.
const GONE_AFTER: Duration = Duration::from_millis(250);
/// The pause after a function reset before the registers are read.
const RESET_SETTLES: Duration = Duration::from_millis(10);
/// How often registers are polled.
const READY_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// A controller's registers, and what was read from them.
pub(crate) struct Control {
    pub(crate) port: ControllerBackend,
    /// Identifies the drive: everything that belongs to it holds a clone.
    pub(crate) tag: Arc<()>,
    pub(crate) cap: Cap,
    pub(crate) version: Version,
    pub(crate) page_shift: u32,
    limit: Duration,
    pub(crate) stop: StopSignal,
}

/// A register of a device that is present. A single read of all ones does not prove that it is gone.
fn present(port: &ControllerBackend, at: u32, register: &'static str) -> Result<u32> {
    let mut since = None;
    loop {
        let value = port.regs.read32(at);
        if value != GONE32 {
            return Ok(value);
        }
        if since.get_or_insert_with(Instant::now).elapsed() >= GONE_AFTER {
            return Err(Error::Gone { drive: port.name.clone(), register });
        }
        std::thread::sleep(READY_POLL_INTERVAL);
    }
}

/// The status register; an error if the device is gone.
pub(crate) fn status(port: &ControllerBackend) -> Result<Csts> {
    present(port, offset::CSTS, "CSTS").map(Csts)
}

impl Control {
    /// Reads the registers that do not change while a controller lives.
    pub(crate) fn new(port: ControllerBackend, options: &Options) -> Result<Self> {
        let cap = Cap(port.regs.read64(offset::CAP));
        let version = Version(port.regs.read32(offset::VS));
        if cap.gone() || version.0 == GONE32 {
            return Err(Error::Gone { drive: port.name, register: "CAP" });
        }
        if cap.mqes_z() == 0 {
            let why = "its queues would have a single entry (CAP.MQES is 0)".into();
            return Err(Error::Unsupported { drive: port.name, why });
        }
        let css = cap.css();
        if css != 0 && css & 0b100_0001 == 0 {
            let why = format!("its command sets (CAP.CSS {css:#x}) do not include the NVM command set");
            return Err(Error::Unsupported { drive: port.name, why });
        }
        let page_shift = 12 + u32::from(cap.mpsmin());
        if 1 << page_shift > LONGEST_TRANSFER {
            let (page, most) = ((1u64 << page_shift) >> 20, LONGEST_TRANSFER >> 20);
            let why = format!(
                "its smallest memory page (CAP.MPSMIN) has {page} MiB, more than the {most} MiB of the longest transfer"
            );
            return Err(Error::Unsupported { drive: port.name, why });
        }
        let (limit, stop) = (options.ready_limit, options.stop.clone());
        Ok(Self { port, tag: Arc::new(()), cap, version, page_shift, limit, stop })
    }

    pub(crate) fn transport(&self) -> Transport {
        self.port.mapper.transport()
    }

    fn gone(&self, register: &'static str) -> Error {
        Error::Gone { drive: self.port.name.clone(), register }
    }

    /// An error once the caller asked for an end.
    pub(crate) fn check_stop(&self) -> Result<()> {
        if self.stop.is_set() { Err(self.interrupted()) } else { Ok(()) }
    }

    fn interrupted(&self) -> Error {
        Error::Interrupted { drive: self.port.name.clone() }
    }

    /// The error; [`Error::Interrupted`] instead once the caller asked for an end.
    pub(crate) fn or_interrupted(&self, error: Error) -> Error {
        if self.stop.is_set() { self.interrupted() } else { error }
    }

    /// The status register; an error if the device is gone.
    pub(crate) fn status(&self) -> Result<Csts> {
        status(&self.port)
    }

    fn config(&self) -> Result<Cc> {
        present(&self.port, offset::CC, "CC").map(Cc)
    }

    /// Whether it is enabled, ready and well.
    pub(crate) fn is_running(&self) -> Result<bool> {
        let (cc, csts) = (self.config()?, self.status()?);
        Ok(cc.en() && csts.rdy() && !csts.cfs())
    }

    /// How long the controller may take to become ready or disabled.
    fn patience(&self) -> Duration {
        let mut ms = self.cap.timeout_ms();
        if self.cap.crms() != 0 {
            // All ones is not a time limit, but a device that does not respond.
            let crto = Some(self.port.regs.read32(offset::CRTO)).filter(|crto| *crto != GONE32);
            ms = ms.max(crto.map_or(0, |crto| Crto(crto).media_ms()));
        }
        // A controller that claims to need no time at all still gets some.
        Duration::from_millis(u64::from(ms.max(500))).min(self.limit)
    }

    fn wait(&self, want: &'static str, heeds_stop: bool, done: impl Fn(Csts) -> bool) -> Result<Csts> {
        let (start, patience) = (Instant::now(), self.patience());
        loop {
            let csts = self.status()?;
            if done(csts) {
                return Ok(csts);
            }
            if heeds_stop {
                self.check_stop()?;
            }
            if start.elapsed() >= patience {
                return Err(Error::NotReady {
                    drive: self.port.name.clone(),
                    want,
                    waited: patience,
                    cc: self.config()?.0,
                    csts: csts.0,
                });
            }
            std::thread::sleep(READY_POLL_INTERVAL);
        }
    }

    /// Brings the controller to EN = 0, RDY = 0. It works with a fatal status, too, because it is the recovery from
    /// one. With `heeds_stop`, a request to stop ends it.
    pub(crate) fn disable(&self, heeds_stop: bool) -> Result<()> {
        let cc = self.config()?;
        if cc.en() {
            if !self.status()?.rdy() {
                // It is still starting: EN may only be cleared once it is ready, or will never be. After a request to stop it
                // is cleared at once, as Linux always does.
                match self.wait("ready", true, |csts| csts.rdy() || csts.cfs()) {
                    Ok(_) | Err(Error::NotReady { .. }) => {}
                    Err(Error::Interrupted { .. }) if !heeds_stop => {}
                    Err(error) => return Err(error),
                }
            }
            self.port.regs.write32(offset::CC, cc.with_en(false).with_shn(Cc::SHN_NONE).0);
        }
        self.wait("disabled", heeds_stop, |csts| !csts.rdy())?;
        Ok(())
    }

    /// Enables a disabled controller with these admin queues and waits until it is ready. Calls `lost` if it has lost
    /// power since it was last enabled with them, or was never enabled with them.
    ///
    /// A controller reset leaves AQA, ASQ and ACQ as they are; a loss of power clears them. So they are only written if
    /// they do not hold these values already, and read again at the end: if the power is lost between the two reads,
    /// the second finds them cleared. A controller that loses it later is no longer ready, which the next command
    /// notices.
    pub(crate) fn enable(&self, asq: BusAddr, acq: BusAddr, entries: u32, lost: impl Fn()) -> Result<()> {
        let regs = &self.port.regs;
        let size_z = (entries - 1) as u16;
        let aqa = Aqa(0).with_asqs_z(size_z).with_acqs_z(size_z).0;
        let is_named = || {
            regs.read32(offset::AQA) == aqa
                && regs.read64(offset::ASQ) == asq.0
                && regs.read64(offset::ACQ) == acq.0
        };
        // A controller behind messages has no such registers, and does not outlive its connection.
        let in_memory = self.transport() == Transport::Memory;
        if !(in_memory && is_named()) {
            lost();
            regs.write32(offset::AQA, aqa);
            regs.write64(offset::ASQ, asq.0);
            regs.write64(offset::ACQ, acq.0);
        }
        // Select the NVM command set alone where possible: then namespaces of other sets are not listed.
        let css = if self.cap.css() & 1 != 0 || self.cap.css() == 0 { Cc::CSS_NVM } else { Cc::CSS_ALL };
        regs.write32(offset::CC, Cc::enabled(self.page_shift, css).0);
        let csts = self.wait("ready", true, |csts| csts.rdy() || csts.cfs())?;
        if in_memory && !is_named() {
            lost();
        }
        if !csts.cfs() {
            return Ok(());
        }
        let drive = self.port.name.clone();
        Err(match regs.failure() {
            Some(why) => Error::Lost { drive, why },
            None => Error::Fatal { drive },
        })
    }

    /// Requests a shutdown, and waits until the controller reports that it is complete.
    pub(crate) fn shut_down(&self, patience: Duration) -> Result<()> {
        let cc = self.config()?;
        if !cc.en() {
            return Ok(());
        }
        self.port.regs.write32(offset::CC, cc.with_shn(Cc::SHN_NORMAL).0);
        let start = Instant::now();
        loop {
            let csts = self.status()?;
            if csts.shst() == Csts::SHST_COMPLETE {
                return Ok(());
            }
            if start.elapsed() >= patience {
                return Err(Error::NotReady {
                    drive: self.port.name.clone(),
                    want: "shut down",
                    waited: patience,
                    cc: self.config()?.0,
                    csts: csts.0,
                });
            }
            std::thread::sleep(READY_POLL_INTERVAL);
        }
    }

    /// Resets the function from outside, or else the subsystem, and waits until it is back.
    pub(crate) fn reset_function(&self) -> Result<()> {
        if let Some(reset) = &self.port.reset {
            let drive = || self.port.name.clone();
            reset.function_reset().map_err(|error| match self.transport() {
                Transport::Memory => error.into(),
                Transport::Messages => Error::Lost { drive: drive(), why: error.to_string() },
            })?;
        } else if self.cap.nssrs() {
            self.port.regs.write32(offset::NSSR, Nssr::NVME.0);
        } else {
            return Err(Error::Unsupported {
                drive: self.port.name.clone(),
                why: "it has neither a function reset nor a subsystem reset".into(),
            });
        }
        // During a reset the registers are unavailable for a while, and perhaps not at once.
        std::thread::sleep(RESET_SETTLES);
        let (start, patience) = (Instant::now(), self.patience());
        while self.port.regs.read32(offset::CSTS) == GONE32 {
            if start.elapsed() >= patience {
                return Err(self.gone("CSTS"));
            }
            self.check_stop()?;
            std::thread::sleep(READY_POLL_INTERVAL);
        }
        Ok(())
    }
}
