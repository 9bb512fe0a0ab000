/* Every function of sdr.h in C99, on the simulated board and the emulated GPU. */
#include <onehop/sdr.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IS(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: not so: %s (%s)\n", __LINE__, #what, onehop_last_error()); exit(1); } } while (0)
#define FAILS(call, code, words) IS((call) == (code) && strstr(onehop_last_error(), words))

#define SAMPLES 2048
#define BLOCKS 200
#define BURST 8192

/*
 * Blocks of four bursts, of which every fifth lacks some: at its start, its middle, its end. Reading as many samples as acquire
 * returns yields no stale ones, and the extents have each sample's number.
 */
static void partial(const onehop_gpu *gpu, const char *missing, size_t parts, uint32_t bursts)
{
    static uint32_t samples[4 * BURST];
    char device[96];
    onehop_sdr *sdr;
    onehop_sdr_extent extents[16];
    size_t handle, count, i, lacking = 0, blocks = 0;
    const void *at;
    int flags, got;
    long long time;
    uint64_t first, delivered, lost, gaps, end = 0;
    uint32_t n, sum;

    snprintf(device, sizeof device, "sim:usdr?signal=counter&rate=20M&missing=%s@n=5", missing);
    IS(onehop_sdr_open(device, gpu, "ci16", sizeof samples, &sdr) == 0);
    IS(onehop_sdr_activate(sdr) == 0);
    while (blocks < 20) {
        got = onehop_sdr_acquire_read_buffer(sdr, &handle, &at, &flags, &time, 10000000);
        if (got == ONEHOP_SDR_OVERFLOW)
            continue;
        IS(onehop_sdr_extents(sdr, handle, extents, 16, &count) == 0);
        IS(onehop_sdr_first_sample(sdr, handle, &first) == 0 && first == extents[0].first);
        /* Twenty million samples per second: fifty nanoseconds each. */
        IS(time == (long long)first * 50);
        if (first / (4 * BURST) % 5 == 4) {
            IS(flags == (ONEHOP_SDR_HAS_TIME | ONEHOP_SDR_MISSING) && got == (int)(bursts * BURST) && count == parts);
            lacking++;
        } else {
            IS(flags == ONEHOP_SDR_HAS_TIME && got == 4 * BURST && count == 1 && first % (4 * BURST) == 0);
        }
        IS(onehop_sdr_copy_out(sdr, handle, 0, samples, (size_t)got * 4) == 0);
        for (i = 0, sum = 0; i < count; i++) {
            IS(extents[i].at == sum && extents[i].samples % BURST == 0);
            for (n = 0; n < extents[i].samples; n++)
                IS(samples[extents[i].at + n] == (uint32_t)extents[i].first + n);
            sum += extents[i].samples;
        }
        IS(sum == (uint32_t)got);
        end = first / (4 * BURST) * (4 * BURST) + 4 * BURST;
        IS(onehop_sdr_counts(sdr, &delivered, &lost, &gaps) == 0 && delivered + lost == end);
        /* Room for fewer extents than there are, and for none. */
        extents[1].samples = 77;
        IS(onehop_sdr_extents(sdr, handle, extents, 1, &i) == 0 && i == count && extents[1].samples == 77);
        IS(onehop_sdr_extents(sdr, handle, NULL, 0, &i) == 0 && i == count);
        FAILS(onehop_sdr_extents(sdr, handle, NULL, 1, &i), ONEHOP_ERROR_ARGUMENT, "extents");
        FAILS(onehop_sdr_extents(sdr, handle, extents, 1, NULL), ONEHOP_ERROR_ARGUMENT, "count");
        IS(onehop_sdr_release_read_buffer(sdr, handle) == 0);
        FAILS(onehop_sdr_extents(sdr, handle, extents, 1, &i), ONEHOP_ERROR_ARGUMENT, "is not acquired");
        blocks++;
    }
    IS(lacking >= 2 && lost >= lacking * (4 - bursts) * BURST && gaps >= lacking);
    onehop_sdr_close(sdr);
}

