/* A model of CUDA's driver for two GPUs whose memory is the host's: its behaviour during captures, waits in
 * frees, and kernels that find no room. Copies end at once. Other functions are missing, as in an old driver. */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef uint64_t at;

enum { OK = 0, INVALID = 1, NOT_READY = 600, DESTROYED = 709, ALREADY_REGISTERED = 712, CAPTURE = 900, GPUS = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Set by the tests: whether a capture is open, whether another kernel runs, how many frees to refuse and how, results of
 * queries, of mapping memory, of giving its address back, and of event records after some that succeed, whether kernels find no room (1) or start and
 * do not end (2), the milliseconds that freeing takes, whether starting continues, and how far each GPU orders other devices' writes. */
static volatile long capturing, busy, refuse, refusal = CAPTURE, answer, map_answer, unreserve_answer, record_answer, records, full, slow, start_held, order_0, order_1;
/* Read by the tests: captures invalidated, calls that were not relaxed, live resources, mappings removed too early, calls
 * of the watched thread, retained contexts, whether a thread has begun to start the driver, mappings removed. */
static volatile long invalidated, unrelaxed, live, early, watched_calls, retained, starting, unmapped;
static const char *volatile watched_call = "";
static __thread int mode, watched;
/* In a forked process all threads are watched. */
static volatile int forked;
/* Threads that free something, and whether the library is being unloaded. */
static volatile int inside, unloaded;

/* The end of the process: a thread that is in the library, or calls it, crashes. */
__attribute__((destructor)) static void unload(void) {
    if (__atomic_load_n(&inside, __ATOMIC_SEQ_CST)) abort();
    __atomic_store_n(&unloaded, 1, __ATOMIC_SEQ_CST);
    usleep(2000 * slow);
}

static void enter(const char *name) {
    if (__atomic_load_n(&unloaded, __ATOMIC_SEQ_CST)) abort();
    if (mode != 2) __atomic_fetch_add(&unrelaxed, 1, __ATOMIC_SEQ_CST);
    if (watched || forked) {
        __atomic_fetch_add(&watched_calls, 1, __ATOMIC_SEQ_CST);
        watched_call = name;
    }
}

/* A call that may wait for a stream. */
static int wary(const char *name) {
    enter(name);
    if (capturing && mode != 2) {
        invalidated = 1;
        return CAPTURE;
    }
    return OK;
}

#define ENTER enter(__func__)
#define WARY                          \
    do {                              \
        int wary_ = wary(__func__);   \
        if (wary_) return wary_;      \
    } while (0)

/* A call that waits for all kernels. The context is locked meanwhile. */
static int freeing(const char *name) {
    int refused = OK, wary_ = wary(name);
    if (wary_) return wary_;
    __atomic_fetch_add(&inside, 1, __ATOMIC_SEQ_CST);
    usleep(1000 * slow);
    pthread_mutex_lock(&lock);
    if (refuse > 0) {
        refuse--;
        refused = (int)refusal;
    }
    while (!refused && busy) usleep(200);
    pthread_mutex_unlock(&lock);
    __atomic_fetch_add(&inside, -1, __ATOMIC_SEQ_CST);
    return refused;
}

/* A call that only waits for the lock. */
static void brief(void) {
    pthread_mutex_lock(&lock);
    pthread_mutex_unlock(&lock);
}

static void made(long n) { __atomic_fetch_add(&live, n, __ATOMIC_SEQ_CST); }

/* Streams are never freed, so that one may be destroyed before its work has ended. */
struct stream { volatile long pending; };
struct event { struct stream *stream; };

/* The kernels for marks, which the test executes. */
enum { MARK = 1, LEFT = 2, ARRAY = 3, QUEUE = 4, MOST = 16 };
struct launch { int kernel; at args[5]; unsigned blocks; struct stream *stream; };
static struct launch waiting[MOST];
static int waits;
static void (*kernel)(int begins, const struct launch *);

void model_kernel(void (*run)(int, const struct launch *)) { kernel = run; }

static void set_full(long value) {
    full = value;
    for (int i = 0; !full && i < waits; i++) {
        kernel(0, &waiting[i]);
        waiting[i].stream->pending--;
    }
    if (!full) waits = 0;
}

long model(const char *what, long value) {
    if (!strcmp(what, "set full")) { set_full(value); return 0; }
#define SET(name) if (!strcmp(what, "set " #name)) { name = value; return 0; }
#define GET(name) if (!strcmp(what, #name)) return name;
    SET(capturing) SET(busy) SET(refuse) SET(refusal) SET(answer) SET(map_answer) SET(watched)
    SET(unreserve_answer) SET(record_answer) SET(records) SET(slow) SET(start_held) SET(order_0) SET(order_1)
    GET(invalidated) GET(unrelaxed) GET(live) GET(early) GET(watched_calls) GET(mode) GET(refuse) GET(retained) GET(starting)
    GET(unmapped)
    abort();
}

/* Runs a function in a forked process, whose calls are watched; returns the signal that ended it, or its number of calls. */
int model_forked(void (*run)(void *), void *with) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        forked = 1;
        run(with);
        usleep(100000);
        _exit(watched_calls > 99 ? 99 : (int)watched_calls);
    }
    if (child < 0 || waitpid(child, &status, 0) != child) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

