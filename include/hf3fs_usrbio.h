/*
 * usrbio: files of a 3FS mount, read and written through rings in shared memory.
 *
 * Names, layouts and return values are those of 3FS, so that programs written for it compile and run unchanged, with the daemon
 * of onehop (`onehop mount`) or of 3FS. Link with libhf3fs_api_shared.so (cargo build --release -p onehop-hf3fs).
 *
 * A program creates a buffer (an "iov") and a ring (an "ior"), registers its open files, puts requests into the ring, notifies
 * the daemon, and waits for completions. Unless stated otherwise, an int result is 0 on success, else a negative error number.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The result of the ioctl behind hf3fs_is_hf3fs for a file of 3FS. */
#define HF3FS_SUPER_MAGIC 0x8f3f5fff

/* Flags of hf3fs_iorcreate4. A read that meets a hole fails with ENODATA instead of returning zeroes. */
#define HF3FS_IOR_ALLOW_READ_UNCOMMITTED 1
#define HF3FS_IOR_FORBID_READ_HOLES 2

typedef void *hf3fs_iov_handle;
typedef void *hf3fs_ior_handle;

/* A buffer. The caller owns the structure; the calls that create a buffer fill it in. */
struct hf3fs_iov {
    uint8_t *base;          /* its first byte; for GPU memory an address of the GPU */
    hf3fs_iov_handle iovh;  /* null where the memory was wrapped */
    char id[16];
    char mount_point[256];
    size_t size;
    size_t block_size;      /* a transfer stays within one block of this size; 0 for a single block */
    int numa;               /* the NUMA node, below 0 for none; a special value for GPU memory */
};

/* A ring. */
struct hf3fs_ior {
    struct hf3fs_iov iov;
    hf3fs_ior_handle iorh;
    char mount_point[256];
    bool for_read;          /* a ring reads or writes, never both */
    int io_depth;           /* 0: all; n: exactly n at a time; -n: at most n */
    int priority;           /* below 0: before others; above 0: after them */
    int timeout;            /* milliseconds that fewer than -io_depth may wait for more */
    uint64_t flags;
};

/* How a transfer ended. */
struct hf3fs_cqe {
    int32_t index;          /* what hf3fs_prep_io returned */
    int32_t reserved;       /* never filled in */
    int64_t result;         /* bytes, or a negative error number */
    const void *userdata;
};

/* Whether the file belongs to a mount that supports usrbio. */
bool hf3fs_is_hf3fs(int fd);

/* Finds the mount point above a path. Returns its length including the terminating zero, also if that exceeds `size` and
 * nothing was written; -1 if there is none. */
int hf3fs_extract_mount_point(char *hf3fs_mount_point, int size, const char *path);

/* Creates a buffer; opens another program's by its id; removes its name from /dev/shm; frees it. */
int hf3fs_iovcreate(struct hf3fs_iov *iov, const char *hf3fs_mount_point, size_t size, size_t block_size, int numa);
int hf3fs_iovopen(struct hf3fs_iov *iov, const uint8_t id[16], const char *hf3fs_mount_point, size_t size, size_t block_size,
                  int numa);
void hf3fs_iovunlink(struct hf3fs_iov *iov);
void hf3fs_iovdestroy(struct hf3fs_iov *iov);

/* Fills in the structure for memory that the daemon knows by other means, such as a link that the program made. Such a
 * buffer is not destroyed. */
int hf3fs_iovwrap(struct hf3fs_iov *iov, void *base, const uint8_t id[16], const char *hf3fs_mount_point, size_t size,
                  size_t block_size, int numa);

/* Bytes of a ring with this number of entries. */
size_t hf3fs_ior_size(int entries);

/* Creates a ring; destroys it. */
int hf3fs_iorcreate(struct hf3fs_ior *ior, const char *hf3fs_mount_point, int entries, bool for_read, int io_depth, int numa);
int hf3fs_iorcreate2(struct hf3fs_ior *ior, const char *hf3fs_mount_point, int entries, bool for_read, int io_depth,
                     int priority, int numa);
int hf3fs_iorcreate3(struct hf3fs_ior *ior, const char *hf3fs_mount_point, int entries, bool for_read, int io_depth,
                     int priority, int timeout, int numa);
int hf3fs_iorcreate4(struct hf3fs_ior *ior, const char *hf3fs_mount_point, int entries, bool for_read, int io_depth,
                     int timeout, int numa, uint64_t flags);
void hf3fs_iordestroy(struct hf3fs_ior *ior);

/* Registers an open file. Returns the negated number of a copy of the descriptor, which is also accepted in place of a
 * descriptor; a POSITIVE error number on failure. hf3fs_dereg_fd closes the copy: as with every close, the process loses its
 * fcntl locks on the file. */
int hf3fs_reg_fd(int fd, uint64_t flags);
void hf3fs_dereg_fd(int fd);

/* Entries of a ring. */
int hf3fs_io_entries(const struct hf3fs_ior *ior);

/* Puts a request into a ring: `len` bytes between `ptr`, within the buffer, and the registered file, from `off` on.
 * Returns its index. -EAGAIN: the ring is full. Not for two threads at once on one ring. */
int hf3fs_prep_io(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool read, void *ptr, int fd, size_t off,
                  uint64_t len, const void *userdata);

/* Notifies the daemon of new requests. */
int hf3fs_submit_ios(const struct hf3fs_ior *ior);

/* Waits until `min_results` requests have ended, or until a moment of CLOCK_REALTIME, and takes at most `cqec` completions.
 * Returns how many: fewer than `min_results` if the time is up, which is not an error. */
int hf3fs_wait_for_ios(const struct hf3fs_ior *ior, struct hf3fs_cqe *cqes, int cqec, int min_results,
                       const struct timespec *abs_timeout);

/* Creates a hard link; punches holes into a file, each from start[i] to end[i], at most 1000.
 * Both return a POSITIVE error number on failure. */
int hf3fs_hardlink(const char *target, const char *link_name);
int hf3fs_punchhole(int fd, int n, const size_t *start, const size_t *end, size_t flags);

#ifdef __cplusplus
}
#endif
