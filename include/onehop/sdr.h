/*
 * Samples of an SDR board in GPU memory, for programs in C and C++: the calls of SoapySDR's direct buffers, with GPU addresses.
 * They receive; nothing here transmits. Link with libonehop.so. Errors are reported as in onehop.h; acquire returns what SoapySDR's does.
 *
 * One thread at a time acquires and releases. While it waits for a block, other threads may call the other functions, which
 * do not wait.
 */
#ifndef ONEHOP_SDR_H
#define ONEHOP_SDR_H

#include "onehop.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An open receiver. */
typedef struct onehop_sdr onehop_sdr;

/* Results of onehop_sdr_acquire_read_buffer below zero; the numbers are SoapySDR's. */
enum onehop_sdr_answer {
    /* No block in time, or all blocks are acquired. */
    ONEHOP_SDR_TIMEOUT = -1,
    /* The board or the GPU failed: onehop_last_error() says how. */
    ONEHOP_SDR_STREAM_ERROR = -2,
    /* Samples were lost before the block that the next call returns; its time shows how many. */
    ONEHOP_SDR_OVERFLOW = -4
};

/* Its flags; the bits are SoapySDR's. */
enum onehop_sdr_flag {
    /* The time is set: the rate is known. */
    ONEHOP_SDR_HAS_TIME = 4,
    /* Samples before this block were lost. */
    ONEHOP_SDR_END_ABRUPT = 8,
    /* Bursts are missing within the block: onehop_sdr_extents() says which samples there are. */
    ONEHOP_SDR_MISSING = 1 << 16
};

/* Consecutive samples of a block. */
typedef struct onehop_sdr_extent {
    /* The number of the first of them, counted from the start. */
    uint64_t first;
    /* Which sample of the buffer it is, and how many there are. */
    uint32_t at;
    uint32_t samples;
} onehop_sdr_extent;

/*
 * Opens a receiver by the best route that works; a self-test with data shows that samples arrive.
 * device: sim:usdr with options, or a PCI address, as on the command line; "?rate=10M" after an address is the rate in samples
 * per second that the board was set to. format: "ci16" or "ci12". buffer_bytes: of each buffer; 0 for the largest.
 */
int onehop_sdr_open(const char *device, const onehop_gpu *gpu, const char *format, uint32_t buffer_bytes, onehop_sdr **sdr);

/* "cpu/direct" if the board writes GPU memory, "cpu/pinned" if blocks are copied there. Valid until the receiver is closed. */
const char *onehop_sdr_route(const onehop_sdr *sdr);

/* The number of buffers, and the address of each: GPU addresses, for kernels and not for the CPU. */
size_t onehop_sdr_num_direct_access_buffers(const onehop_sdr *sdr);
int onehop_sdr_direct_access_buffer_addrs(const onehop_sdr *sdr, size_t handle, void **buffs);

/* Starts the samples, at number 0, and stops them. A start returns acquired blocks to the board. */
int onehop_sdr_activate(const onehop_sdr *sdr);
int onehop_sdr_deactivate(const onehop_sdr *sdr);

/*
 * Acquires the next block. Returns its number of samples, or a result below zero. handle is the buffer, buffs its GPU address,
 * time_ns the time of its first sample since the start. The block is valid until it is released; release blocks in the order in
 * which they came. A block with the flag ONEHOP_SDR_MISSING has fewer samples than others, at the start of its buffer; the
 * contents after them are old.
 */
int onehop_sdr_acquire_read_buffer(const onehop_sdr *sdr, size_t *handle, const void **buffs, int *flags,
                                   long long *time_ns, long timeout_us);
int onehop_sdr_release_read_buffer(const onehop_sdr *sdr, size_t handle);

/* The number of the first sample of an acquired block, counted from the start, lost samples included. */
int onehop_sdr_first_sample(const onehop_sdr *sdr, size_t handle, uint64_t *first);

/*
 * Which samples an acquired block has: count is set to its number of extents, at most 16, and the first `room` of them are
 * copied to extents. A block without the flag ONEHOP_SDR_MISSING has one.
 */
int onehop_sdr_extents(const onehop_sdr *sdr, size_t handle, onehop_sdr_extent *extents, size_t room, size_t *count);

/*
 * Counts since the start: samples delivered, samples that the board reported lost, and gaps. Delivered and lost samples add up
 * to those that were sent, up to the last block; after a deactivation, up to the end.
 */
int onehop_sdr_counts(const onehop_sdr *sdr, uint64_t *delivered, uint64_t *lost, uint64_t *gaps);

/* Copies bytes of a buffer out of GPU memory. */
int onehop_sdr_copy_out(const onehop_sdr *sdr, size_t handle, size_t offset, void *to, size_t bytes);

/* Stops the board and closes the receiver; null is allowed. Kernels that use its buffers must have ended. */
void onehop_sdr_close(onehop_sdr *sdr);

#ifdef __cplusplus
}
#endif

#endif
