"""With torch at work in the same process: other threads capture and replay graphs; callbacks need Python; forks."""

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time

import onehop
import torch
from conftest import random_model, safetensors_file
from onehop.torch import load_file

ROUNDS = 1000
LONGEST = 120


class Capturer(threading.Thread):
    """Captures a graph in torch's own mode, the global one, and replays it, repeatedly."""

    def __init__(self):
        super().__init__(daemon=True)
        self.rounds, self.error, self.over = 0, None, threading.Event()

    def run(self):
        try:
            stream = torch.cuda.Stream()
            given = torch.zeros(1 << 20, device="cuda:0")
            with torch.cuda.stream(stream):
                while not self.over.is_set():
                    self.round(stream, given)
                    self.rounds += 1
        except Exception as error:  # noqa: BLE001 - the test shows it
            self.error = error

    def round(self, stream, given):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        made = given * 2 + 1
        time.sleep(0.0002 * (self.rounds % 5))
        made += given
        graph.capture_end()
        given.fill_(self.rounds % 1000)
        graph.replay()
        graph.replay()
        stream.synchronize()
        assert made[-1].item() == self.rounds % 1000 * 3 + 1
        if self.rounds % 100 == 0:
            # Each graph had its own memory, which torch keeps.
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _relaxed():
    """For this test's own calls of torch: CUDA lets no thread wait while another captures in the global mode."""
    cuda, mode = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(2)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _bytes(tensors):
    return {name: bytes(data) for name, (_, _, data) in tensors.items()}


def _torch_bytes(tensors):
    with _relaxed():
        return {name: t.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


def _round(turn, path, tensors):
    if turn % 6 == 4:
        loaded = onehop.load_file(path, "cuda:0", framework="torch", allocator="torch")
        assert _torch_bytes(loaded) == _bytes(tensors), turn
        return loaded
    if turn % 6 == 5:
        arrived = {}
        with onehop.stream(path, "cuda:0", framework="torch", max_bytes=1 << 20) as stream:
            for name, tensor in stream:
                with _relaxed():
                    arrived[name] = tensor.clone()
                del tensor
        assert _torch_bytes(arrived) == _bytes(tensors), turn
        return arrived
    if turn % 6 == 0:
        return load_file(path, "cuda:0")
    if turn % 6 == 1:
        arrived = {}
        with onehop.stream(path, "cuda:0") as stream:
            for name, tensor in stream:
                arrived[name] = tensor.tobytes()
        assert arrived == _bytes(tensors), f"round {turn} streamed wrong bytes"
        return arrived
    if turn % 6 == 2:
        loaded = onehop.load(path, "cuda:0").tensors
        assert {name: tensor.tobytes() for name, tensor in loaded.items()} == _bytes(tensors), turn
        return loaded
    with onehop.stream(path, "cuda:0") as stream:
        # Closed while the rest is loading.
        return next(iter(stream))


def _with_captures(folder):
    tensors = random_model(7, ("F32", "BF16", "U8"), 24)
    tensors["large"] = ("U8", [3 << 20], bytes(range(256)) * (3 << 12))
    path = safetensors_file(folder / "model", tensors)
    free = torch.cuda.mem_get_info()[0]
    load_file(path, "cuda:0")
    capturer = Capturer()
    capturer.start()
    start, turns, held = time.monotonic(), 0, None
    try:
        while (turns < ROUNDS or capturer.rounds < ROUNDS) and capturer.is_alive():
            # The last round's tensors are dropped before or after this one's load.
            held = _round(turns, path, tensors) if turns % 3 else (held, _round(turns, path, tensors))[1]
            turns += 1
            assert time.monotonic() - start < LONGEST, f"{turns} rounds during {capturer.rounds} captures"
    finally:
        capturer.over.set()
        capturer.join(60)
    assert capturer.error is None, f"after {turns} rounds and {capturer.rounds} captures: {capturer.error}"
    print(f"{turns} rounds during {capturer.rounds} captures in {time.monotonic() - start:.1f} s")
    last = load_file(path, "cuda:0")
    assert _torch_bytes(last) == _bytes(tensors)
    del last, held
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - (512 << 20)


def test_loads_and_drops_with_captures_and_replays(tmp_path):
    # Without JAX on the GPU: with it, captures broke within seconds; without it, none of 61 000 did.
    script = f"import pathlib, test_capture; test_capture._with_captures(pathlib.Path({str(tmp_path)!r})); print('done')"
    _run(script, tmp_path, 200, cwd=os.path.dirname(__file__), env={**os.environ, "JAX_PLATFORMS": "cpu"})


def _run(script, path, limit=90, **where):
    """Runs a script in a separate process: if Python hangs, the test must not."""
    ran = subprocess.run([sys.executable, "-c", script, str(path)], timeout=limit, capture_output=True, text=True, **where)
    assert ran.returncode == 0 and ran.stdout.strip().endswith("done"), ran.stdout + ran.stderr


LOAD = """
import ctypes, gc, os, sys, time, torch
from onehop.torch import load_file
tensors = load_file(sys.argv[1], "cuda:0")
"""

CALLBACK = """
called = []
callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    torch.cuda._sleep(1_000_000_000)
launched = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), callback, None)
assert launched == 0, launched
start = time.monotonic()
del tensors
took = time.monotonic() - start
assert took < 0.25 and not called, (took, called)
stream.synchronize()
assert called
print("done")
"""

FORK = """
child = os.fork()
if child == 0:
    del tensors
    gc.collect()
    os._exit(7)
until = time.monotonic() + 30
while True:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    assert time.monotonic() < until, "the child hangs"
    time.sleep(0.01)
assert os.waitstatus_to_exitcode(status) == 7, status
assert tensors and all(t.cpu() is not None for t in tensors.values())
print("done")
"""

EXIT = """
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    torch.cuda._sleep(500_000_000)
kept = tensors
print("done", flush=True)
"""


def test_a_drop_does_not_wait_for_a_callback_that_needs_python(tmp_path):
    _run(LOAD + CALLBACK, safetensors_file(tmp_path / "m", random_model(1, ["BF16"])))


def test_a_forked_process_drops_what_it_does_not_own(tmp_path):
    _run(LOAD + FORK, safetensors_file(tmp_path / "m", random_model(2, ["BF16"])))


def test_the_interpreter_exits_while_kernels_run(tmp_path):
    _run(LOAD + EXIT, safetensors_file(tmp_path / "m", random_model(3, ["BF16"])))
