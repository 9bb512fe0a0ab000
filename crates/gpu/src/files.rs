//! Files that a GPU's maker has a library for, which moves their bytes in ways of its own.

use std::fs::File;
use std::sync::Arc;

use crate::{Region, Result};

/// The library, started.
pub trait GpuFiles: Send + Sync {
    /// Gives a file to it, which is kept open as long as the result lives. It takes a file once at a time: threads share it.
    ///
    /// # Errors
    /// When it does not take files like this one.
    fn open(&self, file: Arc<File>) -> Result<Box<dyn GpuFile>>;
    /// Makes memory of the GPU known to it, until the result is dropped: what is used more than once goes faster then.
    ///
    /// # Errors
    /// When it does not take this memory.
    fn register(&self, memory: &Region) -> Result<Box<dyn Send + Sync>>;
    /// What is known of the way that bytes will take.
    fn how(&self) -> &'static str;
}

/// A file that was given to it.
pub trait GpuFile: Send + Sync {
    /// Reads from `at` on into all of the memory; says how many bytes there were.
    ///
    /// # Errors
    /// When they cannot be read.
    fn read(&self, into: &Region, at: u64) -> Result<usize>;
    /// Writes all of the memory to `at`; says how many bytes were written.
    ///
    /// # Errors
    /// When they cannot be written.
    fn write(&self, from: &Region, at: u64) -> Result<usize>;
}
