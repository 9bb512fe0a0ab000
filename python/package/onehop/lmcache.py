"""LMCache: a storage plugin that keeps chunks in a file of each worker. `storage_plugins: ["onehop"]` switches it on."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

from lmcache.v1.memory_allocators.gpu_memory_allocator import GPUMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface, StoragePluginInterface

from . import errors
from ._slots import Slots, Transfer

_logger = logging.getLogger(__name__)

#: GPU memory for chunks that are being stored or loaded.
_BUFFER_BYTES = 1 << 30


class _Layout(NamedTuple):
    """What a memory object for a chunk is allocated with."""

    shapes: Any
    dtypes: Any
    format: Any
    positions: Any


def _layout(obj: Any) -> Optional[_Layout]:
    """None for objects without a tensor."""
    if obj.raw_tensor is None:
        return None
    meta = obj.metadata
    shapes = meta.shape if meta.shapes is None else meta.shapes
    dtypes = meta.dtype if meta.dtypes is None else meta.dtypes
    return _Layout(shapes, dtypes, meta.fmt, meta.cached_positions)


class OnehopBackend(StoragePluginInterface, AllocatorBackendInterface):  # type: ignore[misc]
    """Chunks in a file.

    On a GPU they are in a buffer of its memory, as LMCache's own GDS backend has it: bytes go between that and the file in one
    hop, and LMCache's kernels move them on. With `onehop.device: cpu` they are in LMCache's CPU memory.
    """

    def __init__(
        self,
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
        dst_device: str = "cpu",
    ) -> None:
        super().__init__(
            dst_device=dst_device, config=config, metadata=metadata, local_cpu_backend=local_cpu_backend, loop=loop
        )
        if local_cpu_backend is None:
            raise errors.RequestError(
                "onehop needs LMCache's CPU memory in the same process: set max_local_cpu_size, not enable_scheduler_bypass_lookup"
            )
        options = config.extra_config or {}
        device = options.get("onehop.device", dst_device)
        self._buffer: Any = None
        if device != "cpu":
            if config.local_cpu:
                # LMCache would keep the buffer's chunks as its cache in CPU memory.
                raise errors.RequestError("with chunks in GPU memory, set local_cpu: false, or onehop.device: cpu")
            self._buffer = GPUMemoryAllocator(options.get("onehop.buffer_bytes", _BUFFER_BYTES), device=device)
        self._slots = Slots(
            options.get("onehop.path"), options.get("onehop.bytes"), local_cpu_backend.get_full_chunk_size_bytes(), device
        )
        self._writer = ThreadPoolExecutor(1, "onehop-lmcache")
        # Objects whose memory must not be reused.
        self._unusable: List[Any] = []

    def __str__(self) -> str:
        return type(self).__name__

    def contains(self, key: Any, pin: bool = False) -> bool:
        return self._slots.contains(key, pin)

    def exists_in_put_tasks(self, key: Any) -> bool:
        return self._slots.is_being_written(key)

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: List[Any],
        transfer_spec: Any = None,
        on_complete_callback: Optional[Callable[[Any], None]] = None,
    ) -> Optional[List[Future[None]]]:
        if len(keys) != len(objs):
            raise errors.RequestError(f"there are {len(keys)} keys and {len(objs)} objects, not the same length")
        transfers: List[Transfer] = []
        written: List[Any] = []
        try:
            for key, obj, layout in zip(keys, objs, [_layout(obj) for obj in objs]):
                if layout is None:
                    _logger.error("a chunk was not stored: %s has no tensor", type(obj).__name__)
                    continue
                size = obj.get_size()
                parts = [obj.raw_tensor[:size]]
                slot = self._slots.reserve(key, size, layout)
                if slot is not None:
                    transfers.append((slot, parts))
                    obj.ref_count_up()
                    written.append(obj)
            if not transfers:
                return None
            future = self._writer.submit(self._write, transfers, written, on_complete_callback)
        except BaseException:
            self._slots.abandon([slot for slot, _ in transfers])
            self._release(written)
            raise
        return [future] * len(transfers)

    def _write(self, transfers: List[Transfer], objs: List[Any], on_complete: Optional[Callable[[Any], None]]) -> None:
        try:
            is_written = self._slots.write(transfers)
        finally:
            self._release(objs)
        if not is_written:
            raise errors.OnehopError(f"{len(transfers)} chunks were not stored")
        if on_complete is None:
            return
        for slot, _ in transfers:
            try:
                on_complete(slot.key)
            except Exception:
                _logger.exception("on_complete_callback failed")

    def get_blocking(self, key: Any) -> Any:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: List[Any]) -> List[Any]:
        objs: List[Any] = [None] * len(keys)
        try:
            is_read = self._read(keys, objs)
        except errors.StalledError:
            # Late bytes may still arrive in their memory.
            self._unusable += objs
            return [None] * len(keys)
        except BaseException:
            self._release(objs)
            raise
        if not is_read:
            self._release(objs)
            return [None] * len(keys)
        return objs

    def _read(self, keys: List[Any], objs: List[Any]) -> bool:
        """Allocates the objects of stored chunks, and reads them. False if that failed."""
        transfers: List[Transfer] = []
        with self._slots.using(keys) as slots:
            for number, slot in enumerate(slots):
                if slot is None:
                    continue
                layout = slot.info
                # A miss is better than waiting for memory that the caller may hold.
                obj = self.allocate(layout.shapes, layout.dtypes, layout.format, busy_loop=False)
                if obj is None:
                    _logger.warning("a chunk was not loaded: there is no memory for it")
                    continue
                objs[number] = obj
                obj.metadata.cached_positions = layout.positions
                transfers.append((slot, [obj.raw_tensor[: slot.size]]))
            return self._slots.read(transfers)

    async def batched_get_non_blocking(self, lookup_id: str, keys: List[Any], transfer_spec: Any = None) -> List[Any]:
        reading = asyncio.get_running_loop().run_in_executor(None, self.batched_get_blocking, keys)
        try:
            objs = await asyncio.shield(reading)
        except asyncio.CancelledError:
            # The thread goes on, and nobody takes its chunks.
            reading.add_done_callback(self._release_result)
            raise
        # LMCache wants the chunks before the first miss.
        hits = objs.index(None) if None in objs else len(objs)
        self._release(objs[hits:])
        return objs[:hits]

    async def batched_async_contains(self, lookup_id: str, keys: List[Any], pin: bool = False) -> int:
        return int(self.batched_contains(keys, pin))

    def pin(self, key: Any) -> bool:
        return self._slots.contains(key, pin=True)

    def unpin(self, key: Any) -> bool:
        return self._slots.unpin(key)

    def remove(self, key: Any, force: bool = True) -> bool:
        return self._slots.remove(key, force)

    def clear(self) -> int:
        """Forgets all chunks, and returns how many tokens they had if all were full."""
        return self._slots.clear() * int(self.config.chunk_size)

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend if self._buffer is None else self

    def initialize_allocator(self, config: Any, metadata: Any) -> Any:
        return self.get_memory_allocator()

    def get_memory_allocator(self) -> Any:
        return self.local_cpu_backend.get_memory_allocator() if self._buffer is None else self._buffer

    def allocate(
        self,
        shapes: Any,
        dtypes: Any,
        fmt: Any = MemoryFormat.KV_2LTD,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> Any:
        if self._buffer is not None:
            return self._buffer.allocate(shapes, dtypes, fmt)
        return self.local_cpu_backend.allocate(shapes, dtypes, fmt, eviction=eviction, busy_loop=busy_loop)

    def batched_allocate(
        self,
        shapes: Any,
        dtypes: Any,
        batch_size: int,
        fmt: Any = MemoryFormat.KV_2LTD,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> Any:
        if self._buffer is not None:
            return self._buffer.batched_allocate(shapes, dtypes, batch_size, fmt)
        return self.local_cpu_backend.batched_allocate(
            shapes, dtypes, batch_size, fmt, eviction=eviction, busy_loop=busy_loop
        )

    def close(self) -> None:
        self._slots.stop_reserving()
        self._writer.shutdown()
        self._slots.close()

    def _release_result(self, reading: "asyncio.Future[List[Any]]") -> None:
        if not reading.cancelled() and reading.exception() is None:
            self._release(reading.result())

    @staticmethod
    def _release(objs: Sequence[Any]) -> None:
        for obj in objs:
            if obj is not None:
                obj.ref_count_down()
