//! Data of a read that arrives after its completion: the fault `torn`.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use crate::device::ControllerState;
use crate::exec::DelayedTask;
use crate::faults::Order;
use crate::rng::Rng;
use crate::transfer::TransferSpan;

/// What a device writes atomically.
const WORD: usize = 8;
/// Hosts that detect missing data may check the end of units of this size.
const UNIT: usize = 512;
/// Bursts in which words in random order arrive.
const BURSTS: usize = 4;

/// Data on its way to the host.
pub(crate) struct LateData {
    pub(crate) sqid: u16,
    spans: Vec<TransferSpan>,
    data: Vec<u8>,
    /// The parts of each burst, in order.
    bursts: VecDeque<Vec<Range<usize>>>,
    /// Nanoseconds before each burst.
    pub(crate) wait: u64,
}

impl LateData {
    pub(crate) fn new(
        sqid: u16,
        spans: &[TransferSpan],
        data: &[u8],
        wait: Duration,
        order: Order,
        rng: &mut Rng,
    ) -> Self {
        let bursts = bursts(data.len(), order, rng);
        Self { sqid, spans: spans.to_vec(), data: data.to_vec(), bursts, wait: wait.as_nanos() as u64 }
    }
}

fn bursts(len: usize, order: Order, rng: &mut Rng) -> VecDeque<Vec<Range<usize>>> {
    let words = || (0..len).step_by(WORD).map(|at| at..(at + WORD).min(len));
    match order {
        Order::Whole => VecDeque::from([std::iter::once(0..len).collect()]),
        Order::LastFirst => {
            let (last, others): (Vec<_>, Vec<_>) =
                words().partition(|word| word.end.is_multiple_of(UNIT) || word.end == len);
            VecDeque::from([last, others])
        }
        Order::Random => {
            let mut words: Vec<_> = words().collect();
            for left in (1..words.len()).rev() {
                words.swap(left, rng.up_to(left as u64) as usize);
            }
            words.chunks(words.len().div_ceil(BURSTS).max(1)).map(<[_]>::to_vec).collect()
        }
    }
}

impl ControllerState {
    /// Delivers the next burst to the host.
    pub(crate) fn bring(&mut self, mut late: LateData) {
        for part in late.bursts.pop_front().unwrap_or_default() {
            let mut before = 0;
            for span in &late.spans {
                let start = part.start.max(before);
                let end = part.end.min(before + span.len).min(late.data.len());
                if let (Some(addr), true) = (span.addr, start < end)
                    && let Err(at) = self.space.write(addr + (start - before) as u64, &late.data[start..end])
                {
                    return self.breach_dma(late.sqid, "data of a read", at);
                }
                before += span.len;
            }
        }
        if late.bursts.is_empty() {
            self.counts.rest.bytes_read += late.data.len() as u64;
        } else {
            self.after(late.wait, DelayedTask::Data(late));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_once() {
        for len in [0, 4, 8, 512, 516, 520, 4096, 4100] {
            for order in [Order::Whole, Order::LastFirst, Order::Random] {
                let mut all: Vec<usize> =
                    bursts(len, order, &mut Rng::new(7)).into_iter().flatten().flatten().collect();
                all.sort_unstable();
                assert_eq!(all, (0..len).collect::<Vec<_>>(), "{len} {order:?}");
            }
        }
    }

    #[test]
    fn the_end_of_each_unit_comes_first() {
        let bursts = bursts(1024, Order::LastFirst, &mut Rng::new(7));
        assert_eq!(bursts[0], [504..512, 1016..1024]);
        assert_eq!((bursts.len(), bursts[1][0].clone()), (2, 0..8));
    }
}
