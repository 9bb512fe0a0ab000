"""DLPack capsules, read as C reads them, and the lifetime of their memory."""

import ctypes
import gc
import random

import numpy
import onehop
import pytest
from conftest import DTYPES, random_tensor, safetensors_file


class DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DlTensor),
    ]  # fmt: skip


class Legacy(ctypes.Structure):
    _fields_ = [("tensor", DlTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


def read(capsule):
    """The contents of a capsule, which must outlive the result."""
    name, layout = (b"dltensor_versioned", Versioned) if "dltensor_versioned" in repr(capsule) else (b"dltensor", Legacy)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return layout.from_address(pointer(capsule, name))


def load(tmp_path, device, dtype="F32", shape=(2, 3, 5)):
    tensor = random_tensor(random.Random(2), dtype, list(shape))
    return onehop.load_file(safetensors_file(tmp_path / "m", {"t": tensor}), device)["t"], tensor[2]


#: DLDataTypeCode, from dlpack.h 1.1.
CODES = {
    "BOOL": 6, "U8": 1, "I8": 0, "I16": 0, "U16": 1, "F16": 2, "BF16": 4, "I32": 0, "U32": 1, "F32": 2, "C64": 5,
    "F64": 2, "I64": 0, "U64": 1, "F8_E4M3": 10, "F8_E4M3FNUZ": 11, "F8_E5M2": 12, "F8_E5M2FNUZ": 13, "F8_E8M0": 14,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", [None, (1, 0), (1, 3), (2, 0)])
def test_capsule_contents(tmp_path, device, dtype, version):
    tensor, data = load(tmp_path, device, dtype)
    capsule = tensor.__dlpack__(max_version=version)
    content = read(capsule)
    if version is None:
        assert isinstance(content, Legacy)
    else:
        assert (content.major, content.minor, content.flags) == (1, 0 if version == (1, 0) else 1, 0)
    inner = content.tensor
    packed = dtype in ("F4", "F6_E2M3", "F6_E3M2")
    assert (inner.code, inner.bits, inner.lanes) == ((1, 8, 1) if packed else (CODES[dtype], DTYPES[dtype], 1))
    assert (inner.kind, inner.id) == tensor.__dlpack_device__() == ((1, 0) if device == "cpu" else (2, 0))
    shape = tuple(inner.shape[i] for i in range(inner.ndim))
    assert shape == tensor.shape == ((2, 3, 5, 4 * DTYPES[dtype] // 8) if packed else (2, 3, 5))
    assert tuple(inner.strides[i] for i in range(inner.ndim)) == tensor.strides
    assert inner.data % 64 == 0 and inner.byte_offset == 0
    if device == "cpu":
        assert ctypes.string_at(inner.data, len(data)) == data


def test_streams_are_checked(tmp_path, device):
    tensor, _ = load(tmp_path, device)
    for good in [None, -1] + ([] if device == "cpu" else [1, 2, 0x5555]):
        tensor.__dlpack__(stream=good)
    for bad in [0, -2] + ([1] if device == "cpu" else []):
        with pytest.raises(ValueError, match="stream"):
            tensor.__dlpack__(stream=bad)


def test_two_imports_share_memory(tmp_path):
    tensor, data = load(tmp_path, "cpu")
    one, two = numpy.from_dlpack(tensor), numpy.from_dlpack(tensor)
    assert one.ctypes.data == two.ctypes.data and one.tobytes() == data
    one[0, 0, 0] = 42
    assert two[0, 0, 0] == 42 and onehop.Tensor.tobytes(tensor) == one.tobytes()


def test_copies_are_made_on_request(tmp_path, device):
    tensor, data = load(tmp_path, device)
    capsule = tensor.__dlpack__(max_version=(1, 1), dl_device=(1, 0), copy=True)
    content = read(capsule)
    assert (content.flags, content.tensor.kind) == (2, 1)
    assert ctypes.string_at(content.tensor.data, len(data)) == data
    if device == "cpu":
        assert content.tensor.data != read(tensor.__dlpack__()).tensor.data
        copy = numpy.from_dlpack(tensor, copy=True)
        copy[...] = 0
        assert tensor.tobytes() == data
    else:
        assert numpy.from_dlpack(tensor, device="cpu").tobytes() == data
        with pytest.raises(BufferError):
            tensor.__dlpack__(dl_device=(1, 0), copy=False)
        with pytest.raises(BufferError):
            tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        tensor.__dlpack__(dl_device=(2, 7))


def test_memory_lives_as_long_as_its_users(tmp_path):
    tensor, data = load(tmp_path, "cpu")
    array = numpy.from_dlpack(tensor)[1:]
    del tensor
    gc.collect()
    # Freed memory would most likely be reused by now.
    others = [load(tmp_path, "cpu")[0] for _ in range(20)]
    assert array.tobytes() == data[len(data) // 2 :] and len(others) == 20


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_memory_is_freed_after_its_last_user(tmp_path, device):
    size = 32 << 20
    path = safetensors_file(tmp_path / "m", {"t": ("U8", [size], bytes(size))})
    for i in range(24):
        if i == 4:
            before = resident()
        tensor = onehop.load_file(path, device)["t"]
        never_taken = [tensor.__dlpack__(), tensor.__dlpack__(max_version=(1, 1))]
        if device == "cpu":
            taken = numpy.from_dlpack(tensor)
            del taken
        del tensor, never_taken
    gc.collect()
    assert resident() - before < 5 * size


def test_other_types_of_the_same_width(tmp_path):
    tensor, data = load(tmp_path, "cpu", "BF16")
    array = numpy.from_dlpack(tensor.view_as("I16"))
    assert array.dtype == numpy.int16 and array.tobytes() == data and tensor.dtype == "BF16"
    for bad in ["F32", "F4", "Q8_0", "nonsense"]:
        with pytest.raises(onehop.errors.RequestError):
            tensor.view_as(bad)
