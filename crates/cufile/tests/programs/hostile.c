/* Random calls with invalid arguments, from several threads: hostile SEED SECONDS. The process survives, no call hangs, and a
 * handle reads its file's bytes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "onehop/cufile.h"

typedef uint64_t at;
__attribute__((weak)) int cuDevicePrimaryCtxRetain(void **context, int device);
__attribute__((weak)) int cuCtxSetCurrent(void *context);
__attribute__((weak)) int cuMemAlloc_v2(at *where, size_t bytes);
__attribute__((weak)) int cuMemFree_v2(at where);
__attribute__((weak)) int cuStreamCreate(void **stream, unsigned flags);
__attribute__((weak)) int cuStreamSynchronize(void *stream);

enum { SIZE = 1 << 20, THREADS = 4, KEPT = 8 };
static unsigned char pattern[SIZE];
static time_t end;

struct thread {
    uint64_t seed;
    void *handles[KEPT], *batches[KEPT], *stream;
    at memory[KEPT];
    unsigned char *host;
    int fd;
    /* Words of operations in streams, which stay valid. */
    size_t bytes;
    off_t file_offset, offset;
    ssize_t done;
};

static uint64_t next(struct thread *t) {
    t->seed ^= t->seed << 13;
    t->seed ^= t->seed >> 7;
    t->seed ^= t->seed << 17;
    return t->seed;
}
static uint64_t number(struct thread *t) {
    static const uint64_t odd[] = {0, 1, 2, 4095, 4096, 65535, SIZE, SIZE + 1, 1ull << 31, 1ull << 47, 1ull << 62, INT64_MAX, 1ull << 63, UINT64_MAX};
    switch (next(t) % 3) {
    case 0: return odd[next(t) % (sizeof odd / sizeof *odd)];
    case 1: return next(t) % (2 * SIZE);
    default: return next(t);
    }
}
static void *handle(struct thread *t, void **kept) {
    uint64_t which = next(t) % (KEPT + 2);
    return which < KEPT ? kept[which] : (void *)number(t);
}
/* Memory with room for everything, or that no call may access. */
static void *memory(struct thread *t, size_t bytes) {
    at device = t->memory[next(t) % KEPT];
    if (bytes <= SIZE && device && next(t) % 2) return (void *)device;
    if (bytes <= SIZE && next(t) % 2) return t->host;
    return (void *)(next(t) % 4096);
}

