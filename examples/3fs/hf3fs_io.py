"""3FS's usrbio in Python, by ctypes, with the calls and the shapes of hf3fs_fuse.io.

    python3 examples/3fs/hf3fs_io.py MOUNT FILE     reads a file by a ring and compares it with what read() gives

HF3FS_LIB_DIR names the folder of libhf3fs_api_shared.so where the loader does not find it.
"""

import ctypes
import os
import sys
import uuid
from multiprocessing.shared_memory import SharedMemory


class _Iov(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("iovh", ctypes.c_void_p), ("id", ctypes.c_char * 16),
                ("mount_point", ctypes.c_char * 256), ("size", ctypes.c_size_t), ("block_size", ctypes.c_size_t),
                ("numa", ctypes.c_int)]


class _Ior(ctypes.Structure):
    _fields_ = [("iov", _Iov), ("iorh", ctypes.c_void_p), ("mount_point", ctypes.c_char * 256),
                ("for_read", ctypes.c_bool), ("io_depth", ctypes.c_int), ("priority", ctypes.c_int),
                ("timeout", ctypes.c_int), ("flags", ctypes.c_uint64)]


class _Cqe(ctypes.Structure):
    _fields_ = [("index", ctypes.c_int32), ("reserved", ctypes.c_int32), ("result", ctypes.c_int64),
                ("userdata", ctypes.c_void_p)]


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_int64), ("tv_nsec", ctypes.c_int64)]


def _load():
    name = "libhf3fs_api_shared.so"
    folder = os.environ.get("HF3FS_LIB_DIR")
    library = ctypes.CDLL(os.path.join(folder, name) if folder else name)
    library.hf3fs_prep_io.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p, ctypes.c_int,
                                      ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p]
    library.hf3fs_iovwrap.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p,
                                      ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    library.hf3fs_iorcreate3.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_bool, ctypes.c_int,
                                         ctypes.c_int, ctypes.c_int, ctypes.c_int]
    library.hf3fs_iorcreate4.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_bool, ctypes.c_int,
                                         ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    return library


_lib = _load()


def _checked(code):
    if code < 0:
        raise OSError(-code, os.strerror(-code))
    return code


def extract_mount_point(path):
    out = ctypes.create_string_buffer(256)
    code = _lib.hf3fs_extract_mount_point(out, len(out), os.fsencode(path))
    if code < 0 or code > len(out):
        raise ValueError(f"{path} lies in no mount of 3FS")
    return os.fsdecode(out.value)


def register_fd(fd):
    code = _lib.hf3fs_reg_fd(fd, ctypes.c_uint64(0))
    if code > 0:
        raise OSError(code, os.strerror(code))


def deregister_fd(fd):
    _lib.hf3fs_dereg_fd(fd)


class iovec:
    """A buffer, or with a slice a part of one."""

    def __init__(self, iov, link, start, stop, owner=None):
        self._iov, self._link, self.start, self.stop, self._owner = iov, link, start, stop, owner

    def __getitem__(self, part):
        start, stop, step = part.indices(self.stop - self.start)
        if step != 1:
            raise ValueError("a part of a buffer has no steps")
        return iovec(self._iov, None, self.start + start, self.start + max(start, stop), self)

    def __len__(self):
        return self.stop - self.start

    def __del__(self):
        if self._link is not None:
            os.unlink(self._link)


