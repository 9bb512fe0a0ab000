//! Interrupts as event fds.

use std::os::fd::OwnedFd;
use std::time::Duration;

use onehop_os::{Deadline, Interrupt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// An interrupt signalled by an event fd.
pub(crate) struct EventFd(pub(crate) OwnedFd);

impl EventFd {
    /// Resets the count; returns whether it was non-zero.
    fn take(&self) -> bool {
        let mut count = [0; 8];
        rustix::io::read(&self.0, &mut count).is_ok()
    }
}

impl Interrupt for EventFd {
    fn wait(&self, limit: Duration) -> bool {
        let deadline = Deadline::after(limit);
        loop {
            if self.take() {
                return true;
            }
            if deadline.passed() {
                return false;
            }
            let left = Timespec::try_from(deadline.left()).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
            // However the wait ends, the count is checked again.
            let _ = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&left));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn an_event_is_seen_once() {
        let irq = EventFd(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        assert!(!irq.wait(Duration::ZERO));
        assert!(!irq.wait(Duration::from_millis(2)));
        rustix::io::write(&irq.0, &3_u64.to_ne_bytes()).unwrap();
        assert!(irq.wait(Duration::from_secs(30)));
        assert!(!irq.wait(Duration::ZERO));
        std::thread::scope(|scope| {
            scope.spawn(|| rustix::io::write(&irq.0, &1_u64.to_ne_bytes()).unwrap());
            assert!(irq.wait(Duration::from_secs(30)));
        });
    }
}
