"""Pages between one file and GPU memory by KvikIO, to be set beside `onehop bench pages`.

Needs kvikio and CuPy. Each batch has pages at random places, all of them in flight at the same time; every byte of every
batch is compared, outside the time that counts.
"""

import argparse
import json
import os
import statistics
import sys
import time

import cupy
import kvikio
import kvikio.defaults
import numpy

LIMIT_S = 20


def number(text):
    units = {"K": 10, "M": 20, "G": 30}
    return int(text[:-1]) << units[text[-1]] if text[-1] in units else int(text)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="a file that may be overwritten, in the page cache")
    parser.add_argument("--page", default="4K,64K,256K,1M,2M", help="bytes of a page [default: %(default)s]")
    parser.add_argument("--depth", default="32", help="pages in flight [default: %(default)s]")
    parser.add_argument("--threads", type=int, default=16, help="KvikIO's threads [default: %(default)s]")
    parser.add_argument("--seconds", type=float, default=0.1, help="of each row [default: %(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="[default: %(default)s]")
    parser.add_argument("--cufile", action="store_true", help="by cuFile instead of system calls")
    return parser.parse_args()


def fill(memory, rng):
    memory[...] = cupy.asarray(numpy.frombuffer(rng.bytes(memory.nbytes), dtype=numpy.uint8))
    cupy.cuda.get_current_stream().synchronize()


def move(file, direction, memory, page, places):
    """Moves one batch; returns the seconds that it took."""
    start = time.perf_counter()
    call = file.pread if direction == "read" else file.pwrite
    moving = [call(memory[i * page : (i + 1) * page], page, int(at)) for i, at in enumerate(places)]
    moved = sum(one.get() for one in moving)
    took = time.perf_counter() - start
    if moved != page * len(places):
        sys.exit(f"KvikIO moved {moved} bytes of {page * len(places)}")
    return took


def rate(opened, mapped, direction, page, depth, args, rng):
    """GB/s of batches for so many seconds, and the number of wrong bytes."""
    memory = cupy.zeros(page * depth, dtype=cupy.uint8)
    # KvikIO makes its buffers with the first pages.
    move(opened, "read", memory, page, numpy.arange(depth) * page)
    moved = took = wrong = 0
    begun = time.perf_counter()
    while took < args.seconds and time.perf_counter() - begun < LIMIT_S:
        places = rng.choice(len(mapped) // page, depth, replace=False) * page
        if direction == "write":
            fill(memory, rng)
        took += move(opened, direction, memory, page, places)
        moved += len(memory)
        expected = numpy.concatenate([mapped[at : at + page] for at in places])
        wrong += int((memory != cupy.asarray(expected)).sum())
    return moved / took / 1e9, wrong


def main():
    args = arguments()
    mode = kvikio.CompatMode.OFF if args.cufile else kvikio.CompatMode.ON
    kvikio.defaults.set({"num_threads": args.threads, "compat_mode": mode})
    rng = numpy.random.default_rng()
    mapped = numpy.memmap(args.file, dtype=numpy.uint8, mode="r")
    rows, wrong = [], 0
    with kvikio.CuFile(args.file, "r+") as opened:
        for page in map(number, args.page.split(",")):
            for depth in map(int, args.depth.split(",")):
                for direction in ("read", "write"):
                    found = [rate(opened, mapped, direction, page, depth, args, rng) for _ in range(args.repeats)]
                    wrong += sum(bad for _, bad in found)
                    rates = sorted(rate for rate, _ in found)
                    rows.append({"page": page, "depth": depth, "io": direction, "gb_per_second": rates})
                    middle = statistics.median(rates)
                    print(f"{page >> 10} KiB, {depth} in flight, {direction}: {middle:.2f} GB/s", file=sys.stderr)
    print(json.dumps({"kvikio": kvikio.__version__, "cpus": os.cpu_count(), "wrong_bytes": wrong, "rows": rows}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
