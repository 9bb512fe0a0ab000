/*
 * The host side of device.h, for programs in C and C++: opens a drive and a GPU, loads files and blocks of the drive into GPU
 * memory by the best route that works, and exports a queue of the drive to kernels (onehop_lend).
 * Link with libonehop.so (cargo build --release -p onehop-capi).
 *
 * Functions that return an int return 0 on success, else an onehop_error; onehop_last_error() then says what failed and how to
 * fix it. All functions are thread-safe, also during the exit of a thread or of the process, when onehop_last_error() may be
 * empty. An exported queue keeps its drive and its GPU open. Drives and GPUs have the names of the command line: `onehop --help`.
 *
 * Handles are numbers, not pointers. A handle that is closed, of another kind or unknown is an ONEHOP_ERROR_ARGUMENT, and no
 * memory of the caller is written. A handle may be closed while another thread uses it: that call completes. A forked process
 * has none of its parent's handles and may open its own.
 */
#ifndef ONEHOP_H
#define ONEHOP_H

#include <stddef.h>
#include <stdint.h>

#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An open drive. */
typedef struct onehop_drive onehop_drive;
/* An open GPU. */
typedef struct onehop_gpu onehop_gpu;
/* Bytes of a drive in GPU memory. */
typedef struct onehop_bytes onehop_bytes;
/* A file whose pages are moved to and from GPU memory. */
typedef struct onehop_pages onehop_pages;
/* An exported queue, with the data memory that its commands may use. */
typedef struct onehop_lent onehop_lent;
/* An array that is open. Kernels get its onehop_array. */
typedef struct onehop_open_array onehop_open_array;

/* Why a call failed. */
enum onehop_error {
    /* A null pointer, an unknown name, an invalid number. */
    ONEHOP_ERROR_ARGUMENT = 1,
    /* This machine, drive or GPU cannot do it. */
    ONEHOP_ERROR_NOT_POSSIBLE = 2,
    /* The drive failed. */
    ONEHOP_ERROR_DRIVE = 3,
    /* The GPU or its driver failed. */
    ONEHOP_ERROR_GPU = 4,
    /* A defect of onehop. */
    ONEHOP_ERROR_DEFECT = 5,
    /* There is no such file, it cannot be read or written, or the drive has an unsupported file system. */
    ONEHOP_ERROR_FILE = 6,
    /* The bytes in GPU memory differ from those of the drive. */
    ONEHOP_ERROR_MISMATCH = 7,
    /* The caller's progress function cancelled the transfer. */
    ONEHOP_ERROR_CANCELLED = 8
};

/* Where queues and data are. A simulated drive reaches host memory only: with a real GPU, only the first is possible. */
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

/* How to export a queue. Zero selects the default in brackets. */
struct onehop_lend_options {
    /* Bytes of the data memory, rounded up to pages. Required. */
    uint64_t data_bytes;
    /* The namespace (1). */
    uint32_t nsid;
    /* Nonzero: kernels may write blocks; the drive must be open for writing. */
    uint32_t writable;
    /* An onehop_placement. */
    uint32_t placement;
    /* Commands in flight (1023), limited by the drive. */
    uint32_t depth;
    /* After this time a command counts as lost, and the drive is recovered (5000). */
    uint32_t stall_ms;
    /* How long a call of a kernel may take, retries included (60000). */
    uint32_t limit_ms;
};

/* An array on a drive, for kernels. Zero selects the default in brackets; clear the structure, then set `size`. */
struct onehop_array_options {
    /* sizeof(struct onehop_array_options). Required. */
    uint32_t size;
    /* The namespace (1). */
    uint32_t nsid;
    /* The array's first block, and how many blocks it has (0: all that follow). */
    uint64_t first_block;
    uint64_t blocks;
    /* Bytes of the cache. Required. */
    uint64_t cache_bytes;
    /* Bytes of a page: a power of two from 512 to 65536, at least a block (4096). */
    uint32_t page_bytes;
    /* Nonzero: kernels may write; the drive must be open for writing. */
    uint32_t writable;
    /* An onehop_placement. */
    uint32_t placement;
    /* Commands in flight (1023), limited by the drive. */
    uint32_t depth;
    /* After this time a command counts as lost, and the drive is recovered (5000). */
    uint32_t stall_ms;
    /* How long a command may take, retries included (60000). */
    uint32_t limit_ms;
    /* How long a thread waits for others: until one has read a page, or has unpinned one (10000). */
    uint32_t patience_ms;
    uint32_t reserved[5];
};

