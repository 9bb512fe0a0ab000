"""Model weights from files into GPU memory, and an honest account of the way they went.

    tensors = onehop.load_file("model.safetensors", device="cuda:0")

Tensors have DLPack: torch.from_dlpack, cupy.from_dlpack, jax.dlpack.from_dlpack and numpy.from_dlpack take them over
without a copy. onehop.torch and onehop.numpy have load_file with the signatures and the results of safetensors.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, TypedDict, Union

from . import errors as errors
from ._frameworks import converter as _converter
from ._native import Job as _Job
from ._native import Limit as Limit
from ._native import Model as _Model
from ._native import Outcome as Outcome
from ._native import Tensor as Tensor
from ._native import WhyNot as WhyNot
from ._native import __version__ as __version__
from .errors import OnehopError as OnehopError

if TYPE_CHECKING:
    # Python has it from 3.11 on, type checkers always.
    from typing_extensions import Unpack

__all__ = [
    "Limit",
    "LoadOptions",
    "Loaded",
    "OnehopError",
    "Outcome",
    "Stream",
    "StreamOptions",
    "Tensor",
    "WhyNot",
    "errors",
    "load",
    "load_file",
    "safe_open",
    "stream",
]

#: A file, a directory, an index, or several that are one model.
Paths = Union[str, bytes, "os.PathLike[str]", Sequence[Union[str, bytes, "os.PathLike[str]"]]]
#: "cuda:0", 0, a torch.device, a PCI address, "cpu", or None: GPU 0 where CUDA works, else the CPU's memory.
Device = Union[str, int, None, Any]
Patterns = Union[str, Sequence[str], None]

#: How often whoever watches a load is told how far it is, in seconds.
_TELL = 0.1


class StreamOptions(TypedDict, total=False):
    """What to load and how, the options of `stream`: `load` says what each is."""

    names: Patterns
    without: Patterns
    dtypes: Patterns
    rank: Optional[Tuple[int, int]]
    cuts: Optional[Mapping[str, int]]
    route: str
    threads: Optional[int]
    verify: bool
    manifest: Union[str, "os.PathLike[str]", None]
    measure_limit: bool


class LoadOptions(StreamOptions, total=False):
    """The options of `load`."""

    drive: Optional[str]
    partition: Union[int, str, None]
    extent_map: Union[str, "os.PathLike[str]", None]
    nsid: Optional[int]
    progress: Optional[Callable[[int, int], object]]


@dataclass(frozen=True)
class Loaded:
    """What was loaded, and how that went."""

    tensors: Dict[str, Any]
    outcome: Outcome
    metadata: Dict[str, Any]


class Stream:
    """Tensors as they arrive: an iterator of names and tensors. Leaving it, or a `with` around it, ends the load."""

    def __init__(self, job: _Job, convert: Callable[[Tensor], Any]) -> None:
        self._job = job
        self._convert = convert

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Tuple[str, Any]:
        tensor = self._job.next()
        if tensor is None:
            raise StopIteration
        return tensor.name, self._convert(tensor)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the load, if it goes on. What was handed out stays; to ask for more is a CancelledError."""
        self._job.cancel()

    @property
    def outcome(self) -> Optional[Outcome]:
        """How it went; None before its end."""
        return self._job.outcome

    @property
    def progress(self) -> Tuple[int, int]:
        """Bytes that have arrived, and all that are to come."""
        return self._job.progress


