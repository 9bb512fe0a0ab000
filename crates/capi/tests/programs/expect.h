/* How these programs check what the library answers. */
#include <onehop/onehop.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void expect(int line, int got, int want, const char *words)
{
    const char *said = onehop_last_error();
    if (got != want || (want != 0 && !strstr(said, words)) || (want == 0 && *said != 0)) {
        fprintf(stderr, "line %d: %d and '%s' instead of %d and '%s'\n", line, got, said, want, words);
        exit(1);
    }
}

#define WORKS(call) expect(__LINE__, call, 0, "")
#define FAILS(call, code, words) expect(__LINE__, call, code, words)
#define IS(what) do { if (!(what)) { fprintf(stderr, "line %d: not so: %s\n", __LINE__, #what); exit(1); } } while (0)
