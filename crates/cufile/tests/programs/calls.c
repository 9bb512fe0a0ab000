/* Every function of include/onehop/cufile.h against the library, with or without the model of CUDA's driver. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "common.h"

_Static_assert(sizeof(CUfileError_t) == 8, "");
_Static_assert(sizeof(CUfileDescr_t) == 24 && offsetof(CUfileDescr_t, handle) == 8 && offsetof(CUfileDescr_t, fs_ops) == 16, "");
_Static_assert(sizeof(CUfileDrvProps_t) == 56 && offsetof(CUfileDrvProps_t, nvfs.dstatusflags) == 24, "");
_Static_assert(offsetof(CUfileDrvProps_t, fflags) == 32 && offsetof(CUfileDrvProps_t, max_batch_io_timeout_msecs) == 52, "");
_Static_assert(sizeof(CUfileIOParams_t) == 64 && offsetof(CUfileIOParams_t, u.batch.size) == 32, "");
_Static_assert(offsetof(CUfileIOParams_t, fh) == 40 && offsetof(CUfileIOParams_t, cookie) == 56, "");
_Static_assert(sizeof(CUfileIOEvents_t) == 24 && offsetof(CUfileIOEvents_t, ret) == 16, "");
_Static_assert(sizeof(CUfileStatsLevel1_t) == 512 && offsetof(CUfileStatsLevel1_t, read_bytes) == 96, "");
_Static_assert(offsetof(CUfileStatsLevel1_t, batch_submit_ops) == 176, "");
_Static_assert(sizeof(CUfileStatsLevel2_t) == 1024 && sizeof(CUfilePerGpuStats_t) == 248, "");
_Static_assert(sizeof(CUfileStatsLevel3_t) == 5000 && offsetof(CUfileStatsLevel3_t, per_gpu_stats) == 1032, "");

static int reg_error(int fd, int type) {
    CUfileDescr_t description = {.type = type, .handle.fd = fd};
    CUfileHandle_t handle = NULL;
    return cuFileHandleRegister(&handle, &description).err;
}

static void fails(ssize_t moved, int number) {
    if (moved != -1 || errno != number) printf("%zd, errno %d instead of %d\n", moved, errno, number);
    MUST(moved == -1 && errno == number);
}

static void driver(void) {
    int version = 0;
    CUfileDrvProps_t properties;
    GIVES(cuFileGetVersion(&version), 0);
    MUST(version == 1170);
    GIVES(cuFileGetVersion(NULL), 5022);
    GIVES(cuFileDriverClose(), 5001);
    MUST(cuFileUseCount() == 0);
    GIVES(cuFileSetParameterSizeT(9, 64), 0);
    GIVES(cuFileSetParameterSizeT(9, 257), 5022);
    GIVES(cuFileSetParameterSizeT(12, 1), 5022);
    GIVES(cuFileSetParameterSizeT(-1, 1), 5022);
    GIVES(cuFileDriverOpen(), 0);
    GIVES(cuFileDriverOpen(), 0);
    MUST(cuFileUseCount() == 2);
    GIVES(cuFileSetParameterSizeT(9, 32), 5026);
    GIVES(cuFileDriverGetProperties(&properties), 0);
    MUST(properties.nvfs.major_version == 0 && properties.max_batch_io_size == 64);
    MUST(properties.nvfs.dcontrolflags == 1 << CU_FILE_ALLOW_COMPAT_MODE && properties.nvfs.poll_thresh_size == 4);
    GIVES(cuFileDriverGetProperties(NULL), 5022);
    GIVES(cuFileDriverSetPollMode(true, 64), 0);
    GIVES(cuFileDriverSetMaxDirectIOSize(1024), 0);
    GIVES(cuFileDriverSetMaxCacheSize(2048), 0);
    GIVES(cuFileDriverSetMaxPinnedMemSize(4096), 0);
    GIVES(cuFileDriverSetMaxDirectIOSize(0), 5022);
    GIVES(cuFileDriverGetProperties(&properties), 0);
    MUST(properties.nvfs.poll_thresh_size == 64 && properties.nvfs.dcontrolflags == 3);
    MUST(properties.nvfs.max_direct_io_size == 1024 && properties.max_device_cache_size == 2048);
    MUST(properties.max_device_pinned_mem_size == 4096);
    GIVES(cuFileDriverClose_v2(), 0);
    GIVES(cuFileDriverClose(), 0);
    GIVES(cuFileDriverClose(), 5001);

    bool flag;
    char text[64];
    size_t least, most, sizes[2] = {4096, 65536}, counts[2] = {3, 4}, got[2][2];
    GIVES(cuFileSetParameterBool(2, true), 0);
    GIVES(cuFileGetParameterBool(2, &flag), 0);
    MUST(flag);
    GIVES(cuFileGetParameterBool(14, &flag), 5022);
    GIVES(cuFileSetParameterString(0, "DEBUG"), 0);
    GIVES(cuFileSetParameterString(0, "LOUD"), 5022);
    GIVES(cuFileSetParameterString(1, ""), 5022);
    GIVES(cuFileSetParameterString(1, NULL), 5022);
    GIVES(cuFileGetParameterString(0, text, sizeof text), 0);
    MUST(!strcmp(text, "DEBUG"));
    GIVES(cuFileGetParameterString(0, text, 5), 5022);
    GIVES(cuFileGetParameterString(0, text, -1), 5022);
    GIVES(cuFileGetParameterMinMaxValue(9, &least, &most), 0);
    MUST(least == 1 && most == 256);
    GIVES(cuFileSetParameterPosixPoolSlabArray(sizes, counts, 2), 0);
    GIVES(cuFileGetParameterPosixPoolSlabArray(got[0], got[1], 2), 0);
    MUST(!memcmp(got[0], sizes, sizeof sizes) && !memcmp(got[1], counts, sizeof counts));
    GIVES(cuFileSetParameterGpuBounceBufferSlabArray(sizes, counts, 0), 5022);
    GIVES(cuFileGetParameterGpuBounceBufferSlabArray(got[0], got[1], 2), 0);
    GIVES(cuFileDriverGetP2PFlags(0, &version), 0);
    GIVES(cuFileDriverSetP2PFlags(0, 1), 5007);
    GIVES(cuFileExportPCIeTopology("nowhere"), 5007);
}

static void files(void) {
    int fd = make_file(O_RDWR), pair[2];
    CUfileHandle_t handle = reg(fd);
    MUST(reg_error(fd, 1) == 5028);
    int other = dup(fd);
    CUfileHandle_t second = reg(other);
    cuFileHandleDeregister(handle);
    MUST(reg_error(fd, 2) == 5008 && reg_error(-1, 1) == 5022 && reg_error(9999, 1) == 5022);
    handle = reg(fd);
    cuFileHandleDeregister(handle);
    cuFileHandleDeregister(handle);
    cuFileHandleDeregister(NULL);
    cuFileHandleDeregister((void *)1234);
    /* Closed and not deregistered: the number belongs to another file now. */
    int again = dup2(make_file(O_RDWR), other);
    handle = reg(again);
    MUST(cuFileRead(second, buffer, 10, 0, 0) == 10);
    cuFileHandleDeregister(second);
    MUST(reg_error(again, 1) == 5028);
    cuFileHandleDeregister(handle);
    MUST(!pipe(pair) && reg_error(pair[0], 1) == 5018);
    MUST(reg_error(open(".", O_RDONLY), 1) == 5018 && reg_error(open("/dev/null", O_RDWR), 1) == 5018);
    MUST(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair) && reg_error(pair[0], 1) == 5022);
    MUST(reg_error(make_file(O_RDWR | O_APPEND), 1) == 5019 && reg_error(make_file(O_RDONLY | O_NONBLOCK), 1) == 5019);
    GIVES(cuFileHandleRegister(NULL, NULL), 5022);

    GIVES(cuFileBufRegister(buffer, SIZE, 0), 0);
    GIVES(cuFileBufRegister(buffer, SIZE, 0), 5023);
    GIVES(cuFileBufRegister(buffer + 1, 7, 999), 0);
    GIVES(cuFileBufRegister(buffer + 2, 0, 0), 5022);
    GIVES(cuFileBufRegister(NULL, 10, 0), 5022);
    GIVES(cuFileBufRegister((void *)4096, 10, 0), 5012);
    GIVES(cuFileBufDeregister(buffer + 2), 5024);
    GIVES(cuFileBufDeregister(buffer + 1), 0);
    handle = reg(make_file(O_RDWR));
    MUST(cuFileRead(handle, buffer, 100, 0, SIZE - 100) == 100);
    fails(cuFileRead(handle, buffer, 101, 0, SIZE - 100), 5017);
    fails(cuFileRead(handle, buffer, 10, 0, SIZE + 1), 5017);
    fails(cuFileRead(handle, buffer, 10, 0, -1), 5030);
    GIVES(cuFileBufDeregister(buffer), 0);
    GIVES(cuFileBufDeregister(buffer), 5024);
    cuFileHandleDeregister(handle);
}

