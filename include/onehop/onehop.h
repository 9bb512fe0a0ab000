/*
 * The host's side of device.h, for programs in C and C++: opens a drive and a GPU, and lends a queue of the drive to kernels.
 * Link with libonehop.so (cargo build --release -p onehop-capi).
 *
 * Functions that give an int answer 0 when all went well, else an onehop_error; onehop_last_error() then says what happened
 * and what helps. Any thread may call any of them, while it ends and while the process ends too. A queue that is lent keeps its
 * drive and its GPU open. Names are those of the command line: `onehop --help`.
 *
 * What is opened is named by a handle, a number that points to nothing. A handle that was closed, that is of another kind or
 * that was never given is an ONEHOP_ERROR_ARGUMENT, and nothing of the caller's is written. Closing beside a call of another
 * thread is allowed: that call ends as it would have. A forked process has none of its parent's handles and may open its own.
 */
#ifndef ONEHOP_H
#define ONEHOP_H

#include <stddef.h>
#include <stdint.h>

#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A drive that is open. */
typedef struct onehop_drive onehop_drive;
/* A GPU that is open. */
typedef struct onehop_gpu onehop_gpu;
/* A queue that is lent, with the data memory that its commands may name. */
typedef struct onehop_lent onehop_lent;

/* Why a call failed. */
enum onehop_error {
    /* A null pointer, a name that names nothing, a number that means nothing. */
    ONEHOP_ERROR_ARGUMENT = 1,
    /* This machine, drive or GPU cannot do it. */
    ONEHOP_ERROR_NOT_POSSIBLE = 2,
    /* The drive did not do it. */
    ONEHOP_ERROR_DRIVE = 3,
    /* The GPU or its driver did not do it. */
    ONEHOP_ERROR_GPU = 4,
    /* A defect of onehop. */
    ONEHOP_ERROR_DEFECT = 5
};

/* Where queues and data lie. Memory of a simulated drive is host memory: with a real GPU only the first is possible. */
enum onehop_placement {
    /* All in host memory. */
    ONEHOP_TIER1 = 0,
    /* Queues in host memory, data in the GPU's. */
    ONEHOP_TIER2 = 1,
    /* All in the GPU's memory. */
    ONEHOP_TIER3 = 2,
    /* Submissions in host memory, completions and data in the GPU's. */
    ONEHOP_POSTED = 3
};

/* How a queue is to be lent. Zeroes stand for what is said in brackets. */
struct onehop_lend_options {
    /* Bytes of the data memory; rounded up to pages. Must be given. */
    uint64_t data_bytes;
    /* The namespace (1). */
    uint32_t nsid;
    /* Not zero: kernels may write blocks; the drive must have been opened for it. */
    uint32_t writable;
    /* An onehop_placement. */
    uint32_t placement;
    /* Commands in flight (1023), as far as the drive allows. */
    uint32_t depth;
    /* After so long a command counts as lost, and the drive is recovered (5000). */
    uint32_t stall_ms;
    /* So long a call of a kernel may take with all its tries (60000). */
    uint32_t limit_ms;
};

/* What a lent queue is. */
struct onehop_lent_info {
    /* Blocks of the namespace. */
    uint64_t blocks;
    /* Bytes of the data memory. */
    uint64_t data_bytes;
    /* Bytes that a block takes in memory. */
    uint32_t block_bytes;
    /* How often the drive had to be recovered while the queue was lent. */
    uint32_t recoveries;
};

/* The words of this thread's last error; empty if its last call went well. They stay until its next call. */
const char *onehop_last_error(void);

/* The PTX of the functions in device.h, with a zero byte behind it: to be linked with kernels. */
const char *onehop_library_ptx(void);

/* Opens a drive by its name: "sim:mem:64M", "sim:IMAGE", "qtest:SOCKET,MEMORY-FILE". */
int onehop_drive_open(const char *name, int writable, onehop_drive **drive);
/* Makes durable what was written to a namespace, by kernels too. */
int onehop_drive_flush(const onehop_drive *drive, uint32_t nsid);
void onehop_drive_close(onehop_drive *drive);

/* Opens a GPU by its CUDA ordinal ("0") or PCI address, or the emulated one ("emu"). A real one is used by way of its primary
 * context, as by the CUDA runtime. */
int onehop_gpu_open(const char *name, onehop_gpu **gpu);
void onehop_gpu_close(onehop_gpu *gpu);

/* Makes a queue and lends it to kernels. A thread of the library then looks after it: what it does not have to do with kernels
 * is to be left to it, but while a kernel waits for the drive, no call should be made in this process that waits for that
 * kernel with the CUDA driver locked (cudaFree and cudaModuleLoad may): a recovery would have to wait for it. */
int onehop_lend(const onehop_drive *drive, const onehop_gpu *gpu, const struct onehop_lend_options *options,
                onehop_lent **lent);
/* The queue, as kernels take it. */
const onehop_queue *onehop_lent_queue(const onehop_lent *lent);
/* The data memory, as kernels take it. Memory of the emulated GPU is no memory of this process. */
void *onehop_lent_data(const onehop_lent *lent);
int onehop_lent_describe(const onehop_lent *lent, struct onehop_lent_info *info);
/* An error if nothing more is done for this queue: the drive is gone, for one. Kernels are then told ONEHOP_STOPPED. */
int onehop_lent_check(const onehop_lent *lent);
/* Ends every call of a kernel, now and from now on, with ONEHOP_STOPPED: so that kernels come to their end. */
int onehop_lent_stop(const onehop_lent *lent);
/* Takes the queue back. Kernels that use it, or its data memory, must have ended; both are gone afterwards. Calls of other
 * threads that use the queue are stopped and waited for. */
int onehop_lent_close(onehop_lent *lent);

/* Copies bytes out of the data memory, or into it. */
int onehop_data_read(const onehop_lent *lent, uint64_t offset, void *to, size_t bytes);
int onehop_data_write(const onehop_lent *lent, uint64_t offset, const void *from, size_t bytes);

/* What onehop_read and onehop_write answer to one thread of the emulated GPU: the same code on a thread of this machine. */
int onehop_emulated_read(const onehop_lent *lent, uint64_t lba, uint32_t blocks, uint64_t offset, int *answer);
int onehop_emulated_write(const onehop_lent *lent, uint64_t lba, uint32_t blocks, uint64_t offset, int *answer);

#ifdef __cplusplus
}
#endif

#endif
