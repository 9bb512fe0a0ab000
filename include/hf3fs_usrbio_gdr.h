/*
 * usrbio with buffers in GPU memory.
 *
 * The functions that end in _gpu are those of the first proposal for 3FS, those that end in _device of the second; both do the
 * same. There is no silent fallback to host memory: if a GPU buffer is not possible, the call fails, unless the variable
 * HF3FS_GDR_FALLBACK is `host` or `auto`. Then the buffer is host memory, a line on stderr says so, and hf3fs_iov_is_gpu is false.
 * HF3FS_GDR_ENABLED=0 switches GPU buffers off; HF3FS_GDR_ENABLED=emulated gives the program an emulated GPU, number 0.
 */
#pragma once

#include "hf3fs_usrbio.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether there are GPUs, and how many. */
bool hf3fs_gdr_available(void);
int hf3fs_gdr_device_count(void);

/* Creates a buffer in GPU memory; opens one of the same user by its id; wraps memory of the program, which may be anywhere in
 * its allocation. -ENODEV: no such GPU. -ENOTSUP: the daemon or the platform cannot. -ENOMEM: no memory.
 * -ENOENT: nothing to open. */
int hf3fs_iovcreate_gpu(struct hf3fs_iov *iov, const char *hf3fs_mount_point, size_t size, size_t block_size, int gpu_device_id);
int hf3fs_iovopen_gpu(struct hf3fs_iov *iov, const uint8_t id[16], const char *hf3fs_mount_point, size_t size,
                      size_t block_size, int gpu_device_id);
int hf3fs_iovwrap_gpu(struct hf3fs_iov *iov, void *gpu_ptr, const uint8_t id[16], const char *hf3fs_mount_point, size_t size,
                      size_t block_size, int gpu_device_id);

/* Removes a buffer from the daemon; frees it. Wrapped memory stays. If the memory of a wrapped buffer was freed, hf3fs_prep_io
 * returns -ESTALE, also if other memory has its address now. */
void hf3fs_iovunlink_gpu(struct hf3fs_iov *iov);
void hf3fs_iovdestroy_gpu(struct hf3fs_iov *iov);

/* Whether a buffer is GPU memory, and of which GPU: -1 for none. */
bool hf3fs_iov_is_gpu(const struct hf3fs_iov *iov);
int hf3fs_iov_gpu_device(const struct hf3fs_iov *iov);

/* 0: what kernels wrote is ready to be read by the daemon. 1: what the daemon wrote is ready for kernels. */
int hf3fs_iovsync_gpu(const struct hf3fs_iov *iov, int direction);

/* Identifies a buffer to another program, also of another user. Anyone who has it can use the memory: keep it secret. It holds
 * no CUDA handle; the daemon passes the memory on. */
typedef struct {
    uint8_t data[80];
} hf3fs_gpu_ipc_handle_t;

int hf3fs_iov_export_gpu(const struct hf3fs_iov *iov, hf3fs_gpu_ipc_handle_t *handle);
int hf3fs_iov_import_gpu(struct hf3fs_iov *iov, const hf3fs_gpu_ipc_handle_t *handle, const char *hf3fs_mount_point);

/* The newer names. hf3fs_iovunlink and hf3fs_iovdestroy accept buffers of either kind. */
enum hf3fs_mem_type { HF3FS_MEM_HOST = 0, HF3FS_MEM_DEVICE = 1, HF3FS_MEM_MANAGED = 2 };

int hf3fs_iovcreate_device(struct hf3fs_iov *iov, const char *hf3fs_mount_point, size_t size, size_t block_size, int device_id);
int hf3fs_iovopen_device(struct hf3fs_iov *iov, const uint8_t id[16], const char *hf3fs_mount_point, size_t size,
                         size_t block_size, int device_id);
int hf3fs_iovwrap_device(struct hf3fs_iov *iov, void *device_ptr, const uint8_t id[16], const char *hf3fs_mount_point,
                         size_t size, size_t block_size, int device_id);
enum hf3fs_mem_type hf3fs_iov_mem_type(const struct hf3fs_iov *iov);
int hf3fs_iov_device_id(const struct hf3fs_iov *iov);
int hf3fs_iovsync(const struct hf3fs_iov *iov, int direction);

/*
 * Not part of 3FS: access to GPU memory, emulated or real, for tests and programs without CUDA.
 */
/* Copy out of a GPU buffer, and into one. */
int onehop_iov_read(const struct hf3fs_iov *iov, size_t offset, void *to, size_t bytes);
int onehop_iov_write(const struct hf3fs_iov *iov, size_t offset, const void *from, size_t bytes);
/* Memory of the emulated GPU, as frameworks allocate it; -ENOTSUP for a real GPU, which has cudaMalloc. */
int onehop_emulated_alloc(void **gpu_ptr, size_t bytes);
int onehop_emulated_free(void *gpu_ptr);

#ifdef __cplusplus
}
#endif
