#!/usr/bin/env python3
"""counters.py FILE KIND COUNT: increments three counters in a file, under a lock.

KIND is fcntl, flock or ofd. One counter is at the beginning of the file, and accessed by calls. One is in the second
page, and accessed through a mapping. The third is the file's length: each turn appends a byte. They always agree, even
if several processes count.
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