int main(void)
{
    onehop_gpu *gpu;
    onehop_sdr *sdr = NULL;
    size_t handle, count, i, overflows = 0;
    const void *at;
    void *addr;
    int flags, got, block;
    long long time, expected = 0;
    uint64_t first, delivered, lost, gaps;
    static uint32_t samples[SAMPLES];

    IS(onehop_gpu_open("emu", &gpu) == 0);
    FAILS(onehop_sdr_open("usdr", gpu, "ci16", 0, &sdr), ONEHOP_ERROR_ARGUMENT, "sim:usdr or a PCI address");
    FAILS(onehop_sdr_open("ffff:1f:1f.7?fast", gpu, "ci16", 0, &sdr), ONEHOP_ERROR_ARGUMENT, "'fast'");
    IS(onehop_sdr_open("ffff:1f:1f.7", gpu, "ci16", 0, &sdr) != 0 && strstr(onehop_last_error(), "ffff:1f:1f.7"));
    FAILS(onehop_sdr_open("sim:usdr?rate=x", gpu, "ci16", 0, &sdr), ONEHOP_ERROR_ARGUMENT, "samples per second");
    FAILS(onehop_sdr_open("sim:usdr", gpu, "cf32", 0, &sdr), ONEHOP_ERROR_ARGUMENT, "formats");
    FAILS(onehop_sdr_open("sim:usdr", NULL, "ci16", 0, &sdr), ONEHOP_ERROR_ARGUMENT, "`gpu`");
    IS(sdr == NULL);
    IS(onehop_sdr_open("sim:usdr?signal=counter&rate=10M", gpu, "ci16", SAMPLES * 4, &sdr) == 0);
    IS(strcmp(onehop_sdr_route(sdr), "cpu/direct") == 0);
    count = onehop_sdr_num_direct_access_buffers(sdr);
    IS(count == 32);
    for (i = 0; i < count; i++)
        IS(onehop_sdr_direct_access_buffer_addrs(sdr, i, &addr) == 0 && addr != NULL);
    FAILS(onehop_sdr_direct_access_buffer_addrs(sdr, count, &addr), ONEHOP_ERROR_ARGUMENT, "no buffer 32");

    IS(onehop_sdr_acquire_read_buffer(sdr, &handle, &at, &flags, &time, 0) == ONEHOP_SDR_TIMEOUT);
    IS(onehop_sdr_activate(sdr) == 0);
    for (block = 0; block < BLOCKS; ) {
        got = onehop_sdr_acquire_read_buffer(sdr, &handle, &at, &flags, &time, 10000000);
        if (got == ONEHOP_SDR_OVERFLOW) {
            IS(flags == ONEHOP_SDR_END_ABRUPT);
            overflows++;
            expected = -1;
            continue;
        }
        IS(got == SAMPLES && flags == ONEHOP_SDR_HAS_TIME);
        IS(onehop_sdr_direct_access_buffer_addrs(sdr, handle, &addr) == 0 && addr == at);
        IS(onehop_sdr_copy_out(sdr, handle, 0, samples, sizeof samples) == 0);
        /* Ten million samples per second: a hundred nanoseconds each. */
        IS(time / 100 == samples[0] && (expected < 0 || expected == samples[0]));
        for (i = 0; i < SAMPLES; i++)
            IS(samples[i] == samples[0] + i);
        IS(onehop_sdr_first_sample(sdr, handle, &first) == 0 && first == samples[0]);
        IS(onehop_sdr_counts(sdr, &delivered, &lost, &gaps) == 0 && delivered + lost == first + SAMPLES);
        expected = (long long)samples[0] + SAMPLES;
        FAILS(onehop_sdr_release_read_buffer(sdr, handle + 1), ONEHOP_ERROR_ARGUMENT, "not the oldest");
        IS(onehop_sdr_release_read_buffer(sdr, handle) == 0);
        block++;
    }
    FAILS(onehop_sdr_first_sample(sdr, handle, &first), ONEHOP_ERROR_ARGUMENT, "is not acquired");
    FAILS(onehop_sdr_counts(sdr, NULL, &lost, &gaps), ONEHOP_ERROR_ARGUMENT, "delivered");
    IS(onehop_sdr_counts(sdr, &delivered, &lost, &gaps) == 0 && delivered == (uint64_t)BLOCKS * SAMPLES);
    IS((overflows > 0) == (lost > 0) && gaps >= overflows);
    FAILS(onehop_sdr_copy_out(sdr, 0, 1, samples, sizeof samples), ONEHOP_ERROR_ARGUMENT, "not within");
    FAILS(onehop_sdr_release_read_buffer(sdr, 0), ONEHOP_ERROR_ARGUMENT, "not the oldest");
    IS(onehop_sdr_acquire_read_buffer(sdr, NULL, &at, &flags, &time, 0) == ONEHOP_SDR_STREAM_ERROR);
    IS(onehop_sdr_deactivate(sdr) == 0);
    onehop_sdr_close(sdr);
    onehop_sdr_close(NULL);
    partial(gpu, "0", 1, 3);
    partial(gpu, "1", 2, 3);
    partial(gpu, "3", 1, 3);
    partial(gpu, "0+2", 2, 2);
    partial(gpu, "1-3", 1, 1);
    IS(*onehop_sdr_route(NULL) == 0 && onehop_sdr_num_direct_access_buffers(NULL) == 0);
    onehop_gpu_close(gpu);
    puts("all of it");
    return 0;
}
