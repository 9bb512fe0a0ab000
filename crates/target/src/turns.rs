//! A queue in which every user has a turn: who asks for much waits for themselves.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::lock;

/// Work by user.
pub struct Queue<T> {
    state: Mutex<State<T>>,
    there: Condvar,
}

struct State<T> {
    /// Users with work, the next to have their turn first.
    users: VecDeque<(u32, VecDeque<T>)>,
    over: bool,
    idle: usize,
}

/// What came of waiting.
pub enum Next<T> {
    /// Work.
    Work(T),
    /// Nothing came in time.
    Nothing,
    /// Nothing will come any more.
    Over,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        let state = State { users: VecDeque::new(), over: false, idle: 0 };
        Self { state: Mutex::new(state), there: Condvar::new() }
    }
}

impl<T> Queue<T> {
    /// Adds work; whether there is nobody to do it at once.
    pub fn add(&self, uid: u32, work: impl IntoIterator<Item = T>) -> bool {
        let mut state = lock(&self.state);
        match state.users.iter_mut().find(|(user, _)| *user == uid) {
            Some((_, list)) => list.extend(work),
            None => state.users.push_back((uid, work.into_iter().collect())),
        }
        let waiting: usize = state.users.iter().map(|(_, list)| list.len()).sum();
        let busy = state.idle < waiting;
        drop(state);
        self.there.notify_all();
        busy
    }

    /// Waits for work.
    pub fn next(&self, limit: Duration) -> Next<T> {
        let mut state = lock(&self.state);
        loop {
            if let Some((uid, mut list)) = state.users.pop_front() {
                let work = list.pop_front();
                if !list.is_empty() {
                    state.users.push_back((uid, list));
                }
                if let Some(work) = work {
                    return Next::Work(work);
                }
                continue;
            }
            if state.over {
                return Next::Over;
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

    /// Wakes all who wait, so that they look around.
    pub fn wake(&self) {
        self.there.notify_all();
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

    #[test]
    fn users_take_turns() {
        let queue = Queue::default();
        assert!(queue.add(1, [10, 11, 12, 13]));
        queue.add(2, [20]);
        queue.add(3, [30, 31]);
        queue.end();
        let mut order = Vec::new();
        while let Next::Work(work) = queue.next(Duration::ZERO) {
            order.push(work);
        }
        assert_eq!(order, [10, 20, 30, 11, 31, 12, 13]);
        assert!(matches!(queue.next(Duration::ZERO), Next::Over));
    }

    #[test]
    fn waits_end() {
        let queue: Queue<()> = Queue::default();
        assert!(matches!(queue.next(Duration::from_millis(1)), Next::Nothing));
        queue.add(0, []);
        assert!(matches!(queue.next(Duration::from_millis(1)), Next::Nothing));
    }
}
