/* One thread waits for samples; meanwhile another queries, stops and closes the receiver without waiting for the first. */
#include <onehop/sdr.h>

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define IS(what) do { if (!(what)) { \
    fprintf(stderr, "line %d: not so: %s (%s)\n", __LINE__, #what, onehop_last_error()); exit(1); } } while (0)

/* A block of 64 samples takes 64 ms. Waiting for one in each call would take 3.2 s in all. */
#define CALLS 50
#define MOST_MS 1000

static onehop_sdr *sdr;

static long now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000L + now.tv_nsec / 1000000L;
}

/* Takes blocks until none comes within a minute, or the receiver is stopped; returns how many. */
static void *listen(void *unused)
{
    uintptr_t blocks = 0;
    size_t handle;
    const void *at;
    int flags, got;
    long long time;

    (void)unused;
    while ((got = onehop_sdr_acquire_read_buffer(sdr, &handle, &at, &flags, &time, 60000000L)) > 0) {
        IS(onehop_sdr_release_read_buffer(sdr, handle) == 0);
        blocks++;
    }
    IS(got == ONEHOP_SDR_TIMEOUT);
    return (void *)blocks;
}

static volatile int waiting;

/* Takes a block, waits for the next, and returns the result. */
static void *listen_once_more(void *unused)
{
    size_t handle;
    const void *at;
    int flags;
    long long time;

    (void)unused;
    IS(onehop_sdr_acquire_read_buffer(sdr, &handle, &at, &flags, &time, 60000000L) > 0);
    IS(onehop_sdr_release_read_buffer(sdr, handle) == 0);
    waiting = 1;
    return (void *)(intptr_t)onehop_sdr_acquire_read_buffer(sdr, &handle, &at, &flags, &time, 60000000L);
}

/* Closes a receiver while a thread waits for its next block, 256 ms later. Returns whether the board was stopped: none came. */
static int stops_at_close(onehop_gpu *gpu)
{
    struct timespec pause = { 0, 20000000L };
    pthread_t thread;
    void *got;

    waiting = 0;
    IS(onehop_sdr_open("sim:usdr?rate=1k", gpu, "ci16", 1024, &sdr) == 0);
    IS(onehop_sdr_activate(sdr) == 0);
    IS(pthread_create(&thread, NULL, listen_once_more, NULL) == 0);
    while (!waiting)
        nanosleep(&pause, NULL);
    nanosleep(&pause, NULL);
    onehop_sdr_close(sdr);
    IS(pthread_join(thread, &got) == 0);
    return (intptr_t)got == ONEHOP_SDR_TIMEOUT;
}

int main(void)
{
    onehop_gpu *gpu;
    uint64_t delivered, lost, gaps;
    struct timespec pause = { 0, 5000000L };
    pthread_t thread;
    void *blocks;
    long begun, spent = 0;
    int call;

    IS(onehop_gpu_open("emu", &gpu) == 0);
    IS(onehop_sdr_open("sim:usdr?rate=1k", gpu, "ci16", 256, &sdr) == 0);
    IS(onehop_sdr_activate(sdr) == 0);
    IS(pthread_create(&thread, NULL, listen, NULL) == 0);
    for (call = 0; call < CALLS; call++) {
        nanosleep(&pause, NULL);
        begun = now_ms();
        IS(onehop_sdr_counts(sdr, &delivered, &lost, &gaps) == 0);
        spent += now_ms() - begun;
    }
    if (spent > MOST_MS) {
        fprintf(stderr, "%d calls took %ld ms\n", CALLS, spent);
        return 1;
    }
    begun = now_ms();
    IS(onehop_sdr_deactivate(sdr) == 0);
    IS(pthread_join(thread, &blocks) == 0 && blocks != NULL);
    IS(now_ms() - begun < 10000);
    onehop_sdr_close(sdr);
    /* On a busy machine a block may come before the close does. */
    for (call = 0; call < 5 && !stops_at_close(gpu); call++)
        ;
    IS(call < 5);
    onehop_gpu_close(gpu);
    puts("nobody waited");
    return 0;
}
