"""`with onehop.patch():` makes programs open safetensors files by onehop."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterator, List, Tuple

from . import Device, safe_open


class _SafeOpen(safe_open):
    """Takes the arguments of safetensors' own. `backend` selects how that reads."""

    def __init__(self, filename: Any, framework: Any = None, device: Device = "cpu", **_: Any) -> None:
        super().__init__(filename, framework, device)


@contextlib.contextmanager
def patch() -> Iterator[None]:
    """Replaces safe_open and load_file of safetensors, also in the modules that imported them, within the block.

    It affects all threads, so do not use two of them at once.
    """
    import safetensors

    from .numpy import load_file as numpy_load_file

    ours: List[Tuple[Any, Any]] = [(safetensors.safe_open, _SafeOpen)]
    for name in ("safetensors.torch", "safetensors.numpy"):
        module = sys.modules.get(name)
        if module is None:
            continue
        if name == "safetensors.torch":
            from .torch import load_file

            ours.append((module.load_file, load_file))
        else:
            ours.append((module.load_file, numpy_load_file))
    undo: List[Tuple[Any, str, Any]] = []
    try:
        for module in list(sys.modules.values()):
            if module is None or getattr(module, "__name__", "").split(".")[0] == __package__:
                continue
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                for theirs, replacement in ours:
                    if value is theirs:
                        undo.append((module, attribute, value))
                        setattr(module, attribute, replacement)
        yield
    finally:
        for module, attribute, value in undo:
            setattr(module, attribute, value)
