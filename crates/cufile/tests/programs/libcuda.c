/* A model of CUDA's driver for two GPUs, for tests of libcufile.so.0. GPU memory has addresses that the CPU cannot access: only
 * copies reach it, and copies to unallocated memory are refused. Streams share the channels of their GPU, as on a real one: each
 * channel works in order, so that a waiting stream blocks everything after it in its channel, and a full channel blocks calls that
 * add to it. Memory is pinned and kernels are loaded when no stream of the GPU waits. Other functions are missing, as in an old
 * driver. */
#define _GNU_SOURCE
#include <sys/wait.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint64_t at;
enum { OK = 0, INVALID = 1, DEINITIALIZED = 4, NOT_READY = 600, NO_CONTEXT = 201, INVALID_HANDLE = 400, STARTED = 4096, MOST = 4096 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* A forked child finds the lock free. */
static void take(void) { pthread_mutex_lock(&lock); }
static void leave(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(take, leave, leave); }

static int contexts[2];
static __thread int *stack[16];
static __thread int depth, mode;
static volatile long copy_delay_us, copies_begun, captured_calls, until_refused, next_place;

long model(const char *what, long value) {
    if (!strcmp(what, "copies begun")) return copies_begun;
    if (!strcmp(what, "set until_refused")) { until_refused = value; return 1; }
    if (!strcmp(what, "set next_place")) { next_place = value; return 1; }
    if (strcmp(what, "set copy_delay_us")) return captured_calls;
    copy_delay_us = value;
    return 1;
}

/* GPU memory. */
struct allocation { at start; size_t bytes; char *bytes_at; int device; at id; volatile int copies, leaving; };
static struct allocation memory[MOST];
static at next_id = 1;

static struct allocation *find(at where, size_t bytes) {
    for (int i = 0; i < MOST; i++) {
        struct allocation *one = &memory[i];
        if (one->start && where >= one->start && where - one->start + bytes <= one->bytes) return one;
    }
    return NULL;
}

#define NEEDS_CONTEXT if (!depth) return NO_CONTEXT

/* Unfinished waits of streams, by GPU. */
static volatile int waiting[2];
static void wait_for_waits(void) { while (waiting[stack[depth - 1] - contexts]) usleep(20); }

/* As the real one, it ends before what the program has registered for its end earlier. */
static volatile int is_over;
static void end(void) { is_over = 1; }

static __thread int in_call;
static void wrong(const char *what) { fprintf(stderr, "the model of CUDA: %s\n", what); abort(); }
/* Neither a function that a stream calls nor a thread that a stream waits for may call CUDA. All calls of the library start here. */
int cuThreadExchangeStreamCaptureMode(int *other) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (in_call || !strcmp(name, "onehop streams")) wrong("called from where a stream waits for the end");
    if (is_over) return DEINITIALIZED;
    int before = mode;
    mode = *other;
    *other = before;
    return OK;
}

int cuInit(unsigned flags) {
    if (getenv("MODEL_ENDS") && atexit(end)) return INVALID;
    /* As the driver does if the GPU's device files are missing, to run a program that creates them. */
    pid_t child = fork();
    if (child == 0) _exit(0);
    waitpid(child, NULL, 0);
    return flags ? INVALID : OK;
}
int cuDriverGetVersion(int *version) { *version = 12080; return OK; }
int cuGetErrorName(int code, const char **name) { (void)code; *name = "CUDA_ERROR_OF_THE_MODEL"; return OK; }
int cuGetErrorString(int code, const char **text) { (void)code; *text = "the model refuses it"; return OK; }
int cuDeviceGetCount(int *count) { *count = 2; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
int cuDeviceGetName(char *name, int len, int device) { (void)device; strncpy(name, "model", len); return OK; }
int cuDeviceGetPCIBusId(char *id, int len, int device) { snprintf(id, len, "0000:0%d:00.0", device + 1); return OK; }
int cuDeviceGetUuid(unsigned char *uuid, int device) { memset(uuid, device + 1, 16); return OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = 1ul << 30; return OK; }
/* Maps host memory, and registers it. */
int cuDeviceGetAttribute(int *value, int which, int device) { (void)device; *value = which == 19 || which == 99; return OK; }

int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device]; return OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; *active = 1; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
int cuCtxPushCurrent_v2(void *context) { stack[depth++] = context; return OK; }
int cuCtxPopCurrent_v2(void **context) { NEEDS_CONTEXT; *context = stack[--depth]; return OK; }
int cuCtxSetCurrent(void *context) { depth = 0; if (context) stack[depth++] = context; return OK; }
int cuCtxGetDevice(int *device) { NEEDS_CONTEXT; *device = (int)(stack[depth - 1] - contexts); return OK; }

