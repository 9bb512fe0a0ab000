//! CPU time of this process.

use std::fs;
use std::time::Duration;

/// The thread of the simulated board.
const BOARD: &str = "sdr board";
/// The tick of the kernel's accounting: USER_HZ is 100 on all architectures.
const TICK: Duration = Duration::from_millis(10);

/// CPU time: of the simulated board's thread, and of all others.
#[derive(Clone, Copy, Default)]
pub(super) struct CpuTime {
    pub board: Duration,
    pub process: Duration,
}

impl CpuTime {
    /// The CPU time used so far; zero if the kernel does not report it.
    pub(super) fn now() -> Self {
        let mut sum = Self::default();
        for task in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
            if let Some((name, time)) =
                fs::read_to_string(task.path().join("stat")).ok().as_deref().and_then(parse)
            {
                *(if name == BOARD { &mut sum.board } else { &mut sum.process }) += time;
            }
        }
        sum
    }

    /// The CPU time used since an earlier reading.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self {
            board: self.board.saturating_sub(earlier.board),
            process: self.process.saturating_sub(earlier.process),
        }
    }
}

/// Parses a thread's name and CPU time. The name may contain parentheses; the last one ends it.
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
        assert!(now.since(now).process.is_zero());
    }
}
