#!/usr/bin/env python3
"""The pointer chase with a kernel in Python, compiled by Numba and linked with onehop's functions.

    pip install 'numba-cuda[cu12]' numpy
    cargo build --release -p onehop-capi
    examples/numba/pointer_chase.py sim:chase.img 0

reads a chain that examples/cuda/pointer_chase laid through the same image (sim:chase.img?size=64M). With --ptx FILE it
writes what Numba makes of the kernel and needs no GPU.
"""

import argparse
import ctypes
import os
import sys

from numba import cuda, types

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.join(HERE, "..", "..")
LIBRARY = os.path.join(TOP, "crates", "device", "ptx", "library.ptx")

HOPS, THREADS, BLOCKS = 50, 64, 8
LENGTH = 4096
WRONG_BLOCK = -1000

# The functions are C's: Numba's own convention would want another first parameter.
onehop_read = cuda.declare_device(
    "onehop_read", types.int32(types.uint64, types.uint64, types.uint32, types.uint64), link=LIBRARY, abi="c"
)
onehop_block_bytes = cuda.declare_device("onehop_block_bytes", types.uint32(types.uint64), link=LIBRARY, abi="c")


def chase(queue, data, hops, sums, ends, answers):
    """Each thread follows the chain from the block of its own number on; `data` is the data memory as 64-bit words."""
    thread = cuda.grid(1)
    offset = types.uint64(thread) * onehop_block_bytes(queue)
    word = offset // types.uint64(8)
    lba = types.uint64(thread)
    total = types.uint64(0)
    answer = types.int32(0)
    for _ in range(hops):
        answer = onehop_read(queue, lba, types.uint32(1), offset)
        if answer == 0 and data[word] != lba:
            answer = types.int32(WRONG_BLOCK)
        if answer != 0:
            break
        total += data[word + types.uint64(2)]
        lba = data[word + types.uint64(1)]
    sums[thread] = total
    ends[thread] = lba
    answers[thread] = answer


SIGNATURE = types.void(
    types.uint64, types.uint64[::1], types.int32, types.uint64[::1], types.uint64[::1], types.int32[::1]
)


class Options(ctypes.Structure):
    """struct onehop_lend_options"""

    _fields_ = [("data_bytes", ctypes.c_uint64)] + [
        (name, ctypes.c_uint32) for name in ("nsid", "writable", "placement", "depth", "stall_ms", "limit_ms")
    ]


class Memory:
    """GPU memory that somebody else owns, as Numba takes it."""

    def __init__(self, at, words):
        self.__cuda_array_interface__ = {
            "shape": (words,), "typestr": "<u8", "data": (at, False), "strides": None, "version": 3,
        }


def run(drive_name, gpu_name):
    import numpy

    onehop = ctypes.CDLL(os.path.join(TOP, "target", "release", "libonehop.so"))
    onehop.onehop_last_error.restype = ctypes.c_char_p
    onehop.onehop_lent_queue.restype = ctypes.c_void_p
    onehop.onehop_lent_data.restype = ctypes.c_void_p

    def check(error):
        if error:
            sys.exit(onehop.onehop_last_error().decode())

    cuda.select_device(int(gpu_name))
    kernel = cuda.jit(SIGNATURE)(chase)
    drive, gpu, lent = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    options = Options(data_bytes=BLOCKS * THREADS * 65536)
    check(onehop.onehop_drive_open(drive_name.encode(), 0, ctypes.byref(drive)))
    check(onehop.onehop_gpu_open(gpu_name.encode(), ctypes.byref(gpu)))
    check(onehop.onehop_lend(drive, gpu, ctypes.byref(options), ctypes.byref(lent)))
    data = cuda.as_cuda_array(Memory(onehop.onehop_lent_data(lent), options.data_bytes // 8))
    threads = BLOCKS * THREADS
    sums, ends = (cuda.device_array(threads, numpy.uint64) for _ in range(2))
    answers = cuda.device_array(threads, numpy.int32)
    kernel[BLOCKS, THREADS](onehop.onehop_lent_queue(lent), data, HOPS, sums, ends, answers)
    cuda.synchronize()
    for thread, (total, end, answer) in enumerate(zip(sums.copy_to_host(), ends.copy_to_host(), answers.copy_to_host())):
        want, lba = 0, thread
        for _ in range(HOPS):
            want, lba = want + lba * lba, (lba * 5 + 7) % LENGTH
        if answer != 0 or (int(total), int(end)) != (want, lba):
            sys.exit(f"thread {thread}: answer {answer}, sum {total}, block {end}")
    print(f"{threads} chains of {HOPS} blocks each, all of them right")
    check(onehop.onehop_lent_close(lent))
    onehop.onehop_gpu_close(gpu)
    onehop.onehop_drive_close(drive)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drive", nargs="?", default="sim:chase.img")
    parser.add_argument("gpu", nargs="?", default="0")
    parser.add_argument("--ptx", help="only write the kernel's PTX, for compute capability 8.0")
    args = parser.parse_args()
    if args.ptx:
        ptx, _ = cuda.compile_ptx(chase, SIGNATURE, cc=(8, 0))
        with open(args.ptx, "w") as file:
            file.write(ptx)
    else:
        run(args.drive, args.gpu)


if __name__ == "__main__":
    main()