/* An open array. Counts wrap at 2^32. */
struct onehop_array_info {
    /* Bytes of the array. */
    uint64_t bytes;
    /* Pages of the cache, and bytes of each. */
    uint32_t cached_pages;
    uint32_t page_bytes;
    /* Pages read and written since it was opened, and how many of these failed. */
    uint32_t reads;
    uint32_t writes;
    uint32_t failed_reads;
    uint32_t failed_writes;
};

/* Properties of an exported queue. */
struct onehop_lent_info {
    /* Blocks of the namespace. */
    uint64_t blocks;
    /* Bytes of the data memory. */
    uint64_t data_bytes;
    /* Bytes of a block in memory. */
    uint32_t block_bytes;
    /* How often the drive was recovered since the queue was exported. */
    uint32_t recoveries;
};

/* Which route a transfer takes, and how. Zero and null select the default in brackets; clear the structure, then set `size`. */
struct onehop_transfer_options {
    /* sizeof(struct onehop_transfer_options). Required. */
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
    /* After this time a command counts as lost, and the drive is recovered (5000). */
    uint32_t timeout_ms;
    /* Nonzero: the CPU reads the bytes again and compares them. */
    uint32_t verify;
    /* The partition that has the file (0: the only one with a known file system); -1 is the whole drive. */
    int32_t partition;
    /* Called by the calling thread with the bytes moved since the last call. A nonzero result cancels the transfer with
     * ONEHOP_ERROR_CANCELLED (null). It must return, in this process (not in a forked child), never by longjmp or an
     * exception, and must not close handles that the transfer uses. */
    int (*progress)(void *context, uint64_t bytes);
    /* Its first argument. */
    void *context;
    uint64_t reserved[4];
};

/* Simulated parts of a transfer. */
enum onehop_simulated {
    ONEHOP_SIMULATED_DRIVE = 1,
    ONEHOP_SIMULATED_GPU = 2
};

/* How a transfer went. */
struct onehop_outcome {
    /* sizeof(struct onehop_outcome). Required; the library returns the size that it has filled in. */
    uint32_t size;
    /* onehop_simulated, or'ed. */
    uint32_t simulated;
    /* Bytes that were requested. */
    uint64_t bytes;
    /* Bytes that were read, as whole blocks. */
    uint64_t read_bytes;
    uint64_t commands;
    /* Commands that were retried. */
    uint64_t retries;
    double seconds;
    /* The route's name. */
    char route[16];
    /* Who submitted the commands: "gpu" or "cpu". */
    char initiator[8];
    /* 1 if the bytes were compared and are right. */
    uint32_t verified;
    /* Length of the whole text, which why_not_better may hold only the start of. */
    uint32_t why_not_better_bytes;
    /* A line for each better route: its name, why it was not taken, and how to fix that. */
    char why_not_better[2048];
    uint64_t reserved[4];
};

/* The message of this thread's last error; empty if its last call succeeded, and perhaps in destructors and exit handlers. Valid
 * until the thread's next call. */
const char *onehop_last_error(void);

/* The PTX of the functions in device.h, zero-terminated, to be linked with kernels. */
const char *onehop_library_ptx(void);

/* Opens a drive by its name: "sim:mem:64M", "sim:IMAGE", "qtest:SOCKET,MEMORY-FILE", "vfio-user:SOCKET", or a PCI address such
 * as "0000:0b:00.0". */
int onehop_drive_open(const char *name, int writable, onehop_drive **drive);
/* A line for each protection that is missing for this drive, such as an IOMMU; empty for most drives. Cut to `room` bytes,
 * the terminating zero included. */
