"""Processes that load together: all bytes, read once; and the errors of the others when one fails."""

import importlib.util
import multiprocessing
import os
import pickle
import signal
import time
import uuid

import onehop
import pytest
from conftest import DEVICES, random_model, safetensors_file

def _bytes(tensor):
    """A tensor's bytes: NumPy's or torch's."""
    if hasattr(tensor, "cpu"):
        import torch

        tensor = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return tensor.tobytes()


def _rank(name, rank, size, path, device, options, results):
    try:
        if device == "cuda":
            import torch

            device = f"cuda:{rank % torch.cuda.device_count()}"
        loaded = onehop.load(path, device, group=onehop.Group(name, rank, size), **options)
        tensors = {key: _bytes(tensor) for key, tensor in loaded.tensors.items()}
        results.put((rank, tensors, pickle.dumps(loaded.outcome)))
    except Exception as error:
        results.put((rank, None, f"{type(error).__name__}: {error}"))
        if not isinstance(error, onehop.errors.GroupError):
            # It notifies the others while its process lives.
            time.sleep(4)


#: Devices and other options of loads.
KINDS = [("cpu", {"framework": "numpy"})]
if "cuda:0" in DEVICES and importlib.util.find_spec("torch"):
    KINDS += [("cuda", {"framework": "torch"}), ("cuda", {"framework": "torch", "allocator": "torch"})]


class Ranks:
    """Processes that load."""

    def __init__(self, paths, kind=KINDS[0], options=lambda rank: {}, size=None):
        context = multiprocessing.get_context("spawn")
        self.results, self.name, (device, common) = context.Queue(), uuid.uuid4().hex, kind
        self.processes = [
            context.Process(
                target=_rank,
                args=(self.name, rank, size or len(paths), str(path), device, {**common, **options(rank)}, self.results),
            )
            for rank, path in enumerate(paths)
        ]
        for process in self.processes:
            process.start()

    def found(self, count=None):
        """The results of all ranks, in order: tensors and outcome, or None and an error."""
        found = sorted(self.results.get(timeout=120) for _ in range(count or len(self.processes)))
        for process in self.processes:
            process.join(30)
        return [(tensors, outcome if tensors is None else pickle.loads(outcome)) for _, tensors, outcome in found]


def load(path, size, kind, options=lambda rank: {}):
    return Ranks([path] * size, kind, options).found()


@pytest.fixture(autouse=True)
def timeout(monkeypatch):
    monkeypatch.setenv("ONEHOP_GROUP_TIMEOUT", "60")


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_shared_bytes_are_read_once(tmp_path, size, kind):
    model = {f"t{i}": ("U8", [1 << 20], os.urandom(1 << 20)) for i in range(12)}
    path = safetensors_file(tmp_path / "m.safetensors", model)
    found = load(path, size, kind)
    for rank, (tensors, outcome) in enumerate(found):
        assert tensors is not None, outcome
        assert tensors == {name: data for name, (_, _, data) in model.items()}
        assert (outcome.group.rank, outcome.group.size) == (rank, size)
        assert outcome.group.way == "peer", outcome.group.why_alone
        assert outcome.group.passed_bytes > 0 and outcome.group.received_bytes > 0
    assert sum(outcome.read_bytes for _, outcome in found) < 13 << 20


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_random_models_with_cuts(tmp_path, kind):
    model = {f"layer.{i}": ("U8", [64, 512], os.urandom(64 * 512)) for i in range(40)}
    model.update(random_model(11, ("F32", "U8", "I16")))
    path = safetensors_file(tmp_path / "m.safetensors", model)
    for dim in (0, 1):
        found = load(path, 2, kind, lambda rank: {"rank": (rank, 2), "cuts": {"layer.?": dim, "layer.??": dim}})
        for rank, (tensors, outcome) in enumerate(found):
            assert tensors is not None, outcome
            for name, (_, shape, data) in model.items():
                if shape == [64, 512] and name.count(".") == 1:
                    rows = [data[row * 512 : (row + 1) * 512] for row in range(64)]
                    half = slice(rank * 256, (rank + 1) * 256)
                    data = b"".join(row[half] for row in rows) if dim else b"".join(rows[rank * 32 : rank * 32 + 32])
                assert tensors[name] == data, name


