//! What a transfer is to be like.

use std::time::Duration;

use onehop_drive::GpuMode;

use crate::error::{Conflict, Error, Result};
use crate::route::{Route, RouteRequest};

/// How GPU threads use queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Each queue is owned by one warp.
    Owner,
    /// All threads use one queue.
    Shared,
}

/// Which route a transfer takes, and how its queues are used. What is left out takes a default.
#[derive(Clone, Debug)]
pub struct Options {
    /// The route: the best that works, unless one is named.
    pub route: RouteRequest,
    /// How GPU threads use queues: as owners.
    pub mode: Option<Mode>,
    /// GPU threads on the one queue of [`Mode::Shared`]: 32.
    pub threads: Option<u32>,
    /// Queues of [`Mode::Owner`], each with a warp of its own: 2.
    pub queues: Option<u16>,
    /// Commands in flight on each queue: 64.
    pub depth: u32,
    /// How long a command may take before it is recovered: 5 s.
    pub timeout: Option<Duration>,
    /// Whether the data has to end in the memory of the GPU, so that `gpu/tier1` is none for a GPU with memory of its own.
    pub in_gpu_memory: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            route: RouteRequest::Auto,
            mode: None,
            threads: None,
            queues: None,
            depth: 64,
            timeout: None,
            in_gpu_memory: false,
        }
    }
}

impl Options {
    /// How long a command may take.
    #[must_use]
    pub fn patience(&self) -> Duration {
        self.timeout.unwrap_or(Duration::from_secs(5))
    }

    /// How the drive is to be driven.
    #[must_use]
    pub fn drive_options(&self, writable: bool) -> onehop_drive::Options {
        let standard = onehop_drive::Options::default();
        onehop_drive::Options {
            writable,
            queues: standard.queues.max(self.queues.unwrap_or(0)),
            depth: self.depth,
            timeout: self.patience(),
            ..standard
        }
    }

    /// Whether something was asked for that only GPU threads have.
    fn wants_gpu(&self) -> bool {
        self.mode.is_some() || self.threads.is_some() || self.queues.is_some()
    }

    /// The routes to try, in order.
    ///
    /// # Errors
    /// When the route that was asked for does not exist for drives.
    pub fn candidates(&self) -> Result<Vec<Route>> {
        let mut routes = self.route.candidates()?;
        // A caller that sets how GPU threads do it does not want the CPU to do it instead.
        if self.wants_gpu() {
            routes.retain(|route| matches!(route, Route::Gpu(_)));
        }
        Ok(routes)
    }

    /// How the GPU's threads share queues.
    ///
    /// # Errors
    /// When options contradict each other.
    pub fn gpu_mode(&self) -> Result<GpuMode> {
        let only = |name: &str| matches!(&self.route, RouteRequest::Only(only) if *only == name);
        let cpu = only("cpu/direct") || only("cpu/pinned");
        if cpu && self.wants_gpu() {
            return Err(Error::Conflict(Conflict::GpuOptionsOnCpuRoute));
        }
        match self.mode.unwrap_or(Mode::Owner) {
            Mode::Owner if self.threads.is_some() => Err(Error::Conflict(Conflict::ThreadsOfOwners)),
            Mode::Owner => Ok(GpuMode::Owner),
            Mode::Shared if self.queues.is_some() => Err(Error::Conflict(Conflict::QueuesShared)),
            Mode::Shared => Ok(GpuMode::Shared { threads: self.threads.unwrap_or(32) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_contradicts_is_refused() {
        let conflict = |options: &Options| match options.gpu_mode() {
            Err(Error::Conflict(conflict)) => conflict,
            other => panic!("{other:?}"),
        };
        let pinned = Options { route: "cpu/pinned".parse().unwrap(), ..Options::default() };
        assert_eq!(pinned.gpu_mode().unwrap(), GpuMode::Owner);
        let queues = Options { queues: Some(1), ..pinned };
        assert_eq!(conflict(&queues), Conflict::GpuOptionsOnCpuRoute);
        let owners = Options { threads: Some(7), ..Options::default() };
        assert_eq!(conflict(&owners), Conflict::ThreadsOfOwners);
        let shared = Options { mode: Some(Mode::Shared), ..owners };
        assert_eq!(shared.gpu_mode().unwrap(), GpuMode::Shared { threads: 7 });
        assert_eq!(conflict(&Options { queues: Some(3), ..shared.clone() }), Conflict::QueuesShared);
        // Options of GPU threads rule the CPU out.
        assert!(shared.candidates().unwrap().iter().all(|route| route.initiator() == "gpu"));
        assert_eq!(Options { queues: Some(40), ..Options::default() }.drive_options(true).queues, 40);
    }
}
