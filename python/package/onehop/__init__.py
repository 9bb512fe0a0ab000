"""Loads model weights from files into GPU memory, and reports the route they took.

    tensors = onehop.load_file("model.safetensors", device="cuda:0")

Tensors support DLPack: torch.from_dlpack, cupy.from_dlpack, jax.dlpack.from_dlpack and numpy.from_dlpack import them
without a copy. onehop.torch and onehop.numpy have load_file with the signatures and the results of safetensors.
"""

from __future__ import annotations

import operator
import os
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Literal, Mapping, Optional, Sequence, Tuple, TypedDict, Union

from . import _group
from . import errors as errors
from ._frameworks import TORCH_NAMES as _TORCH_NAMES
from ._frameworks import converter as _converter
from ._group import Group as Group
from ._native import GroupOutcome as GroupOutcome
from ._native import Job as _Job
from ._native import Limit as Limit
from ._native import Model as _Model
from ._native import Outcome as Outcome
from ._native import Tensor as Tensor
from ._native import WhyNot as WhyNot
from ._native import __version__ as __version__
from ._pages import Pages as Pages
from ._stream import Stream as Stream
from ._stream import TorchMemory as _TorchMemory
from ._stream import arena as _arena
from ._stream import copy_into as _copy_into
from ._stream import warn_of_cpu as _warn_of_cpu
from ._table import Table as Table
from ._table import Ticket as Ticket
from .errors import OnehopError as OnehopError

if TYPE_CHECKING:
    # Python has it from 3.11 on, type checkers always.
    from typing_extensions import Unpack

__all__ = [
    "Group",
    "GroupOutcome",
    "Limit",
    "LoadOptions",
    "Loaded",
    "Model",
    "OnehopError",
    "Outcome",
    "Pages",
    "Stream",
    "StreamOptions",
    "Table",
    "Tensor",
    "Ticket",
    "WhyNot",
    "errors",
    "load",
    "load_file",
    "patch",
    "safe_open",
    "stream",
]

#: A file, a directory, an index, or several that form a model.
Paths = Union[str, bytes, "os.PathLike[str]", Sequence[Union[str, bytes, "os.PathLike[str]"]]]
#: "cuda:0", 0, a torch.device, a PCI address, "cpu", or None: GPU 0 where CUDA works, else the CPU's memory.
Device = Union[str, int, None, Any]
Patterns = Union[str, Sequence[str], None]
#: The type of tensors.
Framework = Literal["torch", "pt", "numpy", "np", "cupy", "jax", "flax"]
#: Routes for files, and for drives.
FileRoute = Literal["auto", "cpu/cached", "cpu/pinned", "cufile"]
Route = Literal[
    "auto", "cpu/cached", "cpu/pinned", "cufile", "gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct"
]
#: Who allocates GPU memory.
Allocator = Literal["onehop", "torch"]

#: The minimum time between calls of `progress`, in seconds.
_PROGRESS_INTERVAL = 0.1

#: Default for `max_bytes` of a load into tensors.
_INTO_BYTES = 1 << 30


class StreamOptions(TypedDict, total=False):
    """The options of `stream`, which are documented at `load`."""

    names: Patterns
    without: Patterns
    dtypes: Patterns
    rank: Optional[Tuple[int, int]]
    cuts: Optional[Mapping[str, int]]
    group: Any
    route: Route
    threads: Optional[int]
    verify: bool
    manifest: Union[str, "os.PathLike[str]", None]
    measure_limit: bool
    max_bytes: Optional[int]


class LoadOptions(StreamOptions, total=False):
    """The options of `load`."""

    allocator: Allocator
    into: Optional[Mapping[str, Any]]

    drive: Optional[str]
    partition: Union[int, str, None]
    extent_map: Union[str, "os.PathLike[str]", None]
    nsid: Optional[int]
    progress: Optional[Callable[[int, int], object]]


@dataclass(frozen=True)
class Loaded:
    """The result of a load."""

    tensors: Dict[str, Any]
    outcome: Outcome
    metadata: Dict[str, Any]


