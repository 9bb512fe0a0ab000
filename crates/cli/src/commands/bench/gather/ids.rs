//! Streams of row numbers: uniform, by Zipf's law, or recorded.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::{CliError, Result};

/// Maximum size of a recorded stream.
const MAX_BYTES: u64 = 1 << 30;

/// How rows are chosen.
pub(super) enum RowSource {
    Uniform,
    /// With this exponent.
    Zipf(f64),
    Recorded(Vec<u64>),
}

/// A stream of rows.
pub(super) enum RowStream<'a> {
    Uniform(Random),
    Zipf {
        random: Random,
        exponent: f64,
        /// Spreads the ranks over the rows; coprime to their number.
        step: u64,
    },
    /// Repeats when it ends.
    Recorded {
        ids: &'a [u64],
        next: usize,
    },
}

/// A pseudo-random number generator.
pub(super) struct Random(u64);

impl Random {
    /// A number from 0 up to, but not including, 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl RowSource {
    /// Reads a file of row numbers: unsigned 64-bit little-endian integers, or text with one per line.
    pub(super) fn recorded(path: &Path, rows: u64) -> Result<Self> {
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(|e| CliError::file("opening", path, e))?;
        let mut file = file.take(MAX_BYTES + 1);
        file.read_to_end(&mut bytes).map_err(|e| CliError::file("reading", path, e))?;
        let refuse = |why: String| CliError::Usage(format!("--ids {}: {why}", path.display()));
        if bytes.len() as u64 > MAX_BYTES {
            return Err(refuse(format!("it has more than {MAX_BYTES} bytes")));
        }
        let ids = parse(&bytes).map_err(refuse)?;
        if let Some((place, id)) = ids.iter().enumerate().find(|(_, id)| **id >= rows) {
            return Err(refuse(format!("id {} is row {id}, and the table has {rows} rows", place + 1)));
        }
        Ok(Self::Recorded(ids))
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf(_) => "zipf",
            Self::Recorded(_) => "recorded",
        }
    }

    /// Starts the stream; it is the same each time.
    pub(super) fn stream(&self, rows: u64) -> RowStream<'_> {
        match self {
            Self::Uniform => RowStream::Uniform(Random(7)),
            Self::Zipf(exponent) => {
                // Adjacent ranks are not adjacent rows.
                let mut step = (rows as f64 * 0.618_033_988_749_895) as u64 | 1;
                while gcd(step, rows) != 1 {
                    step += 2;
                }
                RowStream::Zipf { random: Random(7), exponent: *exponent, step }
            }
            Self::Recorded(ids) => RowStream::Recorded { ids, next: 0 },
        }
    }
}

impl RowStream<'_> {
    /// The next rows.
    pub(super) fn take(&mut self, count: usize, rows: u64) -> Vec<u64> {
        match self {
            Self::Uniform(random) => {
                (0..count).map(|_| ((random.unit() * rows as f64) as u64).min(rows - 1)).collect()
            }
            Self::Zipf { random, exponent, step } => {
                let row = |rank: u64| (u128::from(rank) * u128::from(*step) % u128::from(rows)) as u64;
                (0..count).map(|_| row(rank(random.unit(), *exponent, rows))).collect()
            }
            Self::Recorded { ids, next } => {
                let taken = ids.iter().cycle().skip(*next).take(count).copied().collect();
                *next = (*next + count) % ids.len();
                taken
            }
        }
    }
}

/// A rank, starting at 0, by the continuous form of Zipf's law.
fn rank(unit: f64, exponent: f64, rows: u64) -> u64 {
    let end = rows as f64 + 1.0;
    let power = 1.0 - exponent;
    let place = if power.abs() < 1e-9 {
        end.powf(unit)
    } else {
        ((end.powf(power) - 1.0) * unit + 1.0).powf(1.0 / power)
    };
    (place as u64).clamp(1, rows) - 1
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Parses row numbers: as text if there are only digits and white space.
fn parse(bytes: &[u8]) -> std::result::Result<Vec<u64>, String> {
    if bytes.is_empty() {
        return Err("it is empty".into());
    }
    if bytes.iter().all(|byte| byte.is_ascii_digit() || byte.is_ascii_whitespace()) {
        let text = std::str::from_utf8(bytes).map_err(|e| e.to_string())?;
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let id = |(number, line): (usize, &str)| {
            line.trim().parse().map_err(|_| format!("line {} is not a number below 2^64", number + 1))
        };
        let ids: Vec<u64> = lines.map(id).collect::<std::result::Result<_, _>>()?;
        return if ids.is_empty() { Err("it has no numbers".into()) } else { Ok(ids) };
    }
    let (ids, rest) = bytes.as_chunks();
    if !rest.is_empty() {
        return Err(format!("{} bytes are neither lines of digits nor numbers of 8 bytes", bytes.len()));
    }
    Ok(ids.iter().map(|id| u64::from_le_bytes(*id)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_ids_are_text_or_binary() {
        assert_eq!(parse(b"1\n22\r\n\n 3\n"), Ok(vec![1, 22, 3]));
        assert_eq!(parse(&[7_u64, 1 << 40].map(u64::to_le_bytes).concat()), Ok(vec![7, 1 << 40]));
        for (bad, why) in [
            (&b""[..], "empty"),
            (b" \n", "no numbers"),
            (b"1 2\n", "line 1"),
            (b"1\n18446744073709551616\n", "line 2"),
            (b"1\n-2\n", "neither"),
            (b"\0\0\0\0\0\0\0\0\0", "neither"),
        ] {
            assert!(parse(bad).is_err_and(|e| e.contains(why)), "{why}");
        }
    }

    #[test]
    fn a_recorded_stream_repeats() {
        let mut stream = RowStream::Recorded { ids: &[5, 6, 7], next: 0 };
        assert_eq!((stream.take(2, 9), stream.take(5, 9)), (vec![5, 6], vec![7, 5, 6, 7, 5]));
    }

    #[test]
    fn zipf_ranks_are_distinct_rows_with_the_expected_frequency() {
        let rows = 1000;
        for exponent in [0.5, 1.0, 1.5] {
            let source = RowSource::Zipf(exponent);
            let RowStream::Zipf { step, .. } = source.stream(rows) else { continue };
            let of_ranks: std::collections::BTreeSet<u64> =
                (0..rows).map(|rank| rank * step % rows).collect();
            assert_eq!(of_ranks.len(), 1000);
            let mut stream = source.stream(rows);
            let ids = stream.take(200_000, rows);
            let count = |rank: u64| ids.iter().filter(|id| **id == rank * step % rows).count() as f64;
            // The continuous form: the integral from a rank to the next.
            let share = |rank: f64| {
                let whole = |x: f64| {
                    if exponent == 1.0 { x.ln() } else { (x.powf(1.0 - exponent) - 1.0) / (1.0 - exponent) }
                };
                (whole(rank + 2.0) - whole(rank + 1.0)) / whole(1001.0)
            };
            for rank in [0, 1, 9] {
                let (got, wanted) = (count(rank) / 200_000.0, share(rank as f64));
                assert!((got / wanted - 1.0).abs() < 0.15, "{exponent}, rank {rank}: {got} for {wanted}");
            }
            assert!(ids.iter().all(|id| *id < rows));
        }
        assert_eq!(rank(0.999_999_999_999, 1.0, 10), 9);
        assert_eq!(RowSource::Zipf(1.0).stream(1).take(3, 1), [0, 0, 0]);
    }
}
