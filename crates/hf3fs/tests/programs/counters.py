#!/usr/bin/env python3
"""counters.py FILE KIND COUNT: counts in a file, each time under a lock, in three ways at once.

KIND is fcntl, flock or ofd. A number at the beginning is read and written by calls, one in the second page by a mapping that
stays, and a byte is put behind the end, wherever that is. All are one more after each turn, however many others count there.
"""
import fcntl, mmap, os, struct, sys

path, kind, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
F_OFD_SETLKW = 38
fd = os.open(path, os.O_RDWR)
pages = mmap.mmap(fd, 8192)


def lock(how):
    if kind == 'fcntl':
        fcntl.lockf(fd, how)
    elif kind == 'flock':
        fcntl.flock(fd, how)
    else:
        number = {fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_UN: fcntl.F_UNLCK}[how]
        fcntl.fcntl(fd, F_OFD_SETLKW, struct.pack('hhqqi4x', number, 0, 0, 0, 0))


for _ in range(count):
    lock(fcntl.LOCK_EX)
    by_call = int.from_bytes(os.pread(fd, 8, 0), 'little')
    by_page = int.from_bytes(pages[4096:4104], 'little')
    size = os.fstat(fd).st_size
    assert by_call == by_page == size - 8192, (by_call, by_page, size)
    os.pwrite(fd, (by_call + 1).to_bytes(8, 'little'), 0)
    pages[4096:4104] = (by_page + 1).to_bytes(8, 'little')
    os.pwrite(fd, b'x', size)
    lock(fcntl.LOCK_UN)
