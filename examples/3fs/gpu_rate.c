/*
 * How fast a file of a 3FS mount comes into GPU memory, with several large reads at once:
 * gpu_rate MOUNT FILE BYTES GPU [ROUNDS [PASSES]]
 *
 * A round reads the file so many times without a pause, once unless told otherwise. Before each round the buffer is overwritten,
 * after it every byte is compared with the file's, outside the measured time. A round with wrong bytes has no rate. Comparing reads
 * the file, so from the second round on it is in the page cache; and the daemon's threads sleep meanwhile.
 */
#include <time.h>

#include "compare.h"

enum { READ = 64 << 20, AT_ONCE = 8 };

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Overwrites the buffer, so that nothing of an earlier round passes for what a later one brought. */
static int overwrite(const struct hf3fs_iov *iov, size_t size, int round)
{
    unsigned char *other = malloc(READ);
    int code = other ? 0 : -1;
    if (other)
        memset(other, 0xa5 ^ (round & 0xff), READ);
    for (size_t at = 0; code == 0 && at < size; at += READ)
        code = onehop_iov_write(iov, at, other, size - at < READ ? size - at : READ);
    free(other);
    return code;
}

/* A part at a time: a model does not fit into host memory twice. */
static int compare_all(const struct hf3fs_iov *iov, const char *path, size_t size)
{
    int code = 0;
    for (size_t at = 0; code == 0 && at < size; at += READ)
        code = compare(iov, at, path, at, size - at < READ ? size - at : READ);
    return code;
}

/* Reads the file once; gives the seconds that took, or less than 0 when something failed. */
static double pass(struct hf3fs_ior *ior, const struct hf3fs_iov *iov, int fd, size_t size)
{
    double start = now();
    size_t next = 0, done = 0;
    int under_way = 0;
    while (done < size) {
        while (under_way < AT_ONCE && next < size) {
            size_t len = size - next < READ ? size - next : READ;
            if (hf3fs_prep_io(ior, iov, true, iov->base + next, fd, next, len, NULL) < 0)
                return -1;
            next += len;
            under_way++;
        }
        hf3fs_submit_ios(ior);
        struct hf3fs_cqe cqes[AT_ONCE];
        int ended = hf3fs_wait_for_ios(ior, cqes, AT_ONCE, 1, NULL);
        if (ended < 0) {
            fprintf(stderr, "waiting gave %d\n", ended);
            return -1;
        }
        for (int i = 0; i < ended; i++) {
            if (cqes[i].result <= 0) {
                fprintf(stderr, "a read gave %lld\n", (long long)cqes[i].result);
                return -1;
            }
            done += (size_t)cqes[i].result;
        }
        under_way -= ended;
    }
    return now() - start;
}

int main(int argc, char **argv)
{
    struct hf3fs_iov iov;
    struct hf3fs_ior ior;
    if (argc < 5) {
        fprintf(stderr, "gpu_rate MOUNT FILE BYTES GPU [ROUNDS [PASSES]]\n");
        return 2;
    }
    size_t size = strtoull(argv[3], NULL, 10);
    int fd = open(argv[2], O_RDONLY), rounds = argc > 5 ? atoi(argv[5]) : 3;
    int passes = argc > 6 ? atoi(argv[6]) : 1;
    double *took = calloc(passes > 0 ? (size_t)passes : 1, sizeof *took);
    if (hf3fs_iovcreate_gpu(&iov, argv[1], size, 0, atoi(argv[4])) != 0 ||
        hf3fs_iorcreate(&ior, argv[1], AT_ONCE, true, 0, -1) != 0 || fd < 0 || !took || hf3fs_reg_fd(fd, 0) > 0) {
        fprintf(stderr, "no buffer, no ring or no file\n");
        return 1;
    }
    int same = rounds > 0 && passes > 0 ? 0 : -1;
    for (int round = 0; round < rounds && same == 0; round++) {
        if (overwrite(&iov, size, round) != 0) {
            fprintf(stderr, "the GPU's memory cannot be written\n");
            return 1;
        }
        for (int i = 0; i < passes; i++)
            if ((took[i] = pass(&ior, &iov, fd, size)) < 0)
                return 1;
        same = compare_all(&iov, argv[2], size);
        for (int i = 0; i < passes && same == 0; i++)
            printf("round %d: %zu bytes in %.4f s, %.2f GB/s\n", round, size, took[i],
                   (double)size / took[i] / 1e9);
    }
    printf("%s\n", same == 0 ? "every byte of every round is right" : "WRONG BYTES");
    free(took);
    hf3fs_dereg_fd(fd);
    hf3fs_iordestroy(&ior);
    hf3fs_iovdestroy_gpu(&iov);
    return same == 0 ? 0 : 1;
}
