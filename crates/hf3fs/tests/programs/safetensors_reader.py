"""Reads a safetensors file with the package fastsafetensor-3fs-reader (its C++ reader) through a ring of the mount:
safetensors_reader.py MOUNT ROOT, where ROOT is the mounted folder."""

import ctypes
import json
import os
import sys

from fastsafetensor_3fs_reader._lib_preload import preload_hf3fs_library

mount, root = sys.argv[1:3]
data = bytes((i * 2654435761 >> 15) & 255 for i in range(300_000))
header = json.dumps({"t": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
header += b" " * (-len(header) % 8)
with open(os.path.join(root, "model.safetensors"), "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header + data)

assert preload_hf3fs_library(), "the reader does not find libhf3fs_api_shared.so"
from fastsafetensor_3fs_reader.reader_cpp import ThreeFSFileReaderCpp  # noqa: E402

path = os.path.join(mount, "model.safetensors")
reader = ThreeFSFileReaderCpp(mount, entries=8, buffer_size=1 << 20)
text, length, size = reader.read_headers_batch([path])[path]
assert json.loads(text)["t"]["shape"] == [len(data)]
assert size == 8 + len(header) + len(data), (length, size)
for pipelined in (False, True):
    target = ctypes.create_string_buffer(len(data))
    got = reader.read_chunked(path, ctypes.addressof(target), 8 + len(header), len(data), 65536, pipelined)
    assert got == len(data), got
    assert target.raw == data, "the ring returned wrong bytes"
reader.close()
print(f"{len(data)} bytes of a tensor, all of them right")
