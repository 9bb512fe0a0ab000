"""onehop.Pages, on the memory of the CPU, which stands for a GPU's."""

import os
import random
import threading
import time

import numpy
import pytest

import onehop
from onehop import errors

MIB = 1 << 20


@pytest.fixture(params=["/dev/shm", None], ids=["memory", "disk"])
def path(request, tmp_path):
    name = f"{request.param or tmp_path}/onehop-pages-{os.getpid()}"
    with open(name, "wb") as file:
        file.write(os.urandom(4 * MIB))
    yield name
    if os.path.exists(name):
        os.unlink(name)


def content(path):
    with open(path, "rb") as file:
        return numpy.frombuffer(file.read(), numpy.uint8)


def test_pages_of_any_length_are_read_and_written(path):
    shadow = content(path).copy()
    with onehop.Pages(path, device="cpu") as pages:
        assert pages.size == 4 * MIB and pages.device == "cpu"
        assert pages.register() == (4 * MIB if path.startswith("/dev/shm") else 0)
        for _ in range(30):
            lengths = [random.choice([1, 100, 4096, 65536, 300_000]) for _ in range(random.randint(1, 8))]
            places = random.sample(range(0, 4 * MIB - 400_000, 400_000), len(lengths))
            written = [numpy.frombuffer(os.urandom(length), numpy.uint8) for length in lengths]
            pages.write(written, places)
            for place, page in zip(places, written):
                shadow[place : place + len(page)] = page
            read = [numpy.zeros(length, numpy.uint8) for length in lengths]
            pages.read(read, places)
            assert all((page == other).all() for page, other in zip(read, written))
        pages.fsync()
        moved = pages.moved
        assert sum(moved.values()) > 0
        if path.startswith("/dev/shm"):
            assert moved["staged"] == 0, pages.why_staged
        else:
            assert moved["registered"] == 0 and pages.why_staged
    assert (content(path) == shadow).all()


def test_rows_of_one_array_are_pages(path):
    shadow = content(path)
    cache = numpy.zeros((16, 8, 512), numpy.float32)
    with onehop.Pages(path, device="cpu", mode="r") as pages:
        pages.read(cache, numpy.array([5 * 16384, 0]), rows=[3, 15])
        assert cache[3].tobytes() == shadow[5 * 16384 : 6 * 16384].tobytes()
        assert cache[15].tobytes() == shadow[:16384].tobytes()
        assert not cache[[0, 1, 2, 4, 14]].any()
        pages.read(cache, range(0, 16 * 16384, 16384))
        assert cache.tobytes() == shadow[: 16 * 16384].tobytes()
        with pytest.raises(errors.RequestError, match="row 16"):
            pages.read(cache, [0], rows=[16])
        with pytest.raises(errors.RequestError, match="reading only"):
            pages.write(cache, [0], rows=[0])


def test_a_file_is_created_once(tmp_path):
    name = tmp_path / "new"
    with onehop.Pages(name, device="cpu", create=MIB) as pages:
        assert pages.size == MIB and os.stat(name).st_blocks * 512 >= MIB
        pages.write([numpy.ones(4096, numpy.uint8)], [MIB])
        assert pages.size == MIB + 4096
    with onehop.Pages(name, device="cpu", create=10) as pages:
        assert pages.size == MIB + 4096
    with pytest.raises(errors.FileError):
        onehop.Pages(tmp_path / "none" / "new", device="cpu", create=10)
    with pytest.raises(FileNotFoundError):
        onehop.Pages(tmp_path / "none", device="cpu")
    with pytest.raises(errors.FileError):
        onehop.Pages(tmp_path, device="cpu", mode="r")


def test_bad_requests_say_what_is_wrong(path):
    pages = onehop.Pages(path, device="cpu")
    page = numpy.zeros(4096, numpy.uint8)
    with pytest.raises(errors.PageError, match="page 1 .*ends at byte") as caught:
        pages.read([page, page], [0, 4 * MIB - 1])
    assert caught.value.page == 1
    for arguments, words in [
        (([page], [0, 1]), "1 pages and 2 offsets"),
        (([page], [-1]), "integers from 0"),
        (([page], [1.5]), "integers from 0"),
        (([page], [1 << 63]), "integers from 0"),
        (([b"bytes"], [0]), "neither a torch tensor nor an array"),
        ((5, [0]), "neither a torch tensor nor an array"),
        ((numpy.zeros((), numpy.uint8), [0]), "no rows"),
        (([numpy.zeros((8, 8), numpy.uint8)[:, :4]], [0]), "not contiguous"),
        (([numpy.frombuffer(bytes(8), numpy.uint8)], [0]), "read-only"),
    ]:
        with pytest.raises(errors.RequestError, match=words):
            pages.read(*arguments)
    with pytest.raises(errors.RequestError, match="not of a list"):
        pages.read([page], [0], rows=[0])
    for arguments in [{"mode": "w"}, {"mode": "r", "create": 5}, {"registered": -1}, {"create": "5"}]:
        with pytest.raises(errors.RequestError):
            onehop.Pages(path, device="cpu", **arguments)
    pages.read([], [])
    pages.close()
    pages.close()
    with pytest.raises(errors.RequestError, match="closed"):
        pages.read([page], [0])
    assert "closed" in repr(pages)


