//! Get Log Page.

use onehop_controller::fields;
use onehop_proto::admin::{ALL_NAMESPACES, GetLogPage, opcode};
use onehop_proto::log::{LogSupport, SUPPORTED_BYTES, build, id};
use onehop_proto::{Sqe, Status, nvm};

use crate::aer::AerEvent;
use crate::device::ControllerState;
use crate::exec::CommandResult;
use crate::reserved;

/// Firmware revision, in slot 1 and in Identify.
pub(super) const FIRMWARE: &str = "SIM 0.1";
/// Bytes of the log of commands and their effects.
const EFFECTS_BYTES: usize = 4096;
/// Maximum length of a page.
const LONGEST: u64 = 1 << 20;

const SUPPORTED: &[u8] =
    &[id::SUPPORTED, id::ERROR, id::HEALTH, id::FIRMWARE, id::CHANGED_NAMESPACES, id::EFFECTS];

impl ControllerState {
    pub(super) fn get_log_page(&mut self, sqe: &Sqe) -> CommandResult {
        let ask = GetLogPage::from(sqe);
        let page = self.log_page(&ask).ok_or(Status::INVALID_LOG_PAGE.with_dnr())?;
        let health_nsid = matches!(ask.nsid, 0 | ALL_NAMESPACES);
        let misplaced =
            !ask.offset.is_multiple_of(4) || ask.offset_is_index || ask.offset > page.len() as u64;
        if misplaced || ask.bytes > LONGEST || (ask.lid == id::HEALTH && !health_nsid) {
            return Err(Status::INVALID_FIELD.with_dnr().into());
        }
        let mut data = page[ask.offset as usize..].to_vec();
        data.resize(ask.bytes as usize, 0);
        self.send(0, sqe, &data)?;
        if ask.lid == id::CHANGED_NAMESPACES && !ask.rae {
            self.changed.clear();
        }
        if !ask.rae {
            self.clear_event(ask.lid);
        }
        Ok(0)
    }

    fn log_page(&self, ask: &GetLogPage) -> Option<Vec<u8>> {
        Some(match ask.lid {
            id::SUPPORTED if self.config.version >= onehop_proto::regs::Version::V2_0 => {
                let mut page = [0; SUPPORTED_BYTES];
                for lid in SUPPORTED {
                    build::put_log_support(&mut page, *lid, LogSupport(0).with_supported(true));
                }
                page.to_vec()
            }
            id::ERROR => self.health.error_log(),
            id::HEALTH => self.health.page(self.features.is_hot(self.health.temperature)),
            id::FIRMWARE => {
                let mut page = [0; 512];
                build::FirmwareSlots::new(&mut page).afi(1).slot1(FIRMWARE);
                page.to_vec()
            }
            id::CHANGED_NAMESPACES => {
                let mut page = [0; 4096];
                build::put_changed(&mut page, self.changed.iter().copied());
                page.to_vec()
            }
            id::EFFECTS => self.command_effects(),
            _ => return None,
        })
    }

    /// Supported commands, and which of them change blocks: a dword for each opcode, admin commands first.
    fn command_effects(&self) -> Vec<u8> {
        const SUPPORTED: u32 = 1;
        const CHANGES_BLOCKS: u32 = 2;
        let admin = |op: u8| match op {
            opcode::DOORBELL_BUFFER => u32::from(self.config.dbbuf),
            _ => u32::from(reserved::is_admin(op)),
        };
        let io = |op: u8| match op {
            nvm::opcode::WRITE
            | nvm::opcode::WRITE_UNCORRECTABLE
            | nvm::opcode::WRITE_ZEROES
            | nvm::opcode::DATASET_MANAGEMENT => SUPPORTED | CHANGES_BLOCKS,
            _ => u32::from(fields::masks(op).is_some()),
        };
        let mut page: Vec<u8> =
            (0..=255).map(admin).chain((0..=255).map(io)).flat_map(u32::to_le_bytes).collect();
        page.resize(EFFECTS_BYTES, 0);
        page
    }

    /// Sets the drive's temperature.
    pub(crate) fn set_temperature(&mut self, kelvins: u16) {
        self.health.temperature = kelvins;
        self.check_temperature();
    }

    pub(super) fn check_temperature(&mut self) {
        if self.features.is_hot(self.health.temperature) {
            self.raise(AerEvent::Temperature);
        }
    }

    /// Records a change of a namespace.
    pub(crate) fn note_changed(&mut self, nsid: u32) {
        self.changed.insert(nsid);
        self.raise(AerEvent::NamespaceChanged);
    }
}
