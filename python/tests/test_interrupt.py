"""A load lets other threads run, and ends on request."""

import signal
import subprocess
import sys
import threading
import time

import onehop
import pytest

SIZE = 2 << 30


@pytest.fixture
def long_load(tmp_path):
    """A file that takes a while, but no space on the disk: most of it is a hole."""
    text = b'{"t":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (SIZE, SIZE)
    path = tmp_path / "long"
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + SIZE)
    return path


class Stop(Exception):
    pass


def test_a_signal_ends_it(long_load):
    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        start = time.monotonic()
        with pytest.raises(Stop):
            # A load may end before the signal comes.
            while True:
                onehop.load(long_load, "cpu", threads=1)
        # A second is promised; a busy machine gets more.
        assert time.monotonic() - start < 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_is_a_keyboard_interrupt(long_load):
    # Shells start background jobs with SIGINT ignored, which is inherited.
    program = f"""
import signal
import onehop
signal.signal(signal.SIGINT, signal.default_int_handler)
print("begun", flush=True)
try:
    while True:
        onehop.load({str(long_load)!r}, "cpu", threads=1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "begun\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[0] == "interrupted\n" and child.returncode == 0


def test_other_threads_run(long_load):
    over, turns = threading.Event(), []

    def count():
        while not over.is_set():
            turns.append(time.monotonic())
            time.sleep(0.001)

    other = threading.Thread(target=count)
    other.start()
    try:
        arriving = onehop.stream(long_load, "cpu", threads=1)
        start = time.monotonic()
        threading.Timer(0.5, arriving.close).start()
        with pytest.raises(onehop.errors.CancelledError):
            list(arriving)
        assert sum(start <= turn <= start + 0.5 for turn in turns) > 5
    finally:
        over.set()
        other.join()
