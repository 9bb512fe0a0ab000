//! Command identifiers: a slot, and above it a lap count, so that a completion of an earlier use is recognised.

/// The identifier that is never used: controllers report it for errors that belong to no command.
pub const NO_CID: u16 = u16::MAX;

/// The most slots that leave three bits for the lap: with fewer a late completion would soon pass for a new one.
pub const MAX_SLOTS: u32 = 1 << 13;

/// How a queue's slots are encoded as command identifiers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CidSpace {
    slots: u16,
    /// The bits of an identifier that name its slot.
    mask: u16,
}

impl CidSpace {
    /// The space of `slots` slots; never more than [`MAX_SLOTS`].
    #[inline]
    #[must_use]
    pub const fn new(slots: u32) -> Self {
        let slots = if slots > MAX_SLOTS { MAX_SLOTS } else { slots } as u16;
        Self { slots, mask: if slots == 0 { 0 } else { slots.next_power_of_two() - 1 } }
    }

    /// How many slots there are.
    #[inline(always)]
    #[must_use]
    pub const fn slots(&self) -> u32 {
        self.slots as u32
    }

    /// The identifier of a slot's first use.
    #[inline(always)]
    #[must_use]
    pub const fn first(&self, slot: u16) -> u16 {
        slot
    }

    /// Where a slot continues that was left with this word, in memory that was zeroed once: identifiers used before the queue
    /// was created again are not reused. Returns the word to leave there, whose low half is the
    /// identifier.
    #[inline(always)]
    #[must_use]
    pub const fn resume(&self, slot: u16, word: u32) -> u32 {
        let cid = match self.slot(word as u16) {
            Some(id) if id == slot && word & Self::LIVED != 0 => word as u16,
            _ => self.first(slot),
        };
        Self::left(cid)
    }

    /// The word to leave for [`Self::resume`].
    #[inline(always)]
    #[must_use]
    pub const fn left(cid: u16) -> u32 {
        Self::LIVED | cid as u32
    }

    /// Distinguishes a used slot from zeroed memory.
    const LIVED: u32 = 1 << 16;

    /// The identifier of the slot's next use.
    #[inline(always)]
    #[must_use]
    pub const fn next(&self, cid: u16) -> u16 {
        let next = cid.wrapping_add(self.mask + 1);
        // The lap that would give the reserved identifier is skipped.
        if next == NO_CID { self.slot_bits(cid) } else { next }
    }

    /// The slot of an identifier, if it can be one of this space.
    #[inline(always)]
    #[must_use]
    pub const fn slot(&self, cid: u16) -> Option<u16> {
        let slot = self.slot_bits(cid);
        if slot < self.slots && cid != NO_CID { Some(slot) } else { None }
    }

    #[inline(always)]
    const fn slot_bits(&self, cid: u16) -> u16 {
        cid & self.mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_life_names_its_slot_and_never_the_forbidden_one() {
        for slots in [1, 2, 3, 31, 32, 33, 1023, 1024, 4095, 8192, 65535, 70000] {
            let space = CidSpace::new(slots);
            for slot in [0, space.slots() as u16 / 2, space.slots() as u16 - 1] {
                let mut cid = space.first(slot);
                for _ in 0..70000 / slots.min(70000) + 3 {
                    assert_eq!(space.slot(cid), Some(slot), "{slots} slots, {cid:#x}");
                    let next = space.next(cid);
                    assert!(next != cid, "{slots} slots: the next life differs");
                    cid = next;
                }
            }
            assert_eq!(space.slot(NO_CID), None);
        }
    }
}
