"""What is refused, and by which exception. Nothing else is raised, and nothing succeeds."""

import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading

import onehop
import pytest
import safetensors.numpy
from conftest import random_model, safetensors_file
from onehop import errors


def header(text, data=b""):
    text = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype="F32", shape=(1,), offsets=(0, 4)):
    return json.dumps({"t": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}})


#: Invalid files, by what each breaks.
HOSTILE = {
    "empty": b"",
    "seven bytes": b"\1\0\0\0\0\0\0",
    "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "no JSON": header("{nonsense"),
    "no UTF-8": header(b'{"\xff": 1}'),
    "JSON of something else": header("[]"),
    "a truncated body": header(tensor(), b"abc"),
    "more body than tensors": header(tensor(), b"abcde"),
    "offsets backwards": header(tensor(offsets=(4, 0)), b"abcd"),
    "offsets beyond the end": header(tensor(offsets=(0, 400), shape=(100,)), b"abcd"),
    "offsets of 2^63": header(tensor(offsets=(0, 1 << 63), shape=(1 << 61,)), b"abcd"),
    "a shape whose product wraps": header(tensor(shape=(1 << 33, 1 << 33), offsets=(0, 0))),
    "a shape of another size": header(tensor(shape=(2,)), b"abcd"),
    "a shape of NaN": header(tensor().replace("[1]", "[NaN]"), b"abcd"),
    "a negative dimension": header(tensor(shape=(-1,)), b"abcd"),
    "an unknown type": header(tensor(dtype="F7"), b"abcd"),
    "tensors that overlap": header(
        json.dumps({n: {"dtype": "U8", "shape": [3], "data_offsets": o} for n, o in [("a", [0, 3]), ("b", [2, 5])]}), b"abcde"
    ),
    "a hole": header(
        json.dumps({n: {"dtype": "U8", "shape": [2], "data_offsets": o} for n, o in [("a", [0, 2]), ("b", [3, 5])]}), b"abcde"
    ),
    "a GGUF of nothing": b"GGUF",
    "a GGUF of 2^63 tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files(tmp_path, what):
    path = tmp_path / "hostile"
    path.write_bytes(HOSTILE[what])
    for attempt in [onehop.load, onehop.load_file, onehop.stream, onehop.safe_open]:
        with pytest.raises(errors.FormatError, match="hostile") as refused:
            attempt(path)
        assert isinstance(refused.value, (errors.OnehopError, ValueError))
    with pytest.raises(Exception):
        safetensors.numpy.load_file(path)


def test_headers_with_a_byte_changed(tmp_path):
    """For any change of a byte: the tensors, or our exception, and no file that safetensors refuses."""
    path, dice = tmp_path / "m", random.Random(6)
    safetensors_file(path, random_model(6, ["F32", "I8"], 3))
    sound = path.read_bytes()
    end = 8 + struct.unpack("<Q", sound[:8])[0]
    refused = 0
    for _ in range(300):
        changed = bytearray(sound)
        changed[dice.randrange(end)] = dice.randrange(256)
        path.write_bytes(changed)
        try:
            onehop.load(path, "cpu")
        except errors.FormatError:
            refused += 1
        else:
            safetensors.numpy.load_file(path)
    assert refused > 100


def test_paths_that_are_not_files(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        onehop.load(tmp_path / "missing")
    assert isinstance(missing.value, errors.MissingFileError)
    assert missing.value.filename == str(tmp_path / "missing") and missing.value.errno == 2
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name, word in [("fifo", "FIFO"), ("circle", "circle")]:
        with pytest.raises(OSError, match=word) as refused:
            onehop.load(tmp_path / name)
        assert isinstance(refused.value, errors.FileError)
    (tmp_path / "folder").mkdir()
    with pytest.raises(errors.FormatError, match="holds no"):
        onehop.load(tmp_path / "folder")
    (tmp_path / "index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(errors.MissingFileError, match="gone.safetensors"):
        onehop.load(tmp_path / "index.json")
    with pytest.raises(errors.RequestError, match="no file was named"):
        onehop.load([])
    for bad in [5, None, [None], b"\xff"]:
        with pytest.raises((TypeError, errors.MissingFileError)):
            onehop.load(bad)


def test_unreadable_files(tmp_path):
    path = safetensors_file(tmp_path / "m", {})
    path.chmod(0)
    # Root may read everything, so another user tries.
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            onehop.load(path)
        except PermissionError as refused:
            os._exit(0 if isinstance(refused, errors.ForbiddenFileError) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_invalid_requests(model_file):
    path, _ = model_file
    for options in [
        {"device": "gpu"}, {"device": "cuda:x"}, {"device": "cuda:-1"}, {"device": True}, {"device": ""},
        {"dtypes": "F33"}, {"rank": (0, 2)}, {"cuts": {"*": 0}}, {"rank": (2, 2), "cuts": {"*": 0}},
        {"rank": (0, 2), "cuts": {"*": 9}}, {"rank": (0, 1 << 40), "cuts": {"*": 0}}, {"route": "by air"},
        {"framework": "abacus"}, {"threads": 0}, {"threads": -1}, {"threads": 257}, {"threads": 2**70},
        {"rank": (-1, 2), "cuts": {"*": 0}}, {"rank": (0, 2), "cuts": {"*": -1}}, {"names": []}, {"dtypes": ()},
    ]:  # fmt: skip
        with pytest.raises(errors.RequestError):
            onehop.load(path, **{"device": "cpu", **options})
    for options in [{"threads": "many"}, {"rank": 3, "cuts": {}}, {"colour": "red"}]:
        with pytest.raises((TypeError, OverflowError)):
            onehop.load(path, "cpu", **options)
    for route in ["gpu/tier3", "cpu/direct", "cufile"]:
        with pytest.raises(errors.RouteError, match=f"(?i){route}"):
            onehop.load(path, "cpu", route=route)
    with pytest.raises(errors.DeviceError):
        onehop.load(path, "cuda:63")


def test_names_that_match_no_tensor(model_file):
    path, _ = model_file
    for options in [
        {"names": "nosuch*"}, {"names": ["layer.*", "nosuch*"]}, {"without": "nosuch*"}, {"names": "nosuch*", "dtypes": "BF16"},
        {"rank": (0, 2), "cuts": {"nosuch*": 0}},
    ]:  # fmt: skip
        with pytest.raises(errors.UnknownTensorError, match="nosuch"):
            onehop.load(path, "cpu", **options)
    with pytest.raises(errors.RequestError, match="leave no tensor"):
        onehop.load(path, "cpu", names="layer.*", without="*")


def test_files_of_two_models_in_a_directory(tmp_path):
    for name in ["consolidated", "model"]:
        safetensors_file(tmp_path / f"{name}.safetensors", {name: ("U8", [1], b"\1")})
    with pytest.raises(errors.FormatError, match="consolidated.safetensors, model.safetensors"):
        onehop.load(tmp_path)
    assert len(onehop.load_file(sorted(tmp_path.iterdir()), "cpu")) == 2


def test_more_shards_than_the_file_limit(tmp_path):
    for i in range(1, 301):
        safetensors_file(tmp_path / f"m-{i:05}-of-00300.safetensors", {f"t{i}": ("U8", [1], b"\1")})
    script = (
        "import resource, sys, onehop\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))\n"
        "one = onehop.load(sys.argv[1] + '/m-00001-of-00300.safetensors', 'cpu')\n"
        "few = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "loaded = onehop.load(sys.argv[1], 'cpu', verify=True)\n"
        "many = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "print(len(loaded.tensors), few, many > 900, many < 2000)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120)
    # A load of one file raises the limit only as needed, and one of 300 shards not much more.
    tensors, few, enough, bounded = done.stdout.split() or [done.stderr]
    assert (tensors, enough, bounded) == ("300", "True", "True") and int(few) < 256, done


def test_changes_of_no_bytes_are_warnings(tmp_path, device):
    path = safetensors_file(tmp_path / "m", random_model(3))
    with onehop.safe_open(path, device=device) as f:
        os.link(path, tmp_path / "other")
        path.unlink()
        arriving = f.stream()
        assert len(list(arriving)) == 40
    assert [str(path) in line and "removed" in line for line in arriving.outcome.warnings] == [True]
    assert onehop.load(tmp_path / "other", device).outcome.warnings == []


def test_files_that_change_during_a_load(tmp_path, device):
    size = 8 << 20
    path = safetensors_file(tmp_path / "m", {str(i): ("U8", [size], bytes(size)) for i in range(4)})
    arriving = onehop.stream(path, device, threads=1)
    # The files are open now: later changes are detected by the end at the latest.
    os.utime(path)
    with pytest.raises(errors.ChangedFileError, match="changed while it was loaded"):
        list(arriving)
    assert list(arriving) == [] and arriving.outcome is None


def test_files_that_shrink_before_they_are_read(tmp_path, device):
    path = safetensors_file(tmp_path / "m", random_model(2))
    with onehop.safe_open(path, device=device) as f:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(errors.ChangedFileError):
            f.get_tensors()


def test_threads_of_python_load_at_the_same_time(tmp_path, device):
    tensors = random_model(8, count=20)
    path = safetensors_file(tmp_path / "m", tensors)
    results = []

    def one():
        results.append({n: t.tobytes() for n, t in onehop.load_file(path, device).items()})

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{n: d for n, (_, _, d) in tensors.items()}] * 6
