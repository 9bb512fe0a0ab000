"""Open files: their contents, single tensors, and slices, compared with safetensors and NumPy."""

import random

import numpy
import onehop
import pytest
import safetensors
import safetensors.numpy
from conftest import random_model, safetensors_file


def test_as_safetensors_has_it(tmp_path):
    path = safetensors_file(tmp_path / "m", random_model(4, ["F32", "I8", "U16", "BOOL"], 20), {"a": "b"})
    with safetensors.safe_open(path, "np") as theirs, onehop.safe_open(path, "np") as ours:
        assert ours.keys() == theirs.keys()
        assert set(ours.offset_keys()) == set(theirs.offset_keys())
        assert ours.metadata() == theirs.metadata()
        for name in theirs.keys():
            array = theirs.get_tensor(name)
            mine = ours.get_tensor(name)
            assert (mine.dtype, mine.shape, mine.tobytes()) == (array.dtype, array.shape, array.tobytes())
            a, b = ours.get_slice(name), theirs.get_slice(name)
            assert (a.get_shape(), a.get_dtype()) == (b.get_shape(), b.get_dtype())
        assert {n: a.tobytes() for n, a in ours.get_tensors().items()} == {
            n: a.tobytes() for n, a in theirs.get_tensors().items()
        }
    safetensors_file(path, {})
    assert onehop.safe_open(path).metadata() is safetensors.safe_open(path, "np").metadata() is None


def indices(dice, shape):
    """A random index of integers, slices and an ellipsis."""
    def one(size):
        kind = dice.randrange(4)
        if kind == 0 and size:
            return dice.randrange(-size, size)
        if kind == 1:
            return slice(None)
        ends = [None, *range(-size - 2, size + 3)]
        return slice(dice.choice(ends), dice.choice(ends), dice.choice([None, 1, 1, 2, 3]))

    index = [one(size) for size in shape[: dice.randrange(len(shape) + 1)]]
    if dice.randrange(2):
        at = dice.randrange(len(index) + 1)
        # After an ellipsis come the last dimensions.
        last = [one(size) for size in shape[len(shape) - (len(index) - at) :]] if at < len(index) else []
        index = [*index[:at], ..., *last]
    return index[0] if len(index) == 1 and dice.randrange(2) else tuple(index)


@pytest.mark.parametrize("seed", range(4))
def test_slices_are_those_of_numpy(tmp_path, device, seed):
    dice = random.Random(seed)
    shapes = [(), (1,), (9,), (4, 7), (5, 1, 6), (3, 4, 2, 5), (2, 0, 3)]
    arrays = {str(i): numpy.arange(numpy.prod(s), dtype=numpy.int32).reshape(s) for i, s in enumerate(shapes)}
    safetensors.numpy.save_file(arrays, tmp_path / "m")
    with onehop.safe_open(tmp_path / "m", device=device) as f:
        for _ in range(80):
            name = dice.choice(list(arrays))
            index = indices(dice, arrays[name].shape)
            expected, tensor = arrays[name][index], f.get_slice(name)[index]
            assert tensor.shape == expected.shape, index
            assert tensor.tobytes() == expected.tobytes(), index
            if device == "cpu":
                taken = numpy.from_dlpack(tensor)
                assert taken.shape == expected.shape and (taken == expected).all()


def read_so_far():
    with open("/proc/self/io") as io:
        return int(io.readline().split()[1])


def test_slices_read_what_they_need(tmp_path, device):
    rows, columns = 4096, 8192
    path = safetensors_file(tmp_path / "m", {"t": ("U8", [rows, columns], bytes(rows * columns))})
    with onehop.safe_open(path, device=device) as f:
        part = f.get_slice("t")
        part[0:1]
        for index, most in [(slice(7, 9), 1 << 20), ((slice(0, 64), slice(0, 128)), 2 << 20)]:
            before = read_so_far()
            part[index]
            assert read_so_far() - before < most


def test_invalid_indices(tmp_path):
    safetensors.numpy.save_file({"t": numpy.zeros((3, 4))}, tmp_path / "m")
    with onehop.safe_open(tmp_path / "m") as f:
        part = f.get_slice("t")
        for bad, error in [
            (3, IndexError), (-4, IndexError), ((0, 0, 0), IndexError), (1 << 70, IndexError), (-1 << 70, IndexError),
            (None, TypeError), ([0, 1], TypeError), (True, TypeError), ("a", TypeError), (slice(None, None, -1), ValueError),
            (slice(None, None, 0), ValueError), ((..., ...), TypeError),
        ]:  # fmt: skip
            with pytest.raises(error):
                part[bad]
        with pytest.raises(KeyError, match="has no tensor"):
            f.get_tensor("u")
        with pytest.raises(onehop.errors.UnknownTensorError):
            f.get_slice("u")


def test_packed_types_are_cut_by_their_bytes(tmp_path, device):
    data = random.Random(1).randbytes(6 * 16)
    safetensors_file(tmp_path / "m", {"t": ("F4", [6, 32], data)})
    with onehop.safe_open(tmp_path / "m", device=device) as f:
        part = f.get_slice("t")
        assert (part.get_shape(), part.get_dtype()) == ([6, 16], "F4")
        array = numpy.frombuffer(data, numpy.uint8).reshape(6, 16)
        assert part[1:3, 4:9].tobytes() == array[1:3, 4:9].tobytes()
        assert f.get_tensor("t").logical_shape == (6, 32)


def test_streams_of_open_files(tmp_path, device):
    tensors = random_model(9, count=10)
    with onehop.safe_open(safetensors_file(tmp_path / "m", tensors), device=device) as f:
        for _ in range(2):
            assert {n: t.tobytes() for n, t in f.stream()} == {n: d for n, (_, _, d) in tensors.items()}
        wanted = next(iter(tensors))
        assert [n for n, _ in f.stream(names=wanted)] == [wanted]


def test_files_are_closed_after_their_with(tmp_path):
    safetensors.numpy.save_file({"t": numpy.arange(12.0).reshape(3, 4)}, tmp_path / "m")
    with safetensors.safe_open(tmp_path / "m", "np") as theirs, onehop.safe_open(tmp_path / "m", "np") as ours:
        parts = [f.get_slice("t") for f in (theirs, ours)]
        stream = ours.stream()
    for use in [
        lambda f: f.keys(), lambda f: f.offset_keys(), lambda f: f.metadata(), lambda f: f.get_tensor("t"),
        lambda f: f.get_slice("t"), lambda f: f.get_tensors(),
    ]:  # fmt: skip
        with pytest.raises(safetensors.SafetensorError, match="closed"):
            use(theirs)
        with pytest.raises(onehop.errors.RequestError, match="closed"):
            use(ours)
    with pytest.raises(ValueError, match="closed"):
        ours.stream()
    # Slices and streams stay valid.
    assert [(part[1:2] == [[4, 5, 6, 7]]).all() for part in parts] == [True, True]
    assert [name for name, _ in stream] == ["t"]
