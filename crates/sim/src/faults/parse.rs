//! Parses faults: `late@n=5,delay=20ms`, `fail@op=write,lba=100-200,status=2/80`.

use std::ops::RangeInclusive;
use std::str::FromStr;

use onehop_proto::{Status, admin, nvm};

use super::{Edge, Fault, FaultKind, Order};
use crate::{Error, Result, units};

const PARAMETERS: &str =
    "n, every, p, lba, q, op, after, on, delay, status (type/code in hex), crd, count, by, order";

const IO_OPS: &[(&str, u8)] = &[
    ("flush", nvm::opcode::FLUSH),
    ("write", nvm::opcode::WRITE),
    ("read", nvm::opcode::READ),
    ("write-uncorrectable", nvm::opcode::WRITE_UNCORRECTABLE),
    ("compare", nvm::opcode::COMPARE),
    ("write-zeroes", nvm::opcode::WRITE_ZEROES),
    ("dsm", nvm::opcode::DATASET_MANAGEMENT),
    ("verify", nvm::opcode::VERIFY),
];

const ADMIN_OPS: &[(&str, u8)] = &[
    ("delete-sq", admin::opcode::DELETE_SQ),
    ("create-sq", admin::opcode::CREATE_SQ),
    ("get-log", admin::opcode::GET_LOG_PAGE),
    ("delete-cq", admin::opcode::DELETE_CQ),
    ("create-cq", admin::opcode::CREATE_CQ),
    ("identify", admin::opcode::IDENTIFY),
    ("abort", admin::opcode::ABORT),
    ("set-features", admin::opcode::SET_FEATURES),
    ("get-features", admin::opcode::GET_FEATURES),
    ("async-event", admin::opcode::ASYNC_EVENT),
    ("keep-alive", admin::opcode::KEEP_ALIVE),
    ("dbbuf", admin::opcode::DOORBELL_BUFFER),
];

impl Fault {
    /// Parses `NAME@KEY=VALUE,KEY=VALUE…`.
    ///
    /// # Errors
    /// Names what is unknown or invalid, and what is valid.
    pub fn parse(text: &str) -> Result<Self> {
        let (name, list) = text.split_once('@').unwrap_or((text, ""));
        let kind = FaultKind::from_str(name)?;
        let mut fault = Self::new(kind);
        let wrong = |why: &str| Error::BadFault { fault: text.into(), why: why.into() };
        for part in list.split(',').filter(|p| !p.is_empty()) {
            let (key, value) = part.split_once('=').ok_or_else(|| wrong("parameters are KEY=VALUE"))?;
            match fault.set(key, value) {
                Some(()) => {}
                None if PARAMETERS.split([',', ' ']).any(|p| p == key) => {
                    return Err(wrong(&format!("{key}={value} cannot be understood")));
                }
                None => {
                    return Err(wrong(&format!("unknown parameter '{key}'; known are: {PARAMETERS}")));
                }
            }
        }
        if fault.order != Order::Whole && kind != FaultKind::Torn {
            return Err(wrong("only the data of torn reads has an order"));
        }
        let (when, of_enable) = (&fault.when, matches!(kind, FaultKind::StuckRdy | FaultKind::SlowStart));
        // Abort commands belong to queue 0.
        let other_queue = when.q.is_some_and(|q| of_enable || q != 0);
        let asks_for_command = when.lba.is_some() || other_queue || !when.ops.is_empty();
        if (of_enable || kind == FaultKind::AbortIgnored) && (asks_for_command || when.after.is_some()) {
            let what = if of_enable { "changes of CC.EN" } else { "Abort commands" };
            return Err(wrong(&format!("it strikes at {what}: lba, q, op and after do not apply")));
        }
        if when.on.is_some() && !of_enable {
            return Err(wrong("only slow-start and stuck-rdy strike on a change of CC.EN"));
        }
        if kind == FaultKind::Media && fault.when.lba.is_none() {
            return Err(wrong("say which blocks: media@lba=100-200"));
        }
        Ok(fault)
    }

    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        let positive = || units::number(value).filter(|n| *n > 0);
        match key {
            "n" => self.when.n = Some(positive()?),
            "every" => self.when.every = Some(positive()?),
            "p" => self.when.p = Some(value.parse().ok().filter(|p| (0.0..=1.0).contains(p))?),
            "lba" => self.when.lba = Some(range(value)?),
            "q" => self.when.q = Some(units::number(value)?.try_into().ok()?),
            "op" => self.set_ops(value)?,
            "after" => self.when.after = Some(units::duration(value)?),
            "on" => self.when.on = Some(edge(value)?),
            "delay" => self.delay = Some(units::duration(value)?),
            "status" => self.status = Some(status(value)?),
            "crd" => self.crd = units::number(value).filter(|n| *n <= 3)? as u8,
            "count" => self.count = Some(units::number(value)?),
            "by" => self.by = Some(units::number(value)?.try_into().ok()?),
            "order" => self.order = order(value)?,
            _ => return None,
        }
        Some(())
    }

    fn set_ops(&mut self, value: &str) -> Option<()> {
        for name in value.split('|') {
            let find = |table: &[(&str, u8)]| table.iter().find(|(n, _)| *n == name).map(|(_, op)| *op);
            let op = match (find(IO_OPS), find(ADMIN_OPS)) {
                (Some(op), _) => op,
                (None, Some(op)) => {
                    // The name of an admin command implies queue 0.
                    self.when.q = Some(0);
                    op
                }
                (None, None) => units::number(name)?.try_into().ok()?,
            };
            self.when.ops.push(op);
        }
        Some(())
    }
}

