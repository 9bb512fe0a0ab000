//! `onehop._native.Model`: open model files, and loads from them.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use onehop_gpu::{Emulated, Gpu, Place};
use onehop_load::formats::{Metadata, gguf};
use onehop_load::group::Group;
use onehop_load::model::Tensor;
use onehop_load::{Dtype, Local, Part, Selection, engine};
use onehop_os::DmaMemory;
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyIndexError, PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyEllipsis, PyList, PySlice, PyTuple};

use crate::descriptors;
use crate::device::DeviceSpec;
use crate::dlpack;
use crate::drive::{self, OpenDrive};
use crate::dtype::exported;
use crate::error::{Error, Result};
use crate::job::{Job, LoadOrigin, LoadRequest, LoadScope, PartView, TensorMemory};
use crate::tensor::Tensor as CpuTensor;

/// The limits of a read without threads: bytes and rows.
const MAX_DIRECT_BYTES: u64 = 4 << 20;
const MAX_DIRECT_ROWS: u64 = 256;

/// Open model files.
#[pyclass(frozen, module = "onehop")]
pub(crate) struct Model {
    /// For a model on a drive, only the headers.
    inner: Arc<onehop_load::Model>,
    by_name: HashMap<String, usize>,
    /// Whether it is on a drive.
    on_drive: bool,
    /// That drive; none once it is closed.
    drive: Mutex<Option<Arc<OpenDrive>>>,
    process: u32,
}

impl Model {
    fn new(inner: Arc<onehop_load::Model>, drive: Option<Arc<OpenDrive>>) -> Self {
        let by_name = inner.tensors.iter().enumerate().map(|(i, t)| (t.info.name.clone(), i)).collect();
        let (on_drive, process) = (drive.is_some(), std::process::id());
        Self { inner, by_name, on_drive, drive: Mutex::new(drive), process }
    }

    /// Whether this is a child of the process that opened it, which keeps the drive.
    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    fn drive(&self) -> MutexGuard<'_, Option<Arc<OpenDrive>>> {
        self.drive.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The source of a load's bytes.
    fn origin(&self, route: &str, threads: Option<usize>) -> Result<LoadOrigin> {
        if !self.on_drive {
            return Ok(LoadOrigin::Files(engine::Options {
                route: parse_route(route)?,
                threads,
                slot: None,
            }));
        }
        if self.is_forked() {
            return Err(Error::Request(
                "the drive was opened before a fork and belongs to the parent".into(),
            ));
        }
        let drive = self.drive().clone();
        let drive = drive.ok_or_else(|| Error::Request("the drive is closed: open it again".into()))?;
        let route = drive::drive_route(route)?;
        // Tensors are on the requested device.
        let options = onehop_transfer::RouteOptions { route, in_gpu_memory: true, ..Default::default() };
        options.candidates()?;
        Ok(LoadOrigin::Drive(drive, options))
    }

