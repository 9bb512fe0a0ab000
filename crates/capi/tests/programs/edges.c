/* Every function of the headers in special situations: with invalid handles, at the end of threads and of the process, in a
 * process that forks, and during a close. */
#include <onehop/sdr.h>

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* _Exit: what runs at exit must not hide a failure. */
#define IS(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: not so: %s (%s)\n", __LINE__, #what, onehop_last_error()); _Exit(1); } } while (0)
#define REFUSED(call) IS((call) == ONEHOP_ERROR_ARGUMENT && says_why())

/* At the end of a thread, its message is already freed. */
static __thread int ending;

static int says_why(void)
{
    const char *words = onehop_last_error();
    return words != NULL && (ending || *words != 0);
}

static onehop_drive *drive;
static onehop_gpu *gpu;
static onehop_lent *lent;
static onehop_sdr *sdr;

static void open_all(onehop_drive **a, onehop_gpu **b, onehop_lent **c, onehop_sdr **d)
{
    struct onehop_lend_options options;
    memset(&options, 0, sizeof options);
    options.data_bytes = 65536;
    options.writable = 1;
    IS(onehop_drive_open("sim:mem:1M", 1, a) == 0);
    IS(onehop_gpu_open("emu", b) == 0);
    IS(onehop_lend(*a, *b, &options, c) == 0);
    if (d)
        IS(onehop_sdr_open("sim:usdr?rate=10M", *b, "ci16", 8192, d) == 0);
}

/* Open handles work. */
static void work(const onehop_drive *a, const onehop_gpu *b, const onehop_lent *c, const onehop_sdr *d)
{
    unsigned char bytes[512], back[512];
    struct onehop_lent_info info;
    onehop_bytes *loaded;
    int answer = 99;
    memset(bytes, 0x5a, sizeof bytes);
    IS(onehop_data_write(c, 0, bytes, sizeof bytes) == 0);
    IS(onehop_emulated_write(c, 3, 1, 0, &answer) == 0 && answer == ONEHOP_OK);
    IS(onehop_emulated_read(c, 3, 1, 4096, &answer) == 0 && answer == ONEHOP_OK);
    IS(onehop_data_read(c, 4096, back, sizeof back) == 0 && memcmp(bytes, back, sizeof back) == 0);
    IS(onehop_drive_flush(a, 1) == 0 && onehop_lent_check(c) == 0 && onehop_lent_describe(c, &info) == 0);
    IS(onehop_load_blocks(a, b, 2, 2, NULL, &loaded, NULL) == 0 && onehop_bytes_size(loaded) == 1024);
    IS(onehop_bytes_data(loaded) != NULL && onehop_bytes_read(loaded, 512, back, sizeof back) == 0);
    IS(memcmp(bytes, back, sizeof back) == 0);
    IS(onehop_bytes_read(loaded, 0, back, SIZE_MAX) == ONEHOP_ERROR_GPU);
    IS(onehop_bytes_read(loaded, UINT64_MAX, back, 2) == ONEHOP_ERROR_GPU);
    onehop_bytes_close(loaded);
    REFUSED(onehop_bytes_read(loaded, 0, back, 1));
    if (d)
        IS(strcmp(onehop_sdr_route(d), "cpu/direct") == 0 && onehop_sdr_num_direct_access_buffers(d) > 0);
}

static void close_all(onehop_drive *a, onehop_gpu *b, onehop_lent *c, onehop_sdr *d)
{
    onehop_sdr_close(d);
    onehop_drive_close(a);
    onehop_gpu_close(b);
    IS(onehop_lent_close(c) == 0);
}

