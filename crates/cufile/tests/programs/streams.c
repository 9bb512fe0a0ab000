/* cuFile's operations in streams, with the model of CUDA's driver or with a real one. Every byte is compared. */
#define _GNU_SOURCE
#include "common.h"

#include <sys/mman.h>
#include <sys/resource.h>

enum { MIB = 1 << 20, BIG = 48 * MIB, GUARD = 4096, HELD = 16, MANY = 200, PART = 100000 };
static unsigned char *big, *seen;

struct words { size_t bytes; off_t file_offset, offset; ssize_t done; };

static int rd(CUfileHandle_t handle, at memory, struct words *words, void *stream) {
    return cuFileReadAsync(handle, (void *)memory, &words->bytes, &words->file_offset, &words->offset, &words->done, stream).err;
}
static int wr(CUfileHandle_t handle, at memory, struct words *words, void *stream) {
    return cuFileWriteAsync(handle, (void *)memory, &words->bytes, &words->file_offset, &words->offset, &words->done, stream).err;
}
static void *make_stream(void) {
    void *stream;
    MUST(!cuStreamCreate(&stream, 0));
    return stream;
}
static void use(int gpu) {
    void *context;
    MUST(!cuDevicePrimaryCtxRetain(&context, gpu % gpus()) && !cuCtxSetCurrent(context));
}
/* A separate file with these bytes, or an empty one that no other descriptor refers to. */
static int big_file(size_t bytes, int flags) {
    static int count;
    snprintf(path, sizeof path, "cufile-streams-%d-%d", getpid(), count++);
    int fd = open(path, O_CREAT | O_EXCL | O_RDWR, 0600);
    MUST(fd >= 0);
    for (size_t done = 0; done < bytes;) {
        ssize_t part = write(fd, big + done, bytes - done);
        MUST(part > 0);
        done += part;
    }
    MUST(!close(fd));
    fd = open(path, flags);
    unlink(path);
    return fd;
}
static int same(at where, size_t from, size_t bytes) {
    MUST(!bytes || !model_copy(where, seen, bytes, 1));
    return !memcmp(seen, big + from, bytes);
}

/* Words in pinned memory, for waits of the program's own. */
static volatile unsigned *gates;
static at gates_at;
static void make_gates(void) {
    enum { PORTABLE = 1, DEVICEMAP = 2 };
    void *page;
    use(0);
    MUST(!cuMemHostAlloc(&page, 4096, PORTABLE | DEVICEMAP));
    MUST(!cuMemHostGetDevicePointer_v2(&gates_at, page, 0));
    memset(page, 0, 4096);
    gates = page;
}
static void hold(void *stream, int gate) { MUST(!cuStreamWaitValue32_v2(stream, gates_at + 4 * gate, 1, 0)); }
static void let_go(int gate) { __atomic_store_n(&gates[gate], 1, __ATOMIC_SEQ_CST); }

static void late(void *argument) {
    struct words *words = argument;
    usleep(30000);
    words->bytes = 70000;
    words->file_offset = 4097;
    words->offset = 11;
}
/* Which words are read, and when. */
static void late_words(void) {
    CUfileHandle_t handle = reg(make_file(O_RDWR));
    at memory = device_memory(0, SIZE);
    void *stream = make_stream();
    struct words words = {70001, 2, 3, 99}, fixed = {5000, 100, 0, 99}, larger = {69999, 2, 3, 99};
    GIVES(cuFileStreamRegister(stream, 16), 5022);
    GIVES(cuFileStreamRegister(stream, 0), 0);
    MUST(!cuLaunchHostFunc(stream, late, &words) && !rd(handle, memory, &words, stream));
    MUST(words.done == 99 && !cuStreamSynchronize(stream) && words.done == 70000);
    MUST(is_pattern(memory + 11, 4097, 70000));
    /* The size at the call is the upper limit. */
    fill(memory, 0xee, SIZE);
    MUST(!cuLaunchHostFunc(stream, late, &larger) && !rd(handle, memory, &larger, stream));
    MUST(!cuStreamSynchronize(stream) && larger.done == -5022 && is_all(memory, 0xee, SIZE));
    MUST(rd(handle, memory, &fixed, stream) == 5044);
    GIVES(cuFileStreamRegister(stream, 15), 0);
    MUST(!cuLaunchHostFunc(stream, late, &fixed) && !rd(handle, memory, &fixed, stream));
    MUST(!cuStreamSynchronize(stream) && fixed.done == 5000 && is_pattern(memory, 100, 5000));
    GIVES(cuFileStreamDeregister(stream), 0);
    GIVES(cuFileStreamDeregister(stream), 5022);
}

