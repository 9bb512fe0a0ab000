//! Features: current, default and saved values, and their valid values.

use std::collections::BTreeMap;
use std::time::Duration;

use onehop_proto::Status;
use onehop_proto::admin::Select;
use onehop_proto::feature::{self, EventConfig, Queues, WriteCache, behavior, id};

use crate::config::Config;

/// A feature whose value is a dword.
struct DwordFeature {
    fid: u8,
    saveable: bool,
    changeable: bool,
    /// Bits that may be set.
    known: u32,
    standard: u32,
}

const fn kind(fid: u8, saveable: bool, known: u32, standard: u32) -> DwordFeature {
    DwordFeature { fid, saveable, changeable: true, known, standard }
}

/// Default temperature thresholds: 80 and 0 degrees Celsius.
const HOT: u16 = 353;
const COLD: u16 = 273;

/// KAS: the unit of the keep-alive timeout, in 100 ms.
pub(crate) const KEEP_ALIVE_GRANULARITY: u16 = 1;
/// The same in milliseconds.
const KEEP_ALIVE_STEP: u32 = KEEP_ALIVE_GRANULARITY as u32 * 100;

const KINDS: &[DwordFeature] = &[
    kind(id::ARBITRATION, true, 0xffff_ff07, 7),
    kind(id::POWER_MANAGEMENT, true, 0xff, 0),
    kind(id::TEMPERATURE_THRESHOLD, true, 0x003f_ffff, HOT as u32),
    kind(id::ERROR_RECOVERY, true, 0xffff, 0),
    kind(id::VOLATILE_WRITE_CACHE, true, 1, 1),
    kind(id::NUMBER_OF_QUEUES, false, u32::MAX, 0),
    kind(id::INTERRUPT_COALESCING, true, 0xffff, 0),
    kind(id::INTERRUPT_VECTOR, false, 0x1_ffff, 0),
    kind(id::WRITE_ATOMICITY, false, 1, 0),
    kind(id::ASYNC_EVENT, true, 0x1ff, 0x1ff),
    kind(id::APST, true, 1, 0),
    kind(id::HOST_MEMORY_BUFFER, false, 3, 0),
    kind(id::TIMESTAMP, false, 0, 0),
    kind(id::KEEP_ALIVE, false, u32::MAX, 0),
    kind(id::HOST_BEHAVIOR, false, 0, 0),
    kind(id::SOFTWARE_PROGRESS, true, 0xff, 0),
    kind(id::HOST_ID, false, 1, 0),
];

/// All features of a drive.
pub(crate) struct Features {
    current: BTreeMap<u8, u32>,
    saved: BTreeMap<u8, u32>,
    /// Values that are longer than a dword.
    data: BTreeMap<u8, Vec<u8>>,
    cold: u16,
    granted: Queues,
    absent: Vec<u8>,
    /// The host memory buffer: address and pages of each extent.
    pub host_memory: Vec<(u64, u32)>,
    /// How the command enabled it.
    pub host_memory_setting: feature::HostMemory,
}

impl Features {
    pub(crate) fn new(config: &Config) -> Self {
        let queues = u32::from(config.queues);
        let mut absent = Vec::new();
        if !config.vwc {
            absent.push(id::VOLATILE_WRITE_CACHE);
        }
        if config.hmb == 0 {
            absent.push(id::HOST_MEMORY_BUFFER);
        }
        let mut features = Self {
            current: BTreeMap::new(),
            saved: BTreeMap::new(),
            data: BTreeMap::new(),
            cold: COLD,
            granted: Queues::ask(queues, queues),
            absent,
            host_memory: Vec::new(),
            host_memory_setting: feature::HostMemory::default(),
        };
        features.reset();
        features
    }

    /// Restores the saved values, or the defaults.
    pub(crate) fn reset(&mut self) {
        self.current = KINDS.iter().map(|k| (k.fid, k.standard)).collect();
        self.current.extend(self.saved.iter());
        self.data.clear();
        self.cold = COLD;
        self.host_memory.clear();
        self.host_memory_setting = feature::HostMemory::default();
    }

