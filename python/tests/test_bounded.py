"""Streams in reused memory: every byte, the bound, and consumers that keep tensors."""

import gc
import random
import threading

import numpy
import onehop
import pytest
from conftest import random_model, safetensors_file

KIB = 1 << 10


def rows(count, nbytes, seed=1):
    """Tensors of U8 of one length."""
    dice = random.Random(seed)
    return {f"t.{i:04}": ("U8", [nbytes], dice.randbytes(nbytes)) for i in range(count)}


@pytest.mark.parametrize("max_bytes", [1, 4096, 100_000, 1 << 30])
@pytest.mark.parametrize("route", ["cpu/cached", "auto"])
def test_all_bytes_arrive(tmp_path, max_bytes, route):
    tensors = random_model(9, count=60)
    tensors |= rows(40, 30_001)
    path = safetensors_file(tmp_path / "m", tensors, pad=5)
    found = {}
    with onehop.stream(path, "cpu", max_bytes=max_bytes, route=route) as stream:
        for name, tensor in stream:
            found[name] = tensor.tobytes()
            del tensor
    assert found == {name: data for name, (_, _, data) in tensors.items()}
    assert stream.outcome.bytes == sum(len(data) for _, _, data in tensors.values())


def test_memory_is_reused(tmp_path):
    path = safetensors_file(tmp_path / "m", rows(256, 64 * KIB))
    places = set()
    with onehop.stream(path, "cpu", framework="numpy", max_bytes=1024 * KIB) as stream:
        for _, array in stream:
            places.add(array.__array_interface__["data"][0])
            del array
        assert stream.grown == 0 and not stream.outcome.warnings
    assert max(places) - min(places) < 1024 * KIB


def test_kept_tensors_stay_and_are_reported(tmp_path):
    tensors = rows(64, 64 * KIB)
    path = safetensors_file(tmp_path / "m", tensors)
    with onehop.stream(path, "cpu", framework="numpy", max_bytes=256 * KIB) as stream:
        kept = dict(stream)
    assert {name: array.tobytes() for name, array in kept.items()} == {n: d for n, (_, _, d) in tensors.items()}
    assert stream.grown >= (64 * 64 - 256) * KIB
    assert any("grew" in line for line in stream.outcome.warnings)


def test_every_second_tensor_is_kept(tmp_path):
    tensors = rows(100, 50_000)
    path = safetensors_file(tmp_path / "m", tensors)
    kept = {}
    with onehop.stream(path, "cpu", framework="numpy", max_bytes=400_000) as stream:
        for i, (name, array) in enumerate(stream):
            if i % 2:
                kept[name] = array
            del array
    assert len(kept) == 50 and all(array.tobytes() == tensors[name][2] for name, array in kept.items())


def test_a_tensor_longer_than_the_bound_arrives(tmp_path):
    tensors = rows(10, 20_000) | {"z.large": ("U8", [3_000_000], bytes(3_000_000))} | rows(10, 20_001, seed=2)
    path = safetensors_file(tmp_path / "m", tensors)
    with onehop.stream(path, "cpu", max_bytes=65_536) as stream:
        assert {name: tensor.tobytes() for name, tensor in stream} == {n: d for n, (_, _, d) in tensors.items()}
    assert 3_000_000 <= stream.grown < 4_000_000


def test_cut_tensors_in_bounded_memory(tmp_path):
    tensors = {f"t{i}": ("U8", [64, 96], random.Random(i).randbytes(64 * 96)) for i in range(30)}
    path = safetensors_file(tmp_path / "m", tensors)
    for rank in range(4):
        with onehop.stream(path, "cpu", framework="numpy", rank=(rank, 4), cuts={"*": 1}, max_bytes=20_000) as stream:
            for name, array in stream:
                whole = numpy.frombuffer(tensors[name][2], "u1").reshape(64, 96)
                assert numpy.array_equal(array, whole[:, rank * 24 : rank * 24 + 24])


def test_a_thread_that_drops_late_lets_the_stream_go_on(tmp_path):
    path = safetensors_file(tmp_path / "m", rows(64, 64 * KIB))
    stream = onehop.stream(path, "cpu", max_bytes=256 * KIB)
    held = [next(stream)]
    # Dropped from another thread, while this one waits.
    threading.Timer(0.05, held.clear).start()
    assert len(list(name for name, _ in stream)) == 63
    gc.collect()


def test_leaving_a_bounded_stream_ends_it(tmp_path):
    path = safetensors_file(tmp_path / "m", rows(64, 64 * KIB))
    for _ in range(20):
        with onehop.stream(path, "cpu", max_bytes=256 * KIB) as stream:
            name, tensor = next(stream)
        with pytest.raises(onehop.errors.CancelledError):
            next(stream)
        assert len(tensor.tobytes()) == 64 * KIB


class FakeTensor:
    """Acts as a tensor of 128 bytes."""

    def data_ptr(self):
        return 4096

    def numel(self):
        return 64

    def element_size(self):
        return 2


@pytest.mark.parametrize("at, nbytes", [(4097, 64), (0, 64), (4096, 129), (4096, (1 << 64) - 1)])
def test_memory_that_is_not_its_owners_is_refused(tmp_path, at, nbytes):
    path = safetensors_file(tmp_path / "m", rows(8, 4 * KIB))
    with onehop.stream(path, "cpu", max_bytes=16 * KIB) as stream:
        with pytest.raises(onehop.errors.RequestError, match="not those of a tensor of 128 bytes at 0x1000"):
            stream._job.bring(at, nbytes, FakeTensor())
        with pytest.raises(AttributeError):
            stream._job.bring(at, nbytes, object())
        assert len([name for name, _ in stream]) == 8


@pytest.mark.parametrize(
    "options", [{"max_bytes": 0}, {"max_bytes": 1000, "verify": True}, {"max_bytes": 1000, "manifest": "m.json"}]
)
def test_invalid_options_are_refused(tmp_path, options):
    path = safetensors_file(tmp_path / "m", rows(1, 10))
    with pytest.raises(onehop.errors.RequestError):
        onehop.stream(path, "cpu", **options)
    with pytest.raises(onehop.errors.RequestError):
        onehop.load(path, "cpu", max_bytes=1000)


def test_cufile_does_not_divide_its_arena(tmp_path):
    path = safetensors_file(tmp_path / "m", rows(4, 1000))
    with pytest.raises(onehop.errors.RouteError, match="max_bytes"):
        list(onehop.stream(path, "cpu", max_bytes=1000, route="cufile"))


def test_a_gpu_without_torch_is_refused(tmp_path, device):
    if device == "cpu":
        pytest.skip("the CPU's memory needs no fences")
    path = safetensors_file(tmp_path / "m", rows(4, 1000))
    with pytest.raises(onehop.errors.RequestError, match="torch"):
        list(onehop.stream(path, device, max_bytes=1000))
