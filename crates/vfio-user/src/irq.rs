//! Vectors of MSI-X or MSI: event fds that the client gives, masks, and what is pending behind them.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

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
struct State {
    vectors: Vec<Vector>,
    /// Whether they are enabled, and all masked, as the configuration space has them.
    enabled: bool,
    all_masked: bool,
}

impl State {
    /// Raises a vector, or remembers that it is to be raised.
    fn raise(&mut self, vector: usize) {
        let (enabled, all_masked) = (self.enabled, self.all_masked);
        let Some(vector) = self.vectors.get_mut(vector) else { return };
        match &vector.event {
            Some(event) if !vector.masked && !all_masked => {
                vector.pending = false;
                // It fails where the client has not looked for 2^64 interrupts, or closed its end: nobody waits.
                let _ = rustix::io::write(event, &1u64.to_ne_bytes());
            }
            Some(_) => vector.pending = true,
            None => vector.pending = enabled,
        }
    }

    /// Raises what is pending and no longer held back.
    fn settle(&mut self) {
        for i in 0..self.vectors.len() {
            if self.vectors[i].pending {
                self.raise(i);
            }
        }
    }
}

/// Takes an event fd; a pipe or a socket could end or stop this process when it is written to.
fn check_event(event: &OwnedFd) -> Result<(), Refusal> {
    let refused = |e| Refusal::invalid(format!("an interrupt's event fd cannot be used: {e}"));
    // Event fds have no file type, as other anonymous files that refuse to be written.
    if FileType::from_raw_mode(fstat(event).map_err(refused)?.st_mode) != FileType::Unknown {
        return Err(Refusal::invalid("an interrupt came with something that is no event fd"));
    }
    // A device must not hang because its client does not read.
    let flags = fcntl_getfl(event).map_err(refused)?;
    fcntl_setfl(event, flags | OFlags::NONBLOCK).map_err(refused)
}

/// The vectors of a function.
pub struct Interrupts(Mutex<State>);

impl Interrupts {
    pub(crate) fn new(vectors: u16) -> Self {
        let vectors = (0..vectors).map(|_| Vector::default()).collect();
        Self(Mutex::new(State { vectors, ..State::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Raises a vector; one that the function does not have is none.
    pub fn raise(&self, vector: u16) {
        self.state().raise(vector.into());
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u32 {
        self.state().vectors.len() as u32
    }

    /// What the configuration space says from now on.
    pub(crate) fn control(&self, enabled: bool, all_masked: bool) {
        let mut state = self.state();
        (state.enabled, state.all_masked) = (enabled, all_masked);
        if !enabled {
            state.vectors.iter_mut().for_each(|v| v.pending = false);
        }
        state.settle();
    }

    /// Gives vectors their event fds, or takes them away.
    pub(crate) fn connect(&self, start: u32, events: Vec<Option<OwnedFd>>) -> Result<(), Refusal> {
        events.iter().flatten().try_for_each(check_event)?;
        let mut state = self.state();
        for (vector, event) in state.vectors.iter_mut().skip(start as usize).zip(events) {
            vector.event = event;
        }
        state.settle();
        Ok(())
    }

    /// Masks, unmasks or raises those vectors from `start` on for which `which` is true.
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

    /// The client is done with interrupts: no event fd is kept.
    pub(crate) fn disconnect(&self) {
        self.state().vectors.iter_mut().for_each(|v| *v = Vector::default());
    }

    /// The pending bits, 64 vectors to eight bytes.
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

    /// How often it was raised since the last look.
    fn raised(event: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
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
