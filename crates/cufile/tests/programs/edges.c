/* Every function of the header in special situations: with invalid handles, at the end of threads and of the process, in a process
 * that forks, and during a close: edges WHAT. With or without the model of CUDA's driver. */
#define _GNU_SOURCE
#include <limits.h>
#include <sys/wait.h>

#include "common.h"

/* _Exit: what runs at exit must not hide a failure. */
#define IS(what) REQUIRE(what, _Exit)
#define SAYS(call, number) IS((call).err == (number))
#define FAILS(call, number) IS((errno = 0, (call) == -1) && errno == (number))

enum { PART = 65536 };
static int original;
static CUfileHandle_t file;
static CUfileBatchHandle_t batch;
static void *stream;

/* The same file, opened again: each open file has a handle. */
static int open_again(void) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", original);
    int fd = open(name, O_RDWR | O_CLOEXEC);
    IS(fd >= 0);
    return fd;
}

static CUfileHandle_t reg_file(int fd) {
    CUfileDescr_t description = {.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD, .handle.fd = fd};
    CUfileHandle_t handle = NULL;
    SAYS(cuFileHandleRegister(&handle, &description), 0);
    IS(handle);
    return handle;
}

static CUfileIOParams_t read_of(CUfileHandle_t handle, void *to) {
    CUfileIOParams_t one = {.mode = CUFILE_BATCH, .fh = handle, .opcode = CUFILE_READ};
    one.u.batch.devPtr_base = to;
    one.u.batch.size = PART;
    return one;
}

/* A number that is not a handle of a file or a batch: each function returns an error, and leaves its caller's memory alone. */
static void names_nothing(void *handle) {
    unsigned char bytes[64], same[64];
    char text[64];
    CUfileIOEvents_t event;
    CUfileIOParams_t one = read_of(handle, bytes);
    struct timespec none = {0, 0};
    size_t size = 8;
    off_t zero = 0;
    ssize_t done = 77;
    unsigned count = 1;
    memset(bytes, 0x5a, sizeof bytes);
    memset(same, 0x5a, sizeof same);
    memset(text, 0x5a, sizeof text);
    FAILS(cuFileRead(handle, bytes, sizeof bytes, 0, 0), handle ? 5027 : EINVAL);
    FAILS(cuFileWrite(handle, bytes, sizeof bytes, 0, 0), handle ? 5027 : EINVAL);
    FAILS(cuFileRead(handle, bytes, SIZE_MAX, LONG_MAX, LONG_MIN), handle ? 5027 : EINVAL);
    SAYS(cuFileReadAsync(handle, bytes, &size, &zero, &zero, &done, NULL), handle ? 5027 : 5022);
    SAYS(cuFileWriteAsync(handle, bytes, &size, &zero, &zero, &done, NULL), handle ? 5027 : 5022);
    SAYS(cuFileBatchIOSubmit(handle, 1, &one, 0), 5022);
    SAYS(cuFileBatchIOSubmit(handle, UINT_MAX, &one, UINT_MAX), 5022);
    SAYS(cuFileBatchIOSubmit(batch, 1, &one, 0), batch ? 5027 : 5022);
    SAYS(cuFileBatchIOGetStatus(handle, 1, &count, &event, NULL), 5022);
    SAYS(cuFileBatchIOGetStatus(handle, UINT_MAX, &count, &event, &none), 5022);
    SAYS(cuFileBatchIOCancel(handle), 5022);
    SAYS(cuFileStreamDeregister(handle), 5022);
    SAYS(cuFileBufDeregister(handle), 5024);
    if (handle) IS(onehop_cufile_route(handle, text, sizeof text) == -1);
    cuFileBatchIODestroy(handle);
    cuFileHandleDeregister(handle);
    IS(!memcmp(bytes, same, sizeof bytes) && !memcmp(text, same, sizeof text) && done == 77 && count == 1 && size == 8);
}

