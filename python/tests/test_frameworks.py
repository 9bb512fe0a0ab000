"""Each library of this machine, on each device that it supports: the bytes, and that none were copied."""

import random

import numpy
import onehop
from conftest import random_tensor, safetensors_file

#: The types that every library supports.
COMMON = ["U8", "I8", "I16", "I32", "F16", "F32"]


def on_host(framework, tensor):
    """A copy of a library's tensor, for NumPy."""
    if framework == "torch":
        return tensor.cpu().numpy()
    return tensor.get() if framework == "cupy" else numpy.asarray(tensor)


def pointer(framework, tensor):
    if framework == "torch":
        return tensor.data_ptr()
    if framework == "cupy":
        return tensor.data.ptr
    return tensor.unsafe_buffer_pointer() if framework == "jax" else tensor.ctypes.data


def model(tmp_path, seed=3):
    dice = random.Random(seed)
    tensors = {f"{i}": random_tensor(dice, dice.choice(COMMON), [dice.randrange(1, 40), 64]) for i in range(30)}
    return safetensors_file(tmp_path / "m", tensors, pad=5), tensors


def test_bytes_and_no_copies(tmp_path, framework, device):
    path, tensors = model(tmp_path)
    plain = onehop.load_file(path, device)
    loaded = onehop.load_file(path, device, framework=framework)
    assert list(loaded) == list(tensors)
    for name, (_, shape, data) in tensors.items():
        assert on_host(framework, loaded[name]).tobytes() == data
        assert tuple(loaded[name].shape) == tuple(shape)
    convert = onehop._frameworks.converter(framework)
    for tensor in plain.values():
        assert pointer(framework, convert(tensor)) == pointer(framework, convert(tensor))


def test_converted_tensors_outlive_the_load(tmp_path, framework, device):
    path, tensors = model(tmp_path)
    for round in range(3):
        kept = dict(list(onehop.stream(path, device, framework=framework))[:3])
    for name, tensor in kept.items():
        assert on_host(framework, tensor).tobytes() == tensors[name][2]


def test_a_tensor_is_dropped_while_work_reads_it(tmp_path, framework, device):
    data = random.Random(0).randbytes(16 << 20)
    path = safetensors_file(tmp_path / "m", {"t": ("U8", [4096, 4096], data)})
    for _ in range(3):
        tensor = onehop.load_file(path, device, framework=framework)["t"]
        copies = [tensor + 0 for _ in range(32)]
        del tensor
        assert on_host(framework, copies[-1]).tobytes() == data


def test_slices(tmp_path, framework, device):
    array = numpy.arange(24 * 16, dtype=numpy.float32).reshape(24, 16)
    path = safetensors_file(tmp_path / "m", {"t": ("F32", [24, 16], array.tobytes())})
    with onehop.safe_open(path, framework, device) as f:
        part = f.get_slice("t")
        for index in [(slice(2, 9), slice(4, 8)), 5, (..., 3), slice(3, 4), ...]:
            assert numpy.array_equal(on_host(framework, part[index]), array[index])
