//! The results file of a sweep: the measurements, the machine and the method. It is read again to compare two runs, and
//! may then come from anywhere: everything in it is checked.

use serde::{Deserialize, Serialize};

/// The version of the format.
const VERSION: u32 = 1;
/// Bytes of a file at most.
pub const MOST_BYTES: u64 = 64 << 20;
/// Rows of a file at most.
const MOST_ROWS: usize = 100_000;
/// Repeats of a row at most.
const MOST_REPEATS: usize = 10_000;

/// Why a file is not a valid results file.
#[derive(Debug, thiserror::Error)]
pub enum ResultsError {
    /// It is longer than a results file can be.
    #[error("it has {bytes} bytes, and no file of results has more than {MOST_BYTES}")]
    TooLong {
        /// Its length.
        bytes: u64,
    },
    /// It is not JSON, or lacks something.
    #[error("it is not a file of `onehop bench sweep`: {0}")]
    Json(#[from] serde_json::Error),
    /// It was written by another version.
    #[error("its format is of version {found}, and this build reads version {VERSION}; measure again")]
    Version {
        /// The version that it states.
        found: u32,
    },
    /// It has more rows than a sweep writes.
    #[error("it has {rows} rows, and no file of results has more than {MOST_ROWS}")]
    TooMany {
        /// How many it has.
        rows: usize,
    },
    /// A row is impossible.
    #[error("row {row} is impossible: {why}")]
    Row {
        /// Which, from 0 on.
        row: usize,
        /// What is wrong with it.
        why: &'static str,
    },
}

/// The kind of I/O, in gdsio's words.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum IoType {
    /// One block after the other, into GPU memory.
    Read,
    /// One block after the other, out of GPU memory.
    Write,
    /// Random blocks, into GPU memory.
    RandRead,
    /// Random blocks, out of GPU memory.
    RandWrite,
}

impl IoType {
    /// Its word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "READ",
            Self::Write => "WRITE",
            Self::RandRead => "RANDREAD",
            Self::RandWrite => "RANDWRITE",
        }
    }

    /// Parses its word, in upper or lower case.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let all = [Self::Read, Self::Write, Self::RandRead, Self::RandWrite];
        all.into_iter().find(|io| io.name().eq_ignore_ascii_case(text))
    }

    /// Whether it changes what is on the drive or in the file.
    #[must_use]
    pub fn writes(self) -> bool {
        matches!(self, Self::Write | Self::RandWrite)
    }

    /// Whether blocks are at random places.
    #[must_use]
    pub fn is_random(self) -> bool {
        matches!(self, Self::RandRead | Self::RandWrite)
    }
}

/// A limit, which no row can exceed, or a reference, which was measured beside and may be exceeded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateLimit {
    /// What it is.
    pub what: String,
    /// 10^9 bytes in a second.
    pub gbps: f64,
    /// Whether a row above it is wrong: that holds for a link's rate, not for a measured one.
    pub hard: bool,
}

impl RateLimit {
    /// Its name: a limit only if nothing can exceed it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        if self.hard { "limit" } else { "reference" }
    }
}

/// The measurement of a row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Bytes that were moved in all repeats, in KiB, as gdsio counts.
    #[serde(rename = "DataSetSize")]
    pub data_set_kib: f64,
    /// Bytes of a block, in KiB.
    #[serde(rename = "IOSize")]
    pub io_size_kib: f64,
    /// The median of the repeats, in GiB a second.
    #[serde(rename = "Throughput")]
    pub throughput_gib: f64,
    /// Mean time of a block, in microseconds.
    #[serde(rename = "Avg_Latency")]
    pub avg_latency_us: f64,
    /// Blocks that were moved in all repeats.
    pub ops: u64,
    /// Seconds of all repeats.
    pub total_time: f64,
    /// The median of the repeats, in 10^9 bytes a second.
    pub gbps: f64,
    /// Each repeat, in the order in which they were measured.
    pub gbps_each: Vec<f64>,
    /// Blocks a second, by the median.
    pub iops: f64,
    /// Median time of a block; none where only the mean is known.
    pub p50_us: Option<f64>,
    /// The 99th percentile; none where fewer than ten samples lie beyond it.
    pub p99_us: Option<f64>,
    /// The 99.9th percentile, by the same rule.
    pub p999_us: Option<f64>,
    /// How many blocks these three are of; 0 in files of versions that did not count.
    #[serde(default)]
    pub latency_samples: u64,
    /// Whether those blocks are of one more repeat, by slower kernels that read the clock, and not among `ops`.
    #[serde(default)]
    pub latency_apart: bool,
    /// CPU time of this process per byte, in nanoseconds; simulated parts run in it, too.
    pub cpu_ns_per_byte: f64,
    /// The limit or reference that it is compared with.
    pub limit: Option<RateLimit>,
    /// The share of it that was reached; of a reference it may exceed 1.
    pub of_limit: Option<f64>,
    /// Whether every byte of the last pass of every repeat was compared and was right. Rows with wrong bytes have no results.
    pub verified: bool,
}