impl FromStr for FaultKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|k| k.name() == name).ok_or_else(|| Error::UnknownFault {
            name: name.into(),
            known: Self::ALL.iter().map(|k| k.name()).collect::<Vec<_>>().join(", "),
        })
    }
}

fn range(text: &str) -> Option<RangeInclusive<u64>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (units::number(first)?, units::number(last)?);
    (first <= last).then_some(first..=last)
}

fn edge(text: &str) -> Option<Edge> {
    match text {
        "enable" => Some(Edge::Enable),
        "disable" => Some(Edge::Disable),
        _ => None,
    }
}

fn order(text: &str) -> Option<Order> {
    match text {
        "whole" => Some(Order::Whole),
        "last-first" => Some(Order::LastFirst),
        "random" => Some(Order::Random),
        _ => None,
    }
}

fn status(text: &str) -> Option<Status> {
    let (sct, sc) = text.split_once('/')?;
    let sct = u8::from_str_radix(sct, 16).ok().filter(|n| *n <= 7)?;
    let status = Status::new(sct, u8::from_str_radix(sc, 16).ok()?);
    (!status.is_ok()).then_some(status)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn parses_specifications() {
        let late = Fault::parse("late@n=5,delay=20ms").unwrap();
        assert_eq!((late.kind, late.when.n), (FaultKind::Late, Some(5)));
        assert_eq!(late.delay, Some(Duration::from_millis(20)));
        let fail = Fault::parse("fail@op=read|write,lba=100-200,q=1,status=2/81,count=3").unwrap();
        assert_eq!(fail.when.ops, [nvm::opcode::READ, nvm::opcode::WRITE]);
        assert_eq!(fail.when.lba, Some(100..=200));
        assert_eq!((fail.status, fail.count), (Some(Status::UNRECOVERED_READ), Some(3)));
        assert_eq!(Fault::parse("lost@op=identify").unwrap().when.q, Some(0));
        assert_eq!(Fault::parse("gone").unwrap(), Fault::new(FaultKind::Gone));
        assert_eq!(Fault::parse("torn@order=last-first").unwrap().order, Order::LastFirst);
        assert_eq!(Fault::parse("torn@n=1,order=random").unwrap().order, Order::Random);
        for kind in FaultKind::ALL {
            let refused =
                matches!(kind, FaultKind::StuckRdy | FaultKind::SlowStart | FaultKind::AbortIgnored);
            let read = Fault::parse(&format!("{}@lba=1", kind.name()));
            assert_eq!(read.ok().map(|fault| fault.kind), (!refused).then_some(*kind));
        }
    }

    #[test]
    fn says_what_is_known() {
        let text = |spec| Fault::parse(spec).unwrap_err().to_string();
        assert!(text("latte@n=1").contains("late, reorder"));
        assert!(text("late@when=1").contains("every"));
        for bad in [
            "late@n=0",
            "late@n",
            "fail@status=0/0",
            "fail@status=9/1",
            "late@p=2",
            "media@lba=5-1",
            "torn@order=first",
            "late@order=random",
            "late@on=enable",
            "slow-start@op=read",
            "abort-ignored@after=1s",
        ] {
            assert!(Fault::parse(bad).is_err(), "{bad}");
        }
        assert!(text("media").contains("lba"));
    }
}
