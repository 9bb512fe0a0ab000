/*
 * A chase of pointers through a drive: each block that a thread reads tells it which to read next. No host could have asked
 * for these blocks in advance.
 *
 * Compile for linking with onehop's library: nvcc -ptx -rdc=true -arch=compute_80 -I include examples/cuda/pointer_chase.cu
 */
#include <onehop/device.h>

#include "pointer_chase.h"

/* With a length that is a power of two, following this from any block leads through all of them. */
static __device__ unsigned long long after(unsigned long long lba, unsigned long long length)
{
    return (lba * 5 + 7) & (length - 1);
}

/* Lays the chain through the first `length` blocks of the drive. */
extern "C" __global__ void lay(const onehop_queue *queue, char *data, unsigned long long length, int *answers)
{
    unsigned long long thread = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    unsigned long long threads = gridDim.x * (unsigned long long)blockDim.x;
    unsigned long long offset = thread * onehop_block_bytes(queue);
    struct chase_node *node = (struct chase_node *)(data + offset);
    int answer = ONEHOP_OK;

    for (unsigned long long lba = thread; lba < length && answer == ONEHOP_OK; lba += threads) {
        node->self = lba;
        node->next = after(lba, length);
        node->value = lba * lba;
        answer = onehop_write(queue, lba, 1, offset);
    }
    answers[thread] = answer;
}

/* Each thread follows the chain for `hops` blocks, from the block of its own number on. */
extern "C" __global__ void chase(const onehop_queue *queue, const char *data, unsigned int hops, struct chase_end *ends)
{
    unsigned long long thread = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    unsigned long long offset = thread * onehop_block_bytes(queue);
    const struct chase_node *node = (const struct chase_node *)(data + offset);
    struct chase_end end = {0, thread, 0, ONEHOP_OK};

    while (end.hops < hops) {
        end.answer = onehop_read(queue, end.lba, 1, offset);
        if (end.answer == ONEHOP_OK && node->self != end.lba)
            end.answer = CHASE_WRONG_BLOCK;
        if (end.answer != ONEHOP_OK)
            break;
        end.sum += node->value;
        end.lba = node->next;
        end.hops++;
    }
    ends[thread] = end;
}

/* The same with `ahead` chains at once for each thread, which goes on with whichever block is there. */
extern "C" __global__ void chase_many(const onehop_queue *queue, const char *data, unsigned int hops, struct chase_end *ends)
{
    enum { AHEAD = 4 };
    unsigned long long thread = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    unsigned int bytes = onehop_block_bytes(queue);
    unsigned int under_way = 0;
    onehop_command commands[AHEAD];
    struct chase_end chains[AHEAD];

    for (int i = 0; i < AHEAD; i++) {
        struct chase_end begin = {0, thread * AHEAD + i, 0, ONEHOP_OK};
        chains[i] = begin;
        if (hops == 0)
            continue;
        chains[i].answer = onehop_submit(queue, ONEHOP_READ, begin.lba, 1, begin.lba * bytes, &commands[i]);
        under_way += chains[i].answer == ONEHOP_PENDING;
    }
    while (under_way > 0) {
        for (int i = 0; i < AHEAD; i++) {
            struct chase_end *chain = &chains[i];
            unsigned long long offset = (thread * AHEAD + i) * bytes;
            const struct chase_node *node = (const struct chase_node *)(data + offset);

            if (chain->answer != ONEHOP_PENDING)
                continue;
            chain->answer = onehop_test(queue, &commands[i]);
            if (chain->answer == ONEHOP_PENDING)
                continue;
            under_way--;
            if (chain->answer == ONEHOP_OK && node->self != chain->lba)
                chain->answer = CHASE_WRONG_BLOCK;
            if (chain->answer != ONEHOP_OK)
                continue;
            chain->sum += node->value;
            chain->lba = node->next;
            if (++chain->hops < hops) {
                chain->answer = onehop_submit(queue, ONEHOP_READ, chain->lba, 1, offset, &commands[i]);
                under_way += chain->answer == ONEHOP_PENDING;
            }
        }
    }
    for (int i = 0; i < AHEAD; i++)
        ends[thread * AHEAD + i] = chains[i];
}