impl Measured {
    /// The slowest and the fastest repeat.
    #[must_use]
    pub fn range(&self) -> (f64, f64) {
        let each = || self.gbps_each.iter().copied();
        (each().fold(f64::INFINITY, f64::min), each().fold(0.0, f64::max))
    }

    /// Half the difference between the slowest and the fastest repeat: what a change must exceed.
    #[must_use]
    pub fn spread(&self) -> f64 {
        let (lowest, highest) = self.range();
        (highest - lowest).max(0.0) / 2.0
    }

    /// Whether it is faster than possible, with a hundredth for the error of clocks.
    #[must_use]
    pub fn is_impossible(&self) -> bool {
        self.limit.as_ref().is_some_and(|limit| limit.hard && self.range().1 > limit.gbps * 1.01)
    }

    fn wrong(&self) -> Option<&'static str> {
        let all = [
            self.data_set_kib,
            self.io_size_kib,
            self.throughput_gib,
            self.avg_latency_us,
            self.total_time,
            self.gbps,
            self.iops,
            self.cpu_ns_per_byte,
        ];
        let optional =
            [self.p50_us, self.p99_us, self.p999_us, self.of_limit, self.limit.as_ref().map(|l| l.gbps)];
        let mut numbers = all.iter().chain(&self.gbps_each).copied().chain(optional.into_iter().flatten());
        if self.gbps_each.is_empty() || self.gbps_each.len() > MOST_REPEATS {
            return Some("it has no repeats, or too many");
        }
        if !numbers.all(|number| number.is_finite() && (0.0..=1e15).contains(&number)) {
            return Some("a number is negative, or larger than any that can be measured");
        }
        let (lowest, highest) = self.range();
        if !(lowest * 0.999_999..=highest * 1.000_001).contains(&self.gbps) {
            return Some("its median is not that of its repeats");
        }
        (!self.verified).then_some("its bytes were not verified")
    }
}

/// A row: one route and one set of parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepRow {
    /// The route.
    pub route: String,
    /// The operation.
    #[serde(rename = "IoType")]
    pub io: IoType,
    /// gdsio's word for routes like this one.
    #[serde(rename = "XferType")]
    pub xfer_type: String,
    /// Threads that asked; for GPU-driven routes queues, each with a warp of its own.
    #[serde(rename = "Threads")]
    pub threads: u32,
    /// Blocks in flight for each of them.
    pub depth: u32,
    /// Bytes of a block.
    pub block: u64,
    /// The measurement, if it was possible.
    pub result: Option<Measured>,
    /// Why it could not be measured, or notes about it.
    pub note: Option<String>,
}

/// Where and when it was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The CPU's name.
    pub cpu: String,
    /// How many CPUs.
    #[serde(rename = "processors")]
    pub cpus: u32,
    /// The kernel's release.
    pub kernel: String,
    /// Which build of onehop.
    pub onehop: String,
    /// Seconds since 1970.
    pub unix_time: u64,
}

/// All results of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// The version of this format.
    pub onehop_bench_sweep: u32,
    /// Where and when.
    pub machine: Machine,
    /// The drive or file.
    pub target: String,
    /// The GPU.
    pub gpu: String,
    /// Which of `drive` and `gpu` were simulated.
    pub simulated: Vec<String>,
    /// What rows are compared with.
    pub limits: Vec<RateLimit>,
    /// The rows, in the order in which they were measured.
    pub rows: Vec<SweepRow>,
}

impl Results {
    /// Of these rows, measured now.
    #[must_use]
    pub fn new(machine: Machine, target: String, gpu: String, simulated: Vec<String>) -> Self {
        let (limits, rows) = (Vec::new(), Vec::new());
        Self { onehop_bench_sweep: VERSION, machine, target, gpu, simulated, limits, rows }
    }

