/* For the examples: whether a buffer in GPU memory holds what a file does, as read the ordinary way. */
#pragma once

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hf3fs_usrbio_gdr.h"

/* Reads bytes of a file by the page cache. */
static unsigned char *file_bytes(const char *path, size_t offset, size_t bytes)
{
    unsigned char *all = malloc(bytes);
    int fd = open(path, O_RDONLY);
    size_t done = 0;
    while (fd >= 0 && all && done < bytes) {
        ssize_t got = pread(fd, all + done, bytes - done, (off_t)(offset + done));
        if (got <= 0)
            break;
        done += (size_t)got;
    }
    if (done != bytes) {
        perror(path);
        exit(1);
    }
    close(fd);
    return all;
}

/* 0 when the buffer's bytes from `at` on are those of the file from `offset` on. */
static int compare(const struct hf3fs_iov *iov, size_t at, const char *path, size_t offset, size_t bytes)
{
    unsigned char *wanted = file_bytes(path, offset, bytes), *have = malloc(bytes);
    int code = have ? onehop_iov_read(iov, at, have, bytes) : -1;
    if (code == 0 && memcmp(wanted, have, bytes) != 0)
        code = 1;
    if (code != 0)
        fprintf(stderr, "%s: the GPU's memory holds other bytes (%d)\n", path, code);
    free(wanted);
    free(have);
    return code;
}