def load(
    path: Optional[Paths],
    device: Device = None,
    *,
    framework: Optional[Framework] = None,
    drive: Optional[str] = None,
    partition: Union[int, str, None] = None,
    extent_map: Union[str, "os.PathLike[str]", None] = None,
    nsid: Optional[int] = None,
    names: Patterns = None,
    without: Patterns = None,
    dtypes: Patterns = None,
    rank: Optional[Tuple[int, int]] = None,
    cuts: Optional[Mapping[str, int]] = None,
    group: Any = None,
    route: Route = "auto",
    threads: Optional[int] = None,
    verify: bool = False,
    manifest: Union[str, "os.PathLike[str]", None] = None,
    measure_limit: bool = False,
    allocator: Allocator = "onehop",
    into: Optional[Mapping[str, Any]] = None,
    max_bytes: Optional[int] = None,
    progress: Optional[Callable[[int, int], object]] = None,
) -> Loaded:
    """Loads the tensors of model files.

    path: a file (safetensors, GGUF), an index, a directory, or several that form a model.
    device: "cuda:0", 0, a torch.device, a PCI address, "cpu"; None is GPU 0 where CUDA works, else the CPU's memory,
        with a RuntimeWarning.
    framework: "torch", "numpy", "cupy" or "jax"; None returns onehop.Tensor, which all of them import by DLPack.
    names, without: patterns (`*`, `?`) of names to load, and to skip; one that matches nothing raises
        UnknownTensorError. dtypes: types to load, such as "BF16".
    rank, cuts: (i, n) is the i-th of n ranks (from 0), which gets its part of the tensors that match a pattern of
        `cuts`, cut along that dimension, and reads nothing else. All other tensors are loaded whole.
    group: an onehop.Group, or a torch process group: its processes on this machine load together, and what several of
        them need is read once and passed from GPU to GPU. outcome.group reports the details.
    route: "auto", "cpu/cached" (the page cache), "cpu/pinned" (past it) or "cufile" (NVIDIA's).
        A route that is not possible raises RouteError.
    drive: a drive that onehop drives itself, bypassing Linux: "0000:0b:00.0" (a PCI address), "nvme-tcp://HOST/NQN"
        (across the network), "vfio-user:SOCKET", "sim:IMAGE" (a simulated one) or "qtest:SOCKET,MEMORY-FILE".
        `path` is then a path in the drive's own file system (ext2/3/4, FAT, exFAT), and `route` one of "auto",
        "gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct" and "cpu/pinned". `outcome.route` is the
        route that was taken, `outcome.why_not_better` why better ones were not possible.
    partition: the drive's partition with the files, or "none" for the whole drive; None selects the only one with a
        known file system. extent_map: a file made by `onehop map`, used with `path` None. nsid: the drive's
        namespace (1).
    threads: how many read. verify: reads the files once more and compares every byte. manifest: a file of checksums
        that tensors in memory are compared with.
    measure_limit: measures the copy engine after the load, so that outcome.limit has its speed.
    allocator: "torch" allocates GPU memory with torch's caching allocator, and makes all tensors views of one; for
        framework="torch".
    into: torch tensors by name. Loaded tensors are cast to their types and copied into them, through `max_bytes` of
        memory (1 GiB) in place of an arena. Tensors that it does not name are not loaded.
    max_bytes: for `into`, and for `stream`.
    progress: called with the bytes that have arrived and their total, at most ten times a second.
    """
    with _group.declining(group):
        convert = _converter("torch" if into is not None else framework)
        if allocator not in ("onehop", "torch"):
            raise errors.RequestError(f"unknown allocator {allocator!r}: expected 'onehop' or 'torch'")
        if allocator == "torch" and (framework not in _TORCH_NAMES or into is not None or drive is not None):
            raise errors.RequestError("allocator='torch' is for framework='torch', without into= and drive=")
        if into is None and max_bytes is not None:
            raise errors.RequestError("max_bytes is for into= and for stream: load returns all tensors at once")
        if into is not None:
            if drive is not None:
                raise errors.RequestError("into= is for local files, not for drive=")
            if names is not None:
                raise errors.RequestError("into= already selects tensors by name: leave names out")
            names = list(into)
            max_bytes = _INTO_BYTES if max_bytes is None else max_bytes
        if drive is None:
            if not (partition is None and extent_map is None and nsid is None):
                raise errors.RequestError("partition, extent_map and nsid are for drive=")
            model = _open(path)
        else:
            if threads is not None or measure_limit or group is not None:
                raise errors.RequestError("threads, measure_limit and group are for local files, not for drive=")
            model = _open_on_drive(drive, path, partition, extent_map, nsid)
        tensors: Dict[str, Any] = {}
        reported = 0.0
        try:
            job = _job(
                model,
                device,
                names=names,
                without=without,
                dtypes=dtypes,
                rank=rank,
                cuts=cuts,
                group=group,
                route=route,
                threads=threads,
                verify=verify,
                manifest=manifest,
                measure_limit=measure_limit,
                max_bytes=max_bytes,
                arena=allocator == "torch",
            )
            if allocator == "torch":
                tensors = _arena(
                    job,
                    _TorchMemory(_device(device)),
                    lambda so_far: None if progress is None else progress(*so_far),
                    None if progress is None else _PROGRESS_INTERVAL,
                )
            with Stream(job, convert, None if into is None else _TorchMemory(_device(device))) as arriving:
                if into is not None:
                    tensors = dict(into)
                    _copy_into(arriving, tensors)
                for name, tensor in arriving:
                    tensors[name] = tensor
                    if progress is not None and time.monotonic() - reported >= _PROGRESS_INTERVAL:
                        reported = time.monotonic()
                        progress(*arriving.progress)
                outcome = arriving.outcome
        finally:
            # The next load may open the drive, even if the model is still in use.
            model.close_drive()
        assert outcome is not None
        if device is None:
            _warn_of_cpu(outcome)
        if progress is not None:
            progress(outcome.bytes, outcome.bytes)
        in_order = {name: tensors[name] for name in model.names() if name in tensors}
        return Loaded(in_order, outcome, model.metadata())


