//! Removes what a remote controller reports but what does not hold on the path to it.

use onehop_os::HostMem;
use onehop_proto::Sqe;
use onehop_proto::admin::{Identify, cns, opcode};
use onehop_proto::identify::{self, Controller, build};

/// Largest transfer of a command, as a power of two of 4 KiB pages. Targets that report no limit still refuse longer
/// commands.
const MOST_MDTS: u8 = 8;

/// A change to an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Patch {
    Nothing,
    /// Identify Controller: limits transfers, and removes doorbell buffers and host memory.
    Controller,
}

impl Patch {
    /// The change to this command's answer.
    pub(crate) fn of(sqe: &Sqe) -> Self {
        let is_identify = sqe.opcode() == opcode::IDENTIFY && Identify::from(sqe).cns == cns::CONTROLLER;
        if is_identify { Self::Controller } else { Self::Nothing }
    }

    /// Changes the answer in memory.
    pub(crate) fn apply(self, memory: &HostMem, at: usize) {
        let mut page = [0; identify::BYTES];
        if self == Self::Nothing || memory.read(at, &mut page).is_err() {
            return;
        }
        controller(&mut page);
        // It was just read from there.
        let _ = memory.write(at, &page);
    }
}

fn controller(page: &mut [u8; identify::BYTES]) {
    let view = Controller::new(page);
    let (mdts, oacs) = (view.mdts(), view.oacs().with_doorbell_buffer(false));
    let mdts = if mdts == 0 { MOST_MDTS } else { mdts.min(MOST_MDTS) };
    let _ = build::Controller::new(page).mdts(mdts).oacs(oacs).hmpre(0).hmmin(0);
}

/// Maximum data in a command's capsule, as a controller reports it: none if data does not follow the command.
pub(crate) fn capsule_room(page: &[u8; identify::BYTES]) -> u32 {
    let view = Controller::new(page);
    if view.icdoff() != 0 {
        return 0;
    }
    view.ioccsz().saturating_mul(16).saturating_sub(Sqe::BYTES as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_transfers_and_memory_of_the_host_are_hidden() {
        for (mdts, want) in [(0, MOST_MDTS), (5, 5), (12, MOST_MDTS)] {
            let mut page = [0; identify::BYTES];
            let oacs = identify::Oacs(0).with_doorbell_buffer(true).with_format(true);
            let _ = build::Controller::new(&mut page).mdts(mdts).hmpre(9).hmmin(9).oacs(oacs).ioccsz(260);
            controller(&mut page);
            let view = Controller::new(&page);
            assert_eq!((view.mdts(), view.hmpre(), view.hmmin()), (want, 0, 0));
            assert!(!view.oacs().doorbell_buffer() && view.oacs().format());
            assert_eq!(capsule_room(&page), 4096);
        }
        let mut page = [0; identify::BYTES];
        let _ = build::Controller::new(&mut page).ioccsz(260).icdoff(1);
        assert_eq!((capsule_room(&page), capsule_room(&[0; identify::BYTES])), (0, 0));
    }
}
