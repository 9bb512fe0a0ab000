"""Loaded tensors are those of the files: compared with the bytes written, and with safetensors."""

import json
import os
import random
import struct
import threading
import warnings

import numpy
import onehop
import onehop.numpy
import pytest
import safetensors.numpy
from conftest import DEVICES, DTYPES, random_model, random_tensor, safetensors_file

#: The types that NumPy has, and safetensors loads for NumPy.
NUMPY = ["BOOL", "U8", "I8", "I16", "U16", "F16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"]
ML_DTYPES = ["BF16", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"]


def same(tensors, expected):
    assert list(tensors) == list(expected)
    for name, (dtype, shape, data) in expected.items():
        tensor = tensors[name]
        assert (tensor.name, tensor.dtype, tensor.logical_shape) == (name, dtype, tuple(shape))
        assert tensor.nbytes == len(data)
        assert tensor.tobytes() == data, name


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_of_every_type(tmp_path, device, seed):
    tensors = random_model(seed)
    path = safetensors_file(tmp_path / "m.safetensors", tensors, pad=seed)
    loaded = onehop.load(path, device, verify=True)
    same(loaded.tensors, tensors)
    assert all(t.device == device and t.is_contiguous for t in loaded.tensors.values())
    assert loaded.outcome.bytes == sum(len(data) for _, _, data in tensors.values())


@pytest.mark.parametrize("seed", range(4))
def test_numpy_as_safetensors_has_it(tmp_path, seed):
    path = safetensors_file(tmp_path / "m", random_model(seed, NUMPY), pad=seed)
    ours, theirs = onehop.numpy.load_file(path), safetensors.numpy.load_file(path)
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (array.dtype, array.shape)
        assert ours[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ML_DTYPES)
def test_numpy_with_ml_dtypes(tmp_path, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensor = random_tensor(random.Random(5), dtype, [3, 7])
    array = onehop.numpy.load_file(safetensors_file(tmp_path / "m", {"t": tensor}))["t"]
    known = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
    assert array.dtype == getattr(ml_dtypes, known.get(dtype, f"float8_{dtype[3:].lower()}"))
    assert (array.shape, array.tobytes()) == ((3, 7), tensor[2])


def test_large_tensors_by_many_chunks(tmp_path, device):
    data = {name: random.Random(name).randbytes(size) for name, size in [("a", 5 << 20), ("b", 9_000_001), ("c", 3)]}
    path = safetensors_file(tmp_path / "m", {n: ("U8", [len(d)], d) for n, d in data.items()})
    seen = []
    loaded = onehop.load(path, device, threads=3, progress=lambda *now: seen.append(now))
    assert {n: t.tobytes() for n, t in loaded.tensors.items()} == data
    total = sum(map(len, data.values()))
    assert seen[-1] == (total, total) and all(done <= total for done, _ in seen)


def shards(folder, count=3):
    folder.mkdir()
    all_tensors, index = {}, {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        tensors = {f"{i}.{key}": tensor for key, tensor in random_model(i, count=10).items()}
        safetensors_file(folder / name, tensors)
        all_tensors.update(tensors)
        index.update(dict.fromkeys(tensors, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return all_tensors


def test_directories_indexes_and_lists_of_files(tmp_path, device):
    tensors = shards(tmp_path / "model")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    for path in [tmp_path / "model", tmp_path / "model" / "model.safetensors.index.json", files, [str(f) for f in files]]:
        loaded = onehop.load(path, device)
        same(loaded.tensors, tensors)
        assert loaded.outcome.files == 3


def test_names_and_types_select(tmp_path):
    tensors = random_model(2, ["F32", "BF16", "F4", "I8", "F8_E4M3"], 80)
    path = safetensors_file(tmp_path / "m", tensors)
    some = onehop.load_file(path, "cpu", names=["*.a", "*.b"], without="layer.1*", dtypes=["F32", "bf16", "F4"])
    expected = {
        n: t for n, t in tensors.items()
        if n[-1] in "ab" and not n.startswith("layer.1") and t[0] in ("F32", "BF16", "F4")
    }  # fmt: skip
    assert expected
    same(some, expected)
    assert onehop.load_file(path, "cpu", names="*.a", dtypes="F4").keys() == {
        n for n, t in tensors.items() if n[-1] == "a" and t[0] == "F4"
    }


def test_ranks_get_their_part(tmp_path, device):
    array = numpy.arange(12 * 8 * 4, dtype=numpy.float32).reshape(12, 8, 4)
    whole = numpy.arange(7, dtype=numpy.int16)
    path = tmp_path / "m"
    safetensors.numpy.save_file({"q.weight": array, "o.weight": array, "norm": whole}, path)
    for rank in range(4):
        cuts = {"q.*": 0, "o.*": 1}
        parts = onehop.load(path, device, rank=(rank, 4), cuts=cuts, verify=True).tensors
        assert parts["q.weight"].shape == (3, 8, 4) and parts["o.weight"].shape == (12, 2, 4)
        assert parts["q.weight"].tobytes() == array[rank * 3 : rank * 3 + 3].tobytes()
        assert parts["o.weight"].tobytes() == array[:, rank * 2 : rank * 2 + 2].tobytes()
        assert parts["norm"].tobytes() == whole.tobytes()


def test_the_outcome(model_file, device):
    path, tensors = model_file
    loaded = onehop.load(path, device, threads=2, route="cpu/cached", measure_limit=True)
    outcome = loaded.outcome
    assert loaded.metadata == {"made": "by a test"}
    assert (outcome.format, outcome.files, outcome.route) == ("safetensors", 1, "cpu/cached")
    assert outcome.simulated == (["gpu"] if device == "cpu" else [])
    assert outcome.bytes <= outcome.read_bytes == outcome.cached_bytes
    assert (outcome.direct_bytes, outcome.cache_miss_bytes) == (0, 0)
    assert outcome.gpu_bytes >= outcome.bytes and 0 < outcome.seconds <= outcome.total_seconds
    assert 1 <= outcome.threads <= 2 and outcome.ring_bytes > 0
    assert outcome.limit.what == "the copy engine"
    assert outcome.limit.gbps is None if device == "cpu" else outcome.limit.gbps > 0
    assert {no.route for no in outcome.why_not_better} == {"cpu/direct"} and outcome.why_not_better[0].fix
    assert not outcome.verified and outcome.verified_by is None and outcome.gpu and outcome.gpu_why
    assert str(outcome.bytes) in repr(outcome)
    assert repr(outcome.limit).startswith(f"Limit(what={outcome.limit.what!r}, gbps=")
    assert repr(outcome.why_not_better[0]).startswith("WhyNot(route='cpu/direct', reason='")


def test_without_a_device_the_first_gpu_or_the_cpu(model_file):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loaded = onehop.load(model_file[0])
        assert len(list(onehop.stream(model_file[0]))) == len(loaded.tensors)
    # Without a GPU, each of the two warns once.
    expected = [] if "cuda:0" in DEVICES else [RuntimeWarning] * 2
    assert [warning.category for warning in seen] == expected
    assert all("CUDA" in str(warning.message) and warning.filename == __file__ for warning in seen)
    assert {t.device for t in loaded.tensors.values()} == {DEVICES[-1]}


@pytest.mark.parametrize("text", ["cuda", "cuda:0", "0", 0])
def test_ways_to_write_a_gpu(model_file, text):
    if "cuda:0" in DEVICES:
        assert next(iter(onehop.load_file(model_file[0], text).values())).device == "cuda:0"
    else:
        with pytest.raises(onehop.errors.DeviceError, match="CUDA"):
            onehop.load_file(model_file[0], text)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_manifests(tmp_path, device):
    assert crc32c(b"123456789") == 0xE3069283
    tensors = random_model(3, count=8)
    path = safetensors_file(tmp_path / "m", tensors)
    entries = {
        name: {"dtype": dtype, "shape": shape, "bytes": len(data), "crc32c": f"{crc32c(data):08x}"}
        for name, (dtype, shape, data) in tensors.items()
    }
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"onehop_manifest": 1, "tensors": entries}))
    outcome = onehop.load(path, device, manifest=manifest).outcome
    assert outcome.verified and "manifest" in outcome.verified_by
    victim = next(name for name, (_, _, data) in tensors.items() if data)
    entries[victim]["crc32c"] = f"{int(entries[victim]['crc32c'], 16) ^ 1:08x}"
    manifest.write_text(json.dumps({"onehop_manifest": 1, "tensors": entries}))
    with pytest.raises(onehop.errors.VerificationError, match=victim):
        onehop.load(path, device, manifest=manifest)

    # A tensor that the model lacks: a file may be lost.
    lost = {"dtype": "U8", "shape": [1], "bytes": 1, "crc32c": "00000000"}
    entries[victim]["crc32c"] = f"{crc32c(tensors[victim][2]):08x}"
    manifest.write_text(json.dumps({"onehop_manifest": 1, "tensors": entries | {"lost": lost}}))
    with pytest.raises(onehop.errors.VerificationError, match="lost"):
        onehop.load(path, device, manifest=manifest)
    manifest.write_text("{}")
    with pytest.raises(onehop.errors.FormatError):
        onehop.load(path, device, manifest=manifest)


def test_a_manifest_does_not_cover_parts(tmp_path, device):
    tensors = {"cut": ("U8", [4, 3], bytes(range(12))), "whole": ("U8", [3], b"abc")}
    path = safetensors_file(tmp_path / "m", tensors)
    entries = {
        name: {"dtype": dtype, "shape": shape, "bytes": len(data), "crc32c": f"{crc32c(data):08x}"}
        for name, (dtype, shape, data) in tensors.items()
    }
    entries["cut"]["crc32c"] = "00000000"
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"onehop_manifest": 1, "tensors": entries}))
    loaded = onehop.load(path, device, rank=(0, 2), cuts={"cut": 0}, manifest=manifest).outcome
    assert not loaded.verified and "of 1 of 2 tensors" in loaded.verified_by
    loaded = onehop.load(path, device, rank=(0, 2), cuts={"cut": 0}, manifest=manifest, verify=True).outcome
    assert loaded.verified and "compared with the files" in loaded.verified_by


