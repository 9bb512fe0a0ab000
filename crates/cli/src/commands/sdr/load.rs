//! What this process costs the CPU.

use std::fs;
use std::time::Duration;

/// The thread of the simulated board.
const BOARD: &str = "sdr board";
/// How long a tick of the kernel's accounts is, on every machine.
const TICK: Duration = Duration::from_millis(10);

/// CPU time: of the simulated board's thread, and of all others.
#[derive(Clone, Copy, Default)]
pub(super) struct CpuTime {
    pub board: Duration,
    pub ours: Duration,
}

impl CpuTime {
    /// What has been used up to now; none if the kernel does not report it.
    pub(super) fn now() -> Self {
        let mut sum = Self::default();
        for task in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
            if let Some((name, time)) =
                fs::read_to_string(task.path().join("stat")).ok().as_deref().and_then(parse)
            {
                *(if name == BOARD { &mut sum.board } else { &mut sum.ours }) += time;
            }
        }
        sum
    }

    /// What has been used since an earlier moment.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self { board: self.board.saturating_sub(earlier.board), ours: self.ours.saturating_sub(earlier.ours) }
    }
}

/// A thread's name and time. The name may hold anything, so the last parenthesis is where it ends.
fn parse(stat: &str) -> Option<(&str, Duration)> {
    let (head, rest) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let ticks: u32 = fields.next()?.parse::<u32>().ok()?.checked_add(fields.next()?.parse().ok()?)?;
    Some((name, TICK * ticks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_with_unusual_names_are_read() {
        let line = "12 (a) (b) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0";
        assert_eq!(parse(line), Some(("a) (b", Duration::from_secs(2))));
        assert_eq!(parse("12 (a"), None);
        let now = CpuTime::now();
        assert!(now.since(now).ours.is_zero());
    }
}
