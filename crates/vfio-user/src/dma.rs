//! The memory that a client shares.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;

use onehop_os::HostMem;
use rustix::io::Errno;

use crate::error::Refusal;
use crate::model::{DeviceModel, Reach};
use crate::version::{MAX_MAPS, PAGE};
use crate::wire::{DmaMap, DmaUnmap};

struct SharedRange {
    bytes: u64,
    _reach: Reach,
}

/// Every shared range, by bus address. They do not overlap.
#[derive(Default)]
pub(crate) struct SharedMemory(BTreeMap<u64, SharedRange>);

impl SharedMemory {
    /// Adds a range. Without a file descriptor the device cannot reach it.
    pub(crate) fn add(
        &mut self,
        model: &dyn DeviceModel,
        ask: &DmaMap,
        fd: Option<OwnedFd>,
    ) -> Result<(), Refusal> {
        self.check(ask)?;
        let memory = fd.map(|fd| memory(ask, fd)).transpose()?;
        let reach = model.reach(ask.at, ask.bytes, memory).map_err(Refusal::invalid)?;
        self.0.insert(ask.at, SharedRange { bytes: ask.bytes, _reach: reach });
        Ok(())
    }

    fn check(&self, ask: &DmaMap) -> Result<(), Refusal> {
        if self.0.len() >= MAX_MAPS {
            return Err(Refusal {
                errno: Errno::NOSPC,
                why: format!("more than {MAX_MAPS} ranges of memory"),
            });
        }
        if ![ask.at, ask.bytes, ask.offset].iter().all(|part| part.is_multiple_of(PAGE)) {
            let why = format!(
                "{:#x} bytes at {:#x}, file offset {:#x}: not whole pages",
                ask.bytes, ask.at, ask.offset
            );
            return Err(Refusal::invalid(why));
        }
        let last = ask.at + (ask.bytes - 1);
        let before = self.0.range(..=last).next_back();
        if let Some((at, _)) = before.filter(|(at, range)| *at + (range.bytes - 1) >= ask.at) {
            let why = format!("{:#x} bytes at {:#x} overlap what is shared at {at:#x}", ask.bytes, ask.at);
            return Err(Refusal { errno: Errno::EXIST, why });
        }
        Ok(())
    }

    /// Unshares every range within the given one. A partial overlap is refused; an empty match is not, because clients
    /// unshare ranges that they never shared.
    pub(crate) fn remove(&mut self, ask: &DmaUnmap) -> Result<(), Refusal> {
        if ask.all {
            self.0.clear();
            return Ok(());
        }
        let Some(last) = ask.bytes.checked_sub(1).map(|more| ask.at.saturating_add(more)) else {
            return Err(Refusal::invalid("unsharing an empty range"));
        };
        let before = self.0.range(..ask.at).next_back();
        let cut = before.filter(|(at, range)| *at + (range.bytes - 1) >= ask.at);
        let cut = cut
            .or_else(|| self.0.range(ask.at..=last).next_back().filter(|(at, p)| *at + (p.bytes - 1) > last));
        if let Some((at, _)) = cut {
            return Err(Refusal::invalid(format!(
                "{:#x} bytes at {:#x} cut the range at {at:#x}",
                ask.bytes, ask.at
            )));
        }
        let gone: Vec<u64> = self.0.range(ask.at..=last).map(|(at, _)| *at).collect();
        for at in gone {
            self.0.remove(&at);
        }
        Ok(())
    }

    /// Unshares everything.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// Maps the client's memory. Only regular files and memfds: their length can be checked.
fn memory(ask: &DmaMap, fd: OwnedFd) -> Result<HostMem, Refusal> {
    let file = File::from(fd);
    let what = file.metadata().map_err(|e| Refusal::invalid(format!("fstat of the memory's file: {e}")))?;
    let bytes = usize::try_from(ask.bytes).map_err(|_| Refusal::invalid("more memory than can be mapped"))?;
    if !what.is_file() || what.len() < ask.offset + ask.bytes {
        let why =
            format!("{bytes:#x} bytes from {:#x} on are not within the file that was passed", ask.offset);
        return Err(Refusal::invalid(why));
    }
    let mapped = HostMem::of_file_range(&file, ask.offset, bytes, ask.writable);
    mapped.map_err(|e| Refusal { errno: Errno::NOMEM, why: e.to_string() })
}