def load(
    path: Optional[Paths],
    device: Device = None,
    *,
    framework: Optional[str] = None,
    drive: Optional[str] = None,
    partition: Union[int, str, None] = None,
    extent_map: Union[str, "os.PathLike[str]", None] = None,
    nsid: Optional[int] = None,
    names: Patterns = None,
    without: Patterns = None,
    dtypes: Patterns = None,
    rank: Optional[Tuple[int, int]] = None,
    cuts: Optional[Mapping[str, int]] = None,
    route: str = "auto",
    threads: Optional[int] = None,
    verify: bool = False,
    manifest: Union[str, "os.PathLike[str]", None] = None,
    measure_limit: bool = False,
    progress: Optional[Callable[[int, int], object]] = None,
) -> Loaded:
    """Loads model files: tensors, and how it went.

    path: a file (safetensors, GGUF), an index, a directory, or several that are one model.
    device: "cuda:0", 0, a torch.device, a PCI address, "cpu"; None is GPU 0 where CUDA works, else the CPU's memory.
    framework: "torch", "numpy", "cupy" or "jax"; None gives onehop.Tensor, which any of them takes over by DLPack.
    names, without: patterns (`*`, `?`) of names to load, and not to; one that matches no tensor is an
        UnknownTensorError. dtypes: types to load, such as "BF16".
    rank, cuts: (i, n) is the i-th of n ranks (from 0), which gets its part of the tensors that match a pattern of
        `cuts`, cut along the dimension there; it reads nothing else. All other tensors are loaded whole.
    route: "auto", "cpu/cached" (the page cache), "cpu/pinned" (past it) or "cufile" (NVIDIA's).
        What is asked for is done, or RouteError says why not.
    drive: a drive that onehop drives by itself, past Linux: "0000:0b:00.0" (a PCI address), "vfio-user:SOCKET", "sim:IMAGE"
        (a simulated one) or "qtest:SOCKET,MEMORY-FILE". `path` is then a path in the drive's own file system (ext2/3/4, FAT,
        exFAT), and `route` one of "auto", "gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct" and "cpu/pinned".
        `outcome.route` is the route that was taken, `outcome.why_not_better` what kept the better ones from it.
    partition: the drive's partition that has the files, or "none" for the whole drive; None is the only one with a known
        file system. extent_map: a file made by `onehop map`, in place of a path, which is None then. nsid: the
        drive's namespace (1).
    threads: how many read. verify: reads the files once more and compares every byte. manifest: a file of check sums to
        hold the tensors in memory against.
    measure_limit: measures the copy engine after the load, so that outcome.limit has its speed.
    progress: called with the bytes that have arrived and all that are to come, ten times a second at most.
    """
    convert = _converter(framework)
    if drive is None:
        if not (partition is None and extent_map is None and nsid is None):
            raise errors.RequestError("partition, extent_map and nsid are for drive=")
        model = _open(path)  # type: ignore[arg-type]
    else:
        if threads is not None or measure_limit:
            raise errors.RequestError("threads and measure_limit are for files of this machine, not for drive=")
        model = _open_on_drive(drive, path, partition, extent_map, nsid)
    tensors: Dict[str, Any] = {}
    told = 0.0
    try:
        job = _job(
            model,
            device,
            names=names,
            without=without,
            dtypes=dtypes,
            rank=rank,
            cuts=cuts,
            route=route,
            threads=threads,
            verify=verify,
            manifest=manifest,
            measure_limit=measure_limit,
        )
        with Stream(job, convert) as arriving:
            for name, tensor in arriving:
                tensors[name] = tensor
                if progress is not None and time.monotonic() - told >= _TELL:
                    told = time.monotonic()
                    progress(*arriving.progress)
            outcome = arriving.outcome
    finally:
        # Whatever still refers to the model, the next load may open the drive.
        model.close_drive()
    assert outcome is not None
    if progress is not None:
        progress(outcome.bytes, outcome.bytes)
    in_order = {name: tensors[name] for name in model.names() if name in tensors}
    return Loaded(in_order, outcome, model.metadata())


def load_file(
    path: Optional[Paths], device: Device = None, *, framework: Optional[str] = None, **options: Unpack[LoadOptions]
) -> Dict[str, Any]:
    """The tensors of model files, by name: what `load` gives, without how it went. Takes the options of `load`."""
    return load(path, device, framework=framework, **options).tensors


def stream(
    path: Paths,
    device: Device = None,
    *,
    framework: Optional[str] = None,
    names: Patterns = None,
    without: Patterns = None,
    dtypes: Patterns = None,
    rank: Optional[Tuple[int, int]] = None,
    cuts: Optional[Mapping[str, int]] = None,
    route: str = "auto",
    threads: Optional[int] = None,
    verify: bool = False,
    manifest: Union[str, "os.PathLike[str]", None] = None,
    measure_limit: bool = False,
) -> Stream:
    """Hands tensors out as soon as their bytes are there, in whichever order that is.

    The options are those of `load`. That files have not changed, and what `verify` and `manifest` find, is known at the
    end: the iteration then raises what `load` would have raised.
    """
    convert = _converter(framework)
    job = _job(
        _open(path),
        device,
        names=names,
        without=without,
        dtypes=dtypes,
        rank=rank,
        cuts=cuts,
        route=route,
        threads=threads,
        verify=verify,
        manifest=manifest,
        measure_limit=measure_limit,
    )
    return Stream(job, convert)


