"""Loads from a drive that onehop drives itself: a simulated one, and one of a vfio-user server."""

import gc
import os
import random
import shutil
import signal
import subprocess
import threading
import time

import onehop
import pytest
from conftest import MISSING, random_model, safetensors_file
from onehop import errors

ROUTES = ["gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct", "cpu/pinned"]
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
MKE2FS = shutil.which("mke2fs", path=PATH)
ONEHOP = os.environ.get("ONEHOP")
if MKE2FS is None:
    MISSING.append("Python's tests on a drive: mke2fs is not installed")
if ONEHOP is None:
    MISSING.append("Python's tests on a vfio-user drive: ONEHOP names no onehop that serves one")
needs_image = pytest.mark.skipif(MKE2FS is None, reason="no mke2fs")
needs_server = pytest.mark.skipif(MKE2FS is None or ONEHOP is None, reason="no mke2fs, or no onehop")


def make_image(folder, files, size="24M"):
    """An ext4 image of these files: {name: write(path)}."""
    tree, image = folder / "tree", folder / "drive.img"
    tree.mkdir()
    for name, write in files.items():
        write(tree / name)
    command = [MKE2FS, "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-b", "4096", "-d", str(tree), str(image), size]
    subprocess.run(command, check=True, timeout=60)
    return image


@pytest.fixture
def on_drive(tmp_path):
    """An image with two models, one whose header has an odd length, and their tensors."""
    tensors = {"large": ("U8", [3_000_000], random.Random(1).randbytes(3_000_000)), **random_model(3)}

    def write(rest, metadata):
        def write(path):
            # The data begins `rest` bytes after a multiple of 8.
            length = len(safetensors_file(path, tensors, metadata).read_bytes())
            data = sum(len(data) for _, _, data in tensors.values())
            safetensors_file(path, tensors, metadata, pad=(rest - (length - data)) % 8)

        return write

    files = {"even.safetensors": write(0, {"made": "by a test"}), "odd.safetensors": write(3, None)}
    return make_image(tmp_path, files), tensors


def same(loaded, tensors):
    assert list(loaded.tensors) == list(tensors)
    for name, (dtype, shape, data) in tensors.items():
        tensor = loaded.tensors[name]
        assert (tensor.dtype, tensor.logical_shape, tensor.tobytes()) == (dtype, tuple(shape), data), name


@needs_image
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("file", ["even", "odd"])
def test_every_byte_by_every_route(on_drive, route, file):
    image, tensors = on_drive
    loaded = onehop.load(f"/{file}.safetensors", "cpu", drive=f"sim:{image}", route=route, verify=True)
    same(loaded, tensors)
    outcome = loaded.outcome
    assert (outcome.route, outcome.initiator) == (route, route[:3])
    assert outcome.simulated == ["drive", "gpu"] and outcome.drive
    assert outcome.verified and outcome.verified_by
    # This name is that of two placements; the better one needs a controller memory buffer.
    assert [why.route for why in outcome.why_not_better] == ["gpu/posted"] * (route == "gpu/posted")
    assert outcome.bytes == sum(len(data) for _, _, data in tensors.values())
    assert outcome.direct_bytes + outcome.staged_bytes == outcome.read_bytes
    # The drive writes aligned tensors directly, unless the route does not support it.
    assert (outcome.direct_bytes > 2_000_000) == (route != "cpu/pinned" and file == "even")
    assert all(tensor.device == "cpu" for tensor in loaded.tensors.values())
    assert loaded.metadata == ({"made": "by a test"} if file == "even" else {})


