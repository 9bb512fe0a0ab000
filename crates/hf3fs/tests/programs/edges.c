/* Every function of the headers in edge cases: with structures that were destroyed, copied or never filled in, at the
 * end of threads and of the process, and in a process that forks: edges WHAT MOUNT FILE. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/api/hf3fs_usrbio.h"
#include "lib/api/hf3fs_usrbio_gdr.h"

/* _Exit, because exit handlers must not hide a failure. */
#define IS(what) do { if (!(what)) { \
    fprintf(stderr, "%d: line %d: not so: %s\n", (int)getpid(), __LINE__, #what); _Exit(1); } } while (0)

static const char *mount, *path;
static struct hf3fs_iov host, gpu;
static struct hf3fs_ior ring;
static int file;

static void open_all(struct hf3fs_iov *a, struct hf3fs_iov *b, struct hf3fs_ior *c)
{
    IS(hf3fs_iovcreate(a, mount, 8192, 0, -1) == 0);
    IS(hf3fs_iovcreate_gpu(b, mount, 8192, 0, 0) == 0);
    IS(hf3fs_iorcreate(c, mount, 8, true, 0, -1) == 0);
}

static int64_t read_into(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov)
{
    struct hf3fs_cqe cqe;
    int index = hf3fs_prep_io(ior, iov, true, iov->base, file, 0, 4096, NULL);
    if (index < 0)
        return index;
    IS(hf3fs_submit_ios(ior) == 0 && hf3fs_wait_for_ios(ior, &cqe, 1, 1, NULL) == 1);
    return cqe.result;
}

static void work(const struct hf3fs_iov *a, const struct hf3fs_iov *b, const struct hf3fs_ior *c)
{
    unsigned char bytes[4096], back[4096];
    IS(pread(file, bytes, sizeof bytes, 0) == 4096);
    memset(a->base, 0, 4096);
    IS(read_into(c, a) == 4096 && memcmp(a->base, bytes, 4096) == 0);
    IS(onehop_iov_write(b, 0, "none of the file", 16) == 0);
    IS(read_into(c, b) == 4096 && onehop_iov_read(b, 0, back, 4096) == 0 && memcmp(back, bytes, 4096) == 0);
}

static void close_all(struct hf3fs_iov *a, struct hf3fs_iov *b, struct hf3fs_ior *c)
{
    hf3fs_iordestroy(c);
    hf3fs_iovdestroy_gpu(b);
    hf3fs_iovdestroy(a);
}

/* Structures with invalid handles, or with handles of another kind: every function returns an error. */
static void expect_errors(struct hf3fs_iov iov, struct hf3fs_ior ior)
{
    unsigned char bytes[64], same[64];
    struct hf3fs_cqe cqe;
    hf3fs_gpu_ipc_handle_t handle;
    struct hf3fs_iov iov_copy = iov;
    struct hf3fs_ior ior_copy = ior;

    memset(bytes, 0x5a, sizeof bytes);
    memset(same, 0x5a, sizeof same);
    IS(hf3fs_prep_io(&ior, &iov, true, iov.base, file, 0, 1, NULL) == -EINVAL);
    IS(hf3fs_submit_ios(&ior) == -EINVAL);
    IS(hf3fs_wait_for_ios(&ior, &cqe, 1, 1, NULL) == -EINVAL);
    iov.numa = -0x6472;
    IS(!hf3fs_iov_is_gpu(&iov) && hf3fs_iov_gpu_device(&iov) == -1 && hf3fs_iov_device_id(&iov) == -1);
    IS(hf3fs_iov_mem_type(&iov) == HF3FS_MEM_HOST);
    IS(hf3fs_iovsync_gpu(&iov, 0) == -EINVAL && hf3fs_iovsync(&iov, 0) == -EINVAL);
    IS(hf3fs_iov_export_gpu(&iov, &handle) == -EINVAL);
    IS(onehop_iov_read(&iov, 0, bytes, sizeof bytes) == -EINVAL);
    IS(onehop_iov_read(&iov, 0, bytes, SIZE_MAX) == -EINVAL);
    IS(onehop_iov_write(&iov, 0, bytes, SIZE_MAX) == -EINVAL);
    IS(memcmp(bytes, same, sizeof bytes) == 0);
    hf3fs_iovunlink(&iov);
    hf3fs_iovunlink_gpu(&iov);
    hf3fs_iovdestroy(&iov);
    hf3fs_iovdestroy_gpu(&iov_copy);
    hf3fs_iordestroy(&ior);
    hf3fs_iordestroy(&ior_copy);
    IS(iov.iovh == NULL && ior.iorh == NULL);
}

/* Null pointers, invalid buffers and mounts, and invalid descriptors: every other function returns an error, too. */
static void expect_other_errors(void)
{
    struct hf3fs_iov iov, same_iov;
    struct hf3fs_ior ior, same_ior;
    hf3fs_gpu_ipc_handle_t none;
    uint8_t id[16];
    char where[4096];
    void *at = NULL;

    memset(id, 0x5a, sizeof id);
    memset(&none, 0x5a, sizeof none);
    memset(&iov, 0x5a, sizeof iov);
    memset(&ior, 0x5a, sizeof ior);
    same_iov = iov;
    same_ior = ior;
    IS(hf3fs_is_hf3fs(file) && !hf3fs_is_hf3fs(-1) && !hf3fs_is_hf3fs(INT32_MAX) && !hf3fs_is_hf3fs(0));
    IS(hf3fs_extract_mount_point(where, sizeof where, path) == (int)strlen(mount) + 1 && strcmp(where, mount) == 0);
    IS(hf3fs_extract_mount_point(NULL, 0, path) == (int)strlen(mount) + 1);
    IS(hf3fs_extract_mount_point(where, sizeof where, NULL) < 0);
    IS(hf3fs_hardlink(NULL, NULL) == EINVAL && hf3fs_hardlink(path, NULL) == EINVAL && hf3fs_hardlink("", "") != 0);
    IS(hf3fs_gdr_available() && hf3fs_gdr_device_count() == 1);

    IS(hf3fs_ior_size(INT32_MIN) == 0 && hf3fs_ior_size(8) > 0 && hf3fs_ior_size(INT32_MAX) > hf3fs_ior_size(8));
    IS(hf3fs_io_entries(NULL) == -EINVAL);
    IS(hf3fs_iorcreate2(NULL, mount, 8, true, 0, 0, -1) == -EINVAL && hf3fs_iorcreate2(&ior, NULL, 8, true, 0, 0, -1) < 0);
    IS(hf3fs_iorcreate3(NULL, mount, 8, true, 0, 0, 0, -1) == -EINVAL && hf3fs_iorcreate3(&ior, "/", 8, true, 0, 0, 0, -1) < 0);
    IS(hf3fs_iorcreate4(NULL, mount, 8, true, 0, 0, -1, 0) == -EINVAL && hf3fs_iorcreate4(&ior, mount, -1, true, 0, 0, -1, 0) < 0);

    IS(hf3fs_iovopen(NULL, id, mount, 4096, 0, -1) == -EINVAL && hf3fs_iovopen(&iov, NULL, mount, 4096, 0, -1) == -EINVAL);
    IS(hf3fs_iovopen(&iov, id, mount, 4096, 0, -1) < 0);
    IS(hf3fs_iovwrap(NULL, where, id, mount, 4096, 0, -1) == -EINVAL);
    IS(hf3fs_iovwrap(&iov, where, NULL, mount, 4096, 0, -1) == -EINVAL && hf3fs_iovwrap(&iov, where, id, NULL, 4096, 0, -1) < 0);
    IS(hf3fs_iovopen_gpu(NULL, id, mount, 4096, 0, 0) == -EINVAL && hf3fs_iovopen_gpu(&iov, id, mount, 4096, 0, 0) < 0);
    IS(hf3fs_iovopen_device(&iov, NULL, mount, 4096, 0, 0) < 0 && hf3fs_iovopen_device(&iov, id, mount, 4096, 0, 7) < 0);
    IS(hf3fs_iovwrap_gpu(NULL, where, id, mount, 4096, 0, 0) == -EINVAL);
    IS(hf3fs_iovwrap_gpu(&iov, where, id, mount, 4096, 0, 0) < 0 && hf3fs_iovwrap_device(&iov, where, id, mount, 4096, 0, 0) < 0);
    IS(hf3fs_iovcreate_device(NULL, mount, 4096, 0, 0) < 0 && hf3fs_iovcreate_device(&iov, mount, 4096, 0, 7) < 0);
    IS(hf3fs_iov_import_gpu(&iov, NULL, mount) == -EINVAL && hf3fs_iov_import_gpu(&iov, &none, mount) == -EINVAL);
    IS(hf3fs_iov_import_gpu(NULL, &none, mount) == -EINVAL);

    IS(onehop_emulated_free(NULL) == -EINVAL && onehop_emulated_free(where) == -EINVAL);
    IS(onehop_emulated_alloc(&at, 4096) == 0 && onehop_emulated_free(at) == 0 && onehop_emulated_free(at) == -EINVAL);
    IS(memcmp(&iov, &same_iov, sizeof iov) == 0 && memcmp(&ior, &same_ior, sizeof ior) == 0);
}

static void use_all(void)
{
    struct hf3fs_iov a, b;
    struct hf3fs_ior c;
    open_all(&a, &b, &c);
    work(&a, &b, &c);
    struct hf3fs_iov old_a = a, old_b = b;
    struct hf3fs_ior old_c = c;
    close_all(&a, &b, &c);
    expect_errors(old_a, old_c);
    expect_errors(old_b, old_c);
    expect_other_errors();
}

static void handles(void)
{
    unsigned char bytes[64], same[64];
    struct hf3fs_iov iov;
    struct hf3fs_ior ior;
    unsigned patterns[] = {0, 1, 0x5a, 0xff};
    use_all();
    open_all(&host, &gpu, &ring);
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        memset(&iov, patterns[i], sizeof iov);
        memset(&ior, patterns[i], sizeof ior);
        expect_errors(iov, ior);
    }
    /* Handles of another kind, and pointers to the program's memory. */
    iov = host;
    ior = ring;
    iov.iovh = ring.iorh;
    ior.iorh = gpu.iovh;
    expect_errors(iov, ior);
    iov.iovh = bytes;
    ior.iorh = &ring;
    expect_errors(iov, ior);

    /* Extreme sizes. */
    memset(bytes, 0x5a, sizeof bytes);
    memset(same, 0x5a, sizeof same);
    IS(onehop_iov_read(&gpu, 0, bytes, SIZE_MAX) == -EINVAL);
    IS(onehop_iov_read(&gpu, SIZE_MAX, bytes, 2) == -EINVAL);
    IS(onehop_iov_read(&gpu, 8192, bytes, 1) == -EINVAL);
    IS(onehop_iov_write(&gpu, 1, bytes, SIZE_MAX) == -EINVAL);
    IS(memcmp(bytes, same, sizeof bytes) == 0);
    IS(hf3fs_iovcreate(&iov, mount, SIZE_MAX, 0, -1) < 0);
    IS(hf3fs_iovcreate_gpu(&iov, mount, SIZE_MAX, 0, 0) < 0);
    IS(hf3fs_iorcreate(&ior, mount, INT32_MAX, true, 0, -1) < 0);
    IS(hf3fs_iorcreate(&ior, mount, INT32_MIN, true, INT32_MIN, INT32_MIN) < 0);
    IS(onehop_emulated_alloc((void **)bytes, SIZE_MAX) < 0);
    IS(hf3fs_reg_fd(INT32_MIN, UINT64_MAX) == EBADF);
    hf3fs_dereg_fd(INT32_MIN);
    IS(hf3fs_punchhole(file, INT32_MAX, NULL, NULL, 0) == EINVAL);
    work(&host, &gpu, &ring);
    close_all(&host, &gpu, &ring);
}

