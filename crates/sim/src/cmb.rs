//! The controller memory buffer: memory of the drive that the host reaches through the BAR.

use onehop_os::HostMem;
use onehop_proto::Status;
use onehop_proto::regs::{Cmbloc, Cmbmsc, Cmbsts, Cmbsz, offset};

use crate::Result;
use crate::config::Config;
use crate::device::ControllerState;
use crate::dma::Segment;
use crate::exec::CommandFailure;
use crate::violation::Rule;

/// The buffer, and its offset in BAR0.
pub(crate) struct Cmb {
    pub mem: HostMem,
    pub bar_offset: u32,
    pub uses: Cmbsz,
}

/// The end of the doorbells in BAR0, in whole pages.
pub(crate) fn doorbells_end(config: &Config) -> u32 {
    let doorbells = 2 * (u32::from(config.queues) + 1);
    (offset::DOORBELLS + (doorbells << (2 + config.dstrd))).next_multiple_of(4096)
}

/// The size of BAR0: a power of two, like all BARs.
pub(crate) fn bar_size(config: &Config) -> u32 {
    (doorbells_end(config) + config.cmb as u32).max(0x4000).next_power_of_two()
}

impl Cmb {
    /// The buffer of a configuration.
    pub(crate) fn new(config: &Config) -> Result<Option<Self>> {
        if config.cmb == 0 {
            return Ok(None);
        }
        let mem = HostMem::anonymous(config.cmb as usize)?;
        Ok(Some(Self { mem, bar_offset: doorbells_end(config), uses: config.cmb_uses }))
    }

    /// CMBLOC, once enabled by the host.
    pub(crate) const fn location(&self) -> Cmbloc {
        Cmbloc(0)
            .with_bir(0)
            .with_ofst(self.bar_offset / 4096)
            .with_cqmms(true)
            .with_cqpds(true)
            .with_cdpmls(true)
            .with_cdpcils(true)
            .with_cdmmms(true)
    }

    /// CMBSZ, once enabled by the host.
    pub(crate) fn size(&self) -> Cmbsz {
        self.uses.with_szu(0).with_sz((self.mem.len() / 4096) as u32)
    }

    /// Power loss clears the buffer.
    pub(crate) fn forget(&self) {
        let _ = self.mem.fill(0, self.mem.len(), 0xcb);
    }
}

impl ControllerState {
    /// Refuses an address in the buffer if CMBSZ does not allow that use.
    pub(crate) fn check_cmb_use(
        &self,
        queue: u16,
        what: &str,
        addr: u64,
        allowed: fn(Cmbsz) -> bool,
    ) -> std::result::Result<(), CommandFailure> {
        match &self.cmb {
            Some(cmb) if !allowed(cmb.uses) && self.space.in_cmb(addr) => {
                let detail = format!("{what} lies in the buffer, at {addr:#x}, which CMBSZ does not allow");
                self.breach(Rule::Cmb, Some(queue), detail);
                Err(Status::INVALID_CMB_USE.with_dnr().into())
            }
            _ => Ok(()),
        }
    }

    /// Handles a write of CMBMSC.
    pub(crate) fn set_cmbmsc(&mut self, value: Cmbmsc) {
        let Some(cmb) = &self.cmb else {
            if value.0 != 0 {
                self.breach(Rule::Cmb, None, "CMBMSC was written, but CAP.CMBS is 0");
            }
            return;
        };
        if value.0 & 0xffc != 0 {
            self.breach(Rule::ReservedRegisterBit, None, format!("CMBMSC = {:#x}", value.0));
        }
        let value = Cmbmsc(value.0 & !0xffc);
        let cba = value.cba().0;
        let fits = cba.checked_add(cmb.mem.len() as u64).is_some();
        if value.cmse() && !value.cre() {
            self.breach(Rule::Cmb, None, "CMBMSC.CMSE was set without CRE");
        }
        let window = (value.cmse() && fits).then(|| Segment::of(cba, cmb.mem.clone()));
        self.regs.cmbsts = Cmbsts::default().with_cbai(value.cmse() && !fits);
        self.space.set_cmb(window);
        self.regs.cmbmsc = value;
    }
}