@needs_image
def test_the_best_route_and_why_not_better_ones(on_drive):
    image, tensors = on_drive
    loaded = onehop.load("/even.safetensors", "cpu", drive=f"sim:{image}")
    same(loaded, tensors)
    assert loaded.outcome.route == "gpu/tier3" and loaded.outcome.why_not_better == []
    # The file system's reader takes the only queue, so the GPU gets none.
    with pytest.raises(errors.RouteError, match="no route works here: gpu/tier3") as refused:
        onehop.load("/even.safetensors", "cpu", drive=f"sim:{image}?queues=1")
    tried = refused.value.tried
    assert [why.route for why in tried][-1] == "cpu/pinned" and all(why.reason and why.fix for why in tried)


@needs_image
def test_a_part_of_a_model(on_drive):
    image, tensors = on_drive
    drive = f"sim:{image}?lba=4096"
    part = onehop.load("/odd.safetensors", "cpu", drive=drive, partition="none", nsid=1, names="large",
                       rank=(1, 3), cuts={"large": 0}, verify=True)  # fmt: skip
    assert list(part.tensors) == ["large"]
    data = tensors["large"][2]
    assert part.tensors["large"].tobytes() == data[1_000_000:2_000_000] and part.outcome.bytes == 1_000_000
    assert onehop.load_file("/odd.safetensors", "cpu", drive=drive)["large"].tobytes() == data


@needs_server
def test_an_extent_map_in_place_of_a_path(on_drive, tmp_path):
    image, tensors = on_drive
    drive, extent_map = f"sim:{image}", tmp_path / "m.map"
    make = [ONEHOP, "map", "-d", drive, "--path", "/odd.safetensors", "--out", str(extent_map)]
    subprocess.run(make, check=True, timeout=60, stdout=subprocess.DEVNULL)
    loaded = onehop.load(None, "cpu", drive=drive, extent_map=extent_map, verify=True)
    same(loaded, tensors)
    assert loaded.outcome.verified and "map" in loaded.outcome.verified_by
    # Later changes on the drive are found.
    start = tensors["large"][2][:4000]
    image.write_bytes(image.read_bytes().replace(start, bytes([start[0] ^ 1]) + start[1:]))
    with pytest.raises(errors.ChangedFileError, match="has changed"):
        onehop.load(None, "cpu", drive=drive, extent_map=extent_map, verify=True)


@needs_image
def test_refusals(on_drive, tmp_path):
    image, _ = on_drive
    drive, path = f"sim:{image}", "/even.safetensors"
    blank = tmp_path / "blank.img"
    blank.write_bytes(bytes(4 << 20))
    refusals = [
        (path, {"drive": "nothing"}, errors.RequestError, "is not a drive"),
        (path, {"drive": f"sim:{image}?colour=red"}, errors.RequestError, "colour"),
        (path, {"drive": f"sim:{tmp_path}/missing.img"}, errors.DriveError, "missing.img"),
        (path, {"drive": f"vfio-user:{tmp_path}/nobody"}, errors.DriveError, "start its server first"),
        (path, {"drive": "ffff:1f:1f.7"}, errors.DriveError, "no PCI device of this address"),
        (path, {"drive": f"sim:{blank}"}, errors.FormatError, "no file system"),
        ("/missing", {"drive": drive}, errors.MissingFileError, "missing"),
        (path, {"drive": drive, "nsid": 2}, errors.RequestError, "namespace 2"),
        (path, {"drive": drive, "nsid": 0}, errors.RequestError, "count from 1"),
        (path, {"drive": drive, "partition": 7}, errors.RequestError, "partition"),
        (path, {"drive": drive, "partition": "first"}, errors.RequestError, "partition"),
        (path, {"drive": drive, "route": "cufile"}, errors.RouteError, "cuFile"),
        (path, {"drive": drive, "route": "cpu/cached"}, errors.RouteError, "page cache"),
        (path, {"drive": drive, "route": "by air"}, errors.RequestError, "by air"),
        (path, {"drive": drive, "threads": 2}, errors.RequestError, "threads"),
        (path, {"drive": drive, "measure_limit": True}, errors.RequestError, "measure_limit"),
        (path, {"drive": drive, "extent_map": "m"}, errors.RequestError, "extent_map"),
        (None, {"drive": drive}, errors.RequestError, "path"),
        (None, {"drive": drive, "extent_map": tmp_path / "m"}, errors.MissingFileError, "m"),
        (path, {"partition": 1}, errors.RequestError, "drive="),
    ]
    for what, options, kind, words in refusals:
        with pytest.raises(kind, match=words):
            onehop.load(what, "cpu", **options)
    with pytest.raises(errors.DeviceError):
        onehop.load(path, "cuda:63", drive=drive)


