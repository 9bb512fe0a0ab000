//! Counters and errors for log pages.

use std::collections::VecDeque;
use std::time::Instant;

use onehop_proto::Status;
use onehop_proto::log::{CriticalWarning, build};

/// Entries of the error log.
pub(crate) const ERROR_ENTRIES: usize = 64;
const ERROR_BYTES: usize = 64;
/// Data units of the health page, in bytes.
const UNIT: u64 = 512_000;
/// Room temperature for a drive: 40 degrees Celsius.
const COOL: u16 = 313;

/// An entry of the error log.
pub(crate) struct ErrorEntry {
    pub sqid: u16,
    pub cid: u16,
    pub status: Status,
    pub lba: u64,
    pub nsid: u32,
}

/// The drive's lifetime counters.
pub(crate) struct Health {
    errors: VecDeque<(u64, ErrorEntry)>,
    error_count: u64,
    reads: u64,
    writes: u64,
    bytes_read: u64,
    bytes_written: u64,
    made: Instant,
    pub power_cycles: u64,
    pub unsafe_shutdowns: u64,
    pub media_errors: u64,
    pub temperature: u16,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            errors: VecDeque::new(),
            error_count: 0,
            reads: 0,
            writes: 0,
            bytes_read: 0,
            bytes_written: 0,
            made: Instant::now(),
            power_cycles: 1,
            unsafe_shutdowns: 0,
            media_errors: 0,
            temperature: COOL,
        }
    }
}

impl Health {
    pub(crate) const fn note_read(&mut self, bytes: usize) {
        self.reads += 1;
        self.bytes_read += bytes as u64;
    }

    pub(crate) const fn note_write(&mut self, bytes: usize) {
        self.writes += 1;
        self.bytes_written += bytes as u64;
    }

    pub(crate) fn note_error(&mut self, entry: ErrorEntry) {
        self.error_count += 1;
        self.errors.push_front((self.error_count, entry));
        self.errors.truncate(ERROR_ENTRIES);
    }

    /// A doorbell was misused: an error without a command.
    pub(crate) fn note_doorbell(&mut self, sqid: u16) {
        let status = Status::SUCCESS;
        self.note_error(ErrorEntry { sqid, cid: u16::MAX, status, lba: 0, nsid: 0 });
    }

    /// The error log, latest first.
    pub(crate) fn error_log(&self) -> Vec<u8> {
        let mut log = vec![0; ERROR_ENTRIES * ERROR_BYTES];
        for ((count, error), bytes) in self.errors.iter().zip(log.as_chunks_mut().0) {
            build::ErrorEntry::new(bytes)
                .error_count(*count)
                .sqid(error.sqid)
                .cid(error.cid)
                .status(error.status)
                .parameter(u16::MAX)
                .lba(error.lba)
                .nsid(error.nsid);
        }
        log
    }

    /// The health page; `hot` if a temperature is past its threshold.
    pub(crate) fn page(&self, hot: bool) -> Vec<u8> {
        let mut page = [0; 512];
        let minutes = u128::from(self.made.elapsed().as_secs() / 60);
        build::Health::new(&mut page)
            .critical_warning(CriticalWarning(0).with_temperature(hot))
            .temperature(self.temperature)
            .available_spare(100)
            .spare_threshold(10)
            .data_units_read(u128::from(self.bytes_read.div_ceil(UNIT)))
            .data_units_written(u128::from(self.bytes_written.div_ceil(UNIT)))
            .host_reads(u128::from(self.reads))
            .host_writes(u128::from(self.writes))
            .busy_minutes(minutes)
            .power_cycles(u128::from(self.power_cycles))
            .power_on_hours(minutes / 60)
            .unsafe_shutdowns(u128::from(self.unsafe_shutdowns))
            .media_errors(u128::from(self.media_errors))
            .error_entries(u128::from(self.error_count))
            .sensor(0, self.temperature);
        page.to_vec()
    }
}
