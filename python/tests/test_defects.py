"""Bugs that users found."""

import contextlib
import copy
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import types
from collections import deque

import numpy
import onehop
import pytest
import safetensors
from conftest import random_model, safetensors_file
from onehop import _stream, errors


def test_a_file_object_is_not_a_path(tmp_path):
    path = safetensors_file(tmp_path / "m", random_model(1))
    with open(path, "rb") as file, pytest.raises(TypeError, match="path"):
        onehop.load(file, "cpu")
    for nothing, error in ((None, TypeError), (5, TypeError), ([], errors.RequestError)):
        with pytest.raises(error, match="path"):
            onehop.load(nothing, "cpu")


def test_numpy_asarray(tmp_path):
    data = numpy.arange(12, dtype="f4").reshape(3, 4)
    path = safetensors_file(tmp_path / "m", {"a": ("F32", [3, 4], data.tobytes())})
    tensor = onehop.load_file(path, "cpu")["a"]
    array = numpy.asarray(tensor)
    assert array.dtype == numpy.float32 and numpy.array_equal(array, data)
    assert numpy.array_equal(numpy.asarray(tensor, dtype="f8"), data) and numpy.array_equal(numpy.array(tensor), data)
    copied = numpy.array(tensor)
    copied[0, 0] = 99
    assert numpy.asarray(tensor)[0, 0] == 0
    with pytest.raises(ValueError, match="copy"):
        tensor.__array__("f8", copy=False)


def test_asarray_of_a_gpu_tensor(tmp_path, device):
    tensor = onehop.load_file(safetensors_file(tmp_path / "m", {"a": ("U8", [2], b"ab")}), device)["a"]
    if device == "cpu":
        assert numpy.asarray(tensor).tobytes() == b"ab"
    else:
        with pytest.raises(TypeError, match="cpu"):
            numpy.asarray(tensor)


