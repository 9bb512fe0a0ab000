/*
 * For the examples: memory of a GPU as a framework would have it. A real GPU's comes from NVIDIA's driver, which is opened when it
 * is needed, so that nothing of CUDA is necessary to compile this; the emulated GPU's comes from the library.
 */
#pragma once

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hf3fs_usrbio_gdr.h"

static int gpu_is_emulated(void)
{
    const char *mode = getenv("HF3FS_GDR_ENABLED");
    return mode && strcmp(mode, "emulated") == 0;
}

static void *gpu_driver(const char *name)
{
    static void *library;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW);
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) {
        fprintf(stderr, "NVIDIA's driver has no %s here\n", name);
        exit(1);
    }
    return function;
}

static void gpu_check(const char *call, int code)
{
    if (code != 0) {
        fprintf(stderr, "%s: %d\n", call, code);
        exit(1);
    }
}

static void *gpu_alloc(int device, size_t bytes)
{
    void *at = NULL;
    if (gpu_is_emulated()) {
        gpu_check("onehop_emulated_alloc", onehop_emulated_alloc(&at, bytes));
        return at;
    }
    int number;
    void *context;
    unsigned long long address;
    gpu_check("cuInit", ((int (*)(unsigned))gpu_driver("cuInit"))(0));
    gpu_check("cuDeviceGet", ((int (*)(int *, int))gpu_driver("cuDeviceGet"))(&number, device));
    gpu_check("cuDevicePrimaryCtxRetain",
              ((int (*)(void **, int))gpu_driver("cuDevicePrimaryCtxRetain"))(&context, number));
    gpu_check("cuCtxSetCurrent", ((int (*)(void *))gpu_driver("cuCtxSetCurrent"))(context));
    gpu_check("cuMemAlloc_v2", ((int (*)(unsigned long long *, size_t))gpu_driver("cuMemAlloc_v2"))(&address, bytes));
    return (void *)(size_t)address;
}

static void gpu_free(void *at)
{
    if (gpu_is_emulated())
        gpu_check("onehop_emulated_free", onehop_emulated_free(at));
    else
        gpu_check("cuMemFree_v2", ((int (*)(unsigned long long))gpu_driver("cuMemFree_v2"))((size_t)at));
}