/* Null pointers, and numbers that no function knows. */
static void no_places(void) {
    CUfileDescr_t description = {.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD, .handle.fd = INT_MAX};
    CUfileHandle_t made = &made;
    CUfileBatchHandle_t new_batch = &made;
    CUfileIOEvents_t event;
    CUfileIOParams_t one = read_of(file, NULL);
    size_t sizes[2] = {77, 77}, size = 8;
    off_t zero = 0;
    ssize_t done = 77;
    unsigned count = 1;
    bool flag = true;
    char text[64] = "same";
    int number = 77;

    SAYS(cuFileHandleRegister(NULL, &description), 5022);
    SAYS(cuFileHandleRegister(&made, NULL), 5022);
    SAYS(cuFileHandleRegister(&made, &description), 5022);
    description.handle.fd = INT_MIN;
    SAYS(cuFileHandleRegister(&made, &description), 5022);
    description.type = INT_MAX;
    SAYS(cuFileHandleRegister(&made, &description), 5008);
    SAYS(cuFileBufRegister(NULL, PART, 0), 5022);
    SAYS(cuFileBufRegister(text, SIZE_MAX, INT_MIN), 5022);
    SAYS(cuFileBufRegister(text, 0, 0), 5022);
    SAYS(cuFileBatchIOSetUp(NULL, 1), 5022);
    SAYS(cuFileBatchIOSetUp(&new_batch, UINT_MAX), 5022);
    IS(made == (void *)&made && new_batch == (void *)&made);
    FAILS(cuFileRead(file, NULL, PART, 0, 0), EINVAL);
    FAILS(cuFileWrite(file, NULL, PART, 0, 0), EINVAL);
    FAILS(cuFileRead(file, (void *)-1, SIZE_MAX, LONG_MAX, LONG_MAX), 5022);
    FAILS(cuFileRead(file, text, 1, LONG_MIN, 0), 5022);
    SAYS(cuFileBatchIOSubmit(batch, 1, NULL, 0), 5022);
    SAYS(cuFileBatchIOSubmit(batch, 0, &one, 0), 5022);
    SAYS(cuFileBatchIOSubmit(batch, UINT_MAX, &one, 0), 5040);
    one.mode = INT_MIN;
    SAYS(cuFileBatchIOSubmit(batch, 1, &one, 0), 5022);
    SAYS(cuFileBatchIOGetStatus(batch, 0, NULL, &event, NULL), 5022);
    SAYS(cuFileBatchIOGetStatus(batch, 0, &count, NULL, NULL), 5022);
    SAYS(cuFileBatchIOGetStatus(batch, UINT_MAX, &count, &event, NULL), 5022);
    SAYS(cuFileReadAsync(file, NULL, &size, &zero, &zero, &done, NULL), 5022);
    SAYS(cuFileReadAsync(file, text, NULL, &zero, &zero, &done, NULL), 5022);
    SAYS(cuFileReadAsync(file, text, &size, NULL, &zero, &done, NULL), 5022);
    SAYS(cuFileWriteAsync(file, text, &size, &zero, NULL, &done, NULL), 5022);
    SAYS(cuFileWriteAsync(file, text, &size, &zero, &zero, NULL, NULL), 5022);
    SAYS(cuFileStreamRegister(NULL, UINT_MAX), 5022);
    IS(done == 77 && count == 1);

    SAYS(cuFileGetVersion(NULL), 5022);
    SAYS(cuFileDriverGetProperties(NULL), 5022);
    SAYS(cuFileDriverGetP2PFlags(INT_MIN, NULL), 5022);
    SAYS(cuFileDriverSetP2PFlags(INT_MAX, INT_MAX), 5007);
    SAYS(cuFileDriverSetPollMode(true, SIZE_MAX), 5022);
    SAYS(cuFileDriverSetMaxDirectIOSize(SIZE_MAX), 5022);
    SAYS(cuFileDriverSetMaxCacheSize(SIZE_MAX), 5022);
    SAYS(cuFileDriverSetMaxPinnedMemSize(SIZE_MAX), 5022);
    SAYS(cuFileExportPCIeTopology(NULL), 5007);
    SAYS(cuFileGetBARSizeInKB(0, NULL), 5022);
    SAYS(cuFileGetBARSizeInKB(INT_MIN, &size), 5022);
    IS(cuFileGetBARSizeInKB(INT_MAX, &size).err != 0 && size == 8);

    SAYS(cuFileGetParameterSizeT(0, NULL), 5022);
    SAYS(cuFileGetParameterSizeT(INT_MIN, &size), 5022);
    IS(cuFileSetParameterSizeT(INT_MAX, SIZE_MAX).err != 0);
    SAYS(cuFileGetParameterBool(0, NULL), 5022);
    SAYS(cuFileGetParameterBool(INT_MAX, &flag), 5022);
    IS(cuFileSetParameterBool(INT_MIN, true).err != 0);
    SAYS(cuFileGetParameterString(0, NULL, 64), 5022);
    SAYS(cuFileGetParameterString(0, text, INT_MIN), 5022);
    SAYS(cuFileGetParameterString(INT_MAX, text, 64), 5022);
    IS(cuFileSetParameterString(0, NULL).err != 0 && cuFileSetParameterString(INT_MIN, text).err != 0);
    SAYS(cuFileGetParameterMinMaxValue(9, NULL, &size), 5022);
    SAYS(cuFileGetParameterMinMaxValue(9, &size, NULL), 5022);
    SAYS(cuFileGetParameterMinMaxValue(INT_MIN, &size, &size), 5022);
    IS(cuFileSetParameterPosixPoolSlabArray(NULL, sizes, 2).err != 0 && cuFileSetParameterPosixPoolSlabArray(sizes, sizes, INT_MAX).err != 0);
    IS(cuFileSetParameterGpuBounceBufferSlabArray(sizes, NULL, 2).err != 0);
    SAYS(cuFileGetParameterPosixPoolSlabArray(sizes, NULL, 2), 5022);
    SAYS(cuFileGetParameterPosixPoolSlabArray(sizes, sizes, INT_MIN), 5022);
    SAYS(cuFileGetParameterGpuBounceBufferSlabArray(NULL, sizes, 2), 5022);
    IS(sizes[0] == 77 && sizes[1] == 77 && size == 8 && flag && !strcmp(text, "same"));

    SAYS(cuFileSetStatsLevel(INT_MIN), 5022);
    SAYS(cuFileGetStatsLevel(NULL), 5022);
    SAYS(cuFileGetStatsL1(NULL), 5022);
    SAYS(cuFileGetStatsL2(NULL), 5022);
    SAYS(cuFileGetStatsL3(NULL), 5022);
    SAYS(cuFileStatsReset(), 0);
    SAYS(cuFileStatsStart(), 5022);
    SAYS(cuFileStatsStop(), 5022);
    IS(onehop_cufile_route(NULL, NULL, SIZE_MAX) > 0 && onehop_cufile_route(NULL, text, 0) > 0);
    SAYS(cuFileGetVersion(&number), 0);
    IS(number == 1170 && cuFileUseCount() >= 0);
}

