/*
 * Receives for a while into GPU memory, and says what came: the calls of sdr.h in the order in which a program makes them.
 *
 *   cc -Iinclude examples/sdr/receive.c -Ltarget/release -lonehop -Wl,-rpath,$PWD/target/release -o receive
 *   ./receive 'sim:usdr?signal=counter&rate=20M' emu 100      # a simulated board, a GPU of CPU threads, 100 blocks
 *   ./receive '0000:0c:00.0?rate=20M' 0 100                   # a board in the kernel module's hands, the first GPU
 *
 * What a kernel would work on is at `samples`, an address of the GPU; this program only copies a block's first sample out.
 */
#include <onehop/sdr.h>

#include <stdio.h>
#include <stdlib.h>

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, onehop_last_error());
    return 1;
}

/* Takes blocks until there are enough; 0 if all went well. */
static int take(const onehop_sdr *sdr, int blocks)
{
    int taken = 0, partial = 0;

    while (taken < blocks) {
        size_t handle;
        const void *samples;
        int flags;
        long long time;
        uint64_t first;
        uint32_t bits;
        int count = onehop_sdr_acquire_read_buffer(sdr, &handle, &samples, &flags, &time, 5000000);

        if (count == ONEHOP_SDR_OVERFLOW)
            continue; /* The next call gives the block behind the gap. */
        if (count < 0)
            return failed(count == ONEHOP_SDR_TIMEOUT ? "no samples came" : "receiving");
        if (onehop_sdr_first_sample(sdr, handle, &first) || onehop_sdr_copy_out(sdr, handle, 0, &bits, sizeof bits))
            return failed("looking at a block");
        if (flags & ONEHOP_SDR_MISSING)
            partial++; /* The first `count` samples of the buffer; onehop_sdr_extents() has their numbers. */
        if (taken++ == 0)
            printf("%d samples at %p of the GPU, the first is number %llu with the bits %08x\n", count, samples,
                   (unsigned long long)first, (unsigned)bits);
        if (onehop_sdr_release_read_buffer(sdr, handle))
            return failed("giving a block back");
    }
    if (partial)
        printf("%d blocks lacked bursts\n", partial);
    return 0;
}

int main(int argc, char **argv)
{
    const char *device = argc > 1 ? argv[1] : "sim:usdr?signal=counter";
    const char *gpu_name = argc > 2 ? argv[2] : "emu";
    int blocks = argc > 3 ? atoi(argv[3]) : 100, bad;
    onehop_gpu *gpu;
    onehop_sdr *sdr;
    uint64_t delivered, lost, gaps;

    if (onehop_gpu_open(gpu_name, &gpu))
        return failed("opening the GPU");
    if (onehop_sdr_open(device, gpu, "ci16", 64 << 10, &sdr)) {
        failed("opening the board");
        onehop_gpu_close(gpu);
        return 1;
    }
    printf("by %s, %zu buffers\n", onehop_sdr_route(sdr), onehop_sdr_num_direct_access_buffers(sdr));
    bad = onehop_sdr_activate(sdr) ? failed("starting") : take(sdr, blocks);
    if (onehop_sdr_deactivate(sdr))
        bad = failed("stopping");
    if (onehop_sdr_counts(sdr, &delivered, &lost, &gaps) == 0)
        printf("%llu samples delivered, %llu lost in %llu gaps\n", (unsigned long long)delivered,
               (unsigned long long)lost, (unsigned long long)gaps);
    onehop_sdr_close(sdr);
    onehop_gpu_close(gpu);
    return bad;
}