def test_gguf(tmp_path, device):
    def text(s):
        data = s if isinstance(s, bytes) else s.encode()
        return struct.pack("<Q", len(data)) + data

    keys = {
        "general.alignment": struct.pack("<II", 4, 32),
        "a.text": struct.pack("<I", 8) + text("words"),
        "a.list": struct.pack("<IIQ3i", 9, 5, 3, -1, 0, 7),
        "a.truth": struct.pack("<I?", 7, True),
        "a.texts": struct.pack("<IIQ", 9, 8, 2) + text("x") + text(""),
        "a.float": struct.pack("<If", 6, 0.5),
        # Tokens may be parts of characters, and any bool but 0 is true.
        "tokens": struct.pack("<IIQ", 9, 8, 2) + text("gr\u00fc\u00dfe") + text(b"\xe2\x82"),
        "one": struct.pack("<I", 8) + text(b"\xff"),
        "truth": struct.pack("<IB", 7, 2),
    }
    # F32 of 2 x 3 and Q8_0 of 2 x 64: dimensions are written fastest first there.
    plain, packed = random.Random(7).randbytes(24), random.Random(8).randbytes(2 * 2 * 34)
    infos = text("plain") + struct.pack("<IQQIQ", 2, 3, 2, 0, 0) + text("packed") + struct.pack("<IQQIQ", 2, 64, 2, 8, 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, len(keys)) + b"".join(text(k) + v for k, v in keys.items()) + infos
    head += bytes(-len(head) % 32)
    (tmp_path / "m.gguf").write_bytes(head + plain + bytes(8) + packed)
    loaded = onehop.load(tmp_path / "m.gguf", device, verify=True)
    assert loaded.metadata == {
        "general.alignment": 32, "a.text": "words", "a.list": [-1, 0, 7], "a.truth": True, "a.texts": ["x", ""],
        "a.float": 0.5, "tokens": ["gr\u00fc\u00dfe", b"\xe2\x82"], "one": b"\xff", "truth": True,
    }  # fmt: skip
    a, b = loaded.tensors["plain"], loaded.tensors["packed"]
    assert (a.dtype, a.shape, a.is_packed, a.tobytes()) == ("F32", (2, 3), False, plain)
    assert (b.dtype, b.shape, b.logical_shape, b.is_packed, b.tobytes()) == ("Q8_0", (2, 68), (2, 64), True, packed)


