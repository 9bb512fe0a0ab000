import dataclasses
import glob
import os

from vllm.model_executor.model_loader.weight_utils import (
    fastsafetensors_weights_iterator,
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
        if unknown or load_config.load_format not in ("auto", "safetensors"):
            raise ValueError(f"refused: {load_config.load_format}, {unknown}")
        self.load_config = load_config
        self.local_expert_ids = None

    def _get_weights_iterator(self, source):
        files = sorted(glob.glob(os.path.join(source.model_or_path, "*.safetensors")))
        if self.load_config.load_format == "fastsafetensors":
            weights = fastsafetensors_weights_iterator(files, True)
        else:
            weights = safetensors_weights_iterator(files, True, None, local_expert_ids=self.local_expert_ids)
        return ((source.prefix + name, tensor) for name, tensor in weights)

    def get_all_weights(self, model_config, model):
        yield from self._get_weights_iterator(self.Source(model_config.model))
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)