static void host(void) {
    static const int ways[] = {O_RDWR, O_RDWR | O_DIRECT};
    for (int way = 0; way < 2; way++) {
        int fd = make_file(ways[way]);
        if (fd < 0) continue;
        CUfileHandle_t handle = reg(fd);
        MUST(lseek(fd, 77, SEEK_SET) == 77);
        MUST(cuFileRead(handle, buffer, SIZE, 0, 0) == SIZE && !memcmp(buffer, pattern, SIZE));
        MUST(cuFileRead(handle, buffer, 1000, 4097, 3) == 1000 && !memcmp(buffer + 3, pattern + 4097, 1000));
        MUST(cuFileRead(handle, buffer, 1000, SIZE - 10, 0) == 10 && cuFileRead(handle, buffer, 10, SIZE, 0) == 0);
        MUST(cuFileRead(handle, buffer, 10, 1ll << 50, 0) == 0 && cuFileRead(handle, buffer, 0, 0, 0) == 0);
        MUST(cuFileWrite(handle, pattern, 5000, 12345, 7) == 5000);
        MUST(cuFileRead(handle, buffer, 5000, 12345, 0) == 5000 && !memcmp(buffer, pattern + 7, 5000));
        MUST(lseek(fd, 0, SEEK_CUR) == 77);
        fails(cuFileRead(handle, NULL, 10, 0, 0), EINVAL);
        fails(cuFileRead(NULL, buffer, 10, 0, 0), EINVAL);
        fails(cuFileRead((void *)99, buffer, 10, 0, 0), 5027);
        fails(cuFileRead(handle, buffer, 10, -1, 0), 5022);
        fails(cuFileRead(handle, buffer, SIZE_MAX, 0, 0), 5022);
        fails(cuFileRead(handle, buffer, 10, INT64_MAX, 0), 5022);
        fails(cuFileRead(handle, (void *)4096, 10, 0, 0), EFAULT);
        cuFileHandleDeregister(handle);
        fails(cuFileRead(handle, buffer, 10, 0, 0), 5027);
        close(fd);
    }
    CUfileHandle_t only = reg(make_file(O_RDONLY));
    fails(cuFileWrite(only, pattern, 10, 0, 0), 5019);
    only = reg(make_file(O_WRONLY));
    fails(cuFileRead(only, buffer, 10, 0, 0), 5019);
    MUST(cuFileWrite(only, pattern, 10, 0, 0) == 10);
}