def test_errors_are_also_those_of_safetensors(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(b"nonsense")
    with pytest.raises(safetensors.SafetensorError) as caught:
        onehop.load(tmp_path / "m.safetensors", "cpu")
    assert isinstance(caught.value, errors.FormatError) and isinstance(caught.value, ValueError)
    with pytest.raises(FileNotFoundError):
        onehop.load(tmp_path / "none", "cpu")


def test_without_safetensors_errors_are_exceptions(tmp_path):
    script = "import sys; sys.modules['safetensors'] = None\nimport onehop\nprint(onehop.OnehopError.__mro__[1].__name__)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "Exception", ran.stderr


def test_pickle(tmp_path):
    path = safetensors_file(tmp_path / "m", random_model(1))
    loaded = onehop.load(path, "cpu", route="cpu/cached")
    for again in (pickle.loads(pickle.dumps(loaded.outcome)), copy.deepcopy(loaded.outcome)):
        for name in dir(loaded.outcome):
            if not name.startswith("_") and name not in ("limit", "why_not_better"):
                assert getattr(again, name) == getattr(loaded.outcome, name), name
        assert again.limit.what == loaded.outcome.limit.what
    with pytest.raises(TypeError, match="fields|missing|format"):
        type(loaded.outcome)({})
    with pytest.raises(TypeError, match="framework"):
        pickle.dumps(next(iter(loaded.tensors.values())))
    for make in (lambda: onehop.load(tmp_path / "none", "cpu"), lambda: onehop.load(path, "cpu", names="nothing")):
        with pytest.raises(errors.OnehopError) as caught:
            make()
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is type(caught.value) and str(again) == str(caught.value)
    swap = pickle.loads(pickle.dumps(errors.SwapError("why", ["a"], ["b", "c"])))
    assert (swap.new, swap.old, str(swap)) == (["a"], ["b", "c"], "1 tensors are new, 2 are old: why")


def test_thousands_of_names_and_cuts(tmp_path):
    names = [f"model.layers.{i}.weight" for i in range(32_000)]
    path = safetensors_file(tmp_path / "m", {name: ("U8", [2], b"ab") for name in names})
    start = time.monotonic()
    loaded = onehop.load_file(path, "cpu", names=names[:-1], rank=(0, 2), cuts={name: 0 for name in names[:-1]})
    assert len(loaded) == 31_999 and loaded[names[7]].tobytes() == b"a"
    assert time.monotonic() - start < 10


def test_cpu_0_is_the_cpu(tmp_path):
    path = safetensors_file(tmp_path / "m", {"a": ("U8", [2], b"ab")})
    assert onehop.load_file(path, "cpu:0")["a"].device == "cpu"
    with pytest.raises(errors.RequestError):
        onehop.load_file(path, "cpu:1")


@pytest.mark.parametrize("route", ["cpu/cached", "auto"])
def test_narrow_columns(tmp_path, device, route):
    shape = [200_000, 16]
    data = random.Random(4).randbytes(200_000 * 16)
    path = safetensors_file(tmp_path / "m", {"a": ("U8", shape, data), "b": ("F32", [1000, 8], data[:32_000])}, pad=3)
    whole = numpy.frombuffer(data, "u1").reshape(shape)
    start = time.monotonic()
    for rank in (0, 7, 15):
        part = onehop.load_file(path, device, names="a", rank=(rank, 16), cuts={"a": 1}, route=route)["a"]
        assert part.tobytes() == whole[:, rank].tobytes()
    print(f"a column of {shape} in {(time.monotonic() - start) / 3:.3f} s")
    b = onehop.load_file(path, device, names="b", rank=(1, 2), cuts={"b": 1}, route=route)["b"]
    assert b.tobytes() == numpy.frombuffer(data[:32_000], "f4").reshape(1000, 8)[:, 4:].tobytes()


def test_strided_bytes_are_gathered(tmp_path):
    data = random.Random(4).randbytes(1_000_000)
    path = safetensors_file(tmp_path / "m", {"a": ("U8", [1000, 1000], data)})
    whole = numpy.frombuffer(data, "u1").reshape(1000, 1000)
    with onehop.safe_open(path) as f:
        part = f.get_slice("a")[::3, 5:900:2]
        assert part.tobytes() == whole[::3, 5:900:2].tobytes()


def test_out_of_memory_on_the_cpu_is_a_memory_error(tmp_path):
    path = tmp_path / "m"
    safetensors_file(path, {"a": ("U8", [8 << 30], b"")})
    header = path.read_bytes().replace(b'"data_offsets": [0, 0]', b'"data_offsets": [0, %d]' % (8 << 30))
    path.write_bytes((len(header) - 8).to_bytes(8, "little") + header[8:])
    with open(path, "r+b") as file:
        file.truncate(len(header) + (8 << 30))
    script = (
        "import resource, sys, onehop\n"
        "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
        "try:\n    onehop.load(sys.argv[1], 'cpu')\n"
        "except onehop.errors.OutOfMemoryError as error:\n"
        "    assert isinstance(error, MemoryError) and not isinstance(error, onehop.errors.DeviceError), error\n"
        "    print('done')\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "done", ran.stdout + ran.stderr


def test_bytes_that_do_not_fit_into_memory_are_a_memory_error(tmp_path):
    size = 256 << 20
    path = safetensors_file(tmp_path / "m", {"a": ("U8", [size], b"")})
    header = path.read_bytes().replace(b'"data_offsets": [0, 0]', b'"data_offsets": [0, %d]' % size)
    path.write_bytes((len(header) - 8).to_bytes(8, "little") + header[8:])
    with open(path, "r+b") as file:
        file.truncate(len(header) + size)
    script = (
        "import resource, sys, onehop\n"
        "tensor = onehop.load(sys.argv[1], 'cpu').tensors['a']\n"
        "with open('/proc/self/statm') as file:\n    now = int(file.read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + int(sys.argv[2]), resource.RLIM_INFINITY))\n"
        "try:\n    tensor.tobytes()\n"
        "except MemoryError:\n    print('done')\n"
    )
    # Neither the first list nor the bytes made of it fit.
    for more in [size // 2, size + size // 2]:
        command = [sys.executable, "-c", script, str(path), str(more)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ran.stdout.strip() == "done", ran.stdout + ran.stderr


def test_python_exits_while_threads_read_tensors(tmp_path):
    """Python unwinds daemon threads, which must have no native code on their stacks."""
    path = safetensors_file(tmp_path / "m", {"a": ("F32", [64, 64], bytes(16 << 10))})
    script = (
        "import sys, threading, time, numpy, onehop\n"
        "class Number:\n"
        "    def __index__(self):\n        return sum(i % 2 for i in range(50)) // 50\n"
        "tensor = onehop.load(sys.argv[1], 'cpu').tensors['a']\n"
        "part = onehop.safe_open(sys.argv[1], 'numpy').__enter__().get_slice('a')\n"
        "def work(use):\n    while True: use()\n"
        "for use in [lambda: numpy.asarray(tensor), tensor.__array__, lambda: part[Number():Number()]] * 2:\n"
        "    threading.Thread(target=work, args=[use], daemon=True).start()\n"
        "time.sleep(0.1)\n"
        "print('done')\n"
    )
    for _ in range(8):
        ran = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=120)
        assert (ran.returncode, ran.stdout.strip()) == (0, "done"), ran.stdout + ran.stderr


def test_small_tensors_one_by_one(tmp_path):
    dice = random.Random(3)
    tensors = {f"t{i}": ("F32", [64, 64], dice.randbytes(16 << 10)) for i in range(1000)}
    path = safetensors_file(tmp_path / "m", tensors)
    fastest = float("inf")
    # More than once, in case the machine is busy for a moment.
    for _ in range(5):
        with onehop.safe_open(path, "np") as f:
            start = time.monotonic()
            for name, (_, _, data) in tensors.items():
                assert f.get_tensor(name).tobytes() == data
            fastest = min(fastest, time.monotonic() - start)
    print(f"1000 tensors of 16 KiB in {fastest:.3f} s")
    # A load of its own for each takes longer than this on any machine.
    assert fastest < 0.6


def test_a_file_that_is_truncated_while_open(tmp_path):
    path = safetensors_file(tmp_path / "m", {"a": ("U8", [100_000], bytes(100_000))})
    with onehop.safe_open(path) as f:
        with open(path, "r+b") as file:
            file.truncate(5000)
        with pytest.raises(errors.ChangedFileError):
            f.get_tensor("a")


@pytest.mark.parametrize("is_cuda", [False, True])
def test_copies_into_host_memory_are_complete(is_cuda):
    copied = []
    target = types.SimpleNamespace(
        shape=(2, 3), is_cuda=is_cuda, copy_=lambda tensor, non_blocking: copied.append((tensor, non_blocking))
    )
    tensor = types.SimpleNamespace(shape=(2, 3))
    _stream.copy_tensor("w", tensor, target)
    assert copied == [(tensor, is_cuda)]
    # torch's copy_ would spread one row over all of them.
    with pytest.raises(onehop.errors.RequestError, match=r"'w' has the shape \[1, 3\], and that of `into` \[2, 3\]"):
        _stream.copy_tensor("w", types.SimpleNamespace(shape=(1, 3)), target)
    assert len(copied) == 1


def test_two_threads_at_one_stream_release_each_fence_once_and_in_order():
    passed, released = [], []

    class Job:
        def dead(self):
            return None

        def fenced(self, fence):
            assert fence in passed, "a fence that the GPU has not passed"
            released.append(fence)

    class Event:
        def __init__(self, fence):
            self.fence = fence

        def query(self):
            # Another thread checks meanwhile.
            time.sleep(0.001)
            return self.fence in passed

    memory = _stream.TorchMemory.__new__(_stream.TorchMemory)
    memory._fences, memory._recycling = deque((Event(i), i) for i in range(20)), threading.Lock()
    memory._process, memory._latest = os.getpid(), 0
    memory._relaxed_captures = contextlib.nullcontext
    passed.extend(range(10))
    threads = [threading.Thread(target=memory.recycle, args=(Job(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert released == list(range(10))
    # A forked child does not call the GPU or wait for the parent's lock.
    memory._process, is_locked = -1, memory._recycling.acquire()
    assert is_locked and memory.recycle(Job()) is False


def test_freed_memory_whose_fence_fails_gets_one_at_the_next_call():
    fenced, failures, is_capturing = [], [RuntimeError("a CUDA error"), KeyboardInterrupt()], [False]

    class Job:
        latest = 7

        def dead(self):
            return self.latest

        def fenced(self, fence):
            fenced.append(fence)
            if interrupts:
                raise interrupts.pop()

    class Event:
        def record(self):
            if failures:
                raise failures.pop()

        def query(self):
            return True

    cuda = types.SimpleNamespace(
        Event=Event,
        device=lambda index: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: is_capturing[0],
    )
    memory = _stream.TorchMemory.__new__(_stream.TorchMemory)
    memory._torch, memory._device = types.SimpleNamespace(cuda=cuda), "cuda:0"
    memory._fences, memory._recycling, memory._latest = deque(), threading.Lock(), 0
    memory._process, memory._relaxed_captures = os.getpid(), contextlib.nullcontext
    interrupts = [KeyboardInterrupt()]
    for error in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(error):
            memory.recycle(Job())
    # In a graph the event would be part of its replay.
    is_capturing[0] = True
    with pytest.raises(onehop.errors.RequestError, match="captures a graph"):
        memory.recycle(Job())
    assert fenced == []
    is_capturing[0] = False
    # Reported again if the first report may have been lost.
    with pytest.raises(KeyboardInterrupt):
        memory.recycle(Job())
    assert memory.recycle(Job()) is False
    assert fenced == [7, 7]
    memory.recycle(Job())
    assert fenced == [7, 7]
    Job.latest = 9
    memory.recycle(Job())
    assert fenced == [7, 7, 9]
