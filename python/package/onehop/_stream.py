"""A running load, as an iterator; and the GPU memory that torch allocates for it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import warnings
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple

from . import errors
from ._frameworks import TORCH_NAMES, torch_dtype
from ._native import Job as _Job
from ._native import Outcome, Tensor

#: How often a stream checks whether the GPU has passed its fences, in seconds.
_FENCE_POLL = 0.0005
#: How often it checks while it waits whether other threads freed tensors: their memory needs a fence.
_DEATH_POLL = 0.005
#: CU_STREAM_CAPTURE_MODE_RELAXED
_RELAXED = 2
#: How long the GPU may take for work queued before an allocation, in seconds.
_SETTLE_TIMEOUT = 120.0


class Stream:
    """Iterates over names and tensors as they arrive. Leaving it, or a `with` around it, ends the load."""

    def __init__(
        self,
        job: _Job,
        convert: Callable[[Tensor], Any],
        memory: Optional[TorchMemory] = None,
        *,
        any_device: bool = False,
    ) -> None:
        self._job = job
        self._convert = convert
        self._memory = memory
        self._has_warned = False
        self._any_device = any_device

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Tuple[str, Any]:
        while True:
            limit = None
            if self._memory is not None:
                limit = _FENCE_POLL if self._memory.recycle(self._job) else _DEATH_POLL
            step = self._job.next(limit)
            if step is None:
                if self._any_device:
                    self._any_device = False
                    warn_of_cpu(self._job.outcome)
                raise StopIteration
            if isinstance(step, Tensor):
                return step.name, self._convert(step)
            if step is not False:
                self._bring(step)

    def _bring(self, nbytes: int) -> None:
        try:
            if self._memory is None:
                raise errors.RequestError(
                    f"max_bytes on a GPU needs framework='torch' ({', '.join(TORCH_NAMES)}), which allocates the "
                    "memory and reuses it after fences on its streams"
                )
            self._memory.bring(self._job, nbytes)
        except BaseException:
            self.close()
            raise
        if self._job.grown and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the stream uses more memory than max_bytes: its tensors are kept, or one of them is larger",
                RuntimeWarning,
                stacklevel=3,
            )

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the load. Tensors handed out stay valid; requesting more raises CancelledError."""
        self._job.cancel()

    @property
    def outcome(self) -> Optional[Outcome]:
        """The outcome; None before the end."""
        return self._job.outcome

    @property
    def progress(self) -> Tuple[int, int]:
        """Bytes that have arrived, and their total."""
        return self._job.progress

    @property
    def grown(self) -> int:
        """Bytes by which the memory has grown beyond max_bytes."""
        return self._job.grown


def warn_of_cpu(outcome: Optional[Outcome]) -> None:
    """Warns callers who named no device and may expect the tensors on a GPU."""
    if outcome is not None and "gpu" in outcome.simulated:
        warnings.warn(f"{outcome.gpu_why}. Pass device='cpu' to silence this", RuntimeWarning, stacklevel=3)


