"""SGLang: `--load-format onehop`. The entry point `sglang.srt.plugins` calls `register` in every process of SGLang."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Callable, Iterator, Tuple

from . import _engines, errors

_FORMAT = "onehop"
#: Where versions of SGLang keep the list of formats that the command line takes.
_CHOICES = ("sglang.srt.arg_groups.choices", "sglang.srt.server_args")


def register() -> None:
    """Registers the load format, and hooks into SGLang's checks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _add_choice()
    around = HookType.AROUND
    HookRegistry.register("sglang.srt.configs.load_config.LoadConfig._verify_load_format", _verify_load_format, around)
    HookRegistry.register("sglang.srt.model_loader.loader.get_model_loader", _get_model_loader, around)


def _add_choice() -> None:
    for name in _CHOICES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        add = getattr(module, "add_load_format_choices", None)
        if add is not None:
            if _FORMAT not in getattr(module, "LOAD_FORMAT_CHOICES", ()):
                add([_FORMAT])
            return
    raise errors.OnehopError("SGLang has no list of load formats to add to: onehop does not support this version")


def _verify_load_format(original: Callable[..., Any], config: Any) -> Any:
    """A LoadConfig of our format becomes a marked safetensors one."""
    if str(config.load_format).lower() == _FORMAT:
        ours, others = _engines.split_options(config.model_loader_extra_config)
        config.onehop = ours
        config.model_loader_extra_config = others
        config.load_format = "safetensors"
    return original(config)


def _get_model_loader(original: Callable[..., Any], load_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces SGLang's default loader by ours. Loaders for quantisation stay."""
    loader = original(load_config, *args, **kwargs)
    if getattr(load_config, "onehop", None) is None:
        return loader
    from sglang.srt.model_loader.loader import DefaultModelLoader

    # A subclass, as updates of weights from disk require.
    return _loader()(load_config) if type(loader) is DefaultModelLoader else loader


def _loader() -> type:
    from sglang.srt.model_loader.loader import DefaultModelLoader

    class OnehopModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """SGLang's own loader, but onehop loads the tensors."""

        def _get_weights_iterator(self, source: Any) -> Any:
            module = sys.modules[DefaultModelLoader.__module__]
            with _engines.reading_by(module, self._iterate):
                return super()._get_weights_iterator(source)

        def _iterate(self, files: Any, *_: Any, **__: Any) -> Iterator[Tuple[str, Any]]:
            return _engines.weights(files, _engines.torch_device(), self.load_config.onehop)

    return OnehopModelLoader
