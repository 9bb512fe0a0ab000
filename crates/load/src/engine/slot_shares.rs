//! Shares of the slots of one pool, so that a GPU that does not answer cannot keep all of them.

/// Divides slots among fillers that share them. Half of the slots are reserved in equal parts: one for each filler that
/// holds slots, and one for the next. The other half goes to any of them. So one filler leaves slots to others; several that
/// return none may leave none.
pub(super) struct SlotShares {
    slots: usize,
    /// Slots of each filler.
    held: Vec<usize>,
}

impl SlotShares {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots, held: Vec::new() }
    }

    pub(super) fn held(&self, filler: usize) -> usize {
        self.held.get(filler).copied().unwrap_or(0)
    }

    pub(super) fn may_take(&self, filler: usize) -> bool {
        let others = self.held.iter().enumerate().filter(|(of, held)| *of != filler && **held > 0).count();
        let parts = others + 2;
        let reserve = (self.slots / (2 * parts)).max(1);
        let beyond: usize = self.held.iter().map(|held| held.saturating_sub(reserve)).sum();
        self.held(filler) < reserve || beyond < self.slots.saturating_sub(parts * reserve)
    }

    pub(super) fn take(&mut self, filler: usize) {
        if self.held.len() <= filler {
            self.held.resize(filler + 1, 0);
        }
        self.held.get_mut(filler).into_iter().for_each(|held| *held += 1);
    }

    pub(super) fn put_back(&mut self, filler: usize) {
        self.held.get_mut(filler).into_iter().for_each(|held| *held = held.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes all the slots that a filler may have.
    fn take_all(shares: &mut SlotShares, filler: usize) -> usize {
        let before = shares.held(filler);
        while shares.held.iter().sum::<usize>() < shares.slots && shares.may_take(filler) {
            shares.take(filler);
        }
        shares.held(filler) - before
    }

    #[test]
    fn fillers_that_keep_their_slots_leave_some_to_the_next() {
        for slots in [8, 12, 64] {
            let mut shares = SlotShares::new(slots);
            let taken = [0, 1, 2].map(|filler| take_all(&mut shares, filler));
            assert!(taken[0] >= slots / 2, "one alone gets few: {taken:?} of {slots}");
            assert!(taken.iter().all(|taken| *taken > 0), "{taken:?} of {slots}");
        }
    }

    #[test]
    fn slots_that_are_put_back_are_shared_anew() {
        let mut shares = SlotShares::new(64);
        let first = take_all(&mut shares, 0);
        assert!(!shares.may_take(0));
        (0..first).for_each(|_| shares.put_back(0));
        assert_eq!(take_all(&mut shares, 5), first);
    }
}
