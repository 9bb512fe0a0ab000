"""How each loader brings a model's files into one GPU's memory, with the settings that its makers give for that.

A loader's `ready` imports what it needs and returns the load: a function of a list of safetensors files. That gives a
dict of torch tensors on cuda:0, or for loaders that know nothing of tensors a dict of files to uint8 tensors of their
bytes; and, where tensors lie in a loader's own buffers, what keeps those. Nothing may be lazy: every byte has arrived
when the load and a synchronisation of the device have ended.
"""

import os
from dataclasses import dataclass
from typing import Callable

DEVICE = "cuda:0"


class ShortRead(Exception):
    """A loader brought fewer bytes than the file has."""


def safetensors():
    from safetensors.torch import load_file

    def load(files):
        tensors = {}
        for file in files:
            tensors.update(load_file(file, device=DEVICE))
        return tensors, None

    return load


def fastsafetensors():
    from fastsafetensors import SafeTensorsFileLoader

    def load(files):
        # Without GPUDirect Storage, which takes nvidia-fs; sixteen threads and a bounce buffer of 16 MiB, its defaults.
        loader = SafeTensorsFileLoader(None, device=DEVICE, nogds=True)
        loader.add_filenames({0: files})
        buffers = loader.copy_files_to_device()
        # Tensors lie in its buffers, and stay only as long as those do.
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}, (loader, buffers)

    return load


def fastsafetensors_cached():
    """Through the page cache, past which it reads files of disks by default."""
    os.environ["FASTSAFETENSORS_ODIRECT"] = "0"
    return fastsafetensors()


def instanttensor(**options):
    from instanttensor import safe_open

    def load(files):
        with safe_open(files, framework="pt", device=0, **options) as opened:
            return dict(opened.tensors()), None

    return load


def instanttensor_buffered():
    """Its policy for files in the page cache; by default it reads files of disks past that, and maps those of tmpfs."""
    from instanttensor import BackendPolicy

    return instanttensor(backend=BackendPolicy.BUFFERED)


def runai():
    from runai_model_streamer import SafetensorsStreamer

    def load(files):
        tensors = {}
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files)
            for name, tensor in streamer.get_tensors():
                tensors[name] = tensor.to(DEVICE)
        return tensors, None

    return load


def kvikio(past_the_cache=False):
    import kvikio
    import kvikio.defaults
    import torch

    threads = len(os.sched_getaffinity(0))
    kvikio.defaults.set({"num_threads": threads, "auto_direct_io_read": past_the_cache})

    def load(files):
        whole = {}
        for file in files:
            memory = torch.empty(os.path.getsize(file), dtype=torch.uint8, device=DEVICE)
            with kvikio.CuFile(file, "r") as opened:
                count = opened.read(memory)
            if count != len(memory):
                raise ShortRead(f"{file}: {count} of {len(memory)} bytes")
            whole[file] = memory
        return whole, None

    return load


def kvikio_direct():
    """Past the page cache, which is off by default."""
    return kvikio(past_the_cache=True)


def onehop():
    import onehop.torch

    def load(files):
        path = files[0] if len(files) == 1 else os.path.dirname(files[0])
        return onehop.torch.load_file(path, device=DEVICE), None

    return load


@dataclass(frozen=True)
class Loader:
    """A loader in Python: how it is shown, its wheel, and in which states it is measured unless asked otherwise."""

    title: str
    wheel: str
    states: tuple
    ready: Callable


MEMORY, DISK = ("tmpfs", "cached"), ("cold",)
LOADERS = {
    "onehop": Loader("onehop.torch.load_file", "onehop", MEMORY + DISK, onehop),
    "instanttensor": Loader("InstantTensor", "instanttensor", ("tmpfs",) + DISK, instanttensor),
    "instanttensor-buffered": Loader("InstantTensor, buffered", "instanttensor", ("cached",), instanttensor_buffered),
    "kvikio": Loader("KvikIO, raw read", "kvikio-cu13", MEMORY, kvikio),
    "kvikio-direct": Loader("KvikIO, raw read, direct", "kvikio-cu13", DISK, kvikio_direct),
    "fastsafetensors": Loader("fastsafetensors, no GDS", "fastsafetensors", ("tmpfs",) + DISK, fastsafetensors),
    "fastsafetensors-cached": Loader(
        "fastsafetensors, no GDS, cached", "fastsafetensors", ("cached",), fastsafetensors_cached
    ),
    "runai": Loader("Run:ai streamer", "runai-model-streamer", MEMORY + DISK, runai),
    "safetensors": Loader("safetensors", "safetensors", MEMORY + DISK, safetensors),
}


@dataclass(frozen=True)
class Command:
    """The command, a process for each load: how it is shown, the route that it is asked for, its states."""

    title: str
    route: str
    states: tuple


COMMANDS = {
    "program": Command("onehop load", "auto", MEMORY + DISK),
    "cufile": Command("onehop load --route cufile", "cufile", ("tmpfs",)),
}
ALL = {**COMMANDS, **LOADERS}
