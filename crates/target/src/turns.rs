//! A queue in which every user has a turn: who asks for much waits for themselves.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::lock;

/// What a queue holds: work that one thread does, or that several do in parts.
pub trait Divisible: Sized {
    /// What a thread does.
    type Part;

    /// Takes a part off; gives it with the rest. No part is left where the work was given up meanwhile. It is called under the
    /// queue's lock.
    fn divide(self) -> (Option<Self::Part>, Option<Self>);
}

/// Work by user.
pub struct Queue<T, K = u32> {
    state: Mutex<QueueState<T, K>>,
    there: Condvar,
}

struct QueueState<T, K> {
    /// Users with work, the next to have their turn first.
    users: VecDeque<(K, VecDeque<T>)>,
    over: bool,
    idle: usize,
    /// How often those who wait were woken.
    wakes: u64,
}

/// What came of waiting.
pub enum Next<P> {
    /// Work, and whether there is more and nobody to do it at once.
    Work(P, bool),
    /// Nothing came in time.
    Nothing,
    /// Nothing will come any more.
    Over,
}

impl<T, K> Default for Queue<T, K> {
    fn default() -> Self {
        let state = QueueState { users: VecDeque::new(), over: false, idle: 0, wakes: 0 };
        Self { state: Mutex::new(state), there: Condvar::new() }
    }
}

impl<T, K> QueueState<T, K> {
    /// Whether there is more work than threads that wait for some.
    fn is_short(&self) -> bool {
        self.idle < self.users.iter().map(|(_, list)| list.len()).sum()
    }
}

impl<T: Divisible, K: PartialEq> Queue<T, K> {
    /// Adds work; whether there is nobody to do it at once.
    pub fn add(&self, user: K, work: T) -> bool {
        let mut state = lock(&self.state);
        match state.users.iter_mut().find(|(other, _)| *other == user) {
            Some((_, list)) => list.push_back(work),
            None => state.users.push_back((user, [work].into())),
        }
        let is_short = state.is_short();
        drop(state);
        self.there.notify_one();
        is_short
    }

    /// Waits for work. [`Self::wake`] does not end the wait.
    pub fn next(&self, limit: Duration) -> Next<T::Part> {
        self.wait(limit, None)
    }

    /// Waits for work until somebody has called [`Self::wake`], since [`Self::wakes`] gave this number.
    pub fn next_since(&self, wakes: u64, limit: Duration) -> Next<T::Part> {
        self.wait(limit, Some(wakes))
    }

    fn wait(&self, limit: Duration, since: Option<u64>) -> Next<T::Part> {
        let mut state = lock(&self.state);
        loop {
            while let Some((user, mut list)) = state.users.pop_front() {
                let (part, rest) = list.pop_front().map_or((None, None), T::divide);
                if let Some(rest) = rest {
                    list.push_front(rest);
                }
                if !list.is_empty() {
                    state.users.push_back((user, list));
                }
                if let Some(part) = part {
                    let (is_short, is_more) = (state.is_short(), !state.users.is_empty());
                    drop(state);
                    if is_more {
                        // Another thread that waits may have the rest.
                        self.there.notify_one();
                    }
                    return Next::Work(part, is_short);
                }
            }
            if state.over {
                return Next::Over;
            }
            if since.is_some_and(|since| since != state.wakes) {
                return Next::Nothing;
            }
            state.idle += 1;
            let (woken, time) = self.there.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if time.timed_out() && state.users.is_empty() && !state.over {
                return Next::Nothing;
            }
        }
    }

    /// Ends the waits of [`Self::next_since`].
    pub fn wake(&self) {
        lock(&self.state).wakes += 1;
        self.there.notify_all();
    }

    /// How often that was done.
    pub fn wakes(&self) -> u64 {
        lock(&self.state).wakes
    }

    /// Says that nothing comes any more; what is there is still done.
    pub fn end(&self) {
        lock(&self.state).over = true;
        self.there.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many parts, the first with this number; those from the limit on are given up.
    struct Parts(u32, u32);
    const GIVEN_UP: u32 = 100;

    impl Divisible for Parts {
        type Part = u32;

        fn divide(self) -> (Option<u32>, Option<Self>) {
            let Self(number, count) = self;
            if number >= GIVEN_UP {
                return (None, None);
            }
            (Some(number), (count > 1).then_some(Self(number + 1, count - 1)))
        }
    }

    fn order(queue: &Queue<Parts>) -> Vec<u32> {
        let part = || match queue.next(Duration::ZERO) {
            Next::Work(work, _) => Some(work),
            _ => None,
        };
        std::iter::from_fn(part).collect()
    }

    #[test]
    fn users_take_turns() {
        let queue = Queue::default();
        assert!(queue.add(1, Parts(10, 3)));
        queue.add(1, Parts(13, 1));
        queue.add(2, Parts(20, 1));
        queue.add(3, Parts(30, 2));
        queue.end();
        assert_eq!(order(&queue), [10, 20, 30, 11, 31, 12, 13]);
        assert!(matches!(queue.next(Duration::ZERO), Next::Over));
    }

    #[test]
    fn what_was_given_up_is_passed_over() {
        let queue = Queue::default();
        queue.add(1, Parts(98, 1 << 30));
        queue.add(1, Parts(7, 1));
        assert_eq!(order(&queue), [98, 99, 7]);
    }

    #[test]
    fn who_is_woken_returns_at_once() {
        let (queue, long) = (Queue::<Parts>::default(), Duration::from_secs(60));
        let start = std::time::Instant::now();
        // Before the wait has begun, and while it lasts.
        let before = queue.wakes();
        queue.wake();
        assert!(matches!(queue.next_since(before, long), Next::Nothing));
        let now = queue.wakes();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| matches!(queue.next_since(now, long), Next::Nothing));
            std::thread::sleep(Duration::from_millis(50));
            queue.wake();
            assert!(waits.join().unwrap());
        });
        assert!(start.elapsed() < long / 2);
        // Work comes first.
        queue.add(1, Parts(7, 1));
        assert!(matches!(queue.next_since(before, long), Next::Work(7, _)));
        assert!(matches!(queue.next(Duration::ZERO), Next::Nothing));
    }

    #[test]
    fn waits_end() {
        let queue: Queue<Parts> = Queue::default();
        assert!(matches!(queue.next(Duration::from_millis(1)), Next::Nothing));
        queue.add(0, Parts(GIVEN_UP, 1));
        assert!(matches!(queue.next(Duration::from_millis(1)), Next::Nothing));
    }
}
