//! `onehop.Outcome`, a load's result.

use std::time::{Duration, Instant};

use onehop_load::Model;
use onehop_load::engine::{self, Account};
use onehop_load::outcome;
use onehop_transfer::Loaded;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyType};

use crate::device::GpuDevice;
use crate::drive::OpenDrive;

/// When a load began, and how long its GPU took to start.
pub(crate) struct LoadStart {
    pub begun: Instant,
    pub gpu: Duration,
}

/// A Python class of plain fields, which can be read and pickled.
macro_rules! record {
    ($(#[$about:meta])* $name:ident { $($field:ident: $kind:ty,)* }) => {
        $(#[$about])*
        #[pyclass(frozen, get_all, from_py_object, module = "onehop")]
        #[derive(Clone)]
        pub(crate) struct $name {
            $($field: $kind,)*
        }

        impl $name {
            fn fields<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
                let fields = PyDict::new(py);
                $(fields.set_item(stringify!($field), self.$field.clone())?;)*
                Ok(fields)
            }

            fn of(fields: &Bound<'_, PyDict>) -> PyResult<Self> {
                Ok(Self { $($field: field(fields, stringify!($field))?.extract()?,)* })
            }
        }
    };
}

fn field<'py>(fields: &Bound<'py, PyDict>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    fields.get_item(name)?.ok_or_else(|| PyTypeError::new_err(format!("the field {name} is missing")))
}

