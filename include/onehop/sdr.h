/*
 * Samples of an SDR board in GPU memory, for programs in C and C++: the calls of SoapySDR's direct buffers, with addresses of
 * the GPU. Link with libonehop.so. onehop.h says how errors are told; acquire answers as SoapySDR does.
 *
 * One thread at a time acquires and releases. While it waits for a block, any other may call the rest, and does not wait.
 */
#ifndef ONEHOP_SDR_H
#define ONEHOP_SDR_H

#include "onehop.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A receiver that is open. */
typedef struct onehop_sdr onehop_sdr;

/* What onehop_sdr_acquire_read_buffer answers; the numbers are SoapySDR's. */
enum onehop_sdr_answer {
    /* No block in time, or all are lent. */
    ONEHOP_SDR_TIMEOUT = -1,
    /* The board or the GPU failed: onehop_last_error() says how. */
    ONEHOP_SDR_STREAM_ERROR = -2,
    /* Samples were lost before the block that the next call gives; its time tells how many. */
    ONEHOP_SDR_OVERFLOW = -4
};

/* Its flags; the bits are SoapySDR's. */
enum onehop_sdr_flag {
    /* The time is set: the rate is known. */
    ONEHOP_SDR_HAS_TIME = 4,
    /* The samples before do not lead up to those that follow. */
    ONEHOP_SDR_END_ABRUPT = 8,
    /* Bursts are missing within the block: onehop_sdr_extents() says which samples there are. */
    ONEHOP_SDR_MISSING = 1 << 16
};

/* Samples of a block that follow each other. */
typedef struct onehop_sdr_extent {
    /* The number of the first of them, counted from the start. */
    uint64_t first;
    /* Which sample of the buffer it is, and how many there are. */
    uint32_t at;
    uint32_t samples;
} onehop_sdr_extent;

/*
 * Opens a receiver, by the best way that samples can go; a self-test with data shows that they arrive.
 * device: sim:usdr with options, or a PCI address, as on the command line; behind an address "?rate=10M" says how many samples
 * a second the board was set to. format: "ci16" or "ci12". buffer_bytes: of each buffer; 0 for the most.
 */
int onehop_sdr_open(const char *device, const onehop_gpu *gpu, const char *format, uint32_t buffer_bytes, onehop_sdr **sdr);

/* "cpu/direct" when the board writes GPU memory, "cpu/pinned" when blocks are copied there. Stays until it is closed. */
const char *onehop_sdr_route(const onehop_sdr *sdr);

/* How many buffers there are, and where each lies: addresses of the GPU, for kernels and not for the CPU. */
size_t onehop_sdr_num_direct_access_buffers(const onehop_sdr *sdr);
int onehop_sdr_direct_access_buffer_addrs(const onehop_sdr *sdr, size_t handle, void **buffs);

/* Lets samples flow from number 0 on, and ends that. Blocks that are lent are the board's again after a start. */
int onehop_sdr_activate(const onehop_sdr *sdr);
int onehop_sdr_deactivate(const onehop_sdr *sdr);

/*
 * The next block: how many samples it has, or an answer below zero. handle is the buffer, buffs its address on the GPU, time_ns
 * the time of its first sample since the start. It stays until it is released; blocks are released in the order in which they came.
 * A block with the flag ONEHOP_SDR_MISSING has fewer samples than others, from the start of its buffer on; what lies behind
 * them is old.
 */
int onehop_sdr_acquire_read_buffer(const onehop_sdr *sdr, size_t *handle, const void **buffs, int *flags,
                                   long long *time_ns, long timeout_us);
int onehop_sdr_release_read_buffer(const onehop_sdr *sdr, size_t handle);

/* The number of the first sample that there is of a block that is lent, counted from the start; those that were lost count. */
int onehop_sdr_first_sample(const onehop_sdr *sdr, size_t handle, uint64_t *first);

/*
 * Which samples there are of a block that is lent: count says how many extents it has, at most 16, and the first `room` of
 * them go to extents. A block without the flag ONEHOP_SDR_MISSING has one.
 */
int onehop_sdr_extents(const onehop_sdr *sdr, size_t handle, onehop_sdr_extent *extents, size_t room, size_t *count);

/*
 * What has come since the start: samples delivered, samples that the board reported lost, and how often some were. Delivered
 * and lost together are what was sent, up to the last block, and after a deactivation up to the end.
 */
int onehop_sdr_counts(const onehop_sdr *sdr, uint64_t *delivered, uint64_t *lost, uint64_t *gaps);

/* Copies bytes of a buffer out of GPU memory. */
int onehop_sdr_copy_out(const onehop_sdr *sdr, size_t handle, size_t offset, void *to, size_t bytes);

/* Stops the board and closes the receiver; null is allowed. */
void onehop_sdr_close(onehop_sdr *sdr);

#ifdef __cplusplus
}
#endif

#endif
