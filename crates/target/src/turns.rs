//! A queue in which every user has a turn: who asks for much waits for themselves.

use std::collections::VecDeque;
use std::hash::Hash;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::lock;
use crate::shares::Shares;

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
    /// Threads that do the work: no user's work holds more of them than it leaves to others, so that work which never ends
    /// stops that user's work only.
    threads: Shares<K>,
}

/// A thread that does the work of a queue. What it was given last counts for its user until it gets more or waits.
pub struct Worker<'a, T, K: Eq + Hash + Copy = u32> {
    queue: &'a Queue<T, K>,
    works_for: Option<K>,
}

impl<T: Divisible, K: Eq + Hash + Copy> Worker<'_, T, K> {
    /// Waits for work. [`Queue::wake`] does not end the wait.
    pub fn next(&mut self, limit: Duration) -> Next<T::Part> {
        self.queue.wait(limit, None, Some(&mut self.works_for))
    }

    /// Waits for work until somebody has called [`Queue::wake`], since [`Queue::wakes`] gave this number.
    pub fn next_since(&mut self, wakes: u64, limit: Duration) -> Next<T::Part> {
        self.queue.wait(limit, Some(wakes), Some(&mut self.works_for))
    }
}

impl<T, K: Eq + Hash + Copy> Drop for Worker<'_, T, K> {
    fn drop(&mut self) {
        self.works_for.inspect(|user| self.queue.threads.put_back(*user, 1));
    }
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

impl<T, K: Eq + Hash + Copy> Default for Queue<T, K> {
    fn default() -> Self {
        Self::with_threads(u64::MAX)
    }
}

impl<T, K: Eq + Hash + Copy> Queue<T, K> {
    /// A queue for so many [`Worker`]s, which users share.
    #[must_use]
    pub fn with_threads(most: u64) -> Self {
        Self::with_shares(Shares::new(most))
    }

    /// The same, for those of a supply.
    #[must_use]
    pub fn with_shares(threads: Shares<K>) -> Self {
        let state = QueueState { users: VecDeque::new(), over: false, idle: 0, wakes: 0 };
        Self { state: Mutex::new(state), there: Condvar::new(), threads }
    }

    /// One of them.
    pub fn worker(&self) -> Worker<'_, T, K> {
        Worker { queue: self, works_for: None }
    }

    /// How many threads could begin with something now, at most.
    fn could_begin(&self, state: &QueueState<T, K>) -> usize {
        let of_user = |(user, list): &(K, VecDeque<T>)| match self.threads.room(*user) {
            _ if state.over => list.len(),
            room => list.len().min(usize::try_from(room).unwrap_or(usize::MAX)),
        };
        state.users.iter().map(of_user).sum()
    }

    /// The place of the user whose turn it is: the first who may have a thread, or just the first once nothing more comes.
    fn turn(&self, state: &QueueState<T, K>) -> Option<usize> {
        state.users.iter().position(|(user, _)| state.over || self.threads.room(*user) > 0)
    }
}

impl<T: Divisible, K: Eq + Hash + Copy> Queue<T, K> {
    /// Adds work; whether there is nobody to do it at once.
    pub fn add(&self, user: K, work: T) -> bool {
        self.put(lock(&self.state), user, work)
    }

    /// The same, unless the queue has [ended](Self::end).
    ///
    /// # Errors
    /// Then the work itself.
    pub fn offer(&self, user: K, work: T) -> Result<bool, T> {
        let state = lock(&self.state);
        if state.over { Err(work) } else { Ok(self.put(state, user, work)) }
    }

    fn put(&self, mut state: MutexGuard<'_, QueueState<T, K>>, user: K, work: T) -> bool {
        match state.users.iter_mut().find(|(other, _)| *other == user) {
            Some((_, list)) => list.push_back(work),
            None => state.users.push_back((user, [work].into())),
        }
        let is_short = state.idle < self.could_begin(&state);
        drop(state);
        self.there.notify_one();
        is_short
    }

    /// Waits for work, which does not count for its user. [`Self::wake`] does not end the wait.
    pub fn next(&self, limit: Duration) -> Next<T::Part> {
        self.wait(limit, None, None)
    }

