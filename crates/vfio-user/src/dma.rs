//! The memory that a client shares, piece by piece.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;

use onehop_os::HostMem;
use rustix::io::Errno;

use crate::error::Refusal;
use crate::model::{Model, Reach};
use crate::version::{MAX_MAPS, PAGE};
use crate::wire::{DmaMap, DmaUnmap};

struct Piece {
    bytes: u64,
    _reach: Reach,
}

/// Every piece, by where the device finds it. They do not overlap.
#[derive(Default)]
pub(crate) struct Shared(BTreeMap<u64, Piece>);

impl Shared {
    /// A new piece; without a file descriptor it is something that the device cannot reach.
    pub(crate) fn add(
        &mut self,
        model: &dyn Model,
        ask: &DmaMap,
        fd: Option<OwnedFd>,
    ) -> Result<(), Refusal> {
        self.check(ask)?;
        let memory = fd.map(|fd| memory(ask, fd)).transpose()?;
        let reach = model.reach(ask.at, ask.bytes, memory).map_err(Refusal::invalid)?;
        self.0.insert(ask.at, Piece { bytes: ask.bytes, _reach: reach });
        Ok(())
    }

    fn check(&self, ask: &DmaMap) -> Result<(), Refusal> {
        if self.0.len() >= MAX_MAPS {
            return Err(Refusal {
                errno: Errno::NOSPC,
                why: format!("more than {MAX_MAPS} pieces of memory"),
            });
        }
        if ![ask.at, ask.bytes, ask.offset].iter().all(|part| part.is_multiple_of(PAGE)) {
            let why = format!(
                "{:#x} bytes at {:#x}, file offset {:#x}: no whole pages",
                ask.bytes, ask.at, ask.offset
            );
            return Err(Refusal::invalid(why));
        }
        let last = ask.at + (ask.bytes - 1);
        let before = self.0.range(..=last).next_back();
        if let Some((at, _)) = before.filter(|(at, piece)| *at + (piece.bytes - 1) >= ask.at) {
            let why = format!("{:#x} bytes at {:#x} overlap what is shared at {at:#x}", ask.bytes, ask.at);
            return Err(Refusal { errno: Errno::EXIST, why });
        }
        Ok(())
    }

    /// Takes back every piece that lies in a range. None is taken apart; that there is none is no error, as clients
    /// take back what they never shared.
    pub(crate) fn remove(&mut self, ask: &DmaUnmap) -> Result<(), Refusal> {
        if ask.all {
            self.0.clear();
            return Ok(());
        }
        let Some(last) = ask.bytes.checked_sub(1).map(|more| ask.at.saturating_add(more)) else {
            return Err(Refusal::invalid("no bytes are taken back"));
        };
        let before = self.0.range(..ask.at).next_back();
        let cut = before.filter(|(at, piece)| *at + (piece.bytes - 1) >= ask.at);
        let cut = cut
            .or_else(|| self.0.range(ask.at..=last).next_back().filter(|(at, p)| *at + (p.bytes - 1) > last));
        if let Some((at, _)) = cut {
            return Err(Refusal::invalid(format!(
                "{:#x} bytes at {:#x} cut the piece at {at:#x}",
                ask.bytes, ask.at
            )));
        }
        let gone: Vec<u64> = self.0.range(ask.at..=last).map(|(at, _)| *at).collect();
        for at in gone {
            self.0.remove(&at);
        }
        Ok(())
    }

    /// Takes everything back.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// Maps the client's memory. Only ordinary files and memfds: how long they are can be checked.
fn memory(ask: &DmaMap, fd: OwnedFd) -> Result<HostMem, Refusal> {
    let file = File::from(fd);
    let what = file.metadata().map_err(|e| Refusal::invalid(format!("fstat of the memory's file: {e}")))?;
    let bytes = usize::try_from(ask.bytes).map_err(|_| Refusal::invalid("more memory than can be mapped"))?;
    if !what.is_file() || what.len() < ask.offset + ask.bytes {
        let why =
            format!("{bytes:#x} bytes from {:#x} on do not lie in the file that came along", ask.offset);
        return Err(Refusal::invalid(why));
    }
    let mapped = HostMem::of_file_range(&file, ask.offset, bytes, ask.writable);
    mapped.map_err(|e| Refusal { errno: Errno::NOMEM, why: e.to_string() })
}