def load_file(
    path: Optional[Paths], device: Device = None, *, framework: Optional[Framework] = None, **options: Unpack[LoadOptions]
) -> Dict[str, Any]:
    """The tensors of model files, by name: what `load` returns, without its outcome. Takes the same options."""
    return load(path, device, framework=framework, **options).tensors


def stream(
    path: Paths,
    device: Device = None,
    *,
    framework: Optional[Framework] = None,
    names: Patterns = None,
    without: Patterns = None,
    dtypes: Patterns = None,
    rank: Optional[Tuple[int, int]] = None,
    cuts: Optional[Mapping[str, int]] = None,
    group: Any = None,
    route: Route = "auto",
    threads: Optional[int] = None,
    verify: bool = False,
    manifest: Union[str, "os.PathLike[str]", None] = None,
    measure_limit: bool = False,
    max_bytes: Optional[int] = None,
) -> Stream:
    """Hands tensors out as soon as their bytes have arrived, in any order.

    max_bytes: the memory that tensors are handed out in, which is reused as they are freed. Drop each tensor before you
        request more than a few others. A larger tensor takes more memory, and so do tensors that are kept:
        `Stream.grown` and outcome.warnings report this. On a GPU it needs framework="torch". torch allocates the
        memory, and kernels that read it must be on the stream that is current when you request the next tensor, or that
        stream must wait for them.

    The other options are those of `load`. Changed files, and differences that `verify` and `manifest` find, are known
    at the end: the iteration then raises the exception that `load` would raise.
    """
    with _group.declining(group):
        convert = _converter(framework)
        memory = _TorchMemory(_device(device)) if max_bytes is not None and framework in _TORCH_NAMES else None
        job = _job(
            _open(path),
            device,
            names=names,
            without=without,
            dtypes=dtypes,
            rank=rank,
            cuts=cuts,
            group=group,
            route=route,
            threads=threads,
            verify=verify,
            manifest=manifest,
            measure_limit=measure_limit,
            max_bytes=max_bytes,
        )
        return Stream(job, convert, memory, any_device=device is None)


