/* Every function of onehop.h in C99, on a simulated drive and the emulated GPU: success and refusals. */
#include <onehop/onehop.h>

#include "expect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The library's sizes. */
typedef char options_are_32_bytes[sizeof(struct onehop_lend_options) == 32 ? 1 : -1];
typedef char infos_are_24_bytes[sizeof(struct onehop_lent_info) == 24 ? 1 : -1];
typedef char commands_are_64_bytes[sizeof(onehop_command) == 64 ? 1 : -1];

int main(void)
{
    struct onehop_lend_options options;
    struct onehop_lent_info info;
    onehop_drive *drive = (onehop_drive *)1, *reader;
    onehop_gpu *gpu;
    onehop_lent *lent = NULL;
    unsigned char bytes[1024], back[1024];
    int answer = 99;

    memset(&options, 0, sizeof options);
    FAILS(onehop_drive_open(NULL, 0, &drive), ONEHOP_ERROR_ARGUMENT, "`name`");
    IS(drive == NULL);
    FAILS(onehop_drive_open("sim:mem:1M", 0, NULL), ONEHOP_ERROR_ARGUMENT, "`drive`");
    FAILS(onehop_drive_open("\xff", 0, &drive), ONEHOP_ERROR_ARGUMENT, "UTF-8");
    FAILS(onehop_drive_open("nothing", 0, &drive), ONEHOP_ERROR_ARGUMENT, "'nothing' is not a drive");
    FAILS(onehop_drive_open("sim:mem:1M?mdts=x", 0, &drive), ONEHOP_ERROR_DRIVE, "mdts");
    FAILS(onehop_drive_open("qtest:nowhere", 0, &drive), ONEHOP_ERROR_DRIVE, "nowhere");
    FAILS(onehop_gpu_open("no such", &gpu), ONEHOP_ERROR_GPU, "");
    IS(gpu == NULL);
    WORKS(onehop_drive_open("sim:mem:1M", 1, &drive));
    WORKS(onehop_drive_open("sim:mem:1M", 0, &reader));
    WORKS(onehop_gpu_open("emu", &gpu));

    FAILS(onehop_lend(drive, gpu, &options, &lent), ONEHOP_ERROR_ARGUMENT, "no bytes");
    FAILS(onehop_lend(drive, gpu, NULL, &lent), ONEHOP_ERROR_ARGUMENT, "no bytes");
    options.data_bytes = 65536;
    FAILS(onehop_lend(NULL, gpu, &options, &lent), ONEHOP_ERROR_ARGUMENT, "`drive`");
    FAILS(onehop_lend(drive, NULL, &options, &lent), ONEHOP_ERROR_ARGUMENT, "`gpu`");
    options.placement = 77;
    FAILS(onehop_lend(drive, gpu, &options, &lent), ONEHOP_ERROR_ARGUMENT, "placement 77");
    options.placement = ONEHOP_POSTED;
    options.nsid = 5;
    FAILS(onehop_lend(drive, gpu, &options, &lent), ONEHOP_ERROR_DRIVE, "namespace 5");
    options.nsid = 1;
    options.writable = 1;
    FAILS(onehop_lend(reader, gpu, &options, &lent), ONEHOP_ERROR_DRIVE, "reading only");
    IS(lent == NULL);
    WORKS(onehop_lend(drive, gpu, &options, &lent));
    IS(onehop_lent_queue(lent) != NULL && onehop_lent_data(lent) != NULL);
    IS(onehop_lent_queue(NULL) == NULL && onehop_lent_data(NULL) == NULL);

    WORKS(onehop_lent_describe(lent, &info));
    IS(info.blocks == 2048 && info.block_bytes == 512 && info.data_bytes == 65536 && info.recoveries == 0);
    FAILS(onehop_lent_describe(lent, NULL), ONEHOP_ERROR_ARGUMENT, "`info`");
    FAILS(onehop_lent_describe(NULL, &info), ONEHOP_ERROR_ARGUMENT, "`lent`");

    memset(bytes, 0x5a, sizeof bytes);
    WORKS(onehop_data_write(lent, 4, bytes, sizeof bytes));
    WORKS(onehop_emulated_write(lent, 7, 2, 4, &answer));
    IS(answer == ONEHOP_OK);
    WORKS(onehop_emulated_read(lent, 7, 2, 8192, &answer));
    IS(answer == ONEHOP_OK);
    WORKS(onehop_data_read(lent, 8192, back, sizeof back));
    IS(memcmp(bytes, back, sizeof back) == 0);
    FAILS(onehop_data_read(lent, 65536 - 1023, back, sizeof back), ONEHOP_ERROR_GPU, "");
    FAILS(onehop_data_read(lent, UINT64_MAX, back, 1), ONEHOP_ERROR_GPU, "");
    FAILS(onehop_data_read(lent, 0, NULL, 1), ONEHOP_ERROR_ARGUMENT, "`to`");
    FAILS(onehop_data_write(lent, 65536, bytes, 1), ONEHOP_ERROR_GPU, "");
    FAILS(onehop_data_write(lent, 0, NULL, 1), ONEHOP_ERROR_ARGUMENT, "`from`");

    WORKS(onehop_emulated_read(lent, 2048, 1, 0, &answer));
    IS(answer == ONEHOP_BAD_RANGE);
    WORKS(onehop_emulated_read(lent, 0, 0, 0, &answer));
    IS(answer == ONEHOP_BAD_LENGTH);
    WORKS(onehop_emulated_read(lent, 0, 1, 65536 - 508, &answer));
    IS(answer == ONEHOP_BAD_OFFSET);
    WORKS(onehop_emulated_read(lent, 0, 1, 3, &answer));
    IS(answer == ONEHOP_BAD_ALIGNMENT);
    FAILS(onehop_emulated_read(lent, 0, 1, 0, NULL), ONEHOP_ERROR_ARGUMENT, "`answer`");

    /* An exported queue keeps its drive and GPU open. */
    WORKS(onehop_drive_flush(drive, 1));
    FAILS(onehop_drive_flush(drive, 2), ONEHOP_ERROR_DRIVE, "namespace 2");
    onehop_drive_close(drive);
    onehop_drive_close(NULL);
    onehop_drive_close(reader);
    onehop_gpu_close(gpu);
    onehop_gpu_close(NULL);
    WORKS(onehop_emulated_read(lent, 7, 2, 0, &answer));
    IS(answer == ONEHOP_OK);
    WORKS(onehop_lent_check(lent));
    WORKS(onehop_lent_stop(lent));
    WORKS(onehop_emulated_read(lent, 7, 2, 0, &answer));
    IS(answer == ONEHOP_STOPPED);
    WORKS(onehop_lent_close(lent));
    WORKS(onehop_lent_close(NULL));
    FAILS(onehop_lent_stop(NULL), ONEHOP_ERROR_ARGUMENT, "`lent`");
    FAILS(onehop_lent_check(NULL), ONEHOP_ERROR_ARGUMENT, "`lent`");

    IS(strstr(onehop_library_ptx(), ".visible .func  (.param .b32 func_retval0) onehop_read("));
    puts("all of it");
    return 0;
}
