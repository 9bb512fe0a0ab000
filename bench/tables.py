"""Rows of a table in memory, gathered into GPU memory: onehop.Table beside what torch does by itself.

Needs torch, a GPU, and room for the table in /dev/shm, or --path for a file elsewhere. The last gather of each size is compared
with NumPy's.
Prints JSON: rows a second and microseconds a gather, medians.
"""

import argparse
import json
import os
import statistics
import time

import numpy
import onehop
import torch

CHUNK = 256 << 20


def make(path, nbytes, rng):
    """A file of random bytes: one chunk, changed for each of its copies, which is faster than new ones."""
    chunk = rng.integers(0, 1 << 63, CHUNK // 8, dtype=numpy.uint64)
    with open(path, "wb") as file:
        for at in range(0, nbytes, CHUNK):
            file.write((chunk ^ rng.integers(0, 1 << 63, dtype=numpy.uint64)).view(numpy.uint8)[: nbytes - at].data)


def timed(call, repeats):
    """Seconds of each call but the first two."""
    seconds = []
    for _ in range(repeats + 2):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds[2:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=24)
    parser.add_argument("--row", type=int, default=256, help="bytes of a row")
    parser.add_argument("--counts", type=int, nargs="*", default=[1, 48, 1536, 65_536, 1_000_000])
    parser.add_argument("--path", default="/dev/shm/onehop-table")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    args = parser.parse_args()
    rng = numpy.random.default_rng(args.seed)
    rows = int(args.gib * (1 << 30)) // args.row
    make(args.path, rows * args.row, rng)
    try:
        print(json.dumps(measure(args, rows, rng)))
    finally:
        os.unlink(args.path)


def measure(args, rows, rng):
    device = torch.device("cuda:0")
    table = onehop.Table(args.path, "U8", (args.row,), device="cuda:0", framework="torch")
    mapped = numpy.memmap(args.path, numpy.uint8, "r", shape=(rows, args.row))
    host = torch.from_numpy(numpy.asarray(mapped))
    # The pages of both mappings are looked up once.
    everything = numpy.arange(0, rows, 16)
    for at in range(0, len(everything), 1 << 20):
        table.gather(everything[at : at + (1 << 20)])
    host[:: max(4096 // args.row, 1), 0].sum()
    results = []
    for count in args.counts:
        out = torch.empty((count, args.row), dtype=torch.uint8, device=device)
        pinned = torch.empty((count, args.row), dtype=torch.uint8, pin_memory=True)
        ids = [rng.integers(0, rows, count) for _ in range(args.repeats + 2)]
        longs = [torch.from_numpy(some) for some in ids]
        wrong = 0

        def ours(left=iter(ids)):
            table.gather(next(left), out=out)

        def theirs(left=iter(longs)):
            torch.index_select(host, 0, next(left), out=pinned)
            out.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()

        row = {"rows": count}
        for name, call in (("onehop", ours), ("torch", theirs)):
            out.fill_(0xA5)
            torch.cuda.synchronize()
            seconds = timed(call, args.repeats)
            wrong += not numpy.array_equal(out.cpu().numpy(), mapped[ids[-1]])
            middle = statistics.median(seconds)
            row[name] = {
                "us": round(middle * 1e6, 1),
                "million_rows_per_second": round(count / middle / 1e6, 2),
                "us_range": [round(min(seconds) * 1e6, 1), round(max(seconds) * 1e6, 1)],
            }
        row["wrong"] = wrong
        results.append(row)
    return {
        "table_bytes": rows * args.row,
        "row_bytes": args.row,
        "repeats": args.repeats,
        "seed": args.seed,
        "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0),
        "onehop": onehop.__version__,
        "torch": torch.__version__,
        "results": results,
    }


if __name__ == "__main__":
    main()
