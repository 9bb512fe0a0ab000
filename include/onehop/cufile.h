/* The cuFile API as onehop's libcufile.so.0 offers it: structures and functions of version 1.17.
 *
 * Programs that were built against NVIDIA's cufile.h need no other header; this one is for those that have none. docs/cufile.md
 * tells how to run a program with this library, and what differs. */
#ifndef ONEHOP_CUFILE_H
#define ONEHOP_CUFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

/* CUDA's type, where its header was not included. */
#ifndef __cuda_cuda_h__
typedef struct CUstream_st *CUstream;
#endif

/* Error numbers. cu_err is CUDA's, with CU_FILE_CUDA_DRIVER_ERROR alone. */
enum {
    CU_FILE_SUCCESS = 0,
    CU_FILE_DRIVER_NOT_INITIALIZED = 5001,
    CU_FILE_PLATFORM_NOT_SUPPORTED = 5007,
    CU_FILE_IO_NOT_SUPPORTED = 5008,
    CU_FILE_CUDA_DRIVER_ERROR = 5011,
    CU_FILE_CUDA_POINTER_INVALID = 5012,
    CU_FILE_CUDA_POINTER_RANGE_ERROR = 5014,
    CU_FILE_INVALID_MAPPING_RANGE = 5017,
    CU_FILE_INVALID_FILE_TYPE = 5018,
    CU_FILE_INVALID_FILE_OPEN_FLAG = 5019,
    CU_FILE_INVALID_VALUE = 5022,
    CU_FILE_MEMORY_ALREADY_REGISTERED = 5023,
    CU_FILE_MEMORY_NOT_REGISTERED = 5024,
    CU_FILE_DRIVER_ALREADY_OPEN = 5026,
    CU_FILE_HANDLE_NOT_REGISTERED = 5027,
    CU_FILE_HANDLE_ALREADY_REGISTERED = 5028,
    CU_FILE_INTERNAL_ERROR = 5030,
    CU_FILE_BATCH_SUBMIT_FAILED = 5040,
    CU_FILE_NOMEM_ERROR = 5043,
    CU_FILE_IO_ERROR = 5044
};

typedef struct CUfileError { int err; int cu_err; } CUfileError_t;

typedef void *CUfileHandle_t;
typedef void *CUfileBatchHandle_t;

enum { CU_FILE_HANDLE_TYPE_OPAQUE_FD = 1 };

typedef struct CUfileDescr_t {
    int type;
    union { int fd; void *handle; } handle;
    const void *fs_ops;
} CUfileDescr_t;

enum { CU_FILE_USE_POLL_MODE = 0, CU_FILE_ALLOW_COMPAT_MODE = 1 };

typedef struct CUfileDrvProps {
    struct {
        unsigned int major_version;
        unsigned int minor_version;
        size_t poll_thresh_size;
        size_t max_direct_io_size;
        unsigned int dstatusflags;
        unsigned int dcontrolflags;
    } nvfs;
    unsigned int fflags;
    unsigned int max_device_cache_size;
    unsigned int per_buffer_cache_size;
    unsigned int max_device_pinned_mem_size;
    unsigned int max_batch_io_size;
    unsigned int max_batch_io_timeout_msecs;
} CUfileDrvProps_t;

enum { CUFILE_BATCH = 1 };
enum { CUFILE_READ = 0, CUFILE_WRITE = 1 };
enum { CUFILE_CANCELED = 8, CUFILE_COMPLETE = 16, CUFILE_FAILED = 64 };

typedef struct CUfileIOParams {
    int mode;
    union {
        struct { void *devPtr_base; int64_t file_offset; int64_t devPtr_offset; size_t size; } batch;
    } u;
    CUfileHandle_t fh;
    int opcode;
    void *cookie;
} CUfileIOParams_t;

typedef struct CUfileIOEvents { void *cookie; int status; size_t ret; } CUfileIOEvents_t;

