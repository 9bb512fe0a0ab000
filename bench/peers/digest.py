"""What tensors should be, and what they are: numbers that depend on every byte and its place."""

import json
import mmap


def headers(files):
    """For each tensor its file, its name, and where in the file its bytes lie."""
    for file in files:
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                yield file, name, 8 + size + first, end - first


def digest(tensor):
    """Of a tensor on any device: 32-bit words times odd numbers, modulo 2^64."""
    import torch

    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    part = 1 << 28
    for start in range(0, len(raw), part):
        chunk = raw[start : start + part]
        if len(chunk) % 4:
            chunk = torch.nn.functional.pad(chunk, (0, 4 - len(chunk) % 4))
        if chunk.data_ptr() % 4:
            chunk = chunk.clone()
        words = chunk.view(torch.int32).to(torch.int64)
        places = torch.arange(start, start + len(words), device=words.device, dtype=torch.int64) * 2 + 1
        total += int((words * places).sum())
    return total & (1 << 64) - 1


def mapped(file):
    """A file's bytes, by a mapping."""
    with open(file, "rb") as opened:
        return mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)


def expected(files, device):
    """The digests of all files and of all their tensors, read with nothing but Python and torch."""
    import torch

    wanted = {}
    for file in files:
        whole = torch.frombuffer(mapped(file), dtype=torch.uint8).to(device)
        wanted[file] = digest(whole)
        for _, name, at, size in headers([file]):
            wanted[name] = digest(whole[at : at + size].clone())
    return wanted


def crc32c(files, order):
    """The CRC-32C of the bytes of tensors in this order, by the package google-crc32c: what the command reports.

    Of the command's memory nobody else can take a digest, so its own checksum is compared with another program's.
    """
    import google_crc32c

    places = {name: (file, at, size) for file, name, at, size in headers(files)}
    if sorted(order) != sorted(places):
        raise ValueError("the command's plan has other tensors than the files")
    whole = {file: mapped(file) for file in files}
    crc, part = 0, 64 << 20
    for name in order:
        file, at, size = places[name]
        for start in range(at, at + size, part):
            crc = google_crc32c.extend(crc, whole[file][start : min(start + part, at + size)])
    return f"{crc:08x}"
