//! Queues for other people's kernels: the host exports a queue, and goes on monitoring it.
//!
//! Kernels get a handle in GPU memory, which `onehop_proto::kernel::DeviceQueue` works with: a queue pair in shared mode,
//! one namespace, and one data buffer with prebuilt PRP lists. A thread here monitors the controller and the lost commands
//! that the kernels' threads report. It closes the gate, recovers the controller by the time-out ladder, and opens the gate
//! to the next life of the queue. Kernels meanwhile wait, each command within its own deadline.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_gpu::{Place, Region};
use onehop_proto::kernel::Handle;
use onehop_proto::prp::{PrebuiltPrpLists, PrpError};
use onehop_proto::{BusAddr, GpuAddr};

use super::cell::UNSEEN;
use super::gate::HostGate;
use super::{GpuMode, GpuQueues, poison};
use crate::command::max_blocks;
use crate::drive::DriveInner;
use crate::durability::Writes;
use crate::ring::Dma;
use crate::slots::retry_delays;
use crate::{Buffer, Error, Namespace, Result};

/// How often the controller is polled.
const TICK: Duration = Duration::from_micros(500);
/// Ticks between two reads of the count of unexpected completions, which may be in the GPU's memory.
const UNEXPECTED_TICKS: u32 = 8;
/// How long threads may take to come out when the queue is revoked. They poll the gate all the time; this is for a machine
/// that is very busy.
const PATIENCE: Duration = Duration::from_secs(10);

const UNEXPECTED: &str = "a completion in an exported queue for a command that was not in flight";

/// The offset behind the handle of the words in which threads count themselves in; on a cache line of their own.
const INSIDE: usize = (Handle::BYTES as usize).next_multiple_of(128);
const TABLES: usize = INSIDE + 128;

/// A queue that other people's kernels may use, with a namespace and data memory. Dropping it stops them and revokes it.
pub struct ExportedQueue {
    watch: Arc<ExportWatch>,
    thread: Option<JoinHandle<()>>,
    ended: bool,
}

/// Everything that must live as long as kernels may use the handle.
struct ExportWatch {
    queues: GpuQueues,
    gate: Arc<HostGate>,
    memory: Arc<ExportMemory>,
    ns: Namespace,
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
    // Doorbells are relayed all the time: the host does not know when kernels run.
    _expect: Box<dyn Send + Sync>,
}

struct ExportMemory {
    /// The handle, the count of threads, the tables of bus addresses.
    handle: Region,
    _lists: Dma,
    _data: Buffer,
}