/* A handle of no drive, GPU, queue or receiver: each function returns an error, and leaves its caller's memory alone. */
static void names_nothing(void *handle)
{
    unsigned char bytes[64], same[64];
    void *made = &made, *addr = &addr;
    const void *at = &at;
    onehop_lent *new_lent;
    onehop_sdr *new_sdr;
    size_t number = 77;
    int answer = 77, flags = 77;
    long long time = 77;
    uint64_t first = 77, lost = 77, gaps = 77;
    onehop_gpu *any;
    onehop_bytes *loaded = NULL;

    memset(bytes, 0x5a, sizeof bytes);
    memset(same, 0x5a, sizeof same);
    REFUSED(onehop_drive_flush(handle, 1));
    IS(onehop_gpu_open("emu", &any) == 0);
    REFUSED(onehop_lend(handle, any, NULL, &new_lent));
    REFUSED(onehop_sdr_open("sim:usdr", handle, "ci16", 0, &new_sdr));
    REFUSED(onehop_load_blocks(handle, any, 0, 1, NULL, &loaded, NULL));
    REFUSED(onehop_load_file(handle, any, "/m", 0, UINT64_MAX, NULL, &loaded, NULL));
    IS(new_lent == NULL && new_sdr == NULL && loaded == NULL);
    onehop_gpu_close(any);

    REFUSED(onehop_drive_warnings(handle, (char *)bytes, sizeof bytes));
    IS(onehop_bytes_data(handle) == NULL && says_why() && onehop_bytes_size(handle) == 0);
    REFUSED(onehop_bytes_read(handle, 0, bytes, sizeof bytes));
    REFUSED(onehop_bytes_read(handle, UINT64_MAX, bytes, SIZE_MAX));
    IS(onehop_lent_queue(handle) == NULL && says_why() && onehop_lent_data(handle) == NULL);
    REFUSED(onehop_lent_describe(handle, (struct onehop_lent_info *)bytes));
    REFUSED(onehop_lent_check(handle));
    REFUSED(onehop_lent_stop(handle));
    REFUSED(onehop_data_read(handle, 0, bytes, sizeof bytes));
    REFUSED(onehop_data_read(handle, UINT64_MAX, bytes, SIZE_MAX));
    REFUSED(onehop_data_write(handle, 0, bytes, SIZE_MAX));
    REFUSED(onehop_emulated_read(handle, 0, 1, 0, &answer));
    REFUSED(onehop_emulated_write(handle, 0, 1, 0, &answer));

    IS(*onehop_sdr_route(handle) == 0 && onehop_sdr_num_direct_access_buffers(handle) == 0);
    REFUSED(onehop_sdr_direct_access_buffer_addrs(handle, 0, &addr));
    REFUSED(onehop_sdr_activate(handle));
    REFUSED(onehop_sdr_deactivate(handle));
    IS(onehop_sdr_acquire_read_buffer(handle, &number, &at, &flags, &time, 0) == ONEHOP_SDR_STREAM_ERROR);
    REFUSED(onehop_sdr_release_read_buffer(handle, 0));
    REFUSED(onehop_sdr_first_sample(handle, 0, &first));
    REFUSED(onehop_sdr_extents(handle, 0, (onehop_sdr_extent *)bytes, 1, &number));
    REFUSED(onehop_sdr_counts(handle, &first, &lost, &gaps));
    REFUSED(onehop_sdr_copy_out(handle, 0, 0, bytes, sizeof bytes));
    if (handle) {
        REFUSED(onehop_lent_close(handle));
        onehop_drive_close(handle);
        onehop_gpu_close(handle);
        onehop_bytes_close(handle);
        onehop_sdr_close(handle);
        IS(says_why());
    }
    IS(memcmp(bytes, same, sizeof bytes) == 0 && made == &made && addr == &addr && at == &at && number == 77);
    IS(answer == 77 && flags == 77 && time == 77 && first == 77 && lost == 77 && gaps == 77);
    IS(onehop_library_ptx() != NULL);
}

/* All four, opened, used, closed, and closed once more. */
static void a_life(void)
{
    onehop_drive *a;
    onehop_gpu *b;
    onehop_lent *c;
    onehop_sdr *d;
    open_all(&a, &b, &c, &d);
    work(a, b, c, d);
    close_all(a, b, c, d);
    names_nothing(a);
    names_nothing(b);
    names_nothing(c);
    names_nothing(d);
    REFUSED(onehop_drive_open("nothing", 0, &a));
}

