//! A connection's thread: takes completions, and notices when the other side is gone.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::channel::{ChannelShared, RECEIVE};
use crate::verbs::Completion;

/// How long it polls before it sleeps: waking takes longer than most transfers.
const SPIN: Duration = Duration::from_micros(20);
/// Its longest sleep. Everything relevant wakes it.
const SLEEP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

pub(crate) fn run(shared: &ChannelShared, met: &OwnedFd) {
    let mut found = Vec::new();
    while !shared.is_over() {
        let taken = match spin(shared, &mut found) {
            // Something may have arrived between the last poll and this.
            Ok(0) => shared.queue.arm().and_then(|()| shared.queue.take(&mut found)),
            other => other,
        };
        match taken {
            Ok(0) => sleep(shared, met),
            Ok(_) => found.drain(..).for_each(|one| dispatch(shared, &one)),
            Err(error) => return shared.end(&error.to_string()),
        }
    }
}

fn spin(shared: &ChannelShared, found: &mut Vec<Completion>) -> crate::Result<usize> {
    let start = Instant::now();
    loop {
        let taken = shared.queue.take(found)?;
        if taken > 0 || start.elapsed() >= SPIN {
            return Ok(taken);
        }
        std::hint::spin_loop();
    }
}

fn dispatch(shared: &ChannelShared, one: &Completion) {
    if one.status == 0 {
        return shared.done(one.id, one.received);
    }
    let what = if one.id & RECEIVE != 0 { "receiving" } else { "sending" };
    shared.end(&format!("{what} failed: {}", shared.queue.status(one.status)));
}

fn sleep(shared: &ChannelShared, met: &OwnedFd) {
    let mut fds = [
        PollFd::from_borrowed_fd(shared.queue.events(), PollFlags::IN),
        PollFd::new(&shared.wake, PollFlags::IN),
        PollFd::new(met, PollFlags::IN | PollFlags::RDHUP),
    ];
    if poll(&mut fds, Some(&SLEEP)).is_err() {
        return;
    }
    let [events, _, socket] = fds.map(|fd| fd.revents());
    if !events.is_empty() {
        shared.queue.drain();
    }
    if !socket.is_empty() {
        shared.end(&gone(met, socket));
    }
}

/// The event of the socket over which both sides met: it carries no more traffic, so any event is the end.
fn gone(met: &OwnedFd, events: PollFlags) -> String {
    if events.contains(PollFlags::ERR)
        && let Ok(Err(error)) = rustix::net::sockopt::socket_error(met.as_fd())
    {
        return format!("the other side is gone: {error}");
    }
    if events.intersects(PollFlags::RDHUP | PollFlags::HUP) {
        return "the other side has closed it".into();
    }
    "the other side sends data on the socket of the handshake".into()
}
