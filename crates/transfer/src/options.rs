//! Options of a transfer.

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

/// The route of a transfer, and the use of its queues. Unset options have defaults.
#[derive(Clone, Debug)]
pub struct RouteOptions {
    /// The route; by default the best that works.
    pub route: RouteRequest,
    /// How GPU threads use queues; by default as owners.
    pub mode: Option<Mode>,
    /// GPU threads on the one queue of [`Mode::Shared`]; by default 32.
    pub threads: Option<u32>,
    /// Queues of [`Mode::Owner`], each with its own warp; by default 2.
    pub queues: Option<u16>,
    /// Commands in flight per queue; by default 64.
    pub depth: u32,
    /// Time limit of a command, after which it is recovered; by default 5 s.
    pub timeout: Option<Duration>,
    /// Whether the data must end up in GPU memory, which excludes `gpu/tier1` for a GPU with memory of its own.
    pub in_gpu_memory: bool,
}

impl Default for RouteOptions {
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

impl RouteOptions {
    /// Time limit of a command.
    #[must_use]
    pub fn patience(&self) -> Duration {
        self.timeout.unwrap_or(Duration::from_secs(5))
    }

    /// The drive's options.
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

    /// Whether an option applies to GPU threads only.
    fn wants_gpu(&self) -> bool {
        self.mode.is_some() || self.threads.is_some() || self.queues.is_some()
    }

    /// The routes to try, in order.
    ///
    /// # Errors
    /// When drives do not have the requested route.
    pub fn candidates(&self) -> Result<Vec<Route>> {
        let mut routes = self.route.candidates()?;
        // Options for GPU threads exclude routes on which the CPU submits commands.
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
    fn contradictory_options_are_refused() {
        let conflict = |options: &RouteOptions| match options.gpu_mode() {
            Err(Error::Conflict(conflict)) => conflict,
            other => panic!("{other:?}"),
        };
        let pinned = RouteOptions { route: "cpu/pinned".parse().unwrap(), ..RouteOptions::default() };
        assert_eq!(pinned.gpu_mode().unwrap(), GpuMode::Owner);
        let queues = RouteOptions { queues: Some(1), ..pinned };
        assert_eq!(conflict(&queues), Conflict::GpuOptionsOnCpuRoute);
        let owners = RouteOptions { threads: Some(7), ..RouteOptions::default() };
        assert_eq!(conflict(&owners), Conflict::ThreadsOfOwners);
        let shared = RouteOptions { mode: Some(Mode::Shared), ..owners };
        assert_eq!(shared.gpu_mode().unwrap(), GpuMode::Shared { threads: 7 });
        assert_eq!(conflict(&RouteOptions { queues: Some(3), ..shared.clone() }), Conflict::QueuesShared);
        // Options for GPU threads exclude CPU routes.
        assert!(shared.candidates().unwrap().iter().all(|route| route.initiator() == "gpu"));
        assert_eq!(
            RouteOptions { queues: Some(40), ..RouteOptions::default() }.drive_options(true).queues,
            40
        );
    }
}