def test_ranks_that_load_other_files_fail(tmp_path):
    paths = [safetensors_file(tmp_path / f"{i}", {"a": ("U8", [i + 1], b"x" * (i + 1))}) for i in range(2)]
    for tensors, error in Ranks(paths).found():
        assert tensors is None and "GroupError" in error and "bytes here" in error


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_rank_that_is_killed_ends_the_other(tmp_path, kind):
    model = {f"t{i}": ("U8", [16 << 20], os.urandom(16 << 20)) for i in range(16)}
    path = safetensors_file(tmp_path / "m.safetensors", model)
    for pause in (0.0, 0.02, 0.1):
        ranks = Ranks([path] * 2, kind)
        address = f"@onehop/{os.geteuid()}/{ranks.name}/0"
        # Both have connected once nothing listens at its address.
        end = time.monotonic() + 60
        while not _listens(address) and time.monotonic() < end:
            time.sleep(0.001)
        while _listens(address) and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(pause)
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        began = time.monotonic()
        found = {}
        while 0 not in found:
            rank, tensors, error = ranks.results.get(timeout=30)
            found[rank] = (tensors, error)
        assert time.monotonic() - began < 10
        tensors, error = found[0]
        # It may have finished.
        assert tensors is not None or ("GroupError" in error and "rank 1" in error), error
        for process in ranks.processes:
            process.join(20)
        assert not _listens(address)


def _listens(address):
    with open("/proc/net/unix") as file:
        return any(line.rstrip().endswith(address) for line in file)


def test_invalid_groups_are_refused(tmp_path):
    path = safetensors_file(tmp_path / "m", {"a": ("U8", [1], b"x")})
    for group in ("name", 3, object()):
        with pytest.raises(onehop.errors.RequestError, match="is not a group"):
            onehop.load(path, "cpu", group=group)
    for group in (onehop.Group("", 0, 2), onehop.Group("a", 2, 2), onehop.Group("a/b", 0, 2), onehop.Group("a", -1, 2)):
        with pytest.raises(onehop.errors.GroupError):
            onehop.load(path, "cpu", group=group)
    with pytest.raises(onehop.errors.RequestError, match="max_bytes"):
        onehop.stream(path, "cpu", group=onehop.Group("a", 0, 2), max_bytes=1 << 20)


def test_a_rank_that_never_connects(tmp_path, monkeypatch):
    path = safetensors_file(tmp_path / "m", {"a": ("U8", [1], b"x")})
    monkeypatch.setenv("ONEHOP_GROUP_TIMEOUT", "0.5")
    ((tensors, error),) = Ranks([path], size=2).found()
    assert tensors is None and "GroupError" in error and "rank 1" in error and "ONEHOP_GROUP_TIMEOUT" in error


@pytest.mark.parametrize(
    "options",
    [{"names": "nothing"}, {"threads": 0}],
    ids=str,
)
def test_a_rank_that_fails_early_notifies_the_other(tmp_path, options):
    path = safetensors_file(tmp_path / "m", {"a": ("U8", [4], b"wxyz")})
    for bad in (0, 1):
        began = time.monotonic()
        found = Ranks([path] * 2, options=lambda rank: options if rank == bad else {}).found()
        assert time.monotonic() - began < 30
        assert all(tensors is None for tensors, _ in found)
        assert "GroupError" not in found[bad][1], found
        other = found[1 - bad][1]
        assert "GroupError" in other and f"rank {bad}" in other and "waited" not in other, found


def test_a_missing_file_is_reported_to_the_other(tmp_path):
    path = safetensors_file(tmp_path / "m", {"a": ("U8", [4], b"wxyz")})
    (_, missing), (_, other) = Ranks([tmp_path / "none", path]).found()
    assert "MissingFileError" in missing and "GroupError" in other and "rank 0" in other and "none" in other


def _writes(name, rank, path, results):
    """Rank 0 overwrites each tensor at once."""
    wrong = 0
    want = onehop.load_file(path, "cpu", framework="numpy")
    for key, tensor in onehop.stream(path, "cpu", framework="numpy", group=onehop.Group(name, rank, 2)):
        wrong += tensor.tobytes() != want[key].tobytes()
        if rank == 0:
            tensor[...] = 0
    results.put((rank, wrong))


def test_tensors_of_a_stream_may_be_written_to(tmp_path):
    model = {f"t{i}": ("U8", [300_000], os.urandom(300_000)) for i in range(60)}
    path = safetensors_file(tmp_path / "m.safetensors", model)
    context = multiprocessing.get_context("spawn")
    for _ in range(3):
        results, name = context.Queue(), uuid.uuid4().hex
        ranks = [context.Process(target=_writes, args=(name, rank, path, results)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        assert sorted(results.get(timeout=60) for _ in ranks) == [(0, 0), (1, 0)]
        for rank in ranks:
            rank.join(20)


def test_a_group_of_one_is_an_ordinary_load(tmp_path):
    path = safetensors_file(tmp_path / "m", {"a": ("U8", [3], b"xyz")})
    loaded = onehop.load(path, "cpu", group=onehop.Group("alone", 0, 1))
    assert loaded.outcome.group.size == 1 and loaded.outcome.read_bytes > 0
