//! Rows of a table on a drive, which GPU threads read through a cache in memory that the GPU reaches.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use onehop_array::ArrayStats;
use onehop_drive::{Drive, Namespace};
use onehop_gpu::{Emulated, Region};
use onehop_load::Model;
use onehop_load::engine::calls::RowLayout;
use onehop_load::model::Tensor;
use onehop_os::StopSignal;
use onehop_transfer::{
    BetterRoute, DriveTable, FileOnDrive, ModelOnDrive, Progress, RouteRequest, TableBytes,
};
use pyo3::prelude::*;

use crate::device::{self, DeviceSpec, GpuDevice};
use crate::drive::DriveRequest;
use crate::error::{Error, Result};
use crate::table::{TableLayout, TableRequest};

/// The rows of a table: described, or those of a tensor of this name.
pub(crate) enum TableWanted {
    Rows(TableRequest),
    Tensor(String),
}

/// Rows of a table on a drive.
pub(crate) struct DriveRows {
    /// `None` once it is closed.
    table: Mutex<Option<Arc<DriveTable>>>,
    layout: RowLayout,
    device: GpuDevice,
    process: u32,
    /// The route's name.
    pub route: &'static str,
    /// Better routes, and why they failed.
    pub why_not_better: Vec<BetterRoute>,
    /// Warnings for the drive's user.
    pub warnings: Vec<String>,
}

impl DriveRows {
    /// Opens the drive, and a table on it.
    pub(crate) fn open(
        on: &DriveRequest,
        wanted: TableWanted,
        (cache_bytes, route): (u64, &RouteRequest),
        device: &DeviceSpec,
        stop: &StopSignal,
    ) -> Result<(Self, TableLayout)> {
        // What is wrong with the request is found before the drive is taken from its other users.
        let place = on.place()?;
        route.by_gpu()?;
        let mut device = device.open()?;
        if device.cuda.is_none() {
            // Memory that a drive accesses must not move when this process forks.
            device = device::emulated(Emulated::new(), device.why);
        }
        let (drive, warnings) = on.open(stop)?;
        let ns = drive.namespace(on.nsid).map_err(onehop_transfer::Error::from)?;
        let (bytes, wanted) = match wanted {
            TableWanted::Rows(rows) => (table_bytes(&drive, ns, on)?, rows),
            TableWanted::Tensor(name) => {
                let model = ModelOnDrive::open(&drive, ns, place)?;
                let (file, rows) = rows_of(&model.model, &name)?;
                (TableBytes::of_model(&model, file)?, rows)
            }
        };
        let layout = wanted.layout(bytes.bytes())?;
        let table = DriveTable::open((&drive, ns, bytes), layout.layout, &device.gpu, route, cache_bytes)?;
        let rows = Self {
            layout: table.layout(),
            device,
            process: std::process::id(),
            route: table.route,
            why_not_better: table.why_not_better.clone(),
            warnings,
            table: Mutex::new(Some(Arc::new(table))),
        };
        Ok((rows, layout))
    }

    pub(crate) fn layout(&self) -> RowLayout {
        self.layout
    }

    pub(crate) fn device(&self) -> &GpuDevice {
        &self.device
    }

    /// Writes these rows to memory of this GPU.
    pub(crate) fn gather(&self, ids: &[u64], to: Region, signals: &Signals) -> Result<Region> {
        self.table()?.gather(ids, &to, signals)?;
        Ok(to)
    }

    /// The cache's statistics. What it drops may be the last of a closed table.
    pub(crate) fn stats(&self) -> Result<ArrayStats> {
        Ok(self.table()?.stats()?)
    }

    /// Closes it once no gather uses it.
    pub(crate) fn close(&self) {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(table);
    }

    fn table(&self) -> Result<Arc<DriveTable>> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner).clone();
        table.ok_or_else(|| Error::Request("the table is closed: open it again".into()))
    }
}

impl Drop for DriveRows {
    fn drop(&mut self) {
        let table = self.table.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if std::process::id() != self.process {
            // Closing it would delete the parent's queue.
            std::mem::forget(table);
            return;
        }
        // The driver may wait for calls of other threads, which may wait for the interpreter.
        Python::try_attach(|py| py.detach(|| drop(table)));
    }
}

/// Lets Ctrl-C cancel a gather; other threads than the interpreter's main one get no signals.
#[derive(Default)]
pub(crate) struct Signals(Mutex<Option<PyErr>>);

impl Signals {
    /// The exception of a signal's handler.
    pub(crate) fn raised(self) -> Option<PyErr> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress for Signals {
    fn is_cancelled(&self) -> bool {
        // There is no interpreter any more at the process's end.
        let Some(Err(raised)) = Python::try_attach(|py| py.check_signals()) else { return false };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(raised);
        true
    }
}

/// The rows of a tensor, whose first dimension counts them, and the index of its file.
fn rows_of(model: &Model, name: &str) -> Result<(usize, TableRequest)> {
    let found = model.tensors.iter().find(|tensor| tensor.info.name == name);
    let Tensor { info, file } = found.ok_or_else(|| Error::NoTensor(name.into()))?;
    let Some((rows, row)) = info.shape.split_first() else {
        return Err(Error::Request(format!("the tensor {name:?} has no rows: its shape is ()")));
    };
    let (row, rows) = (row.to_vec(), Some(*rows));
    Ok((*file, TableRequest { dtype: info.dtype, row, rows, offset: info.offset, stride: None }))
}

/// Finds the file, or takes the whole namespace.
fn table_bytes(drive: &Drive, ns: &Namespace, on: &DriveRequest) -> Result<TableBytes> {
    let path = on.paths.first().map(PathBuf::as_path);
    Ok(match (&on.map, path) {
        (Some(map), path) => TableBytes::of_file(FileOnDrive::by_map(drive, ns, map, path)?),
        (None, Some(path)) => {
            TableBytes::of_file(FileOnDrive::by_file_system(drive, ns, path, on.partition()?)?)
        }
        (None, None) => TableBytes::of_drive(drive, ns)?,
    })
}