impl GpuQueues {
    /// Exports the queue to other people's kernels, which may read blocks of a namespace into a buffer, and write them from
    /// it if `writable`. Blocks move as the namespace is formatted, with all of their metadata. The queue must be in shared
    /// mode. After `stall` a command counts as lost; `limit` bounds a command with all its tries.
    ///
    /// # Errors
    /// When it is in owner mode, the drive is open for reading only or the namespace has protection information and it is
    /// to be written, the buffer cannot be described page by page, or data or completions lie in the memory of a GPU, this
    /// one or another, that does not order other devices' writes for running kernels of this one.
    pub fn export(self, ns: &Namespace, data: &Buffer, writable: bool) -> Result<ExportedQueue> {
        let drive = self.drive.clone();
        if writable {
            drive.allow_writes()?;
            // Its commands move blocks as the namespace is formatted, and nothing would generate their protection
            // information.
            if ns.format.pi != 0 {
                let (drive, nsid, kind) = (drive.name().to_owned(), ns.nsid, ns.format.pi);
                return Err(Error::Protected { drive, nsid, kind });
            }
        }
        ns.check(&drive.control)?;
        data.belongs(&drive.control)?;
        let refuse = |why: &str| Error::Unsupported { drive: drive.name().to_owned(), why: why.into() };
        if self.setup.mode == GpuMode::Owner {
            return Err(refuse("only a queue in shared mode can be exported"));
        }
        if ns.medium.has_separate_metadata() {
            return Err(refuse(
                "GPU-driven transfers do not carry separate metadata; format the namespace without, or extended",
            ));
        }
        if self.setup.placement.cq == Place::Vram && self.gpu.own_memory() {
            self.cell.completion_queues().into_iter().try_for_each(|cq| self.gpu.orders_device_writes(cq))?;
        }
        if data.host().is_err() {
            // It may be memory of another GPU, which then decides.
            let unknown = || {
                refuse("which GPU owns its data memory is unknown, and so is whether that GPU orders writes")
            };
            self.gpu.orders_device_writes(data.memory().gpu_addr().ok_or_else(unknown)?)?;
        }
        let expect = self.gpu.expect_kernels();
        let (memory, handle) = describe(&self, ns, data)?;
        let inside = memory.handle.slice(INSIDE..INSIDE + 128)?;
        let account = writable.then(|| ns.account.clone());
        let gate = HostGate::new(self.cell.signals().clone(), inside, account);
        self.cell.set_gate(Some(gate.clone()));
        let queues = {
            let mut state = drive.alive()?;
            // Delete queues that were left with commands in flight, or created without a gate.
            if !self.cell.delete(&drive, &mut state)? {
                drive.reset(&mut state, UNSEEN)?;
            }
            self.cell.ensure(&drive, &mut state, ns, None)?
        };
        let Some(queue) = queues.first() else { return Err(refuse("it has no queue")) };
        let handle = Handle {
            sq: queue.sq.0,
            cq: queue.cq.0,
            sq_door: queue.sq_door.0,
            cq_door: queue.cq_door.0,
            control: queue.control.0,
            sq_entries: queue.sq_entries,
            cq_entries: queue.cq_entries,
            writable: u32::from(writable),
            ..handle
        };
        let bytes: Vec<u8> = handle.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.handle.write(0, &bytes)?;
        let watch = Arc::new(ExportWatch {
            queues: self,
            gate,
            memory: Arc::new(memory),
            ns: ns.clone(),
            stop: AtomicBool::new(false),
            failure: Mutex::default(),
            _expect: expect,
        });
        let mut exported = ExportedQueue { watch: watch.clone(), thread: None, ended: false };
        let thread = std::thread::Builder::new().name("exported queue".into()).spawn(move || watch.run());
        exported.thread =
            Some(thread.map_err(|e| Error::Gpu(format!("a thread could not be started: {e}")))?);
        Ok(exported)
    }
}

/// The memory that an exported queue needs, and its handle without the queue's own fields.
fn describe(queues: &GpuQueues, ns: &Namespace, data: &Buffer) -> Result<(ExportMemory, Handle)> {
    let (drive, setup) = (&*queues.drive, &queues.setup);
    let page_shift = drive.control.page_shift;
    let prebuilt = PrebuiltPrpLists::new(page_shift);
    let pages = page_addresses(data, page_shift)?;
    let lists = write_lists(drive, prebuilt, &pages)?;
    let list_pages = list_addresses(&lists, prebuilt.list_pages(pages.len() as u64), page_shift)?;
    let pages_at = TABLES + list_pages.len() * 8;
    let handle = queues.gpu.alloc(Place::Vram, pages_at + pages.len() * 8)?;
    handle.write(TABLES, &le_bytes(&list_pages))?;
    handle.write(pages_at, &le_bytes(&pages))?;
    let limit = drive.identity().max_transfer.min(prebuilt.most_bytes());
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let at = |offset: usize| handle.addr().plus(offset as u64).0;
    let words = Handle {
        signals: queues.cell.signals().addr().0,
        inside: at(INSIDE),
        lists: at(TABLES),
        pages: at(pages_at),
        bytes: data.bytes(),
        blocks: ns.blocks,
        nsid: ns.nsid,
        // A block of a transfer takes at most 64 KiB and its metadata: it fits.
        block_bytes: ns
            .medium
            .transfer_bytes(1)
            .and_then(|bytes| u32::try_from(bytes).ok())
            .unwrap_or(u32::MAX),
        most_blocks: max_blocks(&ns.medium, limit),
        page_shift,
        retries: drive.options.retries,
        retry_delay: retry_delays(drive).map(nanos),
        stall: nanos(setup.stall),
        limit: nanos(setup.limit),
        ..Handle::default()
    };
    Ok((ExportMemory { handle, _lists: lists, _data: data.clone() }, words))
}

