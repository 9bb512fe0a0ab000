//! The two memory orders that queues rely on, as experiments. Each has a side that writes and a side that checks, and a
//! fence that can be weakened or left out. An experiment that never fails without its fence proves nothing with it.
//!
//! - **An entry before its doorbell**: [`submit`] writes submission queue entries, fences and rings, as a driver does;
//!   [`fetch`] polls the doorbell and checks the entries, as a controller does.
//! - **Data before its completion**: [`complete`] writes data with all lanes, one lane fences and posts completions, as
//!   [`serve`](crate::serve) does; [`consume`] polls the phase and checks the data, as a driver does.
//!
//! What is written is made from a counter, so that each word identifies its message. An incomplete message shows as a
//! mixture with the previous one in its slot. One warp runs each side. Many pairs at once, with queues in memory that
//! is far from the writer, expose a weak fence.

use onehop_proto::GpuAddr;
use onehop_proto::queue::Memory;

use crate::layout::{Litmus, Tally, control};
use crate::report::Exit;
use crate::warp::{ControllerWarp, Scoped, Voice};

/// Turns without progress between two checks of the control word and the clock.
const POLL_TURNS: u32 = 64;
/// Lanes of a warp at most.
const MAX_LANES: u32 = 32;

/// The warp's local words.
mod local {
    pub const VOICE: u32 = 0;
    /// Counts, in the order of [`Tally`](super::Tally)'s fields.
    pub const TALLY: u32 = 2;
    pub const GOOD: u32 = TALLY;
    pub const STALE: u32 = TALLY + 1;
    pub const TORN: u32 = TALLY + 2;
    pub const ALIEN: u32 = TALLY + 3;
    pub const END: u32 = TALLY + 4;
    /// How many messages of a batch have arrived, and for each lane whether its own has.
    pub const COME: u32 = END;
    pub const MINE: u32 = END + 1;
}

/// Local words that each side needs.
pub const LITMUS_LOCAL_WORDS: u32 = local::MINE + MAX_LANES;

/// Strength of the writer's fence: [`Litmus::fence`].
pub mod strength {
    /// [`Memory::fence`](onehop_proto::queue::Memory::fence), as the queues use it.
    pub const SYSTEM: u32 = 0;
    /// [`Scoped::fence_gpu`](crate::Scoped::fence_gpu): enough for one GPU alone.
    pub const GPU: u32 = 1;
    /// No fence.
    pub const NONE: u32 = 2;
}

/// A word of a message.
#[inline(always)]
#[must_use]
pub const fn pattern(message: u32, word: u32) -> u32 {
    let x = message.wrapping_add(1).wrapping_mul(0x9e37_79b1) ^ word.wrapping_mul(0x85eb_ca77);
    x ^ x >> 15
}

/// One side of an experiment; the same on all lanes.
struct Side<'a, W> {
    warp: &'a W,
    setup: Litmus,
    voice: Voice,
    done: u32,
    turns: u32,
    /// On the leading lane.
    begun: u64,
}

/// Writes entries and rings: the driver's side of the first experiment.
pub fn submit<W: ControllerWarp + Scoped + Memory<Door = GpuAddr>>(warp: &W, at: GpuAddr) -> Exit {
    let mut side = Side::new(warp, at);
    while let Some(count) = side.next_batch() {
        let count = match count {
            Ok(count) => count,
            Err(exit) => return side.end(exit),
        };
        let (first, setup) = (side.done, side.setup);
        warp.each(|lane| {
            if lane < count {
                let message = first.wrapping_add(lane);
                let mut entry = [0; 16];
                for (i, word) in entry.iter_mut().enumerate() {
                    *word = pattern(message, i as u32);
                }
                warp.store_entry(setup.slot(message), &entry);
            }
        });
        side.done = first.wrapping_add(count);
        let tail = side.done;
        warp.once(|| {
            fence(warp, setup.fence);
            warp.ring(setup.flags, tail);
        });
    }
    side.end(Exit::Stopped)
}

/// Polls the doorbell and checks the entries: the controller's side of the first experiment.
pub fn fetch<W: ControllerWarp>(warp: &W, at: GpuAddr) -> Exit {
    let mut side = Side::new(warp, at);
    side.clear();
    while side.done != side.setup.messages {
        let (setup, done) = (side.setup, side.done);
        let tail = side.voice.say(warp, || setup.poll(warp, setup.flags));
        let count = tail.wrapping_sub(done).min(warp.lanes());
        if let Err(exit) = side.progress(count) {
            return side.end(exit);
        }
        warp.each(|lane| {
            if lane < count {
                setup.judge(warp, done.wrapping_add(lane));
            }
        });
        side.acknowledge(count);
    }
    side.end(Exit::Stopped)
}