def _plain(index: Any) -> Any:
    """An index of Python's own integers.

    If Python ends a thread with native code on its stack, as it does with daemon threads at exit, the process aborts.
    So the caller's code, such as an `__index__`, runs before.
    """
    if isinstance(index, tuple):
        return tuple(_plain(item) for item in index)
    if isinstance(index, slice):
        return slice(_plain(index.start), _plain(index.stop), _plain(index.step))
    if isinstance(index, bool):
        return index
    try:
        return operator.index(index)
    except TypeError:
        return index


class Slice:
    """A tensor of open files. An index loads the elements that it names, and reads little more."""

    def __init__(self, model: _Model, name: str, device: Optional[str], convert: Callable[[Tensor], Any]) -> None:
        self._model = model
        self._name = name
        self._device = device
        self._convert = convert
        self._dtype, self._shape = model.info(name)

    def get_shape(self) -> List[int]:
        """Its dimensions; for packed types, in bytes."""
        return self._shape

    def get_dtype(self) -> str:
        """The type of its elements, as in the file."""
        return self._dtype

    def __getitem__(self, index: Any) -> Any:
        index = _plain(index)
        if self._device == "cpu":
            little = self._model.read_part(self._name, index)
            if little is not None:
                return self._convert(little)
        return self._convert(_only(self._model.load_part(self._name, index, device=self._device)))


