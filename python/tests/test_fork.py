"""Processes that fork, and interpreters that exit, during a load: on the CPU, so on every machine."""

import subprocess
import sys

import pytest
from conftest import random_model, safetensors_file

BEGIN = """
import gc, os, signal, sys, threading, time, onehop
from onehop import errors

def child(f):
    # Runs f in a forked process, which has to exit unaided.
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        code = 1
        try:
            f()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

# Children must not collect what was imported, as they are timed.
gc.collect()
gc.freeze()
stream = onehop.stream(sys.argv[1], "cpu")
first = next(iter(stream))
"""

SCRIPTS = {
    "a child is refused the rest of its parent's load": """
def take():
    try:
        for _ in stream:
            pass
    except errors.RequestError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("a child got tensors of its parent's load")
child(take)
assert len(list(stream)) > 10
""",
    "a child drops a load while another thread waits for it": """
waiting = threading.Thread(target=lambda: list(stream), daemon=True)
waiting.start()
def drop():
    global stream
    start = time.monotonic()
    stream.close()
    stream = None
    gc.collect()
    assert time.monotonic() - start < 0.5
for _ in range(20):
    child(drop)
waiting.join()
""",
    "a child checks the memory of its parent's bounded stream": """
bounded = onehop.stream(sys.argv[1], "cpu", max_bytes=4096)
kept = next(bounded)
def check():
    assert bounded.grown == 0
    try:
        next(bounded)
    except errors.RequestError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("a child got tensors of its parent's load")
# Meanwhile readers take the memory's lock all the time.
for _ in range(100):
    child(check)
bounded.close()
""",
    "a child's changes of tensors are its own": """
import onehop.numpy
arrays = onehop.numpy.load_file(sys.argv[1])
with onehop.safe_open(sys.argv[1], "np") as opened:
    arrays["alone"] = opened.get_tensor(next(iter(arrays)))
before = {name: array.tobytes() for name, array in arrays.items()}
def change():
    for array in arrays.values():
        array.reshape(-1).view("u1")[...] ^= 0xff
    assert all(array.tobytes() != before[name] for name, array in arrays.items() if array.size)
child(change)
assert all(array.tobytes() == before[name] for name, array in arrays.items())
""",
    "a child loads for itself": """
child(lambda: onehop.load(sys.argv[1], "cpu"))
assert first[1].tobytes() is not None
""",
    "the interpreter exits during a load": "",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_in_a_separate_process(script, tmp_path):
    path = safetensors_file(tmp_path / "m", random_model(3, ["F32", "BF16"], 40))
    ran = subprocess.run(
        [sys.executable, "-c", BEGIN + script + "print('done', flush=True)\n", str(path)],
        timeout=90,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and ran.stdout.strip() == "done", ran.stdout + ran.stderr