fn le_bytes(table: &[u64]) -> Vec<u8> {
    table.iter().flat_map(|at| at.to_le_bytes()).collect()
}

/// The bus address of each page of a buffer.
fn page_addresses(data: &Buffer, page_shift: u32) -> Result<Vec<u64>> {
    let page = 1u64 << page_shift;
    let count = data.bytes().div_ceil(page);
    (0..count)
        .map(|index| {
            let need = page.min(data.bytes() - index * page);
            let run = data.at(index * page).filter(|run| run.len >= need && run.addr.0 & (page - 1) == 0);
            run.map(|run| run.addr.0).ok_or(Error::Prp(PrpError::PageOffset { index }))
        })
        .collect()
}

/// Prebuilt PRP lists for these pages, in memory that the controller reaches.
fn write_lists(drive: &DriveInner, prebuilt: PrebuiltPrpLists, pages: &[u64]) -> Result<Dma> {
    let page_shift = drive.control.page_shift;
    let count = prebuilt.list_pages(pages.len() as u64).max(1);
    let lists = Dma::alloc(&*drive.control.port.mapper, (count << page_shift) as usize, page_shift)?;
    for list in 0..count {
        let of = prebuilt.entries(list);
        let end = (of.end as usize).min(pages.len());
        let entries = pages.get(of.start as usize..end).unwrap_or_default();
        lists.mem.write((list << page_shift) as usize, &le_bytes(entries))?;
    }
    Ok(lists)
}

fn list_addresses(lists: &Dma, count: u64, page_shift: u32) -> Result<Vec<u64>> {
    (0..count)
        .map(|list| {
            let run = lists.map.at(list << page_shift).filter(|run| run.len >> page_shift > 0);
            let BusAddr(at) = run.map_or(BusAddr(u64::MAX), |run| run.addr);
            if at & ((1 << page_shift) - 1) == 0 {
                Ok(at)
            } else {
                Err(Error::Prp(PrpError::ListOffset { list_page: list as u32 }))
            }
        })
        .collect()
}

impl ExportWatch {
    /// Monitors the queue until it is revoked.
    fn run(&self) {
        let mut turn = 0u32;
        while !self.stop.load(Ordering::Acquire) {
            std::thread::sleep(TICK);
            turn = turn.wrapping_add(1);
            if let Err(error) = self.check_and_recover(turn.is_multiple_of(UNEXPECTED_TICKS)) {
                self.give_up(error);
                return;
            }
        }
    }

    /// Checks the controller once, and recovers it if something is wrong.
    fn check_and_recover(&self, reads_unexpected: bool) -> Result<()> {
        let (queues, drive) = (&self.queues, &self.queues.drive);
        self.ns.check(&drive.control)?;
        let cause = if !drive.control.status().is_ok_and(|status| !status.cfs()) {
            Some(("a controller that failed while a queue was exported", false))
        } else if reads_unexpected && queues.cell.has_unexpected_completions()? {
            Some((UNEXPECTED, false))
        } else if self.gate.has_lost()? {
            Some(("a command in an exported queue that was not completed", true))
        } else {
            None
        };
        if let Some((cause, polite)) = cause {
            queues.recover(cause.to_owned(), polite)?;
        }
        if queues.cell.taken_by().is_some() {
            let mut state = drive.alive()?;
            queues.cell.ensure(drive, &mut state, &self.ns, None)?;
        } else if let Ok(mut state) = drive.admin.try_lock() {
            // Events are only noted here: they are handled when the caller asks for events.
            state.admin.look();
        }
        Ok(())
    }

