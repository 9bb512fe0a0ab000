//! Drives that onehop drives itself, and a model on one: `drive=` of `onehop.load`.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};

use onehop_drive::{Drive, Options};
use onehop_files::Which;
use onehop_load::{Plan, Selection, plan};
use onehop_os::StopSignal;
use onehop_transfer::{
    Chosen, Loaded, ModelOnDrive, ModelPlace, Progress, RouteOptions, RouteRequest, TransferSetup,
    controllers, plan_options, volume,
};
use pyo3::prelude::*;

use crate::error::{Error, Result};
use crate::job::SIGNAL_POLL_INTERVAL;

/// A drive, and the place of files on it.
pub(crate) struct DriveRequest {
    pub drive: String,
    pub paths: Vec<PathBuf>,
    /// An extent map, in place of paths.
    pub map: Option<PathBuf>,
    pub partition: Option<String>,
    pub nsid: u32,
}

/// An open drive, and the model on it.
pub(crate) struct OpenDrive {
    drive: Drive,
    nsid: u32,
    pub on_drive: ModelOnDrive,
    /// Warnings for the drive's user.
    pub warnings: Vec<String>,
}

/// Opens something on a drive, while Python handles Ctrl-C, which closes the drive once it has answered.
pub(crate) fn open_interruptibly<T: Send + 'static>(
    py: Python<'_>,
    open: impl FnOnce(&StopSignal) -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let (sender, opened) = channel();
    let opened = Mutex::new(opened);
    let thread = std::thread::Builder::new().name("onehop open".into());
    // The waiting thread may have gone.
    let stop = StopSignal::default();
    let thread_stop = stop.clone();
    let open = move || drop(sender.send(open(&thread_stop)));
    thread.spawn(open).map_err(|error| PyErr::from(Error::Thread(error)))?;
    loop {
        py.check_signals().inspect_err(|_| stop.set())?;
        match py.detach(|| {
            opened.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SIGNAL_POLL_INTERVAL)
        }) {
            Ok(result) => return Ok(result?),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(Error::Lost.into()),
        }
    }
}

/// A drive's route by its name.
pub(crate) fn drive_route(route: &str) -> Result<RouteRequest> {
    route.parse().map_err(|why: onehop_transfer::Error| {
        Error::Request(format!("unknown route '{}': {why}", route.escape_debug()))
    })
}

impl DriveRequest {
    /// Opens the drive. Returns it with warnings for its user.
    pub(crate) fn open(&self, stop: &StopSignal) -> Result<(Drive, Vec<String>)> {
        let opening = |error| Error::OpenDrive(Box::new(error));
        let found = controllers::find(&self.drive, stop).map_err(opening)?;
        let options = Options { stop: stop.clone(), ..RouteOptions::default().drive_options(false) };
        let drive = Drive::open(found.backend, options).map_err(|error| opening(error.into()))?;
        Ok((drive, found.warnings))
    }

    /// The requested partition.
    pub(crate) fn partition(&self) -> Result<Option<Which>> {
        let partition = self.partition.as_deref().map(volume::parse_partition).transpose();
        partition.map_err(|why| Error::Request(format!("partition: {why}")))
    }

    /// Where the files are.
    pub(crate) fn place(&self) -> Result<ModelPlace<'_>> {
        Ok(match &self.map {
            Some(map) => ModelPlace::Map { map, paths: &self.paths },
            None => ModelPlace::FileSystem { paths: &self.paths, partition: self.partition()? },
        })
    }
}

impl OpenDrive {
    /// Opens a model on a drive.
    pub(crate) fn open(py: Python<'_>, wanted: DriveRequest) -> PyResult<Self> {
        open_interruptibly(py, move |stop| {
            let place = wanted.place()?;
            let (drive, warnings) = wanted.open(stop)?;
            let ns = drive.namespace(wanted.nsid).map_err(onehop_transfer::Error::from)?;
            let on_drive = ModelOnDrive::open(&drive, ns, place)?;
            Ok(Self { nsid: wanted.nsid, on_drive, warnings, drive })
        })
    }

    /// The plan of a selection. Tensors are aligned to `small` or more.
    pub(crate) fn plan(&self, selection: &Selection, small: u64) -> Result<Plan> {
        let ns = self.drive.namespace(self.nsid).map_err(onehop_transfer::Error::from)?;
        Ok(self.on_drive.plan(selection, plan::PlanOptions { small, ..plan_options(ns) })?)
    }

    pub(crate) fn load(
        &self,
        gpu: &Chosen,
        options: &RouteOptions,
        plan: &Plan,
        progress: &dyn Progress,
    ) -> Result<Loaded> {
        let ns = self.drive.namespace(self.nsid).map_err(onehop_transfer::Error::from)?;
        Ok(self.on_drive.load(&TransferSetup { drive: &self.drive, ns, gpu, options }, plan, progress)?)
    }
}
