"""onehop.torch against safetensors.torch: types, shapes, devices and bytes."""

import onehop
import pytest
import safetensors.torch
import torch
from conftest import DTYPES, random_model, safetensors_file
from onehop.torch import load_file


def test_torch_as_safetensors_has_it(tmp_path, device):
    # Neither torch nor safetensors supports F6.
    types = [t for t in DTYPES if not t.startswith("F6")]
    for seed in range(4):
        path = safetensors_file(tmp_path / f"{seed}", random_model(seed, types, 60), pad=seed)
        ours, expected = load_file(path, device), safetensors.torch.load_file(path, device=device)
        assert set(ours) == set(expected)
        for name, tensor in expected.items():
            mine = ours[name]
            assert (mine.dtype, mine.shape, mine.device) == (tensor.dtype, tensor.shape, tensor.device), name
            assert mine.is_contiguous() and mine.stride() == tensor.stride()
            assert torch.equal(mine.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert load_file(path, torch.device(device)).keys() == expected.keys()
    with pytest.raises(onehop.errors.RequestError):
        load_file(path, device, backend="magic")


def test_cuda_is_the_current_device_of_torch(tmp_path, device):
    path = safetensors_file(tmp_path / "m", random_model(1, ["BF16"]))
    kind = torch.device(device).type
    assert {t.device for t in load_file(path, kind).values()} == {torch.device(device)}


def test_slices_are_contiguous(tmp_path, device):
    array = torch.arange(64 * 64, dtype=torch.int32).reshape(64, 64)
    safetensors.torch.save_file({"t": array}, tmp_path / "m")
    with onehop.safe_open(tmp_path / "m", "pt", device) as f:
        part = f.get_slice("t")[::3, 1:60:2]
        assert part.is_contiguous() and torch.equal(part.cpu(), array[::3, 1:60:2])


def test_types_that_torch_lacks(tmp_path, device):
    path = safetensors_file(tmp_path / "m", random_model(5, ["F6_E2M3", "F6_E3M2"]))
    assert {t.dtype for t in load_file(path, device).values()} == {torch.uint8}