class TorchMemory:
    """GPU memory of torch's caching allocator."""

    def __init__(self, device: Optional[str]) -> None:
        import torch

        self._torch: Any = torch
        self._device = device
        self._fences: Deque[Tuple[Any, int]] = deque()
        # The newest of them.
        self._latest = 0
        # Several threads may share a stream.
        self._recycling = threading.Lock()
        self._process = os.getpid()
        self._driver: Any = None

    def _index(self) -> int:
        device = self._device or "0"
        number = device[5:] if device.startswith("cuda:") else {"cuda": "0"}.get(device, device)
        if not number.isdigit():
            raise errors.RequestError(f"torch allocates memory on cuda:0, cuda:1 and so on, not on {device!r}")
        return int(number)

    @contextlib.contextmanager
    def _relaxed_captures(self) -> Iterator[None]:
        """Lets this thread allocate and query events while others capture CUDA graphs in the global mode."""
        if self._driver is None:
            self._driver = ctypes.CDLL("libcuda.so.1")
        mode = ctypes.c_int(_RELAXED)
        exchange = self._driver.cuThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))

    def bring(self, job: _Job, nbytes: int) -> Any:
        """Allocates memory for a load, and waits for kernels that used it before."""
        torch = self._torch
        index = self._index()
        if not torch.cuda.is_available():
            raise errors.DeviceError("this torch has no CUDA: it cannot allocate GPU memory")
        with self._relaxed_captures(), torch.cuda.device(index):
            if torch.cuda.is_current_stream_capturing():
                raise errors.RequestError("the current stream captures a graph: load before or after that")
            try:
                base = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{index}")
            except torch.cuda.OutOfMemoryError as error:
                raise errors.OutOfGpuMemoryError(f"torch has no {nbytes} bytes of GPU memory: {error}") from error
            event = torch.cuda.Event()
            event.record()
            start = time.monotonic()
            while not event.query():
                if time.monotonic() - start > _SETTLE_TIMEOUT:
                    raise errors.StalledError(
                        f"work on the current stream of cuda:{index} did not end within {_SETTLE_TIMEOUT:.0f} s"
                    )
                time.sleep(0.0002)
        job.bring(base.data_ptr(), nbytes, base)
        return base

    def recycle(self, job: _Job) -> bool:
        """Recycles memory of freed tensors, once the GPU is done with it. Returns whether some still waits."""
        if os.getpid() != self._process:
            # Another thread may have held the lock at the fork, and the GPU is the parent's.
            return False
        with self._recycling:
            return self._recycle(job)

    def _recycle(self, job: _Job) -> bool:
        # Ctrl-C may come between any two steps: each can be repeated.
        latest = job.dead()
        if latest is not None and latest > self._latest:
            with self._torch.cuda.device(self._index()):
                if self._torch.cuda.is_current_stream_capturing():
                    raise errors.RequestError("the current stream captures a graph: take tensors before or after that")
                event = self._torch.cuda.Event()
                event.record()
            self._fences.append((event, latest))
            self._latest = latest
        if self._fences:
            with self._relaxed_captures():
                while self._fences and self._fences[0][0].query():
                    job.fenced(self._fences[0][1])
                    self._fences.popleft()
        return bool(self._fences)


def torch_name(torch: Any, device: Any) -> str:
    """How torch names a device of onehop.load."""
    if device is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if isinstance(device, int) or (isinstance(device, str) and device.isdigit()):
        return f"cuda:{device}"
    return f"cuda:{torch.cuda.current_device()}" if str(device) == "cuda" else str(device)


def arena(
    job: _Job, memory: TorchMemory, report: Callable[[Tuple[int, int]], object], poll: Optional[float]
) -> Dict[str, Any]:
    """All tensors of a load as views of one, which on a GPU torch allocates. Made while the bytes arrive."""
    try:
        step = job.next()
        if isinstance(step, Tensor):
            base = memory._torch.utils.dlpack.from_dlpack(step.capsule())
        elif step is None:
            raise errors.OnehopError("the load ended before its memory was there; this is a defect of onehop")
        else:
            base = memory.bring(job, step)
        tensors = _views(memory._torch, base, job)
        while (step := job.next(poll)) is not None:
            report(job.progress)
    except BaseException:
        job.cancel()
        raise
    return tensors


def _views(torch: Any, base: Any, job: _Job) -> Dict[str, Any]:
    tensors: Dict[str, Any] = {}
    flat: Dict[str, Any] = {}
    with torch.no_grad():
        for dtype, shape, first, step, names in job.layout():
            if dtype not in flat:
                flat[dtype] = base.view(torch_dtype(torch, dtype))
            strides = [1] * len(shape)
            for dim in range(len(shape) - 1, 0, -1):
                strides[dim - 1] = strides[dim] * max(shape[dim], 1)
            if len(names) == 1:
                tensors[names[0]] = flat[dtype].as_strided(shape, strides, first)
            else:
                # One call for all takes a quarter of the time of one call each.
                row = flat[dtype].as_strided([len(names), *shape], [step, *strides], first)
                tensors.update(zip(names, row.unbind(0)))
    return tensors


def copy_into(arriving: Stream, into: Dict[str, Any]) -> None:
    """Copies tensors into existing ones, cast to their types, on the current stream."""
    import torch

    with torch.no_grad():
        for name, tensor in arriving:
            copy_tensor(name, tensor, into[name])
            # Its memory is free for the next one.
            del tensor


def copy_tensor(name: str, tensor: Any, target: Any) -> None:
    """Copies a tensor that has arrived into one of the same shape. A copy into a GPU is queued on its current stream;
    one into host memory is complete."""
    if target.shape != tensor.shape:
        raise errors.RequestError(misfit(name, list(tensor.shape), target))
    target.copy_(tensor, non_blocking=bool(target.is_cuda))


def misfit(name: str, shape: List[int], target: Any) -> str:
    """The error text for a tensor of another shape."""
    return f"the tensor {name!r} has the shape {shape}, and that of `into` {list(target.shape)}"
