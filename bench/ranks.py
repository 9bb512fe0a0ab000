"""A model into several GPUs, a process for each: groups of onehop beside what else there is, until every rank has its bytes.

Needs torch, two GPUs, safetensors, and room for the model in /dev/shm. InstantTensor and fastsafetensors are measured where they
are installed. Every tensor of every rank is compared with the file by two sums, one of which depends on the order.
Prints a line of JSON for each case and loader: seconds of each load, and GB/s of the model.
"""

import argparse
import importlib.util
import json
import os
import shutil
import struct
import time

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CHUNK = 64 << 20


def shapes_of(case, nbytes):
    """Names and shapes of 2-byte elements."""
    if case == "small":
        return {f"t{i:05}": (nbytes // 60_000 // 512, 256) for i in range(60_000)}
    return {f"t{i:05}": (CHUNK // 8192, 4096) for i in range(nbytes // CHUNK)}


def make(folder, case, nbytes, files, rng):
    """Files of random bytes: one chunk, changed for each of its copies, which is faster than new ones."""
    shapes = list(shapes_of(case, nbytes).items())
    chunk = rng.integers(0, 1 << 63, CHUNK // 8, dtype=numpy.uint64)
    paths = []
    for index in range(files):
        some = shapes[index * len(shapes) // files : (index + 1) * len(shapes) // files]
        header, at = {}, 0
        for name, shape in some:
            size = 2 * shape[0] * shape[1]
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        paths.append(os.path.join(folder, f"model-{index:05}.safetensors"))
        with open(paths[-1], "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            while at > 0:
                part = (chunk ^ rng.integers(0, 1 << 63, dtype=numpy.uint64)).view(numpy.uint8)[:at]
                file.write(part.data)
                at -= len(part)
    return paths


def sums(tensors, device):
    """Two sums of each tensor's words; the second one knows their order."""
    longest = max(tensor.numel() for tensor in tensors.values())
    weights = torch.arange(longest, device=device, dtype=torch.int32) * 2 + 1
    found = {}
    for name, tensor in tensors.items():
        words = tensor.contiguous().view(-1).view(torch.int16).to(torch.int32)
        found[name] = torch.stack([words.sum(), (words * weights[: len(words)]).sum()])
    return {name: tuple(pair) for name, pair in zip(found, torch.stack(list(found.values())).tolist())}


def part(tensor, cut, rank, ranks):
    if cut is None:
        return tensor
    size = tensor.shape[cut]
    return tensor.narrow(cut, rank * size // ranks, size // ranks)


def onehop_group(paths, rank, ranks, device, cut, allocator="onehop"):
    import onehop

    options = {} if cut is None else {"rank": (rank, ranks), "cuts": {"*": cut}}
    group = dist.group.WORLD
    loaded = onehop.load(os.path.dirname(paths[0]), device, framework="torch", group=group, allocator=allocator, **options)
    group = loaded.outcome.group
    return loaded.tensors, group.way if group.why_alone is None else f"{group.way}: {group.why_alone}"


def onehop_group_torch(*args):
    return onehop_group(*args, allocator="torch")


def onehop_each(paths, rank, ranks, device, cut):
    import onehop

    options = {} if cut is None else {"rank": (rank, ranks), "cuts": {"*": cut}}
    return onehop.load_file(os.path.dirname(paths[0]), device, framework="torch", **options), None


def onehop_broadcast(paths, rank, ranks, device, cut):
    """Each rank loads its part of the files, and broadcasts it."""
    import onehop
    from safetensors import safe_open

    tensors = {}
    own = onehop.load_file(paths[rank::ranks], device, framework="torch")
    for index, path in enumerate(paths):
        with safe_open(path, "pt") as opened:
            for name in opened.keys():
                shape = opened.get_slice(name).get_shape()
                there = own[name] if index % ranks == rank else torch.empty(shape, dtype=torch.bfloat16, device=device)
                dist.broadcast(there, index % ranks)
                tensors[name] = there
    return tensors, None


def instanttensor(paths, rank, ranks, device, cut):
    from instanttensor import safe_open

    with safe_open(paths, framework="pt", device=rank, process_group=dist.group.WORLD) as opened:
        return dict(opened.tensors()), None


def fastsafetensors(paths, rank, ranks, device, cut):
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(dist.group.WORLD, device=device, nogds=True)
    loader.add_filenames({index: paths[index::ranks] for index in range(ranks)})
    buffers = loader.copy_files_to_device()
    if cut is None:
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    else:
        tensors = {name: buffers.get_sharded(name, cut) for name in loader.get_keys()}
    return tensors, (loader, buffers)


ALL = {
    "onehop group": onehop_group,
    "onehop group, torch's memory": onehop_group_torch,
    "onehop in each": onehop_each,
    "onehop and broadcast": onehop_broadcast,
    "InstantTensor group": instanttensor,
    "fastsafetensors group": fastsafetensors,
}
#: The ways that give each rank a part.
CUT = ["onehop group", "onehop group, torch's memory", "onehop in each", "fastsafetensors group"]
CASES = {"all": None, "rows": 0, "columns": 1, "small": None}


def worker(rank, args, case, paths, nbytes):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port), RANK=str(rank), WORLD_SIZE=str(args.ranks))
    gpu = rank % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    device = f"cuda:{gpu}"
    backend = "nccl" if torch.cuda.device_count() >= args.ranks else "gloo"
    dist.init_process_group(
        backend, rank=rank, world_size=args.ranks, device_id=torch.device(device) if backend == "nccl" else None
    )
    cut = CASES[case]
    from safetensors.torch import load_file

    wanted = {}
    for path in paths:
        tensors = {name: part(tensor.to(device), cut, rank, args.ranks) for name, tensor in load_file(path).items()}
        wanted.update(sums(tensors, device))
        del tensors
    for title in args.only or ALL:
        if cut is not None and title not in CUT:
            continue
        package = title.split()[0].lower()
        if importlib.util.find_spec(package) is None or (backend == "gloo" and not title.startswith("onehop")):
            continue
        if backend == "gloo" and "broadcast" in title:
            continue
        seconds, wrong, way = [], 0, None
        try:
            for _ in range(args.repeats):
                torch.cuda.synchronize()
                dist.barrier()
                torch.cuda.synchronize()
                begun = time.perf_counter()
                tensors, way = ALL[title](paths, rank, args.ranks, device, cut)
                torch.cuda.synchronize()
                mine = time.perf_counter() - begun
                # In a group the slowest counts.
                times = [None] * args.ranks
                dist.all_gather_object(times, mine)
                seconds.append(max(times))
                found = sums(tensors, device)
                wrong += sum(found.get(name) != pair for name, pair in wanted.items())
                del tensors
                way = way if isinstance(way, str) else None
                torch.cuda.empty_cache()
        except Exception as error:
            print(json.dumps({"case": case, "loader": title, "rank": rank, "error": f"{type(error).__name__}: {error}"}))
            break
        wrongs = [None] * args.ranks
        dist.all_gather_object(wrongs, wrong)
        if rank == 0:
            later = sorted(seconds[1:]) or seconds
            result = {
                "case": case,
                "loader": title,
                "ranks": args.ranks,
                "way": way,
                "bytes": nbytes,
                "seconds": [round(one, 4) for one in seconds],
                "first_gbps": round(nbytes / seconds[0] / 1e9, 1),
                "later_gbps": round(nbytes / later[len(later) // 2] / 1e9, 1),
                "wrong_tensors": sum(wrongs),
            }
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--only", nargs="*", choices=ALL, help="these loaders")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm/onehop-ranks")
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    args = parser.parse_args()
    rng = numpy.random.default_rng(args.seed)
    kinds = {}
    for case in args.cases:
        kinds.setdefault("small" if case == "small" else "large", []).append(case)
    for kind, cases in kinds.items():
        os.makedirs(args.folder)
        try:
            paths = make(args.folder, kind, args.gib << 30, args.files, rng)
            nbytes = sum(os.path.getsize(path) for path in paths)
            for case in cases:
                mp.spawn(worker, (args, case, paths, nbytes), args.ranks)
                args.port += 1
        finally:
            shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
