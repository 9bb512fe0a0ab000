//! Two runs side by side. A difference counts only if it is larger than the spread of both runs' repeats.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::results::{IoType, Measured, Results, SweepRow};

/// A difference below this share does not count, however small the noise of both runs.
const LEAST: f64 = 0.02;
/// Fewer repeats do not show how noisy a row is.
const REPEATS: usize = 3;

/// How a row has changed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeVerdict {
    /// The second run is slower, by more than the noise.
    Slower,
    /// The second run is faster, by more than the noise.
    Faster,
    /// The difference is within the noise.
    Same,
    /// There are too few repeats to know the noise.
    Unsure,
    /// Only the first run has it.
    Gone,
    /// Only the second run has it.
    New,
}

impl ChangeVerdict {
    /// Its word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Slower => "slower",
            Self::Faster => "faster",
            Self::Same => "same",
            Self::Unsure => "unsure",
            Self::Gone => "gone",
            Self::New => "new",
        }
    }
}

/// A row of both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RowChange {
    /// The route.
    pub route: String,
    /// The operation.
    #[serde(rename = "IoType")]
    pub io: IoType,
    /// Bytes of a block.
    pub block: u64,
    /// Blocks in flight for each thread.
    pub depth: u32,
    /// Threads.
    pub threads: u32,
    /// The first run's median, in 10^9 bytes a second.
    pub before: Option<f64>,
    /// The second run's.
    pub after: Option<f64>,
    /// How much faster the second one is, as a share of the first.
    pub change: Option<f64>,
    /// How large a change has to be to count.
    pub noise: Option<f64>,
    /// The verdict on it.
    pub verdict: ChangeVerdict,
}

/// Two runs side by side.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// How the two differ besides their results.
    pub differ: Vec<String>,
    /// The rows that either has results for.
    pub changes: Vec<RowChange>,
}

type RowKey<'a> = (&'a str, IoType, u64, u32, u32);

fn key(row: &SweepRow) -> RowKey<'_> {
    (&row.route, row.io, row.block, row.depth, row.threads)
}

/// Compares two runs.
#[must_use]
pub fn compare(before: &Results, after: &Results) -> Comparison {
    let mut rows: BTreeMap<RowKey<'_>, [Option<&Measured>; 2]> = BTreeMap::new();
    for (which, results) in [before, after].into_iter().enumerate() {
        for row in &results.rows {
            if let Some(measured) = &row.result {
                rows.entry(key(row)).or_default()[which] = Some(measured);
            }
        }
    }
    let changes = rows.into_iter().map(|(key, pair)| change(key, pair)).collect();
    Comparison { differ: differ(before, after), changes }
}

fn change(
    (route, io, block, depth, threads): RowKey<'_>,
    [before, after]: [Option<&Measured>; 2],
) -> RowChange {
    let (mut change, mut noise) = (None, None);
    let verdict = match (before, after) {
        (Some(before), Some(after)) => {
            let share = |value: f64| value / before.gbps.max(f64::MIN_POSITIVE);
            let moved = share(after.gbps - before.gbps);
            let needed = share(before.spread() + after.spread()).max(LEAST);
            (change, noise) = (Some(moved), Some(needed));
            let few = before.gbps_each.len().min(after.gbps_each.len()) < REPEATS;
            match moved {
                _ if few => ChangeVerdict::Unsure,
                moved if moved > needed => ChangeVerdict::Faster,
                moved if moved < -needed => ChangeVerdict::Slower,
                _ => ChangeVerdict::Same,
            }
        }
        (Some(_), None) => ChangeVerdict::Gone,
        _ => ChangeVerdict::New,
    };
    let gbps = |measured: Option<&Measured>| measured.map(|measured| measured.gbps);
    let (before, after) = (gbps(before), gbps(after));
    RowChange { route: route.into(), io, block, depth, threads, before, after, change, noise, verdict }
}

fn differ(before: &Results, after: &Results) -> Vec<String> {
    let cpu = |results: &Results| format!("{} × {}", results.machine.cpus, results.machine.cpu);
    let pairs = [
        ("drive or file", before.target.clone(), after.target.clone()),
        ("GPU", before.gpu.clone(), after.gpu.clone()),
        ("CPUs", cpu(before), cpu(after)),
        ("kernel", before.machine.kernel.clone(), after.machine.kernel.clone()),
        ("onehop", before.machine.onehop.clone(), after.machine.onehop.clone()),
        ("simulated parts", before.simulated.join(", "), after.simulated.join(", ")),
    ];
    let different = pairs.into_iter().filter(|(_, a, b)| a != b);
    different.map(|(what, a, b)| format!("{what}: {a}, then {b}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::sample;

    #[test]
    fn only_what_exceeds_the_noise_counts() {
        let before =
            sample(&[&[1.0, 1.1, 0.9], &[1.0, 1.0, 1.0], &[2.0, 2.0, 2.0], &[1.0], &[1.0, 1.0, 1.0]]);
        let mut after =
            sample(&[&[1.15, 1.1, 1.2], &[1.0, 1.01, 1.01], &[1.5, 1.6, 1.4], &[2.0], &[3.0, 3.0, 3.1]]);
        after.rows[4].route = "gpu/posted".into();
        after.gpu = "another".into();
        let found = compare(&before, &after);
        let verdict = |depth: u32, route: &str| {
            let same = |change: &&RowChange| change.depth == depth && change.route == route;
            found.changes.iter().find(same).map(|change| change.verdict)
        };
        assert_eq!(
            verdict(1, "cpu/direct"),
            Some(ChangeVerdict::Same),
            "0.15 more, and both spread by 0.1 and 0.05"
        );
        assert_eq!(verdict(2, "cpu/direct"), Some(ChangeVerdict::Same), "less than two hundredths");
        assert_eq!(verdict(3, "cpu/direct"), Some(ChangeVerdict::Slower));
        assert_eq!(verdict(4, "cpu/direct"), Some(ChangeVerdict::Unsure));
        assert_eq!(verdict(5, "cpu/direct"), Some(ChangeVerdict::Gone));
        assert_eq!(verdict(5, "gpu/posted"), Some(ChangeVerdict::New));
        assert_eq!(found.differ, ["GPU: emu, then another"]);
        assert!(
            compare(&after, &after)
                .changes
                .iter()
                .all(|c| matches!(c.verdict, ChangeVerdict::Same | ChangeVerdict::Unsure))
        );
    }
}
