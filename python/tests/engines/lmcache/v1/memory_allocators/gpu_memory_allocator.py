import importlib.util

from lmcache.v1.memory_management import MemoryFormat, MemoryObj


def has_gpu():
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


class GPUMemoryAllocator:
    """Memory of a GPU, or of the CPU where there is none."""

    def __init__(self, size, device="cuda"):
        self.left = size
        self.on_gpu = has_gpu()

    def allocate(self, shapes, dtypes, fmt=MemoryFormat.KV_2LTD):
        if self.left < shapes:
            return None
        self.left -= shapes
        return MemoryObj({"shapes": shapes, "dtypes": dtypes, "fmt": fmt}, self.on_gpu)

    def batched_allocate(self, shapes, dtypes, batch_size, fmt=MemoryFormat.KV_2LTD):
        return [self.allocate(shapes, dtypes, fmt) for _ in range(batch_size)]
