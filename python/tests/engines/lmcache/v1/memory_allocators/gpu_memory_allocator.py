from lmcache.v1.memory_management import MemoryFormat, MemoryObj


class GPUMemoryAllocator:
    def __init__(self, size, device="cuda"):
        self.left = size

    def allocate(self, shapes, dtypes, fmt=MemoryFormat.KV_2LTD):
        if self.left < shapes:
            return None
        self.left -= shapes
        return MemoryObj({"shapes": shapes, "dtypes": dtypes, "fmt": fmt})

    def batched_allocate(self, shapes, dtypes, batch_size, fmt=MemoryFormat.KV_2LTD):
        return [self.allocate(shapes, dtypes, fmt) for _ in range(batch_size)]