/* Null pointers for results and arguments. */
static void no_places(void)
{
    onehop_bytes *loaded = NULL;
    onehop_drive *none = NULL;
    onehop_gpu *no_gpu = NULL;
    onehop_sdr *no_sdr = NULL;
    const void *at;
    size_t number;
    int flags;

    REFUSED(onehop_drive_open(NULL, 0, &none));
    REFUSED(onehop_drive_open("sim:mem:1M", 0, NULL));
    REFUSED(onehop_drive_open("\xff", 0, &none));
    REFUSED(onehop_gpu_open(NULL, &no_gpu));
    REFUSED(onehop_gpu_open("emu", NULL));
    REFUSED(onehop_lend(drive, gpu, NULL, NULL));
    REFUSED(onehop_sdr_open(NULL, gpu, "ci16", 0, &no_sdr));
    REFUSED(onehop_sdr_open("sim:usdr", gpu, NULL, 0, &no_sdr));
    REFUSED(onehop_sdr_open("sim:usdr", gpu, "ci16", 0, NULL));
    IS(none == NULL && no_gpu == NULL && no_sdr == NULL);
    REFUSED(onehop_drive_warnings(drive, NULL, SIZE_MAX));
    REFUSED(onehop_drive_warnings(drive, (char *)&number, 0));
    REFUSED(onehop_lent_describe(lent, NULL));
    REFUSED(onehop_data_read(lent, 0, NULL, 1));
    REFUSED(onehop_data_write(lent, 0, NULL, 1));
    REFUSED(onehop_emulated_read(lent, 0, 1, 0, NULL));
    REFUSED(onehop_emulated_write(lent, 0, 1, 0, NULL));
    REFUSED(onehop_load_blocks(drive, gpu, 0, 1, NULL, NULL, NULL));
    REFUSED(onehop_load_blocks(drive, gpu, 0, 0, NULL, &loaded, NULL));
    IS(onehop_load_blocks(drive, gpu, UINT64_MAX, UINT64_MAX, NULL, &loaded, NULL) != 0 && says_why());
    REFUSED(onehop_load_blocks(drive, (onehop_gpu *)lent, 0, 1, NULL, &loaded, NULL));
    REFUSED(onehop_load_file(drive, gpu, NULL, 0, 0, NULL, &loaded, NULL));
    IS(loaded == NULL);
    REFUSED(onehop_sdr_direct_access_buffer_addrs(sdr, 0, NULL));
    IS(onehop_sdr_acquire_read_buffer(sdr, &number, &at, &flags, NULL, 0) == ONEHOP_SDR_STREAM_ERROR && says_why());
    REFUSED(onehop_sdr_copy_out(sdr, 0, 0, NULL, 1));
    REFUSED(onehop_sdr_counts(sdr, NULL, NULL, NULL));
}

static void handles(void)
{
    unsigned char bytes[64], same[64];
    struct onehop_lend_options options;
    onehop_lent *other = NULL;
    onehop_sdr *none = NULL;
    const void *at;
    size_t number;
    long long time;
    int flags, got;

    names_nothing(NULL);
    names_nothing((void *)1);
    names_nothing((void *)-1);
    names_nothing(bytes);
    names_nothing(&names_nothing);
    a_life();

    /* Handles of the wrong kind. */
    open_all(&drive, &gpu, &lent, &sdr);
    REFUSED(onehop_drive_flush((onehop_drive *)gpu, 1));
    REFUSED(onehop_lend((onehop_drive *)lent, gpu, NULL, &other));
    REFUSED(onehop_lend(drive, (onehop_gpu *)drive, NULL, &other));
    REFUSED(onehop_sdr_open("sim:usdr", (onehop_gpu *)sdr, "ci16", 0, &none));
    REFUSED(onehop_lent_check((onehop_lent *)drive));
    REFUSED(onehop_lent_close((onehop_lent *)sdr));
    REFUSED(onehop_sdr_activate((onehop_sdr *)lent));
    onehop_drive_close((onehop_drive *)gpu);
    onehop_gpu_close((onehop_gpu *)lent);
    onehop_sdr_close((onehop_sdr *)drive);
    work(drive, gpu, lent, sdr);
    no_places();

    /* Huge. */
    memset(bytes, 0x5a, sizeof bytes);
    memset(same, 0x5a, sizeof same);
    IS(onehop_data_read(lent, 0, bytes, SIZE_MAX) == ONEHOP_ERROR_GPU);
    IS(onehop_data_read(lent, 65536, bytes, 1) == ONEHOP_ERROR_GPU);
    IS(onehop_data_read(lent, UINT64_MAX, bytes, 2) == ONEHOP_ERROR_GPU);
    IS(onehop_data_write(lent, 0, bytes, SIZE_MAX) == ONEHOP_ERROR_GPU);
    REFUSED(onehop_sdr_copy_out(sdr, 0, SIZE_MAX, bytes, 2));
    REFUSED(onehop_sdr_copy_out(sdr, 0, 0, bytes, SIZE_MAX));
    REFUSED(onehop_sdr_copy_out(sdr, SIZE_MAX, 0, bytes, 1));
    REFUSED(onehop_sdr_release_read_buffer(sdr, SIZE_MAX));
    REFUSED(onehop_sdr_first_sample(sdr, SIZE_MAX, (uint64_t *)bytes));
    REFUSED(onehop_sdr_extents(sdr, SIZE_MAX, (onehop_sdr_extent *)bytes, 1, &number));
    IS(memcmp(bytes, same, sizeof bytes) == 0);
    memset(&options, 0xff, sizeof options);
    options.placement = ONEHOP_TIER3;
    options.nsid = 1;
    got = onehop_lend(drive, gpu, &options, &other);
    IS(got != 0 && got != ONEHOP_ERROR_DEFECT && other == NULL);
    options.data_bytes = 65536;
    IS(onehop_lend(drive, gpu, &options, &other) == 0 && onehop_lent_close(other) == 0);
    /* The board's maximum. */
    IS(onehop_sdr_open("sim:usdr", gpu, "ci16", UINT_MAX, &none) == 0);
    onehop_sdr_close(none);
    IS(onehop_sdr_acquire_read_buffer(sdr, &number, &at, &flags, &time, LONG_MIN) == ONEHOP_SDR_TIMEOUT);
    IS(onehop_sdr_activate(sdr) == 0);
    IS(onehop_sdr_acquire_read_buffer(sdr, &number, &at, &flags, &time, LONG_MAX) > 0);
    close_all(drive, gpu, lent, sdr);
}

