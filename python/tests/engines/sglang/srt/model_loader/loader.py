import dataclasses
import glob
import os

from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.weight_utils import (
    buffered_multi_thread_safetensors_weights_iterator,
    safetensors_weights_iterator,
)


class DefaultModelLoader:
    @dataclasses.dataclass
    class Source:
        model_or_path: str
        revision: object = None
        prefix: str = ""

    def __init__(self, load_config):
        unknown = set(load_config.model_loader_extra_config) - {"enable_multithread_load"}
        if unknown:
            raise ValueError(f"refused: {unknown}")
        self.load_config = load_config

    def _get_weights_iterator(self, source):
        files = sorted(glob.glob(os.path.join(source.model_or_path, "*.safetensors")))
        assert self.load_config.load_format == LoadFormat.SAFETENSORS
        if self.load_config.model_loader_extra_config.get("enable_multithread_load", True):
            weights = buffered_multi_thread_safetensors_weights_iterator(files, max_workers=8)
        else:
            weights = safetensors_weights_iterator(files, disable_mmap=True)
        return ((source.prefix + name, tensor) for name, tensor in weights)


class QuantizedLoader(DefaultModelLoader):
    pass


def get_model_loader(load_config, model_config=None):
    return QuantizedLoader(load_config) if model_config else DefaultModelLoader(load_config)