/* Counters of calls that succeeded and failed. */
typedef struct CUfileOpCounter { uint64_t ok; uint64_t err; } CUfileOpCounter_t;

typedef struct CUfileStatsLevel1 {
    CUfileOpCounter_t read_ops, write_ops;
    CUfileOpCounter_t hdl_register_ops, hdl_deregister_ops, buf_register_ops, buf_deregister_ops;
    uint64_t read_bytes, write_bytes, read_bw_bytes_per_sec, write_bw_bytes_per_sec;
    uint64_t read_lat_avg_us, write_lat_avg_us, read_ops_per_sec, write_ops_per_sec;
    uint64_t read_lat_sum_us, write_lat_sum_us;
    CUfileOpCounter_t batch_submit_ops, batch_complete_ops, batch_setup_ops, batch_cancel_ops, batch_destroy_ops;
    CUfileOpCounter_t batch_enqueued_ops, batch_posix_enqueued_ops, batch_processed_ops, batch_posix_processed_ops;
    CUfileOpCounter_t batch_nvfs_submit_ops, batch_p2p_submit_ops, batch_aio_submit_ops, batch_iouring_submit_ops;
    CUfileOpCounter_t batch_mixed_io_submit_ops, batch_total_submit_ops;
    uint64_t batch_read_bytes, batch_write_bytes, batch_read_bw_bytes, batch_write_bw_bytes;
    uint64_t batch_submit_lat_avg_us, batch_completion_lat_avg_us, batch_submit_ops_per_sec;
    uint64_t batch_complete_ops_per_sec, batch_submit_lat_sum_us, batch_completion_lat_sum_us;
    uint64_t last_batch_read_bytes, last_batch_write_bytes;
} CUfileStatsLevel1_t;

typedef struct CUfileStatsLevel2 {
    CUfileStatsLevel1_t basic;
    uint64_t read_size_kb_hist[32];
    uint64_t write_size_kb_hist[32];
} CUfileStatsLevel2_t;

typedef struct CUfilePerGpuStats {
    char uuid[16];
    uint64_t read_bytes, read_bw_bytes_per_sec, read_utilization, read_duration_us, n_total_reads, n_p2p_reads;
    uint64_t n_nvfs_reads, n_posix_reads, n_unaligned_reads, n_dr_reads, n_sparse_regions, n_inline_regions, n_reads_err;
    uint64_t writes_bytes, write_bw_bytes_per_sec, write_utilization, write_duration_us, n_total_writes, n_p2p_writes;
    uint64_t n_nvfs_writes, n_posix_writes, n_unaligned_writes, n_dr_writes, n_writes_err;
    uint64_t n_mmap, n_mmap_ok, n_mmap_err, n_mmap_free, reg_bytes;
} CUfilePerGpuStats_t;

typedef struct CUfileStatsLevel3 {
    CUfileStatsLevel2_t detailed;
    uint32_t num_gpus;
    CUfilePerGpuStats_t per_gpu_stats[16];
} CUfileStatsLevel3_t;

/* The driver. Opened as often as closed; calls that need it open it. */
CUfileError_t cuFileDriverOpen(void);
CUfileError_t cuFileDriverClose(void);
CUfileError_t cuFileDriverClose_v2(void);
long cuFileUseCount(void);
CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *properties);
CUfileError_t cuFileDriverSetPollMode(bool poll, size_t threshold_kb);
CUfileError_t cuFileDriverSetMaxDirectIOSize(size_t kb);
CUfileError_t cuFileDriverSetMaxCacheSize(size_t kb);
CUfileError_t cuFileDriverSetMaxPinnedMemSize(size_t kb);
CUfileError_t cuFileDriverGetP2PFlags(int which, int *flags);
CUfileError_t cuFileDriverSetP2PFlags(int which, int flags);
CUfileError_t cuFileGetVersion(int *version);
CUfileError_t cuFileGetBARSizeInKB(int gpu, size_t *kb);
CUfileError_t cuFileExportPCIeTopology(const char *path);

