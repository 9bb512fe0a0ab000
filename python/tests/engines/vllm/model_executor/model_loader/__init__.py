"""A mock of what onehop uses of vLLM. `signatures.py` compares it with a real one."""

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

_LOAD_FORMAT_TO_MODEL_LOADER = {"auto": DefaultModelLoader, "safetensors": DefaultModelLoader}


def register_model_loader(load_format):
    def register(cls):
        _LOAD_FORMAT_TO_MODEL_LOADER[load_format] = cls
        return cls

    return register


def get_model_loader(load_config):
    return _LOAD_FORMAT_TO_MODEL_LOADER[load_config.load_format](load_config)
