//! Threads that execute batches and operations in streams, which no thread of the program waits in.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::error::{Code, Failure};
use crate::log::{Level, say};

/// Maximum number of operations in progress: enough to keep the engine busy.
const MOST: usize = 16;

type Task = Box<dyn FnOnce() + Send>;

/// See the module.
pub struct Executor {
    name: &'static str,
    state: Mutex<ExecutorState>,
    more: Condvar,
}

#[derive(Default)]
struct ExecutorState {
    tasks: VecDeque<Task>,
    started: usize,
    idle: usize,
}

impl Executor {
    pub fn new(name: &'static str) -> Self {
        Self { name, state: Mutex::default(), more: Condvar::new() }
    }

    /// Starts a thread, if there is none.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(&'static self) -> Result<(), Failure> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.started == 0 {
            self.add_thread(&mut state);
        }
        if state.started == 0 { Err(Code::NoMemory.into()) } else { Ok(()) }
    }

    fn add_thread(&'static self, state: &mut ExecutorState) {
        let started = std::thread::Builder::new().name(self.name.into()).spawn(|| self.work());
        state.started += usize::from(started.is_ok());
    }

    /// Queues a task for the next free thread, which [`Self::start`] has started. Tasks start in the order of
    /// submission.
    pub fn submit(&'static self, task: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.idle <= state.tasks.len() && state.started < MOST {
            self.add_thread(&mut state);
        }
        state.tasks.push_back(Box::new(task));
        self.more.notify_one();
    }

    fn work(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(task) = state.tasks.pop_front() {
                drop(state);
                if catch_unwind(AssertUnwindSafe(task)).is_err() {
                    say(Level::Error, "an operation panicked; this is a defect of onehop");
                }
                state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.idle += 1;
            state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}