/* Read, written elsewhere and read again, in order, by several streams at once. */
static void in_order(int count, int with_null) {
    static struct words all[MANY][3];
    void *many[MANY];
    at places[MANY];
    CUfileHandle_t handle = reg(make_file(O_RDWR));
    for (int i = 0; i < count; i++) {
        places[i] = device_memory(i % 2, 2 * PART);
        many[i] = i == 1 && with_null ? NULL : make_stream();
    }
    for (int i = 0; i < count; i++) {
        use(i % 2);
        for (int step = 0; step < 3; step++) all[i][step] = (struct words){PART, step ? 0 : i, step == 2 ? PART : 0, 99};
        all[i][1].file_offset = all[i][2].file_offset = (off_t)SIZE + i * PART;
        MUST(!rd(handle, places[i], &all[i][0], many[i]) && !wr(handle, places[i], &all[i][1], many[i]));
        MUST(!rd(handle, places[i], &all[i][2], many[i]));
    }
    for (int i = 0; i < count; i++) {
        use(i % 2);
        MUST(!cuStreamSynchronize(many[i]));
        for (int step = 0; step < 3; step++) MUST(all[i][step].done == PART);
        MUST(is_pattern(places[i] + PART, i, PART));
    }
}
static void order(void) { in_order(40, 1); }
static void many(void) { in_order(MANY, 0); }

/* Sizes, and offsets of memory and file without a common power of two. */
static void sizes(void) {
    static const size_t bytes[] = {0, 1, 4095, 70000, 4 * MIB, 16 * MIB + 1, 40 * MIB};
    static const off_t offsets[][2] = {{0, 0}, {0, 1}, {1, 0}, {7, 4097}, {16, 4096}, {4, 8}, {4093, 12345}};
    static const int ways[] = {O_RDWR, O_RDWR | O_DIRECT};
    at memory = device_memory(0, BIG), copy = device_memory(0, BIG);
    void *stream = make_stream();
    for (int way = 0; way < 4; way++) {
        int fd = big_file(BIG, ways[way & 1]);
        if (fd < 0) continue;
        CUfileHandle_t handle = reg(fd);
        for (size_t size = 0; size < sizeof bytes / sizeof *bytes; size++) {
            for (size_t which = 0; which < sizeof offsets / sizeof *offsets; which++) {
                size_t n = bytes[size], inside = offsets[which][0], from = offsets[which][1];
                if (n > 4 * MIB && which != (size + (size_t)way) % 7) continue;
                /* From the disk, and from the page cache. */
                if (way < 2 && n <= 4 * MIB) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
                fill(memory, 0xee, GUARD + inside + n + GUARD);
                struct words in = {n, (off_t)from, (off_t)inside, 99}, out = in, back = in;
                MUST(!rd(handle, memory + GUARD, &in, stream) && !cuStreamSynchronize(stream) && in.done == (ssize_t)n);
                MUST(same(memory + GUARD + inside, from, n) && is_all(memory, 0xee, GUARD + inside));
                MUST(is_all(memory + GUARD + inside + n, 0xee, GUARD));
                /* Written to a separate file, at the same offsets. */
                int other = big_file(0, ways[way & 1]);
                CUfileHandle_t second = reg(other);
                fill(copy, 0xdd, GUARD + inside + n + GUARD);
                MUST(!wr(second, memory + GUARD, &out, stream) && !rd(second, copy + GUARD, &back, stream));
                MUST(!cuStreamSynchronize(stream) && out.done == (ssize_t)n && back.done == (ssize_t)n);
                MUST(same(copy + GUARD + inside, from, n) && is_all(copy + GUARD + inside + n, 0xdd, GUARD));
                MUST(!n || lseek(other, 0, SEEK_END) == (off_t)(from + n));
                cuFileHandleDeregister(second);
                close(other);
            }
        }
        cuFileHandleDeregister(handle);
        close(fd);
    }
}

