//! Identify.

use onehop_proto::admin::{self, Identify, cns, csi};
use onehop_proto::format::{Flbas, LbaFormat};
use onehop_proto::identify::{EntrySizes, NamespaceId, Oacs, Oncs, Vwc, build};
use onehop_proto::regs::Version;
use onehop_proto::{Sqe, Status};

use super::log::FIRMWARE;
use crate::device::ControllerState;
use crate::exec::{CommandFailure, CommandResult};
use crate::features::KEEP_ALIVE_GRANULARITY;
use crate::health::ERROR_ENTRIES;
use crate::transfer::sgl_support;

/// The vendor of the PCI function. The number is unassigned; emulators use it.
pub const PCI_VENDOR: u16 = 0x1234;
/// The device, of that vendor. Linux has no quirks for it.
pub const PCI_DEVICE: u16 = 0x0a0e;
/// The vendor of the subsystem.
pub const PCI_SUBSYSTEM_VENDOR: u16 = PCI_VENDOR;

/// The last power state; from 3 on they do no I/O.
pub(crate) const LAST_POWER_STATE: u8 = 4;
/// Maximum power in units of 10 mW, entry and exit latency in microseconds, no I/O.
const POWER_STATES: [(u16, u32, u32, bool); LAST_POWER_STATE as usize + 1] = [
    (800, 0, 0, false),
    (600, 0, 0, false),
    (400, 0, 0, false),
    (5, 1_000, 5_000, true),
    (1, 5_000, 45_000, true),
];
/// Maximum shutdown time in microseconds.
const SHUTDOWN_US: u32 = 1_000_000;
/// Formats that every namespace lists, by power of two of the block; the one in use follows if it is another.
const LISTED: [u8; 2] = [9, 12];

type IdentifyPage = [u8; 4096];

impl ControllerState {
    pub(super) fn identify(&mut self, sqe: &Sqe) -> CommandResult {
        let ask = Identify::from(sqe);
        let mut bytes: Box<IdentifyPage> = Box::new([0; 4096]);
        self.identify_bytes(&ask, &mut bytes)?;
        self.send(0, sqe, &bytes[..])?;
        Ok(0)
    }

    fn identify_bytes(&self, ask: &Identify, bytes: &mut IdentifyPage) -> Result<(), CommandFailure> {
        let two = self.config.version >= Version::V2_0;
        let nvm = || if ask.csi == csi::NVM { Ok(()) } else { Err(Status::INVALID_FIELD.with_dnr()) };
        match ask.cns {
            cns::NAMESPACE => self.identify_namespace(ask.nsid, bytes)?,
            cns::CONTROLLER => self.identify_controller(bytes),
            cns::ACTIVE_NAMESPACES => self.list_namespaces(ask.nsid, bytes)?,
            cns::NAMESPACE_DESCRIPTORS => self.describe_namespace(ask.nsid, bytes)?,
            cns::CSI_NAMESPACE if two => {
                nvm()?;
                self.check_nsid(ask.nsid)?;
            }
            cns::CSI_CONTROLLER if two => nvm()?,
            cns::CSI_ACTIVE if two => {
                nvm()?;
                self.list_namespaces(ask.nsid, bytes)?;
            }
            cns::INDEPENDENT_NAMESPACE if two => {
                self.check_nsid(ask.nsid)?;
                build::IndependentNamespace::new(bytes).nstat(1);
            }
            _ => return Err(Status::INVALID_FIELD.with_dnr().into()),
        }
        Ok(())
    }

    fn identify_controller(&self, bytes: &mut IdentifyPage) {
        let c = &self.config;
        let nqn = format!("nqn.2024-01.example.onehop:sim:{}", c.serial);
        let total = self.namespaces.iter().map(|ns| u128::from(ns.bytes())).sum();
        build::Controller::new(bytes)
            .vid(PCI_VENDOR)
            .ssvid(PCI_SUBSYSTEM_VENDOR)
            .sn(&c.serial)
            .mn(&c.model)
            .fr(FIRMWARE)
            .rab(6)
            .mdts(c.mdts)
            .ver(c.version)
            .rtd3r(SHUTDOWN_US)
            .rtd3e(SHUTDOWN_US.max(c.ready.as_micros().try_into().unwrap_or(u32::MAX)))
            .oaes(1 << 8)
            .cntrltype(1)
            .crdt1(c.crdt[0])
            .crdt2(c.crdt[1])
            .crdt3(c.crdt[2])
            .oacs(Oacs(0).with_doorbell_buffer(c.dbbuf))
            .acl_z(c.acl)
            .aerl_z(c.aerl)
            .frmw(3)
            .lpa(1 << 1 | 1 << 2)
            .elpe_z(ERROR_ENTRIES as u8 - 1)
            .kas(KEEP_ALIVE_GRANULARITY)
            .npss_z(LAST_POWER_STATE)
            .apsta(1)
            .wctemp(343)
            .cctemp(353)
            .hmpre(c.hmb)
            .hmmin(c.hmb / 2)
            .tnvmcap(total)
            .sqes(EntrySizes(0).with_min(6).with_max(6))
            .cqes(EntrySizes(0).with_min(4).with_max(4))
            .nn(c.namespaces)
            .oncs(self.optional_commands())
            .vwc(Vwc(0).with_present(c.vwc).with_flush_all(3))
            .sgls(sgl_support(c.sgl))
            // The name ends in zeros, not in spaces.
            .subnqn(&format!("{nqn:\0<256}"));
        self.put_power_states(bytes);
    }

