"""Which pages of files are in the page cache; reads files into it, and drops them from it. Needs nothing but Python."""

import ctypes
import glob
import mmap
import os
import time

CHUNK = 64 << 20
# Pages can be busy for a moment: writeback, or another reader.
TRIES = 5


class NotPrepared(Exception):
    """The page cache does not hold what the state of a measurement says."""


def model_files(model):
    """The safetensors files of a directory, or one file."""
    if not os.path.isdir(model):
        return [model]
    files = sorted(glob.glob(os.path.join(model, "*.safetensors")))
    if not files:
        raise NotPrepared(f"{model}: no *.safetensors in it")
    return files


def resident(file):
    """How many pages of a file are in memory, and how many it has, by mincore(2).

    Of a file that the caller neither owns nor may write Linux says that all of them are.
    """
    size = os.path.getsize(file)
    pages = -(-size // mmap.PAGESIZE)
    if pages == 0:
        return 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    found = (ctypes.c_ubyte * pages)()
    with open(file, "rb") as opened:
        # A private mapping that may be written is what gives an address; nothing is written, so nothing is copied.
        mapped = mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        failed = libc.mincore(address, ctypes.c_size_t(size), found)
        error = ctypes.get_errno()
        del start, address
    finally:
        mapped.close()
    if failed:
        raise OSError(error, os.strerror(error), file)
    return sum(byte & 1 for byte in bytes(found)), pages


def share(files):
    """What share of all pages of these files is in memory."""
    counts = [resident(file) for file in files]
    return sum(found for found, _ in counts) / max(sum(pages for _, pages in counts), 1)


def read(files):
    """Reads every byte into the page cache."""
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.read(CHUNK):
                pass


def drop(files):
    """Asks Linux to forget the files' pages, dirty ones after they were written."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def prepare(files, state):
    """Brings the page cache into the state and checks that; returns the share of pages in it."""
    want = 0.0 if state == "cold" else 1.0
    for attempt in range(TRIES):
        now = share(files)
        if now == want:
            return now
        drop(files) if state == "cold" else read(files)
        time.sleep(0.05 * attempt)
    now = share(files)
    if now != want:
        raise NotPrepared(f"{state}: {now:.4%} of the files' pages are in memory, not {want:.0%}")
    return now
