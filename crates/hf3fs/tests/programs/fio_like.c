/*
 * The calls of fio's usrbio engine, in the same order: one buffer for all requests, a ring of fio's depth, files
 * registered when they are opened, and a loop of random blocks: fio_like MOUNT FILE ROUNDS
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hf3fs_usrbio.h"

enum { DEPTH = 32, BLOCK = 4096 };

int main(int argc, char **argv)
{
    struct hf3fs_iov iov;
    struct hf3fs_ior ior;
    if (argc != 4)
        return 2;
    int fd = open(argv[2], O_RDONLY), rounds = atoi(argv[3]);
    size_t size = (size_t)lseek(fd, 0, SEEK_END), seed = 1;
    unsigned char *wanted = malloc(size);
    if (fd < 0 || pread(fd, wanted, size, 0) != (ssize_t)size)
        return 1;

    if (hf3fs_iovcreate(&iov, argv[1], (size_t)DEPTH * BLOCK, 0, -1) < 0)
        return 1;
    if (hf3fs_iorcreate3(&ior, argv[1], DEPTH, true, 0, 0, 0, -1) < 0)
        return 1;
    if (hf3fs_reg_fd(fd, 0) > 0)
        return 1;

    size_t places[DEPTH];
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < DEPTH; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            places[i] = (seed >> 20) % (size / BLOCK) * BLOCK;
            if (hf3fs_prep_io(&ior, &iov, true, iov.base + (size_t)i * BLOCK, fd, places[i], BLOCK, &places[i]) < 0)
                return 1;
        }
        if (hf3fs_submit_ios(&ior) < 0)
            return 1;
        struct hf3fs_cqe cqes[DEPTH];
        int done = hf3fs_wait_for_ios(&ior, cqes, DEPTH, DEPTH, NULL);
        if (done != DEPTH) {
            fprintf(stderr, "%d of %d have completed\n", done, DEPTH);
            return 1;
        }
        for (int i = 0; i < DEPTH; i++) {
            size_t which = (size_t)((const size_t *)cqes[i].userdata - places);
            if (cqes[i].result != BLOCK || memcmp(iov.base + which * BLOCK, wanted + places[which], BLOCK) != 0) {
                fprintf(stderr, "block %zu of round %d: %lld\n", which, round, (long long)cqes[i].result);
                return 1;
            }
        }
    }
    hf3fs_dereg_fd(fd);
    hf3fs_iordestroy(&ior);
    hf3fs_iovdestroy(&iov);
    printf("%d blocks, all of them right\n", rounds * DEPTH);
    return 0;
}
