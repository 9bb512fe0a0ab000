/* Calls every function of the headers and checks the results: calls MOUNT FOLDER. FOLDER is an empty folder of the
 * mount. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/api/hf3fs_usrbio.h"
#include "lib/api/hf3fs_usrbio_gdr.h"

_Static_assert(sizeof(struct hf3fs_iov) == 312 && sizeof(struct hf3fs_ior) == 600 && sizeof(struct hf3fs_cqe) == 24, "sizes");
_Static_assert(offsetof(struct hf3fs_iov, iovh) == 8 && offsetof(struct hf3fs_iov, id) == 16, "iov");
_Static_assert(offsetof(struct hf3fs_iov, mount_point) == 32 && offsetof(struct hf3fs_iov, size) == 288, "iov");
_Static_assert(offsetof(struct hf3fs_iov, block_size) == 296 && offsetof(struct hf3fs_iov, numa) == 304, "iov");
_Static_assert(offsetof(struct hf3fs_ior, iorh) == 312 && offsetof(struct hf3fs_ior, mount_point) == 320, "ior");
_Static_assert(offsetof(struct hf3fs_ior, for_read) == 576 && offsetof(struct hf3fs_ior, io_depth) == 580, "ior");
_Static_assert(offsetof(struct hf3fs_ior, priority) == 584 && offsetof(struct hf3fs_ior, timeout) == 588, "ior");
_Static_assert(offsetof(struct hf3fs_ior, flags) == 592, "ior");
_Static_assert(offsetof(struct hf3fs_cqe, result) == 8 && offsetof(struct hf3fs_cqe, userdata) == 16, "cqe");
_Static_assert(sizeof(hf3fs_gpu_ipc_handle_t) == 80 && alignof(hf3fs_gpu_ipc_handle_t) == 1, "handle");

#define CHECK(what, wanted)                                                                              \
    do {                                                                                                 \
        long long have = (long long)(what), want = (long long)(wanted);                                  \
        if (have != want) {                                                                              \
            printf("%s:%d: %s is %lld and not %lld\n", __FILE__, __LINE__, #what, have, want);           \
            exit(1);                                                                                     \
        }                                                                                                \
    } while (0)

static const char *mount;

static int64_t one(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool read, size_t at, int fd, size_t off,
                   uint64_t len)
{
    struct hf3fs_cqe cqe;
    int index = hf3fs_prep_io(ior, iov, read, iov->base + at, fd, off, len, &mount);
    if (index < 0)
        return index;
    CHECK(hf3fs_submit_ios(ior), 0);
    CHECK(hf3fs_wait_for_ios(ior, &cqe, 1, 1, NULL), 1);
    CHECK(cqe.index, index);
    CHECK(cqe.userdata == &mount, 1);
    return cqe.result;
}

/* The number of buffers and rings that the mount knows. */
static int links(void)
{
    char path[300];
    int count = 0;
    snprintf(path, sizeof path, "%s/3fs-virt/iovs", mount);
    DIR *all = opendir(path);
    CHECK(all != NULL, true);
    while (readdir(all))
        count++;
    closedir(all);
    return count;
}

