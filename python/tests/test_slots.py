"""Slots of a file for the pages of a cache, on the memory of the CPU."""

import os
import random

import numpy
import pytest
from conftest import in_threads
from onehop import errors
from onehop._slots import Slots

PAGE = 5000
FOLDERS = ["/dev/shm", None]


@pytest.fixture(params=FOLDERS, ids=["memory", "disk"])
def folder(request, tmp_path):
    return request.param or str(tmp_path)


def open_slots(folder, count=8, page_size=PAGE):
    return Slots(folder, count * 8192, page_size, "cpu")


def page_of(key, size=PAGE):
    """The bytes of this key's page, and of no other's."""
    return numpy.random.default_rng(key).integers(0, 256, size, numpy.uint8)


def store(slots, keys, size=PAGE):
    transfers = []
    for key in keys:
        slot = slots.reserve(key, size)
        if slot is not None:
            transfers.append((slot, [page_of(key, size)]))
    return slots.write(transfers)


def load(slots, key, size=PAGE):
    """The page's bytes, or None."""
    memory = numpy.zeros(size, numpy.uint8)
    with slots.using([key]) as (slot,):
        return memory if slot is not None and slots.read([(slot, [memory])]) else None


def is_right(slots, key):
    found = load(slots, key)
    assert found is None or (found == page_of(key)).all()
    return found is not None


def test_thousands_of_pages_make_room_for_each_other(folder):
    slots = open_slots(folder, 300)
    dice = random.Random(1)
    recent = []
    for _ in range(400):
        keys = [dice.randrange(2000) for _ in range(10)]
        assert store(slots, keys)
        for key in keys:
            recent = [other for other in recent if other != key] + [key]
        for key in dice.sample(range(2000), 20):
            if is_right(slots, key):
                recent = [other for other in recent if other != key] + [key]
            else:
                assert key not in recent[-300:]
    assert all(is_right(slots, key) for key in recent[-300:])
    slots.close()


def test_the_file_has_no_name_and_is_gone_afterwards(folder):
    before, open_before = set(os.listdir(folder)), len(os.listdir("/proc/self/fd"))
    first, second = open_slots(folder), open_slots(folder)
    assert set(os.listdir(folder)) == before
    assert store(first, [1]) and not second.contains(1)
    first.close()
    second.close()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_pages_of_several_parts(folder):
    slots = open_slots(folder)
    page = page_of(1)
    assert slots.write([(slots.reserve("k", PAGE), [page[:1], page[1:4000], page[4000:]])])
    parts = [numpy.zeros(2500, numpy.uint8), numpy.zeros(2500, numpy.uint8)]
    with slots.using(["k"]) as (slot,):
        assert slots.read([(slot, parts)])
    assert (numpy.concatenate(parts) == page).all()


def test_a_page_is_not_found_before_it_is_written(folder):
    slots = open_slots(folder)
    slot = slots.reserve(1, PAGE, "info")
    assert not slots.contains(1) and load(slots, 1) is None and slots.is_being_written(1)
    assert slots.reserve(1, PAGE) is None
    assert slots.write([(slot, [page_of(1)])])
    assert slots.contains(1) and not slots.is_being_written(1) and is_right(slots, 1)
    with slots.using([1, 2]) as (found, none):
        assert found.info == "info" and none is None


def test_pinned_and_used_slots_stay(folder):
    slots = open_slots(folder, 3)
    assert store(slots, [1, 2, 3])
    assert slots.contains(1, pin=True) and slots.contains(1, pin=True) and not slots.contains(9, pin=True)
    writing = None
    with slots.using([2]):
        writing = slots.reserve(4, PAGE)
        assert writing is not None and not slots.contains(3)
        assert slots.reserve(5, PAGE) is None
    assert store(slots, [5]) and not slots.contains(2)
    assert slots.unpin(1) and store(slots, [6]) and slots.contains(1) and not slots.contains(5)
    assert slots.unpin(1) and slots.unpin(1) and not slots.unpin(99)
    assert store(slots, [7, 8]) and not slots.contains(6)
    assert slots.write([(writing, [page_of(4)])]) and is_right(slots, 4)


def test_removed_pages_free_their_slots_after_the_last_use(folder):
    slots = open_slots(folder, 1)
    assert store(slots, [1]) and slots.contains(1, pin=True)
    assert not slots.remove(1, force=False) and not slots.remove(2)
    with slots.using([1]) as (slot,):
        assert slots.remove(1) and not slots.contains(1)
        assert slots.reserve(2, PAGE) is None
        memory = numpy.zeros(PAGE, numpy.uint8)
        assert slots.read([(slot, [memory])]) and (memory == page_of(1)).all()
    assert store(slots, [2]) and is_right(slots, 2)
    # Removed, and stored anew, while it is being written.
    slots = open_slots(folder, 2)
    old = slots.reserve(1, PAGE)
    assert slots.remove(1)
    new = slots.reserve(1, PAGE)
    assert slots.write([(old, [page_of(5)])]) and not slots.contains(1)
    assert slots.write([(new, [page_of(1)])]) and is_right(slots, 1)
    assert slots.clear() == 1 and not slots.contains(1)
    assert store(slots, [3, 4]) and is_right(slots, 3) and is_right(slots, 4)


