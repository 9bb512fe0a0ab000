/*
 * The host's side of device.h, for programs in C and C++: opens a drive and a GPU, loads files and blocks of the drive into GPU
 * memory by the best route that works, and lends a queue of the drive to kernels.
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
/* Bytes of a drive in GPU memory. */
typedef struct onehop_bytes onehop_bytes;
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
    ONEHOP_ERROR_DEFECT = 5,
    /* The drive has no such file, or a file system that is not read. */
    ONEHOP_ERROR_FILE = 6,
    /* The bytes in GPU memory are not those of the drive. */
    ONEHOP_ERROR_MISMATCH = 7,
    /* The caller's progress function ended the transfer. */
    ONEHOP_ERROR_CANCELLED = 8
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

/* Which route a transfer takes, and how. Zeroes and null pointers stand for what is said in brackets; clear the structure, then
 * set `size`. */
struct onehop_transfer_options {
    /* sizeof(struct onehop_transfer_options). Must be given. */
    uint32_t size;
    /* The namespace (1). */
    uint32_t nsid;
    /* A route's name: "gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct", "cpu/pinned", or "auto", the best that
     * works ("auto"). By gpu/tier1 the bytes end in host memory that kernels reach. */
    const char *route;
    /* Queues of GPU threads, each with a warp of its own (2). */
    uint32_t queues;
    /* GPU threads that share one queue (0: each warp owns one). */
    uint32_t threads;
    /* Commands in flight on each queue (64). */
    uint32_t depth;
    /* After so long a command counts as lost, and the drive is recovered (5000). */
    uint32_t timeout_ms;
    /* Not zero: the CPU reads the bytes once more and compares them. */
    uint32_t verify;
    /* The partition that has the file (0: the only one with a known file system); -1 is the whole drive. */
    int32_t partition;
    /* Called by the calling thread with bytes that were moved since the last call. Anything but 0 ends the transfer with
     * ONEHOP_ERROR_CANCELLED (null). It must return, and must not close what the transfer uses. */
    int (*progress)(void *context, uint64_t bytes);
    /* Its first argument. */
    void *context;
    uint64_t reserved[4];
};

/* What of a transfer was simulated. */
enum onehop_simulated {
    ONEHOP_SIMULATED_DRIVE = 1,
    ONEHOP_SIMULATED_GPU = 2
};

/* How a transfer went. */
struct onehop_outcome {
    /* sizeof(struct onehop_outcome). Must be given; what this library knows of comes back. */
    uint32_t size;
    /* onehop_simulated, or'ed. */
    uint32_t simulated;
    /* Bytes that were asked for. */
    uint64_t bytes;
    /* Bytes that were read for them, whole blocks. */
    uint64_t read_bytes;
    uint64_t commands;
    /* How often a command was tried again. */
    uint64_t retries;
    double seconds;
    /* The route's name. */
    char route[16];
    /* Who gave the commands: "gpu" or "cpu". */
    char initiator[8];
    /* 1 if the bytes were compared and are right. */
    uint32_t verified;
    /* Bytes of the whole text of which why_not_better has what it has room for. */
    uint32_t why_not_better_bytes;
    /* A line for each better route: its name, what is in its way, and what would change that. */
    char why_not_better[2048];
    uint64_t reserved[4];
};

/* The words of this thread's last error; empty if its last call went well. They stay until its next call. */
const char *onehop_last_error(void);

/* The PTX of the functions in device.h, with a zero byte behind it: to be linked with kernels. */
const char *onehop_library_ptx(void);

/* Opens a drive by its name: "sim:mem:64M", "sim:IMAGE", "qtest:SOCKET,MEMORY-FILE", "vfio-user:SOCKET", or a PCI address such
 * as "0000:0b:00.0". */
int onehop_drive_open(const char *name, int writable, onehop_drive **drive);
/* A line for each protection that the drive's user has to do without, such as an IOMMU; empty for most drives. Cut to `room`
 * bytes, the zero byte behind it included. */
int onehop_drive_warnings(const onehop_drive *drive, char *to, size_t room);
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

/* Reads `bytes` bytes (0: all that there are) from `offset` on of a file of the drive's own file system (ext2/3/4, FAT, exFAT)
 * into memory of the GPU, and waits until they are there. `options` and `outcome` may be null. After an error `*loaded` is
 * null, and `*outcome` is as it was. */
int onehop_load_file(const onehop_drive *drive, const onehop_gpu *gpu, const char *path, uint64_t offset, uint64_t bytes,
                     const struct onehop_transfer_options *options, onehop_bytes **loaded,
                     struct onehop_outcome *outcome);
/* The same of blocks. */
int onehop_load_blocks(const onehop_drive *drive, const onehop_gpu *gpu, uint64_t lba, uint64_t blocks,
                       const struct onehop_transfer_options *options, onehop_bytes **loaded,
                       struct onehop_outcome *outcome);
/* The bytes, as kernels address them. Memory of the emulated GPU is no memory of this process. */
void *onehop_bytes_data(const onehop_bytes *loaded);
/* How many. */
uint64_t onehop_bytes_size(const onehop_bytes *loaded);
/* Copies bytes out of the GPU's memory. */
int onehop_bytes_read(const onehop_bytes *loaded, uint64_t offset, void *to, size_t bytes);
/* Frees the memory. Kernels that use it must have ended. */
void onehop_bytes_close(onehop_bytes *loaded);

/* What onehop_read and onehop_write answer to one thread of the emulated GPU: the same code on a thread of this machine. */
int onehop_emulated_read(const onehop_lent *lent, uint64_t lba, uint32_t blocks, uint64_t offset, int *answer);
int onehop_emulated_write(const onehop_lent *lent, uint64_t lba, uint32_t blocks, uint64_t offset, int *answer);

#ifdef __cplusplus
}
#endif

#endif
