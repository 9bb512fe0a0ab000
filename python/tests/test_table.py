"""Tables: rows by their numbers, as in NumPy."""

import os
import threading
from concurrent.futures import Future

import numpy
import onehop
import pytest
from onehop import errors
from safetensors.numpy import save_file

RNG = numpy.random.default_rng()


@pytest.fixture
def table_file(tmp_path):
    """Rows of random F16 after a header of 24 bytes, and the array."""
    rows = RNG.integers(0, 1 << 16, size=(5000, 132), dtype=numpy.uint16).view(numpy.float16)
    path = tmp_path / "table.bin"
    path.write_bytes(b"x" * 24 + rows.tobytes())
    return path, rows


def same(found, expected):
    return found.shape == expected.shape and found.tobytes() == expected.tobytes()


def test_rows_are_those_of_numpy(table_file):
    path, rows = table_file
    table = onehop.Table(path, "F16", (132,), offset=24, device="cpu", framework="numpy")
    assert len(table) == 5000 and table.shape == (5000, 132) and table.dtype == "F16" and table.device == "cpu"
    assert table.nbytes == rows.nbytes and "5000" in repr(table)
    for count in (1, 2, 63, 1000, 20_000):
        ids = RNG.integers(0, 5000, count)
        assert same(table.gather(ids), rows[ids])
        assert same(table.gather(ids.tolist()), rows[ids])
        assert same(table.gather(ids.astype(numpy.uint32)), rows[ids])
    grid = RNG.integers(0, 5000, (7, 3, 5))
    assert same(table.gather(grid), rows[grid])
    assert same(table.gather(range(10)), rows[:10])
    assert same(table.gather([]), rows[:0])


def test_shapes_strides_and_types(table_file, tmp_path):
    path, rows = table_file
    table = onehop.Table(path, numpy.float16, (2, 66), offset=24, rows=10, stride=528, device="cpu", framework="numpy")
    ids = [9, 0, 4]
    assert same(table.gather(ids), rows.reshape(-1, 132)[::2][ids].reshape(3, 2, 66))
    assert len(onehop.Table(path, "float16", (132,), offset=24, stride=528, device="cpu")) == 2500
    other = tmp_path / "longs.bin"
    longs = RNG.integers(-1 << 62, 1 << 62, (300,))
    other.write_bytes(longs.tobytes())
    found = onehop.Table(other, "int64", (), device="cpu", framework="numpy").gather([299, 0])
    assert same(found, longs[[299, 0]])
    single = onehop.Table(os.fsencode(other), "int64", (), device="cpu", framework="numpy")
    assert same(single.gather(numpy.array(7)), longs[7].reshape(()))
    assert onehop.Table(path, "F16", 132, offset=24, device="cpu").shape == (5000, 132)


