"""Shared by the tests: the devices and libraries of this machine, and generated model files.

Tests of missing devices and libraries do not run, and a line `SKIPPED: ` at the end gives the reason.
"""

import contextlib
import importlib
import importlib.util
import json
import math
import random
import struct
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onehop
import pytest

#: Every type of safetensors: bits of an element.
DTYPES = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

#: The reasons why tests do not run here.
MISSING = []


def safetensors_file(path, tensors, metadata=None, pad=0):
    """Writes a valid file: {name: (dtype, shape, bytes)}, with `pad` extra bytes in the header."""
    header, at = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode() + b" " * pad
    body = b"".join(data for _, _, data in tensors.values())
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def random_tensor(dice, dtype, shape=None):
    """A tensor of random bytes, or of bools for BOOL."""
    if shape is None:
        shape = [dice.choice([0, 1, 2, 3, 5, 8, 33]) for _ in range(dice.randrange(4))]
    if DTYPES[dtype] in (4, 6):
        shape = [*shape, 4]
    count = math.prod(shape)
    data = dice.randbytes(count * DTYPES[dtype] // 8)
    return dtype, shape, bytes(b & 1 for b in data) if dtype == "BOOL" else data


def random_model(seed, dtypes=tuple(DTYPES), count=40):
    """Tensors of random types, shapes and bytes, by name."""
    dice = random.Random(seed)
    return {f"layer.{i}.{dice.choice('abc')}": random_tensor(dice, dice.choice(dtypes)) for i in range(count)}


def _devices():
    with tempfile.TemporaryDirectory() as folder:
        probe = safetensors_file(Path(folder) / "probe", {"a": ("U8", [1], b"\1")})
        try:
            onehop.load(probe, "cuda:0")
        except onehop.errors.DeviceError as why:
            MISSING.append(f"Python's tests on a GPU: {why}")
            return ["cpu"]
    return ["cpu", "cuda:0"]


def _frameworks(devices):
    """Pairs of a library and a device that it supports."""
    found = [("numpy", "cpu")]
    for name in ("torch", "cupy", "jax"):
        try:
            library = importlib.import_module(name)
        except ImportError:
            MISSING.append(f"Python's tests with {name}: this machine has none, and it is too large to fetch for tests")
            continue
        on_gpu = name != "jax" or any(d.platform == "gpu" for d in library.devices())
        on_cpu = name != "cupy"
        found += [(name, d) for d in devices if (on_cpu if d == "cpu" else on_gpu)]
    return found


DEVICES = _devices()
FRAMEWORKS = _frameworks(DEVICES)
HAS_TORCH = any(name == "torch" for name, _ in FRAMEWORKS)
collect_ignore = [] if HAS_TORCH else ["test_table_torch.py", "test_torch.py", "test_torch_memory.py"]
if not HAS_TORCH or importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    MISSING.append("Python's tests with transformers: this machine has no transformers, accelerate and torch")
    collect_ignore += ["test_transformers.py"]
collect_ignore += [] if ("torch", "cuda:0") in FRAMEWORKS else ["test_capture.py"]


@contextlib.contextmanager
def engine(package, module, *, mock):
    """A module of onehop that builds on a serving engine's package: the one of this machine, or the mock in `engines`."""
    def ours():
        return [name for name in sys.modules if name.split(".")[0] == package or name == module]

    if not mock:
        sys.modules.pop(module, None)
        yield importlib.import_module(module)
        return
    before = {name: sys.modules.pop(name) for name in ours()}
    sys.path.insert(0, str(Path(__file__).parent / "engines"))
    try:
        yield importlib.import_module(module)
    finally:
        sys.path.pop(0)
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


def engine_kinds(package):
    """Whether to test with the mock of this package alone, or with the real one too."""
    if importlib.util.find_spec(package) is None:
        MISSING.append(f"Python's tests with {package}: this machine has none, its mock stands for it")
        return ["mock"]
    return ["mock", "real"]


def pytest_generate_tests(metafunc):
    if "framework" in metafunc.fixturenames:
        metafunc.parametrize("framework,device", FRAMEWORKS, ids=["-".join(pair) for pair in FRAMEWORKS])
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)


@pytest.fixture
def model_file(tmp_path):
    """A model of every type, its header of an odd length, and its tensors."""
    tensors = random_model(1)
    return safetensors_file(tmp_path / "model.safetensors", tensors, {"made": "by a test"}, pad=3), tensors


def pytest_terminal_summary(terminalreporter):
    """The lines that .ci/run counts, as cargo writes them."""
    def count(*kinds):
        return sum(len(terminalreporter.stats.get(kind, [])) for kind in kinds)

    for why in MISSING:
        terminalreporter.write_line(f"SKIPPED: {why}")
    failed = count("failed", "error")
    terminalreporter.write_line(
        f"test result: {'FAILED' if failed else 'ok'}. {count('passed')} passed; {failed} failed; {count('skipped')} ignored"
    )


def in_threads(work, count):
    """Calls work(0), work(1), … at the same time, and raises what one of them raised."""
    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(work, number) for number in range(count)]:
            done.result()
