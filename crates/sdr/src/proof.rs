//! The self-test of a receiver: every word of every buffer must be overwritten by samples. A setup without errors does
//! not prove that writes arrive, and one written word does not prove that its neighbours were written.

use std::time::{Duration, SystemTime};

use onehop_gpu::Region;
use onehop_os::{Deadline, DmaMemory, Marks};
use onehop_radio::{BUFFERS, regs};

use crate::rx::{Arrival, Receiver};
use crate::{Error, Result, Watch};

/// Rounds of the ring in which every buffer must arrive complete at least once.
const ROUNDS: u32 = 8;
/// Interval between calls of `watch`.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// Receives until every buffer was filled completely, with a time limit for each block.
pub(crate) fn prove(receiver: &mut Receiver, limit: Duration, watch: Watch<'_>) -> Result<()> {
    let memory = receiver.ring()?;
    let bytes = u64::from(memory.shape.bytes());
    let marks = Marks { first: 0, count: bytes / Marks::BYTES, word: random_word() };
    for buffer in 0..BUFFERS {
        memory.block(buffer)?.mark(&marks, limit)?;
    }
    receiver.start()?;
    let proved = fill(receiver, &marks, limit, watch);
    receiver.stop()?;
    receiver.session().discard_filled()?;
    proved
}

fn fill(receiver: &mut Receiver, marks: &Marks, limit: Duration, watch: Watch<'_>) -> Result<()> {
    let mut complete = [false; BUFFERS as usize];
    for _ in 0..ROUNDS * BUFFERS {
        let filled = complete.iter().filter(|complete| **complete).count() as u32;
        if filled == BUFFERS {
            return Ok(());
        }
        let Some((buffer, block, arrival)) = next(receiver, limit, filled, watch)? else {
            return Err(Error::Lost {
                what: format!(
                    "the board filled {filled} of {BUFFERS} buffers, and none within {limit:?} after that"
                ),
                fix: "Check its clock, and whether its interrupts and events arrive (onehop sdr selftest)"
                    .into(),
            });
        };
        // The samples of a block are at the start of its buffer.
        let present = u64::from(arrival.extents.samples()) * u64::from(receiver.ring()?.shape.format.bytes());
        let marks = Marks { count: (present / Marks::BYTES).min(marks.count), ..*marks };
        let left = block.marks_left(&marks, limit)?;
        receiver.card().write(regs::RX_CONFIRM, 0);
        if left > 0 {
            return Err(Error::Lost {
                what: format!(
                    "the board reported buffer {buffer} as filled, but {left} of its {} words were not written: the machine \
                     drops what the board writes there",
                    marks.count
                ),
                fix: "Put board and GPU behind one root complex or switch that forwards peer-to-peer writes, or use \
                      cpu/pinned"
                    .into(),
            });
        }
        complete[buffer as usize % complete.len()] |= arrival.is_complete();
    }
    let incomplete = complete.iter().filter(|complete| !**complete).count();
    Err(Error::Lost {
        what: format!(
            "bursts were missing in {incomplete} of {BUFFERS} buffers each of the {ROUNDS} times they were filled"
        ),
        fix: "Lower the sample rate: the board's FIFO overflows".into(),
    })
}

/// The next block that arrives within `limit`.
fn next(
    receiver: &mut Receiver,
    limit: Duration,
    filled: u32,
    watch: Watch<'_>,
) -> Result<Option<(u32, Region, Arrival)>> {
    let deadline = Deadline::after(limit);
    loop {
        if !watch(filled) {
            return Err(Error::Cancelled);
        }
        let arrival = receiver.arrival(Deadline::after(deadline.left().min(WATCH_INTERVAL)))?;
        if arrival.is_some() || deadline.passed() {
            return Ok(arrival);
        }
    }
}

/// A word that a board is very unlikely to send.
fn random_word() -> u64 {
    let now =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |time| time.as_nanos() as u64);
    let mixed = now.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1
}