/* Files and memory. */
CUfileError_t cuFileHandleRegister(CUfileHandle_t *handle, CUfileDescr_t *description);
void cuFileHandleDeregister(CUfileHandle_t handle);
CUfileError_t cuFileBufRegister(const void *base, size_t bytes, int flags);
CUfileError_t cuFileBufDeregister(const void *base);

/* Transfers: the bytes moved; or -1, with errno or one of the numbers above in errno. */
ssize_t cuFileRead(CUfileHandle_t handle, void *base, size_t bytes, off_t file_offset, off_t base_offset);
ssize_t cuFileWrite(CUfileHandle_t handle, const void *base, size_t bytes, off_t file_offset, off_t base_offset);

/* Batches. */
CUfileError_t cuFileBatchIOSetUp(CUfileBatchHandle_t *batch, unsigned most);
CUfileError_t cuFileBatchIOSubmit(CUfileBatchHandle_t batch, unsigned count, CUfileIOParams_t *operations, unsigned flags);
CUfileError_t cuFileBatchIOGetStatus(CUfileBatchHandle_t batch, unsigned least, unsigned *count, CUfileIOEvents_t *events,
                                     struct timespec *limit);
CUfileError_t cuFileBatchIOCancel(CUfileBatchHandle_t batch);
void cuFileBatchIODestroy(CUfileBatchHandle_t batch);

/* Operations in streams. All words, and the memory, stay until the stream has passed the operation, after an error too. */
CUfileError_t cuFileReadAsync(CUfileHandle_t handle, void *base, size_t *bytes, off_t *file_offset, off_t *base_offset,
                              ssize_t *done, CUstream stream);
CUfileError_t cuFileWriteAsync(CUfileHandle_t handle, void *base, size_t *bytes, off_t *file_offset, off_t *base_offset,
                               ssize_t *done, CUstream stream);
CUfileError_t cuFileStreamRegister(CUstream stream, unsigned flags);
CUfileError_t cuFileStreamDeregister(CUstream stream);

/* Parameters: set before the driver is open. */
CUfileError_t cuFileGetParameterSizeT(int which, size_t *value);
CUfileError_t cuFileSetParameterSizeT(int which, size_t value);
CUfileError_t cuFileGetParameterBool(int which, bool *value);
CUfileError_t cuFileSetParameterBool(int which, bool value);
CUfileError_t cuFileGetParameterString(int which, char *value, int bytes);
CUfileError_t cuFileSetParameterString(int which, const char *value);
CUfileError_t cuFileGetParameterMinMaxValue(int which, size_t *least, size_t *most);
CUfileError_t cuFileSetParameterPosixPoolSlabArray(const size_t *sizes, const size_t *counts, int entries);
CUfileError_t cuFileGetParameterPosixPoolSlabArray(size_t *sizes, size_t *counts, int entries);
CUfileError_t cuFileSetParameterGpuBounceBufferSlabArray(const size_t *sizes, const size_t *counts, int entries);
CUfileError_t cuFileGetParameterGpuBounceBufferSlabArray(size_t *sizes, size_t *counts, int entries);

/* Statistics. */
CUfileError_t cuFileSetStatsLevel(int level);
CUfileError_t cuFileGetStatsLevel(int *level);
CUfileError_t cuFileStatsStart(void);
CUfileError_t cuFileStatsStop(void);
CUfileError_t cuFileStatsReset(void);
CUfileError_t cuFileGetStatsL1(CUfileStatsLevel1_t *stats);
CUfileError_t cuFileGetStatsL2(CUfileStatsLevel2_t *stats);
CUfileError_t cuFileGetStatsL3(CUfileStatsLevel3_t *stats);

/* onehop's own: a JSON text that says which route the bytes of this process took; with a handle also why its file is not read
 * past the page cache. Gives the bytes of the text; it is cut where there is less room. -1 for a handle that is none. */
int onehop_cufile_route(CUfileHandle_t handle, char *out, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