/// Writes data and posts completions: the controller's side of the second experiment.
pub fn complete<W: ControllerWarp + Scoped>(warp: &W, at: GpuAddr) -> Exit {
    let mut side = Side::new(warp, at);
    while let Some(count) = side.next_batch() {
        let count = match count {
            Ok(count) => count,
            Err(exit) => return side.end(exit),
        };
        let (first, setup) = (side.done, side.setup);
        let quads = setup.words / 4;
        // Neighbouring lanes write one message together, as they do when they move a block.
        warp.each(|lane| {
            let mut unit = lane;
            while unit < count * quads {
                let (message, quad) = (first.wrapping_add(unit / quads), unit % quads);
                let words = [0, 1, 2, 3].map(|i| pattern(message, 4 * quad + i));
                warp.store4(setup.slot(message).plus(16 * u64::from(quad)), words);
                unit += warp.lanes();
            }
        });
        warp.once(|| {
            fence(warp, setup.fence);
            for i in 0..count {
                let message = first.wrapping_add(i);
                warp.store4(setup.flag(message), [message, 0, 0, setup.phase(message) << 16]);
            }
        });
        side.done = first.wrapping_add(count);
    }
    side.end(Exit::Stopped)
}

/// Polls the phase and checks the data: the driver's side of the second experiment.
pub fn consume<W: ControllerWarp>(warp: &W, at: GpuAddr) -> Exit {
    let mut side = Side::new(warp, at);
    side.clear();
    while side.done != side.setup.messages {
        let (setup, done) = (side.setup, side.done);
        let most = side.batch(setup.messages.wrapping_sub(done));
        warp.each(|lane| {
            warp.set_local(local::MINE + lane, 0);
            if lane == 0 {
                warp.set_local(local::COME, 0);
            }
        });
        // Each lane waits for a message of its own and checks it at once, so nothing comes between phase and data.
        let mut come = 0;
        while come < most {
            warp.each(|lane| {
                let message = done.wrapping_add(lane);
                let mine = local::MINE + lane;
                if lane < most
                    && warp.local(mine) == 0
                    && setup.poll(warp, setup.flag(message).plus(12)) >> 16 == setup.phase(message)
                {
                    setup.judge(warp, message);
                    warp.set_local(mine, 1);
                    warp.add_local(local::COME, 1);
                }
            });
            let now = side.voice.say(warp, || warp.local(local::COME));
            if let Err(exit) = side.progress(now - come) {
                return side.end(exit);
            }
            come = now;
        }
        side.acknowledge(most);
    }
    side.end(Exit::Stopped)
}

#[inline(always)]
fn fence<W: Scoped>(warp: &W, how: u32) {
    match how {
        strength::SYSTEM => warp.fence(),
        strength::GPU => warp.fence_gpu(),
        _ => {}
    }
}

impl Litmus {
    /// Slots for messages, and words of each: at least one slot of four words, and whole quads.
    #[inline(always)]
    #[must_use]
    pub const fn sizes(&self) -> (u32, u32) {
        let (slots, words) = (self.slots, self.words & !3);
        (if slots == 0 { 1 } else { slots }, if words == 0 { 4 } else { words })
    }

    /// Where a message lies.
    #[inline(always)]
    fn slot(&self, message: u32) -> GpuAddr {
        self.payload.plus(4 * u64::from(message % self.slots) * u64::from(self.words))
    }

    /// Where a message's completion lies.
    #[inline(always)]
    fn flag(&self, message: u32) -> GpuAddr {
        self.flags.plus(16 * u64::from(message % self.slots))
    }

    /// The phase of a message's completion: one in the first lap.
    #[inline(always)]
    const fn phase(&self, message: u32) -> u32 {
        ((message / self.slots) & 1) ^ 1
    }

    /// Reads a word that announces others.
    #[inline(always)]
    fn poll<W: ControllerWarp>(&self, warp: &W, at: GpuAddr) -> u32 {
        if self.relaxed == 0 { warp.load_acquire(at) } else { warp.load(at) }
    }

