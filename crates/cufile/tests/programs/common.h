/* Shared by the programs of these tests. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "onehop/cufile.h"

/* Where a program hangs: printed by a time limit's signal. */
static const char *volatile where_file = "";
static volatile int where_line;
static inline void say_where(int signal) {
    char text[256];
    int bytes = snprintf(text, sizeof text, "signal %d at %s:%d\n", signal, where_file, where_line);
    _exit(write(1, text, bytes) == bytes ? 124 : 125);
}
static inline void limit_time(unsigned seconds) {
    signal(SIGALRM, say_where);
    signal(SIGTERM, say_where);
    alarm(seconds);
}

#define REQUIRE(what, leave)                                                           \
    do {                                                                               \
        where_file = __FILE__;                                                         \
        where_line = __LINE__;                                                         \
        if (!(what)) {                                                                 \
            printf("%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno);        \
            fflush(stdout);                                                            \
            leave(1);                                                                  \
        }                                                                              \
    } while (0)
#define MUST(what) REQUIRE(what, exit)
#define GIVES(call, number) MUST((call).err == (number))


/* The model. Weak: without it the program has no GPU. */
#define MODEL __attribute__((weak))
typedef uint64_t at;
MODEL int cuCtxSetCurrent(void *context);
MODEL int cuDeviceGetCount(int *count);
MODEL int cuDevicePrimaryCtxRetain(void **context, int device);
MODEL int cuMemAlloc_v2(at *where, size_t bytes);
MODEL int cuMemFree_v2(at where);
MODEL int cuStreamCreate(void **stream, unsigned flags);
MODEL int cuStreamSynchronize(void *stream);
MODEL int cuLaunchHostFunc(void *stream, void (*call)(void *), void *argument);
MODEL int cuMemHostAlloc(void **where, size_t bytes, unsigned flags);
MODEL int cuMemHostGetDevicePointer_v2(at *out, void *where, unsigned flags);
MODEL int cuStreamWaitValue32_v2(void *stream, at where, unsigned value, unsigned flags);
MODEL int model_copy(at device, void *host, size_t bytes, int out);
MODEL int model_capture(void *stream, int on);
MODEL long model(const char *what, long value);

enum { SIZE = 5 * 1048576 + 12345, PAGE = 4096 };
static unsigned char pattern[SIZE], buffer[SIZE];
static char path[4096];

static inline int make_file(int flags) {
    static int count;
    snprintf(path, sizeof path, "cufile-test-%d-%d", getpid(), count++);
    int fd = open(path, O_CREAT | O_EXCL | O_RDWR, 0600);
    MUST(fd >= 0 && write(fd, pattern, SIZE) == SIZE);
    MUST(!fsync(fd) && !close(fd));
    fd = open(path, flags);
    unlink(path);
    return fd;
}

static inline CUfileHandle_t reg(int fd) {
    CUfileDescr_t description = {.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD, .handle.fd = fd};
    CUfileHandle_t handle = NULL;
    GIVES(cuFileHandleRegister(&handle, &description), 0);
    MUST(handle);
    return handle;
}

static inline int gpus(void) {
    int count = 0;
    MUST(!cuDeviceGetCount(&count) && count > 0);
    return count;
}
static inline at device_memory(int gpu, size_t bytes) {
    void *context;
    at where;
    MUST(!cuDevicePrimaryCtxRetain(&context, gpu % gpus()) && !cuCtxSetCurrent(context) && !cuMemAlloc_v2(&where, bytes));
    return where;
}
static inline void fill(at where, int value, size_t bytes) {
    unsigned char *data = malloc(bytes);
    memset(data, value, bytes);
    MUST(!model_copy(where, data, bytes, 0));
    free(data);
}
static inline int is_pattern(at where, size_t from, size_t bytes) {
    unsigned char *data = malloc(bytes);
    MUST(!model_copy(where, data, bytes, 1));
    int same = !memcmp(data, pattern + from, bytes);
    free(data);
    return same;
}
static inline int is_all(at where, int value, size_t bytes) {
    unsigned char *data = malloc(bytes);
    MUST(!model_copy(where, data, bytes, 1));
    int same = 1;
    for (size_t i = 0; i < bytes; i++) same &= data[i] == value;
    free(data);
    return same;
}

/* Runs the named parts, with a time limit. */
struct part {
    const char *name;
    void (*run)(void);
};
static inline int run_parts(int count, char **names, const struct part *parts, size_t known) {
    for (size_t i = 0; i < SIZE; i++) pattern[i] = (unsigned char)((i * 0x9e3779b97f4a7c15ull) >> 56);
    limit_time(120);
    for (int i = 1; i < count; i++) {
        size_t at = 0;
        while (at < known && strcmp(parts[at].name, names[i])) at++;
        MUST(at < known);
        parts[at].run();
    }
    puts("all of it");
    return 0;
}
#define RUN_PARTS(count, names, parts) run_parts(count, names, parts, sizeof(parts) / sizeof *(parts))