static void host(const char *path)
{
    struct hf3fs_iov iov, other;
    struct hf3fs_ior in, out, lost;
    char point[256];
    int fd = open(path, O_RDWR | O_CREAT, 0600), plain = open("/dev/null", O_RDWR);

    CHECK(hf3fs_is_hf3fs(fd), true);
    CHECK(hf3fs_is_hf3fs(plain), false);
    CHECK(hf3fs_is_hf3fs(-1), false);
    CHECK(hf3fs_extract_mount_point(point, sizeof point, path), strlen(mount) + 1);
    CHECK(strcmp(point, mount), 0);
    CHECK(hf3fs_extract_mount_point(point, 1, path), strlen(mount) + 1);
    CHECK(hf3fs_extract_mount_point(point, sizeof point, "/dev/null"), -1);
    CHECK(hf3fs_extract_mount_point(point, sizeof point, "/nowhere/at/all"), -1);

    char longest[400];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    CHECK(hf3fs_iovcreate(NULL, mount, 4096, 0, -1), -EINVAL);
    CHECK(hf3fs_iovcreate(&iov, NULL, 4096, 0, -1), -EINVAL);
    CHECK(hf3fs_iovcreate(&iov, longest, 4096, 0, -1), -EINVAL);
    CHECK(hf3fs_iovcreate(&iov, "/tmp", 4096, 0, -1), -ENOENT);
    CHECK(hf3fs_iovcreate(&iov, mount, 4096, 8192, -1), -EINVAL);
    CHECK(hf3fs_iovcreate(&iov, mount, 0, 0, -1), -EINVAL);
    CHECK(hf3fs_iovcreate(&iov, mount, (size_t)1 << 50, 0, -1), -EIO);
    CHECK(hf3fs_iovcreate(&iov, mount, 100000, 0, 0), 0);
    CHECK(iov.size, 100000);
    CHECK(iov.numa, 0);
    CHECK(strcmp(iov.mount_point, mount), 0);
    memset(iov.base, 7, 100000);
    CHECK(hf3fs_iovopen(&other, (const uint8_t *)iov.id, mount, 100000, 0, -1), 0);
    CHECK(other.base != iov.base && other.base[99999] == 7, 1);
    hf3fs_iovdestroy(&other);
    CHECK(hf3fs_iovopen(&other, (const uint8_t *)mount, mount, 4096, 0, -1), -ENOENT);
    CHECK(hf3fs_iovwrap(&other, iov.base, (const uint8_t *)iov.id, mount, 100000, 0, -1), 0);
    CHECK(other.iovh == NULL, 1);
    hf3fs_iovdestroy(&other);
    CHECK(hf3fs_iovwrap(&other, iov.base, (const uint8_t *)iov.id, longest, 100000, 0, -1), -EINVAL);

    CHECK(hf3fs_ior_size(64), 10384);
    CHECK(hf3fs_ior_size(1024), 102544);
    CHECK(hf3fs_iorcreate(&lost, mount, 0, true, 0, -1), -EINVAL);
    CHECK(hf3fs_iorcreate(&lost, mount, 8, true, 9, -1), -EINVAL);
    CHECK(hf3fs_iorcreate3(&lost, mount, 8, true, 0, 0, -1, -1), -EINVAL);
    CHECK(hf3fs_iorcreate(NULL, mount, 8, true, 0, -1), -EINVAL);
    CHECK(hf3fs_iorcreate(&out, mount, 8, false, 0, -1), 0);
    CHECK(hf3fs_iorcreate2(&in, mount, 8, true, 0, -1, -1), 0);
    CHECK(hf3fs_io_entries(&in), 8);
    CHECK(in.priority, -1);
    CHECK(in.for_read, true);

    CHECK(hf3fs_reg_fd(plain, 0), EBADF);
    CHECK(hf3fs_reg_fd(-1, 0), EBADF);
    CHECK(hf3fs_reg_fd(1000000, 0), EBADF);
    CHECK(one(&out, &iov, false, 0, fd, 0, 100), -EBADF);
    int copy = hf3fs_reg_fd(fd, 0);
    CHECK(copy < 0, 1);
    CHECK(hf3fs_reg_fd(fd, 0), EINVAL);

    CHECK(one(&out, &iov, false, 0, fd, 0, 100000), 100000);
    memset(iov.base, 0, 100000);
    CHECK(one(&in, &iov, true, 10, copy, 5, 90000), 90000);
    CHECK(iov.base[10] == 7 && iov.base[90009] == 7 && iov.base[9] == 0 && iov.base[90010] == 0, 1);
    struct stat st;
    CHECK(fstat(fd, &st), 0);
    CHECK(st.st_size, 100000);
    unsigned char byte = 0;
    CHECK(pread(fd, &byte, 1, 99999), 1);
    CHECK(byte, 7);

    /* The end of the file, and beyond it. */
    memset(iov.base, 9, 100000);
    CHECK(one(&in, &iov, true, 0, fd, 99990, 50), 10);
    CHECK(iov.base[9] == 7 && iov.base[10] == 0 && iov.base[49] == 0 && iov.base[50] == 9, 1);
    CHECK(one(&in, &iov, true, 0, fd, 200000, 50), 0);

    /* Invalid arguments. */
    CHECK(hf3fs_prep_io(&in, &iov, false, iov.base, fd, 0, 1, NULL), -EINVAL);
    CHECK(hf3fs_prep_io(&in, &iov, true, iov.base, fd, 0, 0, NULL), -EINVAL);
    CHECK(hf3fs_prep_io(&in, &iov, true, iov.base - 1, fd, 0, 1, NULL), -EINVAL);
    CHECK(hf3fs_prep_io(&in, &iov, true, iov.base + 99999, fd, 0, 2, NULL), -EINVAL);
    CHECK(hf3fs_prep_io(&in, &iov, true, iov.base + 1, fd, 0, UINT64_MAX, NULL), -EINVAL);
    CHECK(hf3fs_prep_io(&in, &iov, true, NULL, fd, 0, 1, NULL), -EINVAL);
    CHECK(hf3fs_prep_io(&in, NULL, true, iov.base, fd, 0, 1, NULL), -EINVAL);
    CHECK(hf3fs_prep_io(NULL, &iov, true, iov.base, fd, 0, 1, NULL), -EINVAL);
    CHECK(hf3fs_prep_io(&in, &iov, true, iov.base, INT32_MIN, 0, 1, NULL), -EINVAL);
    CHECK(hf3fs_prep_io(&in, &iov, true, iov.base, 12345, 0, 1, NULL), -EBADF);
    CHECK(one(&in, &iov, true, 0, fd, (size_t)-10, 5), -EFBIG);
    CHECK(hf3fs_submit_ios(NULL), -EINVAL);
    CHECK(hf3fs_wait_for_ios(&in, NULL, 1, 1, NULL), -EINVAL);
    struct hf3fs_cqe cqes[8];
    CHECK(hf3fs_wait_for_ios(&in, cqes, 0, 0, NULL), -EINVAL);
    CHECK(hf3fs_wait_for_ios(&in, cqes, 8, 0, NULL), 0);
    struct timespec past = {0, 0}, soon;
    CHECK(hf3fs_wait_for_ios(&in, cqes, 8, 8, &past), 0);
    clock_gettime(CLOCK_REALTIME, &soon);
    soon.tv_nsec += 3000000;
    soon.tv_sec += soon.tv_nsec / 1000000000;
    soon.tv_nsec %= 1000000000;
    CHECK(hf3fs_wait_for_ios(&in, cqes, 8, 1, &soon), 0);

    /* A full ring, and waits for more completions than there is room for. */
    for (int i = 0; i < 8; i++)
        CHECK(hf3fs_prep_io(&in, &iov, true, iov.base, fd, 0, 10, NULL) >= 0, 1);
    CHECK(hf3fs_prep_io(&in, &iov, true, iov.base, fd, 0, 10, NULL), -EAGAIN);
    CHECK(hf3fs_submit_ios(&in), 0);
    CHECK(hf3fs_wait_for_ios(&in, cqes, 3, 100, NULL), 3);
    CHECK(hf3fs_wait_for_ios(&in, cqes, 8, 5, NULL), 5);

    /* Files that are open for the other direction only. */
    int reader = open(path, O_RDONLY), writer = open(path, O_WRONLY);
    CHECK(hf3fs_reg_fd(reader, 0) < 0 && hf3fs_reg_fd(writer, 0) < 0, 1);
    CHECK(hf3fs_prep_io(&out, &iov, false, iov.base, reader, 0, 1, NULL), -EACCES);
    CHECK(hf3fs_prep_io(&in, &iov, true, iov.base, writer, 0, 1, NULL), -EACCES);
    hf3fs_dereg_fd(reader);
    hf3fs_dereg_fd(writer);
    hf3fs_dereg_fd(writer);
    CHECK(hf3fs_prep_io(&in, &iov, true, iov.base, reader, 0, 1, NULL), -EBADF);

    /* Holes read as zeros, and are an error in a ring that forbids them. */
    size_t start[] = {8192}, end[] = {16384};
    CHECK(hf3fs_punchhole(fd, 1, start, end, 0), 0);
    CHECK(hf3fs_punchhole(fd, 1001, start, end, 0), EINVAL);
    CHECK(hf3fs_punchhole(fd, 1, end, start, 0), EINVAL);
    CHECK(hf3fs_punchhole(plain, 1, start, end, 0), ENOTTY);
    memset(iov.base, 9, 100000);
    CHECK(one(&in, &iov, true, 0, fd, 0, 30000), 30000);
    CHECK(iov.base[8191] == 7 && iov.base[8192] == 0 && iov.base[16383] == 0 && iov.base[16384] == 7, 1);
    CHECK(hf3fs_iorcreate4(&lost, mount, 8, true, 0, 0, -1, HF3FS_IOR_FORBID_READ_HOLES), 0);
    CHECK(one(&lost, &iov, true, 0, fd, 0, 30000), -ENODATA);
    CHECK(one(&lost, &iov, true, 0, fd, 20000, 1000), 1000);
    hf3fs_iordestroy(&lost);
    CHECK(hf3fs_submit_ios(&lost), -EINVAL);

    /* Blocks, and batches that a timeout ends. */
    CHECK(hf3fs_iovcreate(&other, mount, 16384, 4096, -1), 0);
    CHECK(one(&in, &other, true, 4000, fd, 0, 97), -EINVAL);
    CHECK(one(&in, &other, true, 4096, fd, 0, 4096), 4096);
    CHECK(hf3fs_iorcreate3(&lost, mount, 8, true, -4, 1, 30, -1), 0);
    CHECK(one(&lost, &other, true, 0, fd, 0, 100), 100);
    hf3fs_iordestroy(&lost);
    hf3fs_iovdestroy(&other);

    char link[400];
    snprintf(link, sizeof link, "%s.link", path);
    CHECK(hf3fs_hardlink(path, link), 0);
    CHECK(hf3fs_hardlink(path, link), EEXIST);
    CHECK(hf3fs_hardlink("/nowhere", link), ENOENT);
    CHECK(stat(link, &st), 0);
    CHECK(st.st_nlink, 2);

    hf3fs_dereg_fd(copy);

    /* A descriptor that was closed without being deregistered, and is reused: reads must not return the old file's
     * bytes. */
    char next[512];
    snprintf(next, sizeof next, "%s.next", path);
    int before = open(path, O_RDONLY);
    CHECK(hf3fs_reg_fd(before, 0) < 0, 1);
    CHECK(close(before), 0);
    int after = open(next, O_RDWR | O_CREAT, 0600);
    CHECK(after, before);
    CHECK(pwrite(after, "next", 4, 0), 4);
    CHECK(hf3fs_reg_fd(after, 0) < 0, 1);
    CHECK(hf3fs_reg_fd(after, 0), EINVAL);
    CHECK(one(&in, &iov, true, 0, after, 0, 100), 4);
    CHECK(memcmp(iov.base, "next", 5), 0);
    hf3fs_dereg_fd(after);
    CHECK(close(after), 0);
    CHECK(unlink(next), 0);
    hf3fs_iovunlink(&iov);
    hf3fs_iordestroy(&in);
    hf3fs_iordestroy(&out);
    hf3fs_iovdestroy(&iov);
    hf3fs_iovdestroy(NULL);
    hf3fs_iordestroy(NULL);
    close(fd);
}