int onehop_drive_warnings(const onehop_drive *drive, char *to, size_t room);
/* Flushes a namespace: all completed writes, also those of kernels, are durable afterwards. */
int onehop_drive_flush(const onehop_drive *drive, uint32_t nsid);
void onehop_drive_close(onehop_drive *drive);

/* Opens a GPU by its CUDA ordinal ("0") or PCI address, or the emulated one ("emu"). A real one is used through its primary
 * context, as by the CUDA runtime. */
int onehop_gpu_open(const char *name, onehop_gpu **gpu);
void onehop_gpu_close(onehop_gpu *gpu);

/* Creates a queue and exports it to kernels. A thread of the library monitors it and recovers the drive. While a kernel waits
 * for the drive, do not make calls that wait for that kernel with the CUDA driver locked (cudaFree and cudaModuleLoad may): a
 * recovery would have to wait for them. */
int onehop_lend(const onehop_drive *drive, const onehop_gpu *gpu, const struct onehop_lend_options *options,
                onehop_lent **lent);
/* The queue, to be passed to kernels. */
const onehop_queue *onehop_lent_queue(const onehop_lent *lent);
/* The data memory, to be passed to kernels. The emulated GPU's memory is not addressable by this process. */
void *onehop_lent_data(const onehop_lent *lent);
int onehop_lent_describe(const onehop_lent *lent, struct onehop_lent_info *info);
/* An error if the queue is no longer served, for example because the drive is gone. Kernels then get ONEHOP_STOPPED. */
int onehop_lent_check(const onehop_lent *lent);
/* Ends every call of a kernel, present and future, with ONEHOP_STOPPED, so that kernels can finish. */
int onehop_lent_stop(const onehop_lent *lent);
/* Deletes the queue and frees its data memory. Kernels that use them must have ended. Calls of other threads that use the
 * queue are stopped and waited for. */
int onehop_lent_close(onehop_lent *lent);

/* Copies bytes out of the data memory, or into it. The caller's bytes are not part of that memory (where it is host memory),
 * and nobody else uses them during the call. */
int onehop_data_read(const onehop_lent *lent, uint64_t offset, void *to, size_t bytes);
int onehop_data_write(const onehop_lent *lent, uint64_t offset, const void *from, size_t bytes);

/* Reads `bytes` bytes (0: all) from `offset` on of a file of the drive's own file system (ext2/3/4, FAT, exFAT)
 * into GPU memory, and waits for the end. `options` and `outcome` may be null. After an error `*loaded` is
 * null, and `*outcome` is as it was. */
int onehop_load_file(const onehop_drive *drive, const onehop_gpu *gpu, const char *path, uint64_t offset, uint64_t bytes,
                     const struct onehop_transfer_options *options, onehop_bytes **loaded,
                     struct onehop_outcome *outcome);
/* The same for blocks. */
int onehop_load_blocks(const onehop_drive *drive, const onehop_gpu *gpu, uint64_t lba, uint64_t blocks,
                       const struct onehop_transfer_options *options, onehop_bytes **loaded,
                       struct onehop_outcome *outcome);
/* The address of the bytes for kernels. The emulated GPU's memory is not addressable by this process. */
void *onehop_bytes_data(const onehop_bytes *loaded);
/* How many. */
uint64_t onehop_bytes_size(const onehop_bytes *loaded);
/* Copies bytes out of the GPU's memory into others, which nobody else uses during the call. */
int onehop_bytes_read(const onehop_bytes *loaded, uint64_t offset, void *to, size_t bytes);
/* Frees the memory. Kernels that use it must have ended. */
void onehop_bytes_close(onehop_bytes *loaded);

/* Memory that pages are moved to and from: of the GPU (from cudaMalloc and the like, within one allocation), or of this process
 * with the emulated one. Neither null nor empty. It stays allocated during a call. After ONEHOP_ERROR_GPU, and after a call that
 * reports a stalled disk, it is not freed: copies may still arrive. */
struct onehop_memory {
    void *start;
    uint64_t bytes;
};

/* A page. */
struct onehop_page {
    /* Where it lies in the file. */
    uint64_t offset;
    /* Where it begins in its memory. */
    uint64_t at;
    uint64_t bytes;
    /* The number of its memory in the list, from 0 on. */
    uint64_t memory;
};

