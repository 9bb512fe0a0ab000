"""`with onehop.patch():` programs that open safetensors files do it by onehop."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterator, List, Tuple

from . import Device, safe_open


class _SafeOpen(safe_open):
    """With the arguments of safetensors' own, of which `backend` says how it would read."""

    def __init__(self, filename: Any, framework: Any = None, device: Device = "cpu", **_: Any) -> None:
        super().__init__(filename, framework, device)


@contextlib.contextmanager
def patch() -> Iterator[None]:
    """Replaces safe_open and load_file of safetensors, in the modules that have bound them too, until it is left.

    What is loaded before or after is not concerned. Other threads are, so do not use two of them at once.
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
