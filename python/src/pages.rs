//! `onehop._native.PageFile`: pages of a file, moved to and from memory of Python.

use std::path::PathBuf;

use onehop_pages::{FilePage, MovedBytes, Pages, PagesOptions};
use pyo3::prelude::*;

use crate::borrowed::BorrowedMemory;
use crate::device::{DeviceSpec, GpuDevice};
use crate::error::{Error, Result};

/// A file, and the device whose memory its pages are moved to and from.
#[pyclass(frozen, module = "onehop")]
pub(crate) struct PageFile {
    /// None while it is dropped.
    pages: Option<Pages>,
    device: GpuDevice,
    process: u32,
}

/// Pages from Python: four numbers of eight bytes for each, in this machine's order.
fn page_list(bytes: &[u8]) -> Result<Vec<FilePage>> {
    let (numbers, rest) = bytes.as_chunks::<8>();
    let (pages, more) = numbers.as_chunks::<4>();
    if !rest.is_empty() || !more.is_empty() {
        return Err(Error::Request(format!("{} bytes are not pages of 32 bytes each", bytes.len())));
    }
    let page = |numbers: &[[u8; 8]; 4]| {
        let [offset, memory, at, bytes] = numbers.map(u64::from_ne_bytes);
        let memory = (memory as usize, at as usize);
        FilePage { offset, memory, bytes: bytes as usize }
    };
    Ok(pages.iter().map(page).collect())
}

#[pymethods]
impl PageFile {
    /// Opens a file that exists.
    #[new]
    #[pyo3(signature = (path, *, writes, registered, device))]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        writes: bool,
        registered: Option<u64>,
        device: Option<&str>,
    ) -> PyResult<Self> {
        let device = DeviceSpec::parse(device)?;
        let opened = py.detach(|| -> Result<Self> {
            let options = PagesOptions::new(writes);
            let options = PagesOptions { registered: registered.unwrap_or(options.registered), ..options };
            let device = device.open()?;
            let pages = Pages::open(&path, device.gpu.clone(), options)
                .map_err(|why| Error::Pages { file: path.display().to_string(), why: Box::new(why) })?;
            Ok(Self { pages: Some(pages), device, process: std::process::id() })
        });
        Ok(opened?)
    }

    /// Registers all of the file that may be; returns how many bytes are.
    fn register(&self, py: Python<'_>) -> PyResult<u64> {
        let file = self.pages()?;
        Ok(py.detach(|| file.register()))
    }

    /// Unregisters all of the file.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let file = self.pages()?;
        py.detach(|| file.release());
        Ok(())
    }

    /// Moves pages between the file and these arrays: to the file if `writes`.
    fn transfer(
        &self,
        py: Python<'_>,
        writes: bool,
        memories: Vec<Bound<'_, PyAny>>,
        pages: &[u8],
    ) -> PyResult<()> {
        let file = self.pages()?;
        let pages = page_list(pages)?;
        let borrowed: Vec<BorrowedMemory> =
            memories.iter().map(|array| BorrowedMemory::of_array(array, !writes)).collect::<PyResult<_>>()?;
        let gpu = self.device.cuda.as_ref();
        let moved = py.detach(|| -> Result<()> {
            let on_device = |memory: BorrowedMemory| memory.into_region_of(gpu, self.device.dlpack.id);
            let regions = borrowed.into_iter().map(on_device).collect::<Result<Vec<_>>>()?;
            let moved = if writes { file.write(&regions, &pages) } else { file.read(&regions, &pages) };
            moved.map_err(Error::pages)
        });
        Ok(moved?)
    }

    /// Returns when everything that was written is on the disk.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let file = self.pages()?;
        Ok(py.detach(|| file.sync()).map_err(Error::pages)?)
    }

    /// The size of the file.
    #[getter]
    fn size(&self) -> PyResult<u64> {
        Ok(self.pages()?.size().map_err(Error::pages)?)
    }

    /// Bytes moved so far: by the GPU alone, and by threads.
    #[getter]
    fn moved(&self) -> PyResult<(u64, u64)> {
        let MovedBytes { registered, staged } = self.pages()?.moved();
        Ok((registered, staged))
    }

    /// The last known reason for staging.
    #[getter]
    fn why_staged(&self) -> PyResult<Option<String>> {
        Ok(self.pages()?.why_staged())
    }

    /// The device.
    #[getter]
    fn device(&self) -> String {
        self.device.dlpack.name()
    }
}

impl Drop for PageFile {
    fn drop(&mut self) {
        if self.pages().is_err() {
            // A child lacks the threads, and another thread may have held a lock at the fork.
            std::mem::forget(self.pages.take());
        }
    }
}

impl PageFile {
    fn pages(&self) -> Result<&Pages> {
        let forked =
            || Error::Request("this file was opened before a fork: open it again in the child".into());
        self.pages.as_ref().filter(|_| std::process::id() == self.process).ok_or_else(forked)
    }
}
