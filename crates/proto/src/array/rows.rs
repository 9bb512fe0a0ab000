//! Rows of an array, read and written by threads that act on their own and hold one pin at a time.

use super::{ArrayError, Backing, GatherJob, PageCache};
use crate::GpuAddr;
use crate::queue::Memory;

/// Reads the items `first`, `first + stride` … of a job into its buffer, one after the other.
#[inline(always)]
pub fn read_rows<M: Memory<Addr = GpuAddr>, B: Backing<M>>(
    mem: &M,
    array: &PageCache<M, B>,
    job: &GatherJob,
    (first, stride): (u32, u32),
) {
    each_row(mem, job, (first, stride), |row, to, deadline| {
        each_part(mem, array, job, (row, deadline), |byte, done, bytes| {
            let pin = array.pin(mem, byte)?;
            copy(mem, pin.address(), to.plus(u64::from(done)), bytes);
            Ok(())
        })
    });
}

/// Writes the items `first`, `first + stride` … of a job from its buffer, one after the other.
#[inline(always)]
pub fn write_rows<M: Memory<Addr = GpuAddr>, B: Backing<M>>(
    mem: &M,
    array: &PageCache<M, B>,
    job: &GatherJob,
    (first, stride): (u32, u32),
) {
    each_row(mem, job, (first, stride), |row, from, deadline| {
        each_part(mem, array, job, (row, deadline), |byte, done, bytes| {
            let pin = array.pin_mut(mem, byte)?;
            copy(mem, from.plus(u64::from(done)), pin.address(), bytes);
            Ok(())
        })
    });
}

/// Calls `f` with the row of each item, its place in the buffer, and the time after which no part of a row is begun. Stores
/// the result in the item's answer.
#[inline(always)]
fn each_row<M: Memory<Addr = GpuAddr>>(
    mem: &M,
    job: &GatherJob,
    (first, stride): (u32, u32),
    mut f: impl FnMut(u64, GpuAddr, u64) -> Result<(), ArrayError>,
) {
    let deadline = mem.now().saturating_add(job.limit);
    let mut item = first;
    while item < job.count {
        let (row, to) = job.item(mem, item);
        let place = job.out.plus(u64::from(to) * u64::from(job.row_bytes));
        let done = if row >= job.rows { Err(ArrayError::Range) } else { f(row, place, deadline) };
        let code = match done {
            Ok(()) => 0,
            Err(error) => error.code(),
        };
        mem.store(job.answers.plus(u64::from(to) * 4), code as u32);
        item = item.saturating_add(if stride == 0 { 1 } else { stride });
    }
}

/// Calls `f` with each part of a row that is in one page: its first byte in the array and in the row, and its length. A row
/// may have thousands of parts, so the time is checked for each.
#[inline(always)]
fn each_part<M: Memory<Addr = GpuAddr>, B: Backing<M>>(
    mem: &M,
    array: &PageCache<M, B>,
    job: &GatherJob,
    (row, deadline): (u64, u64),
    mut f: impl FnMut(u64, u32, u32) -> Result<(), ArrayError>,
) -> Result<(), ArrayError> {
    let page_bytes = 1u32 << array.page_shift(mem);
    let mut done = 0;
    while done < job.row_bytes {
        if mem.now() >= deadline {
            return Err(ArrayError::TimedOut);
        }
        let byte = row * u64::from(job.stride) + u64::from(done);
        let (room, left) = (page_bytes - (byte as u32 & (page_bytes - 1)), job.row_bytes - done);
        let bytes = if room < left { room } else { left };
        f(byte, done, bytes)?;
        done += bytes;
    }
    Ok(())
}

#[inline(always)]
fn copy<M: Memory<Addr = GpuAddr>>(mem: &M, from: GpuAddr, to: GpuAddr, bytes: u32) {
    let (mut at, bytes) = (0, u64::from(bytes));
    while at < bytes {
        mem.store(to.plus(at), mem.load(from.plus(at)));
        at += 4;
    }
}