def test_a_tensor_of_a_safetensors_file(tmp_path):
    tensors = {"a": RNG.standard_normal((3, 4)), "table": RNG.standard_normal((1000, 2, 33)).astype(numpy.float32)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    table = onehop.Table.from_safetensors(path, "table", device="cpu", framework="numpy")
    ids = RNG.integers(0, 1000, 500)
    assert same(table.gather(ids), tensors["table"][ids])
    for name in ("nosuch", "__metadata__"):
        with pytest.raises(errors.UnknownTensorError, match=name):
            onehop.Table.from_safetensors(path, name, device="cpu")


def test_prefetch_runs_in_the_background(table_file):
    path, rows = table_file
    table = onehop.Table(path, "F16", (132,), offset=24, device="cpu", framework="numpy")
    lists = [RNG.integers(0, 5000, 3000) for _ in range(20)]
    tickets = [table.prefetch(ids) for ids in lists]
    for ids, ticket in zip(lists, tickets):
        assert same(table.wait(ticket, 60), rows[ids])
        assert ticket.done()
    with pytest.raises(TimeoutError):
        onehop.Ticket(table, Future()).result(0.01)
    bad = table.prefetch([1, 5000])
    with pytest.raises(errors.RowError):
        bad.result(60)


def test_many_threads(table_file):
    path, rows = table_file
    table = onehop.Table(path, "F16", (132,), offset=24, device="cpu", framework="numpy")
    wrong = []

    def work(seed):
        rng = numpy.random.default_rng(seed)
        for _ in range(30):
            ids = rng.integers(0, 5000, rng.integers(1, 4000))
            if not same(table.gather(ids), rows[ids]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_rows_that_do_not_exist(table_file):
    path, _ = table_file
    table = onehop.Table(path, "F16", (132,), offset=24, device="cpu", framework="numpy")
    for ids in ([5000], [0, 1 << 62], numpy.array([1 << 63], dtype=numpy.uint64)):
        with pytest.raises(IndexError):
            table.gather(ids)
    with pytest.raises(errors.RequestError, match="row -1, which is number 2"):
        table.gather([3, 4, -1])
    for ids in ([0.5], ["1"], numpy.array([1.0]), [1 << 64], b"12345678", bytearray(9), "12"):
        with pytest.raises(errors.RequestError):
            table.gather(ids)
    with pytest.raises(errors.RequestError, match="out must be"):
        table.gather([0], out=numpy.zeros((1, 132), numpy.float16))


def test_impossible_tables(table_file, tmp_path):
    path, _ = table_file
    for dtype, row, options in (
        ("F17", (1,), {}),
        ("F16", (), {"rows": 0}),
        ("F16", (0,), {}),
        ("F16", (1 << 30,), {}),
        ("F16", (132,), {"rows": 5001}),
        ("F16", (132,), {"stride": 263}),
        ("F16", (132,), {"offset": 1 << 62}),
        ("F16", (132,), {"offset": -1}),
        ("F16", (1.5,), {}),
        ("F16", (1,) * 17, {}),
        ("F16", (132,), {"device": "nosuch"}),
        ("F16", (132,), {"framework": "nosuch"}),
    ):
        with pytest.raises(errors.RequestError):
            onehop.Table(path, dtype, row, **{"device": "cpu", **options})
    with pytest.raises(FileNotFoundError):
        onehop.Table(tmp_path / "nosuch", "F16", (1,), device="cpu")
    with pytest.raises(errors.OnehopError):
        onehop.Table(tmp_path, "F16", (1,), device="cpu")
    (tmp_path / "empty").touch()
    with pytest.raises(errors.RequestError):
        onehop.Table(tmp_path / "empty", "F16", (1,), device="cpu")


def test_a_truncated_file(table_file):
    path, rows = table_file
    table = onehop.Table(path, "F16", (132,), offset=24, device="cpu", framework="numpy")
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(errors.ChangedFileError):
        table.gather([4999])
    os.truncate(path, 24 + 100 * 264)
    with pytest.raises(errors.ChangedFileError):
        table.gather(range(5000))


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errors.FileError):
        onehop.Table(tmp_path / "pipe", "U8", (1,), device="cpu")


def test_tables_share_threads_and_memory(table_file):
    path, rows = table_file
    onehop.Table(path, "F16", (132,), offset=24, device="cpu").gather(range(4000))
    found = []

    def work():
        table = onehop.Table(path, "F16", (132,), offset=24, device="cpu", framework="numpy")
        found.append(same(table.gather(range(4000)), rows[:4000]))

    before = len(os.listdir("/proc/self/task"))
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
    # One engine: no more threads than CPUs.
    assert len(os.listdir("/proc/self/task")) - before <= (os.cpu_count() or 1)


def test_a_child_opens_its_own_table(table_file):
    path, rows = table_file
    table = onehop.Table(path, "F16", (132,), offset=24, device="cpu", framework="numpy")
    table.gather(range(4000))
    done = table.prefetch(range(100))
    done.result(60)
    under_way = table.prefetch(list(range(5000)) * 400)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                table.gather([1])
            except errors.RequestError:
                with pytest.raises(errors.RequestError):
                    table.prefetch([1])
                with pytest.raises(errors.RequestError):
                    under_way.result(60)
                assert same(done.result(60), rows[:100])
                own = onehop.Table(path, "F16", (132,), offset=24, device="cpu", framework="numpy")
                status = 0 if same(own.gather(range(4000)), rows[:4000]) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(under_way.result(60)[:5000], rows)
