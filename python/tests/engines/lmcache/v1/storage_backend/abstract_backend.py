import abc

from lmcache.v1.memory_management import MemoryFormat


class StorageBackendInterface(abc.ABC):
    def __init__(self, dst_device="cuda"):
        self.dst_device = dst_device

    @abc.abstractmethod
    def contains(self, key, pin=False):
        pass

    @abc.abstractmethod
    def exists_in_put_tasks(self, key):
        pass

    @abc.abstractmethod
    def batched_submit_put_task(self, keys, objs, transfer_spec=None, on_complete_callback=None):
        pass

    @abc.abstractmethod
    def get_blocking(self, key):
        pass

    async def batched_async_contains(self, lookup_id, keys, pin=False):
        raise NotImplementedError

    async def batched_get_non_blocking(self, lookup_id, keys, transfer_spec=None):
        raise NotImplementedError

    def batched_get_blocking(self, keys):
        raise NotImplementedError

    @abc.abstractmethod
    def pin(self, key):
        pass

    @abc.abstractmethod
    def unpin(self, key):
        pass

    @abc.abstractmethod
    def remove(self, key, force=True):
        pass

    def batched_remove(self, keys, force=True):
        return sum(self.remove(key, force=force) for key in keys)

    @abc.abstractmethod
    def get_allocator_backend(self):
        pass

    @abc.abstractmethod
    def close(self):
        pass

    def batched_contains(self, keys, pin=False):
        for number, key in enumerate(keys):
            if not self.contains(key, pin):
                return number
        return len(keys)


class AllocatorBackendInterface(StorageBackendInterface):
    @abc.abstractmethod
    def initialize_allocator(self, config, metadata):
        pass

    @abc.abstractmethod
    def get_memory_allocator(self):
        pass

    @abc.abstractmethod
    def allocate(self, shapes, dtypes, fmt=MemoryFormat.KV_2LTD, eviction=True, busy_loop=True):
        pass

    @abc.abstractmethod
    def batched_allocate(self, shapes, dtypes, batch_size, fmt=MemoryFormat.KV_2LTD, eviction=True, busy_loop=True):
        pass


class StoragePluginInterface(StorageBackendInterface):
    def __init__(self, dst_device="cuda", config=None, metadata=None, local_cpu_backend=None, loop=None):
        super().__init__(dst_device=dst_device)
        self.config = config
        self.metadata = metadata
        self.local_cpu_backend = local_cpu_backend
        self.loop = loop
