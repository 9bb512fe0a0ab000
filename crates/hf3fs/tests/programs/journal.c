/*
 * Writes records in sequence, eight at a time, and prints the acknowledged ones, until an error. Prints the error and
 * ends: journal MOUNT FILE FIRST ring|calls. Sets no timeout of its own.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hf3fs_usrbio.h"

enum { AT_ONCE = 8, RECORD = 5000 };

static void fill(unsigned char *record, unsigned number)
{
    for (int i = 0; i < RECORD; i++)
        record[i] = (unsigned char)(number * 31 + (unsigned)i * 7);
}

/* Writes a whole record. Returns a negative error number on failure. */
static int write_all(int fd, const unsigned char *record, size_t at)
{
    for (size_t done = 0; done < RECORD;) {
        ssize_t count = pwrite(fd, record + done, RECORD - done, (off_t)(at + done));
        if (count < 0)
            return -errno;
        done += (size_t)count;
    }
    return 0;
}

static int ended(long long error)
{
    printf("ended by %lld\n", error);
    return 0;
}

int main(int argc, char **argv)
{
    struct hf3fs_iov iov;
    struct hf3fs_ior ior;
    if (argc != 5)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    int by_ring = strcmp(argv[4], "ring") == 0, fd = open(argv[2], O_RDWR | O_CREAT, 0600);
    if (fd < 0)
        return 1;
    if (by_ring && (hf3fs_iovcreate(&iov, argv[1], AT_ONCE * RECORD, 0, -1) != 0 ||
                    hf3fs_iorcreate(&ior, argv[1], AT_ONCE, false, 0, -1) != 0 || hf3fs_reg_fd(fd, 0) > 0))
        return 1;
    unsigned char *bytes = by_ring ? iov.base : malloc(AT_ONCE * RECORD);
    for (unsigned number = (unsigned)atoi(argv[3]);; number += AT_ONCE) {
        for (unsigned i = 0; i < AT_ONCE; i++) {
            unsigned char *record = bytes + i * RECORD;
            size_t at = (size_t)(number + i) * RECORD;
            fill(record, number + i);
            if (!by_ring) {
                int failed = write_all(fd, record, at);
                if (failed != 0)
                    return ended(failed);
                printf("%u\n", number + i);
            } else if (hf3fs_prep_io(&ior, &iov, false, record, fd, at, RECORD, (void *)(size_t)(number + i)) < 0) {
                return 1;
            }
        }
        int error = by_ring ? hf3fs_submit_ios(&ior) : 0;
        for (int left = by_ring ? AT_ONCE : 0; error == 0 && left > 0;) {
            struct hf3fs_cqe cqes[AT_ONCE];
            int count = hf3fs_wait_for_ios(&ior, cqes, AT_ONCE, 1, NULL);
            for (int i = 0; i < count; i++) {
                if (cqes[i].result == RECORD)
                    printf("%u\n", (unsigned)(size_t)cqes[i].userdata);
                else
                    error = (int)cqes[i].result;
            }
            if (count < 0)
                error = count;
            left -= count;
        }
        if (error != 0) {
            /* Unlinks the files in /dev/shm, because the daemon that would do it is gone. */
            if (by_ring) {
                hf3fs_iordestroy(&ior);
                hf3fs_iovdestroy(&iov);
            }
            return ended(error);
        }
    }
}
