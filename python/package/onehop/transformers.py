"""transformers: a model whose weights are loaded by onehop, `onehop.transformers.from_pretrained(cls, path)`."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Iterator, Optional, Union

from . import Device, Framework, load_file
from ._stream import torch_name


def from_pretrained(
    cls: Any, path: Union[str, "os.PathLike[str]"], *, device: Device = None, dtype: Any = "auto", **options: Any
) -> Any:
    """Like `cls.from_pretrained(path)`, with weights that onehop has loaded to the device.

    cls: a model's class, or AutoModelForCausalLM and its like. path: a directory on this machine.
    device: as for onehop.load. dtype, options: those of transformers' from_pretrained; `config` may be one of them.
    Parameters whose types do not change are views of the loaded memory.
    """
    import torch
    from transformers import AutoConfig

    path = os.fspath(path)
    config = options.pop("config", None) or AutoConfig.from_pretrained(path, local_files_only=True)
    cls = _concrete(cls, config)
    where = torch_name(torch, device)
    framework: Framework = "torch"
    tensors = load_file(path, where, framework=framework, allocator="torch")
    with _no_warmup():
        model = cls.from_pretrained(
            None, config=config, state_dict=tensors, device_map={"": where}, dtype=_dtype(dtype, config, tensors), **options
        )
    if hasattr(model, "generation_config"):
        _read_generation_config(model, path)
    return model


def _concrete(cls: Any, config: Any) -> Any:
    """The class that an Auto class maps a configuration to."""
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        return cls
    found = mapping[type(config)]
    return found[0] if isinstance(found, (list, tuple)) else found


def _dtype(dtype: Any, config: Any, tensors: Any) -> Any:
    """transformers reads the type of "auto" from a file; here it has none."""
    if dtype != "auto":
        return dtype
    named = getattr(config, "dtype", None)
    if named is not None:
        return named
    return next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), None)


def _read_generation_config(model: Any, path: str) -> None:
    from transformers import GenerationConfig

    if os.path.exists(os.path.join(path, "generation_config.json")):
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)


@contextlib.contextmanager
def _no_warmup() -> Iterator[None]:
    """Prevents transformers from reserving memory for weights that it would load itself."""
    from transformers import modeling_utils

    warmup: Optional[Any] = getattr(modeling_utils, "caching_allocator_warmup", None)
    if warmup is None:
        yield
        return
    modeling_utils.caching_allocator_warmup = lambda *_, **__: None
    try:
        yield
    finally:
        modeling_utils.caching_allocator_warmup = warmup