static pthread_key_t at_end;

static __thread int rounds;

/* In the second round, all other destructors of the thread have run. */
static void thread_ends(void *value)
{
    if (rounds++ == 0)
        IS(pthread_setspecific(at_end, value) == 0);
    else
        use_all();
}

/* The library has thread-local values by then, whose destructors run first. */
static void *thread_body(void *value)
{
    IS(hf3fs_submit_ios(NULL) == -EINVAL);
    use_all();
    IS(pthread_setspecific(at_end, value) == 0);
    return NULL;
}

static void threads(void)
{
    pthread_t all[3];
    IS(pthread_key_create(&at_end, thread_ends) == 0);
    for (int i = 0; i < 3; i++)
        IS(pthread_create(&all[i], NULL, thread_body, &at_end) == 0);
    for (int i = 0; i < 3; i++)
        IS(pthread_join(all[i], NULL) == 0);
}

static volatile int over;

/* Uses the library's locks continuously. */
static void *busy(void *value)
{
    struct hf3fs_iov iov;
    while (!over) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        IS(hf3fs_reg_fd(fd, 0) < 0);
        hf3fs_dereg_fd(fd);
        close(fd);
        IS(hf3fs_iovcreate_gpu(&iov, mount, 4096, 0, 0) == 0);
        hf3fs_iovdestroy(&iov);
        IS(hf3fs_submit_ios(NULL) == -EINVAL);
        for (int i = 0; i < 8; i++) {
            void *at;
            IS(onehop_emulated_alloc(&at, 1 << 20) == 0 && onehop_emulated_free(at) == 0);
        }
    }
    return value;
}