/* Host memory by a call, a batch, and an operation in a stream. */
static void host_work(CUfileHandle_t handle, CUfileBatchHandle_t own) {
    unsigned char *bytes = malloc(2 * PART);
    CUfileIOParams_t two[2] = {read_of(handle, bytes), read_of(handle, bytes + PART)};
    CUfileIOEvents_t events[2];
    unsigned count = 2;
    IS(bytes && cuFileRead(handle, bytes, PART, 5, 0) == PART && !memcmp(bytes, pattern + 5, PART));
    IS(cuFileWrite(handle, bytes, PART, 5, 0) == PART);
    SAYS(cuFileBufRegister(bytes, PART, 0), 0);
    SAYS(cuFileBufDeregister(bytes), 0);
    SAYS(cuFileBatchIOSubmit(own, 2, two, 0), 0);
    SAYS(cuFileBatchIOGetStatus(own, 2, &count, events, NULL), 0);
    IS(count == 2 && events[0].status == CUFILE_COMPLETE && events[1].status == CUFILE_COMPLETE);
    IS(!memcmp(bytes, pattern, PART) && !memcmp(bytes + PART, pattern, PART));
    free(bytes);
}

static void gpu_work(CUfileHandle_t handle, void *own_stream) {
    size_t bytes = PART;
    off_t from = 77, zero = 0;
    ssize_t done = 0;
    at memory = device_memory(0, PART);
    IS(cuFileRead(handle, (void *)memory, PART, 9, 0) == PART && is_pattern(memory, 9, PART));
    SAYS(cuFileReadAsync(handle, (void *)memory, &bytes, &from, &zero, &done, own_stream), 0);
    IS(!cuStreamSynchronize(own_stream) && done == PART && is_pattern(memory, 77, PART));
    IS(!cuMemFree_v2(memory));
}

/* Everything is created, used, destroyed, and destroyed once more. */
static void a_life(int has_gpu) {
    int fd = open_again();
    CUfileHandle_t handle = reg_file(fd);
    CUfileBatchHandle_t own;
    SAYS(cuFileDriverOpen(), 0);
    SAYS(cuFileBatchIOSetUp(&own, 4), 0);
    host_work(handle, own);
    if (has_gpu) gpu_work(handle, stream);
    cuFileHandleDeregister(handle);
    cuFileBatchIODestroy(own);
    SAYS(cuFileDriverClose_v2(), 0);
    names_nothing(handle);
    names_nothing(own);
    no_places();
    close(fd);
}

static int has_gpu(void) { return cuMemAlloc_v2 != NULL; }

