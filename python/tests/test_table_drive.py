"""Tables on a drive that onehop drives itself: a simulated one, and one of a vfio-user server."""

import json
import os
import signal
import subprocess
import threading
import time

import numpy
import onehop
import pytest
from onehop import errors
from safetensors.numpy import save_file
from test_drive import ONEHOP, make_image, needs_image, needs_server

RNG = numpy.random.default_rng()
GPU_ROUTES = ["gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1"]
#: 264-byte rows, which straddle blocks and pages.
ROWS = 20_000


def same(found, expected):
    return found.shape == expected.shape and found.tobytes() == expected.tobytes()


def random_rows(count=ROWS, width=66):
    return RNG.integers(0, 1 << 32, size=(count, width), dtype=numpy.uint32)


@pytest.fixture
def raw(tmp_path):
    """A drive that holds random rows from its first byte on, and the array."""
    rows, image = random_rows(), tmp_path / "raw.img"
    image.write_bytes(rows.tobytes() + bytes(-rows.nbytes % 4096))
    return f"sim:{image}", rows


def open_table(drive, row=(66,), dtype="U32", path=None, **options):
    return onehop.Table(path, dtype, row, drive=drive, device="cpu", framework="numpy", **options)


@pytest.mark.parametrize("route", GPU_ROUTES)
def test_rows_are_those_of_numpy_by_every_route(raw, route):
    drive, rows = raw
    # The cache has room for a fifth of the pages.
    with open_table(drive, rows=ROWS, route=route, cache_bytes=1 << 20) as table:
        assert table.route == route and table.shape == (ROWS, 66)
        # The simulated drive has no memory of its own.
        assert [no.route for no in table.why_not_better] == (["gpu/posted"] if route == "gpu/posted" else [])
        for count in (1, 2, 63, 1000, 30_000):
            ids = RNG.integers(0, ROWS, count)
            assert same(table.gather(ids), rows[ids])
        grid = RNG.integers(0, ROWS, (7, 3, 5))
        assert same(table.gather(grid), rows[grid])
        assert same(table.gather([]), rows[:0]) and same(table.gather([ROWS - 1, 0, 0]), rows[[ROWS - 1, 0, 0]])