    /// Ends the monitoring of this queue after an error.
    fn give_up(&self, error: Error) {
        self.shut(poison::FAILED);
        *self.failure.lock().unwrap_or_else(|e| e.into_inner()) = Some(error);
    }

    fn shut(&self, code: u32) {
        self.gate.shut();
        self.queues.cell.poison(code);
    }

    /// Waits until no thread is inside any more; the queue must be shut. Returns whether that happened in time.
    fn is_empty_in_time(&self, patience: Duration) -> bool {
        let start = Instant::now();
        while self.gate.is_busy() {
            if start.elapsed() >= patience {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }
}

impl ExportedQueue {
    /// The handle's address, for kernels of the queue's GPU. They must have ended before this is dropped, which frees
    /// the memory.
    #[must_use]
    pub fn handle(&self) -> GpuAddr {
        self.watch.memory.handle.addr()
    }

    /// How often the queue's commands were taken from the controller since the export.
    #[must_use]
    pub fn recoveries(&self) -> u32 {
        self.watch.gate.epoch() - 1
    }

    /// Fails once the host has stopped monitoring this queue.
    ///
    /// # Errors
    /// The reason: the drive is dead, its namespace has changed, or threads did not come out for a recovery.
    pub fn check(&self) -> Result<()> {
        match &*self.watch.failure.lock().unwrap_or_else(|e| e.into_inner()) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Ends every present and future call of a kernel with `Stopped`, so that kernels end.
    pub fn stop(&self) {
        self.watch.shut(poison::OVER);
    }

    /// Revokes the queue. No kernel may use the handle any more. Afterwards the controller no longer uses its commands.
    ///
    /// # Errors
    /// When threads did not come out, or the drive is dead: the memory stays allocated then. Where threads did not come out,
    /// the queue's number is given to no other queue of this drive either: they may still ring its doorbells.
    pub fn revoke(mut self) -> Result<()> {
        self.end(PATIENCE, false)
    }

    /// Abandons the queue because kernels may still call it: every call ends with `Stopped`. As when threads did not
    /// come out, the handle stays allocated, no other queue gets the queue's number, acknowledged writes count as lost
    /// after a power loss, and the drive stays open until the process ends.
    pub fn abandon(mut self) {
        // An error would only say that threads may come in, which is known.
        let _ = self.end(Duration::ZERO, true);
    }

    /// `called`: kernels may call the queue later, even if no thread is inside now.
    fn end(&mut self, patience: Duration, called: bool) -> Result<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        let watch = &self.watch;
        watch.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has stopped recovering: the queue ends in the same way.
            let _ = thread.join();
        }
        watch.shut(poison::OVER);
        let empty = watch.is_empty_in_time(patience) && !called;
        watch.gate.count();
        let (drive, cell) = (&watch.queues.drive, &watch.queues.cell);
        cell.set_gate(None);
        if !empty {
            // They may still use all of it when they continue, and get writes acknowledged, which flushes learn from
            // the gate.
            std::mem::forget((watch.memory.clone(), watch.gate.clone()));
            watch.gate.leave_threads_inside();
            cell.abandon(drive);
            return Err(Error::Gpu(format!(
                "threads of a kernel did not leave an exported queue within {patience:?}; its memory and number stay theirs"
            )));
        }
        let mut state = drive.state();
        if state.dead.is_none() {
            let cause = match cell.has_unexpected_completions() {
                Ok(true) => Some(UNEXPECTED),
                Ok(false) => match cell.delete(drive, &mut state) {
                    Ok(true) => None,
                    Ok(false) => Some(UNSEEN),
                    Err(_) => Some("an exported queue that could not be deleted"),
                },
                // Kernels that were killed may have left half an entry, or rung a doorbell unnoticed.
                Err(_) => Some("an exported queue whose GPU does not answer any more"),
            };
            // The result is in the state.
            cause.map(|cause| drive.reset(&mut state, cause));
        }
        match &state.dead {
            None => Ok(()),
            Some(error) => {
                drive.quarantine.keep(watch.memory.clone());
                Err(error.clone())
            }
        }
    }
}

impl Drop for ExportedQueue {
    fn drop(&mut self) {
        // There is no caller to report an error to.
        let _ = self.end(PATIENCE, false);
    }
}

#[cfg(test)]
mod tests {
    use onehop_gpu::Emulated;
    use onehop_proto::kernel::tally;

