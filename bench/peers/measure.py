"""One process of the comparison: loads a model some times with one loader, checks every byte, and prints what it saw.

The last line of its output is one JSON document. Imports and CUDA's start come before the clock of the first load; the
time from the start of the process until that load's last byte is taken beside.
"""

import argparse
import ctypes
import gc
import importlib.metadata
import json
import mmap
import os
import random
import sys
import threading
import time

import digest
import gpu
import loaders
import pages

# Threads that read past the page cache, each so much at once: which is fastest depends on the disk.
SHAPES = [(16, 8 << 20), (16, 512 << 10), (8, 512 << 10), (4, 1 << 20), (2, 4 << 20)]

PAUSE = 0.2


def copy_engine():
    """GB/s of copies out of pinned memory in 64 MiB steps, the best of five."""
    import torch

    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=loaders.DEVICE)
    best = 0.0
    for _ in range(5):
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for at in range(0, len(host), 64 << 20):
            device[at : at + (64 << 20)].copy_(host[at : at + (64 << 20)], non_blocking=True)
        done.record()
        torch.cuda.synchronize()
        best = max(best, len(host) / begun.elapsed_time(done) / 1e6)
    return best


def references(files, state, seed):
    """What is measured beside the loaders: the copy engine and, cold, some ways to read past the page cache."""
    found = {"copy_engine": copy_engine()}
    if state != "cold":
        return found
    # The first to read finds the disk rested: the order is random.
    shapes = random.Random(seed).sample(SHAPES, len(SHAPES))
    try:
        disks = {f"{threads} x {block >> 10} KiB": disk(files, threads, block) for threads, block in shapes}
    except OSError as error:
        return found | {"disk_error": str(error)}
    by = max(disks, key=disks.get)
    return found | {"disk": disks[by], "disk_by": by, "disks": disks}


def disk(files, threads, block):
    """GB/s of reads past the page cache, in the files' order, into memory that each thread keeps."""
    opened = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    chunks = [(fd, at) for fd, file in zip(opened, files) for at in range(0, os.path.getsize(file), block)]
    left, lock, total, failed = iter(chunks), threading.Lock(), [0], []
    # Huge pages, which a disk's driver takes in fewer chunks; those of shared mappings are small.
    huge = 2 << 20
    memory = mmap.mmap(-1, threads * block + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, len(memory), 4096):
        memory[at] = 1

    def work(buffer):
        while True:
            with lock:
                chunk = next(left, None)
            if chunk is None:
                return
            try:
                count = os.preadv(chunk[0], [buffer], chunk[1])
            except OSError as error:
                failed.append(error)
                return
            with lock:
                total[0] += count

    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % huge
    whole = memoryview(memory)[start:]
    parts = [whole[i * block : (i + 1) * block] for i in range(threads)]
    workers = [threading.Thread(target=work, args=(part,)) for part in parts]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - begun
    for fd in opened:
        os.close(fd)
    if failed:
        raise failed[0]
    return total[0] / seconds / 1e9


def host_bytes():
    """What the process has in host memory, pinned memory included."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
    return 0


def check(tensors, files, of_files, wanted):
    """The names of tensors, or files, that are missing or whose bytes are not the file's."""
    names = set(files) if of_files else {name for _, name, _, _ in digest.headers(files)}
    return sorted(name for name in names if name not in tensors or digest.digest(tensors[name]) != wanted[name])


def overwrite(tensors):
    """So that a later load, whose loader may give out the same memory, cannot pass with an earlier one's bytes."""
    import torch

    for tensor in tensors.values():
        tensor.detach().view(-1).view(torch.uint8).fill_(gpu.FILL)
    torch.cuda.synchronize()


def measure(args):
    """Some loads by one loader in this process."""
    import torch

    loader = loaders.LOADERS[args.what]
    load = loader.ready()
    imported = time.monotonic()
    torch.cuda.init()
    torch.zeros(1, device=loaders.DEVICE)
    torch.cuda.synchronize()
    up = time.monotonic()
    files = pages.model_files(args.model)
    rows, wanted, host = [], None, host_bytes()
    free = torch.cuda.mem_get_info()[0]
    for nth in range(args.loads):
        # Before the first load the parent has done that.
        residency = pages.prepare(files, args.state) if nth else None
        begun = time.monotonic()
        tensors, keep = load(files)
        torch.cuda.synchronize()
        ended = time.monotonic()
        if wanted is None:
            with open(args.expected) as file:
                wanted = json.load(file)["digests"]
        wrong = check(tensors, files, args.what.startswith("kvikio"), wanted)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        row = {"seconds": ended - begun, "bytes": size, "wrong": len(wrong), "first_wrong": wrong[:1]}
        if nth == 0:
            row |= {"whole_seconds": ended - args.started, "imports_seconds": imported - args.started}
            row |= {"cuda_seconds": up - imported}
        else:
            row["resident"] = residency
        overwrite(tensors)
        del tensors, keep
        gc.collect()
        torch.cuda.empty_cache()
        row["kept_gpu_bytes"] = max(free - torch.cuda.mem_get_info()[0], 0)
        row["kept_host_bytes"] = max(host_bytes() - host, 0)
        row["overwritten_bytes"] = gpu.overwrite_free_memory()
        # A load that begins as soon as memory was freed waits for the driver.
        time.sleep(PAUSE)
        rows.append(row)
    versions = {"version": importlib.metadata.version(loader.wheel)}
    return {"loads": rows, **versions, "torch": torch.__version__, "cuda": torch.version.cuda}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*loaders.LOADERS, "expected", "references"])
    parser.add_argument("model")
    parser.add_argument("--state", default="tmpfs")
    parser.add_argument("--loads", type=int, default=3)
    parser.add_argument("--expected", help="what `expected` printed")
    parser.add_argument("--started", type=float, help="the time of CLOCK_MONOTONIC when this process was started")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "expected":
        return {"digests": digest.expected(pages.model_files(args.model), loaders.DEVICE)}
    if args.what == "references":
        return references(pages.model_files(args.model), args.state, args.seed)
    return measure(args)


if __name__ == "__main__":
    result = main()
    # What libraries print may stand in the same line.
    print()
    print(json.dumps(result))
    sys.stdout.flush()