def test_nothing_is_registered_if_that_is_asked_for(path):
    with onehop.Pages(path, device="cpu", registered=0) as pages:
        page = numpy.zeros(4096, numpy.uint8)
        pages.read([page], [0])
        assert pages.moved == {"registered": 0, "staged": 4096}


def test_another_program_can_open_the_file(path):
    shadow = content(path)
    with onehop.Pages(path, device="cpu") as pages:
        pages.register()
        page = numpy.zeros(MIB, numpy.uint8)
        pages.read([page], [0])
        begun = time.monotonic()
        with open(path, "rb") as other:
            assert time.monotonic() - begun < 2
            assert other.read(MIB) == page.tobytes()
            pages.read([page], [MIB])
            assert (page == shadow[MIB : 2 * MIB]).all()
        if path.startswith("/dev/shm"):
            assert pages.moved == {"registered": MIB, "staged": MIB}
            time.sleep(0.3)
            assert pages.register() == 4 * MIB
            pages.read([page], [0])
            assert pages.moved["registered"] == 2 * MIB


def test_a_closed_file_can_be_registered_anew(path):
    for mode in ["r+", "r", "r+", "r"]:
        with onehop.Pages(path, device="cpu", mode=mode) as pages:
            assert pages.register() == (4 * MIB if path.startswith("/dev/shm") else pages.register())
            pages.read([numpy.zeros(4096, numpy.uint8)], [0])


def test_nothing_of_a_closed_file_is_left(path):
    def descriptors():
        return [number for number in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{number}") == path]

    with open("/proc/self/maps") as maps:
        for _ in range(20):
            pages = onehop.Pages(path, device="cpu", registered=0)
            for _ in range(3):
                pages.write(numpy.ones((3, MIB), numpy.uint8), [0, MIB, 2 * MIB])
            assert descriptors()
            pages.close()
            maps.seek(0)
            assert not descriptors() and path not in maps.read()


def test_threads_share_a_file(path):
    failures = []

    def work(number):
        try:
            for round in range(20):
                page = numpy.full(65536, number * 20 + round, numpy.uint8)
                pages.write([page], [number * 65536])
                other = numpy.zeros(65536, numpy.uint8)
                pages.read([other], [number * 65536])
                assert (other == page).all()
        except BaseException as error:
            failures.append(error)

    with onehop.Pages(path, device="cpu") as pages:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_a_child_does_not_use_its_parents_file(path):
    pages = onehop.Pages(path, device="cpu")
    page = numpy.zeros(4096, numpy.uint8)
    pages.read([page], [0])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pages.read([page], [0])
        except errors.RequestError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pages.read([page], [4096])


def test_torch_tensors_of_the_cpu(path):
    torch = pytest.importorskip("torch")
    shadow = content(path)
    with onehop.Pages(path, device="cpu") as pages:
        cache = torch.zeros(8, 4096, dtype=torch.bfloat16)
        pages.read(cache, torch.arange(8) * 8192)
        assert cache.view(torch.uint8).numpy().tobytes() == shadow[:65536].tobytes()
        with pytest.raises(errors.RequestError, match="not contiguous"):
            pages.read(cache.t(), [0] * 4096)


cuda = pytest.mark.skipif("not __import__('importlib').util.find_spec('torch') or not __import__('torch').cuda.is_available()")


@cuda
def test_pages_of_a_gpu(path):
    import torch

    shadow = torch.frombuffer(bytearray(content(path).tobytes()), dtype=torch.uint8)
    with onehop.Pages(path, device="cuda:0") as pages:
        pages.register()
        for size in [16, 40, 512, 4096, 5000, 65536, MIB]:
            count = 4 * MIB // size
            cache = torch.zeros(count, size, dtype=torch.uint8, device="cuda")
            part = shadow[: count * size].view(count, size)
            order = torch.randperm(count)
            pages.read(cache, order * size)
            assert (cache.cpu() == part[order]).all()
            new = torch.randint(0, 255, (count, size), dtype=torch.uint8, device="cuda")
            # Its values are still being computed.
            cache.copy_(new.float().mul(1).to(torch.uint8))
            pages.write(cache, order * size)
            part[order] = new.cpu()
            assert (torch.from_numpy(content(path).copy()) == shadow).all()
            time.sleep(0.3)
        with pytest.raises(errors.RequestError, match="memory of the CPU"):
            pages.read(torch.zeros(1, 4096), [0])
        assert pages.moved["registered" if path.startswith("/dev/shm") else "staged"] > 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            other = cache + 1
            with pytest.raises(errors.RequestError, match="captured"):
                pages.read(cache, [0], rows=[0])
        graph.replay()
        torch.cuda.synchronize()
        assert (other == cache + 1).all()
