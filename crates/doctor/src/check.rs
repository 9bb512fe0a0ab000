//! A check: what was found, why it matters, and how to fix it.

use serde::Serialize;

/// The result of a check.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As required.
    Pass,
    /// Information only.
    Info,
    /// Could not be determined; `fix` says how to.
    Unknown,
    /// Costs speed, or prevents some routes.
    Warn,
    /// Prevents all direct routes.
    Fail,
}

impl Status {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Info => "info",
            Self::Unknown => "unknown",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// The subject of a check, in display order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckGroup {
    /// Container, virtual machine, user.
    Place,
    /// GPUs and their driver.
    Gpu,
    /// NVMe drives.
    Drive,
    /// Network cards.
    Nic,
    /// SDR boards.
    Sdr,
    /// The path between two devices.
    Path,
    /// Address translation.
    Iommu,
    /// The kernel.
    Kernel,
    /// Memory.
    Memory,
    /// Named files.
    File,
    /// NVIDIA's own library.
    Cufile,
}

impl CheckGroup {
    /// Its heading.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Place => "Environment",
            Self::Gpu => "GPUs",
            Self::Drive => "NVMe drives",
            Self::Nic => "RDMA",
            Self::Sdr => "SDR boards",
            Self::Path => "Paths between devices",
            Self::Iommu => "IOMMU",
            Self::Kernel => "Kernel",
            Self::Memory => "Memory",
            Self::File => "Files",
            Self::Cufile => "cuFile",
        }
    }
}

/// A check and its result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Its stable identifier, such as `gpu.bar1`.
    pub id: &'static str,
    /// The device or file concerned; `None` for the whole machine.
    pub about: Option<String>,
    /// Its subject.
    pub group: CheckGroup,
    /// Its result.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// Why it matters.
    pub why: &'static str,
    /// How to fix it, or to determine it.
    pub fix: Option<String>,
    /// The sources of the result.
    pub evidence: Vec<String>,
}

impl Check {
    /// A check with this result.
    pub(crate) fn new(
        id: &'static str,
        group: CheckGroup,
        status: Status,
        found: impl Into<String>,
        why: &'static str,
    ) -> Self {
        Self { id, about: None, group, status, found: found.into(), why, fix: None, evidence: Vec::new() }
    }

    /// Sets the device or file concerned.
    pub(crate) fn about(mut self, what: impl ToString) -> Self {
        self.about = Some(what.to_string());
        self
    }

    /// Sets the fix.
    pub(crate) fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    /// Sets the fix if `wanted`.
    pub(crate) fn fix_if(self, wanted: bool, fix: impl Into<String>) -> Self {
        if wanted { self.fix(fix) } else { self }
    }

    /// Adds a source.
    pub(crate) fn by(mut self, evidence: impl Into<String>) -> Self {
        self.evidence.push(evidence.into());
        self
    }
}

/// Formats bytes.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} bytes");
    }
    let unit = (count.ilog2() / 10).min(6);
    let value = count as f64 / (1_u64 << (unit * 10)) as f64;
    let digits = usize::from(value.fract() != 0.0);
    format!("{value:.digits$} {}", UNITS[unit as usize - 1])
}

/// Formats a rate.
pub(crate) fn rate(bytes_per_second: f64) -> String {
    format!("{:.1} GB/s", bytes_per_second / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_formatted() {
        for (count, text) in
            [(0, "0 bytes"), (16 << 10, "16 KiB"), (1536 << 20, "1.5 GiB"), (u64::MAX, "16 EiB")]
        {
            assert_eq!(bytes(count), text);
        }
        assert_eq!(rate(7.88e9), "7.9 GB/s");
    }
}
