import abc
import dataclasses
import enum
from typing import Any, List, Optional


@dataclasses.dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: Optional[str]
    extra_config: Optional[dict] = None


class PoolName(str, enum.Enum):
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"

    def __str__(self):
        return self.value


class PoolHitPolicy(str, enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclasses.dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    keys: Optional[List[str]] = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclasses.dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict
    restorable_prefix_pages: Optional[List[int]] = None


class HiCacheStorage(abc.ABC):
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        pass

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        pass

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        pass

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None):
        raise NotImplementedError

    def batch_get_v2(self, transfers, extra_info=None):
        raise NotImplementedError

    def batch_set_v2(self, transfers, extra_info=None):
        raise NotImplementedError

    @abc.abstractmethod
    def get(self, key, target_location=None, target_sizes=None):
        pass

    @abc.abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None):
        pass

    @abc.abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None):
        pass

    @abc.abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        pass

    @abc.abstractmethod
    def exists(self, key):
        pass

    def batch_exists(self, keys, extra_info=None):
        for number, key in enumerate(keys):
            if not self.exists(key):
                return number
        return len(keys)

    def clear(self):
        pass
