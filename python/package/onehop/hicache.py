"""SGLang's HiCache: a backend for `--hicache-storage-backend dynamic` that keeps pages in a file of each process."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from typing import Any, List, Optional, Sequence

import numpy
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from . import errors
from ._pages import _bytes_of
from ._slots import Slots

_logger = logging.getLogger(__name__)

#: The primary pool of SGLang's host memory.
_PRIMARY = "kv"


class OnehopHiCache(HiCacheStorage):  # type: ignore[misc]
    """Pages of SGLang's host memory in a file. Every rank has its own file, so keys need no suffix for it."""

    def __init__(self, storage_config: Any, _: Any = None) -> None:
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            # SGLang has the first rank alone write. The others would not find its pages in their files.
            raise errors.RequestError(
                f"onehop cannot share pages between the {storage_config.tp_size} tensor-parallel ranks of an MLA model: "
                "use data-parallel attention"
            )
        self._options = storage_config.extra_config or {}
        self._slots: Optional[Slots] = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Creates the file. SGLang calls it before anything else."""
        super().register_mem_pool_host(mem_pool_host)
        _, sizes = mem_pool_host.get_page_buffer_meta(numpy.arange(mem_pool_host.page_size))
        self.close()
        # The memory is the CPU's: HiCache itself moves pages between that and the GPU.
        self._slots = Slots(self._options.get("path"), self._options.get("bytes"), sum(sizes), "cpu")

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool_name != _PRIMARY:
            raise errors.RequestError(f"onehop does not store the pool {host_pool_name} of hybrid models or draft models")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_get_v1(self, keys: List[str], host_indices: Any, extra_info: Any = None) -> List[bool]:
        memories = self._memories(len(keys), host_indices)
        return [False] * len(keys) if memories is None else self._get(keys, memories)

    def batch_set_v1(self, keys: List[str], host_indices: Any, extra_info: Any = None) -> List[bool]:
        memories = self._memories(len(keys), host_indices)
        return [False] * len(keys) if memories is None else self._set(keys, memories)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: List[str], target_locations: Any = None, target_sizes: Any = None) -> List[Any]:
        are_read = self._get(keys, [[target] for target in target_locations])
        return [target if is_read else None for target, is_read in zip(target_locations, are_read)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: List[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self._set(keys, [[value] for value in values]))

    def exists(self, key: str) -> bool:
        return self._slots is not None and self._slots.contains(key)

    def clear(self) -> None:
        if self._slots is not None:
            self._slots.clear()

    def close(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()

    def _memories(self, count: int, host_indices: Any) -> Optional[List[List[Any]]]:
        """The arrays of each page: one, or one for keys and values of each layer, as the layout has it."""
        if len(host_indices) != count * self.mem_pool_host.page_size:
            _logger.error("%d pages cannot have %d indices", count, len(host_indices))
            return None
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        arrays = [_array(pointer, size) for pointer, size in zip(pointers, sizes)]
        parts = len(arrays) // max(count, 1)
        return [arrays[page * parts : (page + 1) * parts] for page in range(count)]

    def _get(self, keys: List[str], memories: Sequence[Sequence[Any]]) -> List[bool]:
        slots = self._slots
        if slots is None:
            return [False] * len(keys)
        with slots.using(keys) as found:
            transfers = [(slot, memory) for slot, memory in zip(found, memories) if slot is not None]
            try:
                is_read = slots.read(transfers)
            except errors.StalledError:
                # Late bytes would arrive in memory that SGLang has reused by then.
                _logger.critical("This thread waits, so that its memory is not reused. Restart SGLang.")
                threading.Event().wait()
            return [is_read and slot is not None for slot in found]

    def _set(self, keys: List[str], memories: Sequence[Sequence[Any]]) -> List[bool]:
        slots = self._slots
        if slots is None:
            _logger.error("%d pages were not written: there is no file", len(keys))
            return [False] * len(keys)
        transfers = []
        for key, memory in zip(keys, memories):
            slot = slots.reserve(key, sum(map(_bytes_of, memory)))
            if slot is not None:
                transfers.append((slot, memory))
        slots.write(transfers)
        return [slots.contains(key) for key in keys]


@functools.lru_cache(maxsize=None)
def _bytes_type(size: int) -> Any:
    """ctypes does not keep the types of arrays that it makes."""
    return ctypes.c_ubyte * size


def _array(pointer: int, size: int) -> Any:
    return numpy.frombuffer(_bytes_type(size).from_address(pointer), numpy.uint8)
