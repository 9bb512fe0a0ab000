"""What the plugins of serving engines share: users' options, and an iterator in place of the engine's own."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from . import Framework, Stream, errors, safe_open

#: Memory that a load takes besides the parameters.
_MAX_BYTES = 1 << 30

#: The framework of engines.
FRAMEWORK: Framework = "pt"

#: Our options in `model_loader_extra_config`, and their types.
_OPTIONS: Dict[str, Tuple[type, ...]] = {"max_bytes": (int,), "route": (str,), "threads": (int,)}

#: How names of the engines' iterators over safetensors files end, in any version.
_ITERATORS = "safetensors_weights_iterator"
#: Those of other loaders, which engines use for other formats.
_OTHERS = ("fastsafetensors_weights_iterator",)

_lock = threading.Lock()

#: Whether to skip a tensor of this name.
Skips = Callable[[str], bool]


def split_options(extra: Optional[Mapping[str, Any]]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Our options, checked, and the others."""
    ours: Dict[str, Any] = {}
    others: Dict[str, Any] = {}
    for name, value in (extra or {}).items():
        if name not in _OPTIONS:
            others[name] = value
        elif isinstance(value, bool) or not isinstance(value, _OPTIONS[name]):
            wanted = " or ".join(kind.__name__ for kind in _OPTIONS[name])
            raise errors.RequestError(f"model_loader_extra_config: {name} is {value!r}, expected {wanted}")
        else:
            ours[name] = value
    return ours, others


def weights(
    files: Sequence[str], device: Any, options: Mapping[str, Any], skips: Optional[Skips] = None
) -> Iterator[Tuple[str, Any]]:
    """The tensors of safetensors files, as engines iterate over them, in memory that is reused."""
    try:
        opened = safe_open(list(files), framework=FRAMEWORK, device=device)
    except errors.FormatError:
        if len(files) < 2:
            raise
        # Files with the same names, which engines read one by one.
        for file in files:
            yield from weights([file], device, options, skips)
        return
    wanted: Dict[str, Any] = {}
    if skips is not None:
        names = opened.keys()
        kept = [name for name in names if not skips(name)]
        if not kept:
            return
        if len(kept) < len(names):
            wanted["names"] = kept
    chosen: Dict[str, Any] = {"max_bytes": _MAX_BYTES, **options, **wanted}
    stream: Stream = opened.stream(**chosen)
    with stream:
        # Not `for`, which would keep each tensor while waiting for the next one.
        while (found := next(stream, None)) is not None:
            yield found
            del found


def torch_device() -> Any:
    """The device of this process's model."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def reading_by(module: Any, iterator: Callable[..., Iterable[Tuple[str, Any]]]) -> Iterator[None]:
    """Replaces the iterators over safetensors files in an engine's module within this block. Files, prefixes and
    counters stay the engine's own."""
    names: List[str] = [
        name for name in vars(module) if name.endswith(_ITERATORS) and name not in _OTHERS and callable(vars(module)[name])
    ]
    if not names:
        raise errors.OnehopError(
            f"{module.__name__} has no {_ITERATORS}: onehop does not support this version of the engine"
        )
    with _lock:
        before = {name: vars(module)[name] for name in names}
        try:
            for name in names:
                setattr(module, name, iterator)
            yield
        finally:
            for name, function in before.items():
                setattr(module, name, function)