int cuMemAlloc_v2(at *where, size_t bytes) {
    NEEDS_CONTEXT;
    int fd = memfd_create("gpu", MFD_CLOEXEC), found = 2;
    if (fd < 0 || ftruncate(fd, bytes)) return 2;
    char *inside = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void *outside = mmap((void *)next_place, bytes, PROT_NONE, MAP_SHARED | (next_place ? MAP_FIXED : 0), fd, 0);
    next_place = 0;
    close(fd);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST && found; i++) {
        if (memory[i].start) continue;
        memory[i] = (struct allocation){(at)outside, bytes, inside, (int)(stack[depth - 1] - contexts), next_id++, 0, 0};
        found = OK;
    }
    pthread_mutex_unlock(&lock);
    *where = (at)outside;
    return found;
}
int cuMemFree_v2(at where) {
    pthread_mutex_lock(&lock);
    struct allocation *one = find(where, 1);
    if (!one || one->start != where) { pthread_mutex_unlock(&lock); return INVALID; }
    /* Like the real one, it waits for copies, and no more are started. */
    one->leaving = 1;
    while (one->copies) { pthread_mutex_unlock(&lock); usleep(20); pthread_mutex_lock(&lock); }
    munmap(one->bytes_at, one->bytes);
    munmap((void *)one->start, one->bytes);
    one->start = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}
/* For the tests: the CPU's access. */
int model_copy(at device, void *host, size_t bytes, int out) {
    pthread_mutex_lock(&lock);
    struct allocation *one = find(device, bytes);
    if (one) {
        char *inside = one->bytes_at + (device - one->start);
        if (out) memcpy(host, inside, bytes); else memcpy(inside, host, bytes);
    }
    pthread_mutex_unlock(&lock);
    return one ? OK : INVALID;
}
int cuPointerGetAttributes(unsigned count, int *which, void **out, at where) {
    pthread_mutex_lock(&lock);
    struct allocation *one = find(where, 1);
    if (one && one->leaving) one = NULL;
    for (unsigned i = 0; i < count; i++) {
        switch (which[i]) {
        case 1: *(void **)out[i] = one ? &contexts[one->device] : NULL; break;
        case 2: *(unsigned *)out[i] = one ? 2 : 0; break;
        case 7: *(at *)out[i] = one ? one->id : 0; break;
        case 8: *(unsigned char *)out[i] = 0; break;
        case 9: *(int *)out[i] = one ? one->device : -2; break;
        default: pthread_mutex_unlock(&lock); return INVALID;
        }
    }
    pthread_mutex_unlock(&lock);
    return OK;
}
/* Only CU_POINTER_ATTRIBUTE_DEVICE_POINTER is queried this way. */
int cuPointerGetAttribute(void *out, int which, at where) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    struct allocation *one = find(where, 1);
    int reached = which == 3 && one && one->device == (int)(stack[depth - 1] - contexts);
    pthread_mutex_unlock(&lock);
    if (reached) *(at *)out = where;
    return reached ? OK : INVALID;
}
int cuMemGetAddressRange_v2(at *base, size_t *bytes, at where) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    struct allocation *one = find(where, 1);
    if (one) { *base = one->start; *bytes = one->bytes; }
    pthread_mutex_unlock(&lock);
    return one ? OK : INVALID;
}
int cuPointerSetAttribute(const void *value, int which, at where) { (void)value; (void)which; (void)where; return OK; }
static struct { at start; size_t bytes; } pinned[MOST];
static int is_pinned(at where, size_t bytes) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST && !found; i++) found = pinned[i].bytes && where >= pinned[i].start && where - pinned[i].start + bytes <= pinned[i].bytes;
    pthread_mutex_unlock(&lock);
    return found;
}
int cuMemHostRegister_v2(void *where, size_t bytes, unsigned flags) {
    NEEDS_CONTEXT;
    int i = 0;
    (void)flags;
    wait_for_waits();
    pthread_mutex_lock(&lock);
    while (i < MOST && pinned[i].bytes) i++;
    if (i < MOST) { pinned[i].start = (at)where; pinned[i].bytes = bytes; }
    pthread_mutex_unlock(&lock);
    return i < MOST ? OK : 2;
}
int cuMemHostAlloc(void **where, size_t bytes, unsigned flags) {
    NEEDS_CONTEXT;
    if (posix_memalign(where, 4096, bytes)) return 2;
    memset(*where, 0, bytes);
    return cuMemHostRegister_v2(*where, bytes, flags);
}
int cuMemHostUnregister(void *where) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++) if (pinned[i].start == (at)where) pinned[i].bytes = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuMemHostGetDevicePointer_v2(at *out, void *where, unsigned flags) { NEEDS_CONTEXT; (void)flags; *out = (at)where; return OK; }

