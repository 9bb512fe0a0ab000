//! Tests of what the CPU, the GPU and the drive share: words, kernels and arrays.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test may fail")]

mod array;
mod kernels;
mod words;
