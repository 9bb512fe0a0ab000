//! File access by a GPU vendor's library, which moves bytes by paths of its own.

use std::fs::File;
use std::sync::Arc;

use crate::{Region, Result};

/// The library, started.
pub trait GpuFiles: Send + Sync {
    /// Registers a file, which stays open as long as the result lives. A file can only be registered once at a time:
    /// threads share it.
    ///
    /// # Errors
    /// When the library does not support the file.
    fn open(&self, file: Arc<File>) -> Result<Box<dyn GpuFile>>;
    /// Registers GPU memory until the result is dropped. Memory that is used repeatedly is faster then.
    ///
    /// # Errors
    /// When the library does not support this memory.
    fn register(&self, memory: &Region) -> Result<Box<dyn Send + Sync>>;
    /// What is known of the bytes' path.
    fn how(&self) -> &'static str;
}

/// A registered file.
pub trait GpuFile: Send + Sync {
    /// Reads from `at` into all of the memory; returns how many bytes there were.
    ///
    /// # Errors
    /// When they cannot be read.
    fn read(&self, into: &Region, at: u64) -> Result<usize>;
    /// Writes all of the memory to `at`; returns how many bytes were written.
    ///
    /// # Errors
    /// When they cannot be written.
    fn write(&self, from: &Region, at: u64) -> Result<usize>;
}
