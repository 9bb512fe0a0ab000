//! Get Features and Set Features.

use onehop_proto::admin::{GetFeatures, Select, SetFeatures};
use onehop_proto::feature::{HostMemory, HostMemoryEntry, id};
use onehop_proto::{Sqe, Status};

use crate::device::ControllerState;
use crate::exec::{CommandFailure, CommandResult};
use crate::features::Features;
use crate::violation::Rule;

/// Bytes of Get Features data about the host memory buffer.
const HMB_ATTRIBUTES: usize = 4096;
/// Maximum entries of a host memory descriptor list.
const HMB_ENTRIES: u32 = 4096;

impl ControllerState {
    pub(super) fn get_features(&mut self, sqe: &Sqe) -> CommandResult {
        let ask = GetFeatures::from(sqe);
        let select = ask.select.ok_or(Status::INVALID_FIELD.with_dnr())?;
        let value = self.features.get(ask.fid, select, ask.dw11)?;
        if select == Select::Supported {
            return Ok(value);
        }
        if ask.fid == id::HOST_MEMORY_BUFFER {
            let mut data = vec![0; HMB_ATTRIBUTES];
            for (bytes, dword) in
                data.chunks_exact_mut(4).zip(&self.features.host_memory_setting.encode()[1..])
            {
                bytes.copy_from_slice(&dword.to_le_bytes());
            }
            self.send(0, sqe, &data)?;
        } else if let Some(bytes) = Features::data_bytes(ask.fid, value) {
            let data = self.features.get_data(ask.fid, bytes);
            self.send(0, sqe, &data)?;
        }
        Ok(value)
    }

    pub(super) fn set_features(&mut self, sqe: &Sqe) -> CommandResult {
        let ask = SetFeatures::from(sqe);
        self.features.check_set(ask.fid, ask.save, ask.nsid, ask.dw11)?;
        if ask.fid == id::NUMBER_OF_QUEUES {
            self.check_no_queues()?;
        }
        if ask.fid == id::HOST_MEMORY_BUFFER {
            self.set_host_memory(sqe)?;
        }
        if let Some(bytes) = Features::data_bytes(ask.fid, ask.dw11) {
            let mut data = vec![0; bytes];
            self.receive(0, sqe, &mut data)?;
            self.features.set_data(ask.fid, data)?;
        }
        let was_caching = self.features.write_cache();
        let result = self.features.set(ask.fid, ask.save, ask.dw11)?;
        if was_caching && !self.features.write_cache() {
            self.flush_all();
        }
        match ask.fid {
            id::TEMPERATURE_THRESHOLD => self.check_temperature(),
            id::KEEP_ALIVE => self.restart_keep_alive(),
            _ => {}
        }
        Ok(result)
    }

    fn check_no_queues(&self) -> Result<(), CommandFailure> {
        let exists =
            self.cqs.iter().skip(1).any(Option::is_some) || self.sqs.iter().skip(1).any(Option::is_some);
        if !exists {
            return Ok(());
        }
        self.breach(Rule::NumberOfQueuesLate, Some(0), "the number of queues was set while I/O queues exist");
        Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr().into())
    }

    /// Enables or disables the host memory buffer.
    fn set_host_memory(&mut self, sqe: &Sqe) -> Result<(), CommandFailure> {
        let dwords = [sqe.dw[11], sqe.dw[12], sqe.dw[13], sqe.dw[14], sqe.dw[15]];
        let ask = HostMemory::decode(&dwords);
        if !ask.enable {
            self.features.host_memory.clear();
            self.features.host_memory_setting = HostMemory::default();
            return Ok(());
        }
        if self.features.host_memory_setting.enable {
            return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr().into());
        }
        if ask.entries == 0 || ask.entries > HMB_ENTRIES || !ask.list.0.is_multiple_of(16) {
            return Err(Status::INVALID_FIELD.with_dnr().into());
        }
        let mut list = vec![0; ask.entries as usize * HostMemoryEntry::BYTES];
        let read = self.space.read(ask.list.0, &mut list);
        read.map_err(|at| self.transfer_failed(0, "host memory descriptor list", at))?;
        let page = 1u64 << self.regs.cc.page_shift();
        let mut extents = Vec::new();
        for entry in list.as_chunks().0.iter().map(HostMemoryEntry::decode) {
            if !entry.at.0.is_multiple_of(page) || entry.pages == 0 {
                return Err(Status::INVALID_FIELD.with_dnr().into());
            }
            extents.push((entry.at.0, entry.pages));
        }
        let total: u64 = extents.iter().map(|(_, pages)| u64::from(*pages)).sum();
        if total != u64::from(ask.pages) || total * page < u64::from(self.config.hmb) * 2048 {
            return Err(Status::INVALID_FIELD.with_dnr().into());
        }
        self.features.host_memory = extents;
        self.features.host_memory_setting = ask;
        (0..self.features.host_memory.len()).try_for_each(|i| self.touch_host_memory_extent(i))
    }

    /// Uses an extent of the host memory buffer, as a controller does at any time; `turn` selects the extent.
    pub(crate) fn touch_host_memory(&mut self, turn: usize) {
        if !self.features.host_memory.is_empty() {
            // A lost extent has been recorded; the current command is not affected.
            let _ = self.touch_host_memory_extent(turn % self.features.host_memory.len());
        }
    }

    /// Writes to both ends of an extent of the host memory buffer.
    fn touch_host_memory_extent(&mut self, i: usize) -> Result<(), CommandFailure> {
        let page = 1u64 << self.regs.cc.page_shift();
        let (at, pages) = self.features.host_memory[i];
        let end = at.wrapping_add(u64::from(pages) * page);
        for addr in [at, end.wrapping_sub(8)] {
            let put = self.space.write(addr, &addr.to_le_bytes());
            put.map_err(|at| self.transfer_failed(0, "host memory buffer", at))?;
        }
        Ok(())
    }
}
