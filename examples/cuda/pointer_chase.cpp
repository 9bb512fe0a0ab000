/*
 * The host of the pointer chase: opens a drive and a GPU, links the kernels of pointer_chase.cu with onehop's functions, has
 * them lay a chain through the drive and follow it, and checks every sum.
 *
 *   pointer_chase [DRIVE [GPU [KERNELS]]]        pointer_chase sim:mem:64M 0 pointer_chase.ptx
 *
 * Built without WITH_CUDA it knows the emulated GPU ("emu") only, for which one thread of the CPU goes the same way; with it
 * the CUDA driver is used, and nothing else of CUDA:
 *
 *   c++ -std=c++17 -I include examples/cuda/pointer_chase.cpp -L target/release -lonehop [-DWITH_CUDA -lcuda]
 */
#include <onehop/onehop.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "pointer_chase.h"

#ifdef WITH_CUDA
#include <cuda.h>
#endif

namespace {

/* Blocks of the chain: a power of two. */
const unsigned long long LENGTH = 4096;
const unsigned BLOCKS = 8, THREADS = 64, AHEAD = 4;
const unsigned HOPS = 50;

[[noreturn]] void fail(const std::string &what)
{
    std::fprintf(stderr, "pointer_chase: %s\n", what.c_str());
    std::exit(1);
}

void onehop(int error, const char *what)
{
    if (error != 0)
        fail(std::string(what) + ": " + onehop_last_error());
}

unsigned long long after(unsigned long long lba)
{
    return (lba * 5 + 7) & (LENGTH - 1);
}

/* What the chase from block `first` on must come to. */
chase_end expected(unsigned long long first)
{
    chase_end end = {0, first, 0, ONEHOP_OK};
    for (; end.hops < HOPS; end.hops++) {
        end.sum += end.lba * end.lba;
        end.lba = after(end.lba);
    }
    return end;
}

void check(const chase_end *ends, unsigned count, const char *what)
{
    for (unsigned i = 0; i < count; i++) {
        chase_end want = expected(i);
        if (ends[i].answer != ONEHOP_OK)
            fail(std::string(what) + ": thread " + std::to_string(i) + " was told " + std::to_string(ends[i].answer));
        if (ends[i].sum != want.sum || ends[i].lba != want.lba || ends[i].hops != want.hops)
            fail(std::string(what) + ": thread " + std::to_string(i) + " came to the wrong place");
    }
    std::printf("%s: %u chains of %u blocks each, all of them right\n", what, count, HOPS);
}

/* The CPU lays the chain and follows it, as one thread of the emulated GPU. */
void emulated(onehop_lent *lent)
{
    int answer = 0;
    for (unsigned long long lba = 0; lba < LENGTH; lba++) {
        chase_node node = {lba, after(lba), lba * lba};
        onehop(onehop_data_write(lent, 0, &node, sizeof node), "writing the data memory");
        onehop(onehop_emulated_write(lent, lba, 1, 0, &answer), "emulating a write");
        if (answer != ONEHOP_OK)
            fail("writing block " + std::to_string(lba) + ": " + std::to_string(answer));
    }
    chase_end end = {0, 0, 0, ONEHOP_OK};
    for (; end.hops < HOPS; end.hops++) {
        chase_node node;
        onehop(onehop_emulated_read(lent, end.lba, 1, 0, &end.answer), "emulating a read");
        onehop(onehop_data_read(lent, 0, &node, sizeof node), "reading the data memory");
        if (end.answer == ONEHOP_OK && node.self != end.lba)
            end.answer = CHASE_WRONG_BLOCK;
        if (end.answer != ONEHOP_OK)
            break;
        end.sum += node.value;
        end.lba = node.next;
    }
    check(&end, 1, "emulated");
}

#ifdef WITH_CUDA

void cuda(CUresult result, const char *what)
{
    const char *text = nullptr;
    if (result == CUDA_SUCCESS)
        return;
    cuGetErrorString(result, &text);
    fail(std::string(what) + ": " + (text ? text : "an unknown error"));
}

/* Links the kernels with onehop's functions; the driver compiles both for this GPU. */
CUmodule link(const char *kernels)
{
    char log[8192] = "";
    /* Functions that are compiled apart take all the registers they like, unless they are told. */
    CUjit_option options[] = {CU_JIT_MAX_REGISTERS, CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {(void *)128, log, (void *)sizeof log};
    const char *library = onehop_library_ptx();
    CUlinkState state;
    CUmodule module;
    void *image;
    size_t bytes;

    cuda(cuLinkCreate(3, options, values, &state), "cuLinkCreate");
    if (cuLinkAddData(state, CU_JIT_INPUT_PTX, (void *)library, std::strlen(library) + 1, "onehop", 0, nullptr, nullptr) ||
        cuLinkAddFile(state, CU_JIT_INPUT_PTX, kernels, 0, nullptr, nullptr) ||
        cuLinkComplete(state, &image, &bytes))
        fail(std::string("linking ") + kernels + ": " + log);
    cuda(cuModuleLoadData(&module, image), "cuModuleLoadData");
    cuda(cuLinkDestroy(state), "cuLinkDestroy");
    return module;
}

void launch(onehop_lent *lent, CUmodule module, const char *name, unsigned blocks, void **arguments)
{
    CUfunction kernel;
    cuda(cuModuleGetFunction(&kernel, module, name), name);
    cuda(cuLaunchKernel(kernel, blocks, 1, 1, THREADS, 1, 1, 0, nullptr, arguments, nullptr), name);
    cuda(cuCtxSynchronize(), name);
    /* What the threads were told follows from this. */
    onehop(onehop_lent_check(lent), name);
}

void on_gpu(onehop_lent *lent, const char *name, const char *kernels)
{
    const onehop_queue *queue = onehop_lent_queue(lent);
    void *data = onehop_lent_data(lent);
    unsigned long long length = LENGTH;
    unsigned hops = HOPS, threads = BLOCKS * THREADS;
    std::vector<chase_end> ends(threads);
    std::vector<int> answers(threads);
    CUdevice device;
    CUcontext context;
    CUdeviceptr results;

    cuda(cuInit(0), "cuInit");
    cuda(cuDeviceGet(&device, std::atoi(name)), "cuDeviceGet");
    cuda(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    cuda(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    CUmodule module = link(kernels);
    cuda(cuMemAlloc(&results, threads * sizeof(chase_end)), "cuMemAlloc");

    void *lay[] = {&queue, &data, &length, &results};
    launch(lent, module, "lay", BLOCKS, lay);
    cuda(cuMemcpyDtoH(answers.data(), results, threads * sizeof(int)), "cuMemcpyDtoH");
    for (int answer : answers)
        if (answer != ONEHOP_OK)
            fail("laying the chain: a thread was told " + std::to_string(answer));

    void *chase[] = {&queue, &data, &hops, &results};
    launch(lent, module, "chase", BLOCKS, chase);
    cuda(cuMemcpyDtoH(ends.data(), results, threads * sizeof(chase_end)), "cuMemcpyDtoH");
    check(ends.data(), threads, "read and wait");

    /* The kernels in Rust have no such one. */
    CUfunction found;
    if (cuModuleGetFunction(&found, module, "chase_many") == CUDA_SUCCESS) {
        launch(lent, module, "chase_many", BLOCKS / AHEAD, chase);
        cuda(cuMemcpyDtoH(ends.data(), results, threads * sizeof(chase_end)), "cuMemcpyDtoH");
        check(ends.data(), threads, "submit and test");
    }

    cuda(cuMemFree(results), "cuMemFree");
    cuda(cuModuleUnload(module), "cuModuleUnload");
    cuda(cuDevicePrimaryCtxRelease(device), "cuDevicePrimaryCtxRelease");
}

#else

[[noreturn]] void on_gpu(onehop_lent *, const char *, const char *)
{
    fail("this was built without WITH_CUDA: it knows the GPU emu only");
}

#endif

}

int main(int argc, char **argv)
{
    const char *drive_name = argc > 1 ? argv[1] : "sim:mem:64M";
    const char *gpu_name = argc > 2 ? argv[2] : "emu";
    const char *kernels = argc > 3 ? argv[3] : "pointer_chase.ptx";
    onehop_drive *drive;
    onehop_gpu *gpu;
    onehop_lent *lent;
    onehop_lent_info info;

    onehop(onehop_drive_open(drive_name, 1, &drive), drive_name);
    onehop(onehop_gpu_open(gpu_name, &gpu), gpu_name);
    /* A block for each chain; 64 KiB is more than any block has. */
    onehop_lend_options options = {};
    options.data_bytes = BLOCKS * THREADS * 65536ull;
    options.writable = 1;
    onehop(onehop_lend(drive, gpu, &options, &lent), "lending a queue");
    if (std::strcmp(gpu_name, "emu") == 0)
        emulated(lent);
    else
        on_gpu(lent, gpu_name, kernels);
    onehop(onehop_lent_check(lent), "the queue");
    onehop(onehop_lent_describe(lent, &info), "the queue");
    std::printf("%llu blocks of %u bytes, %u recoveries\n", (unsigned long long)info.blocks, info.block_bytes, info.recoveries);
    onehop(onehop_lent_close(lent), "taking the queue back");
    onehop(onehop_drive_flush(drive, 1), "flushing");
    onehop_gpu_close(gpu);
    onehop_drive_close(drive);
    return 0;
}
