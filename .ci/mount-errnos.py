"""mount-errnos.py FOLDER: tries what a file system need not have, and prints a name and an errno for each: 0 where it is there.

.ci/mount-judges compares what it prints with .ci/mount-judges.expected.
"""

import ctypes
import errno
import fcntl
import os
import struct
import sys

folder = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
CWD = -100
FS_IOC_GETFLAGS, FS_IOC_FSGETXATTR, FICLONE, FS_IOC_FIEMAP = 0x80086601, 0x801C581F, 0x40049409, 0xC020660B
F_OFD_SETLK = 37
COLLAPSE, INSERT, ZERO, PUNCH_KEEP, KEEP = 8, 32, 16, 3, 1
NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4


def path(name):
    return os.path.join(folder, f"errno-{name}")


def new(name, data=b"x" * 65536):
    """A file with data, open."""
    file = os.open(path(name), os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
    os.write(file, data)
    return file


def called(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def rename(flags):
    old, other = f"from{flags}", f"to{flags}"
    os.close(new(old))
    if flags == EXCHANGE:
        os.close(new(other))
    called(libc.renameat2(CWD, path(old).encode(), CWD, path(other).encode(), flags))


def allocate(mode):
    offset, length = ctypes.c_int64(4096), ctypes.c_int64(8192)
    called(libc.fallocate(new("room"), mode, offset, length))


def attribute(name):
    os.close(new("attribute"))
    value = b"value"
    if name == "security.capability":
        value = struct.pack("<5I", 0x02000000, 1 << 10, 0, 0, 0)
    os.setxattr(path("attribute"), name, value)
    assert os.getxattr(path("attribute"), name) == value


def mode(bits, directory=False):
    if directory:
        os.makedirs(path("dir"), exist_ok=True)
        name = path("dir")
    else:
        os.close(new("mode"))
        name = path("mode")
    os.chmod(name, bits)
    assert os.stat(name).st_mode & 0o7777 == bits, "dropped silently"


def node(kind, device=0):
    if os.path.lexists(path("node")):
        os.unlink(path("node"))
    os.mknod(path("node"), kind | 0o600, device)


def flock():
    fcntl.flock(new("flock"), fcntl.LOCK_EX | fcntl.LOCK_NB)


def posix_lock():
    fcntl.lockf(new("posix-lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)


def ofd_lock():
    fcntl.fcntl(new("ofd-lock"), F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0))


def lease():
    os.close(new("lease"))
    fcntl.fcntl(os.open(path("lease"), os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)


def ioctl(number, data):
    fcntl.ioctl(new("ioctl"), number, bytearray(data))


def clone():
    fcntl.ioctl(new("clone"), FICLONE, new("cloned"))


def tmpfile():
    os.write(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600), b"x")


def direct():
    os.close(new("direct"))
    os.close(os.open(path("direct"), os.O_RDONLY | os.O_DIRECT))


def copy_range():
    source = new("source")
    assert os.copy_file_range(source, new("target", b""), 65536, 0, 0) == 65536


def handle():
    raw = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    mount = ctypes.c_int()
    os.close(new("handle"))
    called(libc.name_to_handle_at(CWD, path("handle").encode(), raw, ctypes.byref(mount), 0))


def hole():
    file = new("hole", b"")
    os.truncate(file, 1 << 20)
    os.pwrite(file, b"x", 1 << 19)
    assert os.lseek(file, 0, os.SEEK_DATA) > 0


TRIALS = {
    "O_TMPFILE": tmpfile,
    "O_DIRECT": direct,
    "setuid": lambda: mode(0o4755),
    "setgid": lambda: mode(0o2755),
    "setgid-folder": lambda: mode(0o2755, True),
    "sticky-folder": lambda: mode(0o1777, True),
    "char-device": lambda: node(0o020000, os.makedev(1, 3)),
    "block-device": lambda: node(0o060000, os.makedev(7, 0)),
    "whiteout-device": lambda: node(0o020000),
    "fifo": lambda: node(0o010000),
    "socket": lambda: node(0o140000),
    "user-xattr": lambda: attribute("user.x"),
    "trusted-xattr": lambda: attribute("trusted.x"),
    "capability-xattr": lambda: attribute("security.capability"),
    "security-xattr": lambda: attribute("security.x"),
    "flock": flock,
    "posix-lock": posix_lock,
    "ofd-lock": ofd_lock,
    "lease": lease,
    "rename-noreplace": lambda: rename(NOREPLACE),
    "rename-exchange": lambda: rename(EXCHANGE),
    "rename-whiteout": lambda: rename(WHITEOUT),
    "fallocate": lambda: allocate(0),
    "fallocate-keep-size": lambda: allocate(KEEP),
    "fallocate-punch": lambda: allocate(PUNCH_KEEP),
    "fallocate-zero": lambda: allocate(ZERO),
    "fallocate-collapse": lambda: allocate(COLLAPSE),
    "fallocate-insert": lambda: allocate(INSERT),
    "seek-data": hole,
    "copy_file_range": copy_range,
    "FICLONE": clone,
    "FIEMAP": lambda: ioctl(FS_IOC_FIEMAP, struct.pack("QQIIII", 0, 1 << 40, 0, 0, 0, 0)),
    "GETFLAGS": lambda: ioctl(FS_IOC_GETFLAGS, bytes(8)),
    "FSGETXATTR": lambda: ioctl(FS_IOC_FSGETXATTR, bytes(28)),
    "file-handle": handle,
}

for name, trial in TRIALS.items():
    try:
        trial()
        print(name, 0)
    except OSError as error:
        # Python calls 95 ENOTSUP.
        print(name, errno.errorcode.get(error.errno, str(error.errno)).replace("ENOTSUP", "EOPNOTSUPP"))
    except AssertionError as error:
        print(name, "WRONG", error)