    fn optional_commands(&self) -> Oncs {
        let all = Oncs(0)
            .with_compare(true)
            .with_write_uncorrectable(true)
            .with_dataset_management(true)
            .with_write_zeroes(true)
            .with_save_select(true)
            .with_timestamp(true)
            .with_verify(true);
        self.engine.as_ref().map_or(all, |engine| engine.optional_commands(all))
    }

    fn put_power_states(&self, bytes: &mut IdentifyPage) {
        for (i, (power, enter, leave, idle)) in (0..).zip(POWER_STATES) {
            let mut state = [0; 32];
            build::PowerState::new(&mut state)
                .mp(power)
                .flags(if idle { 2 } else { 0 })
                .enlat(enter)
                .exlat(leave)
                .rrt(i)
                .rrl(i)
                .rwt(i)
                .rwl(i);
            build::put_power_state(bytes, i, &state);
        }
    }

    fn identify_namespace(&self, nsid: u32, bytes: &mut IdentifyPage) -> Result<(), CommandFailure> {
        self.check_nsid(nsid)?;
        let ns = &self.namespaces[nsid as usize - 1];
        let shift = ns.lba.trailing_zeros() as u8;
        let in_use = LbaFormat(0).with_lbads(shift).with_ms(ns.ms);
        let mut formats: Vec<_> = LISTED.iter().map(|shift| LbaFormat(0).with_lbads(*shift)).collect();
        if !formats.contains(&in_use) {
            formats.push(in_use);
        }
        let index = formats.iter().position(|f| *f == in_use).unwrap_or(0) as u8;
        let granule = (4096 / ns.lba.min(4096) - 1) as u16;
        let mut build = build::Namespace::new(bytes)
            .nsze(ns.blocks)
            .ncap(ns.blocks)
            .nuse(ns.used())
            .nsfeat(1 << 4)
            .nlbaf_z(formats.len() as u8 - 1)
            .flbas(Flbas(0).with_index_low(index).with_extended(self.config.ext && ns.ms != 0))
            .mc(if ns.ms == 0 { 0 } else { 3 })
            .dpc(if self.config.pi == 0 { 0 } else { 1 << 4 | 1 << (self.config.pi - 1) })
            .dps(self.config.pi)
            .dlfeat(1 | 1 << 3)
            .nvmcap(u128::from(ns.bytes()))
            .npwg_z(granule)
            .npwa_z(granule)
            .npdg_z(granule)
            .npda_z(granule)
            // The optimal write size is a multiple of the preferred granularity.
            .nows_z(granule)
            .nguid(self.nguid(nsid))
            .eui64(self.eui64(nsid));
        for (i, format) in (0..).zip(formats) {
            build = build.lbaf(i, format);
        }
        Ok(())
    }

    fn list_namespaces(&self, above: u32, bytes: &mut IdentifyPage) -> Result<(), CommandFailure> {
        if above >= admin::ALL_NAMESPACES - 1 {
            return Err(Status::INVALID_NAMESPACE.with_dnr().into());
        }
        let last = self.namespaces.len() as u32;
        build::put_active(bytes, (above + 1).min(last + 1)..=last);
        Ok(())
    }

    fn describe_namespace(&self, nsid: u32, bytes: &mut IdentifyPage) -> Result<(), CommandFailure> {
        self.check_nsid(nsid)?;
        let names = [
            NamespaceId::Eui64(self.eui64(nsid)),
            NamespaceId::Nguid(self.nguid(nsid)),
            NamespaceId::Csi(csi::NVM),
        ];
        let two = self.config.version >= Version::V2_0;
        build::put_descriptors(bytes, names.into_iter().take(if two { 3 } else { 2 }));
        Ok(())
    }

    /// An identifier that depends on serial number and namespace, until that is recreated.
    fn eui64(&self, nsid: u32) -> [u8; 8] {
        let life = self.namespaces.get(nsid as usize - 1).map_or(0, |ns| ns.life);
        let start = 0xcbf2_9ce4_8422_2325 ^ u64::from(nsid) ^ u64::from(life) << 32;
        let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        self.config.serial.bytes().fold(start, fold).to_be_bytes()
    }

    fn nguid(&self, nsid: u32) -> [u8; 16] {
        let (eui, mut nguid) = (self.eui64(nsid), [0; 16]);
        nguid[..8].copy_from_slice(&eui);
        nguid[8..].copy_from_slice(b"onehop\0\0");
        nguid[15] = nsid as u8;
        nguid
    }
}
