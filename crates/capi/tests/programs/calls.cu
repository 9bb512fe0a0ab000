/* Kernels for tests: every function of device.h, in every form. */
#include <onehop/device.h>

#include "calls.h"

static __device__ unsigned int thread(void)
{
    return blockIdx.x * blockDim.x + threadIdx.x;
}

/* Each thread makes the call of its index. */
extern "C" __global__ void calls(const onehop_queue *queue, const struct test_call *list, unsigned int count, int *answers)
{
    onehop_command command;
    unsigned int i = thread();
    int answer = 0;

    if (i >= count)
        return;
    struct test_call call = list[i];
    switch (call.kind) {
    case TEST_READ:
        answer = onehop_read(queue, call.lba, call.blocks, call.offset);
        break;
    case TEST_WRITE:
        answer = onehop_write(queue, call.lba, call.blocks, call.offset);
        break;
    case TEST_SUBMIT_WAIT:
    case TEST_SUBMIT_TEST:
    case TEST_SPENT:
        answer = onehop_submit(queue, call.operation, call.lba, call.blocks, call.offset, &command);
        if (answer != ONEHOP_PENDING)
            break;
        if (call.kind == TEST_SUBMIT_WAIT)
            answer = onehop_wait(queue, &command);
        else
            while ((answer = onehop_test(queue, &command)) == ONEHOP_PENDING)
                ;
        if (call.kind == TEST_SPENT && answer == ONEHOP_OK)
            answer = onehop_wait(queue, &command);
        break;
    case TEST_NO_QUEUE:
        answer = onehop_read((const onehop_queue *)0, call.lba, call.blocks, call.offset);
        break;
    case TEST_FACTS:
        answer = onehop_blocks(queue) == call.lba && onehop_most_blocks(queue) == call.blocks &&
                         onehop_data_bytes(queue) == call.offset && onehop_block_bytes(queue) == call.operation
                     ? ONEHOP_OK
                     : ONEHOP_NO_QUEUE;
        break;
    }
    answers[i] = answer;
}

/* Each thread reads `rounds` chunks of its own; the first answer other than ONEHOP_OK is kept. */
extern "C" __global__ void hammer(const onehop_queue *queue, unsigned int rounds, unsigned int blocks, int *answers)
{
    unsigned long long bytes = onehop_block_bytes(queue);
    int kept = ONEHOP_OK;

    for (unsigned int round = 0; round < rounds; round++) {
        unsigned long long lba = ((unsigned long long)thread() * rounds + round) * blocks;
        int answer = onehop_read(queue, lba, blocks, lba * bytes);
        if (kept == ONEHOP_OK)
            kept = answer;
    }
    answers[thread()] = kept;
}

/* Each thread reads until an answer is not ONEHOP_OK. */
extern "C" __global__ void forever(const onehop_queue *queue, int *answers)
{
    int answer;
    do {
        answer = onehop_read(queue, thread(), 1, (unsigned long long)thread() * onehop_block_bytes(queue));
    } while (answer == ONEHOP_OK);
    answers[thread()] = answer;
}