def test_the_cache_keeps_pages(raw):
    drive, rows = raw
    table = open_table(drive, rows=ROWS)
    assert table.cache == (0, 0, 0, 0) and table.route == "gpu/tier3"
    ids = RNG.integers(0, ROWS, 500)
    table.gather(ids)
    first = table.cache
    # Several rows share a page, which is read once.
    pages = {byte // 4096 for row in ids for byte in (264 * int(row), 264 * int(row) + 263)}
    assert first.reads == len(pages) <= first.wanted and first.failed_reads == 0
    table.gather(ids)
    second = table.cache
    assert second.reads == first.reads and second.hits - first.hits == second.wanted - first.wanted > 0
    assert onehop.Table(__file__, "U8", (1,), device="cpu").cache is None
    assert onehop.Table(__file__, "U8", (1,), device="cpu").route == "cpu/cached"


def test_strides_and_offsets(raw):
    drive, rows = raw
    data = rows.tobytes()
    for stride, offset, block in ((264, 0, 512), (512, 4, 512), (264, 516, 4096), (268, 264 * 33, 512)):
        with open_table(f"{drive}?lba={block}", rows=900, stride=stride, offset=offset) as table:
            ids = RNG.integers(0, 900, 1000)
            wanted = b"".join(data[offset + stride * int(i) :][:264] for i in ids)
            assert table.gather(ids).tobytes() == wanted, (stride, offset, block)
    # Rows longer than the largest page, and than one command may move.
    with open_table(f"{drive}?mdts=1", row=(25_000,), rows=52) as long:
        assert same(long.gather([51, 0, 7]), rows.reshape(-1)[: 52 * 25_000].reshape(52, -1)[[51, 0, 7]])
    # As many as there are.
    with open_table(drive) as table:
        assert len(table) == (len(data) + -len(data) % 4096) // 264 and same(table.gather([0]), rows[:1])


@needs_image
def test_files_and_tensors_of_a_file_system(tmp_path):
    rows, tensors = random_rows(), {"a": random_rows(3, 5), "table": random_rows(5000, 66)}

    def holes(path):
        with open(path, "wb") as file:
            for at in (0, 100 << 10, 300 << 10):
                file.seek(at)
                file.write(rows.tobytes()[at : at + 10_000])
            file.truncate(400 << 10)

    files = {
        "rows": lambda path: path.write_bytes(rows.tobytes()),
        "holes": holes,
        "model": lambda path: save_file(tensors, path),
        "empty": lambda path: path.touch(),
        "hole": lambda path: os.truncate(os.open(path, os.O_WRONLY | os.O_CREAT), 1 << 20),
    }
    drive = f"sim:{make_image(tmp_path, files)}"
    # mke2fs puts metadata between the parts of a file: rows that lie across are read by the CPU.
    with open_table(drive, path="/rows", partition="none", nsid=1) as table:
        assert len(table) == ROWS
        assert same(table.gather(range(ROWS)), rows)
    with open_table(drive, path="/holes", offset=8) as table:
        image = (tmp_path / "tree/holes").read_bytes()[8:]
        wanted = numpy.frombuffer(image[: len(image) // 264 * 264], numpy.uint32).reshape(-1, 66)
        assert same(table.gather(range(len(table))), wanted)
    on = {"drive": drive, "device": "cpu", "framework": "numpy"}
    with onehop.Table.from_safetensors("/model", "table", **on) as table:
        ids = RNG.integers(0, 5000, 5000)
        assert table.dtype == "U32" and same(table.gather(ids), tensors["table"][ids])
    for name in ("nosuch", "__metadata__"):
        with pytest.raises(errors.UnknownTensorError, match=name):
            onehop.Table.from_safetensors("/model", name, **on)
    with pytest.raises(errors.RequestError, match="no row of 264"):
        open_table(drive, path="/empty")
    with pytest.raises(errors.RequestError, match="no block"):
        open_table(drive, path="/hole")
    with pytest.raises(errors.MissingFileError):
        open_table(drive, path="/missing")
    with pytest.raises(errors.FormatError):
        onehop.Table.from_safetensors("/rows", "table", **on)
    # Nothing is left open.
    assert same(open_table(drive, path="/rows").gather([3]), rows[[3]])


def test_threads_and_tickets(raw):
    drive, rows = raw
    table, wrong = open_table(drive, rows=ROWS, cache_bytes=1 << 20), []
    lists = [RNG.integers(0, ROWS, 3000) for _ in range(12)]
    tickets = [table.prefetch(ids) for ids in lists]

    def work(seed):
        rng = numpy.random.default_rng(seed)
        for _ in range(10):
            ids = rng.integers(0, ROWS, rng.integers(1, 2000))
            if not same(table.gather(ids), rows[ids]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and all(same(table.wait(ticket, 60), rows[ids]) for ids, ticket in zip(lists, tickets))


def test_failed_rows_are_named(raw):
    drive, rows = raw
    table = open_table(f"{drive}?fault=media@lba=600-600", rows=ROWS)
    good = RNG.integers(2000, ROWS, 100)
    bad = 600 * 512 // 264 + 1
    with pytest.raises(errors.DriveError, match=f"1 of 101 rows .* row {bad}: "):
        table.gather([*good, bad])
    assert same(table.gather(good), rows[good])
    table.close()
    # A lost command costs its time limit, and is repeated.
    slow = open_table(f"{drive}?fault=lost@n=3", rows=ROWS)
    ids = range(0, ROWS, 100)
    assert same(slow.gather(ids), rows[ids])
    slow.close()
    gone = open_table(f"{drive}?fault=gone@n=20", rows=ROWS, cache_bytes=1 << 16)
    start = time.monotonic()
    with pytest.raises(errors.DriveError):
        for _ in range(100):
            gone.gather(RNG.integers(0, ROWS, 1000))
    assert time.monotonic() - start < 60
    gone.close()


def test_impossible_tables(raw, tmp_path):
    drive, rows = raw
    for error, options in (
        (errors.RequestError, {"row": (5,), "dtype": "U8", "rows": 3}),
        (errors.RequestError, {"rows": ROWS + 100}),
        (errors.RequestError, {"rows": 0}),
        (errors.RequestError, {"offset": 1 << 62, "rows": 1}),
        (errors.RequestError, {"stride": 260}),
        (errors.RequestError, {"stride": 266}),
        (errors.RequestError, {"offset": 2}),
        (errors.RequestError, {"route": "cpu/direct"}),
        (errors.RequestError, {"route": "cpu/cached"}),
        (errors.RequestError, {"route": "gpu/tier9"}),
        (errors.RequestError, {"nsid": 0}),
        (errors.RequestError, {"nsid": 7}),
        (errors.RequestError, {"cache_bytes": 0}),
        (errors.RequestError, {"cache_bytes": 100}),
        (errors.RequestError, {"cache_bytes": 1 << 50}),
        (errors.RequestError, {"partition": 1}),
        (errors.RequestError, {"path": "/a", "extent_map": "b", "partition": 1}),
        (errors.FileError, {"path": "/a", "extent_map": tmp_path / "nosuch"}),
        (errors.FormatError, {"path": "/a"}),
        (errors.RequestError, {"path": "/a", "partition": 1}),
        (errors.FileError, {"extent_map": tmp_path / "nosuch"}),
    ):
        with pytest.raises(error):
            open_table(drive, **options)
    with pytest.raises(errors.OnehopError):
        open_table("sim:/nosuch/drive", rows=1)
    with pytest.raises(errors.RequestError, match="for drive="):
        onehop.Table(__file__, "U8", (1,), device="cpu", cache_bytes=1 << 20)
    with pytest.raises(TypeError):
        onehop.Table(None, "U8", (1,), device="cpu")
    with pytest.raises(errors.RequestError):
        onehop.Table.from_safetensors(None, "a", drive=drive, device="cpu")
    table = open_table(drive, rows=ROWS)
    with pytest.raises(IndexError):
        table.gather([ROWS])
    with pytest.raises(errors.RequestError, match="row -1, which is number 1"):
        table.gather([3, -1])
    table.close()
    table.close()
    with pytest.raises(errors.RequestError, match="closed"):
        table.gather([1])
    with pytest.raises(errors.RequestError, match="closed"):
        table.cache  # noqa: B018


def test_a_child_leaves_its_parents_drive_alone(raw):
    drive, rows = raw
    table = open_table(drive, rows=ROWS)
    table.gather(range(1000))
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        status = 1
        try:
            with pytest.raises(errors.RequestError, match="fork"):
                table.gather([1])
            with pytest.raises(errors.RequestError, match="fork"):
                table.cache  # noqa: B018
            table.close()
            del table
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(table.gather(range(2000)), rows[:2000])


@needs_image
def test_a_tensor_of_the_second_file_of_a_model(tmp_path):
    tables = [random_rows(2000, 66), random_rows(2000, 66)]
    index = {"weight_map": {"first": "a.safetensors", "second": "b.safetensors"}}
    files = {
        "a.safetensors": lambda path: save_file({"first": tables[0]}, path),
        "b.safetensors": lambda path: save_file({"second": tables[1]}, path),
        "model.safetensors.index.json": lambda path: path.write_text(json.dumps(index)),
    }
    drive = f"sim:{make_image(tmp_path, files)}"
    for name, table in zip(index["weight_map"], tables):
        with onehop.Table.from_safetensors(
            "/model.safetensors.index.json", name, drive=drive, device="cpu", framework="numpy"
        ) as opened:
            assert same(opened.gather(range(2000)), table)


@needs_image
@pytest.mark.skipif(ONEHOP is None, reason="no onehop")
def test_files_of_an_extent_map(tmp_path):
    rows = [random_rows(3000), random_rows(2000)]
    files = {"one": lambda path: path.write_bytes(rows[0]), "two": lambda path: path.write_bytes(rows[1])}
    image = make_image(tmp_path, files)
    maps = tmp_path / "both.map"
    subprocess.run([ONEHOP, "map", "-d", f"sim:{image}", "--path", "/one", "--path", "/two", "--out", str(maps)], check=True)
    for name, table in zip(files, rows):
        with open_table(f"sim:{image}", path=f"/{name}", extent_map=maps) as opened:
            assert same(opened.gather(range(len(table))), table)
    with pytest.raises(errors.RequestError, match="name one of them"):
        open_table(f"sim:{image}", extent_map=maps)


@needs_image
@pytest.mark.skipif(ONEHOP is None, reason="no onehop")
def test_tensors_of_the_named_file_of_an_extent_map(tmp_path):
    tables = {"/a.safetensors": random_rows(300), "/b.safetensors": random_rows(300)}

    def write(rows):
        return lambda path: save_file({"table": rows}, path)

    image = make_image(tmp_path, {name[1:]: write(rows) for name, rows in tables.items()})
    drive, maps = f"sim:{image}", {}
    for names in (["/a.safetensors"], list(tables)):
        maps[len(names)] = tmp_path / f"{len(names)}.map"
        paths = [argument for name in names for argument in ("--path", name)]
        subprocess.run([ONEHOP, "map", "-d", drive, *paths, "--out", str(maps[len(names)])], check=True)

    def open_tensor(path, count):
        return onehop.Table.from_safetensors(
            path, "table", drive=drive, extent_map=maps[count], device="cpu", framework="numpy"
        )

    for path, table in tables.items():
        with open_tensor(path, 2) as opened:
            assert same(opened.gather(range(300)), table)
    with open_tensor(None, 1) as opened:
        assert same(opened.gather([7]), tables["/a.safetensors"][[7]])
    for path in ("/b.safetensors", "/nosuch"):
        with pytest.raises(errors.OnehopError, match=path):
            open_tensor(path, 1)


def test_arguments_of_any_integer_type_and_errors_that_name_them(raw):
    drive, rows = raw
    number = numpy.int64
    with open_table(drive, row=[number(66)], rows=number(5), offset=number(264), cache_bytes=number(1 << 20)) as table:
        assert same(table.gather([0]), rows[[1]])
        other = table.prefetch([2])
        for ids in ({1, 2}, {1: 2}, 5, [[1]], [1.0]):
            with pytest.raises(errors.RequestError, match="row numbers"):
                table.gather(ids)
        with open_table("sim:mem:1M", rows=5) as second:
            for ticket in (None, other):
                with pytest.raises(errors.RequestError, match="ticket"):
                    second.wait(ticket)
        assert same(table.wait(other, timeout=1e300), rows[[3]])
    wrong = {"rows": 1.5, "offset": -1, "stride": "264", "cache_bytes": 1.0, "nsid": 1 << 32, "route": None, "row": [2.0]}
    for argument, value in wrong.items():
        with pytest.raises(errors.RequestError, match=f"^{argument}="):
            open_table(drive, **{argument: value})


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt, also in a shell's background job."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_between_kernels(ctrl_c):
    rows = 1 << 15
    with open_table("sim:mem:128M?bandwidth=20M", row=(1,), stride=4096, rows=rows, cache_bytes=1 << 20) as table:
        # Kernels learn how many rows they have time for.
        table.gather(range(4000))
        timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            table.gather(range(rows))
        timer.join()
        # All of them take 6.5 seconds.
        assert time.monotonic() - begun < 3


@needs_server
def test_a_vfio_user_drive(raw, tmp_path):
    drive, rows = raw
    socket = tmp_path / "drive.sock"
    server = subprocess.Popen([ONEHOP, "sim", "serve", "-d", drive, "--socket", str(socket)], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 20
        while not socket.exists():
            assert server.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        for route in ("auto", *GPU_ROUTES):
            # The server has one client at a time.
            with open_table(f"vfio-user:{socket}", rows=ROWS, route=route, cache_bytes=1 << 20) as table:
                ids = RNG.integers(0, ROWS, 5000)
                assert same(table.gather(ids), rows[ids])
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=20)