/// A name with all fields, for `repr`.
fn repr(name: &str, fields: &Bound<'_, PyDict>) -> PyResult<String> {
    let field = |(name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| Ok(format!("{name}={}", value.repr()?));
    let fields: Vec<_> = fields.iter().map(field).collect::<PyResult<_>>()?;
    Ok(format!("{name}({})", fields.join(", ")))
}

/// What pickle calls to recreate an object.
type Reduced<'py> = (Bound<'py, PyType>, (Bound<'py, PyDict>,));

record! {
    /// The slowest part of the route.
    Limit {
        what: String,
        gbps: Option<f64>,
        reached: Option<f64>,
    }
}

record! {
    /// A better route, and why it was not possible.
    WhyNot {
        route: String,
        reason: String,
        fix: String,
    }
}

record! {
    /// How the processes of a group loaded together. The other numbers of an outcome are this process's.
    GroupOutcome {
        rank: usize,
        size: usize,
        way: String,
        why_alone: Option<String>,
        passed_bytes: u64,
        received_bytes: u64,
    }
}

record! {
    /// A load's outcome.
    Outcome {
        bytes: u64,
        read_bytes: u64,
        gpu_bytes: u64,
        seconds: f64,
        total_seconds: f64,
        gpu_start_seconds: f64,
        gbps: f64,
        files: usize,
        format: String,
        route: String,
        route_why: String,
        initiator: String,
        drive: Option<String>,
        simulated: Vec<String>,
        gpu: String,
        gpu_why: String,
        cached_bytes: u64,
        cache_miss_bytes: u64,
        direct_bytes: u64,
        staged_bytes: u64,
        retries: u64,
        threads: usize,
        ring_bytes: u64,
        limit: Limit,
        why_not_better: Vec<WhyNot>,
        warnings: Vec<String>,
        verified: bool,
        verified_by: Option<String>,
        group: Option<GroupOutcome>,
    }
}

impl From<engine::GroupAccount> for GroupOutcome {
    fn from(account: engine::GroupAccount) -> Self {
        let engine::GroupAccount { rank, size, way, why_alone, passed_bytes, received_bytes } = account;
        Self { rank, size, way: way.into(), why_alone, passed_bytes, received_bytes }
    }
}

impl From<onehop_transfer::BetterRoute> for WhyNot {
    fn from(no: onehop_transfer::BetterRoute) -> Self {
        Self { route: no.route, reason: no.reason, fix: no.fix }
    }
}

impl Outcome {
    pub(crate) fn new(
        model: &Model,
        device: &GpuDevice,
        account: Account,
        went: outcome::Outcome,
        start: &LoadStart,
        (verified, verified_by): (bool, Option<String>),
    ) -> Self {
        let outcome::Limit { what, gbps, reached } = went.limit;
        let why_not = |no: outcome::WhyNot| WhyNot {
            route: no.route.into(),
            reason: no.reason.into(),
            fix: no.fix.into(),
        };
        Self {
            bytes: went.bytes,
            read_bytes: went.read_bytes,
            gpu_bytes: went.gpu_bytes,
            seconds: went.seconds,
            total_seconds: start.begun.elapsed().as_secs_f64(),
            gpu_start_seconds: start.gpu.as_secs_f64(),
            gbps: went.gbps,
            files: model.files.len(),
            format: model.format.into(),
            route: went.route.into(),
            route_why: went.route_why,
            initiator: "cpu".into(),
            drive: None,
            simulated: if device.gpu.simulated() { vec!["gpu".into()] } else { Vec::new() },
            gpu: device.gpu.name().into(),
            gpu_why: device.why.clone(),
            cached_bytes: account.cached_bytes,
            cache_miss_bytes: account.cache_miss_bytes,
            direct_bytes: account.direct_bytes,
            staged_bytes: 0,
            retries: account.retries,
            threads: account.threads,
            ring_bytes: account.ring_bytes,
            limit: Limit { what: what.into(), gbps, reached },
            why_not_better: went.why_not_better.into_iter().map(why_not).collect(),
            warnings: went.warnings,
            verified,
            verified_by,
            group: account.group.map(GroupOutcome::from),
        }
    }

    /// The outcome of a load from a drive, without page cache and ring.
    pub(crate) fn of_drive(
        drive: &OpenDrive,
        loaded: Loaded,
        gpu_bytes: u64,
        start: &LoadStart,
        (verified, verified_by): (bool, Option<String>),
    ) -> Self {
        let Loaded { outcome: went, read_bytes, landed, .. } = loaded;
        Self {
            bytes: went.bytes,
            read_bytes,
            gpu_bytes,
            seconds: went.seconds,
            total_seconds: start.begun.elapsed().as_secs_f64(),
            gpu_start_seconds: start.gpu.as_secs_f64(),
            gbps: went.gbps,
            files: drive.on_drive.model.files.len(),
            format: drive.on_drive.model.format.into(),
            route: went.route.into(),
            route_why: went.route_why.into(),
            initiator: went.initiator.into(),
            drive: Some(went.drive),
            simulated: went.simulated.into_iter().map(String::from).collect(),
            warnings: Vec::new(),
            gpu: went.gpu,
            gpu_why: went.gpu_why,
            cached_bytes: 0,
            cache_miss_bytes: 0,
            direct_bytes: landed.direct_bytes,
            staged_bytes: landed.staged_bytes,
            retries: went.retries,
            threads: 0,
            ring_bytes: 0,
            limit: Limit { what: "the drive".into(), gbps: None, reached: None },
            why_not_better: went.why_not_better.into_iter().map(WhyNot::from).collect(),
            verified,
            verified_by,
            group: None,
        }
    }
}

#[pymethods]
impl Outcome {
    /// Makes one from fields.
    #[new]
    #[pyo3(signature = (fields, /))]
    fn from_fields(fields: &Bound<'_, PyDict>) -> PyResult<Self> {
        Self::of(fields)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        Ok((py.get_type::<Self>(), (self.fields(py)?,)))
    }

    fn __repr__(&self) -> String {
        let simulated = if self.simulated.is_empty() { "" } else { ", simulated" };
        let Self { bytes, seconds, gbps, route, gpu, .. } = self;
        format!(
            "<onehop.Outcome {bytes} bytes by {route} to {gpu} in {seconds:.3} s, {gbps:.2} GB/s{simulated}>"
        )
    }
}

#[pymethods]
impl Limit {
    /// Makes one from fields.
    #[new]
    #[pyo3(signature = (fields, /))]
    fn from_fields(fields: &Bound<'_, PyDict>) -> PyResult<Self> {
        Self::of(fields)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        Ok((py.get_type::<Self>(), (self.fields(py)?,)))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr("Limit", &self.fields(py)?)
    }
}

#[pymethods]
impl GroupOutcome {
    /// Makes one from fields.
    #[new]
    #[pyo3(signature = (fields, /))]
    fn from_fields(fields: &Bound<'_, PyDict>) -> PyResult<Self> {
        Self::of(fields)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        Ok((py.get_type::<Self>(), (self.fields(py)?,)))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr("GroupOutcome", &self.fields(py)?)
    }
}

#[pymethods]
impl WhyNot {
    /// Makes one from fields.
    #[new]
    #[pyo3(signature = (fields, /))]
    fn from_fields(fields: &Bound<'_, PyDict>) -> PyResult<Self> {
        Self::of(fields)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        Ok((py.get_type::<Self>(), (self.fields(py)?,)))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        repr("WhyNot", &self.fields(py)?)
    }
}
