/* Pages of a file in memory of this process, which stands for the emulated GPU's: pages FILE IS-IN-MEMORY. */
#include <onehop/onehop.h>

#include "expect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The library's layouts. */
typedef char memories_are_16_bytes[sizeof(struct onehop_memory) == 16 ? 1 : -1];
typedef char pages_are_32_bytes[sizeof(struct onehop_page) == 32 ? 1 : -1];
typedef char memory_is_at_24[offsetof(struct onehop_page, memory) == 24 ? 1 : -1];

enum { SIZE = 1 << 20, PAGE = 4096 };

static unsigned char whole[SIZE], found[SIZE], other[3 * PAGE];

static void contents(const char *path)
{
    FILE *file = fopen(path, "rb");
    IS(file && fread(found, 1, SIZE, file) == SIZE);
    fclose(file);
}

int main(int argc, char **argv)
{
    struct onehop_memory memories[2];
    struct onehop_page list[SIZE / PAGE], bad;
    onehop_gpu *gpu;
    onehop_pages *pages, *reader;
    uint64_t bytes = 0, registered = 0, staged = 0;
    size_t i, failed = 99;
    int is_in_memory = argc > 2 && argv[2][0] == '1';

    IS(argc > 2);
    contents(argv[1]);
    WORKS(onehop_gpu_open("emu", &gpu));
    FAILS(onehop_pages_open("/nowhere", gpu, 1, UINT64_MAX, &pages), ONEHOP_ERROR_FILE, "/nowhere");
    IS(pages == NULL);
    FAILS(onehop_pages_open(argv[1], NULL, 1, UINT64_MAX, &pages), ONEHOP_ERROR_ARGUMENT, "gpu");
    FAILS(onehop_pages_open(NULL, gpu, 1, UINT64_MAX, &pages), ONEHOP_ERROR_ARGUMENT, "path");
    FAILS(onehop_pages_open(argv[1], gpu, 1, UINT64_MAX, NULL), ONEHOP_ERROR_ARGUMENT, "pages");

    WORKS(onehop_pages_open(argv[1], gpu, 1, UINT64_MAX, &pages));
    WORKS(onehop_pages_register(pages, &bytes));
    IS(bytes == (is_in_memory ? SIZE : 0));
    WORKS(onehop_pages_register(pages, NULL));

    memories[0].start = whole;
    memories[0].bytes = SIZE;
    memories[1].start = other;
    memories[1].bytes = sizeof other;
    for (i = 0; i < SIZE / PAGE; i++) {
        list[i].offset = i * 37 % (SIZE / PAGE) * PAGE;
        list[i].at = list[i].offset;
        list[i].bytes = PAGE;
        list[i].memory = 0;
    }
    WORKS(onehop_pages_read(pages, memories, 1, list, SIZE / PAGE, NULL));
    IS(memcmp(whole, found, SIZE) == 0);

    /* Two of them, from the other memory, at odd places. */
    memset(other, 0x5a, sizeof other);
    list[0].offset = 77;
    list[0].at = 5;
    list[0].memory = 1;
    list[1].offset = 500000;
    list[1].at = 2 * PAGE;
    list[1].memory = 1;
    WORKS(onehop_pages_write(pages, memories, 2, list, 2, &failed));
    IS(failed == 99);
    memset(whole + 77, 0x5a, PAGE);
    memset(whole + 500000, 0x5a, PAGE);
    WORKS(onehop_pages_sync(pages));
    WORKS(onehop_pages_moved(pages, &registered, &staged));
    IS(registered == (is_in_memory ? SIZE + 2 * PAGE : 0) && registered + staged == SIZE + 2 * PAGE);
    WORKS(onehop_pages_moved(pages, NULL, NULL));

    bad = list[1];
    list[1].offset = SIZE - PAGE + 1;
    FAILS(onehop_pages_read(pages, memories, 2, list, 2, &failed), ONEHOP_ERROR_ARGUMENT, "page 1");
    IS(failed == 1);
    list[1] = bad;
    list[1].memory = 2;
    FAILS(onehop_pages_read(pages, memories, 2, list, 2, NULL), ONEHOP_ERROR_ARGUMENT, "no memory 2");
    FAILS(onehop_pages_read(pages, NULL, 2, list, 2, NULL), ONEHOP_ERROR_ARGUMENT, "memories");
    FAILS(onehop_pages_read(pages, memories, 2, NULL, 2, NULL), ONEHOP_ERROR_ARGUMENT, "list");
    FAILS(onehop_pages_read(pages, memories, 2, list, SIZE_MAX, NULL), ONEHOP_ERROR_ARGUMENT, "list");
    WORKS(onehop_pages_read(pages, NULL, 0, NULL, 0, NULL));
    memories[0].start = NULL;
    FAILS(onehop_pages_read(pages, memories, 2, list, 0, NULL), ONEHOP_ERROR_ARGUMENT, "memories");
    onehop_pages_close(pages);
    FAILS(onehop_pages_sync(pages), ONEHOP_ERROR_ARGUMENT, "not an open handle");

    contents(argv[1]);
    IS(memcmp(whole, found, SIZE) == 0);
    WORKS(onehop_pages_open(argv[1], gpu, 0, 0, &reader));
    FAILS(onehop_pages_write(reader, memories + 1, 1, NULL, 0, NULL), ONEHOP_ERROR_ARGUMENT, "reading only");
    onehop_gpu_close(gpu);
    memories[0].start = whole;
    memset(whole, 0, SIZE);
    list[0].memory = list[0].at = list[0].offset = 0;
    list[0].bytes = SIZE;
    WORKS(onehop_pages_read(reader, memories, 1, list, 1, NULL));
    IS(memcmp(whole, found, SIZE) == 0);
    onehop_pages_close(reader);
    printf("all of it\n");
    return 0;
}