class ioring:
    def __init__(self, ior):
        self._ior = ior
        self._kept = {}

    def prepare(self, iov, for_read, fd, offset, userdata=None):
        at = iov._iov.base + iov.start
        index = _checked(_lib.hf3fs_prep_io(ctypes.byref(self._ior), ctypes.byref(iov._iov), for_read, at, fd, offset,
                                            len(iov), None))
        self._kept[index] = (iov, userdata)
        return self

    def submit(self):
        _checked(_lib.hf3fs_submit_ios(ctypes.byref(self._ior)))
        return self

    def wait(self, max_results=1000, min_results=0, timeout=None):
        """A list of what has ended, each with .result and .userdata."""
        until = None
        if timeout is not None:
            import time
            nanos = time.time_ns() + int(timeout * 1e9)
            until = ctypes.byref(_Timespec(nanos // 10**9, nanos % 10**9))
        cqes = (_Cqe * max_results)()
        count = _checked(_lib.hf3fs_wait_for_ios(ctypes.byref(self._ior), cqes, max_results, min_results, until))
        return [_Done(cqe, self._kept.pop(cqe.index)[1]) for cqe in cqes[:count]]

    def __del__(self):
        _lib.hf3fs_iordestroy(ctypes.byref(self._ior))


class _Done:
    def __init__(self, cqe, userdata):
        self.result, self.userdata = cqe.result, userdata


def make_iovec(shm, hf3fs_mount_point, block_size=0, numa=-1):
    """Of a multiprocessing.shared_memory.SharedMemory; the daemon is told by a link of our own."""
    key = uuid.uuid4()
    suffix = f".b{block_size}" if block_size > 0 else ""
    link = f"{hf3fs_mount_point}/3fs-virt/iovs/{key}{suffix}"
    os.symlink(os.path.normpath(f"/dev/shm/{shm.name}"), link)
    iov = _Iov()
    base = ctypes.addressof(ctypes.c_char.from_buffer(shm.buf))
    _checked(_lib.hf3fs_iovwrap(ctypes.byref(iov), base, key.bytes, os.fsencode(hf3fs_mount_point), shm.size, block_size,
                                numa))
    return iovec(iov, link, 0, shm.size)


def make_ioring(hf3fs_mount_point, entries, for_read=True, io_depth=0, priority=None, timeout=None, numa=-1, flags=0):
    ior = _Ior()
    point = os.fsencode(hf3fs_mount_point)
    if flags:
        _checked(_lib.hf3fs_iorcreate4(ctypes.byref(ior), point, entries, for_read, io_depth, timeout or 0, numa, flags))
    else:
        _checked(_lib.hf3fs_iorcreate3(ctypes.byref(ior), point, entries, for_read, io_depth, priority or 0, timeout or 0,
                                       numa))
    return ioring(ior)


def read_file(path, hf3fs_mount_point=None, block_size=1 << 20):
    """All of a file, block by block."""
    point = hf3fs_mount_point or extract_mount_point(path)
    shm = SharedMemory(size=block_size, create=True)
    fd = os.open(path, os.O_RDONLY)
    register_fd(fd)
    iov, ring, blocks = make_iovec(shm, point), make_ioring(point, 1), []
    while True:
        ring.prepare(iov[:], True, fd, len(blocks) * block_size)
        done = ring.submit().wait(min_results=1)[0]
        if done.result < 0:
            raise OSError(-done.result, os.strerror(-done.result))
        blocks.append(bytes(shm.buf[:done.result]))
        if done.result < block_size:
            break
    deregister_fd(fd)
    os.close(fd)
    del ring, iov
    shm.unlink()
    return b"".join(blocks)


def _main():
    mount, path = sys.argv[1:3]
    with open(path, "rb") as file:
        wanted = file.read()
    assert extract_mount_point(path) == mount
    assert read_file(path) == wanted, "the ring gave other bytes"
    # A ring of each priority writes a copy, a ring with a depth of its own reads it back.
    shm = SharedMemory(size=1 << 16, create=True)
    iov, part = make_iovec(shm, mount, block_size=1 << 15), wanted[:1 << 15]
    shm.buf[:len(part)] = part
    fd = os.open(path + ".copy", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    register_fd(fd)
    for priority in (-1, 0, 1):
        ring = make_ioring(mount, 4, for_read=False, priority=priority)
        ring.prepare(iov[:len(part)], False, fd, 0, userdata="mine")
        done = ring.submit().wait(min_results=1, timeout=20)
        assert [(one.result, one.userdata) for one in done] == [(len(part), "mine")]
    ring = make_ioring(mount, 4, io_depth=-2, timeout=10, flags=2)
    ring.prepare(iov[1 << 15:(1 << 15) + len(part)], True, fd, 0)
    assert ring.submit().wait(min_results=1, timeout=20)[0].result == len(part)
    assert bytes(shm.buf[1 << 15:(1 << 15) + len(part)]) == part
    try:
        ring.prepare(iov[:1], False, fd, 0)
        raise AssertionError("a ring that reads took a write")
    except OSError as error:
        assert error.errno == 22
    deregister_fd(fd)
    os.close(fd)
    del ring, iov
    shm.unlink()
    print(f"{len(wanted)} bytes by a ring, all of them right")


if __name__ == "__main__":
    _main()