static void gpu(void) {
    static const int ways[] = {O_RDWR, O_RDWR | O_DIRECT};
    size_t kib = 0;
    GIVES(cuFileGetBARSizeInKB(0, &kib), 0);
    MUST(kib >= 1 << 18 && (!model("set copy_delay_us", 0) || kib == 128 << 20));
    GIVES(cuFileGetBARSizeInKB(gpus(), &kib), 5022);
    for (int way = 0; way < 4; way++) {
        int fd = make_file(ways[way & 1]);
        if (fd < 0) continue;
        CUfileHandle_t handle = reg(fd);
        at memory = device_memory(way / 2, 2 * SIZE);
        /* A thread without a context of its own. */
        cuCtxSetCurrent(NULL);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        fill(memory, 0xee, 2 * SIZE);
        MUST(cuFileRead(handle, (void *)memory, SIZE, 0, 0) == SIZE && is_pattern(memory, 0, SIZE));
        MUST(is_all(memory + SIZE, 0xee, SIZE));
        MUST(cuFileRead(handle, (void *)(memory + 5), 100000, 4097, SIZE) == 100000);
        MUST(is_pattern(memory + SIZE + 5, 4097, 100000) && is_all(memory + SIZE + 100005, 0xee, 4096));
        MUST(cuFileRead(handle, (void *)memory, 4096, SIZE - 10, 0) == 10);
        MUST(cuFileRead(handle, (void *)memory, SIZE, 0, 0) == SIZE);
        GIVES(cuFileBufRegister((void *)memory, 2 * SIZE, 0), 0);
        GIVES(cuFileBufRegister((void *)(memory + 256), SIZE, 0), 0);
        fails(cuFileRead(handle, (void *)memory, 4096, 0, 2 * SIZE - 10), 5017);
        MUST(cuFileWrite(handle, (void *)memory, SIZE, 777, 0) == SIZE);
        MUST(pread(fd, buffer, 0, 0) == 0);
        MUST(cuFileRead(handle, (void *)memory, SIZE, 777, SIZE) == SIZE && is_pattern(memory + SIZE, 0, SIZE));
        GIVES(cuFileBufDeregister((void *)(memory + 256)), 0);
        GIVES(cuFileBufDeregister((void *)memory), 0);
        GIVES(cuFileBufRegister((void *)memory, 64 << 20, 0), 5014);
        MUST(!cuMemFree_v2(memory));
        fails(cuFileRead(handle, (void *)memory, SIZE, 0, 0), EFAULT);
        cuFileHandleDeregister(handle);
        close(fd);
    }
}

