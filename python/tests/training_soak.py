"""Trains with torch while checkpoints are loaded, streamed and dropped in other threads of the process.

    python3 python/tests/training_soak.py [--seconds 480]

Needs torch with an NVIDIA GPU, and the wheel of onehop. The trainer captures its step repeatedly as a CUDA graph in
torch's own mode, the global one, and replays it. Meanwhile run:

- checkpoints: load_file; compare every tensor on the GPU; copy some back, as a save does; drop them some loads later
- streams: onehop.stream; compare the bytes of every tensor; leave every third stream early
- drops: load, begin a kernel that reads the tensor, drop the tensor while the kernel runs

Any failure ends it with exit code 1: an exception, bytes or losses that differ, memory that grows, a thread that hangs.
With --device cpu it trains without graphs, to try this script without a GPU.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
import struct
import tempfile
import threading
import time
import traceback
from pathlib import Path

# cuBLAS is deterministic only with a workspace of fixed size, and reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import onehop  # noqa: E402
import torch  # noqa: E402
from onehop.torch import load_file  # noqa: E402

#: The time limit for a thread's round, and for the end of all threads, in seconds.
ROUND_TIMEOUT = 60
#: Bytes that GPU and CPU memory may differ from one pause to another.
GPU_SLACK = 64 << 20
HOST_SLACK = 1 << 30
#: How long dropped memory may take to be free, in seconds.
FREE_TIMEOUT = 10

NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


def bytes_of(tensor):
    """A tensor's bytes as a tensor. They compare equal where NaNs would not."""
    return tensor.reshape(-1).view(torch.uint8)


def save(path, tensors):
    """Writes CPU tensors as a safetensors file, atomically."""
    header, at, bodies = {}, 0, []
    for name, tensor in tensors.items():
        data = bytes_of(tensor.contiguous()).numpy().tobytes()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
        bodies.append(data)
    text = json.dumps(header).encode()
    part = Path(f"{path}.part")
    part.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *bodies]))
    part.rename(path)


def random_tensors(megabytes):
    """Tensors of random bytes, of several types and sizes, with a total of these MiB."""
    dice, made = torch.Generator().manual_seed(1), {}
    kinds = list(NAMES)
    rows = [1, 37, 512, 1000, 2048]
    left, number = megabytes << 20, 0
    while left > 0:
        dtype = kinds[number % len(kinds)]
        size = rows[number % len(rows)], 1024
        data = torch.randint(0, 256, (size[0] * size[1] * dtype.itemsize,), dtype=torch.uint8, generator=dice)
        made[f"layer.{number}"] = data.view(dtype).view(size)
        left -= data.numel()
        number += 1
    return made


class Rounds:
    """Lets threads work in rounds, and can stop all of them between two."""

    def __init__(self):
        self.changed = threading.Condition()
        self.working, self.paused, self.over = {}, False, False

    def begin(self, name):
        """Waits during a pause; False at the end."""
        with self.changed:
            while self.paused and not self.over:
                self.changed.wait(0.1)
            if not self.over:
                self.working[name] = time.monotonic()
            return not self.over

    def end(self, name):
        with self.changed:
            self.working.pop(name, None)
            self.changed.notify_all()

    def late(self):
        """The threads whose round takes too long."""
        with self.changed:
            now = time.monotonic()
            return [name for name, since in self.working.items() if now - since > ROUND_TIMEOUT]

    @contextlib.contextmanager
    def pause(self):
        """No thread works in it."""
        deadline = time.monotonic() + ROUND_TIMEOUT
        with self.changed:
            self.paused = True
            while self.working:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{', '.join(self.working)}: a round does not end")
                self.changed.wait(0.1)
        try:
            yield
        finally:
            with self.changed:
                self.paused = False
                self.changed.notify_all()

    def stop(self):
        with self.changed:
            self.over = True
            self.changed.notify_all()


class Worker(threading.Thread):
    """Repeats its round until all end or one fails."""

    def __init__(self, soak):
        super().__init__(name=type(self).__name__.lower(), daemon=True)
        self.soak, self.rounds, self.error, self.held = soak, 0, None, []
        self.stream = torch.cuda.Stream() if soak.cuda else None

    def run(self):
        try:
            with torch.cuda.stream(self.stream):
                # First rounds load torch's kernels and make its handles, which must not happen during captures.
                with self.soak.one_at_a_time:
                    self.prepare()
                    self.round()
                    self.settle()
                self.soak.prepared.wait()
                while self.soak.rounds.begin(self.name):
                    try:
                        self.round()
                    finally:
                        self.soak.rounds.end(self.name)
                    self.rounds += 1
        except Exception:  # noqa: BLE001 - the summary shows it
            self.error = traceback.format_exc()
            self.soak.prepared.abort()

    def prepare(self):
        """What the first round needs."""

    def settle(self):
        """Waits for this thread's work; not within a capture, where torch itself may not wait."""
        if self.stream is not None:
            self.stream.synchronize()


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mix, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        # Attention by hand: the backward passes of fused kernels add in a different order each time.
        batch, length, width = x.shape
        parts = self.mix(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.between(x))))


