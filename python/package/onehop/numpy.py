"""load_file as safetensors.numpy has it: `from onehop.numpy import load_file`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

from . import LoadOptions, Paths
from . import load_file as _load_file
from .torch import check_backend as _check_backend

if TYPE_CHECKING:
    import numpy
    from typing_extensions import Unpack


def load_file(
    filename: Paths, *, backend: str = "mmap", **options: Unpack[LoadOptions]
) -> Dict[str, "numpy.ndarray[Any, Any]"]:
    """The tensors of a file, as from safetensors.numpy.load_file, and BF16 and F8 with ml_dtypes.

    backend is how safetensors reads, and changes nothing here. Also takes the options of onehop.load.
    """
    _check_backend(backend)
    return _load_file(filename, "cpu", framework="numpy", **options)
