/*
 * Functions for GPU kernels that read and write an NVMe drive themselves: block by block, or as an array whose pages are cached
 * in GPU memory. onehop/array.h has arrays of C++ types.
 *
 * The host creates a queue and exports it to kernels (onehop_lend in onehop.h, or onehop_drive::GpuQueues::export in Rust). A
 * kernel gets the queue's address in GPU memory. Link the functions with your kernels: they are in the library's PTX
 * (onehop_library_ptx, crates/device/ptx/library.ptx). docs/gpu-kernels.md has examples for CUDA C++, Numba and Rust.
 *
 * Any thread of any block may call any function; the threads of a warp may diverge. Every call ends: with the drive's
 * completion, at the time limits that the host set, or when the host stops the queue.
 *
 * Ordering. The drive reads what a thread stored before it begins a write. The thread that gets ONEHOP_OK sees the data.
 * __syncthreads() extends both to the threads of a block; a release and an acquire extend them to other blocks.
 *
 * This header needs no other. In CPU code it declares the types and constants, and no functions.
 */
#ifndef ONEHOP_DEVICE_H
#define ONEHOP_DEVICE_H

#ifdef __cplusplus
extern "C" {
#endif

/* A queue that the host has exported. A kernel needs only its address in GPU memory. */
typedef struct onehop_queue onehop_queue;

/*
 * Results. A positive number is the drive's status of the command, after as many retries as the host allows: the NVMe status
 * field, with the status code in bits 7:0, its type in 10:8, DNR in bit 14.
 */
enum onehop_answer {
    /* The command succeeded, and its data has arrived. */
    ONEHOP_OK = 0,
    /* The command has not ended yet. */
    ONEHOP_PENDING = -1,
    /* The command did not complete in time. The drive no longer uses its memory. */
    ONEHOP_TIMED_OUT = -2,
    /* The outcome is unknown: the drive may still use the memory until the host has recovered the drive or deleted the queue. */
    ONEHOP_IN_DOUBT = -3,
    /* The host has stopped the queue for good. The outcome of commands in flight is unknown. */
    ONEHOP_STOPPED = -4,
    /* The queue had no room within the command's time limit; nothing was submitted. */
    ONEHOP_FULL = -5,
    /* The namespace does not have these blocks. */
    ONEHOP_BAD_RANGE = -6,
    /* No blocks, or more than onehop_most_blocks. */
    ONEHOP_BAD_LENGTH = -7,
    /* The data memory ends before the transfer does. */
    ONEHOP_BAD_OFFSET = -8,
    /* The offset is not a multiple of four. */
    ONEHOP_BAD_ALIGNMENT = -9,
    /* The queue was exported for reading only. */
    ONEHOP_READ_ONLY = -10,
    /* Not a queue, or one of another version of onehop. */
    ONEHOP_NO_QUEUE = -11,
    /* The command was never begun, or its end was already reported. */
    ONEHOP_SPENT = -12,
    /* Neither ONEHOP_READ nor ONEHOP_WRITE. */
    ONEHOP_NO_OPERATION = -13
};

/* Results of arrays, besides those above: a page that could not be read has the result of the read. */
enum onehop_array_answer {
    /* Every page of the cache that could have made room was pinned or in use, for as long as the host allows. */
    ONEHOP_NO_ROOM = -50,
    /* Another thread did not finish reading or writing the page in time. */
    ONEHOP_PAGE_BUSY = -51,
    /* The page has as many pins as can be counted. */
    ONEHOP_TOO_MANY_PINS = -52,
    /* The array ends before this byte or row. */
    ONEHOP_ARRAY_END = -53,
    /* The array was opened for reading only. */
    ONEHOP_ARRAY_READ_ONLY = -54,
    /* Not an array, or one of another version of onehop. */
    ONEHOP_NO_ARRAY = -55,
    /* onehop_array_pin_cached: the cache does not have the page. */
    ONEHOP_NOT_CACHED = -56,
    /* onehop::pin: the row is in two pages. */
    ONEHOP_TWO_PAGES = -57,
    /* Added to the result of a write: a page that had to make room could not be written back. */
    ONEHOP_WRITE_BACK = 65536
};

/* What to do with blocks. */
enum onehop_operation {
    /* From the drive to memory. */
    ONEHOP_READ = 0,
    /* From memory to the drive. */
    ONEHOP_WRITE = 1
};

/* A command in flight. It belongs to the thread that began it, or to one that it is passed to. */
typedef struct onehop_command {
    unsigned long long opaque[8];
} onehop_command;

/* A range of a drive as an array of bytes, through a cache of pages in memory that the GPU reaches (onehop_array_open in
 * onehop.h). A kernel needs only its address in GPU memory. */
typedef struct onehop_array onehop_array;

/* A page that a thread has pinned: it stays in the cache until it is unpinned. */
typedef struct onehop_pin {
    /* The byte that was asked for. */
    void *at;
    /* Bytes from there to the end of the page, or of the array. */
    unsigned int bytes;
    unsigned int slot;
} onehop_pin;

#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__NVPTX__)
#ifndef ONEHOP_DEVICE_FUNCTION
#define ONEHOP_DEVICE_FUNCTION __device__
#endif

/*
 * Reads `blocks` blocks, starting at block `lba`, into the data memory at byte `offset`, and waits for the end.
 */
ONEHOP_DEVICE_FUNCTION int onehop_read(const onehop_queue *queue, unsigned long long lba, unsigned int blocks,
                                       unsigned long long offset);

/* Writes blocks from the data memory, and waits for the end. The drive may still have them in its volatile cache. */
ONEHOP_DEVICE_FUNCTION int onehop_write(const onehop_queue *queue, unsigned long long lba, unsigned int blocks,
                                        unsigned long long offset);

/*
 * Begins a command once the queue has room. ONEHOP_PENDING: it is in flight, and `command` must be waited for, or tested until
 * it ends; otherwise its slot in the queue is lost. Any other result is its end.
 *
 * A queue has room for as many commands as the host requested. Threads that begin commands without ever testing them can fill
 * it, and then get ONEHOP_FULL.
 */
ONEHOP_DEVICE_FUNCTION int onehop_submit(const onehop_queue *queue, unsigned int operation, unsigned long long lba,
                                         unsigned int blocks, unsigned long long offset, onehop_command *command);

/* The result of a command, or ONEHOP_PENDING. A result is reported once. */
ONEHOP_DEVICE_FUNCTION int onehop_test(const onehop_queue *queue, onehop_command *command);

/* Waits for a command, and returns its result. */
ONEHOP_DEVICE_FUNCTION int onehop_wait(const onehop_queue *queue, onehop_command *command);

/* Blocks of the namespace. This and the following functions return 0 if it is not a queue. */
ONEHOP_DEVICE_FUNCTION unsigned long long onehop_blocks(const onehop_queue *queue);

/* Bytes of a block in memory. */
ONEHOP_DEVICE_FUNCTION unsigned int onehop_block_bytes(const onehop_queue *queue);

/* The most blocks of one command: the drive's limit, and at most 1 MiB with pages of 4 KiB. */
ONEHOP_DEVICE_FUNCTION unsigned int onehop_most_blocks(const onehop_queue *queue);

/* Bytes of the data memory. */
ONEHOP_DEVICE_FUNCTION unsigned long long onehop_data_bytes(const onehop_queue *queue);

/*
 * Pins the page of a byte, so that it can be read at pin->at. Unless the cache has it, it is read from the drive; then other
 * pages may be written back first. Threads that need the same page share one read. A thread should hold few pins, and none while
 * it waits for other threads: a cache whose pages are all pinned has no room (ONEHOP_NO_ROOM).
 */
ONEHOP_DEVICE_FUNCTION int onehop_array_pin(const onehop_array *array, unsigned long long byte, onehop_pin *pin);

/* The same to write to it. Two threads that write the same bytes have to agree. */
ONEHOP_DEVICE_FUNCTION int onehop_array_pin_mut(const onehop_array *array, unsigned long long byte, onehop_pin *pin);

/* Pins the page of a byte to read it if the cache has it; otherwise ONEHOP_NOT_CACHED. Never waits. */
ONEHOP_DEVICE_FUNCTION int onehop_array_pin_cached(const onehop_array *array, unsigned long long byte, onehop_pin *pin);

/* Releases a pin of onehop_array_pin or onehop_array_pin_cached. Loads of other threads must be over: __syncwarp() or
 * __syncthreads() before this. */
ONEHOP_DEVICE_FUNCTION int onehop_array_unpin(const onehop_array *array, const onehop_pin *pin);

/* Releases a pin of onehop_array_pin_mut. The page is written to the drive when it has to make room, or when the host flushes. */
ONEHOP_DEVICE_FUNCTION int onehop_array_unpin_mut(const onehop_array *array, const onehop_pin *pin);

/* Bytes of the array; 0 if it is none. */
ONEHOP_DEVICE_FUNCTION unsigned long long onehop_array_bytes(const onehop_array *array);

#endif

#ifdef __cplusplus
}
#endif

#endif
