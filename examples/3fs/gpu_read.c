/* Reads a file of a 3FS mount into GPU memory that the library allocates: gpu_read MOUNT FILE BYTES GPU */
#include <errno.h>

#include "compare.h"

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "gpu_read MOUNT FILE BYTES GPU\n");
        return 2;
    }
    const char *mount = argv[1], *path = argv[2];
    size_t buffer_size = strtoull(argv[3], NULL, 10);
    int gpu_device_id = atoi(argv[4]);

    struct hf3fs_iov iov;
    int ret = hf3fs_iovcreate_gpu(&iov, mount, buffer_size, 0, gpu_device_id);
    if (ret != 0) {
        fprintf(stderr, "Failed to create GPU iov: %d\n", ret);
        return ret == -ENODEV || ret == -ENOTSUP ? 3 : 1;
    }
    if (!hf3fs_iov_is_gpu(&iov) || hf3fs_iov_gpu_device(&iov) != gpu_device_id) {
        fprintf(stderr, "this is not the GPU that was asked for\n");
        return 1;
    }

    struct hf3fs_ior ior;
    ret = hf3fs_iorcreate4(&ior, mount, 64, true, 0, 0, -1, 0);
    if (ret != 0) {
        fprintf(stderr, "Failed to create a ring: %d\n", ret);
        return 1;
    }

    int fd = open(path, O_RDONLY);
    ret = fd < 0 ? errno : hf3fs_reg_fd(fd, 0);
    if (ret > 0) {
        fprintf(stderr, "%s cannot be registered: %s\n", path, strerror(ret));
        return 1;
    }

    ret = hf3fs_prep_io(&ior, &iov, true, iov.base, fd, 0, buffer_size, NULL);
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
    hf3fs_iovsync_gpu(&iov, 1);
    ret = compare(&iov, 0, path, 0, buffer_size);
    printf("%zu bytes in GPU memory%s\n", buffer_size, ret == 0 ? ", all of them right" : "");

    hf3fs_dereg_fd(fd);
    close(fd);
    hf3fs_iovdestroy_gpu(&iov);
    hf3fs_iordestroy(&ior);
    return ret == 0 ? 0 : 1;
}
