"""torch: arenas of its allocator, bounded streams on its streams, loads into existing tensors."""

import gc
import random
import warnings

import onehop
import pytest
import torch
from conftest import DTYPES, random_model, safetensors_file
from onehop.torch import load_file

TYPES = [t for t in DTYPES if not t.startswith("F6")]


def same(tensor, other):
    return (
        tensor.dtype == other.dtype
        and tensor.shape == other.shape
        and torch.equal(tensor.cpu().reshape(-1).view(torch.uint8), other.cpu().reshape(-1).view(torch.uint8))
    )


def test_one_storage_for_all(tmp_path, device):
    for seed in range(4):
        path = safetensors_file(tmp_path / f"{seed}", random_model(seed, TYPES, 60), pad=seed)
        expected = load_file(path, device)
        ours = onehop.load_file(path, device, framework="torch", allocator="torch")
        assert list(ours) == list(expected)
        assert all(same(ours[name], tensor) and ours[name].device == tensor.device for name, tensor in expected.items())
        filled = [tensor for tensor in ours.values() if tensor.numel()]
        assert len({tensor.untyped_storage().data_ptr() for tensor in filled}) == 1
        assert all(tensor.data_ptr() % 64 == 0 or tensor.nbytes < 64 for tensor in filled)


def test_options_of_the_allocator(tmp_path, device):
    path = safetensors_file(tmp_path / "m", random_model(1, ["BF16"]))
    for options in ({"framework": "numpy"}, {}, {"framework": "torch", "drive": "sim:x"}):
        with pytest.raises(onehop.errors.RequestError, match="allocator"):
            onehop.load(path, device, allocator="torch", **options)
    loaded = onehop.load(path, device, framework="torch", allocator="torch", verify=True, progress=lambda a, b: None)
    assert loaded.outcome.verified
    with pytest.raises(onehop.errors.UnknownTensorError):
        onehop.load(path, device, framework="torch", allocator="torch", names="none")


def test_torch_counts_its_memory(tmp_path, device):
    if device == "cpu":
        pytest.skip("torch does not count the CPU's memory")
    path = safetensors_file(tmp_path / "m", {"a": ("U8", [64 << 20], bytes(64 << 20))})
    before = torch.cuda.memory_allocated()
    tensors = onehop.load_file(path, device, framework="torch", allocator="torch")
    assert torch.cuda.memory_allocated() - before >= 64 << 20
    del tensors
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_memory_that_kernels_still_use_is_not_overwritten(tmp_path, device):
    """torch reuses memory while kernels of its stream still run on it."""
    if device == "cpu":
        pytest.skip("the CPU has no streams")
    size = 64 << 20
    path = safetensors_file(tmp_path / "m", {"a": ("U8", [size], bytes([7]) * size)})
    for _ in range(5):
        old = torch.full((size,), 3, dtype=torch.uint8, device=device)
        copies = []
        torch.cuda._sleep(50_000_000)
        copies.append(old.clone())
        del old
        tensors = onehop.load_file(path, device, framework="torch", allocator="torch")
        assert bool((copies[0] == 3).all()) and bool((tensors["a"] == 7).all())
        del tensors, copies