    /// The tensor, and the part of it that an index names.
    fn part(&self, name: &str, index: &Bound<'_, PyAny>) -> PyResult<(&Tensor, Part, PartView)> {
        if self.on_drive {
            let why = "parts of tensors are loaded only from local files";
            return Err(Error::Request(why.into()).into());
        }
        let tensor = self.tensor(name)?;
        let info = exported(&tensor.info);
        let view = view(index, &info.shape)?;
        let ranges: Vec<_> = view.dims.iter().map(|dim| dim.first..dim.end()).collect();
        let part = Part::within(&info, &ranges).map_err(|e| Error::from(onehop_load::Error::from(e)))?;
        Ok((tensor, part, view))
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        let found = self.by_name.get(name).and_then(|i| self.inner.tensors.get(*i));
        found.ok_or_else(|| Error::NoTensor(name.into()))
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        if self.is_forked() {
            // Closing it would shut down the parent's drive.
            std::mem::forget(self.drive.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

#[pymethods]
impl Model {
    /// Opens files, directories and indexes that form one model.
    #[new]
    fn open(py: Python<'_>, paths: Vec<PathBuf>) -> Result<Self> {
        let inner = py.detach(|| descriptors::with_room(|| onehop_load::Model::open(&Local, &paths)))?;
        Ok(Self::new(Arc::new(inner), None))
    }

    /// Opens files, directories and indexes of a drive's own file system, or the files of an extent map.
    #[staticmethod]
    #[pyo3(signature = (drive, *, paths, extent_map, partition, nsid))]
    fn on_drive(
        py: Python<'_>,
        drive: String,
        paths: Vec<PathBuf>,
        extent_map: Option<PathBuf>,
        partition: Option<String>,
        nsid: u32,
    ) -> PyResult<Self> {
        let drive =
            OpenDrive::open(py, drive::DriveRequest { drive, paths, map: extent_map, partition, nsid })?;
        // Files keep the drive open, so only the drive's handle has them.
        let onehop_load::Model { metadata, tensors, format, .. } = &*drive.on_drive.model;
        let headers = onehop_load::Model {
            files: Vec::new(),
            metadata: metadata.clone(),
            tensors: tensors.clone(),
            format,
        };
        Ok(Self::new(Arc::new(headers), Some(Arc::new(drive))))
    }

    /// Warnings for the drive's user: which protection is missing.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        if self.is_forked() {
            return Vec::new();
        }
        self.drive().as_ref().map_or_else(Vec::new, |drive| drive.warnings.clone())
    }

    /// Closes the drive, as soon as no load uses it.
    fn close_drive(&self, py: Python<'_>) {
        if self.is_forked() {
            return;
        }
        let drive = self.drive().take();
        py.detach(|| drop(drive));
    }

    /// safetensors, or gguf.
    #[getter]
    fn format(&self) -> &'static str {
        self.inner.format
    }

    /// The names of all tensors, file by file and in the order of their bytes.
    fn names(&self) -> Vec<&str> {
        self.inner.tensors.iter().map(|t| t.info.name.as_str()).collect()
    }

    /// The type and the dimensions of a tensor, as it is exported.
    fn info(&self, name: &str) -> Result<(&'static str, Vec<u64>)> {
        let tensor = &self.tensor(name)?.info;
        Ok((tensor.dtype.name(), exported(tensor).shape))
    }

    /// The files' metadata; if they have different values for a name, the first.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for metadata in &self.inner.metadata {
            match metadata {
                Metadata::Safetensors(texts) => {
                    texts.iter().try_for_each(|(key, text)| add(&all, key, text))?;
                }
                Metadata::Gguf(values) => {
                    for (key, value) in values {
                        add(&all, key, python(py, value)?)?;
                    }
                }
            }
        }
        Ok(all)
    }

    /// Starts to load a selection.
    #[pyo3(signature = (*, device, only, without, dtypes, rank, cuts, group, route, threads, verify, manifest, measure_limit, arena, max_bytes))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn load(
        &self,
        device: Option<&str>,
        only: Vec<String>,
        without: Vec<String>,
        dtypes: Vec<String>,
        rank: Option<(u64, u64)>,
        cuts: Vec<(String, usize)>,
        group: Option<(String, usize, usize)>,
        route: &str,
        threads: Option<usize>,
        verify: bool,
        manifest: Option<PathBuf>,
        measure_limit: bool,
        arena: bool,
        max_bytes: Option<u64>,
    ) -> Result<Job> {
        let mut selection = Selection::default();
        for pattern in &only {
            selection = selection.only(pattern);
        }
        for pattern in &without {
            selection = selection.except(pattern);
        }
        for name in &dtypes {
            let dtype: std::result::Result<Dtype, _> = name.to_uppercase().parse();
            selection = selection.dtype(dtype.map_err(|e| Error::Request(e.to_string()))?);
        }
        for (pattern, dim) in &cuts {
            selection = selection.cut(pattern, *dim);
        }
        if let Some((rank, ranks)) = rank {
            selection = selection.rank(rank, ranks).map_err(onehop_load::Error::from)?;
        }
        let parts = rank.map_or(1, |(_, ranks)| ranks);
        let described = cuts.iter().map(|(pattern, dim)| format!("{pattern}={dim} of {parts}")).collect();
        let group = group.map(|(name, rank, size)| Group::new(&name, rank, size)).transpose()?;
        let origin = self.origin(route, threads)?;
        let model = match &origin {
            LoadOrigin::Files(_) => &self.inner,
            LoadOrigin::Drive(drive, _) => &drive.on_drive.model,
        };
        Job::start(LoadRequest {
            model: model.clone(),
            device: DeviceSpec::parse(device)?,
            wanted: LoadScope::Selection(selection),
            origin,
            memory: match max_bytes {
                Some(most) => TensorMemory::Bounded(most),
                None if arena => TensorMemory::Arena,
                None => TensorMemory::Own,
            },
            verify,
            manifest,
            measure_limit,
            group: group.map(|group| (group, described)),
        })
    }

    /// The elements of a tensor that a NumPy index names, in the CPU's memory, read at once; None if they are many and
    /// need the threads of a load.
    fn read_part(&self, py: Python<'_>, name: &str, index: &Bound<'_, PyAny>) -> PyResult<Option<CpuTensor>> {
        let (tensor, part, view) = self.part(name, index)?;
        let Some(file) = self.inner.files.get(tensor.file) else { return Ok(None) };
        let Some(local) =
            file.local().filter(|_| part.bytes() <= MAX_DIRECT_BYTES && part.rows <= MAX_DIRECT_ROWS)
        else {
            return Ok(None);
        };
        let read = || {
            let gpu = Emulated::private();
            let memory = gpu.alloc(Place::Vram, part.bytes().max(1) as usize)?;
            let host = memory.host().ok_or(Error::Lost)?;
            for row in 0..part.rows {
                let (at, offset, bytes) = (row * part.row, part.offset + row * part.step, part.row);
                let failed = |e| onehop_load::Error::Read {
                    file: file.name().into(),
                    offset,
                    bytes,
                    source: std::io::Error::other(e),
                };
                let got =
                    host.read_file(at as usize, bytes as usize, local.file(), offset).map_err(failed)?;
                if (got as u64) < bytes {
                    let (file, length) = (file.name().into(), file.bytes());
                    return Err(onehop_load::Error::Ended { file, offset, bytes, length }.into());
                }
            }
            file.still_same()?;
            view.tensor(&tensor.info, &part, &memory, 0, dlpack::DlDevice::CPU)
        };
        Ok(Some(py.detach(read)?))
    }

    /// Starts to load the elements of a tensor that a NumPy index of integers and slices names.
    #[pyo3(signature = (name, index, *, device))]
    fn load_part(&self, name: &str, index: &Bound<'_, PyAny>, device: Option<&str>) -> PyResult<Job> {
        let (tensor, part, view) = self.part(name, index)?;
        let tensor = tensor.clone();
        Ok(Job::start(LoadRequest {
            model: self.inner.clone(),
            device: DeviceSpec::parse(device)?,
            wanted: LoadScope::Part { tensor, part, view },
            origin: LoadOrigin::Files(engine::Options::default()),
            memory: TensorMemory::Own,
            verify: false,
            manifest: None,
            measure_limit: false,
            group: None,
        })?)
    }
}

