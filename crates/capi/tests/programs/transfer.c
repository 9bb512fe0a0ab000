/* Files and blocks of a drive in GPU memory by every route: transfer DRIVE PATH WANTED-FILE WANTED-BLOCKS. */
#include <onehop/onehop.h>

#include "expect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The library's layouts. */
typedef char options_are_88_bytes[sizeof(struct onehop_transfer_options) == 88 ? 1 : -1];
typedef char partition_is_at_36[offsetof(struct onehop_transfer_options, partition) == 36 ? 1 : -1];
typedef char progress_is_at_40[offsetof(struct onehop_transfer_options, progress) == 40 ? 1 : -1];
typedef char outcomes_are_2160_bytes[sizeof(struct onehop_outcome) == 2160 ? 1 : -1];
typedef char seconds_are_at_40[offsetof(struct onehop_outcome, seconds) == 40 ? 1 : -1];
typedef char verified_is_at_72[offsetof(struct onehop_outcome, verified) == 72 ? 1 : -1];
typedef char why_is_at_80[offsetof(struct onehop_outcome, why_not_better) == 80 ? 1 : -1];

static const char *const ROUTES[] = {"gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct", "cpu/pinned", "auto"};

static unsigned char *contents(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    unsigned char *all;
    long size;
    IS(file && fseek(file, 0, SEEK_END) == 0 && (size = ftell(file)) > 0);
    rewind(file);
    all = malloc((size_t)size);
    IS(all && fread(all, 1, (size_t)size, file) == (size_t)size);
    fclose(file);
    *bytes = (size_t)size;
    return all;
}

static void same(const onehop_bytes *loaded, const unsigned char *want, size_t bytes)
{
    unsigned char *got = malloc(bytes);
    IS(got && onehop_bytes_size(loaded) == bytes && onehop_bytes_data(loaded) != NULL);
    WORKS(onehop_bytes_read(loaded, 0, got, bytes));
    IS(memcmp(got, want, bytes) == 0);
    free(got);
}

static int count(void *context, uint64_t bytes)
{
    *(uint64_t *)context += bytes;
    return 0;
}

static int stop(void *context, uint64_t bytes)
{
    (void)bytes;
    return *(uint64_t *)context += 1;
}

