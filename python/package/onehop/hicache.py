"""SGLang's HiCache: a backend for `--hicache-storage-backend dynamic` that keeps pages in files of each process."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from typing import Any, Dict, List, Optional, Sequence

import numpy
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from . import errors
from ._pages import _bytes_of
from ._slots import Slots

_logger = logging.getLogger(__name__)


class _Pool:
    """Pages of one of SGLang's pools of host memory, in a file."""

    def __init__(self, host: Any, folder: Any, size: Any) -> None:
        self._host = host
        _, sizes = host.get_page_buffer_meta(numpy.arange(host.page_size))
        # The memory is the CPU's: HiCache itself moves pages between that and the GPU.
        self.slots = Slots(folder, size, sum(sizes), "cpu")

    def memories(self, keys: Sequence[str], indices: Any) -> Optional[List[List[Any]]]:
        """The arrays of each page: one, or several as the pool's layout has it. None if there are not as many pages."""
        if indices is None or len(indices) != len(keys) * self._host.page_size:
            _logger.error("%d pages cannot have %d indices", len(keys), 0 if indices is None else len(indices))
            return None
        pointers, sizes = self._host.get_page_buffer_meta(indices)
        arrays = [_array(pointer, size) for pointer, size in zip(pointers, sizes)]
        parts = len(arrays) // max(len(keys), 1)
        return [arrays[page * parts : (page + 1) * parts] for page in range(len(keys))]

    def get(self, keys: Sequence[str], memories: Sequence[Sequence[Any]]) -> List[bool]:
        """Reads pages. Which of them were there."""
        with self.slots.using(keys) as slots:
            transfers = [(slot, memory) for slot, memory in zip(slots, memories) if slot is not None]
            try:
                is_read = self.slots.read(transfers)
            except errors.StalledError:
                # Late bytes would arrive in memory that SGLang has reused by then.
                _logger.critical("This thread waits, so that its memory is not reused. Restart SGLang.")
                threading.Event().wait()
            return [is_read and slot is not None for slot in slots]

    def set(self, keys: Sequence[str], memories: Sequence[Sequence[Any]]) -> List[bool]:
        """Writes pages that are not stored yet. Which of them are stored now."""
        # All sizes first: an error among them must leave no slot reserved.
        sizes = [sum(map(_bytes_of, memory)) for memory in memories]
        transfers = []
        for key, memory, size in zip(keys, memories, sizes):
            slot = self.slots.reserve(key, size)
            if slot is not None:
                transfers.append((slot, memory))
        self.slots.write(transfers)
        return [self.slots.contains(key) for key in keys]


class OnehopHiCache(HiCacheStorage):  # type: ignore[misc]
    """Pages of SGLang's host memory in files: one for each pool. Every rank has its own, so keys need no suffix for it."""

    def __init__(self, storage_config: Any, _: Any = None) -> None:
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            # SGLang has the first rank alone write. The others would not find its pages in their files.
            raise errors.RequestError(
                f"onehop cannot share pages between the {storage_config.tp_size} tensor-parallel ranks of an MLA model: "
                "use data-parallel attention"
            )
        self._options = storage_config.extra_config or {}
        self._pools: Dict[str, _Pool] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", self) is None:
            raise errors.RequestError("onehop does not support models whose primary pool has no memory, as DeepSeek V4 has it")
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        # SGLang registers the primary pool by both methods.
        if host_pool_name != PoolName.KV:
            self._register(host_pool_name, host_pool)

    def _register(self, name: Any, host: Any) -> None:
        size = self._options.get("bytes")
        if isinstance(size, dict):
            size = size.get(str(name))
        elif name != PoolName.KV:
            size = None
        if size is None:
            raise errors.RequestError(f'the size of the file for the pool "{name}" is missing: "bytes": {{"{name}": …, …}}')
        old = self._pools.pop(str(name), None)
        if old is not None:
            old.slots.close()
        self._pools[str(name)] = _Pool(host, self._options.get("path"), size)

    def batch_get_v1(self, keys: List[str], host_indices: Any, extra_info: Any = None) -> List[bool]:
        return self._batch(_Pool.get, PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: List[str], host_indices: Any, extra_info: Any = None) -> List[bool]:
        return self._batch(_Pool.set, PoolName.KV, keys, host_indices)

    def batch_get_v2(self, transfers: List[Any], extra_info: Any = None) -> Dict[str, List[bool]]:
        return {each.name: self._batch(_Pool.get, each.name, each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: List[Any], extra_info: Any = None) -> Dict[str, List[bool]]:
        return {each.name: self._batch(_Pool.set, each.name, each.keys or [], each.host_indices) for each in transfers}

    def _batch(self, move: Any, name: Any, keys: List[str], indices: Any) -> List[bool]:
        pool = self._pools.get(str(name))
        if pool is None:
            _logger.error("%d pages were not moved: the pool %s has no file", len(keys), name)
            return [False] * len(keys)
        memories = pool.memories(keys, indices)
        if memories is None:
            return [False] * len(keys)
        done: List[bool] = move(pool, keys, memories)
        return done

    def batch_exists_v2(self, keys: List[str], pool_transfers: Optional[List[Any]] = None, extra_info: Any = None) -> Any:
        """How many pages from the first one can be restored: those that every pool has as far as it needs them."""
        count = self.batch_exists(keys, extra_info)
        hits: Dict[str, int] = {PoolName.KV: count} if count else {}
        restorable = set(range(1, count + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                needed = count
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                needed = max(1, len(transfer.keys or ()))
            else:
                raise errors.RequestError(f"onehop does not support the hit policy {transfer.hit_policy}")
            lengths = self._restorable(transfer.name, keys[:count], needed)
            if lengths:
                hits[transfer.name] = lengths[-1]
            restorable.intersection_update(lengths)
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _restorable(self, name: Any, keys: List[str], needed: int) -> List[int]:
        """After how many keys this pool has the last ones: as many as needed, or all."""
        pool = self._pools.get(str(name))
        lengths, run = [], 0
        for length, key in enumerate(keys, 1):
            run = run + 1 if pool is not None and pool.slots.contains(key) else 0
            if run >= min(needed, length):
                lengths.append(length)
        return lengths

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: List[str], target_locations: Any = None, target_sizes: Any = None) -> List[Any]:
        pool = self._pools.get(str(PoolName.KV))
        if pool is None:
            return [None] * len(keys)
        targets = target_locations or [None] * len(keys)
        are_read = pool.get(keys, [[target] for target in targets])
        return [target if is_read else None for target, is_read in zip(targets, are_read)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: List[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pool = self._pools.get(str(PoolName.KV))
        return pool is not None and all(pool.set(keys, [[value] for value in values]))

    def exists(self, key: str) -> bool:
        pool = self._pools.get(str(PoolName.KV))
        return pool is not None and pool.slots.contains(key)

    def clear(self) -> None:
        for pool in self._pools.values():
            pool.slots.clear()

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].slots.close()


@functools.lru_cache(maxsize=None)
def _bytes_type(size: int) -> Any:
    """ctypes does not keep the types of arrays that it makes."""
    return ctypes.c_ubyte * size


def _array(pointer: int, size: int) -> Any:
    return numpy.frombuffer(_bytes_type(size).from_address(pointer), numpy.uint8)
