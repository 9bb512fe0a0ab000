/*
 * Reads a file of a 3FS mount into memory that the program has allocated on a GPU by itself, into the middle of an allocation as
 * frameworks hand it out: gpu_wrap MOUNT FILE BYTES GPU
 */
#include <errno.h>
#include <sys/random.h>

#include "compare.h"
#include "gpu_memory.h"

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "gpu_wrap MOUNT FILE BYTES GPU\n");
        return 2;
    }
    const char *mount = argv[1], *path = argv[2];
    size_t buffer_size = strtoull(argv[3], NULL, 10), inside = 512 * 3;
    int gpu_device_id = atoi(argv[4]);

    unsigned char *allocation = gpu_alloc(gpu_device_id, buffer_size + 2 * inside);
    void *gpu_ptr = allocation + inside;
    uint8_t uuid[16];
    if (getrandom(uuid, sizeof uuid, 0) != (ssize_t)sizeof uuid)
        return 1;

    struct hf3fs_iov iov;
    int ret = hf3fs_iovwrap_gpu(&iov, gpu_ptr, uuid, mount, buffer_size, 0, gpu_device_id);
    if (ret != 0) {
        fprintf(stderr, "Failed to wrap GPU memory: %d\n", ret);
        return 1;
    }
    struct hf3fs_ior ior;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || hf3fs_reg_fd(fd, 0) > 0 || hf3fs_iorcreate4(&ior, mount, 64, true, 0, 0, -1, 0) != 0) {
        fprintf(stderr, "no file or no ring\n");
        return 1;
    }

    ret = hf3fs_prep_io(&ior, &iov, true, gpu_ptr, fd, 0, buffer_size, NULL);
    if (ret < 0) {
        fprintf(stderr, "hf3fs_prep_io: %d\n", ret);
        return 1;
    }
    hf3fs_submit_ios(&ior);
    struct hf3fs_cqe cqe;
    ret = hf3fs_wait_for_ios(&ior, &cqe, 1, 1, NULL);
    if (ret != 1 || cqe.result != (int64_t)buffer_size) {
        fprintf(stderr, "%d completions; the first says %lld\n", ret, (long long)cqe.result);
        return 1;
    }
    if (compare(&iov, 0, path, 0, buffer_size) != 0)
        return 1;

    /* Memory that was freed is not taken for what has its address next. */
    gpu_free(allocation);
    void *next = gpu_alloc(gpu_device_id, buffer_size + 2 * inside);
    ret = hf3fs_prep_io(&ior, &iov, true, gpu_ptr, fd, 0, buffer_size, NULL);
    if (ret != -ESTALE) {
        fprintf(stderr, "memory that was freed was taken: %d\n", ret);
        return 1;
    }
    unsigned char byte = 0;
    if (onehop_iov_write(&iov, 0, &byte, 1) != -ESTALE || onehop_iov_read(&iov, 0, &byte, 1) != -ESTALE) {
        fprintf(stderr, "memory that was freed was written or read\n");
        return 1;
    }
    printf("%zu bytes in the middle of an allocation, all of them right; %s address after it was freed: refused\n",
           buffer_size, next == (void *)allocation ? "the same" : "its");

    hf3fs_dereg_fd(fd);
    close(fd);
    hf3fs_iovdestroy_gpu(&iov);
    hf3fs_iordestroy(&ior);
    gpu_free(next);
    return 0;
}
