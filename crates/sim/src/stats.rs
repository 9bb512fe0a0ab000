//! Statistics of a simulated drive.

use std::collections::BTreeMap;

/// Statistics of a simulated drive since it was created.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Admin commands fetched, by opcode.
    pub admin: BTreeMap<u8, u64>,
    /// I/O commands fetched, by opcode.
    pub io: BTreeMap<u8, u64>,
    /// Completions posted.
    pub completions: u64,
    /// Completions with an error status.
    pub errors: u64,
    /// Writes to submission queue doorbells.
    pub sq_doorbells: u64,
    /// Writes to completion queue doorbells.
    pub cq_doorbells: u64,
    /// Data bytes sent to the host.
    pub bytes_read: u64,
    /// Data bytes received from the host.
    pub bytes_written: u64,
    /// Maximum outstanding I/O commands on one queue.
    pub max_in_flight: u32,
    /// How often a completion found its queue full.
    pub cq_stalls: u64,
    /// How often a fault struck.
    pub faults: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Controller resets of any kind.
    pub resets: u64,
    /// I/O commands that an engine completed, such as the null controller.
    pub engine_commands: u64,
}

impl Stats {
    /// I/O commands fetched.
    #[must_use]
    pub fn io_commands(&self) -> u64 {
        self.io.values().sum::<u64>() + self.engine_commands
    }

    /// Admin commands fetched.
    #[must_use]
    pub fn admin_commands(&self) -> u64 {
        self.admin.values().sum()
    }
}

/// Counts by opcode, cheaper than a map.
pub(crate) struct OpcodeCounts {
    pub admin: [u64; 256],
    pub io: [u64; 256],
    pub rest: Stats,
}

impl OpcodeCounts {
    pub(crate) fn new() -> Self {
        Self { admin: [0; 256], io: [0; 256], rest: Stats::default() }
    }

    pub(crate) fn stats(&self) -> Stats {
        let map = |counts: &[u64; 256]| (0u8..=255).zip(*counts).filter(|(_, n)| *n != 0).collect();
        Stats { admin: map(&self.admin), io: map(&self.io), ..self.rest.clone() }
    }
}
