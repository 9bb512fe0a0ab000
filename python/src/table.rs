//! `onehop._native.Table`: rows of a file or a drive, gathered into the memory of a GPU or of the CPU.

use std::path::PathBuf;
use std::sync::Arc;

use onehop_array::ArrayStats;
use onehop_gpu::Region;
use onehop_load::engine::calls::{CallError, GatherError, RowFile, RowLayout};
use onehop_load::{Dtype, LocalFile};
use pyo3::prelude::*;

use crate::borrowed::BorrowedMemory;
use crate::device::{DeviceSpec, GpuDevice};
use crate::drive::{DriveRequest, drive_route, open_interruptibly};
use crate::dtype::{data_type, is_packed};
use crate::error::{Error, Result};
use crate::gather::Gatherer;
use crate::outcome::WhyNot;
use crate::rows_on_drive::{DriveRows, Signals, TableWanted};
use crate::tensor::{Tensor, packed_strides};

/// Rows of equal size in a file, which is mapped, or on a drive.
#[pyclass(frozen, name = "Table", module = "onehop")]
pub(crate) struct RowTable {
    source: RowSource,
    dtype: Dtype,
    /// Elements of a row in each of its dimensions.
    row: Vec<i64>,
    process: u32,
}

enum RowSource {
    File(Arc<RowFile>, Gatherer),
    Drive(Box<DriveRows>),
}

impl RowSource {
    fn layout(&self) -> RowLayout {
        match self {
            Self::File(rows, _) => rows.layout(),
            Self::Drive(rows) => rows.layout(),
        }
    }

    fn device(&self) -> &GpuDevice {
        match self {
            Self::File(_, gatherer) => gatherer.device(),
            Self::Drive(rows) => rows.device(),
        }
    }

    /// Writes rows to this memory, or to new memory.
    fn gather(&self, ids: Vec<u64>, bytes: usize, to: Option<Region>, signals: &Signals) -> Result<Region> {
        let to = match to {
            Some(to) => to,
            // All of it is written before it is read.
            None => self.device().gpu.arena_to_fill(bytes.max(1), &[])?,
        };
        match self {
            Self::File(rows, gatherer) => gatherer.gather(rows, ids, to),
            Self::Drive(rows) => rows.gather(&ids, to, signals),
        }
    }
}

/// From Python: the name of a tensor, or rows: their type and shape, how many, the first one's offset, and their
/// distance.
#[derive(FromPyObject)]
enum RowsOrTensor {
    Tensor(String),
    Rows(String, Vec<u64>, Option<u64>, u64, Option<usize>),
}

/// The requested rows.
pub(crate) struct TableRequest {
    pub dtype: Dtype,
    /// The shape of a row.
    pub row: Vec<u64>,
    /// How many; as many as there are if `None`.
    pub rows: Option<u64>,
    pub offset: u64,
    pub stride: Option<usize>,
}

/// The layout of a table in its file.
pub(crate) struct TableLayout {
    pub dtype: Dtype,
    pub row: Vec<i64>,
    pub layout: RowLayout,
}

/// Bytes of a row.
fn row_bytes(dtype: Dtype, row: &[u64]) -> Option<usize> {
    let bytes = u64::from(data_type(dtype).bits / 8);
    let all = row.iter().try_fold(bytes, |all, dim| all.checked_mul(*dim))?;
    usize::try_from(all).ok().filter(|all| *all > 0 && *all <= RowFile::MOST_BYTES)
}

impl TableRequest {
    fn new(
        dtype: &str,
        row: Vec<u64>,
        rows: Option<u64>,
        offset: u64,
        stride: Option<usize>,
    ) -> Result<Self> {
        let dtype: Dtype = dtype.parse().map_err(|why| Error::Request(format!("{why}")))?;
        Ok(Self { dtype, row, rows, offset, stride })
    }

