#!/usr/bin/env python3
"""How fast the ways that serving engines load by are, on a GPU, every byte compared: serving.py [--out RESULTS.json] [--gib N].

It takes torch, safetensors and the onehop package, N GiB (8) of GPU memory three times, and as much memory for files. Each way
is timed with everything that a caller waits for: opening, planning, memory, tensors. `first` is the first load of the process.
"""

import argparse
import gc
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

DEVICE = "cuda:0"
GIB = 1 << 30


def write(path, shapes, dtype="BF16"):
    """A safetensors file of random bytes, of tensors of these shapes."""
    header, at = {}, 0
    for name, shape in shapes.items():
        count = 2
        for size in shape:
            count *= size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = at
        while left:
            # Small values: random bits may be not-a-number, which differs from itself.
            part = torch.randint(0, 120, (min(left, GIB),), dtype=torch.uint8, device=DEVICE).cpu()
            file.write(memoryview(part.numpy()))
            left -= len(part)
    return at


def settle():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    time.sleep(0.3)


def timed(load):
    """Seconds until all that it gives may be used, and what it gives."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = load()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def compare(tensors, expected):
    """How many tensors differ. The expected ones are on the CPU."""
    if tensors.keys() != expected.keys():
        return len(tensors.keys() ^ expected.keys())
    wrong = 0
    for name, tensor in expected.items():
        mine = tensors[name]
        if mine.dtype != tensor.dtype or mine.shape != tensor.shape:
            wrong += 1
        elif tensor.numel() and not torch.equal(mine.view(torch.int16), tensor.to(DEVICE).view(torch.int16)):
            wrong += 1
    return wrong


def copy_engine():
    """What the copy engine does by itself, in bytes a second."""
    from_, to = torch.empty(GIB // 4, dtype=torch.uint8).pin_memory(), torch.empty(GIB // 4, dtype=torch.uint8, device=DEVICE)
    best = 0.0
    for _ in range(5):
        seconds, _ = timed(lambda: [to.copy_(from_, non_blocking=True) for _ in range(16)])
        best = max(best, 16 * len(from_) / seconds)
    return best


class Peak:
    """The most GPU memory that was taken while this lasts, beyond what was before."""

    def __enter__(self):
        self._over = threading.Event()
        self._free = self.least = torch.cuda.mem_get_info()[0]
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.wait(0.002):
            self.least = min(self.least, torch.cuda.mem_get_info()[0])

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()
        self.bytes = self._free - self.least


def load_file(path, expected, total, rounds, **options):
    """Rates of one load after the other; the last one's bytes are compared."""
    import onehop

    rates, tensors = [], None
    for _ in range(rounds):
        tensors = None
        settle()
        seconds, tensors = timed(lambda: onehop.load_file(path, DEVICE, framework="torch", **options))
        rates.append(total / seconds / 1e9)
    return {"gbps": [round(rate, 2) for rate in rates], "wrong": compare(tensors, expected)}


def stream_into(path, expected, total, max_bytes, way):
    """A bounded stream into parameters that are there."""
    import onehop

    parameters = {name: torch.zeros_like(tensor, device=DEVICE) for name, tensor in expected.items()}
    settle()

    def load():
        if way == "into":
            return onehop.load(path, DEVICE, into=parameters, max_bytes=max_bytes).outcome
        with onehop.stream(path, DEVICE, framework="torch", max_bytes=max_bytes) as stream:
            while (found := next(stream, None)) is not None:
                parameters[found[0]].copy_(found[1])
                del found
        return stream.outcome

    rates, peaks, outcome = [], [], None
    for turn in range(3):
        settle()
        seconds, outcome = timed(load)
        rates.append(round(total / seconds / 1e9, 2))
        # Apart: to ask for free memory again and again takes the driver's lock.
        settle()
        with Peak() as peak:
            timed(load)
        peaks.append(peak.bytes / max_bytes)
    return {
        "gbps": rates,
        "peak_of_max_bytes": [round(peak, 2) for peak in peaks],
        "wrong": compare(parameters, expected),
        "warnings": outcome.warnings,
    }


def rank(path, total):
    """A quarter of each tensor, by rows and by columns."""
    import onehop

    found = {}
    for dim in (0, 1):
        seconds = []
        for i in range(4):
            settle()
            took, tensors = timed(
                lambda i=i: onehop.load_file(path, DEVICE, framework="torch", rank=(i, 4), cuts={"*": dim})
            )
            seconds.append(round(took, 4))
            del tensors
        found[f"dim {dim}"] = seconds
    return found


def first(path):
    """In a process of its own: the first load, after CUDA has been started."""
    script = (
        "import sys, time, torch, onehop\n"
        "torch.zeros(1, device='cuda:0'); torch.cuda.synchronize()\n"
        "start = time.perf_counter()\n"
        "t = onehop.load_file(sys.argv[1], 'cuda:0', framework='torch', allocator=sys.argv[2]); torch.cuda.synchronize()\n"
        "print(time.perf_counter() - start)\n"
    )
    seconds = {}
    for allocator in ("onehop", "torch"):
        ran = subprocess.run([sys.executable, "-c", script, str(path), allocator], capture_output=True, text=True, timeout=120)
        seconds[allocator] = float(ran.stdout) if ran.returncode == 0 else ran.stderr[-500:]
    return seconds


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out")
    arguments.add_argument("--gib", type=int, default=8)
    arguments.add_argument("--folder", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    options = arguments.parse_args()
    from safetensors.torch import load_file as theirs

    folder = Path(tempfile.mkdtemp(dir=options.folder))
    results = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}

    def report(name, value):
        results[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps(results, indent=1))

    try:
        large, small = folder / "large.safetensors", folder / "small.safetensors"
        shapes = {f"layers.{i}.weight": [8192, 4096] for i in range(options.gib * 16)}
        total = write(large, shapes)
        # Experts: 60 000 tensors of 123 KB.
        many = write(small, {f"layers.{i // 1000}.experts.{i % 1000}.weight": [240, 257] for i in range(60_000)})
        settle()
        report("copy engine GB/s", round(copy_engine() / 1e9, 2))
        report("first load, seconds", first(large))
        report("first load of 60 000 tensors, seconds", first(small))
        expected = theirs(large)
        report("bytes", total)
        report("load_file", load_file(large, expected, total, 4))
        report("load_file, allocator torch", load_file(large, expected, total, 4, allocator="torch"))
        report("stream into parameters", stream_into(large, expected, total, GIB, "stream"))
        report("load into parameters", stream_into(large, expected, total, GIB, "into"))
        report("rank of 4, seconds", rank(large, total))
        del expected
        settle()
        expected = theirs(small)
        report("bytes of 60 000 tensors", many)
        report("60 000 tensors", load_file(small, expected, many, 3))
        report("60 000 tensors, allocator torch", load_file(small, expected, many, 4, allocator="torch"))
        report("60 000 tensors into parameters", stream_into(small, expected, many, GIB, "stream"))
        settle()
        seconds, tensors = timed(lambda: theirs(small, device=DEVICE))
        report("60 000 tensors, safetensors GB/s", round(many / seconds / 1e9, 2))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