static void call(struct thread *t) {
    size_t bytes = number(t);
    void *place = memory(t, bytes);
    /* The memory before it also belongs to this program, and may be written. */
    off_t file = number(t), offset = (at)place < 4096 ? (off_t)number(t) % 4096 : 0;
    int slot = next(t) % KEPT;
    CUfileDescr_t description = {.type = next(t) % 8 ? 1 : (int)number(t), .handle.fd = next(t) % 4 ? t->fd : (int)number(t)};
    switch (next(t) % 16) {
    case 0: cuFileDriverOpen(); break;
    case 1: cuFileDriverClose(); break;
    case 2: cuFileHandleRegister(next(t) % 8 ? &t->handles[slot] : NULL, next(t) % 8 ? &description : NULL); break;
    case 3: cuFileHandleDeregister(handle(t, t->handles)); break;
    case 4: cuFileBufRegister(place, number(t), (int)number(t)); break;
    case 5: cuFileBufDeregister(place); break;
    case 6:
    case 7: {
        ssize_t moved = cuFileRead(handle(t, t->handles), place, bytes, file, offset);
        if (moved > 0 && place == t->host && memcmp(t->host, pattern + file, moved)) { puts("wrong bytes"); abort(); }
        if (moved < -1 || (moved > 0 && (size_t)moved > bytes)) { printf("%zd of %zu\n", moved, bytes); abort(); }
        break;
    }
    case 8:
        if (t->memory[slot]) cuMemFree_v2(t->memory[slot]);
        t->memory[slot] = 0;
        if (cuMemAlloc_v2 && cuMemAlloc_v2(&t->memory[slot], SIZE)) t->memory[slot] = 0;
        break;
    case 9: cuFileBatchIOSetUp(next(t) % 8 ? &t->batches[slot] : NULL, number(t) % 300); break;
    case 10: {
        CUfileIOParams_t params[4];
        for (int i = 0; i < 4; i++) {
            size_t part = number(t);
            params[i] = (CUfileIOParams_t){.mode = next(t) % 8 ? 1 : (int)number(t), .fh = handle(t, t->handles), .opcode = 0, .cookie = t};
            params[i].u.batch.devPtr_base = memory(t, part);
            params[i].u.batch.size = part;
            params[i].u.batch.file_offset = number(t);
            /* The host's bytes may belong to another call. */
            if (params[i].u.batch.devPtr_base == t->host) params[i].u.batch.size = 0;
        }
        void *batch = handle(t, t->batches);
        unsigned submitted = next(t) % 5, count = 4;
        CUfileIOEvents_t events[4];
        struct timespec limit = {next(t) % 2, number(t)};
        cuFileBatchIOSubmit(batch, submitted, next(t) % 8 ? params : NULL, (unsigned)number(t));
        /* Only this thread frees memory, so all operations must have ended. */
        cuFileBatchIOCancel(batch);
        for (int i = 0; i < 200 && !cuFileBatchIOGetStatus(batch, next(t) % 5, &count, events, &limit).err && count; i++) count = 4;
        break;
    }
    case 11: cuFileBatchIODestroy(handle(t, t->batches)); break;
    case 12: {
        if (place == t->host || (!t->stream && cuStreamCreate)) break;
        t->bytes = bytes;
        t->file_offset = file;
        t->offset = offset;
        cuFileReadAsync(handle(t, t->handles), place, next(t) % 8 ? &t->bytes : NULL, &t->file_offset, &t->offset, next(t) % 8 ? &t->done : NULL, t->stream);
        if (cuStreamSynchronize) cuStreamSynchronize(t->stream);
        break;
    }
    case 13: next(t) % 2 ? cuFileStreamRegister(t->stream, number(t)) : cuFileStreamDeregister(t->stream); break;
    case 14: {
        size_t size;
        bool flag;
        int level;
        char text[16];
        cuFileSetParameterSizeT((int)number(t), number(t));
        cuFileGetParameterSizeT((int)number(t), next(t) % 8 ? &size : NULL);
        cuFileSetParameterBool((int)number(t), next(t) % 2);
        cuFileGetParameterBool((int)number(t), next(t) % 8 ? &flag : NULL);
        cuFileGetParameterString((int)number(t), text, next(t) % 16);
        cuFileSetStatsLevel((int)(number(t) % 6));
        cuFileGetStatsLevel(next(t) % 8 ? &level : NULL);
        break;
    }
    default: {
        static __thread CUfileStatsLevel3_t stats;
        char text[64];
        CUfileDrvProps_t properties;
        cuFileGetStatsL3(next(t) % 8 ? &stats : NULL);
        cuFileDriverGetProperties(next(t) % 8 ? &properties : NULL);
        onehop_cufile_route(handle(t, t->handles), text, next(t) % 64);
    }
    }
}

static void *run(void *argument) {
    struct thread *t = argument;
    void *context;
    if (cuDevicePrimaryCtxRetain && (cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) || cuStreamCreate(&t->stream, 0))) abort();
    while (time(NULL) < end) call(t);
    return NULL;
}

int main(int count, char **arguments) {
    static struct thread threads[THREADS];
    pthread_t all[THREADS];
    if (count != 3) return 2;
    uint64_t seed = strtoull(arguments[1], NULL, 0);
    int seconds = atoi(arguments[2]);
    end = time(NULL) + seconds;
    alarm(seconds + 60);
    for (size_t i = 0; i < SIZE; i++) pattern[i] = (unsigned char)((i * 0x9e3779b97f4a7c15ull) >> 56);
    char path[64];
    snprintf(path, sizeof path, "cufile-hostile-%d", getpid());
    int fd = open(path, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (fd < 0 || write(fd, pattern, SIZE) != SIZE) return 1;
    for (int i = 0; i < THREADS; i++) {
        threads[i].seed = seed * 0x9e3779b97f4a7c15ull + (uint64_t)i * 77 + 1;
        threads[i].fd = open(path, O_RDONLY);
        if (posix_memalign((void **)&threads[i].host, 4096, SIZE)) return 1;
        pthread_create(&all[i], NULL, run, &threads[i]);
    }
    unlink(path);
    for (int i = 0; i < THREADS; i++) pthread_join(all[i], NULL);
    puts("all of it");
    return 0;
}