class Eager:
    """In place of a graph, without CUDA."""

    def __init__(self, step):
        self.replay = step


class Trainer(Worker):
    """Each round: loads the initial parameters, captures a step, replays it for some batches."""

    STEPS = 40

    def __init__(self, soak):
        super().__init__(soak)
        small = not soak.cuda
        width, layers, batch, length = (32, 2, 2, 16) if small else (256, 4, 16, 128)
        device = soak.device
        self.model = torch.nn.Sequential(*(Block(width, 4) for _ in range(layers))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, capturable=soak.cuda)
        shape = self.STEPS, batch, length, width
        self.batches = torch.randn(shape, device=device)
        self.wanted = torch.roll(self.batches, 1, -1) * 0.5
        self.x, self.y = torch.zeros_like(self.batches[0]), torch.zeros_like(self.wanted[0])
        self.loss = torch.zeros((), device=device)
        self.losses = torch.zeros(self.STEPS, device=device)
        self.start_file, self.end_file = soak.folder / "start.safetensors", soak.folder / "end.safetensors"
        self.first = None
        save(self.start_file, {name: value.detach().cpu() for name, value in self.model.named_parameters()})

    def prepare(self):
        # The first step creates the optimizer's state and cuBLAS's workspaces, before any capture.
        for _ in range(3):
            self.optimizer.zero_grad(set_to_none=True)
            self.step()
        self.settle()

    def step(self):
        loss = torch.nn.functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def restore(self):
        loaded = load_file(self.start_file, self.soak.device)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(loaded.pop(name))
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
        assert not loaded, f"parameters that the model lacks: {list(loaded)}"

    def capture(self):
        self.optimizer.zero_grad(set_to_none=True)
        if not self.soak.cuda:
            return Eager(lambda: (self.optimizer.zero_grad(), self.step()))
        graph = torch.cuda.CUDAGraph()
        with self.soak.torch_waits, torch.cuda.graph(graph, stream=self.stream, capture_error_mode="global"):
            self.step()
        return graph

    def round(self):
        self.restore()
        graph = self.capture()
        for i in range(self.STEPS):
            self.x.copy_(self.batches[i])
            self.y.copy_(self.wanted[i])
            graph.replay()
            self.losses[i].copy_(self.loss)
        losses = self.losses.tolist()
        if self.first is None:
            self.first = losses
            assert losses[-1] < losses[0], f"it does not learn: {losses[0]} at first, {losses[-1]} at last"
        assert losses == self.first, f"the losses differ:\n{losses}\nat first:\n{self.first}"
        if self.rounds % 8 == 0:
            self.round_trip()

    def round_trip(self):
        """Saves the parameters, loads them, and compares them with those on the GPU."""
        own = dict(self.model.named_parameters())
        save(self.end_file, {name: value.detach().cpu() for name, value in own.items()})
        loaded = load_file(self.end_file, self.soak.device)
        assert loaded.keys() == own.keys()
        differ = [name for name, value in own.items() if not torch.equal(value.detach(), loaded[name])]
        assert not differ, f"parameters loaded with wrong bytes: {differ}"


class Checkpoints(Worker):
    """Loads all tensors for torch, compares each, copies some back, and drops them some loads later."""

    def round(self):
        loaded = load_file(self.soak.path, self.soak.device)
        assert loaded.keys() == self.soak.on_gpu.keys()
        names = random.Random(self.rounds).sample(sorted(loaded), 4)
        with self.soak.torch_waits:
            differ = [n for n, data in self.soak.on_gpu.items() if not torch.equal(bytes_of(loaded[n]), data)]
            saved = {name: bytes_of(loaded[name]).cpu() for name in names}
        assert not differ, f"load_file returned wrong bytes: {differ}"
        assert all(torch.equal(data, bytes_of(self.soak.tensors[name])) for name, data in saved.items())
        self.held.append(loaded)
        if len(self.held) > 2:
            self.held.pop(0)


class Streams(Worker):
    """Takes tensors as they arrive, and compares the bytes of each."""

    def round(self):
        early = self.rounds % 3 == 2
        seen = set()
        with onehop.stream(self.soak.path, self.soak.device) as stream:
            for name, tensor in stream:
                assert tensor.tobytes() == self.soak.plain[name], f"the stream returned wrong bytes for {name}"
                seen.add(name)
                self.held.append(tensor)
                if early and len(seen) == 5:
                    break
        assert early or seen == self.soak.plain.keys(), f"{len(seen)} tensors of {len(self.soak.plain)} came"
        # Drops those of the round before.
        del self.held[: -len(seen)]