/* Streams. */
struct stream { int channel, pending, capturing, device; };
struct op { int kind; at a; void *b; size_t bytes; void (*call)(void *); struct stream *stream; struct op *next; };
enum { COPY_IN, COPY_OUT, CALL, WAIT, RECORD, PLACE, MOST_CHANNELS = 32, CHANNEL_ROOM = 1024 };
struct event { volatile long asked, over; };
/* By GPU. */
static struct channel { pthread_mutex_t lock; pthread_cond_t more; struct op *first, **last; volatile int length; } channels[2][MOST_CHANNELS];
static int streams_made[2];
static struct stream *null_streams[2];

/* The kernel: copies what its order says now, only between memory of its GPU and pinned memory. */
static void place(struct op *op) {
    if (!is_pinned(op->a, 24)) wrong("an order that is not in pinned memory");
    at *order = (at *)op->a, from = order[0], to = order[1], bytes = order[2];
    if (!bytes) return;
    int out = is_pinned(to, bytes);
    at device = out ? from : to, host = out ? to : from;
    pthread_mutex_lock(&lock);
    struct allocation *one = find(device, bytes);
    int reached = one && one->device == op->stream->device;
    pthread_mutex_unlock(&lock);
    if (!reached || !is_pinned(host, bytes) || model_copy(device, (void *)host, bytes, out)) wrong("a kernel with an illegal address");
}
static void run(struct op *op) {
    if (op->kind == COPY_IN || op->kind == COPY_OUT) {
        __atomic_fetch_add(&copies_begun, 1, __ATOMIC_SEQ_CST);
        if (copy_delay_us) usleep(copy_delay_us);
        model_copy(op->a, op->b, op->bytes, op->kind == COPY_OUT);
        pthread_mutex_lock(&lock);
        find(op->a, op->bytes)->copies--;
        pthread_mutex_unlock(&lock);
    }
    if (op->kind == CALL) {
        in_call = 1;
        op->call(op->b);
        in_call = 0;
    }
    if (op->kind == PLACE) place(op);
    if (op->kind == WAIT) {
        __atomic_fetch_add(&waiting[op->stream->device], 1, __ATOMIC_SEQ_CST);
        while ((int)(__atomic_load_n((unsigned *)op->a, __ATOMIC_ACQUIRE) - (unsigned)op->bytes) < 0) usleep(20);
        __atomic_fetch_sub(&waiting[op->stream->device], 1, __ATOMIC_SEQ_CST);
    }
    if (op->kind == RECORD) __atomic_fetch_add(&((struct event *)op->b)->over, 1, __ATOMIC_SEQ_CST);
}
/* An operation in its channel: a host function is passed to the CPU, and waited for. */
static int commands(int kind) { return kind == CALL ? 3 : 1; }
static void *work(void *argument) {
    struct channel *channel = argument;
    pthread_mutex_lock(&channel->lock);
    for (;;) {
        struct op *op = channel->first;
        if (!op) {
            pthread_cond_wait(&channel->more, &channel->lock);
            continue;
        }
        channel->first = op->next;
        if (!channel->first) channel->last = &channel->first;
        pthread_mutex_unlock(&channel->lock);
        run(op);
        __atomic_fetch_sub(&op->stream->pending, 1, __ATOMIC_SEQ_CST);
        __atomic_fetch_sub(&channel->length, commands(op->kind), __ATOMIC_SEQ_CST);
        free(op);
        pthread_mutex_lock(&channel->lock);
    }
    return NULL;
}
static int channel_count(void) {
    const char *wanted = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    int count = wanted ? atoi(wanted) : 8;
    return count < 1 ? 1 : count > MOST_CHANNELS ? MOST_CHANNELS : count;
}
/* The lock must be held. */
static struct stream *make(int device) {
    struct stream *stream = calloc(1, sizeof *stream);
    stream->device = device;
    stream->channel = streams_made[device]++ % channel_count();
    struct channel *channel = &channels[device][stream->channel];
    if (!channel->last) {
        pthread_t thread;
        pthread_mutex_init(&channel->lock, NULL);
        pthread_cond_init(&channel->more, NULL);
        channel->last = &channel->first;
        if (pthread_create(&thread, NULL, work, channel)) abort();
        pthread_detach(thread);
    }
    return stream;
}
static struct stream *of(void *handle) {
    if (handle) return handle;
    int device = depth ? (int)(stack[depth - 1] - contexts) : 0;
    pthread_mutex_lock(&lock);
    if (!null_streams[device]) null_streams[device] = make(device);
    pthread_mutex_unlock(&lock);
    return null_streams[device];
}
static int put(void *handle, struct op op) {
    struct stream *stream = of(handle);
    if (stream->capturing) { captured_calls++; return 900; }
    if (until_refused && !--until_refused) return 999;
    struct channel *channel = &channels[stream->device][stream->channel];
    struct op *copy = malloc(sizeof *copy);
    *copy = op;
    copy->next = NULL;
    copy->stream = stream;
    __atomic_fetch_add(&stream->pending, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&channel->length, __ATOMIC_SEQ_CST) >= CHANNEL_ROOM) usleep(20);
    __atomic_fetch_add(&channel->length, commands(op.kind), __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&channel->lock);
    *channel->last = copy;
    channel->last = &copy->next;
    pthread_cond_signal(&channel->more);
    pthread_mutex_unlock(&channel->lock);
    return OK;
}
int cuStreamCreate(void **stream, unsigned flags) {
    NEEDS_CONTEXT;
    (void)flags;
    pthread_mutex_lock(&lock);
    *stream = make((int)(stack[depth - 1] - contexts));
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { (void)priority; return cuStreamCreate(stream, flags); }
/* Its thread is not stopped. */
int cuStreamDestroy_v2(void *stream) { (void)stream; return OK; }
int cuStreamQuery(void *handle) { return __atomic_load_n(&of(handle)->pending, __ATOMIC_SEQ_CST) ? NOT_READY : OK; }
int cuStreamSynchronize(void *stream) { while (cuStreamQuery(stream)) usleep(20); return OK; }
int cuStreamGetCtx(void *stream, void **context) { if (!stream) NEEDS_CONTEXT; *context = &contexts[of(stream)->device]; return OK; }
int cuStreamIsCapturing(void *stream, int *status) { *status = of(stream)->capturing; return OK; }
int model_capture(void *stream, int on) { of(stream)->capturing = on; return OK; }
int cuLaunchHostFunc(void *stream, void (*call)(void *), void *argument) { return put(stream, (struct op){.kind = CALL, .call = call, .b = argument}); }
int cuStreamWaitValue32_v2(void *stream, at where, unsigned value, unsigned flags) { (void)flags; if (!is_pinned(where, 4)) return INVALID; return put(stream, (struct op){.kind = WAIT, .a = where, .bytes = value}); }
int cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) {
    NEEDS_CONTEXT;
    (void)count; (void)options; (void)values;
    wait_for_waits();
    *module = stack[depth - 1];
    return strstr(image, ".entry onehop_place(") ? OK : 218;
}
int cuModuleUnload(void *module) { (void)module; return OK; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return strcmp(name, "onehop_place") ? 500 : OK; }
int cuFuncGetAttribute(int *value, int which, void *function) { (void)function; *value = which == 0 ? 1024 : 32; return OK; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b, unsigned c, unsigned shared, void *stream, void **arguments, void **extra) {
    NEEDS_CONTEXT;
    (void)shared;
    /* The module belongs to one context, and so does the stream. */
    if (function != (void *)stack[depth - 1] || of(stream)->device != (int)(stack[depth - 1] - contexts)) return INVALID_HANDLE;
    if (!x || y != 1 || z != 1 || !threads || threads > 1024 || b != 1 || c != 1 || extra) return INVALID;
    return put(stream, (struct op){.kind = PLACE, .a = *(at *)arguments[0]});
}
int cuEventCreate(void **event, unsigned flags) { NEEDS_CONTEXT; (void)flags; *event = calloc(1, sizeof(struct event)); return OK; }
int cuEventDestroy_v2(void *event) { (void)event; return OK; }
int cuEventRecord(void *event, void *stream) { __atomic_fetch_add(&((struct event *)event)->asked, 1, __ATOMIC_SEQ_CST); return put(stream, (struct op){.kind = RECORD, .b = event}); }
int cuEventQuery(void *handle) { struct event *event = handle; return event->over < event->asked ? NOT_READY : OK; }

static int copy(int kind, at device, void *host, size_t bytes, void *stream) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    struct allocation *one = find(device, bytes);
    if (one && one->leaving) one = NULL;
    if (one) one->copies++;
    pthread_mutex_unlock(&lock);
    if (!one) return INVALID;
    return put(stream, (struct op){.kind = kind, .a = device, .b = host, .bytes = bytes});
}
int cuMemcpyHtoDAsync_v2(at to, const void *from, size_t bytes, void *stream) { return copy(COPY_IN, to, (void *)from, bytes, stream); }
int cuMemcpyDtoHAsync_v2(void *to, at from, size_t bytes, void *stream) { return copy(COPY_OUT, from, to, bytes, stream); }

/* NVIDIA's management library, by another name of this file. */
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **device) { *device = &contexts[pci[6] == '2']; return OK; }
int nvmlDeviceGetBAR1MemoryInfo(void *device, unsigned long long *bytes) { bytes[0] = device == &contexts[0] ? 128ull << 30 : 256ull << 20; return OK; }