    use super::*;
    use crate::gpu::{GpuSetup, Placement};
    use crate::{Drive, Options};

    #[test]
    fn writes_of_threads_that_did_not_leave_can_be_lost() {
        for is_known in [true, false] {
            write_of_a_thread_inside(is_known);
        }
    }

    /// A thread that is left behind gets a write acknowledged; the account learns of it before the power loss, or does
    /// not.
    fn write_of_a_thread_inside(is_known: bool) {
        let sim = onehop_sim::open("mem:1M?vwc=1").unwrap();
        let drive = Drive::open(sim.port(), Options { writable: true, ..Options::default() }).unwrap();
        let (ns, gpu) = (drive.namespace(1).unwrap(), Arc::new(Emulated::new()));
        let (_region, data) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        let setup = GpuSetup { mode: GpuMode::Shared { threads: 1 }, ..GpuSetup::new(Placement::TIER1) };
        let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
        let mut left = queues.export(ns, &data, true).unwrap();
        let handle = left.watch.memory.handle.clone();
        handle.write(INSIDE + tally::INSIDE as usize, &1u32.to_le_bytes()).unwrap();
        left.end(Duration::from_millis(20), false).unwrap_err();
        drop(left);
        let count = || handle.write(INSIDE + tally::WRITES as usize, &1u32.to_le_bytes()).unwrap();
        let queue = drive.queue().unwrap();
        if is_known {
            count();
        }
        sim.power_cycle();
        let end = queue.flush(ns);
        assert!(matches!(end, Err(Error::WritesLost { .. })), "{is_known}: {end:?}");
    }

    #[test]
    fn the_number_of_a_queue_that_threads_did_not_leave_is_not_used_again() {
        leave_a_queue(true);
        leave_a_queue(false);
    }

    /// Queues are exported after a thread was left in one, or may call one later.
    fn leave_a_queue(is_inside: bool) {
        let sim = onehop_sim::open("mem:1M?queues=3").unwrap();
        let drive = Drive::open(sim.port(), Options::default()).unwrap();
        let gpu = Arc::new(Emulated::new());
        let (_region, data) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
        let setup = GpuSetup { mode: GpuMode::Shared { threads: 1 }, ..GpuSetup::new(Placement::TIER1) };
        let export = || {
            let queues = drive.gpu_queues(gpu.clone(), setup).unwrap();
            queues.export(drive.namespace(1).unwrap(), &data, false).unwrap()
        };
        for _ in 0..4 {
            export().revoke().unwrap();
        }
        if is_inside {
            let mut left = export();
            // A thread that has gone in, and does nothing more.
            left.watch.memory.handle.write(INSIDE, &1u32.to_le_bytes()).unwrap();
            let end = left.end(Duration::from_millis(20), false);
            assert!(matches!(end, Err(Error::Gpu(_))), "{end:?}");
        } else {
            export().abandon();
        }
        drive.reset().unwrap();
        let others = [drive.queue().unwrap(), drive.queue().unwrap()];
        assert_eq!(others.each_ref().map(|queue| queue.id()), [2, 3]);
        assert!(matches!(drive.queue(), Err(Error::NoQueue { granted: 3, .. })));
        drop(others);
        assert_eq!(sim.violations(), []);
    }
}