static pthread_key_t at_end;

static __thread int rounds;

/* In the second round all other destructors of the thread have run. */
static void thread_ends(void *value)
{
    if (rounds++ == 0) {
        IS(pthread_setspecific(at_end, value) == 0);
        return;
    }
    ending = 1;
    a_life();
}

/* With the library's thread-local values, whose destructors run before. */
static void *thread_body(void *value)
{
    a_life();
    REFUSED(onehop_drive_open("nothing", 0, &drive));
    IS(pthread_setspecific(at_end, value) == 0);
    return NULL;
}

static void threads(void)
{
    pthread_t all[3];
    int i;
    IS(pthread_key_create(&at_end, thread_ends) == 0);
    for (i = 0; i < 3; i++)
        IS(pthread_create(&all[i], NULL, thread_body, &at_end) == 0);
    for (i = 0; i < 3; i++)
        IS(pthread_join(all[i], NULL) == 0);
}

static volatile int over;

/* Keeps the library's locks busy. */
static void *busy(void *value)
{
    onehop_gpu *one;
    while (!over) {
        IS(onehop_gpu_open("emu", &one) == 0);
        onehop_gpu_close(one);
        REFUSED(onehop_drive_flush((onehop_drive *)one, 1));
    }
    return value;
}

/* The same at the end of a thread. */
static void ends_busily(void *value)
{
    onehop_gpu *one;
    (void)value;
    ending = 1;
    IS(onehop_gpu_open("emu", &one) == 0);
    onehop_gpu_close(one);
}

static pthread_key_t busy_end;

static void *short_lived(void *value)
{
    IS(pthread_setspecific(busy_end, &busy_end) == 0);
    return value;
}

static void *starts_threads(void *value)
{
    pthread_t one;
    while (!over) {
        IS(pthread_create(&one, NULL, short_lived, NULL) == 0);
        IS(pthread_join(one, NULL) == 0);
    }
    return value;
}

/* In the child the parent's handles are invalid, and no other thread holds a lock. */
static void fork_one(int i)
{
    int status;
    pid_t child = fork();
    IS(child >= 0);
    if (child == 0) {
        onehop_gpu *one;
        alarm(60);
        REFUSED(onehop_drive_flush(drive, 1));
        REFUSED(onehop_lent_check(lent));
        REFUSED(onehop_sdr_activate(sdr));
        IS(onehop_gpu_open("emu", &one) == 0 && (void *)one != (void *)gpu);
        onehop_gpu_close(one);
        if (i % 20 == 0) {
            names_nothing(drive);
            names_nothing(gpu);
            names_nothing(lent);
            names_nothing(sdr);
            a_life();
        }
        _Exit(0);
    }
    IS(waitpid(child, &status, 0) == child);
    if (status != 0)
        fprintf(stderr, "child %d ended with status %d\n", i, status);
    IS(status == 0);
}

static void forks_at_end(void *value)
{
    int i;
    if (rounds++ == 0) {
        IS(pthread_setspecific(at_end, value) == 0);
        return;
    }
    ending = 1;
    for (i = 0; i < 200; i++)
        fork_one(i);
}

/* With thread-local values of the first fork, whose destructors run before. */
static void *forking_body(void *value)
{
    fork_one(0);
    IS(pthread_setspecific(at_end, value) == 0);
    return NULL;
}

