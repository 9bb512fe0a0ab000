//! A queue in which users take turns, so that a user with much work delays only themselves.

use std::collections::VecDeque;
use std::hash::Hash;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::lock;
use crate::shares::Shares;

/// Work for one thread, or for several that each take a part.
pub trait Divisible: Sized {
    /// The part for one thread.
    type Part;

    /// Splits off a part. Returns it with the rest. There is no part if the work was cancelled. Called with the queue
    /// locked.
    fn divide(self) -> (Option<Self::Part>, Option<Self>);
}

/// Queued work by user.
pub struct Queue<T, K = u32> {
    state: Mutex<QueueState<T, K>>,
    there: Condvar,
    /// Worker threads. One user's work leaves as many to others, so that work which never ends blocks that user only.
    threads: Shares<K>,
}

/// A worker thread of a queue. Its last part counts for its user until it asks for more, or waits.
pub struct Worker<'a, T, K: Eq + Hash + Copy = u32> {
    queue: &'a Queue<T, K>,
    works_for: Option<K>,
}

impl<T: Divisible, K: Eq + Hash + Copy> Worker<'_, T, K> {
    /// Waits for work. Not ended by [`Queue::wake`].
    pub fn next(&mut self, limit: Duration) -> Next<T::Part> {
        self.queue.wait(limit, None, Some(&mut self.works_for))
    }

    /// Waits for work. Ended by a [`Queue::wake`] after [`Queue::wakes`] returned this number.
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
    /// Users with work; the first has the next turn.
    users: VecDeque<(K, VecDeque<T>)>,
    over: bool,
    idle: usize,
    /// The number of wakes.
    wakes: u64,
}

/// The result of waiting.
pub enum Next<P> {
    /// A part, and whether more is queued than there are idle threads for.
    Work(P, bool),
    /// No work on a timeout or wake.
    Nothing,
    /// The queue has ended, and is empty.
    Over,
}

impl<T, K: Eq + Hash + Copy> Default for Queue<T, K> {
    fn default() -> Self {
        Self::with_threads(u64::MAX)
    }
}

impl<T, K: Eq + Hash + Copy> Queue<T, K> {
    /// A queue for at most this many [`Worker`]s, which users share.
    #[must_use]
    pub fn with_threads(most: u64) -> Self {
        Self::with_shares(Shares::new(most))
    }

    /// A queue whose workers are limited by a budget.
    #[must_use]
    pub fn with_shares(threads: Shares<K>) -> Self {
        let state = QueueState { users: VecDeque::new(), over: false, idle: 0, wakes: 0 };
        Self { state: Mutex::new(state), there: Condvar::new(), threads }
    }

    /// A worker of this queue.
    pub fn worker(&self) -> Worker<'_, T, K> {
        Worker { queue: self, works_for: None }
    }

    /// How many threads could have work now: those that have some, and one for each item that may start.
    pub fn useful_threads(&self) -> usize {
        let state = lock(&self.state);
        usize::try_from(self.threads.taken()).unwrap_or(usize::MAX).saturating_add(self.could_begin(&state))
    }

    /// How many parts could be started now, at most.
    fn could_begin(&self, state: &QueueState<T, K>) -> usize {
        let of_user = |(user, list): &(K, VecDeque<T>)| match self.threads.room(*user) {
            _ if state.over => list.len(),
            room => list.len().min(usize::try_from(room).unwrap_or(usize::MAX)),
        };
        state.users.iter().map(of_user).sum()
    }

    /// The index of the user with the next turn: the first who may have a thread, or just the first once the queue has
    /// ended.
    fn turn(&self, state: &QueueState<T, K>) -> Option<usize> {
        state.users.iter().position(|(user, _)| state.over || self.threads.room(*user) > 0)
    }
}

impl<T: Divisible, K: Eq + Hash + Copy> Queue<T, K> {
    /// Adds work. Returns whether there is no idle thread for it.
    pub fn add(&self, user: K, work: T) -> bool {
        self.put(lock(&self.state), user, work)
    }

    /// Adds work, unless the queue has [ended](Self::end).
    ///
    /// # Errors
    /// Returns the work.
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

    /// Waits for a part, which does not count for its user. Not ended by [`Self::wake`].
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
        // Under the lock: otherwise a thread that is about to wait or continue would seem to be missing.
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
                        // Another waiting thread may take the rest.
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
                // The worker has something to finish before it asks again, so its share stays taken.
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

    /// The number of wakes so far.
    pub fn wakes(&self) -> u64 {
        lock(&self.state).wakes
    }

    /// Ends the queue. Queued work is still done.
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

    /// A number of parts, numbered from the first field. Parts from `CANCELLED` on are cancelled.
    struct Parts(u32, u32);
    const CANCELLED: u32 = 100;

    impl Divisible for Parts {
        type Part = u32;

        fn divide(self) -> (Option<u32>, Option<Self>) {
            let Self(number, count) = self;
            if number >= CANCELLED {
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
        // No thread is wanted for work that may not start.
        assert!(!queue.add(1, Parts(9, 1)));
        assert!(queue.add(2, Parts(20, 3)));
        let others: Vec<_> = workers[4..].iter_mut().map(|one| begin(one).map(|(part, _)| part)).collect();
        assert_eq!(others, [Some(20), Some(21), None, None]);
        // A worker that is done continues with a user who has a share left.
        assert_eq!(begin(&mut workers[0]), Some((22, false)));
        drop(workers.drain(1..4));
        assert_eq!(workers.iter_mut().skip(1).map(|one| begin(one).is_some()).collect::<Vec<_>>(), [true; 4]);
        // After the end, all queued work is done.
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
        // One user may have one of the two threads.
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
            // One user may have all of these threads.
            assert!(matches!(worker.next(LONG), Next::Work(..)));
            together.wait();
            while done.fetch_add(1, Ordering::AcqRel) < 2 * WORK - THREADS as u64 {
                let Next::Work(_, is_short) = worker.next(LONG) else { panic!("work was lost") };
                missing += usize::from(is_short);
            }
            // A thread that had ended would be missing.
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
    fn cancelled_work_is_skipped() {
        let queue = Queue::default();
        queue.add(1, Parts(98, 1 << 30));
        queue.add(1, Parts(7, 1));
        assert_eq!(order(&queue), [98, 99, 7]);
    }

    #[test]
    fn a_wake_ends_the_wait() {
        let (queue, long) = (Queue::<Parts>::default(), Duration::from_secs(60));
        let start = std::time::Instant::now();
        // Before the wait, and during it.
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
        // Work takes precedence.
        queue.add(1, Parts(7, 1));
        assert!(matches!(queue.worker().next_since(before, long), Next::Work(7, _)));
        assert!(matches!(queue.next(Duration::ZERO), Next::Nothing));
    }

    #[test]
    fn waits_end() {
        let queue: Queue<Parts> = Queue::default();
        assert!(matches!(queue.next(Duration::from_millis(1)), Next::Nothing));
        queue.add(0, Parts(CANCELLED, 1));
        assert!(matches!(queue.next(Duration::from_millis(1)), Next::Nothing));
    }
}
