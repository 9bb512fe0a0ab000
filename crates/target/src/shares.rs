//! A budget that users share. No user, and no sequence of users, can exhaust it: each may have as much as remains for
//! others.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

use crate::lock;

/// Maps a user to the one for whom it counts. Must always return the same result for a user.
pub type Payer<K> = Arc<dyn Fn(K) -> K + Send + Sync>;

/// A budget, and what each user has taken.
pub struct Shares<K = u32> {
    most: u64,
    per_user: u64,
    /// An additional amount, and how much of it is guaranteed to each user.
    reserve: (u64, u64),
    /// Users who may take all that is left.
    privileged: Vec<K>,
    /// `None` if each user counts for themselves.
    payer: Option<Payer<K>>,
    taken: Mutex<ShareCounts<K>>,
}

/// A user's share, which is returned on drop.
pub struct TakenShare<K: Eq + Hash + Copy = u32> {
    shares: Arc<Shares<K>>,
    user: K,
    amount: u64,
}

impl<K: Eq + Hash + Copy> Drop for TakenShare<K> {
    fn drop(&mut self) {
        self.shares.put_back(self.user, self.amount);
    }
}

struct ShareCounts<K> {
    of: HashMap<K, u64>,
    all: u64,
}

impl<K: Eq + Hash + Copy> ShareCounts<K> {
    fn add(&mut self, user: K, amount: u64) {
        self.all += amount;
        if amount > 0 {
            *self.of.entry(user).or_default() += amount;
        }
    }
}

impl<K: Eq + Hash + Copy> Shares<K> {
    /// A budget of `most`.
    #[must_use]
    pub fn new(most: u64) -> Self {
        let taken = ShareCounts { of: HashMap::new(), all: 0 };
        let (per_user, reserve, taken) = (u64::MAX, (0, 0), Mutex::new(taken));
        Self { most, per_user, reserve, privileged: Vec::new(), payer: None, taken }
    }

    /// Limits each user who is not privileged to `most`.
    #[must_use]
    pub fn with_limit(self, most: u64) -> Self {
        Self { per_user: most, ..self }
    }

    /// Adds a reserve of `more`, of which each user may have `each` even if others have taken the rest.
    #[must_use]
    pub fn with_reserve(self, more: u64, each: u64) -> Self {
        Self { reserve: (more, each), ..self }
    }

    /// Lets these users take all that is left.
    #[must_use]
    pub fn with_privileged(self, users: impl Into<Vec<K>>) -> Self {
        Self { privileged: users.into(), ..self }
    }

    /// Sets for whom each user counts. To be called before anything is taken.
    pub fn set_payer(&mut self, payer: Payer<K>) {
        self.payer = Some(payer);
    }

    fn payer(&self, user: K) -> K {
        self.payer.as_ref().map_or(user, |payer| payer(user))
    }

    /// How much a user may still take.
    pub fn room(&self, user: K) -> u64 {
        let user = self.payer(user);
        self.room_in(&lock(&self.taken), user)
    }

    fn room_in(&self, taken: &ShareCounts<K>, user: K) -> u64 {
        let theirs = taken.of.get(&user).copied().unwrap_or(0);
        let left = self.most.saturating_sub(taken.all);
        let is_privileged = self.privileged.contains(&user);
        let fair = if is_privileged { left } else { left.saturating_sub(theirs).div_ceil(2) };
        let (more, each) = self.reserve;
        let all_left = self.most.saturating_add(more).saturating_sub(taken.all);
        let room = fair.max(each.saturating_sub(theirs).min(all_left));
        if is_privileged { room } else { room.min(self.per_user.saturating_sub(theirs)) }
    }

    /// Takes `amount` for a user, or nothing. Returns whether there was room.
    #[must_use]
    pub fn take(&self, user: K, amount: u64) -> bool {
        let (user, mut taken) = (self.payer(user), lock(&self.taken));
        let has_room = amount <= self.room_in(&taken, user);
        if has_room {
            taken.add(user, amount);
        }
        has_room
    }

    /// Takes `amount` for a user until the returned value is dropped; `None` if there is no room.
    #[must_use]
    pub fn acquire(self: &Arc<Self>, user: K, amount: u64) -> Option<TakenShare<K>> {
        self.take(user, amount).then(|| TakenShare { shares: self.clone(), user, amount })
    }

    /// Counts an amount for a user, whether or not there is room.
    pub fn count(&self, user: K, amount: u64) {
        let user = self.payer(user);
        lock(&self.taken).add(user, amount);
    }

    /// Returns an amount of a user's.
    pub fn put_back(&self, user: K, amount: u64) {
        let (user, mut taken) = (self.payer(user), lock(&self.taken));
        let Some(theirs) = taken.of.get_mut(&user) else { return };
        let amount = amount.min(*theirs);
        *theirs -= amount;
        if *theirs == 0 {
            taken.of.remove(&user);
        }
        taken.all -= amount;
    }

    /// How much a user has taken.
    pub fn taken_by(&self, user: K) -> u64 {
        let user = self.payer(user);
        lock(&self.taken).of.get(&user).copied().unwrap_or(0)
    }

    /// How much all users have taken.
    pub fn taken(&self) -> u64 {
        lock(&self.taken).all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_leaves_as_much_for_others() {
        let shares = Shares::new(1 << 20).with_limit(1 << 18).with_privileged([0]);
        // The first users reach the limit, the others half of what is left.
        for user in 1..=12 {
            let room = shares.room(user);
            assert_eq!(room, if user < 4 { 1 << 18 } else { 1 << (21 - user) }, "user {user}");
            assert!(!shares.take(user, room + 1) && shares.take(user, room));
            assert_eq!(shares.room(user), 0);
        }
        assert_eq!(shares.room(0), 1 << 9);
        assert_eq!(Shares::new(64).with_limit(8).with_privileged([0]).room(0), 64);
        shares.put_back(5, 1 << 16);
        shares.put_back(5, 1);
        assert!(shares.take(5, 1 << 15));
    }

    #[test]
    fn late_users_get_a_part_of_the_reserve() {
        let shares = Shares::new(64).with_reserve(10, 4);
        let all = |user| std::iter::from_fn(|| shares.take(user, 1).then_some(())).count();
        assert_eq!([1, 2, 3, 4, 5, 6, 7].map(all), [32, 16, 8, 4, 4, 4, 4]);
        // The reserve holds only two more.
        assert_eq!([8, 9].map(all), [2, 0]);
        shares.put_back(1, 32);
        assert_eq!((all(9), shares.room(2)), (11, 0));
    }

    #[test]
    fn single_units_are_shared_alike() {
        let shares = Shares::new(16);
        let all = |user| std::iter::from_fn(|| shares.take(user, 1).then_some(())).count();
        assert_eq!([1, 2, 3, 4, 5].map(all), [8, 4, 2, 1, 1]);
        assert_eq!(shares.taken(), 16);
        shares.put_back(1, 8);
        assert_eq!(all(6), 4);
    }
}