def failing(error):
    def fails(*_):
        raise error
    return fails


def test_failed_writes_are_never_found(folder, monkeypatch, caplog):
    slots = open_slots(folder, 2)
    with monkeypatch.context() as patched:
        patched.setattr(slots._pages, "write", failing(errors.PageError("no space")))
        for round in range(5):
            assert not store(slots, [1, 2])
            assert not slots.contains(1) and not slots.is_being_written(2)
    assert "no space" in caplog.text
    with monkeypatch.context() as patched:
        patched.setattr(slots._pages, "write", failing(MemoryError()))
        with pytest.raises(MemoryError):
            store(slots, [1, 2])
    assert not slots.write([(slots.reserve(1, PAGE), [page_of(1, 10)])]) and not slots.contains(1)
    assert slots.reserve(1, PAGE + 1) is None and slots.reserve(1, 0) is None
    assert store(slots, [1, 2]) and is_right(slots, 1) and is_right(slots, 2)


def test_pages_that_cannot_be_read_are_forgotten(folder, monkeypatch):
    slots = open_slots(folder, 2)
    assert store(slots, [1])
    # The caller's mistake does not harm the page.
    assert load(slots, 1, size=10) is None and is_right(slots, 1)
    with monkeypatch.context() as patched:
        patched.setattr(slots._pages, "read", failing(errors.PageError("bad disk")))
        assert load(slots, 1) is None
    assert not slots.contains(1)
    assert store(slots, [1, 2]) and is_right(slots, 1) and is_right(slots, 2)


def test_nothing_is_used_after_a_stall(folder, monkeypatch):
    for name in ["read", "write"]:
        slots = open_slots(folder)
        assert store(slots, [1])
        monkeypatch.setattr(slots._pages, name, failing(errors.StalledError("no answer")))
        if name == "read":
            with pytest.raises(errors.StalledError):
                load(slots, 1)
        else:
            assert not store(slots, [2])
        assert not slots.contains(1) and not slots.contains(2) and slots.reserve(3, PAGE) is None
        slots.close()


def test_a_closed_file_has_no_pages(folder):
    slots = open_slots(folder)
    assert store(slots, [1])
    writing = slots.reserve(2, PAGE)
    with slots.using([1]) as (slot,):
        slots.close()
        slots.close()
        assert not slots.read([(slot, [page_of(1)])])
    assert not slots.write([(writing, [page_of(2)])])
    assert not slots.contains(1) and slots.reserve(3, PAGE) is None


def test_a_child_has_only_misses(folder):
    slots = open_slots(folder)
    assert store(slots, [1])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if load(slots, 1) is None and not store(slots, [2]):
                slots.close()
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_right(slots, 1)


def test_threads_never_see_the_bytes_of_another_key(folder):
    slots = open_slots(folder, 12)
    hits = []

    def work(number):
        dice = random.Random(number)
        for _ in range(300):
            key = dice.randrange(40)
            action = dice.random()
            if action < 0.4:
                store(slots, [key, dice.randrange(40)])
            elif action < 0.9:
                if is_right(slots, key):
                    hits.append(key)
            elif action < 0.95:
                slots.remove(key)
            elif slots.contains(key, pin=True):
                slots.unpin(key)

    in_threads(work, 8)
    assert len(hits) > 100
    # No slot is lost.
    slots.clear()
    assert all(slots.reserve(key, PAGE) is not None for key in range(100, 112))
    assert slots.reserve(112, PAGE) is None


def test_invalid_options_are_refused(tmp_path):
    for folder, size, page_size, words in [
        (None, 8192, 1, "path must be a directory"),
        (5, 8192, 1, "path must be a directory"),
        (tmp_path / "none", 8192, 1, "path must be a directory"),
        (tmp_path, None, 1, "bytes must be an integer"),
        (tmp_path, "64 GiB", 1, "bytes must be an integer"),
        (tmp_path, True, 1, "bytes must be an integer"),
        (tmp_path, 8191, 4097, "at least 8192"),
        (tmp_path, -1, 1, "at least 4096"),
        (tmp_path, 8192, 0, "0 bytes"),
    ]:
        with pytest.raises(errors.RequestError, match=words):
            Slots(folder, size, page_size, "cpu")
    with pytest.raises(errors.FileError):
        Slots("/dev/shm", 1 << 50, 4096, "cpu")
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("onehop-") and len(name) == 39]