const char *model_watched_call(void) { return watched_call; }

/* Runs a function as this thread's last act: in the second round of destructors, after all others. */
static pthread_key_t last;
static void (*run_last)(void *);
static __thread int rounds;
static void at_end(void *with) {
    if (rounds++) run_last(with);
    else pthread_setspecific(last, with);
}
int model_at_thread_end(void (*run)(void *), void *with) {
    run_last = run;
    return (!last && pthread_key_create(&last, at_end)) || pthread_setspecific(last, with);
}

int cuInit(unsigned flags) { starting = 1; while (start_held) usleep(1000); return flags ? INVALID : OK; }
int cuDriverGetVersion(int *version) { *version = 12080; return OK; }
int cuGetErrorName(int code, const char **name) { (void)code; *name = "CUDA_ERROR_OF_THE_MODEL"; return OK; }
int cuGetErrorString(int code, const char **text) { (void)code; *text = "the model was asked to"; return OK; }
int cuThreadExchangeStreamCaptureMode(int *other) { int before = mode; mode = *other; *other = before; return OK; }

/* Memory by address: allocations of a GPU, and registered host memory. */
static struct { at where; size_t bytes; int device, context; } known[256];
static pthread_mutex_t knowing = PTHREAD_MUTEX_INITIALIZER;
enum { NOBODY = -1, HOST = -2 };
/* The GPUs' own contexts, and those of programs: their GPUs and identities, which are 0 if there is none. A context created
 * later reuses the slot of a destroyed one. */
enum { CONTEXTS = 8 };
static struct context { int device; at id; } contexts[CONTEXTS] = { { 0, 1 }, { 1, 2 } };
static at last_context = GPUS;
at model_make_context(int device) {
    int i = GPUS;
    while (contexts[i].id) i++;
    contexts[i].device = device;
    contexts[i].id = ++last_context;
    return (at)&contexts[i];
}
int cuCtxGetId(struct context *context, at *id) {
    ENTER;
    *id = context->id;
    return *id ? OK : DESTROYED;
}

/* The GPUs whose contexts are current on this thread, the last one last. */
static __thread int current[16], depth;

static int here(void) { return depth ? contexts[current[depth - 1]].device : NOBODY; }

/* Returns whether it could be added: host memory is registered once. */
static int note(at where, size_t bytes, int device) {
    int free_place = -1, is_new = 1;
    pthread_mutex_lock(&knowing);
    for (int i = 0; i < 256; i++) {
        if (!known[i].bytes) free_place = i;
        else if (where < known[i].where + known[i].bytes && known[i].where < where + bytes) is_new = 0;
    }
    if (is_new && free_place >= 0) {
        known[free_place].where = where;
        known[free_place].bytes = bytes;
        known[free_place].device = device;
        known[free_place].context = depth ? current[depth - 1] : NOBODY;
    }
    pthread_mutex_unlock(&knowing);
    return is_new;
}

static void forget(at where) {
    pthread_mutex_lock(&knowing);
    for (int i = 0; i < 256; i++)
        if (known[i].bytes && known[i].where == where) known[i].bytes = 0;
    pthread_mutex_unlock(&knowing);
}

/* Registrations of host memory end with their context. */
void model_destroy_context(struct context *context) {
    context->id = 0;
    pthread_mutex_lock(&knowing);
    for (int i = 0; i < 256; i++)
        if (known[i].bytes && known[i].device == HOST && known[i].context == context - contexts) {
            known[i].bytes = 0;
            made(-1);
        }
    pthread_mutex_unlock(&knowing);
}

/* The allocation that contains an address, and its owner. */
static int find(at where, at *base, size_t *bytes) {
    int device = NOBODY;
    pthread_mutex_lock(&knowing);
    for (int i = 0; i < 256; i++)
        if (known[i].bytes && where - known[i].where < known[i].bytes) {
            device = known[i].device;
            if (base) *base = known[i].where;
            if (bytes) *bytes = known[i].bytes;
        }
    pthread_mutex_unlock(&knowing);
    return device;
}

