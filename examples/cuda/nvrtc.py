#!/usr/bin/env python3
"""Compiles CUDA C++ to PTX that is to be linked, with NVRTC alone: no nvcc, no toolkit, no GPU.

    pip install nvidia-cuda-nvrtc-cu12==12.9.86
    examples/cuda/nvrtc.py examples/cuda/pointer_chase.cu -o pointer_chase.ptx

A driver links PTX of its own CUDA version or older: that is why 12.9 is proposed here.
"""

import argparse
import ctypes
import glob
import os
import site
import sys


def library(named):
    if named:
        return ctypes.CDLL(named)
    places = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    for place in places:
        found = glob.glob(os.path.join(place, "nvidia", "c*", "lib", "libnvrtc.so.*"))
        if found:
            return ctypes.CDLL(found[0])
    return ctypes.CDLL("libnvrtc.so.12")


def compiled(nvrtc, source, name, options):
    def check(result, what):
        if result != 0:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            sys.exit(f"{name}: {what}: {nvrtc.nvrtcGetErrorString(result).decode()}")

    def text(size_of, read):
        size = ctypes.c_size_t()
        check(size_of(program, ctypes.byref(size)), "asking for a size")
        buffer = ctypes.create_string_buffer(size.value)
        check(read(program, buffer), "reading")
        return buffer.value.decode()

    program = ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None)
    check(made, "nvrtcCreateProgram")
    list_of = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    result = nvrtc.nvrtcCompileProgram(program, len(options), list_of)
    log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
    if log.strip():
        print(log, file=sys.stderr)
    check(result, "nvrtcCompileProgram")
    return text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("-o", "--out", required=True)
    parser.add_argument("--arch", default="compute_80")
    parser.add_argument("--nvrtc", help="libnvrtc.so, where it is not found")
    args = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    options = [
        f"--gpu-architecture={args.arch}",
        # Leaves calls of functions that are defined elsewhere.
        "--relocatable-device-code=true",
        "-I" + os.path.join(here, "..", "..", "include"),
        "-I" + os.path.dirname(os.path.abspath(args.source)),
    ]
    with open(args.source, "rb") as file:
        ptx = compiled(library(args.nvrtc), file.read(), args.source, options)
    with open(args.out, "w") as file:
        file.write(ptx)


if __name__ == "__main__":
    main()
