//! The NVM command set.

use onehop_proto::format::check_range;
use onehop_proto::nvm::{self, DatasetManagement, Range, Rw, dsm, opcode};
use onehop_proto::{Status, admin};

use crate::device::ControllerState;
use crate::exec::{CommandFailure, CommandResult, DelayedTask, FetchedCommand};
use crate::late::LateData;
use crate::media::NamespaceMedia;
use crate::protect::{self, Protection};
use crate::transfer::TransferDirection;
use crate::violation::Rule;

/// The buffers of a transfer: what the data pointer covers, and separate metadata.
struct TransferLayout {
    blocks: u64,
    lba: usize,
    /// Metadata that follows each block's data.
    inline_meta: usize,
    /// Metadata in a separate buffer.
    split_meta: usize,
    /// Metadata on the medium; without the other two the host does not see it.
    ms: usize,
}

impl TransferLayout {
    fn transfer(&self) -> usize {
        self.blocks as usize * (self.lba + self.inline_meta)
    }

    fn data(&self) -> usize {
        self.blocks as usize * self.lba
    }

    fn meta(&self) -> usize {
        self.blocks as usize * self.ms
    }

    /// Separates metadata from interleaved data: `mixed` is what was transferred.
    fn split(&self, mixed: &[u8], data: &mut [u8], meta: &mut [u8]) {
        let step = self.lba + self.inline_meta;
        for (i, block) in mixed.chunks_exact(step).enumerate() {
            let (block_data, block_meta) = block.split_at(self.lba);
            data[i * self.lba..(i + 1) * self.lba].copy_from_slice(block_data);
            meta[i * self.inline_meta..(i + 1) * self.inline_meta].copy_from_slice(block_meta);
        }
    }

    /// Interleaves metadata with data.
    fn mix(&self, data: &[u8], meta: &[u8], mixed: &mut [u8]) {
        let step = self.lba + self.inline_meta;
        for (i, block) in mixed.chunks_exact_mut(step).enumerate() {
            let (block_data, block_meta) = block.split_at_mut(self.lba);
            block_data.copy_from_slice(&data[i * self.lba..(i + 1) * self.lba]);
            block_meta.copy_from_slice(&meta[i * self.inline_meta..(i + 1) * self.inline_meta]);
        }
    }
}

fn unrecovered(lba: u64) -> CommandFailure {
    CommandFailure { status: Status::UNRECOVERED_READ.with_dnr(), lba: Some(lba) }
}

fn medium_failed(_: std::io::Error) -> CommandFailure {
    Status::INTERNAL_ERROR.into()
}

impl ControllerState {
    /// Executes an I/O command.
    pub(crate) fn io(&mut self, command: &FetchedCommand) -> CommandResult {
        self.check_fields(command.sqid, &command.sqe)?;
        self.touch_host_memory(usize::from(command.sqe.cid()));
        match command.sqe.opcode() {
            opcode::FLUSH => self.io_flush(command.sqe.nsid()),
            opcode::DATASET_MANAGEMENT => self.dataset_management(command),
            _ => self.io_range(command),
        }?;
        Ok(0)
    }

    /// Whether an acknowledged write survives a power loss.
    fn is_durable(&self, fua: bool) -> bool {
        fua || !self.config.vwc || !self.features.write_cache()
    }

    fn known_namespace(&mut self, nsid: u32) -> Result<&mut NamespaceMedia, CommandFailure> {
        self.namespace(nsid).ok_or_else(|| Status::INVALID_NAMESPACE.with_dnr().into())
    }

    fn io_flush(&mut self, nsid: u32) -> Result<(), CommandFailure> {
        if nsid == admin::ALL_NAMESPACES {
            self.flush_all();
        } else {
            self.known_namespace(nsid)?.flush();
        }
        Ok(())
    }

    fn io_range(&mut self, command: &FetchedCommand) -> Result<(), CommandFailure> {
        let rw = Rw::decode(&command.sqe);
        let (lba, blocks) = (rw.lba, u64::from(rw.blocks));
        let ns = self.known_namespace(rw.nsid)?;
        if check_range(ns.blocks, lba, blocks).is_err() {
            return Err(CommandFailure { status: Status::LBA_OUT_OF_RANGE.with_dnr(), lba: Some(lba) });
        }
        let protection = self.protection(&rw)?;
        match rw.opcode {
            opcode::READ => self.read(command, &rw),
            opcode::WRITE => self.write(command, &rw),
            opcode::COMPARE => self.compare(command, &rw),
            opcode::WRITE_ZEROES => self.write_zeroes(&rw, protection.filter(|_| rw.pract)),
            opcode::WRITE_UNCORRECTABLE => {
                self.known_namespace(rw.nsid)?.spoil(lba, blocks);
                Ok(())
            }
            _ if protection.is_some_and(|p| p.checks()) => {
                let layout = self.layout(&rw);
                self.load(&rw, &layout, &mut Vec::new(), &mut Vec::new())
            }
            _ => {
                let bad = self.known_namespace(rw.nsid)?.bad_block(lba, blocks);
                bad.map_or(Ok(()), |lba| Err(unrecovered(lba)))
            }
        }
    }