static void open_all(void) {
    file = reg_file(open_again());
    SAYS(cuFileBatchIOSetUp(&batch, 4), 0);
    if (has_gpu()) {
        IS(!cuMemFree_v2(device_memory(0, PART)) && !cuStreamCreate(&stream, 0));
        SAYS(cuFileStreamRegister(stream, 0), 0);
    }
}

static void close_all(void) {
    cuFileHandleDeregister(file);
    cuFileBatchIODestroy(batch);
}

static void handles(void) {
    unsigned char bytes[64];
    names_nothing(NULL);
    open_all();
    names_nothing(NULL);
    names_nothing((void *)1);
    names_nothing((void *)-1);
    names_nothing(bytes);
    names_nothing(&names_nothing);
    a_life(has_gpu());
    /* Handles of the wrong kind. */
    CUfileIOParams_t one = read_of(batch, bytes);
    SAYS(cuFileBatchIOCancel(file), 5022);
    SAYS(cuFileBatchIOSubmit(file, 1, &one, 0), 5022);
    SAYS(cuFileBatchIOSubmit(batch, 1, &one, 0), 5027);
    FAILS(cuFileRead(batch, bytes, 8, 0, 0), 5027);
    cuFileHandleDeregister(batch);
    cuFileBatchIODestroy(file);
    host_work(file, batch);
    close_all();
}

static pthread_key_t at_end;
static __thread int rounds;

/* In the second round all other destructors of the thread have run. */
static void thread_ends(void *value) {
    if (rounds++ == 0)
        IS(pthread_setspecific(at_end, value) == 0);
    else
        a_life(has_gpu());
}
/* With the library's thread-local values, whose destructors run before. */
static void *thread_body(void *value) {
    a_life(has_gpu());
    IS(pthread_setspecific(at_end, value) == 0);
    return NULL;
}
static void threads(void) {
    pthread_t all[3];
    open_all();
    IS(pthread_key_create(&at_end, thread_ends) == 0);
    for (int i = 0; i < 3; i++) IS(pthread_create(&all[i], NULL, thread_body, &at_end) == 0);
    for (int i = 0; i < 3; i++) IS(pthread_join(all[i], NULL) == 0);
    close_all();
}

static volatile int over;
/* Keeps the library's locks busy, including its log's. */
static void *busy(void *value) {
    CUfileIOParams_t one = read_of(file, malloc(PART));
    CUfileIOEvents_t event;
    CUfileBatchHandle_t own;
    unsigned count = 1;
    while (!over) {
        SAYS(cuFileBatchIOSetUp(&own, 1), 0);
        SAYS(cuFileBatchIOSubmit(own, 1, &one, 0), 0);
        SAYS(cuFileBatchIOGetStatus(own, 1, &count, &event, NULL), 0);
        cuFileBatchIODestroy(own);
        SAYS(cuFileBatchIOCancel(own), 5022);
        IS(cuFileRead(file, one.u.batch.devPtr_base, 8, 0, 0) == 8);
    }
    free(one.u.batch.devPtr_base);
    return value;
}

/* In the child the parent's files work, its batches and streams are invalid, and no other thread holds a lock. */
static void fork_one(int i) {
    CUfileIOParams_t two[2] = {read_of(file, buffer), read_of(file, buffer + PART)};
    CUfileIOEvents_t events[2];
    unsigned count = 2;
    int status;
    SAYS(cuFileBatchIOSubmit(batch, 2, two, 0), 0);
    pid_t child = fork();
    IS(child >= 0);
    if (!child) {
        unsigned char bytes[64];
        char text[1024];
        alarm(60);
        IS(onehop_cufile_route(file, text, sizeof text) > 0 && strstr(text, "\"reads\":0") && strstr(text, "\"busy_seconds\":0.0"));
        SAYS(cuFileBatchIOGetStatus(batch, 2, &count, events, NULL), 5022);
        SAYS(cuFileBatchIOSubmit(batch, 2, two, 0), 5022);
        SAYS(cuFileBatchIOCancel(batch), 5022);
        cuFileBatchIODestroy(batch);
        if (stream) SAYS(cuFileStreamDeregister(stream), 5022);
        IS(cuFileRead(file, bytes, sizeof bytes, 3, 0) == sizeof bytes && !memcmp(bytes, pattern + 3, sizeof bytes));
        if (i % 20 == 0) {
            void *gone = batch;
            SAYS(cuFileBatchIOSetUp(&batch, 4), 0);
            names_nothing(gone);
            a_life(0);
            cuFileHandleDeregister(file);
            names_nothing(file);
        }
        _Exit(0);
    }
    IS(waitpid(child, &status, 0) == child);
    if (status) printf("child %d ended with status %d\n", i, status);
    IS(!status);
    SAYS(cuFileBatchIOGetStatus(batch, 2, &count, events, NULL), 0);
    IS(count == 2);
}

