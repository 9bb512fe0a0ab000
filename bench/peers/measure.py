"""One process of the comparison: loads a model some times with one loader and prints what it saw, as JSON."""

import argparse
import ctypes
import glob
import importlib.metadata
import json
import mmap
import os
import random
import sys
import threading
import time

import torch

import loaders


# The command's rows, and the routes that it is asked for.
ROUTES = {"program": "auto", "cufile": "cufile"}


def digest(tensor):
    """A number that depends on every byte and its place: 32-bit words times odd numbers, modulo 2^64."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    part = 1 << 28
    for start in range(0, len(raw), part):
        piece = raw[start : start + part]
        if len(piece) % 4:
            piece = torch.nn.functional.pad(piece, (0, 4 - len(piece) % 4))
        if piece.data_ptr() % 4:
            piece = piece.clone()
        words = piece.view(torch.int32).to(torch.int64)
        places = torch.arange(start, start + len(words), device=words.device, dtype=torch.int64) * 2 + 1
        total += int((words * places).sum())
    return total & (1 << 64) - 1


def headers(files):
    """For each tensor its file, and where in it its bytes lie."""
    for file in files:
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                yield file, name, 8 + size + first, end - first


def expected(files):
    """What the digests should be, by reading the files with nothing but Python."""
    wanted = {}
    for file in files:
        whole = torch.frombuffer(bytearray(open(file, "rb").read()), dtype=torch.uint8).to(loaders.DEVICE)
        wanted[file] = digest(whole)
        for of, name, at, size in headers([file]):
            wanted[name] = digest(whole[at : at + size].clone())
    return wanted


def ceilings(files, cold):
    """The copy engine, from pinned memory in 64 MiB steps, and the best of some ways to read past the page cache at once."""
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
    if not cold:
        return {"copy_engine": best}
    # Whoever goes first finds the disk as nobody else does.
    shapes = random.sample(SHAPES, len(SHAPES))
    try:
        disks = {f"{threads} x {block >> 10} KiB": disk(files, threads, block) for threads, block in shapes}
    except OSError as error:
        return {"copy_engine": best, "disk_error": str(error)}
    by = max(disks, key=disks.get)
    return {"copy_engine": best, "disk": disks[by], "disk_by": by, "disks": disks}


# Threads that read past the page cache, each so much at once: which is fastest depends on the disk.
SHAPES = [(16, 8 << 20), (16, 512 << 10), (8, 512 << 10), (4, 1 << 20), (2, 4 << 20)]


def disk(files, threads, block):
    """GB/s of reads past the page cache, in the files' order, into memory that each thread keeps."""
    opened = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    pieces = [(fd, at) for fd, file in zip(opened, files) for at in range(0, os.path.getsize(file), block)]
    left, lock, total, failed = iter(pieces), threading.Lock(), [0], []
    # Huge pages, which a disk's driver takes in fewer pieces; those of shared mappings are small.
    huge = 2 << 20
    memory = mmap.mmap(-1, threads * block + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, len(memory), 4096):
        memory[at] = 1

    def work(buffer):
        while True:
            with lock:
                piece = next(left, None)
            if piece is None:
                return
            try:
                count = os.preadv(piece[0], [buffer], piece[1])
            except OSError as error:
                failed.append(error)
                return
            with lock:
                total[0] += count

    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % huge
    whole = memoryview(memory)[start:]
    workers = [threading.Thread(target=work, args=(whole[i * block : (i + 1) * block],)) for i in range(threads)]
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


def drop(files):
    """Takes the files out of the page cache."""
    os.sync()
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=[*loaders.PACKAGES, *ROUTES, "expected", "ceilings", "read", "drop"])
    parser.add_argument("model")
    parser.add_argument("--loads", type=int, default=2)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--expected")
    parser.add_argument("--program")
    args = parser.parse_args()
    files = sorted(glob.glob(os.path.join(args.model, "*.safetensors"))) if os.path.isdir(args.model) else [args.model]
    if args.what == "drop":
        return drop(files)
    if args.what == "read":
        for file in files:
            with open(file, "rb", buffering=0) as opened:
                while opened.read(64 << 20):
                    pass
        return None
    if args.what in ROUTES:
        route, rows = ROUTES[args.what], []
        for _ in range(args.loads):
            if args.cold:
                drop(files)
            rows.append(loaders.onehop_program(args.program, args.model, route))
        if not loaders.onehop_verifies(args.program, args.model, route):
            rows[-1] |= {"wrong": 1, "first_wrong": ["by --verify"]}
        return {"loads": rows, "version": "command"}
    torch.cuda.init()
    torch.zeros(1, device=loaders.DEVICE)
    torch.cuda.synchronize()
    if args.what == "expected":
        return expected(files)
    if args.what == "ceilings":
        return ceilings(files, args.cold)
    load, package = loaders.PACKAGES[args.what]
    wanted = json.load(open(args.expected))
    rows = []
    for _ in range(args.loads):
        if args.cold:
            drop(files)
        begun = time.perf_counter()
        loaded = load(files)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        tensors, keep = loaded if isinstance(loaded, tuple) else (loaded, None)
        names = set(files) if args.what.startswith("kvikio") else {name for _, name, _, _ in headers(files)}
        wrong = [name for name in names if name not in tensors or digest(tensors[name]) != wanted[name]]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        rows.append({"seconds": seconds, "bytes": size, "wrong": len(wrong), "first_wrong": wrong[:1]})
        del tensors, loaded, keep
        torch.cuda.empty_cache()
    return {"loads": rows, "version": importlib.metadata.version(package)}


if __name__ == "__main__":
    result = main()
    if result is not None:
        # The last line: what libraries print comes before.
        print()
        print(json.dumps(result))
    sys.stdout.flush()
