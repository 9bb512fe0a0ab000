/*
 * One process allocates GPU memory, another reads a file of a 3FS mount into it: gpu_share MOUNT FILE BYTES GPU
 * The importing process is made before either has used a GPU: CUDA does not survive a fork.
 */
#include <sys/wait.h>

#include "compare.h"

static void get(int from, void *to, size_t bytes)
{
    if (read(from, to, bytes) != (ssize_t)bytes) {
        fprintf(stderr, "the other process is gone\n");
        exit(1);
    }
}

static void put(int to, const void *from, size_t bytes)
{
    if (write(to, from, bytes) != (ssize_t)bytes)
        exit(1);
}

/* Receives the handle, reads the file into the memory behind it. */
static int importing(const char *mount, const char *path, size_t bytes, int from, int to)
{
    hf3fs_gpu_ipc_handle_t handle;
    get(from, &handle, sizeof handle);

    struct hf3fs_iov iov;
    int ret = hf3fs_iov_import_gpu(&iov, &handle, mount);
    if (ret != 0) {
        fprintf(stderr, "hf3fs_iov_import_gpu: %d\n", ret);
        return 1;
    }
    struct hf3fs_ior ior;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || hf3fs_reg_fd(fd, 0) > 0 || hf3fs_iorcreate4(&ior, mount, 64, true, 0, 0, -1, 0) != 0)
        return 1;
    struct hf3fs_cqe cqe;
    if (hf3fs_prep_io(&ior, &iov, true, iov.base, fd, 0, bytes, NULL) < 0 || hf3fs_submit_ios(&ior) != 0 ||
        hf3fs_wait_for_ios(&ior, &cqe, 1, 1, NULL) != 1)
        return 1;
    put(to, &cqe.result, sizeof cqe.result);
    hf3fs_dereg_fd(fd);
    close(fd);
    hf3fs_iovdestroy_gpu(&iov);
    hf3fs_iordestroy(&ior);
    return cqe.result == (int64_t)bytes ? 0 : 1;
}

int main(int argc, char **argv)
{
    int there[2], back[2], status;
    if (argc != 5 || pipe(there) != 0 || pipe(back) != 0) {
        fprintf(stderr, "gpu_share MOUNT FILE BYTES GPU\n");
        return 2;
    }
    size_t size = strtoull(argv[3], NULL, 10);
    pid_t child = fork();
    if (child == 0) {
        close(there[1]);
        return importing(argv[1], argv[2], size, there[0], back[1]);
    }
    close(back[1]);

    struct hf3fs_iov iov;
    int ret = hf3fs_iovcreate_gpu(&iov, argv[1], size, 0, atoi(argv[4]));
    if (ret != 0) {
        fprintf(stderr, "hf3fs_iovcreate_gpu: %d\n", ret);
        return 1;
    }
    hf3fs_gpu_ipc_handle_t handle;
    ret = hf3fs_iov_export_gpu(&iov, &handle);
    if (ret != 0) {
        fprintf(stderr, "hf3fs_iov_export_gpu: %d\n", ret);
        return 1;
    }
    put(there[1], &handle, sizeof handle);

    int64_t result;
    get(back[0], &result, sizeof result);
    ret = compare(&iov, 0, argv[2], 0, size);
    if (waitpid(child, &status, 0) != child || status != 0 || result != (int64_t)size)
        ret = 1;
    if (ret == 0)
        printf("%zu bytes that another process read into GPU memory of this one, all of them right\n", size);
    hf3fs_iovdestroy_gpu(&iov);
    return ret == 0 ? 0 : 1;
}