@pytest.mark.parametrize("max_bytes", [100_000, 4 << 20])
def test_bounded_stream_into_parameters(tmp_path, device, max_bytes):
    tensors = {f"t{i}": ("F32", [500, 101], random.Random(i).randbytes(500 * 101 * 4)) for i in range(60)}
    path = safetensors_file(tmp_path / "m", tensors)
    expected = load_file(path, "cpu")
    parameters = {name: torch.zeros(500, 101, device=device) for name in tensors}
    with warnings.catch_warnings():
        if max_bytes > 500 * 101 * 4 * 4:
            warnings.simplefilter("error")
        with onehop.stream(path, device, framework="torch", max_bytes=max_bytes) as stream:
            for name, tensor in stream:
                if torch.device(device).type == "cuda":
                    # The copy has not begun when the next tensor is requested.
                    torch.cuda._sleep(200_000)
                parameters[name].copy_(tensor)
                del tensor
    assert all(same(parameters[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in expected.items())


def test_consumers_that_keep_tensors(tmp_path, device):
    tensors = {f"t{i}": ("U8", [50_000], random.Random(i).randbytes(50_000)) for i in range(60)}
    path = safetensors_file(tmp_path / "m", tensors)
    with warnings.catch_warnings(record=True), onehop.stream(path, device, framework="torch", max_bytes=300_000) as stream:
        kept = list(stream)
    assert all(tensor.cpu().numpy().tobytes() == tensors[name][2] for name, tensor in kept)
    assert stream.grown > 0


def test_into(tmp_path, device):
    model = random_model(4, ["F32", "BF16", "F16"], 50)
    path = safetensors_file(tmp_path / "m", model)
    expected = load_file(path, "cpu")
    into = {name: torch.empty(tensor.shape, dtype=torch.float32, device=device) for name, tensor in expected.items()}
    loaded = onehop.load(path, device, into=into, max_bytes=10_000)
    assert all(loaded.tensors[name] is into[name] for name in expected)
    # Converted on the device: GPUs and CPUs write NaN differently.
    converted = {name: tensor.to(device).float() for name, tensor in expected.items()}
    assert all(same(into[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in converted.items())
    name = next(name for name, tensor in expected.items() if tensor.dim() == 2 and tensor.numel())
    with pytest.raises(onehop.errors.RequestError, match="shape"):
        onehop.load(path, device, into={name: torch.empty(1, 1, 1, device=device)})
    with pytest.raises(onehop.errors.UnknownTensorError):
        onehop.load(path, device, into={"nothing": torch.empty(1)})


def test_reload(tmp_path, device):
    shapes = {f"t{i}": [64, 33] for i in range(20)}
    files = []
    for seed in range(2):
        dice = random.Random(seed)
        tensors = {name: ("F32", shape, dice.randbytes(64 * 33 * 4)) for name, shape in shapes.items()}
        files.append(safetensors_file(tmp_path / f"m{seed}", tensors))
    parameters = dict(load_file(files[0], device))
    places = {name: tensor.data_ptr() for name, tensor in parameters.items()}
    for turn in range(6):
        outcome = onehop.Model(files[turn % 2]).reload(into=parameters, max_bytes=50_000)
        assert outcome.bytes == 20 * 64 * 33 * 4
        expected = load_file(files[turn % 2], "cpu")
        assert all(same(parameters[n].view(torch.int32), t.view(torch.int32)) for n, t in expected.items())
    assert places == {name: tensor.data_ptr() for name, tensor in parameters.items()}
    for wrong, error in (({"x": torch.empty(1)}, "UnknownTensorError"), ({"t3": torch.empty(2)}, "RequestError")):
        with pytest.raises(getattr(onehop.errors, error)):
            onehop.Model(files[0]).reload(into={**parameters, **wrong})


def test_a_failed_reload_lists_the_new_tensors(tmp_path, device, monkeypatch):
    tensors = {f"t{i}": ("U8", [5000], bytes([i]) * 5000) for i in range(20)}
    path = safetensors_file(tmp_path / "m", tensors)
    parameters = {name: torch.zeros(5000, dtype=torch.uint8, device=device) for name in tensors}
    parameters["t7"] = torch.zeros(5000, dtype=torch.uint8, device=device).expand(5000)

    class Refuses:
        shape, device = torch.Size([5000]), parameters["t1"].device
        is_cuda = device.type == "cuda"

        def copy_(self, *_, **__):
            raise RuntimeError("no")

    parameters["t7"] = Refuses()
    with pytest.raises(onehop.errors.SwapError) as caught:
        onehop.Model(path).reload(into=parameters)
    error = caught.value
    assert "t7" in error.old and set(error.new) | set(error.old) == set(parameters) and not set(error.new) & set(error.old)
    for name in error.new:
        assert bool((parameters[name] == int(name[1:])).all())
    assert isinstance(error.__cause__, RuntimeError)


def test_many_small_tensors(tmp_path, device):
    dice = random.Random(6)
    tensors = {f"layer.{i}.{kind}": ("BF16", [8, 16], dice.randbytes(256)) for i in range(2000) for kind in "abc"}
    path = safetensors_file(tmp_path / "m", tensors)
    ours = onehop.load_file(path, device, framework="torch", allocator="torch")
    expected = load_file(path, "cpu")
    assert all(same(ours[n], t) and ours[n].stride() == t.stride() for n, t in expected.items())
    # They are normal tensors: a model trains with them.
    weight = torch.nn.Parameter(ours["layer.7.a"].float())
    (weight.sum() * 2).backward()
    assert bool((weight.grad == 2).all())
    with torch.no_grad():
        ours["layer.8.b"].zero_()
    assert not ours["layer.8.b"].any() and same(ours["layer.8.c"], expected["layer.8.c"])
