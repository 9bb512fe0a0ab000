//! MSI-X or MSI vectors: the client's event fds, masks and pending bits.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};

use crate::error::Refusal;
use crate::wire::IrqAction;

#[derive(Default)]
struct Vector {
    event: Option<OwnedFd>,
    masked: bool,
    pending: bool,
}

#[derive(Default)]
struct VectorState {
    vectors: Vec<Vector>,
    /// Whether they are enabled, and all masked, by the configuration space.
    enabled: bool,
    all_masked: bool,
}

impl VectorState {
    /// Raises a vector, or marks it pending.
    fn raise(&mut self, vector: usize) {
        let (enabled, all_masked) = (self.enabled, self.all_masked);
        let Some(vector) = self.vectors.get_mut(vector) else { return };
        match &vector.event {
            Some(event) if !vector.masked && !all_masked => {
                vector.pending = false;
                // Fails if the client has closed its end: no one is waiting.
                if has_room(event) {
                    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
                }
            }
            Some(_) => vector.pending = true,
            None => vector.pending = enabled,
        }
    }

    /// Raises pending vectors that are no longer masked.
    fn settle(&mut self) {
        for i in 0..self.vectors.len() {
            if self.vectors[i].pending {
                self.raise(i);
            }
        }
    }
}

/// Whether a write to an event fd returns at once. A client can make the fd blocking again, and fill it with 2^64
/// interrupts.
fn has_room(event: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(event, PollFlags::OUT)], Some(&now)) == Ok(1)
}

/// Checks that it is an event fd: writing to a pipe or socket could kill or block this process.
fn check_event(event: &OwnedFd) -> Result<(), Refusal> {
    let refused = |e| Refusal::invalid(format!("an event fd is unusable: {e}"));
    // Event fds have no file type. Other anonymous files share that, but refuse writes.
    if FileType::from_raw_mode(fstat(event).map_err(refused)?.st_mode) != FileType::Unknown {
        return Err(Refusal::invalid("a file passed for an interrupt is not an event fd"));
    }
    // The device must not block if its client does not read.
    let flags = fcntl_getfl(event).map_err(refused)?;
    fcntl_setfl(event, flags | OFlags::NONBLOCK).map_err(refused)
}

/// The vectors of a function.
pub struct Interrupts(Mutex<VectorState>);

impl Interrupts {
    pub(crate) fn new(vectors: u16) -> Self {
        let vectors = (0..vectors).map(|_| Vector::default()).collect();
        Self(Mutex::new(VectorState { vectors, ..VectorState::default() }))
    }

    fn state(&self) -> MutexGuard<'_, VectorState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Raises a vector; ignored if the function does not have it.
    pub fn raise(&self, vector: u16) {
        self.state().raise(vector.into());
    }

    /// Number of vectors.
    pub(crate) fn count(&self) -> u32 {
        self.state().vectors.len() as u32
    }

    /// Applies a change of the configuration space.
    pub(crate) fn control(&self, enabled: bool, all_masked: bool) {
        let mut state = self.state();
        (state.enabled, state.all_masked) = (enabled, all_masked);
        if !enabled {
            state.vectors.iter_mut().for_each(|v| v.pending = false);
        }
        state.settle();
    }

    /// Connects vectors to event fds, or disconnects them.
    pub(crate) fn connect(&self, start: u32, events: Vec<Option<OwnedFd>>) -> Result<(), Refusal> {
        events.iter().flatten().try_for_each(check_event)?;
        let mut state = self.state();
        for (vector, event) in state.vectors.iter_mut().skip(start as usize).zip(events) {
            vector.event = event;
        }
        state.settle();
        Ok(())
    }

    /// Masks, unmasks or raises the vectors from `start` on for which `which` is true.
    pub(crate) fn act(&self, action: IrqAction, start: u32, which: impl Iterator<Item = bool>) {
        let mut state = self.state();
        for (i, _) in which.enumerate().filter(|(_, chosen)| *chosen) {
            let i = start as usize + i;
            match (action, state.vectors.get_mut(i)) {
                (IrqAction::Mask, Some(vector)) => vector.masked = true,
                (IrqAction::Unmask, Some(vector)) => vector.masked = false,
                (IrqAction::Trigger, Some(_)) => state.raise(i),
                (_, None) => {}
            }
        }
        state.settle();
    }

    /// Drops all event fds.
    pub(crate) fn disconnect(&self) {
        self.state().vectors.iter_mut().for_each(|v| *v = Vector::default());
    }

    /// The pending bits: 64 vectors in eight bytes.
    pub(crate) fn pending(&self) -> Vec<u8> {
        let state = self.state();
        let mut bits = vec![0; state.vectors.len().div_ceil(64) * 8];
        for (i, _) in state.vectors.iter().enumerate().filter(|(_, v)| v.pending) {
            bits[i / 8] |= 1 << (i % 8);
        }
        bits
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// How often it was raised since the last call.
    fn raised(event: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    /// A write that blocks would hold the lock, and the server could not even be stopped.
    #[test]
    fn a_full_event_fd_blocks_no_one() {
        let irqs = Interrupts::new(1);
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        irqs.connect(0, vec![Some(event.try_clone().unwrap())]).unwrap();
        fcntl_setfl(&event, fcntl_getfl(&event).unwrap() - OFlags::NONBLOCK).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let (done, wait) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            irqs.raise(0);
            done.send(irqs).unwrap();
        });
        let irqs = wait.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
        assert_eq!(raised(&event), u64::MAX - 1);
        irqs.raise(0);
        assert_eq!(raised(&event), 1);
    }

    #[test]
    fn what_is_masked_is_pending_and_comes_later() {
        let irqs = Interrupts::new(70);
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        irqs.control(true, false);
        irqs.raise(69);
        assert_eq!(irqs.pending()[8], 1 << 5);
        irqs.connect(69, vec![Some(event.try_clone().unwrap())]).unwrap();
        assert_eq!((raised(&event), irqs.pending()[8]), (1, 0));
        irqs.act(IrqAction::Mask, 69, [true].into_iter());
        irqs.raise(69);
        irqs.raise(69);
        assert_eq!((raised(&event), irqs.pending()[8]), (0, 1 << 5));
        irqs.control(true, true);
        irqs.act(IrqAction::Unmask, 69, [true].into_iter());
        assert_eq!(raised(&event), 0);
        irqs.control(true, false);
        assert_eq!((raised(&event), irqs.pending()[8]), (1, 0));
        irqs.act(IrqAction::Trigger, 68, [true, true, true].into_iter());
        assert_eq!((raised(&event), irqs.pending()[8]), (1, 1 << 4));
        irqs.disconnect();
        irqs.raise(69);
        irqs.raise(700);
        irqs.control(false, false);
        assert_eq!((raised(&event), irqs.pending()), (0, vec![0; 16]));
    }
}