/* Files that end earlier: nothing is written past what was read, and the next call works normally. */
static void ends(void) {
    static const size_t lengths[] = {0, 5000, 4 * MIB, 20 * MIB + 5};
    at memory = device_memory(0, BIG);
    void *stream = make_stream();
    for (int i = 0; i < 4; i++) {
        CUfileHandle_t handle = reg(big_file(lengths[i], O_RDWR));
        struct words words = {40 * MIB, 0, 9, 99}, behind = {100, (off_t)lengths[i] + 7, 0, 99}, host = {SIZE, 0, 0, 99};
        ssize_t most = lengths[i] < SIZE ? (ssize_t)lengths[i] : SIZE;
        fill(memory, 0xee, BIG);
        MUST(!rd(handle, memory, &words, stream) && !cuStreamSynchronize(stream) && words.done == (ssize_t)lengths[i]);
        MUST(same(memory + 9, 0, lengths[i]) && is_all(memory, 0xee, 9));
        MUST(is_all(memory + 9 + lengths[i], 0xee, BIG - 9 - lengths[i]));
        MUST(!rd(handle, memory, &behind, stream) && !cuStreamSynchronize(stream) && behind.done == 0);
        MUST(!rd(handle, (at)buffer, &host, stream) && !cuStreamSynchronize(stream) && host.done == most);
        MUST(cuFileRead(handle, (void *)memory, 1, 0, 0) == (lengths[i] > 0));
        cuFileHandleDeregister(handle);
    }
}