    fn wait(
        &self,
        limit: Duration,
        since: Option<u64>,
        mut works_for: Option<&mut Option<K>>,
    ) -> Next<T::Part> {
        let mut state = lock(&self.state);
        // No sooner: a thread that is about to wait or to go on would seem to be missing.
        let worked_for = works_for.as_deref_mut().and_then(Option::take);
        worked_for.inspect(|user| self.threads.put_back(*user, 1));
        loop {
            while let Some((user, mut list)) = self.turn(&state).and_then(|turn| state.users.remove(turn)) {
                let (part, rest) = list.pop_front().map_or((None, None), T::divide);
                if let Some(rest) = rest {
                    list.push_front(rest);
                }
                if !list.is_empty() {
                    state.users.push_back((user, list));
                }
                if let Some(part) = part {
                    if let Some(works_for) = works_for.as_deref_mut() {
                        self.threads.count(user, 1);
                        *works_for = Some(user);
                    }
                    let (idle, more) = (state.idle, self.could_begin(&state));
                    drop(state);
                    if more > 0 {
                        // Another thread that waits may have the rest.
                        self.there.notify_one();
                    }
                    return Next::Work(part, idle < more);
                }
            }
            if state.over {
                return Next::Over;
            }
            if since.is_some_and(|since| since != state.wakes) {
                return Next::Nothing;
            }
            if limit.is_zero() {
                // It has something to finish, and then asks again.
                if let (Some(works_for), Some(user)) = (works_for, worked_for) {
                    self.threads.count(user, 1);
                    *works_for = Some(user);
                }
                return Next::Nothing;
            }
            state.idle += 1;
            let (woken, time) = self.there.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if time.timed_out() && self.turn(&state).is_none() && !state.over {
                return Next::Nothing;
            }
        }
    }

    /// Ends the waits of [`Worker::next_since`].
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
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

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
    fn work_that_does_not_end_leaves_threads_to_others() {
        let queue = Queue::with_threads(8);
        for number in 0..9 {
            queue.add(1, Parts(number, 1));
        }
        let begin = |worker: &mut Worker<'_, Parts>| match worker.next(Duration::ZERO) {
            Next::Work(part, is_short) => Some((part, is_short)),
            _ => None,
        };
        let mut workers: Vec<_> = (0..8).map(|_| queue.worker()).collect();
        let begun: Vec<_> = workers[..6].iter_mut().map(begin).collect();
        let short = |number| Some((number, true));
        assert_eq!(begun, [short(0), short(1), short(2), Some((3, false)), None, None]);
        // No thread is wanted for what may not begin.
        assert!(!queue.add(1, Parts(9, 1)));
        assert!(queue.add(2, Parts(20, 3)));
        let others: Vec<_> = workers[4..].iter_mut().map(|one| begin(one).map(|(part, _)| part)).collect();
        assert_eq!(others, [Some(20), Some(21), None, None]);
        // A thread that has done its work does more, of a user who has fewer than they leave.
        assert_eq!(begin(&mut workers[0]), Some((22, false)));
        drop(workers.drain(1..4));
        assert_eq!(workers.iter_mut().skip(1).map(|one| begin(one).is_some()).collect::<Vec<_>>(), [true; 4]);
        // At the end all that is there is done.
        queue.end();
        let left: Vec<_> = std::iter::from_fn(|| begin(&mut workers[0]).map(|(part, _)| part)).collect();
        assert_eq!(left, [8, 9]);
        assert!(matches!(workers[0].next(Duration::ZERO), Next::Over));
    }

    #[test]
    fn a_thread_that_finishes_something_is_not_missing() {
        let queue = Queue::with_threads(2);
        let mut worker = queue.worker();
        assert!(queue.add(1, Parts(0, 1)));
        assert!(matches!(worker.next(LONG), Next::Work(0, false)));
        assert!(matches!(worker.next(Duration::ZERO), Next::Nothing));
        // A user may have one of the two.
        assert!(!queue.add(1, Parts(1, 1)));
        assert!(matches!(worker.next(LONG), Next::Work(1, false)));
        drop(worker);
        assert!(queue.add(1, Parts(2, 1)));
    }

    #[test]
    fn threads_that_go_on_are_not_missing() {
        const THREADS: usize = 4;
        const WORK: u64 = 50_000;
        let (queue, together) = (Queue::with_threads(2 * THREADS as u64), Barrier::new(THREADS));
        let done = AtomicU64::new(0);
        let work = || {
            let (mut worker, mut missing) = (queue.worker(), 0);
            // One user may have as many threads as there are.
            assert!(matches!(worker.next(LONG), Next::Work(..)));
            together.wait();
            while done.fetch_add(1, Ordering::AcqRel) < 2 * WORK - THREADS as u64 {
                let Next::Work(_, is_short) = worker.next(LONG) else { panic!("some work is lost") };
                missing += usize::from(is_short);
            }
            // One that is no more would be missing.
            together.wait();
            missing
        };
        let missing = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
            for _ in 0..WORK {
                queue.add(1, Parts(0, 2));
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
        });
        assert_eq!(missing, 0);
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
        assert!(matches!(queue.worker().next_since(before, long), Next::Nothing));
        let now = queue.wakes();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| matches!(queue.worker().next_since(now, long), Next::Nothing));
            std::thread::sleep(Duration::from_millis(50));
            queue.wake();
            assert!(waits.join().unwrap());
        });
        assert!(start.elapsed() < long / 2);
        // Work comes first.
        queue.add(1, Parts(7, 1));
        assert!(matches!(queue.worker().next_since(before, long), Next::Work(7, _)));
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
