// SPDX-License-Identifier: GPL-2.0
/* Many times, at once, at random, and with allocations that fail: nothing leaks, nothing breaks. */
#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "test.h"
#include "vramexp.h"

static long number_after(const char *path, const char *name)
{
	char line[256], want[64];
	long value = -1;
	FILE *file = fopen(path, "r");

	snprintf(want, sizeof(want), "%s%%*[: ]%%ld", name);
	while (file && fgets(line, sizeof(line), file))
		if (sscanf(line, want, &value) == 1)
			break;
	if (file)
		fclose(file);
	return value;
}

static long free_kib(void)
{
	return number_after("/proc/meminfo", "MemFree") + number_after("/proc/meminfo", "Cached");
}

bool pins_balanced(void)
{
	write_file("/proc/sys/vm/stat_refresh", "1");
	return number_after("/proc/vmstat", "nr_foll_pin_acquired") == number_after("/proc/vmstat", "nr_foll_pin_released");
}

static int module_users(void)
{
	FILE *file = fopen("/sys/module/onehop/refcnt", "r");
	int count = -1;

	if (!file || fscanf(file, "%d", &count) != 1)
		die("no /sys/module/onehop/refcnt");
	fclose(file);
	return count;
}

static void one_cycle(u8 *at, int fd, s32 *event)
{
	struct oh_irqs irqs = { .fds = (u64)(uintptr_t)event, .count = 1 };
	struct map m;
	volatile u8 *bar;

	oh_open(nvme_bdf);
	if (map_user(&m, at, 16 * PAGE))
		die("cannot map memory");
	free(m.seg);
	if (fd >= 0) {
		if (map_dmabuf(&m, fd, 0))
			die("cannot map the dma-buf");
		free(m.seg);
	}
	if (call(oh, OH_IRQS, &irqs))
		die("cannot set interrupts");
	bar = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, oh, OH_BAR_OFFSET(0));
	if (bar == MAP_FAILED)
		die("cannot map BAR0");
	munmap((void *)bar, PAGE);
	close(oh);
}

/* cycles N: open, map, close, all of it left to close(). Each would cost at least a page or a reference if it leaked. */
void case_cycles(char **arg)
{
	long cycles = atol(arg[0]), i, before = 0;
	u8 *at = memory(16 * PAGE), *view;
	bool dmabufs = !access("/dev/udmabuf", R_OK);
	int fd = dmabufs ? udmabuf(16 * PAGE, &view, false) : -1;
	s32 event = eventfd(0, 0);
	double begun = now();

	for (i = -500; i < cycles; i++) {
		if (!i)
			before = free_kib();
		one_cycle(at, fd, &event);
	}
	note("%ld cycles in %.1f s; %ld KiB free before, %ld after", cycles, now() - begun, before, free_kib());
	check(before - free_kib() < cycles * 2 + 2048, "%ld cycles lost no memory", cycles);
	if (dmabufs)
		close(fd);	/* a udmabuf pins its pages itself */
	check(pins_balanced(), "every page that was pinned is not any more");
	check(module_users() == 0, "nobody holds the module");
}

/* One of six who use a session at once; each goes on until it is killed. */
static void worker(int who, u8 *at)
{
	int fd = vramexp_export(VRAMEXP_PINS);
	struct map m;
	unsigned long n;
	volatile u8 *bar;

	for (n = 0;; n++)
		switch (who) {
		case 0:
		case 1:
			if (!map_user(&m, at, MIB)) {
				unmap(&m);
				free(m.seg);
			}
			break;
		case 2:
			if (!map_dmabuf(&m, fd, n & 1 ? OH_MAP_NOPIN : 0)) {
				unmap(&m);
				free(m.seg);
			}
			if (n % 50 == 0) {
				close(fd);
				fd = vramexp_export(n & 1 ? VRAMEXP_PINS : 0);
			}
			break;
		case 3:
			call(vramexp, VRAMEXP_REVOKE, NULL);
			usleep(300);
			break;
		case 4:
			bar = mmap(NULL, 4 * PAGE, PROT_READ, MAP_SHARED, oh, OH_BAR_OFFSET(0));
			if (bar != MAP_FAILED) {
				(void)*(volatile u32 *)bar;
				munmap((void *)bar, 4 * PAGE);
			}
			break;
		case 5:
			if (!call(oh, OH_RESET, NULL))
				oh_start(0);
			usleep(1000);
			break;
		}
}

/*
 * stress SECONDS: six processes on one session, then all killed. It takes longer where the machine is so busy that no buffer
 * has been revoked while it was mapped.
 */
void case_stress(char **arg)
{
	double since, seconds = atoi(arg[0]);
	u8 *at = memory(MIB);
	struct oh_info info;
	pid_t pid[6];
	int i;

	nvme_open();
	vramexp_open();
	for (i = 0; i < 6; i++) {
		pid[i] = fork();
		if (!pid[i])
			worker(i, at);
	}
	for (since = now(); now() < since + seconds || (!oh_get_info().epoch && now() < since + 20 * seconds);)
		usleep(100000);
	for (i = 0; i < 6; i++)
		kill(pid[i], SIGKILL);
	for (i = 0; i < 6; i++)
		waitpid(pid[i], NULL, 0);
	info = oh_get_info();
	note("DMA was stopped %u times", info.epoch);
	check(info.epoch > 0, "there were revocations");
	check(!oh_reset() && !oh_start(0) && !nvme_up(), "after all that the drive comes up");
	munmap((void *)bar0, info.bar_len[0]);
	close(oh);
	check(ioctl(vramexp, VRAMEXP_HELD) == 0, "nothing of the exporter's is held");
	check(pins_balanced() && module_users() == 0, "nothing is pinned, nobody holds the module");
}
