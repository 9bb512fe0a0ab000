/* Creates a buffer in host memory, one in GPU memory and a ring, prints that, and reads: stay MOUNT FILE [SECONDS] */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "hf3fs_usrbio_gdr.h"

int main(int argc, char **argv)
{
    struct hf3fs_iov host, gpu;
    struct hf3fs_ior ior;
    if (argc < 3 || argc > 4)
        return 2;
    int timeout = argc > 3 ? atoi(argv[3]) : 2;
    int fd = open(argv[2], O_RDONLY);
    if (hf3fs_iovcreate(&host, argv[1], 1 << 20, 0, -1) != 0 || hf3fs_iovcreate_gpu(&gpu, argv[1], 1 << 20, 0, 0) != 0 ||
        hf3fs_iorcreate(&ior, argv[1], 16, true, 0, -1) != 0 || hf3fs_reg_fd(fd, 0) > 0)
        return 1;
    printf("there\n");
    fflush(stdout);
    /* Reads until the daemon does not answer for that long; then prints so and ends. */
    for (;;) {
        struct hf3fs_cqe cqe;
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += timeout;
        if (hf3fs_prep_io(&ior, &gpu, true, gpu.base, fd, 0, 1 << 20, NULL) < 0 || hf3fs_submit_ios(&ior) != 0)
            return 1;
        int done = hf3fs_wait_for_ios(&ior, &cqe, 1, 1, &until);
        if (done == 0 || done == -ENOTCONN) {
            printf("no answer\n");
            hf3fs_iordestroy(&ior);
            hf3fs_iovdestroy(&gpu);
            hf3fs_iovdestroy(&host);
            return 0;
        }
        if (done != 1 || cqe.result != 1 << 20)
            return 1;
    }
}
