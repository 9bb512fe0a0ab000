"""The storage plugin for LMCache, on a mock of LMCache and on LMCache itself where it is installed."""

import asyncio
import os
import random
import threading
import types

import numpy
import onehop
import pytest
from conftest import DEVICES, engine, engine_kinds, in_threads
from onehop import errors

CHUNK = 4096


class Mock:
    """Chunks of the mock: the shape is how many bytes there are, the key any object."""

    def __init__(self):
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self.memory = LocalCPUBackend(None, CHUNK)
        self.metadata = None

    def config(self, plugin, local_cpu):
        return types.SimpleNamespace(chunk_size=16, local_cpu=local_cpu, storage_plugins=["onehop"], extra_config=plugin)

    def key(self, number):
        return number

    def chunk(self, size=CHUNK):
        from lmcache.v1.memory_management import MemoryFormat

        return self.memory.allocate(size, "uint8", MemoryFormat.KV_T2D)

    def write(self, chunk, data):
        chunk.data[:] = data if isinstance(chunk.data, numpy.ndarray) else chunk.data.new_tensor(data)

    def read(self, chunk):
        return chunk.data if isinstance(chunk.data, numpy.ndarray) else chunk.data.cpu().numpy()


class Real:
    """Chunks of LMCache."""

    def __init__(self):
        import torch
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self.metadata = LMCacheMetadata(
            model_name="model", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(2, 2, 16, 2, 16),
        )  # fmt: skip
        self.memory = LocalCPUBackend(self.config({}, False), self.metadata, dst_device="cpu")

    def config(self, plugin, local_cpu):
        from lmcache.v1.config import LMCacheEngineConfig

        config = LMCacheEngineConfig.from_defaults(chunk_size=16, local_cpu=local_cpu, max_local_cpu_size=0.1)
        config.storage_plugins = ["onehop"]
        config.extra_config = plugin
        return config

    def key(self, number):
        import torch
        from lmcache.utils import CacheEngineKey

        return CacheEngineKey("model", 1, 0, number, torch.bfloat16)

    def chunk(self, size=CHUNK):
        import torch
        from lmcache.v1.memory_management import MemoryFormat

        if size % 256:
            return self.memory.allocate(torch.Size([1, 1, size, 1]), torch.uint8, MemoryFormat.KV_2LTD)
        return self.memory.allocate(torch.Size([2, 2, size // 256, 32]), torch.bfloat16, MemoryFormat.KV_2LTD)

    def write(self, chunk, data):
        import torch

        chunk.raw_tensor[: chunk.get_size()] = torch.from_numpy(data)

    def read(self, chunk):
        return chunk.raw_tensor[: chunk.get_size()].cpu().numpy()


@pytest.fixture(params=engine_kinds("lmcache"), scope="module")
def lmcache(request):
    with engine("lmcache", "onehop.lmcache", mock=request.param == "mock"):
        yield Mock() if request.param == "mock" else Real()


def bytes_of(number, size=CHUNK):
    return numpy.random.default_rng(number).integers(0, 256, size, numpy.uint8)


def create(lmcache, *, size=64 * CHUNK, device="cpu", local_cpu=False, memory=True, **options):
    """The backend as LMCache creates it, or the exception that LMCache would log."""
    from lmcache.v1.storage_backend import storage_plugin_launcher

    options = {f"onehop.{name}": value for name, value in options.items()}
    plugin = {
        "storage_plugin.onehop.module_path": "onehop.lmcache",
        "storage_plugin.onehop.class_name": "OnehopBackend",
        "onehop.path": "/dev/shm",
        "onehop.bytes": size,
    } | options
    backends = {}
    memory = lmcache.memory if memory else None
    storage_plugin_launcher(lmcache.config(plugin, local_cpu), lmcache.metadata, None, memory, device, backends)
    return backends.get("onehop")


def put(lmcache, backend, numbers, on_complete=None, size=CHUNK):
    """Stores chunks, and returns the futures."""
    chunks = []
    for number in numbers:
        chunks.append(lmcache.chunk(size))
        lmcache.write(chunks[-1], bytes_of(number, size))
    futures = backend.batched_submit_put_task([lmcache.key(number) for number in numbers], chunks, None, on_complete)
    for chunk in chunks:
        chunk.ref_count_down()
    return futures or []


def store(lmcache, backend, numbers, **options):
    for future in put(lmcache, backend, numbers, **options):
        future.result(10)


def is_right(lmcache, chunk, number):
    right = (lmcache.read(chunk) == bytes_of(number, chunk.get_size())).all()
    assert chunk.get_ref_count() == 1
    chunk.ref_count_down()
    return right


def test_chunks_are_stored_and_loaded(lmcache):
    backend = create(lmcache)
    key = lmcache.key
    done = []
    futures = put(lmcache, backend, [1, 2, 3], done.append)
    assert len(futures) == 3
    for future in futures:
        future.result(10)
    assert done == [key(1), key(2), key(3)] and not backend.exists_in_put_tasks(key(1))
    assert backend.contains(key(1)) and not backend.contains(key(9))
    assert backend.batched_contains([key(1), key(2), key(9), key(3)]) == 2
    assert is_right(lmcache, backend.get_blocking(key(2)), 2) and backend.get_blocking(key(9)) is None
    found = backend.batched_get_blocking([key(3), key(9), key(1)])
    assert found[1] is None and is_right(lmcache, found[0], 3) and is_right(lmcache, found[2], 1)
    # Stored chunks are not stored again.
    assert put(lmcache, backend, [1, 2]) == []
    backend.close()


def test_what_describes_a_chunk_is_kept(lmcache):
    backend = create(lmcache)
    for number, size in enumerate([CHUNK, 1024, 777]):
        store(lmcache, backend, [number], size=size)
    for number, size in enumerate([CHUNK, 1024, 777]):
        wanted, found = lmcache.chunk(size).metadata, backend.get_blocking(lmcache.key(number))
        assert (found.metadata.shapes, found.metadata.dtypes, found.metadata.fmt) == (wanted.shapes, wanted.dtypes, wanted.fmt)
        assert found.get_size() == size and is_right(lmcache, found, number)
    backend.close()


def test_the_asynchronous_interface_stops_at_the_first_miss(lmcache):
    backend = create(lmcache)
    store(lmcache, backend, [1, 2, 4])
    keys = [lmcache.key(number) for number in [1, 2, 3, 4]]

    async def look():
        hits = await backend.batched_async_contains("id", keys, pin=True)
        return hits, await backend.batched_get_non_blocking("id", keys, None)

    hits, found = asyncio.run(look())
    assert hits == 2 and len(found) == 2 and is_right(lmcache, found[0], 1) and is_right(lmcache, found[1], 2)
    assert backend.unpin(keys[0]) and not backend.unpin(keys[2])
    backend.close()


def test_pinned_chunks_stay(lmcache):
    backend = create(lmcache, size=3 * CHUNK)
    key = lmcache.key
    store(lmcache, backend, [1, 2, 3])
    assert backend.contains(key(1), pin=True) and backend.pin(key(2)) and not backend.pin(key(9))
    store(lmcache, backend, [4, 5, 6])
    assert backend.contains(key(1)) and backend.contains(key(2)) and backend.contains(key(4)) + backend.contains(key(6)) == 1
    assert not backend.remove(key(1), force=False) and backend.remove(key(1)) and not backend.remove(key(1))
    assert backend.batched_remove([key(1), key(2), key(9)]) == 1
    store(lmcache, backend, [7, 8])
    assert backend.clear() == 3 * 16 and not backend.contains(key(7)) and backend.clear() == 0
    backend.close()


def test_thousands_of_chunks_with_eviction(lmcache):
    backend = create(lmcache, size=300 * CHUNK)
    dice = random.Random(5)
    hits = 0
    for _ in range(150):
        store(lmcache, backend, dice.sample(range(2000), 20))
        numbers = [dice.randrange(2000) for _ in range(20)]
        for number, chunk in zip(numbers, backend.batched_get_blocking([lmcache.key(number) for number in numbers])):
            if chunk is not None:
                assert is_right(lmcache, chunk, number)
                hits += 1
    assert hits > 200
    backend.close()


def test_threads(lmcache):
    backend = create(lmcache, size=20 * CHUNK)

    def work(seed):
        dice = random.Random(seed)
        for _ in range(100):
            put(lmcache, backend, [dice.randrange(40), dice.randrange(40)])
            number = dice.randrange(40)
            chunk = backend.get_blocking(lmcache.key(number))
            assert chunk is None or is_right(lmcache, chunk, number)

    in_threads(work, 6)
    backend.close()


def test_failed_writes_are_reported_and_never_found(lmcache, monkeypatch, caplog):
    backend = create(lmcache)
    done = []

    def fails(*_):
        raise errors.PageError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(backend._slots._pages, "write", fails)
        for future in put(lmcache, backend, [1, 2], done.append):
            with pytest.raises(errors.OnehopError, match="2 chunks were not stored"):
                future.result(10)
    assert not done and not backend.contains(lmcache.key(1)) and not backend.exists_in_put_tasks(lmcache.key(1))
    assert "no space" in caplog.text
    assert put(lmcache, backend, [1], size=2 * CHUNK) == [] and "does not fit" in caplog.text
    store(lmcache, backend, [1])
    with pytest.raises(errors.RequestError, match="same length"):
        backend.batched_submit_put_task([lmcache.key(1)], [])
    backend.close()


def test_failed_reads_are_misses_without_leaks(lmcache, monkeypatch):
    backend = create(lmcache)
    allocated = []

    def allocate(*arguments, **options):
        allocated.append(type(lmcache.memory).allocate(lmcache.memory, *arguments, **options))
        return allocated[-1]

    monkeypatch.setattr(lmcache.memory, "allocate", allocate)
    for error, references in [(errors.PageError("bad disk"), 0), (errors.StalledError("no answer"), 1)]:
        store(lmcache, backend, [1, 2])
        allocated.clear()

        def fails(*_):
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(backend._slots._pages, "read", fails)
            assert backend.batched_get_blocking([lmcache.key(1), lmcache.key(2)]) == [None, None]
        assert [chunk.get_ref_count() for chunk in allocated] == [references] * 2
        assert not backend.contains(lmcache.key(1))
    # After a stall nothing is stored.
    assert put(lmcache, backend, [1]) == []
    backend.close()


def test_memory_may_run_out(lmcache, monkeypatch):
    backend = create(lmcache)
    store(lmcache, backend, [1, 2])
    monkeypatch.setattr(lmcache.memory, "allocate", lambda *_, **__: None)
    assert backend.batched_get_blocking([lmcache.key(1), lmcache.key(2)]) == [None, None]
    monkeypatch.undo()
    assert is_right(lmcache, backend.get_blocking(lmcache.key(1)), 1)
    backend.close()


def test_a_closed_backend_and_a_new_one(lmcache):
    backend = create(lmcache)
    store(lmcache, backend, [1])
    backend.close()
    backend.close()
    assert not backend.contains(lmcache.key(1)) and backend.get_blocking(lmcache.key(1)) is None
    assert put(lmcache, backend, [2]) == []
    first, second = create(lmcache), create(lmcache)
    store(lmcache, first, [1])
    assert first.contains(lmcache.key(1)) and not second.contains(lmcache.key(1))
    first.close()
    second.close()


def test_a_child_has_only_misses(lmcache):
    backend = create(lmcache)
    store(lmcache, backend, [1])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(backend.get_blocking(lmcache.key(1)) is not None)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    backend.close()


def test_gpu_memory_has_a_buffer_of_its_own(lmcache, monkeypatch):
    if "cuda:0" not in DEVICES:
        monkeypatch.setattr(onehop._slots, "Pages", lambda name, device, create: onehop.Pages(name, device="cpu", create=create))
    backend = create(lmcache, device="cuda:0", size=200 * CHUNK, buffer_bytes=5000 * CHUNK)
    assert backend.get_allocator_backend() is backend and backend.get_memory_allocator() is backend._buffer
    layout = lmcache.chunk().metadata
    for batch in range(40):
        numbers = range(10 * batch, 10 * batch + 10)
        chunks = [backend.allocate(layout.shapes, layout.dtypes, busy_loop=False) for _ in numbers]
        for number, chunk in zip(numbers, chunks):
            lmcache.write(chunk, bytes_of(number))
        for future in backend.batched_submit_put_task([lmcache.key(number) for number in numbers], chunks):
            future.result(10)
        assert all(is_right(lmcache, chunk, number) for number, chunk in zip(numbers, chunks))
    found = backend.batched_get_blocking([lmcache.key(number) for number in range(400)])
    assert found[:200] == [None] * 200 and all(is_right(lmcache, found[number], number) for number in range(200, 400))
    too_large = lmcache.chunk(6000 * CHUNK).metadata
    assert backend.allocate(too_large.shapes, too_large.dtypes) is None
    assert len(backend.batched_allocate(layout.shapes, layout.dtypes, 2)) == 2
    backend.close()


def test_invalid_options_are_refused(lmcache, caplog):
    for options, words in [
        ({"memory": False}, "max_local_cpu_size"),
        ({"device": "cuda:0", "local_cpu": True}, "local_cpu: false"),
        ({"path": "/none"}, "path must be a directory"),
        ({"bytes": "1GB"}, "bytes must be an integer"),
        ({"bytes": 100}, "bytes must be at least"),
    ]:
        assert refusal(lmcache, caplog, **options).find(words) >= 0


def refusal(lmcache, caplog, **options):
    """Why the backend is not created. LMCache logs it, the mock raises it."""
    import logging

    caplog.clear()
    for name in ["lmcache.v1.storage_backend", "lmcache"]:
        logging.getLogger(name).propagate = True
    try:
        assert create(lmcache, **options) is None
    except errors.RequestError as error:
        return str(error)
    return caplog.text


def test_the_memory_is_lmcaches_on_a_cpu(lmcache):
    backend = create(lmcache, local_cpu=True)
    layout = lmcache.chunk().metadata
    assert backend.get_allocator_backend() is lmcache.memory
    assert backend.get_memory_allocator() is lmcache.memory.get_memory_allocator()
    assert len(backend.batched_allocate(layout.shapes, layout.dtypes, 2)) == 2
    backend.close()


def test_an_exception_leaves_nothing_reserved_or_referenced(lmcache, monkeypatch):
    backend = create(lmcache)
    chunks = [lmcache.chunk(number) for number in (1, 2)]
    before = [chunk.get_ref_count() for chunk in chunks]

    def fails(*_):
        raise RuntimeError("cannot schedule new futures after shutdown")

    with monkeypatch.context() as patched:
        patched.setattr(backend._writer, "submit", fails)
        with pytest.raises(RuntimeError):
            backend.batched_submit_put_task([lmcache.key(1), lmcache.key(2)], chunks)
    assert [chunk.get_ref_count() for chunk in chunks] == before
    assert not backend.exists_in_put_tasks(lmcache.key(1))
    store(lmcache, backend, [1, 2])
    allocated = []

    def allocate(*arguments, **options):
        if allocated:
            raise MemoryError
        allocated.append(type(lmcache.memory).allocate(lmcache.memory, *arguments, **options))
        return allocated[-1]

    with monkeypatch.context() as patched:
        patched.setattr(lmcache.memory, "allocate", allocate)
        with pytest.raises(MemoryError):
            backend.batched_get_blocking([lmcache.key(1), lmcache.key(2)])
    assert [chunk.get_ref_count() for chunk in allocated] == [0]
    assert is_right(lmcache, backend.get_blocking(lmcache.key(1)), 1)
    backend.close()


def test_a_cancelled_read_releases_its_chunks(lmcache, monkeypatch):
    backend = create(lmcache)
    store(lmcache, backend, [1])
    begun, go_on = threading.Event(), threading.Event()
    read, chunks = backend.batched_get_blocking, []

    def slow(keys):
        begun.set()
        assert go_on.wait(10)
        chunks.extend(read(keys))
        return chunks

    monkeypatch.setattr(backend, "batched_get_blocking", slow)

    async def cancel():
        task = asyncio.ensure_future(backend.batched_get_non_blocking("lookup", [lmcache.key(1)]))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        while not chunks or chunks[0].get_ref_count():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(cancel(), 10))
    backend.close()
