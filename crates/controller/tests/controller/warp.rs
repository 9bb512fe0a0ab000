//! Warps for tests: lanes that take turns on one thread, in a changing order; and lanes that are threads, with a
//! barrier between steps, so that disagreement between lanes shows.

use std::cell::Cell;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, Condvar, Mutex};

use onehop_proto::kernel::Lanes;

use crate::memory::{Mem, memory_of};

/// Whose turn it is: host or controller. So tests are reproducible.
#[derive(Default)]
pub struct Baton {
    state: Mutex<Turn>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Turn {
    #[default]
    Host,
    Controller,
    Ended,
}

impl Baton {
    fn pass(&self, to: Turn, until: impl Fn(Turn) -> bool) -> Turn {
        let mut state = self.state.lock().unwrap();
        if *state != Turn::Ended {
            *state = to;
        }
        self.changed.notify_all();
        while !until(*state) {
            state = self.changed.wait(state).unwrap();
        }
        *state
    }

    /// The host lets the controller run until it is idle; false if it has ended.
    pub fn run_controller(&self) -> bool {
        self.pass(Turn::Controller, |turn| turn != Turn::Controller) != Turn::Ended
    }

    /// The controller waits for its turn.
    pub fn wait(&self) {
        let mut state = self.state.lock().unwrap();
        while *state == Turn::Host {
            state = self.changed.wait(state).unwrap();
        }
    }

    fn idle(&self) {
        self.pass(Turn::Host, |turn| turn != Turn::Host);
    }

    pub fn end(&self) {
        *self.state.lock().unwrap() = Turn::Ended;
        self.changed.notify_all();
    }
}

/// Lanes in turn on one thread.
pub struct LaneThreads {
    mem: Mem,
    lanes: u32,
    locals: Vec<Cell<u32>>,
    step: Cell<u32>,
    baton: Option<Arc<Baton>>,
}

impl LaneThreads {
    pub fn new(mem: &Mem, lanes: u32, locals: u32, baton: Option<Arc<Baton>>) -> Self {
        // Local words start with garbage: the code under test must not rely on zeroes.
        let locals = (0..locals).map(|i| Cell::new(0xdead_0000 + i)).collect();
        Self { mem: mem.clone(), lanes, locals, step: Cell::new(0), baton }
    }
}

memory_of!(
    LaneThreads.mem,
    fn pause(&self) {
        match &self.baton {
            Some(baton) => baton.idle(),
            None => self.mem.pause(),
        }
    }
);

impl Lanes for LaneThreads {
    fn lanes(&self) -> u32 {
        self.lanes
    }

    fn each(&self, mut f: impl FnMut(u32)) {
        // The code under test must not rely on the order of lanes: forwards, backwards, from the middle.
        let step = self.step.get().wrapping_add(1);
        self.step.set(step);
        for i in 0..self.lanes {
            match step % 3 {
                0 => f(i),
                1 => f(self.lanes - 1 - i),
                _ => f((i + self.lanes / 2) % self.lanes),
            }
        }
    }

    fn once(&self, mut f: impl FnMut()) {
        f();
    }

    fn local(&self, at: u32) -> u32 {
        self.locals[at as usize].get()
    }

    fn set_local(&self, at: u32, value: u32) {
        self.locals[at as usize].set(value);
    }

    fn add_local(&self, at: u32, value: u32) -> u32 {
        let old = self.local(at);
        self.set_local(at, old.wrapping_add(value));
        old
    }
}

/// What the lanes of a [`Lane`] warp share.
pub struct Lockstep {
    lanes: u32,
    arrived: AtomicU32,
    generation: AtomicU32,
    locals: Vec<AtomicU32>,
}

impl Lockstep {
    pub fn new(lanes: u32, locals: u32) -> Arc<Self> {
        Arc::new(Self {
            lanes,
            arrived: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            locals: (0..locals).map(|i| AtomicU32::new(0xdead_0000 + i)).collect(),
        })
    }

    fn barrier(&self) {
        let generation = self.generation.load(Acquire);
        if self.arrived.fetch_add(1, AcqRel) + 1 == self.lanes {
            self.arrived.store(0, Relaxed);
            self.generation.store(generation.wrapping_add(1), Release);
        } else {
            while self.generation.load(Acquire) == generation {
                std::thread::yield_now();
            }
        }
    }
}

/// One lane of a warp whose lanes are threads. A step ends in a barrier and begins with none: as on a GPU.
pub struct Lane {
    mem: Mem,
    warp: Arc<Lockstep>,
    lane: u32,
    step: Cell<u32>,
}

impl Lane {
    pub fn new(mem: &Mem, warp: &Arc<Lockstep>, lane: u32) -> Self {
        Self { mem: mem.clone(), warp: warp.clone(), lane, step: Cell::new(0) }
    }

    /// Lanes fall behind each other after a barrier, as they may.
    fn dawdle(&self) {
        let step = self.step.get().wrapping_add(1);
        self.step.set(step);
        if (step ^ self.lane).is_multiple_of(5) {
            std::thread::yield_now();
        }
    }
}

memory_of!(
    Lane.mem,
    fn pause(&self) {
        std::thread::yield_now();
    }
);

impl Lanes for Lane {
    fn lanes(&self) -> u32 {
        self.warp.lanes
    }

    fn each(&self, mut f: impl FnMut(u32)) {
        f(self.lane);
        self.warp.barrier();
        self.dawdle();
    }

    fn once(&self, mut f: impl FnMut()) {
        if self.lane == 0 {
            f();
        }
        self.warp.barrier();
        self.dawdle();
    }

    fn local(&self, at: u32) -> u32 {
        self.warp.locals[at as usize].load(Relaxed)
    }

    fn set_local(&self, at: u32, value: u32) {
        self.warp.locals[at as usize].store(value, Relaxed);
    }

    fn add_local(&self, at: u32, value: u32) -> u32 {
        self.warp.locals[at as usize].fetch_add(value, AcqRel)
    }
}
