//! `onehop.Outcome`: how a load went.

use std::time::{Duration, Instant};

use onehop_load::Model;
use onehop_load::engine::Account;
use onehop_load::outcome;
use pyo3::prelude::*;

use crate::device::Device;

/// When a load began, and how long its GPU took to start.
pub(crate) struct Start {
    pub begun: Instant,
    pub gpu: Duration,
}

/// The slowest thing on the way.
#[pyclass(frozen, get_all, module = "onehop")]
#[derive(Clone)]
pub(crate) struct Limit {
    what: &'static str,
    gbps: Option<f64>,
    reached: Option<f64>,
}

/// A better route, and why it could not be had.
#[pyclass(frozen, get_all, module = "onehop")]
#[derive(Clone)]
pub(crate) struct WhyNot {
    route: &'static str,
    reason: &'static str,
    fix: &'static str,
}

/// How a load went.
#[pyclass(frozen, get_all, module = "onehop")]
#[derive(Clone)]
pub(crate) struct Outcome {
    bytes: u64,
    read_bytes: u64,
    gpu_bytes: u64,
    seconds: f64,
    total_seconds: f64,
    gpu_start_seconds: f64,
    gbps: f64,
    files: usize,
    format: &'static str,
    route: &'static str,
    route_why: String,
    simulated: Vec<&'static str>,
    gpu: String,
    gpu_why: String,
    cached_bytes: u64,
    cache_miss_bytes: u64,
    direct_bytes: u64,
    threads: usize,
    ring_bytes: u64,
    limit: Limit,
    why_not_better: Vec<WhyNot>,
    warnings: Vec<String>,
    verified: bool,
    verified_by: Option<String>,
}

impl Outcome {
    pub(crate) fn new(
        model: &Model,
        device: &Device,
        account: Account,
        went: outcome::Outcome,
        start: &Start,
        (verified, verified_by): (bool, Option<String>),
    ) -> Self {
        let outcome::Limit { what, gbps, reached } = went.limit;
        let why_not = |no: outcome::WhyNot| WhyNot { route: no.route, reason: no.reason, fix: no.fix };
        Self {
            bytes: went.bytes,
            read_bytes: went.read_bytes,
            gpu_bytes: went.gpu_bytes,
            seconds: went.seconds,
            total_seconds: start.begun.elapsed().as_secs_f64(),
            gpu_start_seconds: start.gpu.as_secs_f64(),
            gbps: went.gbps,
            files: model.files.len(),
            format: model.format,
            route: went.route,
            route_why: went.route_why,
            simulated: if device.gpu.simulated() { vec!["gpu"] } else { Vec::new() },
            gpu: device.gpu.name().into(),
            gpu_why: device.why.clone(),
            cached_bytes: account.cached_bytes,
            cache_miss_bytes: account.cache_miss_bytes,
            direct_bytes: account.direct_bytes,
            threads: account.threads,
            ring_bytes: account.ring_bytes,
            limit: Limit { what, gbps, reached },
            why_not_better: went.why_not_better.into_iter().map(why_not).collect(),
            warnings: went.warnings,
            verified,
            verified_by,
        }
    }
}

#[pymethods]
impl Outcome {
    fn __repr__(&self) -> String {
        let simulated = if self.simulated.is_empty() { "" } else { ", simulated" };
        let Self { bytes, seconds, gbps, route, gpu, .. } = self;
        format!(
            "<onehop.Outcome {bytes} bytes by {route} to {gpu} in {seconds:.3} s, {gbps:.2} GB/s{simulated}>"
        )
    }
}