    /// A command's protection information; `None` if the namespace has none; the fields are ignored then.
    fn protection(&self, rw: &Rw) -> Result<Option<Protection>, CommandFailure> {
        match self.config.pi {
            0 => Ok(None),
            kind => Ok(Some(Protection::new(kind, rw)?)),
        }
    }

    fn write_zeroes(&mut self, rw: &Rw, protection: Option<Protection>) -> Result<(), CommandFailure> {
        let (durable, layout) = (self.is_durable(rw.fua), self.layout(rw));
        let ns = self.known_namespace(rw.nsid)?;
        let Some(protection) = protection else {
            return ns.zero(rw.lba, layout.blocks, durable).map_err(medium_failed);
        };
        let (data, mut meta) = (vec![0; layout.data()], vec![0; layout.meta()]);
        protection.insert(&data, &mut meta, layout.lba, layout.ms);
        ns.write(rw.lba, &data, &meta, durable).map_err(medium_failed)
    }

    fn layout(&self, rw: &Rw) -> TransferLayout {
        let ms = usize::from(self.config.ms);
        // With PRACT, metadata that consists only of protection information does not reach the host.
        let hidden = self.config.pi != 0 && rw.pract && ms == protect::BYTES;
        let (inline_meta, split_meta) = match (hidden, self.config.ext) {
            (true, _) => (0, 0),
            (false, true) => (ms, 0),
            (false, false) => (0, ms),
        };
        TransferLayout {
            blocks: u64::from(rw.blocks),
            lba: self.config.lba as usize,
            inline_meta,
            split_meta,
            ms,
        }
    }

    /// The metadata pointer, if there is a separate buffer.
    fn meta_pointer(
        &mut self,
        command: &FetchedCommand,
        layout: &TransferLayout,
    ) -> Result<Option<u64>, CommandFailure> {
        let mptr = command.sqe.mptr();
        if layout.split_meta == 0 {
            return Ok(None);
        }
        if !mptr.is_multiple_of(4) {
            let detail = format!("MPTR = {mptr:#x} is not aligned to a dword");
            self.breach(Rule::MetadataPointer, Some(command.sqid), detail);
            return Err(Status::INVALID_FIELD.with_dnr().into());
        }
        Ok(Some(mptr))
    }

    /// Reads blocks of the medium into the buffers: data or mixed data, and metadata; does the requested checks.
    fn load(
        &mut self,
        rw: &Rw,
        layout: &TransferLayout,
        mixed: &mut Vec<u8>,
        meta: &mut Vec<u8>,
    ) -> Result<(), CommandFailure> {
        let protection = self.protection(rw)?.filter(Protection::checks);
        let check = |data: &[u8], meta: &[u8]| {
            protection.map_or(Ok(()), |p| p.check(data, meta, layout.lba, layout.ms))
        };
        let ns = self.known_namespace(rw.nsid)?;
        if let Some(bad) = ns.bad_block(rw.lba, u64::from(rw.blocks)) {
            return Err(unrecovered(bad));
        }
        fit(meta, layout.meta());
        fit(mixed, layout.transfer());
        if layout.inline_meta == 0 {
            ns.read(rw.lba, mixed, meta).map_err(medium_failed)?;
            return check(mixed, meta);
        }
        let mut data = vec![0; layout.data()];
        ns.read(rw.lba, &mut data, meta).map_err(medium_failed)?;
        check(&data, meta)?;
        layout.mix(&data, meta, mixed);
        Ok(())
    }

    fn read(&mut self, command: &FetchedCommand, rw: &Rw) -> Result<(), CommandFailure> {
        let layout = self.layout(rw);
        let mptr = self.meta_pointer(command, &layout)?;
        let spans =
            self.find_spans(command.sqid, &command.sqe, layout.transfer(), TransferDirection::ToHost)?;
        let (mut mixed, mut meta) = (std::mem::take(&mut self.buffer), std::mem::take(&mut self.meta));
        let effects = command.effects.as_deref();
        let garbled = effects.and_then(|effects| effects.garbled);
        let from = Rw { lba: if garbled.is_some() { 0 } else { rw.lba }, ..*rw };
        let loaded = self.load(&from, &layout, &mut mixed, &mut meta);
        let done = loaded.and_then(|()| {
            if let Some(mptr) = mptr {
                let put = self.space.write(mptr, &meta);
                put.map_err(|at| self.transfer_failed(command.sqid, "metadata of a read", at))?;
            }
            if let (Some((wait, order)), None) = (effects.and_then(|effects| effects.torn), garbled) {
                let late = LateData::new(command.sqid, &spans, &mixed, wait, order, &mut self.rng);
                self.after(late.wait, DelayedTask::Data(late));
                return Ok(());
            }
            let put = self.scatter(&spans, &mixed);
            put.map_err(|at| self.transfer_failed(command.sqid, "data of a read", at))?;
            garbled.map_or(Ok(()), |status| Err(self.crd_allowed(command, status).into()))
        });
        (self.buffer, self.meta) = (mixed, meta);
        self.reuse_spans(spans);
        self.health.note_read(layout.data());
        done
    }

