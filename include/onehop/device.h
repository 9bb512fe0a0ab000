/*
 * Functions that GPU kernels call to read and write an NVMe drive by themselves.
 *
 * The host makes a queue and lends it to kernels (onehop.h, or onehop_drive::GpuQueues::lend in Rust); what a kernel gets is
 * the queue's address in GPU memory. Link the functions with your kernels: they are in the library's PTX
 * (onehop_library_ptx, crates/device/ptx/library.ptx). docs/gpu-kernels.md has examples for CUDA C++, Numba and Rust.
 *
 * Any thread of any block may call any function; threads of a warp need not come together. Every call ends: by the drive's
 * answer, by the times that the host set, or when the host stops the queue.
 *
 * Order. What a thread stored before it begins a write is what the drive reads. After a command has ended with ONEHOP_OK, the
 * thread that was told so sees the data. Between threads of a block, __syncthreads() hands both on; between blocks,
 * whatever hands on a store does: a release and an acquire.
 *
 * This header needs no other. In code for a CPU it has the types and numbers, and no functions.
 */
#ifndef ONEHOP_DEVICE_H
#define ONEHOP_DEVICE_H

#ifdef __cplusplus
extern "C" {
#endif

/* A queue that the host has lent: its address in GPU memory is all that a kernel needs. */
typedef struct onehop_queue onehop_queue;

/*
 * What a function answers. A positive number is the status that the drive ended the command with, after it was tried again
 * as often as the host allows: the NVMe status field, with the status code in bits 7:0, its type in 10:8, DNR in bit 14.
 */
enum onehop_answer {
    /* The command was carried out: its data is there. */
    ONEHOP_OK = 0,
    /* It has not ended yet. */
    ONEHOP_PENDING = -1,
    /* It was not carried out in time. The drive has let go of its memory. */
    ONEHOP_TIMED_OUT = -2,
    /* The same, and the drive may still write its memory until the host takes the queue back, or has recovered the drive. */
    ONEHOP_IN_DOUBT = -3,
    /* The host has stopped the queue, for good: what was in flight is in doubt. */
    ONEHOP_STOPPED = -4,
    /* The queue had no room until the command's time was over; nothing was done. */
    ONEHOP_FULL = -5,
    /* The namespace does not have these blocks. */
    ONEHOP_BAD_RANGE = -6,
    /* No blocks, or more than onehop_most_blocks. */
    ONEHOP_BAD_LENGTH = -7,
    /* The data memory ends before the transfer does. */
    ONEHOP_BAD_OFFSET = -8,
    /* The offset is no multiple of four. */
    ONEHOP_BAD_ALIGNMENT = -9,
    /* The queue was lent for reading only. */
    ONEHOP_READ_ONLY = -10,
    /* This is no queue, or one of another version of onehop. */
    ONEHOP_NO_QUEUE = -11,
    /* This command was never begun, or has ended and was told of. */
    ONEHOP_SPENT = -12,
    /* Neither ONEHOP_READ nor ONEHOP_WRITE. */
    ONEHOP_NO_OPERATION = -13
};

/* What to do with blocks. */
enum onehop_operation {
    /* From the drive to memory. */
    ONEHOP_READ = 0,
    /* From memory to the drive. */
    ONEHOP_WRITE = 1
};

/* A command under way. It belongs to the thread that began it, or to another that it is handed to. */
typedef struct onehop_command {
    unsigned long long opaque[8];
} onehop_command;

#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__NVPTX__)
#ifndef ONEHOP_DEVICE_FUNCTION
#define ONEHOP_DEVICE_FUNCTION __device__
#endif

/*
 * Reads `blocks` blocks from block `lba` on into the data memory, from byte `offset` on, and waits until they are there.
 */
ONEHOP_DEVICE_FUNCTION int onehop_read(const onehop_queue *queue, unsigned long long lba, unsigned int blocks,
                                       unsigned long long offset);

/* Writes blocks from the data memory, and waits until the drive has them: in its cache, if it has one. */
ONEHOP_DEVICE_FUNCTION int onehop_write(const onehop_queue *queue, unsigned long long lba, unsigned int blocks,
                                        unsigned long long offset);

/*
 * Begins to move blocks, once the queue has room for the command. ONEHOP_PENDING if it is under way: then `command` must be
 * waited for, or tested until it ends, or its place in the queue is lost. Any other answer is its end.
 *
 * A queue has room for as many commands as the host asked for. Threads that hold commands and begin more without ever
 * testing can fill it, and are then told ONEHOP_FULL.
 */
ONEHOP_DEVICE_FUNCTION int onehop_submit(const onehop_queue *queue, unsigned int operation, unsigned long long lba,
                                         unsigned int blocks, unsigned long long offset, onehop_command *command);

/* How a command has ended, or ONEHOP_PENDING. An end is told once. */
ONEHOP_DEVICE_FUNCTION int onehop_test(const onehop_queue *queue, onehop_command *command);

/* Waits for a command's end. */
ONEHOP_DEVICE_FUNCTION int onehop_wait(const onehop_queue *queue, onehop_command *command);

/* Blocks of the namespace. This and the following answer 0 if this is no queue. */
ONEHOP_DEVICE_FUNCTION unsigned long long onehop_blocks(const onehop_queue *queue);

/* Bytes that a block takes in memory. */
ONEHOP_DEVICE_FUNCTION unsigned int onehop_block_bytes(const onehop_queue *queue);

/* The most blocks of one command: what the drive moves at once, and 1 MiB at most where pages have 4 KiB. */
ONEHOP_DEVICE_FUNCTION unsigned int onehop_most_blocks(const onehop_queue *queue);

/* Bytes of the data memory. */
ONEHOP_DEVICE_FUNCTION unsigned long long onehop_data_bytes(const onehop_queue *queue);

#endif

#ifdef __cplusplus
}
#endif

#endif
