"""transformers: tiny models with the same logits as after transformers' own loading, bit for bit."""

import onehop
import pytest
import safetensors
import torch
import transformers
from onehop.transformers import from_pretrained

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}


def tiny(kind, folder, dtype, **options):
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**TINY, num_key_value_heads=2, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    # In several files, with an index.
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def logits(model, device):
    tokens = torch.arange(40, device=device).reshape(2, 20)
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("kind,options", [("Llama", {}), ("Llama", {"tie_word_embeddings": True}), ("Mixtral", {})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_equal(tmp_path, device, kind, options, dtype):
    path = tiny(kind, tmp_path / "m", dtype, **options)
    expected = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", device_map={"": device})
    for cls in (transformers.AutoModelForCausalLM, getattr(transformers, f"{kind}ForCausalLM")):
        ours = from_pretrained(cls, path, device=device)
        assert type(ours) is type(expected) and ours.dtype == expected.dtype == dtype
        assert {p.device for p in ours.parameters()} == {torch.device(device)}
        theirs = dict(expected.named_parameters())
        assert all(torch.equal(p, theirs[name]) for name, p in ours.named_parameters())
        assert torch.equal(logits(ours, device), logits(expected, device))
    assert ours.generation_config.to_dict() == expected.generation_config.to_dict()


def test_another_type(tmp_path, device):
    path = tiny("Llama", tmp_path / "m", torch.float32)
    expected = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float16, device_map={"": device})
    ours = from_pretrained(transformers.LlamaForCausalLM, path, device=device, dtype=torch.float16)
    assert ours.dtype == torch.float16 and torch.equal(logits(ours, device), logits(expected, device))


def test_patch(tmp_path, device):
    path = tiny("Llama", tmp_path / "m", torch.bfloat16)
    before = (safetensors.safe_open, safetensors.torch.load_file, transformers.modeling_utils.safe_open)
    expected = logits(transformers.LlamaForCausalLM.from_pretrained(path, device_map={"": device}), device)
    with onehop.patch():
        assert issubclass(transformers.modeling_utils.safe_open, onehop.safe_open)
        assert safetensors.torch.load_file is onehop.torch.load_file
        ours = logits(transformers.LlamaForCausalLM.from_pretrained(path, device_map={"": device}), device)
    assert torch.equal(ours, expected)
    assert before == (safetensors.safe_open, safetensors.torch.load_file, transformers.modeling_utils.safe_open)
    with pytest.raises(KeyError), onehop.patch():
        raise KeyError
    assert before[0] is safetensors.safe_open
