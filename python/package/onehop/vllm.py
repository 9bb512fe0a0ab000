"""vLLM: `--load-format onehop`. The entry point `vllm.general_plugins` calls `register` in every process of vLLM."""

from __future__ import annotations

import copy
import sys
from typing import Any, Dict, Iterator, Tuple

from . import _engines

_FORMAT = "onehop"


def register() -> None:
    """Registers the load format. May be called again."""
    from vllm.model_executor import model_loader

    if _FORMAT not in getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", ()):
        model_loader.register_model_loader(_FORMAT)(_loader())


def _loader() -> type:
    """The loader's class. Its base is there only in a process that has vLLM."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class OnehopModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's own loader, but onehop loads the tensors."""

        def __init__(self, load_config: Any) -> None:
            self.onehop, others = _engines.split_options(load_config.model_loader_extra_config)
            # The base refuses unknown formats and keys.
            config = copy.copy(load_config)
            config.load_format = "safetensors"
            config.model_loader_extra_config = others
            super().__init__(config)

        def _get_weights_iterator(self, source: Any) -> Any:
            module = sys.modules[DefaultModelLoader.__module__]
            with _engines.reading_by(module, self._iterate):
                return super()._get_weights_iterator(source)

        def _iterate(self, files: Any, *_: Any, local_expert_ids: Any = None, **__: Any) -> Iterator[Tuple[str, Any]]:
            options: Dict[str, Any] = self.onehop
            skips = None
            if local_expert_ids is not None:
                from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

                def skips(name: str) -> bool:
                    return bool(should_skip_weight(name, local_expert_ids))

            on_cpu = str(getattr(self.load_config, "device", None)) == "cpu"
            device = "cpu" if on_cpu else _engines.torch_device()
            return _engines.weights(files, device, options, skips)

    return OnehopModelLoader
