//! How the lanes move a command's data: each takes every n-th unit, for n lanes.

use onehop_proto::GpuAddr;

use super::{SPANS, Server, task, word};
use crate::layout::{LOCAL_SPANS, SPAN_BYTES};
use crate::warp::ControllerWarp;

/// Units that a lane reads before it writes the first, so that the reads are under way together.
const AHEAD: u32 = 4;

impl<W: ControllerWarp> Server<'_, W> {
    /// One lane's share.
    pub(super) fn work(&self, work: u32, lane: u32) {
        let place = GpuAddr(self.long(word::PLACE));
        if work == task::ZERO {
            return self.zero(place, self.get(word::UNITS), lane);
        }
        let (mut place, count) = (place, self.get(word::SPANS));
        for index in 0..count {
            let (at, len) = self.span(index);
            let (from, to) = if work == task::TO_HOST { (place, at) } else { (at, place) };
            let wide = (from.0 | to.0 | u64::from(len)).is_multiple_of(16);
            match (work == task::COMPARE, wide) {
                (false, true) => self.copy(from, to, len / 16, lane),
                (false, false) => self.copy_words(from, to, len / 4, lane),
                (true, _) => self.compare(from, to, len / 4, lane),
            }
            place = place.plus(u64::from(len));
        }
    }

    fn span(&self, index: u32) -> (GpuAddr, u32) {
        if index < LOCAL_SPANS {
            return (GpuAddr(self.long(SPANS + 4 * index)), self.get(SPANS + 4 * index + 2));
        }
        let at = self.pair.spans.plus(u64::from(index - LOCAL_SPANS) * u64::from(SPAN_BYTES));
        let [low, high, len, _] = self.warp.load4(at);
        (GpuAddr(u64::from(low) | u64::from(high) << 32), len)
    }

    fn copy(&self, from: GpuAddr, to: GpuAddr, units: u32, lane: u32) {
        let (warp, lanes) = (self.warp, self.warp.lanes());
        let mut unit = lane;
        while units > unit && (units - unit - 1) / lanes >= AHEAD - 1 {
            let at = |k: u32| 16 * (u64::from(unit) + u64::from(k) * u64::from(lanes));
            let words = [0, 1, 2, 3].map(|k| warp.load4(from.plus(at(k))));
            for (k, words) in words.into_iter().enumerate() {
                warp.store4(to.plus(at(k as u32)), words);
            }
            unit += AHEAD * lanes;
        }
        while unit < units {
            let at = 16 * u64::from(unit);
            warp.store4(to.plus(at), warp.load4(from.plus(at)));
            unit += lanes;
        }
    }

    fn copy_words(&self, from: GpuAddr, to: GpuAddr, words: u32, lane: u32) {
        let mut i = lane;
        while i < words {
            let at = 4 * u64::from(i);
            self.warp.store(to.plus(at), self.warp.load(from.plus(at)));
            i += self.warp.lanes();
        }
    }

    fn compare(&self, one: GpuAddr, other: GpuAddr, words: u32, lane: u32) {
        let mut different = 0;
        let mut i = lane;
        while i < words {
            let at = 4 * u64::from(i);
            different |= self.warp.load(one.plus(at)) ^ self.warp.load(other.plus(at));
            i += self.warp.lanes();
        }
        if different != 0 {
            self.warp.add_local(word::DIFFERENT, 1);
        }
    }

    fn zero(&self, place: GpuAddr, units: u32, lane: u32) {
        let mut unit = u64::from(lane);
        while unit < u64::from(units) {
            self.warp.store4(place.plus(16 * unit), [0; 4]);
            unit += u64::from(self.warp.lanes());
        }
    }
}
