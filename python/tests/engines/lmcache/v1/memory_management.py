import abc
import enum
import types

import numpy


class MemoryFormat(enum.Enum):
    KV_2LTD = 1
    KV_T2D = 2


class MemoryObj(abc.ABC):
    """An object of bytes. `shapes` is how many it has."""

    def __init__(self, metadata, on_gpu=False):
        self.meta = types.SimpleNamespace(cached_positions=None, shape=None, dtype=None, **metadata)
        self.references = 1
        self.data = numpy.zeros(self.get_size(), numpy.uint8)
        if on_gpu:
            import torch

            self.data = torch.from_numpy(self.data).cuda()

    def get_size(self):
        return self.meta.shapes

    def ref_count_up(self):
        self.references += 1

    def ref_count_down(self):
        self.references -= 1
        assert self.references >= 0

    def get_ref_count(self):
        return self.references

    @property
    def metadata(self):
        return self.meta

    @property
    def raw_tensor(self):
        return self.data