    /// Reads a file's bytes.
    ///
    /// # Errors
    /// When they are not results, or impossible ones.
    pub fn parse(bytes: &[u8]) -> Result<Self, ResultsError> {
        /// Read first, so that another version is distinguished from a foreign file.
        #[derive(Deserialize)]
        struct ResultsHead {
            onehop_bench_sweep: u32,
        }
        if bytes.len() as u64 > MOST_BYTES {
            return Err(ResultsError::TooLong { bytes: bytes.len() as u64 });
        }
        let head: ResultsHead = serde_json::from_slice(bytes)?;
        if head.onehop_bench_sweep != VERSION {
            return Err(ResultsError::Version { found: head.onehop_bench_sweep });
        }
        let results: Self = serde_json::from_slice(bytes)?;
        if results.rows.len() > MOST_ROWS {
            return Err(ResultsError::TooMany { rows: results.rows.len() });
        }
        for (at, row) in results.rows.iter().enumerate() {
            let why = match &row.result {
                _ if row.block == 0 || row.threads == 0 || row.depth == 0 => Some("it moves nothing"),
                Some(measured) => measured.wrong(),
                None if row.note.is_none() => Some("it has neither numbers nor a reason why not"),
                None => None,
            };
            if let Some(why) = why {
                return Err(ResultsError::Row { row: at, why });
            }
        }
        Ok(results)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;

    /// Results with one row for each of these rates.
    pub(crate) fn sample(rates: &[&[f64]]) -> Results {
        let mut results =
            Results::new(Machine::default(), "sim:mem:1M".into(), "emu".into(), vec!["drive".into()]);
        for (i, each) in rates.iter().enumerate() {
            let gbps = crate::median(&mut each.to_vec());
            let result = Measured {
                data_set_kib: 1024.0,
                io_size_kib: 4.0,
                throughput_gib: gbps * 1e9 / f64::from(1 << 30),
                avg_latency_us: 10.0,
                ops: 256,
                total_time: 0.1,
                gbps,
                gbps_each: each.to_vec(),
                iops: gbps * 1e9 / 4096.0,
                p50_us: Some(9.0),
                p99_us: Some(20.0),
                p999_us: None,
                latency_samples: 1234,
                latency_apart: false,
                cpu_ns_per_byte: 0.5,
                limit: Some(RateLimit { what: "a link".into(), gbps: 10.0, hard: true }),
                of_limit: Some(gbps / 10.0),
                verified: true,
            };
            results.rows.push(SweepRow {
                route: "cpu/direct".into(),
                io: IoType::Read,
                xfer_type: "GPUD".into(),
                threads: 1,
                depth: i as u32 + 1,
                block: 4096,
                result: Some(result),
                note: None,
            });
        }
        results
    }

    #[test]
    fn written_results_are_read_back() {
        let results = sample(&[&[1.0, 2.0, 3.0], &[0.5]]);
        let bytes = serde_json::to_vec(&results).unwrap();
        assert_eq!(Results::parse(&bytes).unwrap(), results);
        let text = String::from_utf8(bytes).unwrap();
        // Files of versions that did not count samples are read.
        let older = text.replace("\"latency_samples\":1234,\"latency_apart\":false,", "");
        assert_ne!(older, text);
        let older = Results::parse(older.as_bytes()).unwrap();
        assert_eq!(older.rows[0].result.as_ref().unwrap().latency_samples, 0);
        for word in
            ["IoType\":\"READ", "XferType", "Threads", "DataSetSize", "IOSize", "Throughput", "Avg_Latency"]
        {
            assert!(text.contains(word), "{word}");
        }
    }

    #[test]
    fn impossible_results_are_refused() {
        let refuse = |change: fn(&mut Results), words: &str| {
            let mut results = sample(&[&[1.0, 2.0, 3.0]]);
            change(&mut results);
            let error = Results::parse(&serde_json::to_vec(&results).unwrap()).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        fn row(results: &mut Results) -> &mut Measured {
            results.rows[0].result.as_mut().unwrap()
        }
        refuse(|r| r.onehop_bench_sweep = 9, "version 9");
        refuse(|r| r.rows[0].block = 0, "row 0 is impossible: it moves nothing");
        refuse(|r| r.rows[0].result = None, "neither");
        refuse(|r| row(r).gbps = -1.0, "negative");
        refuse(|r| row(r).gbps = 7.0, "median");
        refuse(|r| row(r).gbps_each.clear(), "repeats");
        refuse(|r| row(r).verified = false, "verified");
        refuse(|r| row(r).iops = f64::NAN, "null");
        for bytes in [&b""[..], b"{}", b"[]", b"{\"onehop_bench_sweep\":1}", b"\xff"] {
            assert!(matches!(Results::parse(bytes), Err(ResultsError::Json(_))), "{bytes:?}");
        }
        let long = vec![b' '; MOST_BYTES as usize + 1];
        assert!(matches!(Results::parse(&long), Err(ResultsError::TooLong { .. })));
    }

    #[test]
    fn faster_than_its_link_is_impossible() {
        let results = sample(&[&[9.0, 10.0, 10.05], &[9.0, 9.0, 11.0]]);
        let impossible: Vec<_> =
            results.rows.iter().map(|row| row.result.as_ref().unwrap().is_impossible()).collect();
        assert_eq!(impossible, [false, true]);
    }
}