    /// The layout in a file of `have` bytes.
    pub(crate) fn layout(self, have: u64) -> Result<TableLayout> {
        let Self { dtype, row, rows, offset, stride } = self;
        let invalid = |why: String| Err(Error::Request(why));
        if is_packed(dtype) {
            return invalid(format!("elements of {} share bytes; describe rows of them as U8", dtype.name()));
        }
        let most = RowFile::MOST_BYTES;
        let Some(bytes) = row_bytes(dtype, &row) else {
            return invalid(format!("a row of shape {row:?} does not have 1 to {most} bytes"));
        };
        let stride = stride.unwrap_or(bytes);
        if stride < bytes {
            return invalid(format!("rows of {bytes} bytes cannot begin every {stride} bytes"));
        }
        let count = match rows {
            Some(rows) => rows,
            None => {
                let after = have.saturating_sub(offset);
                if after < bytes as u64 {
                    return invalid(format!(
                        "the file has {have} bytes: no row of {bytes} fits at byte {offset}"
                    ));
                }
                (after - bytes as u64) / stride as u64 + 1
            }
        };
        let row = row.iter().map(|dim| *dim as i64).collect();
        Ok(TableLayout { dtype, row, layout: RowLayout { offset, bytes, stride, count } })
    }
}

/// Row numbers from Python: eight bytes each, in this machine's order.
fn row_numbers(bytes: &[u8]) -> Result<Vec<u64>> {
    let (numbers, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(Error::Request(format!("{} bytes are not row numbers of 8 bytes each", bytes.len())));
    }
    Ok(numbers.iter().map(|number| u64::from_ne_bytes(*number)).collect())
}

/// A negative number arrives as a large one.
fn negative_row(error: Error) -> Error {
    let missing = match &error {
        Error::Rows(GatherError::NoRow { at, id, .. }) => Some((*at, *id)),
        Error::Transfer(error) => match **error {
            onehop_transfer::Error::NoRow { at, id, .. } => Some((at, id)),
            _ => None,
        },
        _ => None,
    };
    match missing {
        Some((at, id)) if id > i64::MAX as u64 => {
            Error::Request(format!("row {}, which is number {at} in the list, is negative", id as i64))
        }
        _ => error,
    }
}

