//! The self-test of a receiver: every word of every buffer has to be overwritten by samples. That everything was set up
//! without an error shows nothing, and a word that was written nothing about its neighbours.

use std::time::{Duration, SystemTime};

use onehop_gpu::Region;
use onehop_os::{Deadline, DmaMemory, Marks};
use onehop_radio::{BUFFERS, regs};

use crate::rx::{Arrival, Receiver};
use crate::{Error, Result, Watch};

/// How often a buffer may arrive with missing bursts before the test fails.
const ROUNDS: u32 = 8;
/// Interval between calls of the watcher.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// Receives until every buffer was filled completely; `limit` is the time limit for each block.
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
    receiver.session().forget_filled()?;
    proved
}

fn fill(receiver: &mut Receiver, marks: &Marks, limit: Duration, watch: Watch<'_>) -> Result<()> {
    let mut whole = [false; BUFFERS as usize];
    for _ in 0..ROUNDS * BUFFERS {
        let filled = whole.iter().filter(|whole| **whole).count() as u32;
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
        let there = u64::from(arrival.extents.samples()) * u64::from(receiver.ring()?.shape.format.bytes());
        let marks = Marks { count: (there / Marks::BYTES).min(marks.count), ..*marks };
        let left = block.marks_left(&marks, limit)?;
        receiver.card().write(regs::RX_CONFIRM, 0);
        if left > 0 {
            return Err(Error::Lost {
                what: format!(
                    "the board says that buffer {buffer} is filled, and {left} of {} words of it were not written: the \
                     machine drops what the board writes there",
                    marks.count
                ),
                fix: "Put board and GPU behind one root complex or switch that forwards peer-to-peer writes, or use \
                      cpu/pinned"
                    .into(),
            });
        }
        whole[buffer as usize % whole.len()] |= arrival.is_whole();
    }
    let never = whole.iter().filter(|whole| !**whole).count();
    Err(Error::Lost {
        what: format!(
            "bursts were missing in {never} of {BUFFERS} buffers each of {ROUNDS} times that they were filled"
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