static void gpu(const char *path)
{
    struct hf3fs_iov iov, other;
    struct hf3fs_ior in, out;
    unsigned char bytes[10000];
    int fd = open(path, O_RDWR);
    CHECK(hf3fs_reg_fd(fd, 0) < 0, 1);
    CHECK(hf3fs_gdr_available(), true);
    CHECK(hf3fs_gdr_device_count(), 1);
    CHECK(hf3fs_iovcreate_gpu(&iov, mount, 10000, 0, 5), -ENODEV);
    CHECK(hf3fs_iovcreate_gpu(&iov, mount, 10000, 0, -1), -ENODEV);
    CHECK(hf3fs_iovcreate_gpu(&iov, mount, 0, 0, 0), -EINVAL);
    CHECK(hf3fs_iovcreate_device(&iov, mount, 10000, 0, 0), 0);
    CHECK(iov.numa, -0x6472);
    CHECK(hf3fs_iov_is_gpu(&iov), true);
    CHECK(hf3fs_iov_mem_type(&iov), HF3FS_MEM_DEVICE);
    CHECK(hf3fs_iov_gpu_device(&iov), 0);
    CHECK(hf3fs_iov_device_id(&iov), 0);
    CHECK(hf3fs_iovsync(&iov, 0) + hf3fs_iovsync_gpu(&iov, 1), 0);
    CHECK(hf3fs_iovsync_gpu(&iov, 2), -EINVAL);
    CHECK(hf3fs_iovsync_gpu(NULL, 0), -EINVAL);
    CHECK(hf3fs_iov_is_gpu(NULL), false);

    CHECK(hf3fs_iorcreate4(&in, mount, 8, true, 0, 0, -1, 0), 0);
    CHECK(hf3fs_iorcreate4(&out, mount, 8, false, 0, 0, -1, 0), 0);
    memset(bytes, 3, sizeof bytes);
    CHECK(onehop_iov_write(&iov, 0, bytes, sizeof bytes), 0);
    CHECK(onehop_iov_write(&iov, 1, bytes, sizeof bytes) < 0, 1);
    CHECK(ftruncate(fd, 0), 0);
    CHECK(one(&out, &iov, false, 0, fd, 0, 5000), 5000);
    /* In GPU memory: a hole with data after it, and the end of the file. */
    CHECK(ftruncate(fd, 20000), 0);
    CHECK(one(&out, &iov, false, 0, fd, 24000, 1000), 1000);
    CHECK(one(&in, &iov, true, 0, fd, 18000, 10000), 7000);
    CHECK(onehop_iov_read(&iov, 0, bytes, sizeof bytes), 0);
    for (int i = 0; i < 10000; i++)
        CHECK(bytes[i], i >= 6000 && i < 7000 ? 3 : 0);

    CHECK(hf3fs_iovopen_device(&other, (const uint8_t *)iov.id, mount, 10000, 0, 0), 0);
    CHECK(one(&in, &other, true, 0, fd, 0, 5000), 5000);
    CHECK(onehop_iov_read(&iov, 4999, bytes, 1), 0);
    CHECK(bytes[0], 3);
    hf3fs_iovdestroy(&other);
    CHECK(hf3fs_iovopen_gpu(&other, (const uint8_t *)mount, mount, 10000, 0, 0), -ENOENT);
    CHECK(hf3fs_iovwrap_gpu(&other, (void *)0x1234, (const uint8_t *)mount, mount, 10000, 0, 0), -EINVAL);
    CHECK(hf3fs_iovwrap_device(&other, iov.base, (const uint8_t *)iov.id, mount, 10000, 0, 0), -EEXIST);

    hf3fs_gpu_ipc_handle_t handle;
    CHECK(hf3fs_iov_export_gpu(&iov, NULL), -EINVAL);
    CHECK(hf3fs_iov_export_gpu(&iov, &handle), 0);
    CHECK(hf3fs_iov_import_gpu(&other, &handle, mount), 0);
    CHECK(other.size, 10000);
    hf3fs_iovdestroy_gpu(&other);
    handle.data[30] ^= 1;
    CHECK(hf3fs_iov_import_gpu(&other, &handle, mount), -ENOENT);
    handle.data[0] ^= 1;
    CHECK(hf3fs_iov_import_gpu(&other, &handle, mount), -EINVAL);

    /* An import has no blocks. Destroying it removes its link; unlinking an opened buffer removes the creator's link. */
    struct hf3fs_iov blocks, opened;
    int before = links();
    CHECK(hf3fs_iovcreate_gpu(&blocks, mount, 10000, 4096, 0), 0);
    CHECK(hf3fs_iov_export_gpu(&blocks, &handle), 0);
    CHECK(hf3fs_iov_import_gpu(&other, &handle, mount), 0);
    CHECK(one(&in, &other, true, 0, fd, 0, 5000), 5000);
    CHECK(links(), before + 2);
    hf3fs_iovdestroy_gpu(&other);
    CHECK(links(), before + 1);
    CHECK(hf3fs_iovopen_gpu(&opened, (const uint8_t *)blocks.id, mount, 10000, 4096, 0), 0);
    hf3fs_iovunlink_gpu(&opened);
    CHECK(links(), before);
    hf3fs_iovdestroy_gpu(&opened);
    hf3fs_iovdestroy_gpu(&blocks);

    /* A name that was unregistered may be reused, and then belongs to the other buffer. */
    void *of_first, *of_second;
    CHECK(onehop_emulated_alloc(&of_first, 10000), 0);
    CHECK(onehop_emulated_alloc(&of_second, 10000), 0);
    const uint8_t *id = (const uint8_t *)"a name of sixteen";
    CHECK(hf3fs_iovwrap_gpu(&opened, of_first, id, mount, 10000, 0, 0), 0);
    hf3fs_iovunlink_gpu(&opened);
    CHECK(hf3fs_iovwrap_gpu(&other, of_second, id, mount, 10000, 0, 0), 0);
    hf3fs_iovdestroy_gpu(&opened);
    CHECK(one(&in, &other, true, 0, fd, 0, 5000), 5000);
    hf3fs_iovdestroy_gpu(&other);
    CHECK(onehop_emulated_free(of_first), 0);
    CHECK(onehop_emulated_free(of_second), 0);
    CHECK(links(), before);

    /* Host memory is used only if the user allows it. */
    setenv("HF3FS_GDR_FALLBACK", "host", 1);
    CHECK(hf3fs_iovcreate_gpu(&other, mount, 10000, 0, 5), 0);
    CHECK(hf3fs_iov_is_gpu(&other), false);
    CHECK(hf3fs_iov_mem_type(&other), HF3FS_MEM_HOST);
    CHECK(hf3fs_iovsync(&other, 0), 0);
    CHECK(hf3fs_iov_export_gpu(&other, &handle), -EINVAL);
    other.base[9999] = 1;
    hf3fs_iovdestroy_gpu(&other);

    hf3fs_iovunlink_gpu(&iov);
    CHECK(one(&in, &iov, true, 0, fd, 0, 100), -ENOENT);
    hf3fs_iovdestroy_gpu(&iov);
    hf3fs_iordestroy(&in);
    hf3fs_iordestroy(&out);
    hf3fs_dereg_fd(fd);
    close(fd);
    void *at;
    CHECK(onehop_emulated_alloc(&at, 100), 0);
    CHECK(onehop_emulated_free(at), 0);
    CHECK(onehop_emulated_free(at), -EINVAL);
}

int main(int argc, char **argv)
{
    char path[300];
    if (argc != 3)
        return 2;
    mount = argv[1];
    snprintf(path, sizeof path, "%s/calls.bin", argv[2]);
    host(path);
    gpu(path);
    printf("all of them\n");
    return 0;
}