#[pymethods]
impl RowTable {
    /// Maps the file. `rows` defaults to as many as it has.
    #[new]
    #[pyo3(signature = (path, dtype, row, *, rows, offset, stride, device))]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        dtype: &str,
        row: Vec<u64>,
        rows: Option<u64>,
        offset: u64,
        stride: Option<usize>,
        device: Option<&str>,
    ) -> PyResult<Self> {
        let (device, wanted) =
            (DeviceSpec::parse(device)?, TableRequest::new(dtype, row, rows, offset, stride)?);
        let table = py.detach(|| -> Result<Self> {
            let local = LocalFile::open(&path)?;
            let file = local.file();
            let have = file.metadata().map_err(CallError::from)?.len();
            let TableLayout { dtype, row, layout } = wanted.layout(have)?;
            let rows = Arc::new(RowFile::open(file, layout)?);
            let source = RowSource::File(rows, Gatherer::new(device.open()?)?);
            Ok(Self { source, dtype, row, process: std::process::id() })
        });
        Ok(table?)
    }

    /// Opens a table on a drive that onehop drives itself: in a file of its own file system or of an extent map, or
    /// without either from the drive's first byte on. `rows` describes the rows, or names a tensor.
    #[staticmethod]
    #[pyo3(signature = (on, rows, *, device, cache_bytes, route))]
    fn on_drive(
        py: Python<'_>,
        on: (String, Option<PathBuf>, Option<PathBuf>, Option<String>, u32),
        rows: RowsOrTensor,
        device: Option<&str>,
        cache_bytes: u64,
        route: &str,
    ) -> PyResult<Self> {
        let device = DeviceSpec::parse(device)?;
        let wanted = match rows {
            RowsOrTensor::Tensor(name) => TableWanted::Tensor(name),
            RowsOrTensor::Rows(dtype, row, rows, offset, stride) => {
                TableWanted::Rows(TableRequest::new(&dtype, row, rows, offset, stride)?)
            }
        };
        let route = drive_route(route)?;
        let (drive, path, map, partition, nsid) = on;
        let on = DriveRequest { drive, paths: path.into_iter().collect(), map, partition, nsid };
        let (rows, table) = open_interruptibly(py, move |stop| {
            DriveRows::open(&on, wanted, (cache_bytes, &route), &device, stop)
        })?;
        let TableLayout { dtype, row, .. } = table;
        Ok(Self { source: RowSource::Drive(Box::new(rows)), dtype, row, process: std::process::id() })
    }

    /// Warnings for the drive's user.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        match &self.source {
            RowSource::File(..) => Vec::new(),
            RowSource::Drive(rows) => rows.warnings.clone(),
        }
    }

    /// The route of rows, and better ones with the reasons why they were not possible.
    #[getter]
    fn route(&self) -> (&str, Vec<WhyNot>) {
        match &self.source {
            RowSource::File(..) => ("cpu/cached", Vec::new()),
            RowSource::Drive(rows) => {
                (rows.route, rows.why_not_better.iter().cloned().map(WhyNot::from).collect())
            }
        }
    }

    /// Closes the drive, as soon as no gather uses it. A file stays open.
    fn close(&self, py: Python<'_>) {
        if let RowSource::Drive(rows) = &self.source
            && self.check_process().is_ok()
        {
            py.detach(|| rows.close());
        }
    }

    /// Counts of the cache: pages that gathers wanted, how many of them were there, pages read, and failed reads. They
    /// wrap at 2**32.
    fn cache(&self, py: Python<'_>) -> Result<Option<(u32, u32, u32, u32)>> {
        let RowSource::Drive(rows) = &self.source else { return Ok(None) };
        self.check_process()?;
        let ArrayStats { wanted, hits, reads, failed_reads, .. } = py.detach(|| rows.stats())?;
        Ok(Some((wanted, hits, reads, failed_reads)))
    }

    /// The rows with these numbers, in this order: in new memory, or in a torch tensor, given by address, bytes and the
    /// tensor itself.
    #[pyo3(signature = (ids, to = None))]
    fn gather(
        &self,
        py: Python<'_>,
        ids: &[u8],
        to: Option<(u64, usize, Bound<'_, PyAny>)>,
    ) -> PyResult<Tensor> {
        self.check_process()?;
        let ids = row_numbers(ids)?;
        let count = ids.len();
        let bytes = count.saturating_mul(self.source.layout().bytes);
        let device = self.source.device();
        let borrowed = match (&to, &device.cuda) {
            (Some((at, have, owner)), Some(gpu)) => {
                let brought = BorrowedMemory::of_tensor(*at, *have, owner)?;
                Some(py.detach(|| brought.into_region(gpu))?)
            }
            (Some(_), None) => return Err(Error::Request("the table is not on a GPU".into()).into()),
            (None, _) => None,
        };
        let signals = Signals::default();
        let gathered = py.detach(|| self.source.gather(ids, bytes, borrowed, &signals));
        if let Some(raised) = signals.raised() {
            return Err(raised);
        }
        let memory = gathered.map_err(negative_row)?;
        let shape: Vec<i64> = std::iter::once(count as i64).chain(self.row.iter().copied()).collect();
        Ok(Tensor {
            name: String::new(),
            dtype: self.dtype,
            carrier: data_type(self.dtype),
            strides: packed_strides(&shape),
            logical: shape.iter().map(|dim| *dim as u64).collect(),
            shape,
            memory: memory.slice(0..bytes).map_err(Error::from)?,
            lease: None,
            device: device.dlpack,
        })
    }

    /// The number of rows.
    #[getter]
    fn rows(&self) -> u64 {
        self.source.layout().count
    }

    /// Bytes of a row.
    #[getter]
    fn row_bytes(&self) -> usize {
        self.source.layout().bytes
    }

    /// The type of its elements.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// The shape of a row.
    #[getter]
    fn row_shape(&self) -> Vec<i64> {
        self.row.clone()
    }

    /// The destination of rows.
    #[getter]
    fn device(&self) -> String {
        self.source.device().dlpack.name()
    }
}

impl RowTable {
    fn check_process(&self) -> Result<()> {
        if std::process::id() == self.process {
            return Ok(());
        }
        Err(Error::Request("this table was opened before a fork: open it again in the child".into()))
    }
}
