// SPDX-License-Identifier: GPL-2.0
/* kmod-test CASE...: tests of the onehop module, one case a run. */
#include <fcntl.h>
#include <stdarg.h>
#include <signal.h>
#include <time.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "test.h"

static int failed, passed, skipped;
static const char *running = "";
const char *nvme_bdf, *vram_bdf, *edu_bdf;

void check(bool ok, const char *format, ...)
{
	va_list args;

	if (ok)
		passed++;
	else
		failed++;
	printf("%s %s: ", ok ? "PASS" : "FAIL", running);
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf("\n");
}

void skip(const char *why)
{
	skipped++;
	printf("SKIP %s: %s\n", running, why);
}

void note(const char *format, ...)
{
	va_list args;

	printf("    ");
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf("\n");
}

void die(const char *format, ...)
{
	int e = errno;
	va_list args;

	printf("FAIL %s: ", running);
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf(" (%s)\n", strerror(e));
	exit(2);
}

int finish(void)
{
	if (!failed && !passed && !skipped) {
		printf("FAIL %s: checked nothing\n", running);
		return 1;
	}
	return failed != 0;
}

double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

int call(int fd, unsigned long cmd, void *arg)
{
	return ioctl(fd, cmd, arg) < 0 ? -errno : 0;
}

void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		die("cannot write '%s' to %s", text, path);
	close(fd);
}

u16 config16(const char *bdf, unsigned int at)
{
	char path[96];
	u16 value = 0;
	int fd;

	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/config", bdf);
	fd = open(path, O_RDONLY);
	if (fd < 0 || pread(fd, &value, 2, at) != 2)
		die("cannot read %s", path);
	close(fd);
	return value;
}

static const struct { const char *name; test_case *run; } cases[] = {
	{ "fill", case_fill }, { "verify", case_verify }, { "door", case_door }, { "user", case_user },
	{ "udmabuf", case_udmabuf }, { "heap", case_heap }, { "exporter", case_exporter }, { "vfio", case_vfio },
	{ "peer", case_peer }, { "mask", case_mask }, { "edu", case_edu }, { "irq", case_irq },
	{ "bounce", case_bounce }, { "refused", case_refused }, { "unprivileged", case_unprivileged },
	{ "inflight", case_inflight }, { "revoke", case_revoke }, { "unbind", case_unbind },
	{ "foreign-reset", case_foreign_reset }, { "resets", case_resets }, { "suspend", case_suspend },
	{ "peer-gone", case_peer_gone }, { "faults", case_faults }, { "cycles", case_cycles }, { "stress", case_stress },
	{ "stalled", case_stalled },
	{ "irq-resets", case_irq_resets },
	{ "peer-memory", case_peer_memory },
	{ "locked", case_locked },
	{ "loosened", case_loosened }, { "shutdown", case_shutdown }, { "absent", case_absent },
	{ "fuzz", case_fuzz }, { "fail", case_fail }, { "aer", case_aer }, { "export", case_export },
};

static pid_t first;

/* A case that is killed has failed. Its children may be meant to be. */
static void killed(int number)
{
	if (getpid() == first)
		printf("FAIL %s: ended by signal %d\n", running, number);
	signal(number, SIG_DFL);
	raise(number);
}

int main(int argc, char **argv)
{
	unsigned int i;

	first = getpid();
	signal(SIGBUS, killed);
	signal(SIGSEGV, killed);

	setvbuf(stdout, NULL, _IOLBF, 0);
	nvme_bdf = getenv("NVME");
	vram_bdf = getenv("VRAM");
	edu_bdf = getenv("EDU");
	for (i = 0; argc > 1 && i < sizeof(cases) / sizeof(cases[0]); i++) {
		static char name[128];
		int n;

		if (strcmp(argv[1], cases[i].name))
			continue;
		strcpy(name, "kmod");
		for (n = 1; n < argc; n++)
			snprintf(name + strlen(name), sizeof(name) - strlen(name), " %s", argv[n]);
		running = name;
		cases[i].run(argv + 2);
		return finish();
	}
	fprintf(stderr, "kmod-test CASE [ARGUMENT...]; NVME, VRAM and EDU name the devices. Cases:");
	for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		fprintf(stderr, " %s", cases[i].name);
	fprintf(stderr, "\n");
	return 2;
}
