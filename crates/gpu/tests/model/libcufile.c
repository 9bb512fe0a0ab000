/* A model of cuFile that accepts everything, and whose transfers fail with a system error. */
#include <errno.h>
#include <stddef.h>
#include <sys/types.h>

typedef struct { int err, cu_err; } answer;
static const answer OK;
static char handle;

answer cuFileDriverOpen(void) { return OK; }
answer cuFileDriverClose(void) { return OK; }
answer cuFileHandleRegister(void **out, void *description) { (void)description; *out = &handle; return OK; }
void cuFileHandleDeregister(void *handle) { (void)handle; }
answer cuFileBufRegister(const void *at, size_t bytes, int flags) { (void)at; (void)bytes; (void)flags; return OK; }
answer cuFileBufDeregister(const void *at) { (void)at; return OK; }

static ssize_t fail(int error) { errno = error; return -1; }
ssize_t cuFileRead(void *handle, void *to, size_t bytes, off_t at, off_t offset) {
    (void)handle; (void)to; (void)bytes; (void)at; (void)offset;
    return fail(EIO);
}
ssize_t cuFileWrite(void *handle, const void *from, size_t bytes, off_t at, off_t offset) {
    (void)handle; (void)from; (void)bytes; (void)at; (void)offset;
    return fail(EFBIG);
}