int cuDeviceGetCount(int *count) { ENTER; *count = GPUS; return OK; }
int cuDeviceGet(int *device, int ordinal) { ENTER; *device = ordinal; return ordinal < GPUS ? OK : INVALID; }
int cuDeviceGetName(char *name, int len, int device) { ENTER; (void)device; strncpy(name, "model", len); return OK; }
int cuDeviceGetPCIBusId(char *id, int len, int device) { ENTER; strncpy(id, device ? "0000:02:00.0" : "0000:01:00.0", len); return OK; }
int cuDeviceGetUuid(unsigned char *uuid, int device) { ENTER; memset(uuid, device + 1, 16); return OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { ENTER; (void)device; *bytes = 1ul << 30; return OK; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    ENTER;
    /* Maps host memory, registers it, has virtual memory and descriptors for it. */
    *value = which == 19 || which == 99 || which == 102 || which == 103;
    /* CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING */
    if (which == 118) *value = (int)(device ? order_1 : order_0);
    return OK;
}
static void retain(long n) { __atomic_fetch_add(&retained, n, __ATOMIC_SEQ_CST); made(n); }
int cuDevicePrimaryCtxRetain(void **context, int device) { WARY; *context = &contexts[device]; retain(1); return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; int r = freeing(__func__); if (!r) retain(-1); return r; }
int cuCtxPushCurrent_v2(void *context) {
    ENTER;
    if (depth == 16) return INVALID;
    /* The driver accepts a destroyed one's handle, and crashes later. */
    if (!((struct context *)context)->id) abort();
    current[depth++] = (int)((struct context *)context - contexts);
    return OK;
}
int cuCtxPopCurrent_v2(void **context) {
    ENTER;
    if (!depth) return INVALID;
    errno = ENOENT;
    *context = &contexts[current[--depth]];
    return OK;
}
int cuDeviceCanAccessPeer(int *can, int device, int peer) { ENTER; *can = device != peer; return OK; }
int cuCtxEnablePeerAccess(void *peer, unsigned flags) { WARY; (void)peer; return flags ? INVALID : OK; }
int cuMemGetInfo_v2(size_t *free_, size_t *total) { WARY; *free_ = *total = 1ul << 30; return OK; }

int cuMemAlloc_v2(at *where, size_t bytes) {
    WARY;
    void *memory;
    if (posix_memalign(&memory, 65536, bytes)) return 2;
    memset(memory, 0xa5, bytes);
    *where = (at)memory;
    note(*where, bytes, here());
    made(1);
    return OK;
}
int cuMemFree_v2(at where) {
    int r = freeing(__func__);
    if (!r) { forget(where); free((void *)where); made(-1); }
    return r;
}
int cuMemGetAddressRange_v2(at *base, size_t *bytes, at where) { ENTER; return find(where, base, bytes) == NOBODY ? INVALID : OK; }
int cuPointerGetAttribute(void *out, int which, at where) {
    ENTER;
    int device = find(where, 0, 0);
    if (device == NOBODY) return INVALID;
    switch (which) {
    case 2: *(unsigned *)out = device == HOST ? 1 : 2; return OK;
    case 9: *(int *)out = device == HOST ? 0 : device; return OK;
    default: return INVALID;
    }
}
/* A handle is the address, because there is only this process. */
struct handle { char bytes[64]; };
int cuIpcGetMemHandle(struct handle *handle, at where) { ENTER; memset(handle, 0, 64); memcpy(handle, &where, 8); return OK; }
int cuIpcOpenMemHandle_v2(at *where, struct handle handle, unsigned flags) {
    WARY;
    (void)flags;
    at base = 0;
    memcpy(where, &handle, 8);
    if (find(*where, &base, 0) < 0 || base != *where) return INVALID;
    made(1);
    return OK;
}
int cuIpcCloseMemHandle(at where) { (void)where; int r = freeing(__func__); if (!r) made(-1); return r; }
int cuPointerSetAttribute(const void *value, int which, at where) { WARY; (void)value; (void)which; (void)where; return OK; }
int cuMemGetAllocationGranularity(size_t *bytes, const void *how, int which) { ENTER; (void)how; (void)which; *bytes = 2 << 20; return OK; }
int cuMemCreate(at *handle, size_t bytes, const void *how, at flags) { WARY; (void)how; (void)flags; *handle = bytes; made(1); return OK; }
int cuMemRelease(at handle) { ENTER; (void)handle; made(-1); return OK; }
int cuMemAddressReserve(at *where, size_t bytes, size_t align, at wish, at flags) {
    ENTER;
    (void)align; (void)wish; (void)flags;
    void *memory;
    if (posix_memalign(&memory, 2 << 20, bytes)) return 2;
    *where = (at)memory;
    made(1);
    return OK;
}
int cuMemAddressFree(at where, size_t bytes) { ENTER; (void)bytes; if (unreserve_answer) return (int)unreserve_answer; free((void *)where); made(-1); return OK; }
int cuMemMap(at where, size_t bytes, size_t offset, at handle, at flags) { ENTER; (void)where; (void)bytes; (void)offset; (void)handle; (void)flags; if (map_answer) return (int)map_answer; made(1); return OK; }
int cuMemUnmap(at where, size_t bytes) {
    ENTER;
    (void)where; (void)bytes;
    if (busy || refuse > 0) early++;
    unmapped++;
    made(-1);
    return OK;
}
int cuMemSetAccess(at where, size_t bytes, const void *access, size_t count) { ENTER; (void)where; (void)bytes; (void)access; (void)count; return OK; }
int cuMemHostRegister_v2(void *where, size_t bytes, unsigned flags) { WARY; (void)flags; if (!note((at)where, bytes, HOST)) return ALREADY_REGISTERED; made(1); return OK; }
int cuMemHostUnregister(void *where) { int r = freeing(__func__); if (!r) { forget((at)where); made(-1); } return r; }
int cuMemHostGetDevicePointer_v2(at *out, void *where, unsigned flags) { ENTER; (void)flags; *out = (at)where; return OK; }

static struct stream *stream_made(void) { made(1); return calloc(1, sizeof(struct stream)); }
int cuStreamCreate(struct stream **stream, unsigned flags) { WARY; (void)flags; brief(); *stream = stream_made(); return OK; }
int cuStreamCreateWithPriority(struct stream **stream, unsigned flags, int priority) { WARY; (void)flags; (void)priority; brief(); *stream = stream_made(); return OK; }
int cuStreamDestroy_v2(struct stream *stream) { WARY; brief(); (void)stream; made(-1); return OK; }
static int queried(struct stream *stream) { return answer ? (int)answer : stream && stream->pending ? NOT_READY : OK; }
int cuStreamQuery(struct stream *stream) { WARY; return queried(stream); }
int cuEventCreate(struct event **event, unsigned flags) { WARY; (void)flags; brief(); *event = calloc(1, sizeof(struct event)); made(1); return OK; }
int cuEventDestroy_v2(struct event *event) { WARY; brief(); free(event); made(-1); return OK; }
int cuEventRecord(struct event *event, struct stream *stream) {
    WARY;
    if (record_answer && records-- <= 0) return (int)record_answer;
    event->stream = stream;
    return OK;
}
int cuEventQuery(struct event *event) { WARY; return queried(event->stream); }
int cuMemcpyHtoDAsync_v2(at to, const void *from, size_t bytes, void *stream) { WARY; (void)stream; memcpy((void *)to, from, bytes); return OK; }
int cuMemcpyDtoHAsync_v2(void *to, at from, size_t bytes, void *stream) { WARY; (void)stream; memcpy(to, (void *)from, bytes); return OK; }
int cuMemsetD8Async(at to, unsigned char value, size_t bytes, void *stream) { WARY; (void)stream; memset((void *)to, value, bytes); return OK; }

int cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) {
    WARY;
    (void)image; (void)count; (void)options; (void)values;
    *module = &lock;
    made(1);
    return OK;
}
int cuModuleUnload(void *module) { (void)module; int r = freeing(__func__); if (!r) made(-1); return r; }
int cuModuleGetFunction(at *function, void *module, const char *name) {
    ENTER;
    (void)module;
    *function = !strcmp(name, "onehop_mark")        ? MARK
                : !strcmp(name, "onehop_marks_left") ? LEFT
                : !strncmp(name, "onehop_array_", 13) ? ARRAY
                : !strncmp(name, "onehop_owner", 12) || !strncmp(name, "onehop_shared", 13)
                    || !strcmp(name, "onehop_single") ? QUEUE
                                                      : 0;
    return *function ? OK : INVALID;
}
int cuFuncGetAttribute(int *value, int which, at function) { ENTER; (void)which; (void)function; *value = 32; return OK; }
int cuLaunchKernel(at function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, struct stream *stream, void **args, void **more) {
    WARY;
    (void)y; (void)z; (void)threads; (void)ty; (void)tz; (void)shared; (void)more;
    if (function == ARRAY) return INVALID;
    struct launch launch = { (int)function, {0}, x, stream };
    /* Those of queues do nothing. */
    for (int i = 0; function != QUEUE && i < 3; i++) launch.args[i] = *(at *)args[i];
    for (int i = 3; function != QUEUE && i < (function == MARK ? 5 : 4); i++) launch.args[i] = *(uint32_t *)args[i];
    if (!full) {
        kernel(0, &launch);
        return OK;
    }
    if (waits == MOST) return INVALID;
    if (full == 2) kernel(1, &launch);
    stream->pending++;
    waiting[waits++] = launch;
    return OK;
}