static at freed, another;
/* Frees it during the first copy to it. */
static void *free_soon(void *argument) {
    while (model("copies begun", 0) == *(long *)argument) usleep(100);
    MUST(!cuMemFree_v2(freed));
    /* Likely to get the freed address. */
    another = device_memory(0, SIZE);
    fill(another, 0xee, SIZE);
    return NULL;
}
/* Memory that is freed during a read: an error, and no one else's bytes change. */
static void freed_memory(void) {
    CUfileHandle_t handle = reg(make_file(O_RDWR));
    pthread_t thread;
    freed = device_memory(0, SIZE);
    if (model("set copy_delay_us", 50000)) {
        long begun = model("copies begun", 0);
        pthread_create(&thread, NULL, free_soon, &begun);
        ssize_t moved = cuFileRead(handle, (void *)freed, SIZE, 0, 0);
        MUST(moved == -1 && (errno == 5011 || errno == 5012));
        pthread_join(thread, NULL);
        MUST(is_all(another, 0xee, SIZE));
        model("set copy_delay_us", 0);
    }
    at memory = device_memory(0, SIZE);
    for (int i = 0; i < 100; i++) MUST(cuFileRead(handle, (void *)memory, SIZE, 0, 0) == SIZE);
    MUST(is_pattern(memory, 0, SIZE));
    /* Reads past a file's end. */
    int fd = make_file(O_RDWR);
    handle = reg(fd);
    MUST(!ftruncate(fd, 4097) && cuFileRead(handle, (void *)memory, SIZE, 0, 0) == 4097);
}

static CUfileHandle_t shared_handle;
static void *read_often(void *argument) {
    at memory = (at)argument;
    for (int i = 0; i < 30; i++) {
        size_t from = (size_t)rand() % SIZE, bytes = (size_t)rand() % (SIZE - from);
        MUST(cuFileRead(shared_handle, (void *)memory, bytes, from, 0) == (ssize_t)bytes);
        MUST(!bytes || is_pattern(memory, from, bytes));
    }
    return NULL;
}
static void threads(void) {
    pthread_t all[16];
    shared_handle = reg(make_file(O_RDWR));
    for (int i = 0; i < 16; i++) pthread_create(&all[i], NULL, read_often, (void *)device_memory(i % 2, SIZE));
    for (int i = 0; i < 16; i++) pthread_join(all[i], NULL);
}

