//! The options of a simulated drive.

use std::time::Duration;

use onehop_proto::regs::{Cmbsz, Version};

use crate::config::{Config, Media, NullOrder};
use crate::faults::Fault;
use crate::{Error, units};

/// Why a value was refused.
pub(crate) enum Refused {
    /// It has the wrong type.
    Wanted(&'static str),
    /// Another error.
    Because(Box<Error>),
}

impl Refused {
    /// The error, with the option's name.
    pub(crate) fn about(self, key: &str, value: &str) -> Error {
        match self {
            Self::Wanted(wanted) => {
                Error::BadValue { key: key.into(), value: value.into(), wanted: wanted.into() }
            }
            Self::Because(error) => *error,
        }
    }
}

type Set = fn(&mut Config, &str) -> Result<(), Refused>;

/// An option: its name, its meaning, and what it does.
pub(crate) struct OptionKey {
    pub name: &'static str,
    pub means: &'static str,
    pub set: Set,
}

const fn key(name: &'static str, means: &'static str, set: Set) -> OptionKey {
    OptionKey { name, means, set }
}

/// Sets a field of the configuration to a parsed value.
macro_rules! set {
    ($field:ident, $parse:expr) => {
        |config, text| {
            config.$field = $parse(text)?;
            Ok(())
        }
    };
}

/// Every option.
pub(crate) const KEYS: &[OptionKey] = &[
    key("size", "make the image this long (64M)", set_size),
    key("lba", "bytes of a block, 512 to 65536", set!(lba, small_size)),
    key("ms", "metadata bytes of a block: 0, 8, 16, 64", set!(ms, int)),
    key("ext", "metadata follows each block's data (1) or has a buffer (0)", set!(ext, flag)),
    key("pi", "protection information: 0, or type 1 to 3", set!(pi, int)),
    key("ns", "number of namespaces", set!(namespaces, int)),
    key("mdts", "longest transfer, 2^mdts smallest pages; 0 for no limit", set!(mdts, int)),
    key("queues", "I/O queue pairs granted", set!(queues, int)),
    key("mqes", "CAP.MQES: largest queue less one", set!(mqes_z, int)),
    key("dstrd", "CAP.DSTRD: doorbells are 4 << dstrd bytes apart, 0 to 4", set!(dstrd, int)),
    key("cqr", "queues have to be contiguous, 0 or 1", set!(cqr, flag)),
    key("mpsmin", "CAP.MPSMIN: smallest page is 4096 << mpsmin", set!(mpsmin, int)),
    key("mpsmax", "CAP.MPSMAX: largest page is 4096 << mpsmax", set!(mpsmax, int)),
    key("cmb", "bytes of controller memory buffer (16M)", set!(cmb, size)),
    key("cmb_uses", "what the buffer takes, of sqs|cqs|lists|rds|wds", set_cmb_uses),
    key("sgl", "understands SGLs, 0 or 1", set!(sgl, flag)),
    key("vwc", "has a volatile write cache, 0 or 1", set!(vwc, flag)),
    key("to", "CAP.TO: longest wait for ready, in 500 ms", set!(to, int)),
    key("crto", "CRTO: longest wait for ready, in 500 ms (version 2.0)", set_crto),
    key("ready", "how long RDY takes to follow EN (5ms)", set!(ready, duration)),
    key("version", "1.4 or 2.0", set!(version, version)),
    key("serial", "serial number", set!(serial, text)),
    key("model", "model name", set!(model, text)),
    key("latency", "time that a command takes (50us)", set!(latency, duration)),
    key("jitter", "random time on top, up to this", set!(jitter, duration)),
    key("bandwidth", "bytes per second (3G); 0 for no limit", set!(bandwidth, size)),
    key("aerl", "Asynchronous Event Requests taken, less one", set!(aerl, int)),
    key("acl", "Aborts taken at once, less one", set!(acl, int)),
    key("dbbuf", "supports shadow doorbells, 0 or 1", set!(dbbuf, flag)),
    key("hmb", "pages of host memory wanted, 0 for none", set!(hmb, int)),
    key("nssrs", "can be reset through NSSR, 0 or 1", set!(nssrs, flag)),
    key("seed", "what all chance is drawn from", set!(seed, int)),
    key("workers", "1: a thread of its own; 0: inline in register accesses", set!(workers, flag)),
    key("crdt", "retry delays 1 to 3 in 100 ms: N or N,N,N", set_crdt),
    key("crdt_unit", "what the simulator takes for 100 ms when it checks retries", set!(crdt_unit, duration)),
    key("scatter", "every page gets a bus address of its own, 0 or 1", set!(scatter, flag)),
    key("null", "commands complete at once and move nothing: 0, 1 or reverse", set_null),
    key("fault", "NAME@WHEN,…: what goes wrong, may be repeated", set_fault),
];

fn int<T: TryFrom<u64>>(text: &str) -> Result<T, Refused> {
    let wanted = "a whole number of the field's width is wanted";
    units::number(text).and_then(|n| T::try_from(n).ok()).ok_or(Refused::Wanted(wanted))
}

fn flag(text: &str) -> Result<bool, Refused> {
    units::flag(text).ok_or(Refused::Wanted("0 or 1 is wanted"))
}

pub(crate) fn size(text: &str) -> Result<u64, Refused> {
    units::size(text).ok_or(Refused::Wanted("a size is wanted: 4096, 64K, 1M, 2GiB"))
}

fn small_size(text: &str) -> Result<u32, Refused> {
    u32::try_from(size(text)?).map_err(|_| Refused::Wanted("a size below 4G is wanted"))
}

fn duration(text: &str) -> Result<Duration, Refused> {
    units::duration(text).ok_or(Refused::Wanted("a time is wanted: 100ns, 50us, 10ms, 2s"))
}

fn text(text: &str) -> Result<String, Refused> {
    if text.is_empty() { Err(Refused::Wanted("some text is wanted")) } else { Ok(text.into()) }
}

fn version(text: &str) -> Result<Version, Refused> {
    match text {
        "1.4" => Ok(Version::V1_4),
        "2.0" => Ok(Version::V2_0),
        _ => Err(Refused::Wanted("1.4 or 2.0 is wanted")),
    }
}

fn set_size(config: &mut Config, value: &str) -> Result<(), Refused> {
    let bytes = size(value)?;
    match &mut config.media {
        Media::Image { size, .. } => *size = Some(bytes),
        Media::Memory(size) => *size = bytes,
    }
    Ok(())
}

fn set_cmb_uses(config: &mut Config, value: &str) -> Result<(), Refused> {
    config.cmb_uses = Cmbsz(0);
    for name in value.split('|') {
        let uses = config.cmb_uses;
        config.cmb_uses = match name {
            "sqs" => uses.with_sqs(true),
            "cqs" => uses.with_cqs(true),
            "lists" => uses.with_lists(true),
            "rds" => uses.with_rds(true),
            "wds" => uses.with_wds(true),
            _ => return Err(Refused::Wanted("some of sqs|cqs|lists|rds|wds are wanted")),
        };
    }
    Ok(())
}

fn set_crto(config: &mut Config, value: &str) -> Result<(), Refused> {
    config.crto = Some(int(value)?);
    Ok(())
}

fn set_crdt(config: &mut Config, value: &str) -> Result<(), Refused> {
    let all = value.split(',').map(int::<u16>).collect::<Result<Vec<_>, _>>()?;
    config.crdt = match all[..] {
        [one] => [one; 3],
        [one, two, three] => [one, two, three],
        _ => return Err(Refused::Wanted("one number or three are wanted")),
    };
    Ok(())
}

fn set_null(config: &mut Config, value: &str) -> Result<(), Refused> {
    config.null = match value {
        "0" => None,
        "1" => Some(NullOrder::Straight),
        "reverse" => Some(NullOrder::Reverse),
        _ => return Err(Refused::Wanted("0, 1 or reverse is wanted")),
    };
    Ok(())
}

fn set_fault(config: &mut Config, value: &str) -> Result<(), Refused> {
    config.faults.push(Fault::parse(value).map_err(|e| Refused::Because(Box::new(e)))?);
    Ok(())
}