    /// Fetches the host's data of a write or compare into the buffers.
    fn fetch_data(
        &mut self,
        command: &FetchedCommand,
        layout: &TransferLayout,
        mixed: &mut Vec<u8>,
        meta: &mut Vec<u8>,
    ) -> Result<(), CommandFailure> {
        let mptr = self.meta_pointer(command, layout)?;
        fit(meta, layout.meta());
        fit(mixed, layout.transfer());
        self.receive(command.sqid, &command.sqe, mixed)?;
        if let Some(mptr) = mptr {
            let got = self.space.read(mptr, meta);
            got.map_err(|at| self.transfer_failed(command.sqid, "metadata of a write", at))?;
        }
        Ok(())
    }

    fn write(&mut self, command: &FetchedCommand, rw: &Rw) -> Result<(), CommandFailure> {
        let layout = self.layout(rw);
        let (mut mixed, mut meta) = (std::mem::take(&mut self.buffer), std::mem::take(&mut self.meta));
        let fetched = self.fetch_data(command, &layout, &mut mixed, &mut meta);
        let done = fetched.and_then(|()| {
            if layout.inline_meta == 0 {
                return self.store(rw, &layout, &mixed, &mut meta);
            }
            let mut data = vec![0; layout.data()];
            layout.split(&mixed, &mut data, &mut meta);
            self.store(rw, &layout, &data, &mut meta)
        });
        (self.buffer, self.meta) = (mixed, meta);
        self.health.note_write(layout.data());
        done
    }

    /// Writes blocks to the medium, with protection information inserted or checked as requested.
    fn store(
        &mut self,
        rw: &Rw,
        layout: &TransferLayout,
        data: &[u8],
        meta: &mut [u8],
    ) -> Result<(), CommandFailure> {
        match self.protection(rw)? {
            Some(protection) if rw.pract => protection.insert(data, meta, layout.lba, layout.ms),
            Some(protection) if protection.checks() => protection.check(data, meta, layout.lba, layout.ms)?,
            _ => {}
        }
        let durable = self.is_durable(rw.fua);
        self.known_namespace(rw.nsid)?.write(rw.lba, data, meta, durable).map_err(medium_failed)
    }

    fn compare(&mut self, command: &FetchedCommand, rw: &Rw) -> Result<(), CommandFailure> {
        let layout = self.layout(rw);
        let (mut host, mut host_meta) = (Vec::new(), Vec::new());
        self.fetch_data(command, &layout, &mut host, &mut host_meta)?;
        let (mut medium, mut medium_meta) = (Vec::new(), Vec::new());
        self.load(rw, &layout, &mut medium, &mut medium_meta)?;
        self.health.note_read(layout.data());
        if layout.split_meta == 0 {
            // Inline metadata was already compared with the data, and hidden metadata is the controller's own.
            medium_meta.clear();
            host_meta.clear();
        }
        if host == medium && host_meta == medium_meta {
            Ok(())
        } else {
            Err(CommandFailure { status: Status::COMPARE_FAILURE.with_dnr(), lba: Some(rw.lba) })
        }
    }

    fn dataset_management(&mut self, command: &FetchedCommand) -> Result<(), CommandFailure> {
        let dm = DatasetManagement::from(&command.sqe);
        let blocks = self.known_namespace(dm.nsid)?.blocks;
        let mut list = vec![0; dm.list_bytes() as usize];
        self.receive(command.sqid, &command.sqe, &mut list)?;
        if dm.attributes & dsm::DEALLOCATE == 0 {
            return Ok(());
        }
        let ranges: Vec<Range> = list.as_chunks().0.iter().map(nvm::Range::decode).collect();
        for range in ranges.iter().filter(|r| r.blocks != 0) {
            if check_range(blocks, range.lba, u64::from(range.blocks)).is_err() {
                return Err(CommandFailure {
                    status: Status::LBA_OUT_OF_RANGE.with_dnr(),
                    lba: Some(range.lba),
                });
            }
        }
        let ns = self.known_namespace(dm.nsid)?;
        for range in &ranges {
            // Deallocation goes to the medium at once: ranges may be far larger than any cache.
            ns.zero(range.lba, u64::from(range.blocks), true).map_err(medium_failed)?;
        }
        Ok(())
    }
}

/// Sets a buffer's length; its content is undefined.
fn fit(buffer: &mut Vec<u8>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0);
    } else {
        buffer.truncate(len);
    }
}
