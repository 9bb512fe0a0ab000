/* Are there GPUs for 3FS programs here? gpu_available */
#include <stdio.h>

#include "lib/api/hf3fs_usrbio_gdr.h"

int main(void)
{
    if (hf3fs_gdr_available()) {
        int gpu_count = hf3fs_gdr_device_count();
        printf("GDR available with %d GPUs\n", gpu_count);
        return 0;
    }
    printf("GDR is not available\n");
    return 3;
}
