"""Tables larger than the GPU's memory: rows of a file or a drive, gathered by their numbers."""

from __future__ import annotations

import array
import json
import operator
import os
import threading
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import errors
from ._frameworks import _TORCH_OWN, converter
from ._native import Model as _Model
from ._native import Table as _Rows
from ._native import Tensor, WhyNot

if TYPE_CHECKING:
    _TensorFuture = Future[Any]
else:
    _TensorFuture = Future

#: Background gathers of one table that may run at once.
_WORKERS = 2

#: GPU memory of a drive's cache.
_CACHE_BYTES = 256 << 20

#: Dimensions of a row: with those of the list, within NumPy's limit.
_MOST_DIMENSIONS = 16

#: Type names of torch and NumPy, and those of model files.
_NAMES = {name: dtype for dtype, name in _TORCH_OWN.items()} | {
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def _dtype(dtype: Any) -> str:
    """A type's name in model files. Takes "BF16", torch.bfloat16, numpy.float16 or "float16"."""
    if isinstance(dtype, type):
        dtype = dtype.__name__
    name = str(dtype).rsplit(".", 1)[-1]
    return _NAMES.get(name, name)


def _numbers(ids: Any) -> Tuple[bytes, Tuple[int, ...]]:
    """Row numbers as eight bytes each, and their shape."""
    if isinstance(ids, (bytes, bytearray, memoryview, str, set, frozenset, dict)):
        raise errors.RequestError(f"row numbers are a list, an array or a tensor of integers, not {type(ids).__name__}")
    if hasattr(ids, "detach"):
        # torch's.
        ids = ids.detach().cpu().numpy()
    elif hasattr(ids, "__cuda_array_interface__"):
        # CuPy's.
        ids = ids.get()
    if not hasattr(ids, "__array__"):
        try:
            listed = array.array("q", list(ids))
            return listed.tobytes(), (len(listed),)
        except (TypeError, OverflowError) as error:
            why = f"row numbers must be a flat list of 64-bit integers, or an array or tensor of any shape: {error}"
            raise errors.RequestError(why) from None
    import numpy

    numbers = numpy.asarray(ids)
    if numbers.dtype.kind not in "iu":
        raise errors.RequestError(f"row numbers must be integers, not {numbers.dtype}")
    if numbers.dtype == numpy.uint64 and numbers.size and int(numbers.max()) >= 1 << 63:
        raise errors.RowError(f"row {int(numbers.max())} does not exist in any table")
    return numbers.astype(numpy.int64, copy=False).tobytes(), numbers.shape


def _on_drive(
    drive: Optional[str],
    path: Any,
    partition: Union[int, str, None],
    extent_map: Any,
    nsid: Optional[int],
    cache_bytes: Optional[int],
    route: str,
) -> Optional[_Drive]:
    """The place on a drive, if there is one."""
    if drive is None:
        if not (partition is None and extent_map is None and nsid is None and cache_bytes is None and route == "auto"):
            raise errors.RequestError("partition, extent_map, nsid, cache_bytes and route are for drive=")
        return None
    if partition is not None and (path is None or extent_map is not None):
        raise errors.RequestError("partition= is for a path in the drive's own file system")
    for argument, value in (("drive", drive), ("route", route)):
        if not isinstance(value, str):
            raise errors.RequestError(f"{argument}={value!r}: give a string")
    return _Drive(
        drive,
        None if path is None else os.fsdecode(path),
        None if extent_map is None else os.fsdecode(extent_map),
        None if partition is None else str(partition),
        1 if nsid is None else _whole("nsid", nsid, 1, 2**32 - 1),
        _CACHE_BYTES if cache_bytes is None else _whole("cache_bytes", cache_bytes, 4096),
        route,
    )


def _whole(argument: str, value: Any, least: int = 0, most: int = 2**63 - 1) -> int:
    """An argument that is an integer, of any of its types."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise errors.RequestError(f"{argument}={value!r}: give an integer from {least} to {most}")
    return number


class Ticket:
    """Rows that are being gathered: `result()` waits for them."""

    def __init__(self, table: Table, future: _TensorFuture) -> None:
        self._table = weakref.ref(table)
        self._future = future
        self._process = os.getpid()

    def done(self) -> bool:
        """Whether `result()` returns at once."""
        return self._future.done()

    def result(self, timeout: Optional[float] = None) -> Any:
        """The rows, as `Table.gather` returns them. Raises TimeoutError if they take longer than `timeout` seconds."""
        if os.getpid() != self._process and not self._future.done():
            raise errors.RequestError("these rows were requested before a fork, and go to the parent")
        if timeout is not None and timeout > threading.TIMEOUT_MAX:
            timeout = None
        if not wait([self._future], timeout).done:
            raise TimeoutError(f"the rows have not arrived after {timeout} s")
        return self._future.result()


class CacheCounts(NamedTuple):
    """What a table's cache did since it was opened. The counts wrap at 2**32."""

    wanted: int
    """Lookups: one for each page of each row of a list."""
    hits: int
    """Those whose page was in the cache."""
    reads: int
    """Pages read from the drive, one command each."""
    failed_reads: int
    """Reads that failed."""


class _Drive(NamedTuple):
    """A drive, where the table is on it, and how its rows come from there."""

    name: str
    path: Optional[str]
    extent_map: Optional[str]
    partition: Optional[str]
    nsid: int
    cache_bytes: int
    route: str

    def open(
        self,
        rows: Union[str, Tuple[str, Sequence[int], Optional[int], int, Optional[int]]],
        device: Optional[str],
    ) -> _Rows:
        """Opens a tensor's rows, or others."""
        return _Rows.on_drive(self[:5], rows, device=device, cache_bytes=self.cache_bytes, route=self.route)


def _device_name(device: Any) -> Optional[str]:
    from . import _device

    return _device(device)


class Table:
    """Rows of equal size in a file, gathered into GPU memory by their numbers.

    The file is mapped, so rows come from the page cache; missing ones are read from the disk, page by page.
    Threads copy them into pinned memory, from which the copy engine moves them. Nothing is cached on the GPU.

    With `drive=`, GPU threads read the rows from a drive that onehop drives itself, through a cache in GPU memory.

    path, dtype, row: the file, the type of its elements and the shape of a row: Table("t.bin", "F16", (128,)).
    rows: how many there are; by default as many as the file has.
    offset, stride: where the first row begins, and the bytes from the start of a row to that of the next.
    device: "cuda:0", 0, a PCI address, "cpu", or None: GPU 0 where CUDA works, else the CPU's memory.
    framework: the type of returned rows: "torch", "numpy", "cupy", "jax", or None for onehop.Tensor.
    drive: "0000:0b:00.0", "sim:IMAGE" or another drive as for `load`. `path` is then a path in the drive's own file
        system, or one of the files of `extent_map`; with None, the table is in the only file of `extent_map`, or without
        that begins `offset` bytes after the drive's first. partition, extent_map, nsid: as for `load`.
    cache_bytes: GPU memory for pages of the drive (256 MiB). route: "auto", "gpu/tier3", "gpu/posted", "gpu/tier2" or
        "gpu/tier1".
    """

    def __init__(
        self,
        path: Union[str, "os.PathLike[str]", None],
        dtype: Any,
        row: Union[int, Sequence[int]],
        *,
        rows: Optional[int] = None,
        offset: int = 0,
        stride: Optional[int] = None,
        device: Any = None,
        framework: Optional[str] = None,
        drive: Optional[str] = None,
        partition: Union[int, str, None] = None,
        extent_map: Union[str, "os.PathLike[str]", None] = None,
        nsid: Optional[int] = None,
        cache_bytes: Optional[int] = None,
        route: str = "auto",
    ) -> None:
        row = [_whole("row", dim) for dim in (row if hasattr(row, "__iter__") else (row,))]
        if len(row) > _MOST_DIMENSIONS:
            raise errors.RequestError(f"a row has {len(row)} dimensions, {_MOST_DIMENSIONS} at most")
        offset = _whole("offset", offset)
        rows = None if rows is None else _whole("rows", rows)
        stride = None if stride is None else _whole("stride", stride)
        converter(framework)
        on = _on_drive(drive, path, partition, extent_map, nsid, cache_bytes, route)
        device, dtype = _device_name(device), _dtype(dtype)
        if on is not None:
            native = on.open((dtype, row, rows, offset, stride), device)
        elif path is None:
            raise TypeError("None is not a path: a table needs a file, or drive=")
        else:
            native = _Rows(os.fsdecode(path), dtype, row, rows=rows, offset=offset, stride=stride, device=device)
        self._take(native, framework)

    def _take(self, native: _Rows, framework: Optional[str]) -> None:
        self._rows = native
        self._convert = converter(framework)
        self._framework = framework
        for warning in native.warnings:
            warnings.warn(warning, RuntimeWarning, stacklevel=3)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._workers: Optional[ThreadPoolExecutor] = None

    @classmethod
    def from_safetensors(
        cls,
        path: Union[str, "os.PathLike[str]", None],
        name: str,
        *,
        device: Any = None,
        framework: Optional[str] = None,
        drive: Optional[str] = None,
        partition: Union[int, str, None] = None,
        extent_map: Union[str, "os.PathLike[str]", None] = None,
        nsid: Optional[int] = None,
        cache_bytes: Optional[int] = None,
        route: str = "auto",
    ) -> Table:
        """A tensor of a safetensors file: its first dimension counts the rows. On a drive it may be one of a GGUF file."""
        if not isinstance(name, str):
            raise errors.RequestError(f"name={name!r}: give the tensor's name")
        on = _on_drive(drive, path, partition, extent_map, nsid, cache_bytes, route)
        if on is not None:
            if path is None and extent_map is None:
                raise errors.RequestError("a tensor needs its file: a path on the drive, or extent_map=")
            # Before the drive is opened.
            converter(framework)
            self = cls.__new__(cls)
            self._take(on.open(name, _device_name(device)), framework)
            return self
        if path is None:
            raise TypeError("None is not a path: a table needs a file, or drive=")
        path = os.fsdecode(path)
        # Refuses files that are not sound.
        _Model([path])
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            tensor = json.loads(file.read(length)).get(name)
        if tensor is None or name == "__metadata__":
            raise errors.UnknownTensorError(f"the file has no tensor {name!r}")
        if not tensor["shape"]:
            raise errors.RequestError(f"the tensor {name!r} has no rows: its shape is ()")
        rows, *row = tensor["shape"]
        at = 8 + length + tensor["data_offsets"][0]
        return cls(path, tensor["dtype"], row, rows=rows, offset=at, device=device, framework=framework)

    def gather(self, ids: Any, out: Any = None) -> Any:
        """The rows with these numbers, in their order.

        ids: integers: a list, or an array or tensor of any shape, which the result has too, followed by that of a row. With
            framework=None the result has one dimension for all of them.
        out: a torch tensor on the table's GPU, contiguous and of the result's type and size. It is written after the
            work that its current stream already has, and returned. Without it, new memory is allocated.
        """
        numbers, shape = _numbers(ids)
        return self._gather(numbers, shape, out, self._ready(out))

    def prefetch(self, ids: Any, out: Any = None) -> Ticket:
        """The same in the background: `wait`, or the ticket's `result()`, returns the rows."""
        if os.getpid() != self._process:
            # The threads are the parent's, and another thread may have held the lock at the fork.
            raise errors.RequestError("this table was opened before a fork: open it again in the child")
        numbers, shape = _numbers(ids)
        ready = self._ready(out)
        with self._lock:
            if self._workers is None:
                self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="onehop table")
            return Ticket(self, self._workers.submit(self._gather, numbers, shape, out, ready))

    def wait(self, ticket: Ticket, timeout: Optional[float] = None) -> Any:
        """The rows of a ticket of this table."""
        if not isinstance(ticket, Ticket) or ticket._table() is not self:
            raise errors.RequestError("wait takes a ticket that prefetch of this table returned")
        return ticket.result(timeout)

    def _ready(self, out: Any) -> Any:
        """An event that `out` has to wait for."""
        if out is None:
            return None
        if not getattr(out, "is_cuda", False):
            raise errors.RequestError("out must be a torch tensor in GPU memory")
        import torch

        if f"cuda:{out.device.index}" != self.device or not out.is_contiguous():
            raise errors.RequestError(f"out must be contiguous and on {self.device}")
        if self._rows.route[0] != "cpu/cached" and out.data_ptr() % 4:
            raise errors.RequestError("out must begin at a multiple of 4 bytes")
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(out.device))
        return event

    def _gather(self, numbers: bytes, shape: Tuple[int, ...], out: Any, ready: Any) -> Any:
        if out is None:
            tensor = self._rows.gather(numbers)
            return self._shaped(tensor, shape)
        size, wanted = out.numel() * out.element_size(), len(numbers) // 8 * self._rows.row_bytes
        if size != wanted or _dtype(out.dtype) != self.dtype:
            raise errors.RequestError(
                f"out has {size} bytes of {out.dtype}, the rows have {wanted} of {self.dtype}"
            )
        ready.synchronize()
        if wanted:
            self._rows.gather(numbers, (out.data_ptr(), size, out))
        return out

    def _shaped(self, tensor: Tensor, shape: Tuple[int, ...]) -> Any:
        taken = self._convert(tensor)
        if len(shape) == 1 or self._framework is None:
            return taken
        return taken.reshape((*shape, *self._rows.row_shape))

    def close(self) -> None:
        """Closes the drive once no gather uses it; it happens by itself when nothing refers to the table any more."""
        self._rows.close()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self._rows.rows

    @property
    def shape(self) -> Tuple[int, ...]:
        """Rows, and the shape of a row."""
        return (self._rows.rows, *self._rows.row_shape)

    @property
    def dtype(self) -> str:
        """The type of its elements, as model files name it."""
        return self._rows.dtype

    @property
    def device(self) -> str:
        """The device that rows are gathered to."""
        return self._rows.device

    @property
    def route(self) -> str:
        """The route of rows: "cpu/cached" for a file; on a drive, one of those on which GPU threads command it."""
        return self._rows.route[0]

    @property
    def why_not_better(self) -> List[WhyNot]:
        """Better routes of the drive, and why they were not possible."""
        return self._rows.route[1]

    @property
    def cache(self) -> Optional[CacheCounts]:
        """What the cache did so far; None for a file, which has none."""
        counts = self._rows.cache()
        return None if counts is None else CacheCounts(*counts)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._rows.rows * self._rows.row_bytes

    def __repr__(self) -> str:
        return f"Table(shape={self.shape}, dtype={self.dtype!r}, device={self.device!r})"
