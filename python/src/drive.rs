//! A model on a drive that onehop drives itself: `drive=` of `onehop.load`.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};

use onehop_drive::{Drive, Options};
use onehop_load::{Plan, Selection, plan};
use onehop_os::StopSignal;
use onehop_transfer::{
    Chosen, Loaded, ModelOnDrive, ModelPlace, Progress, RouteOptions, TransferSetup, controllers,
    plan_options, volume,
};
use pyo3::prelude::*;

use crate::error::{Error, Result};
use crate::job::SIGNAL_POLL_INTERVAL;

/// A drive, and the place of the model on it.
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

impl OpenDrive {
    /// Opens it, while Python handles Ctrl-C, which closes the drive once it has answered.
    pub(crate) fn open(py: Python<'_>, wanted: DriveRequest) -> PyResult<Self> {
        let (sender, opened) = channel();
        let opened = Mutex::new(opened);
        let thread = std::thread::Builder::new().name("onehop open".into());
        // The waiting thread may have gone.
        let stop = StopSignal::default();
        let thread_stop = stop.clone();
        let open = move || drop(sender.send(Self::open_now(&wanted, &thread_stop)));
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

    fn open_now(wanted: &DriveRequest, stop: &StopSignal) -> Result<Self> {
        let opening = |error| Error::OpenDrive(Box::new(error));
        let partition = wanted.partition.as_deref().map(volume::parse_partition).transpose();
        let partition = partition.map_err(|why| Error::Request(format!("partition: {why}")))?;
        let found = controllers::find(&wanted.drive, stop).map_err(opening)?;
        let options = Options { stop: stop.clone(), ..RouteOptions::default().drive_options(false) };
        let drive = Drive::open(found.backend, options).map_err(|error| opening(error.into()))?;
        let place = match &wanted.map {
            Some(map) => ModelPlace::Map(map),
            None => ModelPlace::FileSystem { paths: &wanted.paths, partition },
        };
        let ns = drive.namespace(wanted.nsid).map_err(onehop_transfer::Error::from)?;
        let on_drive = ModelOnDrive::open(&drive, ns, place)?;
        Ok(Self { nsid: wanted.nsid, on_drive, warnings: found.warnings, drive })
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