static void batch(void) {
    CUfileHandle_t handle = reg(make_file(O_RDWR));
    CUfileBatchHandle_t batch;
    CUfileIOParams_t params[128] = {0};
    CUfileIOEvents_t events[128];
    enum { PART = 40000, COUNT = 128 };
    at memory = device_memory(1, COUNT * PART);
    unsigned count;
    GIVES(cuFileBatchIOSetUp(&batch, 0), 5022);
    GIVES(cuFileBatchIOSetUp(&batch, 129), 5022);
    GIVES(cuFileBatchIOSetUp(NULL, 1), 5022);
    GIVES(cuFileBatchIOSetUp(&batch, COUNT), 0);
    for (int i = 0; i < COUNT; i++) {
        params[i] = (CUfileIOParams_t){.mode = CUFILE_BATCH, .fh = handle, .opcode = CUFILE_READ, .cookie = &params[i]};
        params[i].u.batch.devPtr_base = (void *)(memory + (size_t)i * PART);
        params[i].u.batch.file_offset = i * PART;
        params[i].u.batch.size = PART;
    }
    count = COUNT;
    GIVES(cuFileBatchIOGetStatus(batch, 0, &count, events, NULL), 0);
    MUST(count == 0);
    for (int round = 0; round < 3; round++) {
        GIVES(cuFileBatchIOSubmit(batch, COUNT, params, 0), 0);
        GIVES(cuFileBatchIOSubmit(batch, 1, params, 0), 5040);
        unsigned seen = 0, told[COUNT] = {0};
        while (seen < COUNT) {
            count = 50;
            GIVES(cuFileBatchIOGetStatus(batch, COUNT - seen < 50 ? COUNT - seen : 50, &count, events, NULL), 0);
            MUST(count > 0);
            for (unsigned i = 0; i < count; i++) {
                size_t which = (size_t)((CUfileIOParams_t *)events[i].cookie - params);
                MUST(events[i].status == CUFILE_COMPLETE && events[i].ret == PART && !told[which]++);
                MUST(is_pattern(memory + which * PART, which * PART, PART));
            }
            seen += count;
        }
    }
    struct timespec garbage = {-5, -7}, none = {0, 0};
    params[0].u.batch.file_offset = -4;
    GIVES(cuFileBatchIOSubmit(batch, 1, params, 0), 0);
    count = 1;
    GIVES(cuFileBatchIOGetStatus(batch, 1, &count, events, &garbage), 0);
    MUST(count == 1 && events[0].status == CUFILE_FAILED && (ssize_t)events[0].ret == -5022);
    params[1].opcode = 7;
    GIVES(cuFileBatchIOSubmit(batch, 2, params, 0), 5022);
    params[1].opcode = CUFILE_READ;
    params[1].fh = NULL;
    GIVES(cuFileBatchIOSubmit(batch, 2, params, 0), 5027);
    params[1].fh = handle;
    GIVES(cuFileBatchIOSubmit(batch, 0, params, 0), 5022);
    GIVES(cuFileBatchIOSubmit(batch, 1, NULL, 0), 5022);
    count = 1;
    GIVES(cuFileBatchIOGetStatus(batch, 2, &count, events, NULL), 5022);
    GIVES(cuFileBatchIOGetStatus((void *)3, 0, &count, events, NULL), 5022);
    /* Cancelled: each operation is reported with its own status. */
    int slow = model("set copy_delay_us", 5000) == 1;
    params[0].u.batch.file_offset = 0;
    GIVES(cuFileBatchIOSubmit(batch, COUNT, params, 0), 0);
    GIVES(cuFileBatchIOCancel(batch), 0);
    count = COUNT;
    GIVES(cuFileBatchIOGetStatus(batch, COUNT, &count, events, NULL), 0);
    MUST(count == COUNT);
    unsigned cancelled = 0;
    for (unsigned i = 0; i < COUNT; i++) {
        MUST(events[i].status == CUFILE_COMPLETE || events[i].status == CUFILE_CANCELED);
        cancelled += events[i].status == CUFILE_CANCELED;
    }
    MUST(cancelled > 0 || !slow);
    /* After a time-out, finished operations are reported. Destroyed with operations in progress. */
    GIVES(cuFileBatchIOSubmit(batch, COUNT, params, 0), 0);
    count = COUNT;
    GIVES(cuFileBatchIOGetStatus(batch, COUNT, &count, events, &none), 0);
    MUST(count < COUNT || !slow);
    cuFileBatchIODestroy(batch);
    cuFileBatchIODestroy(batch);
    model("set copy_delay_us", 0);
    GIVES(cuFileBatchIOSubmit(batch, 1, params, 0), 5022);
}

