"""Replaces weights in place: reinforcement learning, hot swaps."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional

from . import Device, Paths, Stream, _stream, errors, safe_open
from ._native import Outcome


class Model:
    """Files whose tensors replace those of a loaded model."""

    def __init__(self, path: Paths) -> None:
        self._path = path

    def reload(self, into: Mapping[str, Any], device: Device = None, *, max_bytes: int = 1 << 30, **options: Any) -> Outcome:
        """Copies the tensors of the files into those of `into`, by name, on the current stream. The files are reopened.

        All names, and without `cuts` all shapes, are compared before anything is written. A later failure raises
        SwapError, which lists the tensors already new.
        """
        import torch

        opened = safe_open(self._path, framework="pt", device=_device_of(into) if device is None else device)
        names = set(opened.keys())
        missing = [name for name in into if name not in names]
        if missing:
            raise errors.UnknownTensorError(f"the files have no tensor {missing[0]!r}, nor {len(missing) - 1} others of `into`")
        is_cut = bool(options.get("cuts"))
        for name, target in into.items():
            shape = opened.get_slice(name).get_shape()
            # Shapes after cuts are known when the tensors arrive.
            if not is_cut and list(target.shape) != shape:
                raise errors.RequestError(f"{_stream.misfit(name, shape, target)}: nothing was written")
        new: List[str] = []
        stream: Optional[Stream] = None
        try:
            stream = opened.stream(names=list(into), max_bytes=max_bytes, **options)
            with torch.no_grad(), stream:
                while (found := next(stream, None)) is not None:
                    _stream.copy_tensor(found[0], found[1], into[found[0]])
                    new.append(found[0])
                    del found
        except Exception as error:
            done = set(new)
            raise errors.SwapError(error, new, [name for name in into if name not in done]) from error
        outcome = stream.outcome
        assert outcome is not None
        return outcome


def _device_of(into: Mapping[str, Any]) -> str:
    return next((str(tensor.device) for tensor in into.values()), "cpu")
