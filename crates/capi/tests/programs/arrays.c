/* Arrays in C on the emulated GPU: rows written and read through a cache that is smaller than they are. */
#include <onehop/onehop.h>

#include "expect.h"

#include <stdlib.h>
#include <string.h>

/* The library's layouts. */
typedef char options_are_80_bytes[sizeof(struct onehop_array_options) == 80 ? 1 : -1];
typedef char info_is_32_bytes[sizeof(struct onehop_array_info) == 32 ? 1 : -1];

/* 264 bytes: many rows are in two pages. */
enum { ROWS = 2000, ROW = 264 };

static unsigned char from[ROWS * ROW], to[ROWS * ROW];
static uint64_t ids[ROWS], reversed[ROWS];

int main(void)
{
    struct onehop_array_options options = {0};
    struct onehop_array_info info;
    onehop_open_array *array, *other;
    onehop_drive *drive;
    onehop_gpu *gpu;
    uint64_t bad[3] = {0, 1, 0};
    size_t i, failed = 99;

    for (i = 0; i < ROWS; i++)
        reversed[ROWS - 1 - i] = ids[i] = i * 117 % 9973 * 4;
    for (i = 0; i < sizeof(from); i++)
        from[i] = (unsigned char)(i * 2654435761u >> 13);

    WORKS(onehop_gpu_open("emu", &gpu));
    WORKS(onehop_drive_open("sim:mem:64M", 1, &drive));
    FAILS(onehop_array_open(drive, gpu, NULL, &array), ONEHOP_ERROR_ARGUMENT, "options");
    FAILS(onehop_array_open(drive, gpu, &options, &array), ONEHOP_ERROR_ARGUMENT, "size");
    options.size = sizeof(options);
    FAILS(onehop_array_open(drive, gpu, &options, &array), ONEHOP_ERROR_ARGUMENT, "cache of 0 bytes");
    options.cache_bytes = 64 << 12;
    options.page_bytes = 3000;
    FAILS(onehop_array_open(drive, gpu, &options, &array), ONEHOP_ERROR_ARGUMENT, "3000");
    options.page_bytes = 0;
    options.first_block = UINT64_MAX;
    options.blocks = 2;
    FAILS(onehop_array_open(drive, gpu, &options, &array), ONEHOP_ERROR_ARGUMENT, "blocks");
    IS(array == NULL);
    options.first_block = 16;
    options.blocks = 0;
    options.writable = 1;
    WORKS(onehop_array_open(drive, gpu, &options, &array));
    /* Not null, and no address of this process. */
    IS(onehop_array_handle(array) != NULL);
    WORKS(onehop_array_describe(array, &info));
    IS(info.bytes == (64 << 20) - 16 * 512 && info.cached_pages == 64 && info.page_bytes == 4096 && info.reads == 0);

    WORKS(onehop_array_scatter(array, ROW, 0, ids, ROWS, from, &failed));
    WORKS(onehop_array_gather(array, ROW, 0, ids, ROWS, to, &failed));
    IS(failed == 99 && !memcmp(from, to, sizeof(from)));
    WORKS(onehop_array_flush(array));
    WORKS(onehop_array_describe(array, &info));
    IS(info.reads > 64 && info.writes > 64 && info.failed_reads == 0 && info.failed_writes == 0);

    bad[2] = info.bytes / ROW;
    FAILS(onehop_array_gather(array, ROW, 0, bad, 3, to, &failed), ONEHOP_ERROR_ARGUMENT, "number 2 of the list");
    IS(failed == 2);
    FAILS(onehop_array_gather(array, 0, 0, ids, 1, to, NULL), ONEHOP_ERROR_ARGUMENT, "multiples of 4");
    FAILS(onehop_array_gather(array, 6, 0, ids, 1, to, NULL), ONEHOP_ERROR_ARGUMENT, "multiples of 4");
    FAILS(onehop_array_gather(array, ROW, 0, NULL, 1, to, NULL), ONEHOP_ERROR_ARGUMENT, "ids");
    FAILS(onehop_array_gather(array, ROW, 0, ids, 1, NULL, NULL), ONEHOP_ERROR_ARGUMENT, "to");
    WORKS(onehop_array_gather(array, ROW, 0, NULL, 0, NULL, NULL));
    WORKS(onehop_array_check(array));
    WORKS(onehop_array_close(array));
    FAILS(onehop_array_close(array), ONEHOP_ERROR_ARGUMENT, "array");
    IS(onehop_array_handle(array) == NULL);
    WORKS(onehop_array_close(NULL));

    /* What was written is on the drive, whatever the cache was. */
    options.writable = 0;
    options.page_bytes = 512;
    WORKS(onehop_array_open(drive, gpu, &options, &other));
    memset(to, 0, sizeof(to));
    WORKS(onehop_array_gather(other, ROW, 0, reversed, ROWS, to, NULL));
    for (i = 0; i < ROWS; i++)
        IS(!memcmp(to + i * ROW, from + (ROWS - 1 - i) * ROW, ROW));
    FAILS(onehop_array_scatter(other, ROW, 0, ids, 1, from, &failed), ONEHOP_ERROR_ARGUMENT, "reading only");
    IS(failed == 0);
    WORKS(onehop_array_stop(other));
    /* The array keeps the drive and the GPU open. */
    onehop_drive_close(drive);
    onehop_gpu_close(gpu);
    WORKS(onehop_array_close(other));
    puts("all of it");
    return 0;
}