/* Opens a file that exists for pages of a GPU. Of a file in memory (/dev/shm), or one that is opened for reading and is in the
 * page cache, at most `registered` bytes are registered with the GPU (UINT64_MAX, and at most: half of the machine's memory). The
 * GPU moves them without a CPU, and other programs that open the file wait for some milliseconds. Threads move all others. */
int onehop_pages_open(const char *path, const onehop_gpu *gpu, int writable, uint64_t registered, onehop_pages **pages);
/* Registers all of the file that may be, and stores how many bytes are, unless `bytes` is null. Without this, each part is
 * registered in the background when its first page is moved. */
int onehop_pages_register(const onehop_pages *pages, uint64_t *bytes);
/* Reads pages from the file, and returns when all of them have arrived. Work of the GPU that uses the memories has to have
 * ended before. Pages must not overlap. A page that is not within its memory and the file is an ONEHOP_ERROR_ARGUMENT before
 * anything is moved. After an error that concerns one page, its number is stored, unless `failed` is null. */
int onehop_pages_read(const onehop_pages *pages, const struct onehop_memory *memories, size_t memory_count,
                      const struct onehop_page *list, size_t count, size_t *failed);
/* Writes pages to the file, which may grow. When it returns, programs that read the file see them. */
int onehop_pages_write(const onehop_pages *pages, const struct onehop_memory *memories, size_t memory_count,
                       const struct onehop_page *list, size_t count, size_t *failed);
/* Returns when everything that was written is on the disk. */
int onehop_pages_sync(const onehop_pages *pages);
/* Bytes moved so far, by the GPU and by threads. Each place may be null. */
int onehop_pages_moved(const onehop_pages *pages, uint64_t *registered, uint64_t *staged);
/* Closes the file. What is registered is unregistered in the background; a file that is opened again before that is staged. */
void onehop_pages_close(onehop_pages *pages);

/* Opens blocks of a drive as an array for kernels. The drive and the GPU stay open as long as it is. */
int onehop_array_open(const onehop_drive *drive, const onehop_gpu *gpu, const struct onehop_array_options *options,
                      onehop_open_array **array);
/* The array, to be passed to kernels. */
const onehop_array *onehop_array_handle(const onehop_open_array *array);
int onehop_array_describe(const onehop_open_array *array, struct onehop_array_info *info);
/* An error if the drive no longer serves it. */
int onehop_array_check(const onehop_open_array *array);
/* Ends every wait of a kernel for the drive, present and future, so that kernels can finish. */
int onehop_array_stop(const onehop_open_array *array);
/* Reads rows of `row_bytes` bytes, which begin every `stride` bytes (0: every `row_bytes`), in the order of `ids`, into memory of
 * the GPU (of this process, for the emulated one), and waits for the end. Both are multiples of 4. After an error of a row its
 * place in the list is stored, unless `failed` is null; the other rows are right. */
int onehop_array_gather(const onehop_open_array *array, uint32_t row_bytes, uint32_t stride, const uint64_t *ids, size_t count,
                        void *to, size_t *failed);
/* Writes rows. Of two that are the same, which one remains is undefined. */
int onehop_array_scatter(const onehop_open_array *array, uint32_t row_bytes, uint32_t stride, const uint64_t *ids, size_t count,
                         const void *from, size_t *failed);
/* Writes back all that was written, and makes it durable. Kernels that write must have ended. */
int onehop_array_flush(const onehop_open_array *array);
/* Flushes, and closes the array. Kernels that use it must have ended. */
int onehop_array_close(onehop_open_array *array);

/* onehop_read and onehop_write on one thread of the emulated GPU: the same code on a CPU thread. */
int onehop_emulated_read(const onehop_lent *lent, uint64_t lba, uint32_t blocks, uint64_t offset, int *answer);
int onehop_emulated_write(const onehop_lent *lent, uint64_t lba, uint32_t blocks, uint64_t offset, int *answer);

#ifdef __cplusplus
}
#endif

#endif