fn add<'py>(all: &Bound<'py, PyDict>, key: &str, value: impl IntoPyObject<'py>) -> PyResult<()> {
    if all.contains(key)? { Ok(()) } else { all.set_item(key, value) }
}

/// A value in Python: a number, a bool, a str, or a list of these.
fn python<'py>(py: Python<'py>, value: &gguf::Value) -> PyResult<Bound<'py, PyAny>> {
    macro_rules! one {
        ($($kind:ident)*) => {
            match value {
                $(gguf::Value::$kind(one) => one.into_bound_py_any(py),)*
                gguf::Value::Text(one) => text(py, one),
                gguf::Value::Array(many) => list(py, many),
            }
        };
    }
    one!(U8 I8 U16 I16 U32 I32 F32 Bool U64 I64 F64)
}

/// A text; where it is not UTF-8, its bytes.
fn text<'py>(py: Python<'py>, text: &gguf::Text) -> PyResult<Bound<'py, PyAny>> {
    match text.text() {
        Some(text) => text.into_bound_py_any(py),
        None => Ok(PyBytes::new(py, text.bytes()).into_any()),
    }
}

fn list<'py>(py: Python<'py>, values: &gguf::Array) -> PyResult<Bound<'py, PyAny>> {
    macro_rules! many {
        ($($kind:ident)*) => {
            match values {
                // Bytes also become a list of numbers.
                $(gguf::Array::$kind(many) => Ok(PyList::new(py, many.iter().copied())?.into_any()),)*
                gguf::Array::Text(texts) => {
                    let texts = texts.iter().map(|one| text(py, one)).collect::<PyResult<Vec<_>>>()?;
                    texts.into_bound_py_any(py)
                }
                gguf::Array::Array(arrays) => {
                    let arrays = arrays.iter().map(|array| list(py, array)).collect::<PyResult<Vec<_>>>()?;
                    arrays.into_bound_py_any(py)
                }
            }
        };
    }
    many!(U8 I8 U16 I16 U32 I32 F32 Bool U64 I64 F64)
}