/* A ring that a thread uses continuously. Results are ignored, because children use it, too. */
static struct hf3fs_ior always;

static void use_always(void)
{
    struct hf3fs_cqe done;
    struct timespec past = { 0, 0 };
    hf3fs_prep_io(&always, &host, true, host.base, file, 0, 4096, NULL);
    hf3fs_wait_for_ios(&always, &done, 1, 1, &past);
}

static void *busy_with_a_ring(void *value)
{
    while (!over)
        use_always();
    return value;
}

/* A worker uses what its parent created, and finds no lock held by another thread. */
static void fork_one(int i)
{
    int status;
    pid_t child = fork();
    IS(child >= 0);
    if (child == 0) {
        void *at;
        alarm(60);
        int fd = open(path, O_RDONLY);
        IS(hf3fs_reg_fd(fd, 0) < 0);
        hf3fs_dereg_fd(fd);
        IS(onehop_emulated_alloc(&at, 4096) == 0 && onehop_emulated_free(at) == 0);
        IS(hf3fs_iov_is_gpu(&gpu) && read_into(&ring, &host) == 4096 && read_into(&ring, &gpu) == 4096);
        use_always();
        /* Logs an error. */
        IS(hf3fs_submit_ios(NULL) == -EINVAL);
        if (i % 20 == 0)
            use_all();
        _Exit(0);
    }
    IS(waitpid(child, &status, 0) == child);
    if (status != 0)
        fprintf(stderr, "child %d ended with status %d\n", i, status);
    IS(status == 0);
}