class Drops(Worker):
    """Drops tensors while a kernel reads them."""

    MASK = 0x5A

    def __init__(self, soak):
        super().__init__(soak)
        self.read = max(soak.tensors, key=lambda name: soak.tensors[name].nbytes)
        # A copy from the CPU would wait.
        self.wanted = torch.bitwise_xor(soak.on_gpu[self.read], self.MASK)
        self.out = torch.zeros_like(self.wanted)

    def round(self):
        loaded = onehop.load(self.soak.path, self.soak.device, names=self.read, framework="torch").tensors
        tensor = bytes_of(loaded.pop(self.read))
        if self.soak.cuda:
            # The kernel begins after the tensor is dropped.
            torch.cuda._sleep(4_000_000)
        torch.bitwise_xor(tensor, self.MASK, out=self.out)
        del tensor, loaded
        with self.soak.torch_waits:
            self.settle()
            same = torch.equal(self.out, self.wanted)
            self.out.zero_()
            self.settle()
        assert same, "a kernel read wrong bytes from a dropped tensor"


class Soak:
    """Shared by the threads."""

    def __init__(self, options, folder):
        self.device, self.cuda, self.folder = options.device, options.device != "cpu", folder
        self.rounds = Rounds()
        # torch calls that wait or allocate would invalidate its capture: no thread makes any during one.
        self.torch_waits = threading.Lock()
        self.one_at_a_time = threading.Lock()
        self.tensors = random_tensors(options.megabytes)
        self.path = folder / "weights.safetensors"
        save(self.path, self.tensors)
        self.plain = {name: bytes_of(tensor).numpy().tobytes() for name, tensor in self.tensors.items()}
        self.on_gpu = {name: bytes_of(tensor).to(self.device) for name, tensor in self.tensors.items()}
        self.workers = [kind(self) for kind in (Trainer, Checkpoints, Streams, Drops)]
        self.prepared = threading.Barrier(len(self.workers), timeout=2 * ROUND_TIMEOUT)
        self.memory = []
        if self.cuda:
            torch.cuda.synchronize()

    def errors(self):
        failed = [f"{worker.name}: {worker.error}" for worker in self.workers if worker.error]
        return failed + [f"{name}: a round takes longer than {ROUND_TIMEOUT} s" for name in self.rounds.late()]

    def used(self):
        """Bytes of GPU memory that all processes use, and of CPU memory that this one uses."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        free, everything = torch.cuda.mem_get_info() if self.cuda else (0, 0)
        return everything - free, pages * os.sysconf("SC_PAGESIZE")

    def measure(self):
        """Drops all between two rounds, and raises if memory has grown since the first time."""
        with self.rounds.pause():
            for worker in self.workers:
                worker.held.clear()
            deadline = time.monotonic() + (FREE_TIMEOUT if self.memory else 2)
            while True:
                gc.collect()
                if self.cuda:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                used = self.used()
                first = self.memory[0] if self.memory else None
                is_free = first is not None and used[0] <= first[0] + GPU_SLACK
                if is_free or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            self.memory.append(used)
        first = self.memory[0]
        growth = [now - then for now, then in zip(used, first)]
        if growth[0] > GPU_SLACK or growth[1] > HOST_SLACK:
            raise RuntimeError(f"memory grew by {growth[0] >> 20} MiB of the GPU's and {growth[1] >> 20} MiB of the CPU's")

    def run(self, seconds):
        start = time.monotonic()
        for worker in self.workers:
            worker.start()
        # Baseline after some rounds: libraries keep what they once needed.
        next_measure = start + min(20, seconds / 4)
        while time.monotonic() < start + seconds and not self.errors():
            time.sleep(0.2)
            if time.monotonic() > next_measure and not self.errors():
                self.measure()
                self.report(time.monotonic() - start)
                next_measure = time.monotonic() + 60
        if not self.errors():
            self.measure()
        self.rounds.stop()
        for worker in self.workers:
            worker.join(ROUND_TIMEOUT)
        return time.monotonic() - start

    def report(self, seconds):
        done = ", ".join(f"{worker.rounds} {worker.name}" for worker in self.workers)
        gpu, host = self.memory[-1]
        print(f"{seconds:6.1f} s: {done} rounds; {gpu >> 20} MiB of GPU memory, {host >> 20} MiB of host memory", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--device", default="cuda:0", help="cpu tries the script without a GPU")
    parser.add_argument("--megabytes", type=int, default=96, help="size of the checkpoint that is loaded")
    options = parser.parse_args()
    # The last resort: dumps the stacks of all threads.
    faulthandler.dump_traceback_later(options.seconds + 3 * ROUND_TIMEOUT, exit=True)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory(prefix="onehop-soak-") as folder:
        soak = Soak(options, Path(folder))
        failed = []
        try:
            took = soak.run(options.seconds)
            soak.report(took)
        except Exception:  # noqa: BLE001 - reported below, as of the threads
            failed.append(traceback.format_exc())
        failed += soak.errors()
        failed += [f"{worker.name} does not end" for worker in soak.workers if worker.is_alive() and not failed]
    for error in failed:
        print(f"FAILED: {error}", flush=True)
    if failed:
        faulthandler.dump_traceback(all_threads=True)
    where = torch.cuda.get_device_name() if soak.cuda else "the CPU, without graphs"
    print(f"torch {torch.__version__}, onehop {onehop.__version__}, {where}: {'FAILED' if failed else 'no errors'}", flush=True)
    # Threads that hang would block the exit.
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()