def test_streams_hand_out_all_and_can_be_left_early(tmp_path, device):
    tensors = random_model(11, count=60)
    tensors["large"] = ("U8", [6 << 20], random.Random(0).randbytes(6 << 20))
    path = safetensors_file(tmp_path / "m", tensors)
    arriving = onehop.stream(path, device, threads=2)
    assert arriving.outcome is None
    seen = {name: tensor.tobytes() for name, tensor in arriving}
    assert seen == {name: data for name, (_, _, data) in tensors.items()}
    assert arriving.outcome.bytes == sum(map(len, seen.values()))
    assert arriving.progress == (arriving.outcome.bytes, arriving.outcome.bytes)
    arriving.close()
    assert list(arriving) == [] and arriving.outcome is not None
    with onehop.stream(path, device) as arriving:
        name, first = next(arriving)
    assert first.tobytes() == tensors[name][2]
    for _ in range(2):
        with pytest.raises(onehop.errors.CancelledError):
            next(arriving)


def test_every_type_is_covered_here():
    named = set(NUMPY) | set(ML_DTYPES) | {"F4", "F6_E2M3", "F6_E3M2"}
    assert named == set(DTYPES)


def test_paths_of_every_kind(tmp_path, device):
    tensors = random_model(5, count=2)
    path = safetensors_file(tmp_path / "m", tensors)
    not_utf8 = os.fsencode(tmp_path) + b"/m\xff.safetensors"
    os.link(path, not_utf8)
    for one in [path, str(path), os.fsencode(path), [path], not_utf8, os.fsdecode(not_utf8)]:
        assert set(onehop.load(one, device).tensors) == set(tensors)
    assert onehop.__version__.count(".") == 2


def test_several_threads_may_share_a_stream(model_file):
    path, tensors = model_file
    for _ in range(20):
        stream, seen, failed = onehop.stream(path, "cpu", threads=2), [], []

        def take(stream=stream, seen=seen, failed=failed):
            try:
                seen.extend(name for name, _ in stream)
            except Exception as error:
                failed.append(error)

        takers = [threading.Thread(target=take) for _ in range(4)]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
        assert not failed and sorted(seen) == sorted(tensors)


def test_a_program_may_change_its_directory(model_file, tmp_path, monkeypatch):
    path, tensors = model_file
    monkeypatch.chdir(os.path.dirname(path))
    with onehop.safe_open(os.path.basename(path), "np") as opened:
        monkeypatch.chdir(tmp_path)
        name = next(name for name, (dtype, _, data) in tensors.items() if dtype in NUMPY and data)
        assert opened.get_tensor(name).tobytes() == tensors[name][2]
