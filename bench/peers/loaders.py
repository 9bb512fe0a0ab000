"""How each loader brings a model's files into one GPU's memory, with the settings that its makers give for that.

Each takes a list of safetensors files and gives a dict of torch tensors on cuda:0, or for those that know nothing of
tensors a dict of files to the uint8 tensors of their bytes; with it, where tensors lie in a loader's buffers, what keeps those.
Nothing may be lazy: every byte has arrived at the end.
"""

import json
import os
import subprocess

import torch

DEVICE = "cuda:0"


def safetensors(files):
    from safetensors.torch import load_file

    tensors = {}
    for file in files:
        tensors.update(load_file(file, device=DEVICE))
    return tensors


def fastsafetensors(files):
    from fastsafetensors import SafeTensorsFileLoader

    # Without GPUDirect Storage, which these machines do not have: by default sixteen threads that read 512 KiB each into its
    # bounce buffers; more would read less at a time.
    loader = SafeTensorsFileLoader(None, device=DEVICE, nogds=True)
    loader.add_filenames({0: files})
    buffers = loader.copy_files_to_device()
    # They lie in its buffers, and stay only as long as those do.
    return {name: buffers.get_tensor(name) for name in loader.get_keys()}, (loader, buffers)


def fastsafetensors_cached(files):
    """Through the page cache, past which it reads by default."""
    os.environ["FASTSAFETENSORS_ODIRECT"] = "0"
    return fastsafetensors(files)


def instanttensor(files):
    from instanttensor import safe_open

    with safe_open(files, framework="pt", device=0) as opened:
        return dict(opened.tensors())


def runai(files):
    from runai_model_streamer import SafetensorsStreamer

    tensors = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        for name, tensor in streamer.get_tensors():
            tensors[name] = tensor.to(DEVICE)
    return tensors


def kvikio(files, past_the_cache=False):
    import kvikio
    import kvikio.defaults

    kvikio.defaults.set({"num_threads": os.cpu_count(), "auto_direct_io_read": past_the_cache})
    whole = {}
    for file in files:
        bytes_ = torch.empty(os.path.getsize(file), dtype=torch.uint8, device=DEVICE)
        with kvikio.CuFile(file, "r") as opened:
            assert opened.read(bytes_) == len(bytes_)
        whole[file] = bytes_
    return whole


def kvikio_direct(files):
    """Its way past the page cache, which is off by default."""
    return kvikio(files, past_the_cache=True)


def onehop(files):
    import onehop.torch

    tensors = {}
    for file in files if len(files) == 1 else [os.path.dirname(files[0])]:
        tensors.update(onehop.torch.load_file(file, device=DEVICE))
    return tensors


# The wheels' names, whose versions are reported.
PACKAGES = {
    "safetensors": (safetensors, "safetensors"),
    "fastsafetensors": (fastsafetensors, "fastsafetensors"),
    "fastsafetensors-cached": (fastsafetensors_cached, "fastsafetensors"),
    "instanttensor": (instanttensor, "instanttensor"),
    "runai": (runai, "runai-model-streamer"),
    "kvikio": (kvikio, "kvikio-cu13"),
    "kvikio-direct": (kvikio_direct, "kvikio-cu13"),
    "onehop": (onehop, "onehop"),
}


def onehop_program(program, path, route):
    """The command, a process for a load; `seconds` count from when CUDA is up, as for the others."""
    run = subprocess.run([program, "load", path, "--route", route, "--json"], capture_output=True, text=True)
    outcome = json.loads(run.stdout)
    if run.returncode:
        raise SystemExit(outcome["error"]["message"])
    return {"seconds": outcome["seconds"], "bytes": outcome["bytes"], "route": outcome["route_why"], "wrong": 0}


def onehop_verifies(program, path, route):
    """Whether a load that compares every byte in GPU memory with the files finds them the same."""
    command = [program, "load", path, "--route", route, "--verify", "--json"]
    run = subprocess.run(command, capture_output=True, text=True)
    return run.returncode == 0 and json.loads(run.stdout)["verified"] is True