    /// Checks a message on one lane, and counts the result.
    fn judge<W: ControllerWarp>(&self, warp: &W, message: u32) {
        let (mut new, mut old) = (0, 0);
        for quad in 0..self.words / 4 {
            let words = warp.load4(self.slot(message).plus(16 * u64::from(quad)));
            for (i, word) in words.into_iter().enumerate() {
                let place = 4 * quad + i as u32;
                let before = match message.checked_sub(self.slots) {
                    Some(before) => pattern(before, place),
                    None => 0,
                };
                new += u32::from(word == pattern(message, place));
                old += u32::from(word == before);
            }
        }
        let verdict = if new == self.words {
            local::GOOD
        } else if old == self.words {
            local::STALE
        } else if new + old == self.words {
            local::TORN
        } else {
            local::ALIEN
        };
        warp.add_local(verdict, 1);
    }
}

impl<'a, W: ControllerWarp> Side<'a, W> {
    fn new(warp: &'a W, at: GpuAddr) -> Self {
        let mut setup = Litmus::load(warp, at);
        // A host's mistake must not cause a division by zero or a store elsewhere.
        (setup.slots, setup.words) = setup.sizes();
        Self { warp, setup, voice: Voice::new(local::VOICE), done: 0, turns: 0, begun: warp.now() }
    }

    fn clear(&self) {
        self.warp.once(|| {
            for at in local::TALLY..local::END {
                self.warp.set_local(at, 0);
            }
        });
    }

    /// The size of the next batch when `left` messages are left; the same on both sides.
    #[inline(always)]
    fn batch(&self, left: u32) -> u32 {
        let lanes = self.warp.lanes().min(MAX_LANES);
        self.setup.batch.clamp(1, lanes).min(self.setup.slots).min(left)
    }

    /// The size of the writer's next batch, once its slots are free; none after the last.
    fn next_batch(&mut self) -> Option<Result<u32, Exit>> {
        let (warp, setup) = (self.warp, self.setup);
        let left = setup.messages.wrapping_sub(self.done);
        if left == 0 {
            return None;
        }
        let most = self.batch(left);
        loop {
            let taken = self.voice.say(warp, || warp.load_acquire(setup.taken));
            // A slot is free when its previous message has been checked.
            let count = if self.done.wrapping_sub(taken) + most <= setup.slots { most } else { 0 };
            match self.progress(count) {
                Ok(()) if count > 0 => return Some(Ok(count)),
                Ok(()) => {}
                Err(exit) => return Some(Err(exit)),
            }
        }
    }

    /// Pauses if there was no progress; now and then checks whether it must end.
    #[inline(always)]
    fn progress(&mut self, count: u32) -> Result<(), Exit> {
        self.turns = self.turns.wrapping_add(1);
        if count > 0 {
            return Ok(());
        }
        self.warp.pause();
        if !self.turns.is_multiple_of(POLL_TURNS) {
            return Ok(());
        }
        let (warp, setup, begun) = (self.warp, self.setup, self.begun);
        let stop = self.voice.say(warp, || {
            if warp.load(setup.control) == control::STOP {
                Exit::Stopped as u32
            } else if warp.now().wrapping_sub(begun) > setup.limit {
                Exit::TimedOut as u32
            } else {
                0
            }
        });
        Exit::from_code(stop).map_or(Ok(()), Err)
    }

    /// Reports messages to the writer as checked.
    fn acknowledge(&mut self, count: u32) {
        if count > 0 {
            self.done = self.done.wrapping_add(count);
            let (warp, at, done) = (self.warp, self.setup.taken, self.done);
            warp.once(|| warp.store_release(at, done));
        }
    }

    fn end(&self, exit: Exit) -> Exit {
        let (warp, setup) = (self.warp, self.setup);
        warp.once(|| {
            let at = |field: u32| setup.tally.plus(u64::from(4 * field));
            if setup.checks != 0 {
                for i in 0..local::END - local::TALLY {
                    warp.store(at(1 + i), warp.local(local::TALLY + i));
                }
            }
            warp.store(at(5), self.done);
            let elapsed = warp.now().wrapping_sub(self.begun);
            warp.store(at(6), elapsed as u32);
            warp.store(at(7), (elapsed >> 32) as u32);
            warp.store_release(at(0), exit as u32);
        });
        exit
    }
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(Tally, exit) == 0 && offset_of!(Tally, good) == 4 && offset_of!(Tally, alien) == 16);
    assert!(offset_of!(Tally, messages) == 20 && offset_of!(Tally, elapsed) == 24);
};