static void forks(void)
{
    pthread_t others[3], forking;
    int i;
    IS(pthread_key_create(&at_end, forks_at_end) == 0 && pthread_key_create(&busy_end, ends_busily) == 0);
    open_all(&drive, &gpu, &lent, &sdr);
    for (i = 0; i < 3; i++)
        IS(pthread_create(&others[i], NULL, i < 2 ? busy : starts_threads, NULL) == 0);
    for (i = 0; i < 200; i++)
        fork_one(i);
    IS(pthread_create(&forking, NULL, forking_body, &at_end) == 0);
    IS(pthread_join(forking, NULL) == 0);
    over = 1;
    for (i = 0; i < 3; i++)
        IS(pthread_join(others[i], NULL) == 0);
    work(drive, gpu, lent, sdr);
    close_all(drive, gpu, lent, sdr);
}

static void *reader(void *value)
{
    const onehop_lent *mine = value;
    struct onehop_lent_info info;
    int got, answer;
    do {
        got = onehop_emulated_read(mine, 0, 1, 0, &answer);
        IS(got == ONEHOP_ERROR_ARGUMENT || (got == 0 && (answer == ONEHOP_OK || answer == ONEHOP_STOPPED)));
        if (got == 0)
            got = onehop_lent_describe(mine, &info);
    } while (got == 0);
    IS(got == ONEHOP_ERROR_ARGUMENT);
    return NULL;
}

static void *loader(void *value)
{
    onehop_bytes *loaded;
    int got;
    while ((got = onehop_load_blocks(drive, gpu, 0, 8, NULL, &loaded, NULL)) == 0) {
        IS(onehop_bytes_size(loaded) == 4096);
        onehop_bytes_close(loaded);
    }
    IS(got == ONEHOP_ERROR_ARGUMENT && says_why());
    return value;
}

static void *receiver(void *value)
{
    const onehop_sdr *mine = value;
    const void *at;
    size_t number;
    long long time;
    int flags, got;
    do {
        got = onehop_sdr_acquire_read_buffer(mine, &number, &at, &flags, &time, LONG_MAX);
        if (got > 0) {
            got = onehop_sdr_release_read_buffer(mine, number);
            IS(got == 0 || got == ONEHOP_ERROR_ARGUMENT);
        }
    } while (got != ONEHOP_ERROR_ARGUMENT && got != ONEHOP_SDR_STREAM_ERROR);
    IS(onehop_sdr_num_direct_access_buffers(mine) == 0);
    return NULL;
}

/* Everything is closed while threads use it. */
static void closes(void)
{
    pthread_t all[5];
    int i, round, has_sdr;
    for (round = 0; round < 20; round++) {
        has_sdr = round % 5 == 0;
        open_all(&drive, &gpu, &lent, has_sdr ? &sdr : NULL);
        for (i = 0; i < 3; i++)
            IS(pthread_create(&all[i], NULL, reader, lent) == 0);
        IS(pthread_create(&all[3], NULL, loader, NULL) == 0);
        if (has_sdr) {
            IS(onehop_sdr_activate(sdr) == 0);
            IS(pthread_create(&all[4], NULL, receiver, sdr) == 0);
        }
        usleep(1000 * round);
        if (has_sdr)
            onehop_sdr_close(sdr);
        onehop_drive_close(drive);
        onehop_gpu_close(gpu);
        IS(onehop_lent_close(lent) == 0);
        for (i = 0; i < (has_sdr ? 5 : 4); i++)
            IS(pthread_join(all[i], NULL) == 0);
    }
}

static int at_the_end;

static void by_atexit(void)
{
    ending = 1;
    work(drive, gpu, lent, sdr);
    a_life();
    puts("at exit");
    fflush(stdout);
}

__attribute__((destructor)) static void by_a_destructor(void)
{
    if (!at_the_end)
        return;
    a_life();
    work(drive, gpu, lent, sdr);
    close_all(drive, gpu, lent, sdr);
    puts("at the end");
    fflush(stdout);
}

int main(int count, char **words)
{
    const char *what = count > 1 ? words[1] : "";
    alarm(240);
    if (strcmp(what, "handles") == 0)
        handles();
    else if (strcmp(what, "threads") == 0)
        threads();
    else if (strcmp(what, "forks") == 0)
        forks();
    else if (strcmp(what, "closes") == 0)
        closes();
    else if (strcmp(what, "end") == 0) {
        at_the_end = 1;
        IS(atexit(by_atexit) == 0);
        open_all(&drive, &gpu, &lent, &sdr);
    } else
        return 2;
    puts("all of it");
    return 0;
}