class safe_open:
    """Open model files: names, types and dimensions at once, and tensors on request.

    As `safetensors.safe_open`, with "cpu" as the default device. It takes the same paths as `load`: also directories,
    indexes and GGUF files. Each tensor is a load of its own; for many, `stream` or `load` is faster.
    """

    def __init__(
        self, filename: Paths, framework: Optional[Framework] = None, device: Device = "cpu"
    ) -> None:
        self._convert = _converter(framework)
        self._is_torch = framework in _TORCH_NAMES
        self._device = _device(device)
        self._opened: Optional[_Model] = _open(filename)

    @property
    def _model(self) -> _Model:
        if self._opened is None:
            raise errors.RequestError("the files are closed: their `with` block has ended")
        return self._opened

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the use of this handle. Its slices and streams stay valid, and the last of them closes the files."""
        self._opened = None

    def keys(self) -> List[str]:
        """The names of all tensors, in order."""
        return sorted(self._model.names())

    def offset_keys(self) -> List[str]:
        """The names of all tensors, in the order of their bytes."""
        return self._model.names()

    def metadata(self) -> Optional[Dict[str, Any]]:
        """The metadata of the files, or None if there is none."""
        return self._model.metadata() or None

    def get_tensor(self, name: str) -> Any:
        """Loads a tensor."""
        return self.get_slice(name)[...]

    def get_tensors(self) -> Dict[str, Any]:
        """Loads all of them."""
        with self.stream() as arriving:
            tensors = dict(arriving)
        return {name: tensors[name] for name in self._model.names()}

    def get_slice(self, name: str) -> Slice:
        """A tensor of which parts can be loaded: `f.get_slice(name)[:, 128:256]`."""
        return Slice(self._model, name, self._device, self._convert)

    def stream(self, **options: Unpack[StreamOptions]) -> Stream:
        """Loads many of them, and hands each out as it arrives. Takes the options of `stream`."""
        bounded = self._is_torch and options.get("max_bytes") is not None
        memory = _TorchMemory(self._device) if bounded else None
        return Stream(_job(self._model, self._device, **options), self._convert, memory)


def _paths(path: Any) -> List[str]:
    if isinstance(path, (str, bytes, os.PathLike)):
        return [os.fsdecode(path)]
    if path is None or hasattr(path, "read") or not isinstance(path, Iterable):
        raise TypeError(f"{path!r} is not a path: give a file name, or a list of names")
    paths = [os.fsdecode(one) for one in path]
    if not paths:
        raise errors.RequestError("no file was named: the list of paths is empty")
    return paths


def _open(path: Any) -> _Model:
    return _Model(_paths(path))


def _open_on_drive(
    drive: str,
    path: Optional[Paths],
    partition: Union[int, str, None],
    extent_map: Union[str, "os.PathLike[str]", None],
    nsid: Optional[int],
) -> _Model:
    if (path is None) == (extent_map is None):
        raise errors.RequestError("drive= needs a path in its file system, or extent_map= with None as the path")
    if extent_map is not None and partition is not None:
        raise errors.RequestError("partition= cannot be used with extent_map=")
    if nsid is not None and not 1 <= nsid < 2**32:
        raise errors.RequestError(f"nsid={nsid}: namespaces count from 1")
    model = _Model.on_drive(
        drive,
        paths=[] if path is None else _paths(path),
        extent_map=None if extent_map is None else os.fsdecode(extent_map),
        partition=None if partition is None else str(partition),
        nsid=1 if nsid is None else nsid,
    )
    for warning in model.warnings:
        warnings.warn(warning, RuntimeWarning, stacklevel=3)
    return model


def _device(device: Device) -> Optional[str]:
    if device is None or isinstance(device, str):
        return device
    if isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{device}"
    return str(device)


#: The limit for `threads`.
_MOST_THREADS = 256


def _list(patterns: Patterns) -> List[str]:
    if patterns is None:
        return []
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _some(what: str, patterns: Patterns) -> List[str]:
    some = _list(patterns)
    if patterns is not None and not some:
        raise errors.RequestError(f"{what} is empty, which selects nothing; leave it out to load everything")
    return some


def _job(
    model: _Model,
    device: Device,
    *,
    names: Patterns = None,
    without: Patterns = None,
    dtypes: Patterns = None,
    rank: Optional[Tuple[int, int]] = None,
    cuts: Optional[Mapping[str, int]] = None,
    group: Any = None,
    route: Route = "auto",
    threads: Optional[int] = None,
    verify: bool = False,
    manifest: Union[str, "os.PathLike[str]", None] = None,
    measure_limit: bool = False,
    max_bytes: Optional[int] = None,
    arena: bool = False,
) -> _Job:
    if (rank is None) != (cuts is None):
        raise errors.RequestError("rank= and cuts= belong together: give both or neither")
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise errors.RequestError(f"threads={threads}: expected 1 to {_MOST_THREADS}")
    if max_bytes is not None and max_bytes < 1:
        raise errors.RequestError(f"max_bytes={max_bytes}: expected at least 1")
    if max_bytes is not None and (verify or manifest is not None):
        raise errors.RequestError("verify and manifest compare tensors in memory, which max_bytes reuses")
    if group is not None and max_bytes is not None:
        raise errors.RequestError("group= passes on tensors in memory, which max_bytes reuses")
    if min([*(rank or ()), *(cuts or {}).values()], default=0) < 0:
        raise errors.RequestError(f"rank={rank}, cuts={cuts}: ranks and dimensions count from 0")
    job = model.load(
        device=_device(device),
        only=_some("names", names),
        without=_list(without),
        dtypes=_some("dtypes", dtypes),
        rank=rank,
        cuts=list((cuts or {}).items()),
        group=_group.native(group),
        route=route,
        threads=threads,
        verify=verify,
        manifest=None if manifest is None else os.fsdecode(manifest),
        measure_limit=measure_limit,
        max_bytes=max_bytes,
        arena=arena,
    )
    _group.joined()
    return job


def _only(job: _Job) -> Tensor:
    """The only tensor of a load. Waits for the end, which reports whether the file changed."""
    found = None
    while (step := job.next()) is not None:
        found = step
    assert isinstance(found, Tensor)
    return found


# These import names from above.
from ._model import Model as Model  # noqa: E402
from ._patch import patch as patch  # noqa: E402