    fn kind(&self, fid: u8) -> Result<&'static DwordFeature, Status> {
        let known = KINDS.iter().find(|k| k.fid == fid && !self.absent.contains(&fid));
        known.ok_or(Status::INVALID_FIELD.with_dnr())
    }

    fn value(&self, fid: u8) -> u32 {
        self.current.get(&fid).copied().unwrap_or(0)
    }

    /// Whether the write cache is on.
    pub(crate) fn write_cache(&self) -> bool {
        WriteCache(self.value(id::VOLATILE_WRITE_CACHE)).wce()
    }

    /// The events that the host enabled.
    pub(crate) fn event_config(&self) -> EventConfig {
        EventConfig(self.value(id::ASYNC_EVENT))
    }

    /// Whether the host enabled retry delays.
    pub(crate) fn acre(&self) -> bool {
        self.data.get(&id::HOST_BEHAVIOR).is_some_and(|d| d[behavior::ACRE] != 0)
    }

    /// The keep-alive timeout; `None` if disabled.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        let milliseconds = self.value(id::KEEP_ALIVE);
        (milliseconds != 0).then(|| Duration::from_millis(milliseconds.into()))
    }

    /// Whether a temperature is past its threshold.
    pub(crate) fn is_hot(&self, kelvins: u16) -> bool {
        let hot = feature::TemperatureThreshold(self.value(id::TEMPERATURE_THRESHOLD)).kelvins();
        kelvins >= hot || kelvins <= self.cold
    }

    /// The dword of a feature; `dw11` selects where there are several.
    pub(crate) fn get(&self, fid: u8, select: Select, dw11: u32) -> Result<u32, Status> {
        let kind = self.kind(fid)?;
        if fid == id::NUMBER_OF_QUEUES && select != Select::Supported {
            return Ok(self.granted.0);
        }
        if fid == id::TEMPERATURE_THRESHOLD && feature::TemperatureThreshold(dw11).kind() == 1 {
            return Ok(u32::from(self.cold));
        }
        Ok(match select {
            Select::Current => self.value(fid),
            Select::Default => kind.standard,
            Select::Saved => self.saved.get(&fid).copied().unwrap_or(kind.standard),
            Select::Supported => u32::from(kind.saveable) | u32::from(kind.changeable) << 2,
        })
    }

    /// Checks a Set Features command before anything is changed.
    pub(crate) fn check_set(&self, fid: u8, save: bool, nsid: u32, dw11: u32) -> Result<(), Status> {
        let kind = self.kind(fid)?;
        if save && !kind.saveable {
            return Err(Status::FEATURE_NOT_SAVEABLE.with_dnr());
        }
        if nsid != 0 && nsid != onehop_proto::admin::ALL_NAMESPACES {
            return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC.with_dnr());
        }
        if !kind.changeable {
            return Err(Status::FEATURE_NOT_CHANGEABLE.with_dnr());
        }
        if dw11 & !kind.known != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        Ok(())
    }

    /// Sets the dword of a feature; returns the command's result.
    pub(crate) fn set(&mut self, fid: u8, save: bool, dw11: u32) -> Result<u32, Status> {
        match fid {
            id::NUMBER_OF_QUEUES => {
                let asked = Queues(dw11);
                if asked.sqs_z() == u16::MAX || asked.cqs_z() == u16::MAX {
                    return Err(Status::INVALID_FIELD.with_dnr());
                }
                return Ok(self.granted.0);
            }
            id::TEMPERATURE_THRESHOLD => {
                let asked = feature::TemperatureThreshold(dw11);
                if asked.kind() > 1 || asked.sensor() != 0 {
                    return Err(Status::INVALID_FIELD.with_dnr());
                }
                if asked.kind() == 1 {
                    self.cold = asked.kelvins();
                    return Ok(0);
                }
            }
            id::KEEP_ALIVE => {
                let rounded = dw11.checked_next_multiple_of(KEEP_ALIVE_STEP);
                let timeout = rounded.ok_or(Status::KEEP_ALIVE_INVALID.with_dnr())?;
                self.current.insert(fid, timeout);
                return Ok(0);
            }
            id::POWER_MANAGEMENT if feature::PowerManagement(dw11).ps() > crate::admin::LAST_POWER_STATE => {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
            _ => {}
        }
        self.current.insert(fid, dw11);
        if save {
            self.saved.insert(fid, dw11);
        }
        Ok(0)
    }

    /// Size of a feature's data structure, if it has one.
    pub(crate) fn data_bytes(fid: u8, dw11: u32) -> Option<usize> {
        match fid {
            id::APST => Some(feature::Apst::TABLE_BYTES),
            id::TIMESTAMP => Some(8),
            id::HOST_BEHAVIOR => Some(behavior::BYTES),
            id::HOST_ID => Some(if dw11 & 1 != 0 { 16 } else { 8 }),
            _ => None,
        }
    }

    /// The data structure of a feature.
    pub(crate) fn get_data(&self, fid: u8, bytes: usize) -> Vec<u8> {
        let mut data = self.data.get(&fid).cloned().unwrap_or_default();
        data.resize(bytes, 0);
        data
    }

    /// Sets the data structure of a feature.
    pub(crate) fn set_data(&mut self, fid: u8, data: Vec<u8>) -> Result<(), Status> {
        if fid == id::HOST_BEHAVIOR && data.first().is_some_and(|acre| *acre > 1) {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        self.data.insert(fid, data);
        Ok(())
    }
}
