//! The buffers that a queue's commands in flight hold, with a plain counter for each: cloning and dropping the handle
//! for every command would cost two locked instructions.

use std::num::NonZeroU32;

use crate::Buffer;

/// One hold on a buffer: its index, counted from 1, so that an optional hold is a plain word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hold(NonZeroU32);

impl Hold {
    #[inline(always)]
    fn of(place: usize) -> Option<Self> {
        NonZeroU32::new(place as u32 + 1).map(Self)
    }

    #[inline(always)]
    fn place(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// The buffers of one queue.
#[derive(Default)]
pub(crate) struct Holds {
    held: Vec<Option<(Buffer, u32)>>,
    /// The index of the last buffer: the next command most often has the same.
    last: usize,
}

impl Holds {
    /// Keeps a buffer until [`Self::release`].
    #[inline]
    pub(crate) fn hold(&mut self, buffer: &Buffer) -> Option<Hold> {
        if let Some(Some((held, count))) = self.held.get_mut(self.last)
            && held.is_same(buffer)
        {
            *count += 1;
            return Hold::of(self.last);
        }
        self.hold_another(buffer)
    }

    fn hold_another(&mut self, buffer: &Buffer) -> Option<Hold> {
        let is_this =
            |held: &Option<(Buffer, u32)>| held.as_ref().is_some_and(|(held, _)| held.is_same(buffer));
        let known = self.held.iter().position(is_this);
        self.last = known.or_else(|| self.held.iter().position(Option::is_none)).unwrap_or(self.held.len());
        if self.last == self.held.len() {
            self.held.push(None);
        }
        self.held[self.last].get_or_insert_with(|| (buffer.clone(), 0)).1 += 1;
        Hold::of(self.last)
    }

    /// The buffer.
    #[inline]
    pub(crate) fn get(&self, hold: Hold) -> Option<&Buffer> {
        self.held.get(hold.place())?.as_ref().map(|(buffer, _)| buffer)
    }

    /// Releases a hold. The last one drops the buffer.
    #[inline]
    pub(crate) fn release(&mut self, hold: Hold) {
        if let Some(held) = self.held.get_mut(hold.place())
            && let Some((_, count)) = held
        {
            *count -= 1;
            if *count == 0 {
                *held = None;
            }
        }
    }
}
