//! What a load did: bytes per path, and the resources that it used.

use serde::Serialize;

use super::GroupAccount;

/// Bytes per path, and the resources used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Account {
    /// Whether the path was requested by name.
    pub asked: bool,
    /// Bytes that were in the page cache.
    pub cached_bytes: u64,
    /// Bytes read through the page cache, from the disk or elsewhere.
    pub cache_miss_bytes: u64,
    /// Bytes read past the page cache, from the disk.
    pub direct_bytes: u64,
    /// Bytes read by cuFile.
    pub cufile_bytes: u64,
    /// What is known of the path by which cuFile moved them.
    #[serde(rename = "cufile_path")]
    pub cufile_way: Option<&'static str>,
    /// Bytes from servers.
    pub remote_bytes: u64,
    /// Number of repeated requests to servers.
    pub retries: u64,
    /// Threads that read.
    pub threads: usize,
    /// Bytes of the ring.
    pub ring_bytes: u64,
    /// Why files could not be read past the page cache, if so.
    pub why_cached: Option<String>,
    /// Why reads past the page cache used system calls instead of io_uring, if so.
    pub why_calls: Option<String>,
    /// Why memory could not be registered, if so: the kernel pinned the ring for each read past the page cache, or
    /// cuFile copied through a buffer of its own.
    pub why_unregistered: Option<String>,
    /// Why the contents of the page cache were unknown, if so; files are then read past it where possible.
    pub why_unknown: Option<String>,
    /// How a load of several processes went; its other numbers are this process's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupAccount>,
}

impl Account {
    /// Bytes read on all paths.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        let by_cache = self.cached_bytes + self.cache_miss_bytes;
        by_cache + self.direct_bytes + self.cufile_bytes + self.remote_bytes
    }
}
