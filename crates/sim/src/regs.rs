//! The registers: their values, and the effects of writes.

use onehop_proto::regs::{self, Aqa, Cap, Cc, Cmbmsc, Cmbsts, Crto, Csts, Nssr, Version, offset};

use crate::config::Config;
use crate::device::ControllerState;
use crate::violation::Rule;

/// The supported bits of CC: EN, CSS, MPS, AMS, SHN, IOSQES, IOCQES.
const CC_KNOWN: u32 = Cc(0)
    .with_en(true)
    .with_css(7)
    .with_mps(15)
    .with_ams(7)
    .with_shn(3)
    .with_iosqes(15)
    .with_iocqes(15)
    .with_crime(true)
    .0;

/// The stored registers.
pub(crate) struct Regs {
    pub cap: Cap,
    pub vs: Version,
    pub crto: Crto,
    pub intms: u32,
    pub cc: Cc,
    pub csts: Csts,
    pub aqa: Aqa,
    pub asq: u64,
    pub acq: u64,
    pub cmbmsc: Cmbmsc,
    pub cmbsts: Cmbsts,
}

impl Regs {
    /// As after power-on.
    pub(crate) fn new(config: &Config) -> Self {
        let two = config.version >= Version::V2_0;
        let to = config.to;
        let crto = config.crto.unwrap_or(u16::from(to));
        let cap = Cap(0)
            .with_mqes_z(config.mqes_z)
            .with_cqr(config.cqr)
            .with_to(if two { to.max(u8::try_from(crto).unwrap_or(u8::MAX)) } else { to })
            .with_dstrd(config.dstrd)
            .with_nssrs(config.nssrs)
            .with_css(1)
            .with_mpsmin(config.mpsmin)
            .with_mpsmax(config.mpsmax)
            .with_cmbs(config.cmb != 0)
            .with_crwms(two);
        Self {
            cap,
            vs: config.version,
            crto: if two { Crto(0).with_crwmt(crto) } else { Crto(0) },
            intms: 0,
            cc: Cc(0),
            csts: Csts(0),
            aqa: Aqa(0),
            asq: 0,
            acq: 0,
            cmbmsc: Cmbmsc(0),
            cmbsts: Cmbsts(0),
        }
    }
}

const fn low(value: u64) -> u32 {
    value as u32
}

const fn high(value: u64) -> u32 {
    (value >> 32) as u32
}

/// A 64-bit register with one half replaced.
const fn with_half(old: u64, upper: bool, value: u32) -> u64 {
    if upper { old & 0xffff_ffff | (value as u64) << 32 } else { old & !0xffff_ffff | value as u64 }
}

impl ControllerState {
    /// A register read; the offset is below the doorbells' end.
    pub(crate) fn read_register(&self, at: u32) -> u32 {
        if at >= offset::DOORBELLS {
            if regs::doorbell_of(at, self.config.dstrd).is_some() {
                self.breach(Rule::DoorbellRead, None, format!("the doorbell at {at:#x} was read"));
            }
            return 0;
        }
        let r = &self.regs;
        let cmb = self.cmb.as_ref().filter(|_| r.cmbmsc.cre());
        match at {
            offset::VS => r.vs.0,
            offset::INTMS | offset::INTMC => r.intms,
            offset::CC => r.cc.0,
            offset::CSTS => r.csts.0,
            offset::AQA => r.aqa.0,
            offset::CMBLOC => cmb.map_or(0, |cmb| cmb.location().0),
            offset::CMBSZ => cmb.map_or(0, |cmb| cmb.size().0),
            offset::CMBSTS => r.cmbsts.0,
            offset::CRTO => r.crto.0,
            _ => self.read_wide(at),
        }
    }

    fn read_wide(&self, at: u32) -> u32 {
        let r = &self.regs;
        let wide = [
            (offset::CAP, r.cap.0),
            (offset::ASQ, r.asq),
            (offset::ACQ, r.acq),
            (offset::CMBMSC, r.cmbmsc.0),
        ];
        for (start, value) in wide {
            if at == start {
                return low(value);
            }
            if at == start + 4 {
                return high(value);
            }
        }
        0
    }

    /// A register write below the doorbells.
    pub(crate) fn write_register(&mut self, at: u32, value: u32) {
        let wide = |start: u32| at == start || at == start + 4;
        match at {
            offset::INTMS => self.regs.intms |= value,
            offset::INTMC => self.regs.intms &= !value,
            offset::CC => self.write_cc(value),
            offset::CSTS => self.write_csts(value),
            offset::NSSR => self.write_nssr(value),
            offset::AQA | offset::ASQ | offset::ACQ => self.write_queue_register(at, value),
            _ if wide(offset::ASQ) || wide(offset::ACQ) => self.write_queue_register(at, value),
            _ if wide(offset::CMBMSC) => {
                let new = with_half(self.regs.cmbmsc.0, at != offset::CMBMSC, value);
                self.set_cmbmsc(Cmbmsc(new));
            }
            _ => {
                let what = if at > offset::CRTO { "reserved or absent" } else { "read-only" };
                self.breach(
                    Rule::ReadOnlyRegister,
                    None,
                    format!("{value:#x} was written to {at:#x}, which is {what}"),
                );
            }
        }
    }

    fn write_cc(&mut self, value: u32) {
        if value & !CC_KNOWN != 0 || Cc(value).shn() == 3 || Cc(value).crime() {
            self.breach(Rule::ReservedRegisterBit, None, format!("CC = {value:#x}"));
        }
        self.change_cc(Cc(value & CC_KNOWN).with_crime(false));
    }

    fn write_csts(&mut self, value: u32) {
        let clear = Csts(value);
        if value & !Csts(0).with_nssro(true).0 != 0 {
            self.breach(Rule::ReadOnlyRegister, None, format!("CSTS was written with {value:#x}"));
        }
        if clear.nssro() {
            self.regs.csts = self.regs.csts.with_nssro(false);
        }
    }

    fn write_nssr(&mut self, value: u32) {
        if self.config.nssrs && value == Nssr::NVME.0 {
            self.full_reset();
            self.regs.csts = self.regs.csts.with_nssro(true);
        } else if !self.config.nssrs {
            self.breach(Rule::ReadOnlyRegister, None, "NSSR was written, but CAP.NSSRS is 0");
        }
    }

    fn write_queue_register(&mut self, at: u32, value: u32) {
        if self.regs.cc.en() {
            let detail = format!("{value:#x} was written to {at:#x} while CC.EN is 1");
            self.breach(Rule::QueueRegisterWhileEnabled, None, detail);
            return;
        }
        let low_bits = 0xfff;
        match at {
            offset::AQA => {
                let known = Aqa(0).with_asqs_z(0xfff).with_acqs_z(0xfff).0;
                if value & !known != 0 {
                    self.breach(Rule::ReservedRegisterBit, None, format!("AQA = {value:#x}"));
                }
                self.regs.aqa = Aqa(value & known);
            }
            offset::ASQ | offset::ACQ if value & low_bits != 0 => {
                let detail = format!("the admin queue at {value:#x} does not lie on a page");
                self.breach(Rule::AdminQueue, None, detail);
                self.set_base(at, value & !low_bits);
            }
            _ => self.set_base(at, value),
        }
    }

    fn set_base(&mut self, at: u32, value: u32) {
        let r = &mut self.regs;
        let (base, start) =
            if at < offset::ACQ { (&mut r.asq, offset::ASQ) } else { (&mut r.acq, offset::ACQ) };
        *base = with_half(*base, at != start, value);
    }
}