int main(int argc, char **argv)
{
    struct onehop_transfer_options options;
    struct onehop_outcome outcome;
    onehop_drive *drive;
    onehop_gpu *gpu;
    onehop_bytes *loaded = (onehop_bytes *)1;
    size_t file_bytes, block_bytes, i;
    unsigned char *file, *blocks, byte;
    uint64_t moved = 0, stops = 0;
    char warnings[64];

    IS(argc == 5);
    file = contents(argv[3], &file_bytes);
    blocks = contents(argv[4], &block_bytes);
    WORKS(onehop_drive_open(argv[1], 0, &drive));
    WORKS(onehop_gpu_open("emu", &gpu));
    WORKS(onehop_drive_warnings(drive, warnings, sizeof warnings));
    IS(warnings[0] == 0);
    FAILS(onehop_drive_warnings(drive, NULL, 1), ONEHOP_ERROR_ARGUMENT, "`to`");
    FAILS(onehop_drive_warnings(drive, warnings, 0), ONEHOP_ERROR_ARGUMENT, "`room`");

    memset(&options, 0, sizeof options);
    memset(&outcome, 0x5a, sizeof outcome);
    options.size = sizeof options;
    outcome.size = sizeof outcome;
    options.verify = 1;
    options.progress = count;
    options.context = &moved;
    for (i = 0; i < sizeof ROUTES / sizeof *ROUTES; i++) {
        const char *route = strcmp(ROUTES[i], "auto") == 0 ? "gpu/tier3" : ROUTES[i];
        options.route = ROUTES[i];
        moved = 0;
        WORKS(onehop_load_file(drive, gpu, argv[2], 0, 0, &options, &loaded, &outcome));
        same(loaded, file, file_bytes);
        IS(strcmp(outcome.route, route) == 0 && strncmp(outcome.initiator, route, 3) == 0);
        IS(outcome.simulated == (ONEHOP_SIMULATED_DRIVE | ONEHOP_SIMULATED_GPU) && outcome.verified == 1);
        IS(outcome.bytes == file_bytes && outcome.read_bytes >= file_bytes && outcome.commands > 0);
        IS(outcome.size == sizeof outcome && outcome.seconds > 0 && outcome.retries == 0 && moved == outcome.read_bytes);
        /* This name covers two placements, and the better one needs a controller memory buffer. */
        IS(strlen(outcome.why_not_better) == outcome.why_not_better_bytes && outcome.reserved[3] == 0);
        IS((outcome.why_not_better_bytes > 0) == (strcmp(route, "gpu/posted") == 0));
        IS(outcome.why_not_better_bytes == 0 || strstr(outcome.why_not_better, "gpu/posted: cq cannot lie in cmb") ||
           strstr(outcome.why_not_better, "gpu/posted: sq cannot lie in cmb"));
        onehop_bytes_close(loaded);
        /* Starts and ends within blocks. */
        WORKS(onehop_load_file(drive, gpu, argv[2], 1001, 5003, &options, &loaded, &outcome));
        same(loaded, file + 1001, 5003);
        IS(outcome.bytes == 5003 && outcome.read_bytes > 5003);
        onehop_bytes_close(loaded);
        WORKS(onehop_load_blocks(drive, gpu, 2, block_bytes / 512, &options, &loaded, &outcome));
        same(loaded, blocks, block_bytes);
        IS(strcmp(outcome.route, route) == 0 && outcome.bytes == block_bytes && outcome.verified == 1);
        onehop_bytes_close(loaded);
    }
    options.route = NULL;
    options.threads = 8;
    WORKS(onehop_load_file(drive, gpu, argv[2], 0, 0, &options, &loaded, NULL));
    same(loaded, file, file_bytes);
    options.threads = 0;

    FAILS(onehop_bytes_read(loaded, file_bytes, &byte, 1), ONEHOP_ERROR_GPU, "");
    FAILS(onehop_bytes_read(loaded, UINT64_MAX, &byte, 1), ONEHOP_ERROR_GPU, "");
    FAILS(onehop_bytes_read(loaded, 0, NULL, 1), ONEHOP_ERROR_ARGUMENT, "`to`");
    onehop_bytes_close(loaded);
    FAILS(onehop_bytes_read(loaded, 0, &byte, 1), ONEHOP_ERROR_ARGUMENT, "not an open handle");
    IS(onehop_bytes_data(loaded) == NULL && onehop_bytes_size(loaded) == 0);
    onehop_bytes_close(NULL);

    FAILS(onehop_load_file(NULL, gpu, argv[2], 0, 0, NULL, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "`drive`");
    IS(loaded == NULL);
    FAILS(onehop_load_file(drive, NULL, argv[2], 0, 0, NULL, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "`gpu`");
    FAILS(onehop_load_file((onehop_drive *)gpu, gpu, argv[2], 0, 0, NULL, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "not an open handle");
    FAILS(onehop_load_file(drive, gpu, NULL, 0, 0, NULL, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "`path`");
    FAILS(onehop_load_file(drive, gpu, argv[2], 0, 0, NULL, NULL, NULL), ONEHOP_ERROR_ARGUMENT, "`bytes`");
    FAILS(onehop_load_file(drive, gpu, "/missing", 0, 0, NULL, &loaded, NULL), ONEHOP_ERROR_FILE, "missing");
    FAILS(onehop_load_file(drive, gpu, "/", 0, 0, NULL, &loaded, NULL), ONEHOP_ERROR_FILE, "directory");
    FAILS(onehop_load_file(drive, gpu, argv[2], file_bytes + 1, 0, NULL, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "offset");
    FAILS(onehop_load_blocks(drive, gpu, 0, 0, NULL, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "`blocks`");
    FAILS(onehop_load_blocks(drive, gpu, UINT64_MAX, 2, NULL, &loaded, NULL), ONEHOP_ERROR_DRIVE, "namespace 1");
    options.nsid = 2;
    FAILS(onehop_load_blocks(drive, gpu, 0, 1, &options, &loaded, NULL), ONEHOP_ERROR_DRIVE, "namespace 2");
    options.nsid = 0;
    options.partition = 9;
    FAILS(onehop_load_file(drive, gpu, argv[2], 0, 0, &options, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "partition");
    options.partition = -2;
    FAILS(onehop_load_file(drive, gpu, argv[2], 0, 0, &options, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "partition -2");
    options.partition = -1;
    WORKS(onehop_load_file(drive, gpu, argv[2], 0, 1, &options, &loaded, NULL));
    same(loaded, file, 1);
    onehop_bytes_close(loaded);
    options.route = "by air";
    FAILS(onehop_load_blocks(drive, gpu, 0, 1, &options, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "gpu/tier3");
    options.route = "cufile";
    FAILS(onehop_load_blocks(drive, gpu, 0, 1, &options, &loaded, NULL), ONEHOP_ERROR_NOT_POSSIBLE, "cuFile");
    options.route = "cpu/pinned";
    options.queues = 3;
    FAILS(onehop_load_blocks(drive, gpu, 0, 1, &options, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "gpu/ routes");
    options.queues = 1025;
    FAILS(onehop_load_blocks(drive, gpu, 0, 1, &options, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "`queues`");
    options.queues = 0;
    options.size = 8;
    FAILS(onehop_load_blocks(drive, gpu, 0, 1, &options, &loaded, NULL), ONEHOP_ERROR_ARGUMENT, "`size`");
    options.size = sizeof options;
    outcome.size = 80;
    FAILS(onehop_load_blocks(drive, gpu, 0, 1, &options, &loaded, &outcome), ONEHOP_ERROR_ARGUMENT, "`size`");
    outcome.size = sizeof outcome;
    options.progress = stop;
    options.context = &stops;
    for (i = 0; i < sizeof ROUTES / sizeof *ROUTES; i++) {
        options.route = ROUTES[i];
        FAILS(onehop_load_file(drive, gpu, argv[2], 0, 0, &options, &loaded, &outcome), ONEHOP_ERROR_CANCELLED, "cancelled");
        IS(loaded == NULL && stops > i);
    }
    onehop_drive_close(drive);
    onehop_gpu_close(gpu);
    free(file);
    free(blocks);
    puts("all of it");
    return 0;
}