/* A short write, as on a full disk: the next call with this file fails, once. */
static void cut(void) {
    struct rlimit before, limit = {5 * MIB, RLIM_INFINITY};
    at memory = device_memory(0, BIG);
    void *stream = make_stream();
    int fd = big_file(0, O_RDWR);
    CUfileHandle_t handle = reg(fd);
    struct words words = {16 * MIB, 0, 0, 99}, host = {SIZE, 0, 0, 99}, next = {100, 0, 0, 99};
    MUST(!model_copy(memory, big, BIG, 0) && !getrlimit(RLIMIT_FSIZE, &before) && signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    limit.rlim_max = before.rlim_max;
    MUST(!setrlimit(RLIMIT_FSIZE, &limit));
    MUST(!wr(handle, memory, &words, stream) && !cuStreamSynchronize(stream) && words.done == 5 * MIB);
    MUST(rd(handle, memory, &next, stream) == 5044 && !rd(handle, memory, &next, stream));
    MUST(!cuStreamSynchronize(stream) && next.done == 100);
    MUST(!wr(handle, (at)buffer, &host, stream) && !cuStreamSynchronize(stream) && host.done == 5 * MIB);
    MUST(cuFileRead(handle, (void *)memory, 1, 0, 0) == -1 && errno == EIO);
    MUST(cuFileRead(handle, (void *)memory, 1, 0, 0) == 1);
    MUST(!setrlimit(RLIMIT_FSIZE, &before));
    cuFileHandleDeregister(handle);
    close(fd);
}

/* An operation may go on into the next allocation of its GPU, and not into one of another GPU. */
static void beside_another_gpu(CUfileHandle_t handle, void *stream) {
    for (int gpu = 0; gpu < 2; gpu++) {
        char *room = mmap(NULL, 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        MUST(room != MAP_FAILED);
        model("set next_place", (long)room);
        at memory = device_memory(0, PAGE);
        model("set next_place", (long)room + PAGE);
        MUST(memory == (at)room && device_memory(gpu, PAGE) == memory + PAGE);
        use(0);
        struct words words = {PAGE, 0, PAGE, 99};
        MUST(!rd(handle, memory, &words, stream) && !cuStreamSynchronize(stream));
        MUST(words.done == (gpu ? -5014 : PAGE));
        MUST(!gpu || rd(handle, memory, &words, stream) == 5044);
    }
}

/* Errors are in the result, or returned by the call. */
static void errors(void) {
    CUfileHandle_t handle = reg(make_file(O_RDWR)), only = reg(make_file(O_WRONLY)), reads = reg(make_file(O_RDONLY));
    at memory = device_memory(0, SIZE);
    void *stream = make_stream();
    struct words words = {10, 0, 0, 99}, outside = {5000, 0, 2 * MIB * 100, 99}, before = {10, -1, 0, 99};
    MUST(!rd(only, memory, &words, stream) && !cuStreamSynchronize(stream) && words.done == -5019);
    MUST(!wr(reads, memory, &words, stream) && !cuStreamSynchronize(stream) && words.done == -5019);
    CUfileBatchHandle_t batch;
    CUfileIOParams_t one = {.mode = CUFILE_BATCH, .fh = only, .opcode = CUFILE_WRITE, .u.batch.devPtr_base = (void *)memory, .u.batch.size = 1};
    GIVES(cuFileBatchIOSetUp(&batch, 1), 0);
    GIVES(cuFileBatchIOSubmit(batch, 1, &one, 0), 5044);
    MUST(cuFileWrite(only, (void *)memory, 1, 0, 0) == 1);
    cuFileBatchIODestroy(batch);
    MUST(!rd(handle, memory, &before, stream) && !cuStreamSynchronize(stream) && before.done == -5022);
    MUST(rd(handle, memory, &words, stream) == 5044);
    /* Past the allocation: a kernel that accessed it would destroy the context. */
    MUST(!rd(handle, memory, &outside, stream) && !cuStreamSynchronize(stream) && outside.done == -5014);
    MUST(wr(handle, memory, &words, stream) == 5044);
    outside = (struct words){BIG, 0, 0, 99};
    MUST(!rd(handle, memory, &outside, stream) && !cuStreamSynchronize(stream) && outside.done == -5014);
    MUST(cuFileRead(handle, (void *)memory, 1, 0, 0) == -1 && errno == EIO);
    words.done = 99;
    MUST(!rd(handle, memory, &words, stream) && !cuStreamSynchronize(stream) && words.done == 10);
    MUST(rd(handle, 0, &words, stream) == 5022 && rd((void *)7, memory, &words, stream) == 5027);
    GIVES(cuFileReadAsync(handle, (void *)memory, NULL, &words.file_offset, &words.offset, &words.done, stream), 5022);
    /* Host memory needs no kernel. */
    struct words host = {SIZE, 0, 0, 99}, back = {5000, SIZE, 0, 99};
    MUST(!rd(handle, (at)buffer, &host, stream) && !wr(handle, (at)buffer, &back, stream) && !cuStreamSynchronize(stream));
    MUST(host.done == SIZE && !memcmp(buffer, pattern, SIZE) && back.done == 5000);
    struct words nowhere = {10, 0, 0, 99};
    MUST(!rd(handle, PAGE, &nowhere, stream) && !cuStreamSynchronize(stream) && nowhere.done == -EFAULT);
    MUST(rd(handle, memory, &words, stream) == 5044);
    /* Memory of another GPU than the stream's. */
    if (gpus() > 1) {
        at elsewhere = device_memory(1, SIZE);
        use(0);
        MUST(rd(handle, elsewhere, &words, stream) == 5047 && wr(handle, elsewhere, &words, stream) == 5047);
    }
    if (model("set until_refused", 0)) beside_another_gpu(handle, stream);
    /* A graph that is being captured is not affected. */
    model_capture(stream, 1);
    CUfileError_t captured = cuFileReadAsync(handle, (void *)memory, &words.bytes, &words.file_offset, &words.offset, &words.done, stream);
    MUST(captured.err == 5011 && captured.cu_err == 900 && model("captured calls", 0) == 0);
    model_capture(stream, 0);
}

/* Streams that the program itself blocks, more than the GPU has channels. Operations after the block wait for it and for nothing
 * else. */
static void waits(void) {
    CUfileHandle_t handle = reg(big_file(BIG, O_RDWR));
    at places[HELD];
    void *all[HELD];
    struct words in[HELD], out[HELD], first = {PART, 0, 0, 99};
    make_gates();
    for (int i = 0; i < HELD; i++) {
        places[i] = device_memory(0, 5 * MIB);
        all[i] = make_stream();
    }
    MUST(!rd(handle, places[0], &first, all[0]) && !cuStreamSynchronize(all[0]) && first.done == PART);
    for (int i = 0; i < HELD; i++) hold(all[i], i);
    for (int i = 0; i < HELD; i++) {
        in[i] = (struct words){4 * MIB + 12345, i * 1000, i, 99};
        out[i] = (struct words){PART, BIG + i * PART, i, 99};
        MUST(!rd(handle, places[i], &in[i], all[i]) && !wr(handle, places[i], &out[i], all[i]));
    }
    usleep(100000);
    for (int i = 0; i < HELD; i++) MUST(in[i].done == 99 && out[i].done == 99);
    for (int i = 0; i < HELD; i++) let_go(i);
    for (int i = 0; i < HELD; i++) {
        MUST(!cuStreamSynchronize(all[i]) && in[i].done == 4 * MIB + 12345 && out[i].done == PART);
        MUST(same(places[i] + i, i * 1000, 4 * MIB + 12345));
        MUST(cuFileRead(handle, seen, PART, BIG + i * PART, 0) == PART && !memcmp(seen, big + i * 1000, PART));
    }
}

/* The library has not used the GPU before, and a stream is blocked. If the driver waits for it there is an error and no hang, and
 * everything continues when the stream does. */
static void cold(void) {
    CUfileHandle_t handle = reg(big_file(BIG, O_RDWR));
    struct words words = {PART, 7, 0, 99};
    make_gates();
    at memory = device_memory(0, PART);
    void *stream = make_stream();
    hold(stream, 0);
    usleep(100000);
    int answer = rd(handle, memory, &words, stream);
    printf("the first operation behind a wait: %d\n", answer);
    MUST(answer == 5043 || (!answer && !model("set until_refused", 0)));
    let_go(0);
    if (answer) MUST(words.done == 99 && !rd(handle, memory, &words, stream));
    MUST(!cuStreamSynchronize(stream) && words.done == PART && same(memory, 7, PART));
}

/* More operations than there is pinned memory for: an error and no hang, and everything continues when the stream does. */
static void fill_up(CUfileHandle_t handle, at memory, size_t bytes, int least) {
    enum { MOST = 1000 };
    static struct words all[MOST];
    void *stream = make_stream();
    int count = 0, answer = 0;
    gates[0] = 0;
    hold(stream, 0);
    usleep(100000);
    while (count < MOST) {
        all[count] = (struct words){bytes, count * 1000, 0, 99};
        answer = rd(handle, memory, &all[count], stream);
        if (answer) break;
        count++;
    }
    printf("%d operations of %zu bytes behind a wait, then %d\n", count, bytes, answer);
    MUST(answer == 5043 && count >= least);
    for (int i = 0; i < count; i++) MUST(all[i].done == 99);
    let_go(0);
    MUST(!cuStreamSynchronize(stream));
    for (int i = 0; i < count; i++) MUST(all[i].done == (ssize_t)bytes);
    MUST(same(memory, (count - 1) * 1000, bytes));
    MUST(!rd(handle, memory, &all[count], stream) && !cuStreamSynchronize(stream) && all[count].done == (ssize_t)bytes);
}
static void full(void) {
    CUfileHandle_t handle = reg(big_file(BIG, O_RDWR));
    at memory = device_memory(0, 16 * MIB);
    void *stream = make_stream();
    struct words first = {1, 0, 0, 99};
    make_gates();
    MUST(!rd(handle, memory, &first, stream) && !cuStreamSynchronize(stream));
    fill_up(handle, memory, 16 * MIB, 10);
    fill_up(handle, memory, 4096, 100);
}

/* Calls that wait for the GPU themselves, while operations run in more streams than it has channels. */
static void beside(void) {
    CUfileHandle_t handle = reg(big_file(BIG, O_RDWR));
    at memory = device_memory(0, BIG), places[HELD];
    void *all[HELD];
    static struct words words[HELD][20];
    for (int i = 0; i < HELD; i++) {
        places[i] = device_memory(0, MIB);
        all[i] = make_stream();
    }
    for (int step = 0; step < 20; step++) {
        for (int i = 0; i < HELD; i++) {
            words[i][step] = (struct words){PART, i * 1000 + step, 0, 99};
            MUST(!rd(handle, places[i], &words[i][step], all[i]));
        }
        MUST(cuFileRead(handle, (void *)memory, 5 * MIB, step, 0) == 5 * MIB && same(memory, step, 5 * MIB));
    }
    for (int i = 0; i < HELD; i++) {
        MUST(!cuStreamSynchronize(all[i]) && same(places[i], i * 1000 + 19, PART));
        for (int step = 0; step < 20; step++) MUST(words[i][step].done == PART);
    }
}

/* The driver refuses a part of an operation: the call fails, its words stay unchanged, and nothing waits. A part of a write
 * that is longer than its slots may be in the file by then. */
static void refused(void) {
    at memory = device_memory(0, 25 * MIB);
    void *stream = make_stream();
    int parts = 0;
    if (!model("set until_refused", 0)) return;
    for (int writes = 0; writes < 2; writes++) {
        for (int part = 1;; part++) {
            int fd = make_file(O_RDWR);
            CUfileHandle_t handle = reg(fd);
            struct words words = {25 * MIB, 0, 0, 99}, again = {PART, 7, 0, 99};
            MUST(!model_copy(memory, pattern, SIZE, 0));
            model("set until_refused", part);
            CUfileError_t answer = (writes ? cuFileWriteAsync : cuFileReadAsync)(handle, (void *)memory, &words.bytes, &words.file_offset, &words.offset, &words.done, stream);
            model("set until_refused", 0);
            MUST(!cuStreamSynchronize(stream));
            if (!answer.err) break;
            printf("part %d of a %s refused: %d, %d, %ld\n", part, writes ? "write" : "read", answer.err, answer.cu_err, (long)words.done);
            MUST(answer.err == 5011 && answer.cu_err == 999 && words.done == 99);
            MUST(!rd(handle, memory, &again, stream) && !cuStreamSynchronize(stream) && again.done == PART);
            MUST(is_pattern(memory, 7, PART));
            if (part < 8) MUST(lseek(fd, 0, SEEK_END) == SIZE);
            cuFileHandleDeregister(handle);
            close(fd);
            parts++;
        }
    }
    MUST(parts > 30);
}

int main(int count, char **arguments) {
    static const struct part parts[] = {
        {"late", late_words}, {"order", order}, {"many", many}, {"sizes", sizes}, {"ends", ends},
        {"cut", cut}, {"errors", errors}, {"waits", waits}, {"cold", cold}, {"full", full},
        {"beside", beside}, {"refused", refused},
    };
    big = malloc(BIG);
    seen = malloc(BIG);
    for (size_t i = 0; i < BIG; i++) big[i] = (unsigned char)((i * 0x9e3779b97f4a7c15ull) >> 56);
    return RUN_PARTS(count, arguments, parts);
}
