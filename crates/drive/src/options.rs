//! The options of a drive.

use std::time::Duration;

use onehop_os::StopSignal;

use crate::{Error, Result};

/// How long an admin command of an orderly shutdown may take after a request to stop.
pub(crate) const STOP_PATIENCE: Duration = Duration::from_secs(1);

/// Most tries that a kernel's counter holds.
const MOST_RETRIES: u32 = 255;

/// The options of a drive. The defaults suit real drives.
///
/// Opening a drive and resetting it take four tries at most, with pauses of 1.1 s in all. A try ends with the first admin
/// command that is not answered within `admin_timeout`, or fails for a while. Before that it waits for CSTS.RDY three times at
/// most, and once for the registers after a function reset; each wait ends after the time that the controller claims to need (at least
/// 500 ms), and after `ready_limit`. A controller that answers nothing thus takes at most
/// 4 × (4 × `ready_limit` + `admin_timeout`) + 1.1 s; one that claims 500 ms takes 50 s with the defaults. Commands that are
/// answered late, but in time, are added to that, and so are Identify commands for namespaces that fail: each try sends them
/// again for `admin_timeout`.
///
/// Across a network a reset is tried as long as the target can be connected again. All admin commands of such a try together
/// take at most 2 × `admin_timeout`, and a twentieth of it for each namespace and each queue.
///
/// Creating queues takes four tries at most, with the same pauses. A try ends with the first creation that is not answered within
/// `admin_timeout`. It is aborted within `abort_wait`, and the pair deleted; if that fails, the controller is reset. The
/// queues of a GPU are created before a launch, and again by the host of an exported queue after a recovery. Before a launch,
/// no try begins once the limit of its job is over.
///
/// Deleting a queue pair takes two commands. One that is not answered within `admin_timeout` (of GPU queues and in recoveries:
/// `abort_wait`) is aborted within `abort_wait`, and tried once more within another; if that fails, the controller is reset.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether write commands are allowed.
    pub writable: bool,
    /// I/O queues to ask for; at least one.
    pub queues: u16,
    /// Commands in flight on a CPU-driven queue, if the controller allows so many; at least one.
    pub depth: u32,
    /// How long a command may take.
    pub timeout: Duration,
    /// How long an admin command may take.
    pub admin_timeout: Duration,
    /// How long an aborted command may take to complete.
    pub abort_wait: Duration,
    /// How often a command is tried again when its status allows it, or when a recovery took it from the controller, even
    /// one for another command. At most 255; with 0, no I/O command is tried again.
    ///
    /// On CPU queues, path errors (status code type 3) do not count. They have a limit of time, from a command's first on:
    /// ANATT, or [`timeout`](Self::timeout) where the controller states none. Until then the command is tried again every
    /// 100 ms, or after the delay that its status asks for where that is longer, and a last time when the limit is reached.
    /// Asymmetric Access Persistent Loss is final.
    pub retries: u32,
    /// The longest wait for CSTS.RDY, even if the controller claims to need more.
    pub ready_limit: Duration,
    /// Describe long contiguous transfers by SGLs where the controller takes them.
    pub sgl: bool,
    /// Most bytes of host memory for a drive's Host Memory Buffer.
    pub host_memory: u64,
    /// Trust a read's completion only when its data has visibly arrived: guards against drives and platforms that let
    /// completions overtake data, or that complete what never arrived. Costs a write and a read of every word of the
    /// memory. Reads by the CPU's queues into memory that the CPU does not reach go without.
    pub canary: bool,
    /// Largest transfer of one command, if the controller allows it. Values below a page count as a page, above 64 MiB as
    /// 64 MiB.
    pub max_transfer: u64,
    /// Once it is set, waits for the drive end with [`Error::Interrupted`](crate::Error::Interrupted): opening it,
    /// resets, commands of CPU queues and jobs of GPU queues. Commands that do not end soon are aborted like late ones.
    /// If that would need a reset, the drive is given up instead, and keeps their memory until it is dropped. The drive
    /// is still shut down in order: its queues are deleted within a second, or else the controller is disabled with
    /// them.
    pub stop: StopSignal,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            writable: false,
            queues: 8,
            depth: 128,
            timeout: Duration::from_secs(10),
            admin_timeout: Duration::from_secs(10),
            abort_wait: Duration::from_millis(500),
            retries: 3,
            ready_limit: Duration::from_secs(128),
            sgl: true,
            host_memory: 64 << 20,
            canary: true,
            max_transfer: 1 << 20,
            stop: StopSignal::default(),
        }
    }
}

impl Options {
    /// Times of zero are refused as well.
    ///
    /// # Errors
    /// The first option that is out of bounds.
    pub(crate) fn check(&self) -> Result<()> {
        within("queues", self.queues.into(), 1, u64::MAX)?;
        within("depth", self.depth.into(), 1, u64::MAX)?;
        within("retries", self.retries.into(), 0, MOST_RETRIES.into())?;
        lasts("timeout", self.timeout)?;
        lasts("admin_timeout", self.admin_timeout)?;
        lasts("abort_wait", self.abort_wait)?;
        lasts("ready_limit", self.ready_limit)
    }
}

/// Checks the bounds of a number.
pub(crate) fn within(option: &'static str, value: u64, least: u64, most: u64) -> Result<()> {
    let limit = match value {
        _ if value < least => format!("it is at least {least}"),
        _ if value > most => format!("it is at most {most}"),
        _ => return Ok(()),
    };
    Err(Error::Option { option, value: value.to_string(), limit })
}

/// Checks that a time is not zero.
pub(crate) fn lasts(option: &'static str, time: Duration) -> Result<()> {
    if !time.is_zero() {
        return Ok(());
    }
    Err(Error::Option { option, value: format!("{time:?}"), limit: "it is more than zero".into() })
}
