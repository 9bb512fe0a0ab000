"""load_file as safetensors.torch has it: `from onehop.torch import load_file`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict

from . import Device, LoadOptions, Paths
from . import load_file as _load_file
from .errors import RequestError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack


def load_file(
    filename: Paths, device: Device = "cpu", *, backend: str = "mmap", **options: Unpack[LoadOptions]
) -> Dict[str, "torch.Tensor"]:
    """The tensors of a file, as from safetensors.torch.load_file.

    backend is how safetensors reads, and changes nothing here. Also takes the options of onehop.load.
    """
    check_backend(backend)
    return _load_file(filename, _resolved(device), framework="torch", **options)


def _resolved(device: Device) -> Device:
    """`cuda` without a number is torch's current device."""
    import torch

    if isinstance(device, (str, torch.device)) and str(device) == "cuda":
        return torch.cuda.current_device()
    return device


def check_backend(backend: str) -> None:
    """Refuses what safetensors would."""
    if backend not in ("mmap", "pread"):
        raise RequestError(f"unknown backend {backend!r}: expected 'mmap' or 'pread'")
