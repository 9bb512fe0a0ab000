from lmcache.v1.memory_management import MemoryFormat, MemoryObj


class LocalCPUBackend:
    """Memory without limits. `metadata` is the size of a chunk."""

    def __init__(self, config, metadata=None, dst_device="cuda"):
        self.metadata = metadata

    def get_full_chunk_size_bytes(self):
        return self.metadata

    def get_memory_allocator(self):
        return self

    def allocate(self, shapes, dtypes, fmt=MemoryFormat.KV_2LTD, eviction=True, busy_loop=True):
        return MemoryObj({"shapes": shapes, "dtypes": dtypes, "fmt": fmt})

    def batched_allocate(self, shapes, dtypes, batch_size, fmt=MemoryFormat.KV_2LTD, eviction=True, busy_loop=True):
        return [self.allocate(shapes, dtypes, fmt) for _ in range(batch_size)]
