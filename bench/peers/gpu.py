"""The GPU without any framework, by its driver: overwrites free memory, so that no load finds what an earlier one left."""

import ctypes
import subprocess

FILL = 0xA5
CHUNK = 1 << 30
SMALLEST = 1 << 20
# Left to the driver and to the next loader.
MARGIN = 256 << 20


class GpuError(Exception):
    """A call of the driver failed."""


def _driver():
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        code = getattr(driver, name)(*arguments)
        if code:
            raise GpuError(f"{name}: CUDA error {code}")

    return driver, call


def overwrite_free_memory(device=0):
    """Fills the GPU's free memory, in the process's primary context, and frees it again; returns how many bytes."""
    driver, call = _driver()
    number, context, old = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(number), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    taken, filled, size = [], 0, CHUNK
    call("cuCtxPushCurrent_v2", context)
    try:
        while size >= SMALLEST:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            address = ctypes.c_uint64()
            if free.value < size + MARGIN or driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)):
                size //= 4
                continue
            taken.append(address)
            call("cuMemsetD8_v2", address, ctypes.c_ubyte(FILL), ctypes.c_size_t(size))
            filled += size
        call("cuCtxSynchronize")
    finally:
        for address in taken:
            driver.cuMemFree_v2(address)
        driver.cuCtxPopCurrent_v2(ctypes.byref(old))
        driver.cuDevicePrimaryCtxRelease_v2(number)
    return filled


def describe():
    """The GPU's name and the driver's version, by nvidia-smi; what it says instead where that fails."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"]
    try:
        run = subprocess.run([*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return run.stdout.strip() or f"unknown: {run.stderr.strip()}"


if __name__ == "__main__":
    print(overwrite_free_memory())