static void forks_at_end(void *value)
{
    if (rounds++ == 0) {
        IS(pthread_setspecific(at_end, value) == 0);
        return;
    }
    for (int i = 0; i < 200; i++)
        fork_one(i);
}

/* The first fork has left thread-local values, whose destructors run first. */
static void *forking_body(void *value)
{
    fork_one(0);
    IS(pthread_setspecific(at_end, value) == 0);
    return NULL;
}

static void forks(void)
{
    pthread_t others[3], forking;
    IS(pthread_key_create(&at_end, forks_at_end) == 0);
    open_all(&host, &gpu, &ring);
    work(&host, &gpu, &ring);
    IS(hf3fs_iorcreate(&always, mount, 8, true, 0, -1) == 0);
    for (int i = 0; i < 3; i++)
        IS(pthread_create(&others[i], NULL, i < 2 ? busy : busy_with_a_ring, NULL) == 0);
    for (int i = 0; i < 200; i++)
        fork_one(i);
    IS(pthread_create(&forking, NULL, forking_body, &at_end) == 0);
    IS(pthread_join(forking, NULL) == 0);
    over = 1;
    for (int i = 0; i < 3; i++)
        IS(pthread_join(others[i], NULL) == 0);
    work(&host, &gpu, &ring);
    hf3fs_iordestroy(&always);
    close_all(&host, &gpu, &ring);
}

static int at_the_end;

static void by_atexit(void)
{
    work(&host, &gpu, &ring);
    use_all();
    puts("at exit");
    fflush(stdout);
}

__attribute__((destructor)) static void by_a_destructor(void)
{
    if (!at_the_end)
        return;
    use_all();
    close_all(&host, &gpu, &ring);
    puts("at the end");
    fflush(stdout);
}

int main(int count, char **words)
{
    if (count != 4)
        return 2;
    mount = words[2];
    path = words[3];
    file = open(path, O_RDONLY);
    IS(hf3fs_reg_fd(file, 0) < 0);
    alarm(240);
    if (strcmp(words[1], "handles") == 0)
        handles();
    else if (strcmp(words[1], "threads") == 0)
        threads();
    else if (strcmp(words[1], "forks") == 0)
        forks();
    else if (strcmp(words[1], "end") == 0) {
        at_the_end = 1;
        IS(atexit(by_atexit) == 0);
        open_all(&host, &gpu, &ring);
    } else
        return 2;
    puts("all of it");
    return 0;
}