class Slice:
    """A tensor of files that are open, of which an index loads the elements that it names, and reads little more."""

    def __init__(self, model: _Model, name: str, device: Optional[str], convert: Callable[[Tensor], Any]) -> None:
        self._model = model
        self._name = name
        self._device = device
        self._convert = convert
        self._dtype, self._shape = model.info(name)

    def get_shape(self) -> List[int]:
        """Its dimensions; of packed types those of their bytes."""
        return self._shape

    def get_dtype(self) -> str:
        """The type of its elements, as the file writes it."""
        return self._dtype

    def __getitem__(self, index: Any) -> Any:
        return self._convert(_only(self._model.load_part(self._name, index, device=self._device)))


class safe_open:
    """Model files, open: the names, types and dimensions in them at once, and tensors when they are asked for.

    As `safetensors.safe_open`, and the device is "cpu" unless another is given. It takes what `load` takes: directories,
    indexes and GGUF files too. Each tensor is a load of its own; whoever wants many has them sooner by `stream` or `load`.
    """

    def __init__(
        self, filename: Paths, framework: Optional[str] = None, device: Device = "cpu"
    ) -> None:
        self._convert = _converter(framework)
        self._device = _device(device)
        self._opened: Optional[_Model] = _open(filename)

    @property
    def _model(self) -> _Model:
        if self._opened is None:
            raise errors.RequestError("the files are closed: the `with` that had them open has ended")
        return self._opened

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        """No more can be asked of the files. They are closed when slices and streams of them are gone too, which go on."""
        self._opened = None

    def keys(self) -> List[str]:
        """The names of all tensors, in order."""
        return sorted(self._model.names())

    def offset_keys(self) -> List[str]:
        """The names of all tensors, in the order of their bytes."""
        return self._model.names()

    def metadata(self) -> Optional[Dict[str, Any]]:
        """What the files say of themselves; None where that is nothing."""
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
        """Loads many of them, and hands each out as soon as it is there. Takes the options of `stream`."""
        return Stream(_job(self._model, self._device, **options), self._convert)


def _open(path: Paths) -> _Model:
    paths = [path] if isinstance(path, (str, bytes, os.PathLike)) else list(path)
    return _Model([os.fsdecode(path) for path in paths])


def _open_on_drive(
    drive: str,
    path: Optional[Paths],
    partition: Union[int, str, None],
    extent_map: Union[str, "os.PathLike[str]", None],
    nsid: Optional[int],
) -> _Model:
    if (path is None) == (extent_map is None):
        raise errors.RequestError("drive= takes a path in its file system, or extent_map= and None as the path")
    if extent_map is not None and partition is not None:
        raise errors.RequestError("an extent map knows where its files are: it takes no partition")
    if nsid is not None and not 1 <= nsid < 2**32:
        raise errors.RequestError(f"nsid={nsid}: namespaces count from 1")
    paths: List[str] = []
    if path is not None:
        many = [path] if isinstance(path, (str, bytes, os.PathLike)) else list(path)
        paths = [os.fsdecode(one) for one in many]
    model = _Model.on_drive(
        drive,
        paths=paths,
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


#: Threads that may be asked for.
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
    route: str = "auto",
    threads: Optional[int] = None,
    verify: bool = False,
    manifest: Union[str, "os.PathLike[str]", None] = None,
    measure_limit: bool = False,
) -> _Job:
    if (rank is None) != (cuts is None):
        raise errors.RequestError("rank says which part, cuts which tensors are cut: it takes both, or neither")
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise errors.RequestError(f"threads={threads}: 1 to {_MOST_THREADS} can read")
    if min([*(rank or ()), *(cuts or {}).values()], default=0) < 0:
        raise errors.RequestError(f"rank={rank}, cuts={cuts}: ranks and dimensions count from 0")
    return model.load(
        device=_device(device),
        only=_some("names", names),
        without=_list(without),
        dtypes=_some("dtypes", dtypes),
        rank=rank,
        cuts=list((cuts or {}).items()),
        route=route,
        threads=threads,
        verify=verify,
        manifest=None if manifest is None else os.fsdecode(manifest),
        measure_limit=measure_limit,
    )


def _only(job: _Job) -> Tensor:
    """The one tensor of a load, whose end is waited for: it tells whether the file has changed."""
    found = None
    while (tensor := job.next()) is not None:
        found = tensor
    assert found is not None
    return found
