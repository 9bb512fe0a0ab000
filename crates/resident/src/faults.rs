//! Translates the simulator's faults for the warps.
//!
//! Faults of registers and admin commands stay with the simulator. Each queue pair counts the commands that match a
//! fault itself, starting where its predecessors' counts ended.

use std::time::Duration;

use onehop_controller::layout::MAX_FAULTS;
use onehop_controller::{Fault, FaultKind};
use onehop_proto::Status;
use onehop_proto::nvm::opcode;
use onehop_sim::{FaultKind as Sim, Order, Strike};

use crate::Result;
use crate::error::not_served;

const MS: Duration = Duration::from_millis(1);

/// A fault, its count, and its effect on the whole controller.
#[derive(Clone, Debug)]
pub(crate) struct Armed {
    pub fault: Fault,
    pub strike: Option<Strike>,
    /// Limits it to this queue.
    queue: Option<u16>,
}

impl Armed {
    pub(crate) fn is_on(&self, queue: u16) -> bool {
        self.queue.is_none_or(|only| only == queue)
    }
}

/// The faults of I/O commands among those of a drive.
pub(crate) fn translate(faults: &[onehop_sim::Fault]) -> Result<Vec<Armed>> {
    let mut armed = Vec::new();
    for fault in faults {
        armed.extend(one(fault)?);
    }
    if armed.len() > MAX_FAULTS as usize {
        return not_served(format!("{} faults", armed.len()), &format!("{MAX_FAULTS} at most"));
    }
    Ok(armed)
}

fn one(fault: &onehop_sim::Fault) -> Result<Option<Armed>> {
    let when = &fault.when;
    let is_admin = matches!(fault.kind, Sim::StuckRdy | Sim::SlowStart | Sim::AbortIgnored);
    if is_admin || when.q == Some(0) || fault.is_timed() {
        return Ok(None);
    }
    if when.p.is_some() {
        return not_served("chance (p=)", "give n= or every=");
    }
    if when.after.is_some() {
        return not_served("faults of I/O commands after some time (after=)", "give n= or every=");
    }
    if fault.order != Order::Whole {
        return not_served("data in another order (order=)", "its warps write in no order of their own");
    }
    let (kind, strike) = kind(fault.kind)?;
    let number = |n: Option<u64>| n.map_or(0, |n| u32::try_from(n).unwrap_or(u32::MAX));
    let (first, last) = when.lba.as_ref().map_or((0, u64::MAX), |lba| (*lba.start(), *lba.end()));
    let made = Fault {
        n: number(when.n),
        every: number(when.every),
        count: number(fault.limit()),
        first,
        last,
        delay: fault.delay.unwrap_or(delay(fault.kind)).as_nanos() as u64,
        value: value(fault),
        opcodes: opcodes(fault),
        ..Fault::new(kind)
    };
    Ok(Some(Armed { fault: made, strike, queue: when.q }))
}

fn kind(kind: Sim) -> Result<(FaultKind, Option<Strike>)> {
    Ok(match kind {
        Sim::Late => (FaultKind::Late, None),
        Sim::Reorder => (FaultKind::Reorder, None),
        Sim::Lost => (FaultKind::Lost, None),
        Sim::Torn => (FaultKind::Torn, None),
        Sim::Garbled => (FaultKind::Garbled, None),
        Sim::FailOnce | Sim::Fail | Sim::Media => (FaultKind::Fail, None),
        Sim::WrongCid => (FaultKind::WrongCid, None),
        Sim::OtherCid => (FaultKind::OtherCid, None),
        Sim::Dup => (FaultKind::Dup, None),
        Sim::StalePhase => (FaultKind::StalePhase, None),
        Sim::SqhdLag => (FaultKind::SqhdLag, None),
        Sim::Cfs => (FaultKind::Dead, Some(Strike::Cfs)),
        Sim::Gone => (FaultKind::Dead, Some(Strike::Gone)),
        Sim::PowerLoss => (FaultKind::Dead, Some(Strike::PowerLoss)),
        other => return not_served(format!("the fault {}", other.name()), "leave it away"),
    })
}

/// The simulator's defaults.
fn delay(kind: Sim) -> Duration {
    match kind {
        Sim::Late => 20 * MS,
        Sim::Reorder => 50 * MS,
        _ => MS,
    }
}

fn value(fault: &onehop_sim::Fault) -> u32 {
    let status = |otherwise: Status| fault.status.unwrap_or(otherwise);
    match fault.kind {
        Sim::Reorder => fault.by.unwrap_or(1),
        Sim::SqhdLag => fault.by.unwrap_or(4),
        Sim::FailOnce | Sim::Garbled => status(Status::INTERNAL_ERROR).with_crd(fault.crd).0.into(),
        Sim::Fail => status(Status::INTERNAL_ERROR).with_dnr().0.into(),
        Sim::Media => status(Status::UNRECOVERED_READ).with_dnr().0.into(),
        _ => 0,
    }
}

fn opcodes(fault: &onehop_sim::Fault) -> u32 {
    let bits = |ops: &[u8]| ops.iter().filter(|op| **op < 32).fold(0, |bits, op| bits | 1 << op);
    match fault.kind {
        Sim::Media if fault.when.ops.is_empty() => bits(&[opcode::READ, opcode::COMPARE]),
        _ => bits(&fault.when.ops),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Option<Armed>> {
        one(&onehop_sim::Fault::parse(text).unwrap())
    }

    #[test]
    fn faults_of_commands_are_the_warps() {
        let late = parsed("late@n=5,delay=10ms").unwrap().unwrap().fault;
        assert_eq!((late.kind, late.n, late.delay), (FaultKind::Late as u32, 5, 10_000_000));
        let media = parsed("media@lba=9-12").unwrap().unwrap().fault;
        assert_eq!((media.first, media.last, media.opcodes), (9, 12, 1 << 2 | 1 << 5));
        let once = parsed("fail-once@n=5,crd=1").unwrap().unwrap().fault;
        assert_eq!((once.count, once.value), (1, Status::INTERNAL_ERROR.with_crd(1).0.into()));
        let gone = parsed("gone@n=5").unwrap().unwrap();
        assert_eq!((gone.strike, gone.fault.count), (Some(Strike::Gone), 1));
        let only = parsed("lost@q=2").unwrap().unwrap();
        assert!(only.is_on(2) && !only.is_on(1));
    }

    #[test]
    fn others_are_not() {
        for text in ["slow-start@n=2", "stuck-rdy@on=enable", "abort-ignored@q=0", "cfs@after=1s"] {
            assert!(parsed(text).unwrap().is_none(), "{text}");
        }
        for text in ["lost@p=0.1", "late@n=1,after=1s"] {
            assert!(parsed(text).unwrap_err().to_string().contains("n= or every="), "{text}");
        }
        assert!(parsed("torn@order=random").unwrap_err().to_string().contains("order="));
        assert!(translate(&vec![onehop_sim::Fault::new(Sim::Lost); 9]).is_err());
    }
}