@pytest.fixture
def served(on_drive, tmp_path):
    image, tensors = on_drive
    socket = tmp_path / "drive.sock"
    server = subprocess.Popen([ONEHOP, "sim", "serve", "-d", f"sim:{image}", "--socket", str(socket)],
                              stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        until = time.monotonic() + 20
        while not socket.exists():
            assert server.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        yield f"vfio-user:{socket}", tensors
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=20)


@needs_server
def test_a_vfio_user_drive(served):
    drive, tensors = served
    for route in ["auto", *ROUTES]:
        loaded = onehop.load("/odd.safetensors", "cpu", drive=drive, route=route, verify=True)
        same(loaded, tensors)
        assert loaded.outcome.route == ("gpu/tier3" if route == "auto" else route)
        assert "drive" in loaded.outcome.simulated and loaded.outcome.verified
    # The server has one client at a time. A load that fails has closed the drive, even while its error is kept.
    with pytest.raises(errors.MissingFileError) as first:
        onehop.load("/missing", "cpu", drive=drive)
    with pytest.raises(errors.DeviceError) as second:
        onehop.load("/odd.safetensors", "cuda:63", drive=drive)
    same(onehop.load("/odd.safetensors", "cpu", drive=drive), tensors)
    assert first.value.args and second.value.args


@needs_server
def test_a_forked_child_leaves_its_parents_drive_alone(served):
    drive, tensors = served
    model = onehop._open_on_drive(drive, "/even.safetensors", None, None, None)

    def start():
        return model.load(device="cpu", only=[], without=[], dtypes=[], rank=None, cuts=[], group=None, route="auto",
                          threads=None, verify=False, manifest=None, measure_limit=False, arena=False, max_bytes=None)  # fmt: skip

    child = os.fork()
    if child == 0:
        signal.alarm(20)
        code = 1
        try:
            with pytest.raises(errors.RequestError, match="fork"):
                start()
            assert model.warnings == []
            model.close_drive()
            del model
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    job, loaded = start(), []
    while (tensor := job.next()) is not None:
        loaded.append(tensor)
    assert len(loaded) == len(tensors)
    model.close_drive()


@pytest.fixture
def long_load(tmp_path):
    data = random.Random(2).randbytes(1 << 20) * 96
    write = {"m": lambda path: safetensors_file(path, {"t": ("U8", [len(data)], data)})}
    return f"sim:{make_image(tmp_path, write, '128M')}"


class Stop(Exception):
    pass


@needs_image
def test_a_signal_ends_it(long_load):
    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        with pytest.raises(Stop):
            while True:
                onehop.load("/m", "cpu", drive=long_load, route="cpu/pinned")
        assert time.monotonic() - start < 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@needs_image
def test_other_threads_run_and_see_progress(long_load):
    over, turns, seen = threading.Event(), [], []

    def count():
        while not over.is_set():
            turns.append(time.monotonic())
            time.sleep(0.001)

    other = threading.Thread(target=count)
    other.start()
    try:
        start = time.monotonic()
        loaded = onehop.load("/m", "cpu", drive=long_load, progress=lambda *now: seen.append(now))
        end = time.monotonic()
    finally:
        over.set()
        other.join()
    assert sum(start <= turn <= end for turn in turns) > 5
    assert seen[-1] == (96 << 20, 96 << 20) and all(done <= total for done, total in seen)
    assert loaded.outcome.bytes == 96 << 20
