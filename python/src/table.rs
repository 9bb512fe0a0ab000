//! `onehop._native.Table`: rows of a file, gathered into the memory of a GPU or of the CPU.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use onehop_load::engine::calls::{CallError, GatherError, RowFile, RowLayout};
use onehop_load::{Dtype, LocalFile};
use pyo3::prelude::*;

use crate::borrowed::BorrowedMemory;
use crate::device::DeviceSpec;
use crate::dtype::{data_type, is_packed};
use crate::error::{Error, Result};
use crate::gather::Gatherer;
use crate::tensor::{Tensor, packed_strides};

/// Rows of equal size in a file, which is mapped.
#[pyclass(frozen, name = "Table", module = "onehop")]
pub(crate) struct RowTable {
    rows: Arc<RowFile>,
    gatherer: Gatherer,
    dtype: Dtype,
    /// Elements of a row in each of its dimensions.
    row: Vec<i64>,
    process: u32,
}

/// The layout of a table in its file.
struct TableLayout {
    dtype: Dtype,
    row: Vec<i64>,
    layout: RowLayout,
}

/// Bytes of a row.
fn row_bytes(dtype: Dtype, row: &[u64]) -> Option<usize> {
    let bytes = u64::from(data_type(dtype).bits / 8);
    let all = row.iter().try_fold(bytes, |all, dim| all.checked_mul(*dim))?;
    usize::try_from(all).ok().filter(|all| *all > 0 && *all <= RowFile::MOST_BYTES)
}

fn table_layout(
    file: &File,
    (dtype, row): (&str, &[u64]),
    rows: Option<u64>,
    offset: u64,
    stride: Option<usize>,
) -> Result<TableLayout> {
    let invalid = |why: String| Error::Request(why);
    let dtype: Dtype = dtype.parse().map_err(|why| invalid(format!("{why}")))?;
    if is_packed(dtype) {
        return Err(invalid(format!(
            "elements of {} share bytes; describe rows of them as U8",
            dtype.name()
        )));
    }
    let most = RowFile::MOST_BYTES;
    let bytes = row_bytes(dtype, row)
        .ok_or_else(|| invalid(format!("a row of shape {row:?} does not have 1 to {most} bytes")))?;
    let stride = stride.unwrap_or(bytes);
    if stride < bytes {
        return Err(invalid(format!("rows of {bytes} bytes cannot begin every {stride} bytes")));
    }
    let count = match rows {
        Some(rows) => rows,
        None => {
            let have = file.metadata().map_err(CallError::from)?.len();
            let after = have.saturating_sub(offset);
            if after < bytes as u64 {
                return Err(invalid(format!(
                    "the file has {have} bytes: no row of {bytes} fits at byte {offset}"
                )));
            }
            (after - bytes as u64) / stride as u64 + 1
        }
    };
    let row = row.iter().map(|dim| *dim as i64).collect();
    Ok(TableLayout { dtype, row, layout: RowLayout { offset, bytes, stride, count } })
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
    match error {
        Error::Rows(GatherError::NoRow { at, id, .. }) if id > i64::MAX as u64 => {
            Error::Request(format!("row {}, which is number {at} in the list, is negative", id as i64))
        }
        other => other,
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
        let device = DeviceSpec::parse(device)?;
        let table = py.detach(|| -> Result<Self> {
            let local = LocalFile::open(&path)?;
            let file = local.file();
            let TableLayout { dtype, row, layout } = table_layout(file, (dtype, &row), rows, offset, stride)?;
            let rows = Arc::new(RowFile::open(file, layout)?);
            let gatherer = Gatherer::new(device.open()?)?;
            Ok(Self { rows, gatherer, dtype, row, process: std::process::id() })
        });
        Ok(table?)
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
        if std::process::id() != self.process {
            let why = "this table was opened before a fork: open it again in the child";
            return Err(Error::Request(why.into()).into());
        }
        let ids = row_numbers(ids)?;
        let count = ids.len();
        let bytes = count.saturating_mul(self.rows.layout().bytes);
        let device = self.gatherer.device();
        let borrowed = match (&to, &device.cuda) {
            (Some((at, have, owner)), Some(gpu)) => {
                let brought = BorrowedMemory::of_tensor(*at, *have, owner)?;
                Some(py.detach(|| brought.into_region(gpu))?)
            }
            (Some(_), None) => return Err(Error::Request("the table is not on a GPU".into()).into()),
            (None, _) => None,
        };
        let memory = py.detach(|| -> Result<_> {
            let to = borrowed.map_or_else(|| self.gatherer.alloc(bytes), Ok)?;
            self.gatherer.gather(&self.rows, ids, to)
        });
        let memory = memory.map_err(negative_row)?;
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
        self.rows.layout().count
    }

    /// Bytes of a row.
    #[getter]
    fn row_bytes(&self) -> usize {
        self.rows.layout().bytes
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
        self.gatherer.device().dlpack.name()
    }
}
