/* Calls the library while the process ends, when the thread's own variables are gone. */
#include <onehop/onehop.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static onehop_drive *drive;

static int fails(void) {
    onehop_drive *none = NULL;
    return onehop_drive_open("sim:mem:64M?nosuch=1", 0, &none) != 0 && none == NULL;
}

static void at_exit(void) {
    const char *words = onehop_last_error();
    if (words == NULL || !fails() || onehop_last_error() == NULL)
        _Exit(1);
    onehop_drive_close(drive);
    onehop_drive_close(NULL);
    puts("closed at exit");
    fflush(stdout);
}

__attribute__((destructor)) static void at_the_end(void) {
    if (!fails())
        _Exit(2);
    puts("failed at the end");
    fflush(stdout);
}

int main(void) {
    atexit(at_exit);
    if (!fails() || strlen(onehop_last_error()) == 0)
        return 3;
    if (onehop_drive_open("sim:mem:64M", 0, &drive) != 0)
        return 4;
    return 0;
}
