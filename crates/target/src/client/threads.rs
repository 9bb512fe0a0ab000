//! The threads of a mount's client.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use super::{Client, POLL_INTERVAL};
use crate::wire::FrameKind;
use crate::{Error, Result, handshake, lock};

/// The threads of a client.
pub(crate) struct ClientThreads {
    client: Arc<Client>,
    threads: Vec<JoinHandle<()>>,
}

impl ClientThreads {
    /// Makes the first connection, and then starts the threads that maintain it.
    pub fn start(client: &Arc<Client>) -> Result<Self> {
        client.connect(0)?;
        let mut this = Self { client: client.clone(), threads: Vec::new() };
        let [maintainer, reporter, releases] = [(); 3].map(|()| client.clone());
        this.add("target lanes", move || maintainer.maintain())?;
        this.add("target numbers", move || reporter.report_outstanding())?;
        this.add("target releases", move || releases.send_releases())?;
        Ok(this)
    }

    /// Starts a thread, which must end with the client.
    pub fn add(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        self.threads.push(thread.map_err(|e| Error::io("a thread for", "the target's connections", e))?);
        Ok(())
    }
}

impl Drop for ClientThreads {
    fn drop(&mut self) {
        self.client.over.store(true, Ordering::Release);
        self.client.changed.notify_all();
        self.client.releases.wake();
        self.client.wake_reporter();
        let lanes = lock(&self.client.state).lanes.clone();
        for lane in lanes.iter().flatten() {
            // So that the target does not take the end for a stall.
            let _ = handshake::send(&*lane.link, FrameKind::Goodbye, b"the mount ends", POLL_INTERVAL);
            lane.kill();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