fn parse_route(text: &str) -> Result<engine::Route> {
    let why = match text {
        "auto" => return Ok(engine::Route::Auto),
        "cpu/cached" => return Ok(engine::Route::Cached),
        "cpu/pinned" => return Ok(engine::Route::Pinned),
        "cufile" => return Ok(engine::Route::CuFile),
        "gpu/tier3" | "gpu/posted" | "gpu/tier2" | "gpu/tier1" | "cpu/direct" => {
            "only the kernel reads files of a mounted file system; it needs a drive that onehop drives itself"
        }
        _ => {
            return Err(Error::Request(format!(
                "unknown route '{}': expected auto, cpu/cached, cpu/pinned or cufile",
                text.escape_debug()
            )));
        }
    };
    Err(Error::Route { route: text.into(), why })
}

/// Elements of one dimension.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dim {
    pub first: u64,
    pub step: u64,
    pub count: u64,
    /// Whether the result lacks it, after an integer index.
    pub single: bool,
}

impl Dim {
    /// The end of the range that it spans.
    pub(crate) fn end(&self) -> u64 {
        if self.count == 0 { self.first } else { self.first + (self.count - 1) * self.step + 1 }
    }
}

/// The dimensions that an index selects, as in NumPy.
fn view(index: &Bound<'_, PyAny>, shape: &[u64]) -> PyResult<PartView> {
    let items: Vec<_> = match index.cast::<PyTuple>() {
        Ok(items) => items.iter().collect(),
        Err(_) => vec![index.clone()],
    };
    let is_rest = |item: &Bound<'_, PyAny>| item.is_instance_of::<PyEllipsis>();
    let rest = items.iter().position(is_rest);
    let given = items.len() - usize::from(rest.is_some());
    if given > shape.len() {
        let text = format!("{given} indices for {} dimensions", shape.len());
        return Err(PyIndexError::new_err(text));
    }
    let mut dims = Vec::with_capacity(shape.len());
    for (i, item) in items.iter().enumerate() {
        if Some(i) == rest {
            let all = shape.iter().skip(dims.len()).take(shape.len() - given);
            dims.extend(all.map(|size| Dim { first: 0, step: 1, count: *size, single: false }));
        } else if let Some(size) = shape.get(dims.len()) {
            dims.push(dim(item, *size)?);
        }
    }
    let all = shape.iter().skip(dims.len());
    dims.extend(all.map(|size| Dim { first: 0, step: 1, count: *size, single: false }));
    Ok(PartView { dims })
}

fn dim(item: &Bound<'_, PyAny>, size: u64) -> PyResult<Dim> {
    if let Ok(slice) = item.cast::<PySlice>() {
        let indices = slice.indices(size.try_into().unwrap_or(isize::MAX))?;
        if indices.step < 1 {
            return Err(Error::Request("the step of a slice must be at least 1".into()).into());
        }
        let (first, step) = (indices.start as u64, indices.step as u64);
        return Ok(Dim { first, step, count: indices.slicelength as u64, single: false });
    }
    let out_of_range =
        |number: &str| PyIndexError::new_err(format!("index {number} of a dimension of {size}"));
    let number: i64 = match item.extract() {
        Ok(number) if !item.is_instance_of::<PyBool>() => number,
        Err(error) if error.is_instance_of::<PyOverflowError>(item.py()) => {
            return Err(out_of_range(&item.to_string()));
        }
        _ => return Err(PyTypeError::new_err("an index must consist of integers, slices and ...")),
    };
    let first = if number < 0 { size.checked_sub(number.unsigned_abs()) } else { Some(number as u64) };
    match first.filter(|first| *first < size) {
        Some(first) => Ok(Dim { first, step: 1, count: 1, single: true }),
        None => Err(out_of_range(&number.to_string())),
    }
}