static void forks_at_end(void *value) {
    if (rounds++ == 0) {
        IS(pthread_setspecific(at_end, value) == 0);
        return;
    }
    for (int i = 0; i < 200; i++) fork_one(i);
}
/* With thread-local values of the first fork, whose destructors run before. */
static void *forking_body(void *value) {
    fork_one(1);
    IS(pthread_setspecific(at_end, value) == 0);
    return NULL;
}
static void forks(void) {
    pthread_t others[2], forking;
    IS(pthread_key_create(&at_end, forks_at_end) == 0);
    open_all();
    for (int i = 0; i < 2; i++) IS(pthread_create(&others[i], NULL, busy, NULL) == 0);
    for (int i = 0; i < 100; i++) fork_one(i);
    IS(pthread_create(&forking, NULL, forking_body, &at_end) == 0);
    IS(pthread_join(forking, NULL) == 0);
    over = 1;
    for (int i = 0; i < 2; i++) IS(pthread_join(others[i], NULL) == 0);
    a_life(has_gpu());
    close_all();
}

static void *reader(void *value) {
    unsigned char *own = buffer + (size_t)value * PART;
    CUfileIOParams_t one = read_of(file, own);
    CUfileIOEvents_t event;
    unsigned count = 1;
    int is_file = 1, is_batch = 1;
    while (is_file || is_batch) {
        ssize_t moved = cuFileRead(file, own, PART, 0, 0);
        IS(moved == PART ? is_file : moved == -1 && errno == 5027);
        is_file = moved == PART;
        int err = cuFileBatchIOSubmit(batch, 1, &one, 0).err;
        /* Others may have filled it, and the file may be deleted by now. */
        IS(err == 0 || err == 5022 || err == 5040 || err == 5027);
        is_batch = err != 5022;
        count = 1;
        err = cuFileBatchIOGetStatus(batch, 1, &count, &event, NULL).err;
        IS(err == 0 || err == 5022);
    }
    return NULL;
}
/* A file is deregistered, and a batch destroyed, while threads use them. */
static void closes(void) {
    pthread_t all[3];
    for (int round = 0; round < 20; round++) {
        open_all();
        for (size_t i = 0; i < 3; i++) IS(pthread_create(&all[i], NULL, reader, (void *)i) == 0);
        usleep(1000);
        cuFileDriverClose();
        if (round % 2) cuFileHandleDeregister(file);
        cuFileBatchIODestroy(batch);
        cuFileHandleDeregister(file);
        for (int i = 0; i < 3; i++) IS(pthread_join(all[i], NULL) == 0);
    }
}

static int at_the_end;
static void by_atexit(void) {
    host_work(file, batch);
    a_life(has_gpu());
    puts("at exit");
    fflush(stdout);
}
__attribute__((destructor)) static void by_a_destructor(void) {
    if (!at_the_end) return;
    a_life(has_gpu());
    host_work(file, batch);
    close_all();
    puts("at the end");
    fflush(stdout);
}

/* CUDA has ended by then. */
static void after_cuda(void) {
    host_work(file, batch);
    puts("after CUDA");
    fflush(stdout);
}

/* A fault within the library, to check that a tool would report it. */
static void planted(void) {
    int *volatile gone = malloc(sizeof *gone);
    free(gone);
    cuFileGetVersion(gone);
}

int main(int count, char **words) {
    const char *what = count == 2 ? words[1] : "";
    for (size_t i = 0; i < SIZE; i++) pattern[i] = (unsigned char)((i * 0x9e3779b97f4a7c15ull) >> 56);
    limit_time(240);
    original = make_file(O_RDWR);
    if (!strcmp(what, "handles")) handles();
    else if (!strcmp(what, "threads")) threads();
    else if (!strcmp(what, "forks")) forks();
    else if (!strcmp(what, "closes")) closes();
    else if (!strcmp(what, "planted")) planted();
    else if (!strcmp(what, "end")) {
        at_the_end = 1;
        IS(atexit(by_atexit) == 0);
        open_all();
    } else if (!strcmp(what, "outlives")) {
        IS(atexit(after_cuda) == 0);
        open_all();
    } else return 2;
    puts("all of it");
    return 0;
}
