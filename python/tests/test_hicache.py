"""The storage backend for SGLang's HiCache, on a mock of SGLang and on SGLang itself where it is installed."""

import json
import os
import random

import numpy
import pytest
from conftest import engine, engine_kinds, in_threads
from onehop import errors

TOKENS, LAYERS, DIM = 4, 3, 40
PAGE = 2 * LAYERS * TOKENS * DIM


@pytest.fixture(params=engine_kinds("sglang"), scope="module")
def hicache(request):
    with engine("sglang", "onehop.hicache", mock=request.param == "mock") as module:
        yield module


class HostPool:
    """SGLang's host memory. A page is one array for keys and one for values, or two for each layer."""

    def __init__(self, layout="page_first", pages=64, parts=2, page_size=TOKENS):
        self.layout = layout
        self.page_size = page_size
        count = parts * (LAYERS if layout == "layer_first" else 1)
        self.parts = numpy.zeros((count, pages, PAGE // count), numpy.uint8)

    def get_page_buffer_meta(self, indices):
        pages = [index // self.page_size for index in indices.tolist()[:: self.page_size]]
        arrays = [self.parts[part, page] for page in pages for part in range(len(self.parts))]
        return [array.ctypes.data for array in arrays], [array.nbytes for array in arrays]

    def __getitem__(self, page):
        return self.parts[:, page].reshape(-1)

    def __setitem__(self, page, data):
        self.parts[:, page] = data.reshape(len(self.parts), -1)


def page_of(key):
    return numpy.random.default_rng(abs(hash(key))).integers(0, 256, PAGE, numpy.uint8)


def indices(pages):
    return numpy.concatenate([numpy.arange(page * TOKENS, (page + 1) * TOKENS) for page in pages])


def create(pool=None, *, size=64 * 4096, is_mla=False, ranks=1, **options):
    """A backend as SGLang creates it."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    text = json.dumps(
        {"backend_name": "onehop", "module_path": "onehop.hicache", "class_name": "OnehopHiCache", "interface_v1": 1}
        | {"path": "/dev/shm", "bytes": size} | options
    )
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=is_mla,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="model", extra_config=json.loads(text),
    )  # fmt: skip
    pool = pool or HostPool()
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    return backend


@pytest.mark.parametrize("layout,parts", [("page_first", 2), ("layer_first", 2), ("page_first", 1)])
def test_pages_of_host_memory_are_stored_and_loaded(hicache, layout, parts):
    pool = HostPool(layout, parts=parts)
    backend = create(pool, is_mla=parts == 1)
    for number, key in enumerate("abc"):
        pool[number] = page_of(key)
    assert backend.batch_set_v1(list("abc"), indices([0, 1, 2])) == [True] * 3
    assert backend.batch_exists(list("abxc")) == 2 and backend.exists("c") and not backend.exists("x")
    assert backend.batch_get_v1(list("cxa"), indices([9, 8, 7])) == [True, False, True]
    assert (pool[9] == page_of("c")).all() and (pool[7] == page_of("a")).all() and not pool[8].any()
    # The page that is there stays, as its key is a hash of what is in it.
    pool[0] = page_of("z")
    assert backend.batch_set_v1(["a", "a"], indices([0, 0])) == [True, True]
    assert backend.batch_get_v1(["a"], indices([3])) == [True] and (pool[3] == page_of("a")).all()
    backend.clear()
    assert backend.batch_exists(["a"]) == 0 and backend.batch_get_v1([], numpy.zeros(0, int)) == []
    backend.close()


def test_the_generic_interface(hicache):
    backend = create()
    target = numpy.zeros(PAGE, numpy.uint8)
    assert backend.get("a", target) is None and not target.any()
    assert backend.set("a", page_of("a")) and backend.batch_set(["b", "c"], [page_of("b"), page_of("c")])
    assert backend.get("a", target) is target and (target == page_of("a")).all()
    targets = [numpy.zeros(PAGE, numpy.uint8) for _ in range(3)]
    found = backend.batch_get(["c", "x", "b"], targets)
    assert found[0] is targets[0] and found[1] is None and (found[2] == page_of("b")).all()
    # As hf3fs and others do, both interfaces see the same pages.
    assert backend.batch_get_v1(["b"], indices([5])) == [True] and (backend.mem_pool_host[5] == page_of("b")).all()
    backend.close()


def test_wrong_sizes_are_misses_and_failures(hicache, caplog):
    backend = create()
    assert backend.set("a", page_of("a"))
    assert backend.get("a", numpy.zeros(PAGE - 1, numpy.uint8)) is None and backend.get("a", None) is None
    assert backend.exists("a")
    assert not backend.set("b", numpy.zeros(PAGE + 1, numpy.uint8)) and not backend.exists("b")
    assert backend.batch_set_v1(["b", "c"], indices([0])) == [False, False]
    assert backend.batch_get_v1(["a"], indices([0, 1])) == [False]
    with pytest.raises(errors.RequestError):
        backend.batch_set(["d", "e"], [page_of("d"), None])
    assert not backend.exists("d") and backend.set("d", page_of("d"))
    assert "2 pages cannot have 4 indices" in caplog.text and "does not fit" in caplog.text
    backend.close()


def test_a_batch_larger_than_the_file(hicache):
    backend = create(size=5 * 4096)
    keys = [str(number) for number in range(8)]
    stored = backend.batch_set_v1(keys, indices(range(8)))
    assert stored == [True] * 5 + [False] * 3 and backend.batch_exists(keys) == 5
    assert not backend.batch_set(keys, [page_of(key) for key in keys])
    backend.close()


def test_thousands_of_keys_with_eviction(hicache):
    pool = HostPool()
    backend = create(pool, size=500 * 4096)
    dice = random.Random(3)
    hits = 0
    for _ in range(150):
        keys = [str(dice.randrange(3000)) for _ in range(32)]
        for number, key in enumerate(keys):
            pool[number] = page_of(int(key))
        assert all(backend.batch_set_v1(keys, indices(range(32))))
        keys = [str(dice.randrange(3000)) for _ in range(32)]
        for number, found in enumerate(backend.batch_get_v1(keys, indices(range(32, 64)))):
            assert not found or (pool[32 + number] == page_of(int(keys[number]))).all()
            hits += found
    assert hits > 300
    backend.close()


def test_threads_for_prefetch_and_backup(hicache):
    pool = HostPool()
    backend = create(pool, size=20 * 4096)

    def work(number):
        dice = random.Random(number)
        for _ in range(150):
            key, page = dice.randrange(40), 2 * number
            pool[page] = page_of(key)
            backend.batch_set_v1([str(key)], indices([page]))
            key = dice.randrange(40)
            if backend.batch_get_v1([str(key)], indices([page + 1])) == [True]:
                assert (pool[page + 1] == page_of(key)).all()

    in_threads(work, 6)
    backend.close()


def test_a_closed_backend_and_a_new_one(hicache):
    pool = HostPool()
    backend = create(pool)
    assert backend.set("a", page_of("a"))
    backend.close()
    backend.close()
    assert not backend.exists("a") and backend.get("a", page_of("x")) is None and not backend.set("a", page_of("a"))
    assert backend.batch_get_v1(["a"], indices([0])) == [False] and backend.batch_set_v1(["a"], indices([0])) == [False]
    backend.clear()
    # A new one begins empty.
    backend.register_mem_pool_host(pool)
    assert not backend.exists("a") and backend.set("a", page_of("a"))
    other = create(pool)
    assert not other.exists("a")
    other.close()
    backend.close()


def create_hybrid():
    """A backend with a pool of states, as Mamba's, and one that goes with the keys and values."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    backend = create(size={"kv": 64 * 4096, "mamba": 8 * 4096, "indexer": 64 * 4096})
    pools = {PoolName.MAMBA: HostPool(parts=4, page_size=1), PoolName.INDEXER: HostPool(parts=1)}
    for name, pool in [(PoolName.KV, backend.mem_pool_host), *pools.items()]:
        backend.register_mem_host_pool_v2(pool, name)
    return backend, pools


def test_pools_of_hybrid_models(hicache):
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    backend, pools = create_hybrid()
    for name, pool in pools.items():
        pool[3], pool[4] = page_of(f"{name} a"), page_of(f"{name} b")
    states = PoolTransfer(name=PoolName.MAMBA, keys=["a", "b"], host_indices=numpy.array([3, 4]))
    others = PoolTransfer(name=PoolName.INDEXER, keys=["a"], host_indices=indices([3]))
    assert backend.batch_set_v2([states, others]) == {PoolName.MAMBA: [True, True], PoolName.INDEXER: [True]}
    assert not backend.exists("a")
    states = PoolTransfer(name=PoolName.MAMBA, keys=["b", "x", "a"], host_indices=numpy.array([10, 11, 12]))
    others = PoolTransfer(name=PoolName.INDEXER, keys=["b", "a"], host_indices=indices([8, 9]))
    found = backend.batch_get_v2([states, others])
    assert found == {PoolName.MAMBA: [True, False, True], PoolName.INDEXER: [False, True]}
    assert (pools[PoolName.MAMBA][10] == page_of("mamba b")).all() and (pools[PoolName.INDEXER][9] == page_of("indexer a")).all()
    wrong = PoolTransfer(name=PoolName.MAMBA, keys=["a"], host_indices=None)
    assert backend.batch_get_v2([wrong]) == {PoolName.MAMBA: [False]}
    backend.clear()
    assert backend.batch_get_v2([states]) == {PoolName.MAMBA: [False] * 3}
    backend.close()
    assert backend.batch_set_v2([states]) == {PoolName.MAMBA: [False] * 3}


def test_prefixes_that_all_pools_have(hicache):
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    dice = random.Random(2)
    keys = [f"key {number}" for number in range(8)]
    for _ in range(100):
        backend, pools = create_hybrid()
        stored = {}
        for name, pool in [(PoolName.KV, backend.mem_pool_host), *pools.items()]:
            stored[name] = [number for number in range(8) if dice.random() < 0.9]
            chosen = PoolTransfer(
                name=name,
                keys=[keys[number] for number in stored[name]],
                host_indices=numpy.array(stored[name]) if name == PoolName.MAMBA else indices(stored[name] or [0]),
            )
            if stored[name]:
                assert all(backend.batch_set_v2([chosen])[name])
        window = dice.randrange(1, 4)
        result = backend.batch_exists_v2(keys, [
            PoolTransfer(name=PoolName.INDEXER),
            PoolTransfer(name=PoolName.MAMBA, keys=keys[:window], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ])  # fmt: skip
        right = [
            length for length in range(1, 9)
            if {*range(length)} <= {*stored[PoolName.KV]} & {*stored[PoolName.INDEXER]}
            and {*range(max(0, length - window), length)} <= {*stored[PoolName.MAMBA]}
        ]  # fmt: skip
        assert result.restorable_prefix_pages == right and result.kv_hit_pages == max(right, default=0)
        assert result.extra_pool_hit_pages.get(PoolName.KV, 0) == backend.batch_exists(keys)
        backend.close()
    with pytest.raises(errors.RequestError, match="hit policy"):
        backend.batch_exists_v2(keys, [PoolTransfer(name=PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)])


def test_failed_writes_are_reported(hicache, monkeypatch):
    backend = create()

    def fails(*_):
        raise errors.PageError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(backend._pools["kv"].slots._pages, "write", fails)
        assert backend.batch_set_v1(["a", "b"], indices([0, 1])) == [False, False] and not backend.set("c", page_of("c"))
    assert backend.batch_exists(["a"]) == 0 and backend.set("a", page_of("a"))
    backend.close()


def test_a_child_has_only_misses(hicache):
    backend = create()
    assert backend.set("a", page_of("a"))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(backend.get("a", page_of("x")) is not None or backend.set("b", page_of("b")))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    backend.close()


def test_what_is_not_supported_is_refused(hicache):
    with pytest.raises(errors.RequestError, match="8 tensor-parallel ranks of an MLA model"):
        create(is_mla=True, ranks=8)
    create(ranks=8).close()
    backend = create()
    with pytest.raises(errors.RequestError, match='the file for the pool "mamba" is missing'):
        backend.register_mem_host_pool_v2(HostPool(), "mamba")
    backend.close()
    pool = HostPool()
    pool.kv_buffer = None
    with pytest.raises(errors.RequestError, match="primary pool has no memory"):
        create(pool)
    for options, words in [
        ({"path": None}, "path must be a directory"),
        ({"path": "/none"}, "path must be a directory"),
        ({"bytes": "1GB"}, "bytes must be an integer"),
        ({"bytes": 100}, "bytes must be at least"),
    ]:
        with pytest.raises(errors.RequestError, match=words):
            create(**options)
