"""Converts onehop.Tensor to tensors of other libraries, without copies.

DLPack has a code for nearly every type of model files, but not every library knows every code. Where it does not, it
imports integers of the same width, and views them as their real type.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

from ._native import Tensor
from .errors import RequestError

#: The integers that stand in for a type.
_CARRIERS: Dict[str, str] = {
    "BOOL": "U8",
    "BF16": "I16",
    "U16": "I16",
    "U32": "I32",
    "U64": "I64",
    "F8_E4M3": "U8",
    "F8_E4M3FNUZ": "U8",
    "F8_E5M2": "U8",
    "F8_E5M2FNUZ": "U8",
    "F8_E8M0": "U8",
}

#: What torch calls the types that it imports as integers.
_TORCH: Dict[str, str] = {
    "BOOL": "bool",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}

#: What ml_dtypes calls the types that NumPy does not have.
_ML_DTYPES: Dict[str, str] = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def _viewable(tensor: Tensor, library: Any, types: Dict[str, str], what: str) -> Tuple[Tensor, Any]:
    """The tensor for a library, and the type to view it as there."""
    if tensor.dtype not in types:
        return tensor, None
    dtype = getattr(library, types[tensor.dtype], None)
    if dtype is None:
        raise RequestError(
            f"{what} has no {types[tensor.dtype]}, the type of the tensor {tensor.name!r}; load it with framework=None"
        )
    carrier = _CARRIERS.get(tensor.dtype)
    return (tensor if carrier is None else tensor.view_as(carrier)), dtype


#: torch's names for types that it imports by DLPack.
_TORCH_OWN: Dict[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
}  # fmt: skip

#: How `framework=` names torch.
TORCH_NAMES = ("torch", "pt")


def torch_dtype(torch: Any, dtype: str) -> Any:
    """torch's type for one of a model file. Types that torch lacks become bytes."""
    name = _TORCH.get(dtype) or _TORCH_OWN.get(dtype) or "uint8"
    found = getattr(torch, name, None)
    if found is None:
        raise RequestError(f"this torch has no {name}, the type of tensors of the model; load them with framework=None")
    return found


def to_torch(tensor: Tensor) -> Any:
    """As a torch.Tensor. Types that torch lacks (F6, those of GGML) become bytes: uint8."""
    import torch

    given, dtype = _viewable(tensor, torch, _TORCH, "this torch")
    # All bytes have arrived, so no stream has to wait: a fifth of the time.
    taken = torch.utils.dlpack.from_dlpack(given.capsule())
    if not given.is_contiguous:
        # As in safetensors. The copy also frees the bytes read between the elements.
        taken = taken.contiguous()
    return taken if dtype is None else taken.view(dtype)


def to_numpy(tensor: Tensor) -> Any:
    """As a numpy.ndarray. Types that NumPy lacks are those of ml_dtypes; other types become bytes: uint8."""
    import numpy

    if tensor.device != "cpu":
        raise RequestError(f"NumPy cannot access {tensor.device}: load to device='cpu'")
    given, dtype = tensor, None
    if tensor.dtype in _ML_DTYPES:
        try:
            import ml_dtypes
        except ImportError:
            raise RequestError(
                f"NumPy has no type for the {tensor.dtype} of the tensor {tensor.name!r}: pip install ml_dtypes"
            ) from None
        given, dtype = _viewable(tensor, ml_dtypes, _ML_DTYPES, "this ml_dtypes")
    elif tensor.dtype == "BOOL":
        given, dtype = tensor.view_as("U8"), numpy.bool_
    taken = numpy.from_dlpack(given)
    return taken if dtype is None else taken.view(dtype)


def _array(self: Tensor, dtype: Any = None, copy: Optional[bool] = None) -> Any:
    """For numpy.asarray."""
    import numpy

    if self.device != "cpu":
        raise TypeError(f"NumPy cannot access {self.device}: load the tensor to device='cpu'")
    array = to_numpy(self)
    if dtype is not None and array.dtype != dtype:
        if copy is False:
            raise ValueError(f"{array.dtype} to {numpy.dtype(dtype)} needs a copy, and copy=False forbids it")
        return array.astype(dtype)
    return array.copy() if copy else array


# Not a native method that calls this: at exit Python ends daemon threads that run Python code, and the process aborts
# if native code is on such a thread's stack.
Tensor.__array__ = _array  # type: ignore[method-assign]


def to_cupy(tensor: Tensor) -> Any:
    """As a cupy.ndarray. CuPy refuses types that it does not have."""
    import cupy

    return cupy.from_dlpack(tensor)


def to_jax(tensor: Tensor) -> Any:
    """As a jax.Array."""
    import jax

    return jax.dlpack.from_dlpack(tensor)


_BY_NAME: Dict[str, Callable[[Tensor], Any]] = {
    "pt": to_torch,
    "torch": to_torch,
    "np": to_numpy,
    "numpy": to_numpy,
    "cupy": to_cupy,
    "jax": to_jax,
    "flax": to_jax,
}


def converter(framework: Optional[str]) -> Callable[[Tensor], Any]:
    """The converter to a framework."""
    if framework is None:
        return lambda tensor: tensor
    if framework not in _BY_NAME:
        raise RequestError(f"unknown framework {framework!r}: expected one of {', '.join(_BY_NAME)}, or None")
    return _BY_NAME[framework]
