"""The plugins of serving engines, in mocks of these: without torch the tensors are NumPy's."""

import importlib.metadata
import sys
import types
from pathlib import Path

import numpy
import onehop
import pytest
from conftest import random_model, safetensors_file
from onehop import _engines

TYPES = ["U8", "F32", "I64"]


@pytest.fixture
def engines(monkeypatch):
    """Makes `vllm` and `sglang` the mocks."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "sglang")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "engines"))
    monkeypatch.setattr(_engines, "FRAMEWORK", "np")
    monkeypatch.setattr(_engines, "torch_device", lambda: "cpu")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "sglang")]:
        sys.modules.pop(name)


@pytest.fixture
def model(tmp_path):
    """A directory of two files, and the bytes of its tensors."""
    first, second = random_model(1, TYPES, 30), random_model(2, TYPES, 30)
    second = {f"second.{name}": tensor for name, tensor in second.items()}
    safetensors_file(tmp_path / "model-1.safetensors", first)
    safetensors_file(tmp_path / "model-2.safetensors", second)
    return tmp_path, {name: data for name, (_, _, data) in (first | second).items()}


def load_config(**extra):
    return types.SimpleNamespace(load_format="onehop", model_loader_extra_config=extra)


def collected(weights):
    found = {}
    for name, tensor in weights:
        assert name not in found and isinstance(tensor, numpy.ndarray)
        found[name] = tensor.tobytes()
    return found


def vllm_loader(**extra):
    from onehop import vllm as plugin
    from vllm.model_executor.model_loader import get_model_loader

    # vLLM does so more than once in some processes.
    plugin.register()
    plugin.register()
    return get_model_loader(load_config(**extra))


@pytest.mark.parametrize("extra", [{}, {"max_bytes": 2000, "threads": 2, "route": "cpu/cached"}])
def test_vllm_reads_by_onehop(engines, model, extra):
    path, expected = model
    loader = vllm_loader(**extra)
    source = loader.Source(str(path), prefix="p.")
    assert collected(loader._get_weights_iterator(source)) == {f"p.{name}": data for name, data in expected.items()}
    # Again, as reload does, with a second source.
    config = types.SimpleNamespace(model=str(path))
    both = types.SimpleNamespace(secondary_weights=[source])
    assert len(collected(loader.get_all_weights(config, both))) == 2 * len(expected)


def test_vllm_is_restored_afterwards(engines, model):
    loader = vllm_loader()
    from vllm.model_executor.model_loader import default_loader, weight_utils

    loader._get_weights_iterator(loader.Source(str(model[0])))
    assert default_loader.safetensors_weights_iterator is weight_utils.safetensors_weights_iterator
    assert isinstance(loader, default_loader.DefaultModelLoader)


def test_vllm_does_not_read_other_ranks_experts(engines, tmp_path):
    tensors = {f"l.experts.{i}.weight": ("U8", [5000], bytes([i]) * 5000) for i in range(8)} | {"n": ("U8", [4], b"abcd")}
    safetensors_file(tmp_path / "m.safetensors", tensors)
    loader = vllm_loader()
    loader.local_expert_ids = {2, 5}
    found = collected(loader._get_weights_iterator(loader.Source(str(tmp_path))))
    assert set(found) == {"n", "l.experts.2.weight", "l.experts.5.weight"}


def test_weights_that_are_kept(engines, model):
    loader = vllm_loader(max_bytes=1000)
    kept = list(loader._get_weights_iterator(loader.Source(str(model[0]))))
    assert {name: array.tobytes() for name, array in kept} == model[1]


@pytest.mark.parametrize("extra", [{"max_bytes": "1G"}, {"threads": True}, {"route": 5}])
def test_options_of_the_wrong_type_are_refused(engines, extra):
    with pytest.raises(onehop.errors.RequestError, match="model_loader_extra_config"):
        vllm_loader(**extra)


def test_other_options_go_to_the_engine(engines):
    with pytest.raises(ValueError, match="magic"):
        vllm_loader(magic=1)
    assert vllm_loader(enable_multithread_load=True).load_config.model_loader_extra_config == {
        "enable_multithread_load": True
    }


def test_a_vllm_without_the_iterator_is_an_error(engines, model, monkeypatch):
    loader = vllm_loader()
    from vllm.model_executor.model_loader import default_loader

    monkeypatch.delattr(default_loader, "safetensors_weights_iterator")
    with pytest.raises(onehop.OnehopError, match="version"):
        loader._get_weights_iterator(loader.Source(str(model[0])))


@pytest.mark.parametrize("threads", [True, False])
def test_sglang_reads_by_onehop(engines, model, threads):
    from onehop import sglang as plugin
    from sglang.srt.plugins.hook_registry import HookRegistry

    plugin.register()
    HookRegistry.apply_hooks()
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader as loaders

    assert LOAD_FORMAT_CHOICES.count("onehop") == 1
    path, expected = model
    config = LoadConfig("onehop", {"max_bytes": 3000, "enable_multithread_load": threads})
    loader = loaders.get_model_loader(config)
    assert isinstance(loader, loaders.DefaultModelLoader) and config.onehop == {"max_bytes": 3000}
    assert collected(loader._get_weights_iterator(loader.Source(str(path), prefix="p."))) == {
        f"p.{name}": data for name, data in expected.items()
    }
    # Other loaders and formats stay theirs.
    assert type(loaders.get_model_loader(config, "quantized")) is loaders.QuantizedLoader
    assert type(loaders.get_model_loader(LoadConfig("safetensors"))) is loaders.DefaultModelLoader


def test_entry_points_resolve():
    for group, module in (("vllm.general_plugins", "onehop.vllm"), ("sglang.srt.plugins", "onehop.sglang")):
        found = [p for p in importlib.metadata.entry_points().get(group, [])] if sys.version_info < (3, 10) else list(
            importlib.metadata.entry_points(group=group)
        )
        (point,) = [point for point in found if point.name == "onehop"]
        assert point.value == f"{module}:register" and callable(point.load())


def test_signatures_are_compared(tmp_path, engines):
    sys.path.insert(0, str(Path(__file__).parent / "engines"))
    try:
        import signatures
    finally:
        sys.path.pop(0)
    here = Path(__file__).parent / "engines"
    different, modules = signatures.compare(here)
    assert different == [] and modules >= 6
    for file in here.glob("*/**/*.py"):
        there = tmp_path / file.relative_to(here)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(file.read_text().replace("local_expert_ids", "experts").replace("get_model_loader", "make_loader"))
    different, _ = signatures.compare(tmp_path)
    assert any("local_expert_ids" in line for line in different) and any("get_model_loader" in line for line in different)