static void statistics(void) {
    int level;
    CUfileStatsLevel1_t one;
    CUfileStatsLevel2_t two;
    CUfileStatsLevel3_t three;
    GIVES(cuFileGetStatsL1(&one), 5022);
    GIVES(cuFileSetStatsLevel(4), 5022);
    GIVES(cuFileSetStatsLevel(-1), 5022);
    GIVES(cuFileSetStatsLevel(3), 0);
    GIVES(cuFileGetStatsLevel(&level), 0);
    MUST(level == 3);
    GIVES(cuFileStatsReset(), 0);
    GIVES(cuFileStatsStart(), 0);
    CUfileHandle_t handle = reg(make_file(O_RDWR));
    at memory = device_memory(1, SIZE);
    MUST(cuFileRead(handle, (void *)memory, 65536, 0, 0) == 65536 && cuFileWrite(handle, (void *)memory, 4096, 0, 0) == 4096);
    fails(cuFileRead(handle, (void *)memory, 1, -1, 0), 5022);
    GIVES(cuFileGetStatsL3(&three), 0);
    GIVES(cuFileGetStatsL2(&two), 0);
    GIVES(cuFileGetStatsL1(&one), 0);
    MUST(one.read_ops.ok == 1 && one.read_ops.err == 1 && one.write_ops.ok == 1 && one.hdl_register_ops.ok == 1);
    MUST(one.read_bytes == 65536 && one.write_bytes == 4096 && two.read_size_kb_hist[7] == 1);
    int gpu = 1 % gpus();
    MUST(three.num_gpus == (unsigned)gpus() && three.per_gpu_stats[gpu].read_bytes == 65536);
    GIVES(cuFileStatsStop(), 0);
    MUST(cuFileRead(handle, (void *)memory, 65536, 0, 0) == 65536);
    GIVES(cuFileGetStatsL1(&one), 0);
    MUST(one.read_ops.ok == 1);
    char text[1024];
    int bytes = onehop_cufile_route(handle, text, sizeof text);
    MUST(bytes > 0 && bytes < (int)sizeof text && strstr(text, "\"route\":\"cpu/cached\"") && strstr(text, "why_not_better"));
    MUST(onehop_cufile_route(NULL, text, 5) == onehop_cufile_route(NULL, NULL, 0) && strlen(text) == 4);
    MUST(onehop_cufile_route((void *)5, text, sizeof text) == -1);
}

static volatile int stop;
static void *keep_busy(void *argument) {
    static unsigned char own[PAGE];
    while (!stop) {
        cuFileRead(argument, own, PAGE, 0, 0);
        cuFileBufRegister(own, PAGE, 0);
        cuFileBufDeregister(own);
    }
    return NULL;
}
/* A child forked while other threads make calls: it continues with host memory, and does not hang. */
static void forks(void) {
    pthread_t thread;
    CUfileHandle_t handle = reg(make_file(O_RDWR));
    if (cuMemAlloc_v2) MUST(cuFileRead(handle, (void *)device_memory(0, SIZE), SIZE, 0, 0) == SIZE);
    pthread_create(&thread, NULL, keep_busy, handle);
    for (int i = 0; i < 30; i++) {
        int status;
        pid_t child = fork();
        MUST(child >= 0);
        if (!child) {
            alarm(20);
            if (cuFileRead(handle, buffer, SIZE, 0, 0) != SIZE || memcmp(buffer, pattern, SIZE)) _exit(1);
            CUfileHandle_t own = reg(make_file(O_RDWR));
            cuFileHandleDeregister(own);
            _exit(0);
        }
        MUST(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    stop = 1;
    pthread_join(thread, NULL);
}

int main(int count, char **arguments) {
    static const struct part parts[] = {
        {"driver", driver}, {"files", files}, {"host", host}, {"gpu", gpu}, {"freed", freed_memory},
        {"threads", threads}, {"batch", batch}, {"statistics", statistics}, {"forks", forks},
    };
    return RUN_PARTS(count, arguments, parts);
}
