/* Kernels of other people's queues, measured beside onehop's by the example queue_peers: what they are given.
 *
 * A module of PTX has two kernels, both with one argument, a struct peer_job by value:
 *
 *   extern "C" __global__ void peer_prepare(struct peer_job job);
 *       A block of one thread for each queue: prepares its state in job.queues[blockIdx.x].space, which is zeroed.
 *       Launched once, before the controller starts. Rings and doorbells are zeroed too: heads and tails begin at 0,
 *       the first completions come with phase 1.
 *
 *   extern "C" __global__ void peer_run(struct peer_job job);
 *       job.threads threads for each queue, those of queue 0 first, in blocks of the size that the runner's caller chose.
 *       Submits each of job.items once, on any queue, and stores the outcome of each. Launched repeatedly; queues and
 *       their state are kept between launches. job.count is a multiple of all threads of a launch.
 *
 * The controller refuses an entry of which anything but the CID is not as the item has it: dwords that the item does
 * not name are zero. */
#ifndef ONEHOP_PEER_H
#define ONEHOP_PEER_H

#include <stdint.h>

struct peer_queue {
    uint64_t sq, cq;           /* the rings */
    uint64_t sq_door, cq_door; /* the doorbells, 32 bits each */
    uint64_t space;            /* memory of the GPU for the queue's account */
    uint32_t entries;          /* of each ring */
    uint32_t reserved;
};

struct peer_item {
    uint64_t lba, prp1, prp2;
    uint32_t blocks; /* 1 to 65536 */
    uint32_t opcode;
};

struct peer_job {
    const struct peer_queue *queues;
    const struct peer_item *items;
    uint32_t *outcomes; /* one for each item: enum peer_outcome */
    uint64_t *cycles;   /* thread 0 writes how many cycles of its clock the launch took */
    uint32_t queue_count, threads;
    uint32_t count, nsid;
    uint32_t flags; /* enum peer_flag */
    uint32_t reserved;
};

enum peer_outcome {
    PEER_PENDING = 0,
    PEER_DONE = 1,      /* it completed with status 0 */
    PEER_FAILED = 2,    /* it completed with another status, or was given up */
    PEER_ELSEWHERE = 3, /* the completion that its thread took was another command's */
};

enum peer_flag {
    /* Look at what the completion says, even where the queue itself does not. The launch is not timed. */
    PEER_CHECK = 1,
};

#ifdef __cplusplus
static_assert(sizeof(struct peer_queue) == 48, "peer_queue");
static_assert(sizeof(struct peer_item) == 32, "peer_item");
static_assert(sizeof(struct peer_job) == 56, "peer_job");
#endif
#endif
