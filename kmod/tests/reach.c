// SPDX-License-Identifier: GPL-2.0
/* Who may have a device, and what the IOMMU keeps from it. */
#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "test.h"
#include "vramexp.h"

#define USER	1000

static void become_user(void)
{
	struct rlimit limit = { 8 * MIB, 8 * MIB };
	char path[64];

	snprintf(path, sizeof(path), "/dev/onehop-%s", nvme_bdf);
	if (chmod(path, 0666) || setrlimit(RLIMIT_MEMLOCK, &limit) || setgid(USER) || setuid(USER))
		die("cannot become a user");
}

/* refused WHAT...: something is missing, so only root gets in. */
void case_refused(char **arg)
{
	char path[96], want[64] = "", text[64] = "";
	int fd;

	for (; *arg; arg++)
		snprintf(want + strlen(want), sizeof(want) - strlen(want), "%s%s", *arg, arg[1] ? " " : "\n");
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/onehop_missing", nvme_bdf);
	fd = open(path, O_RDONLY);
	if (fd < 0 || read(fd, text, sizeof(text) - 1) < 0)
		die("cannot read %s", path);
	check(!strcmp(text, want), "sysfs names what is missing: %.*s", (int)strcspn(text, "\n"), text);
	fd = oh_try_open(nvme_bdf);
	check(fd >= 0, "root gets in");
	close(fd);
	become_user();
	check(oh_try_open(nvme_bdf) == -EPERM, "a user does not");
}

/* locked [WHAT]: the kernel is locked down. WHAT: something is missing, so that not even root gets in. */
void case_locked(char **arg)
{
	struct map m;

	if (arg[0]) {
		check(oh_try_open(nvme_bdf) == -EPERM, "root does not get in");
		return;
	}
	nvme_open();
	check(true, "root gets in where nothing is missing");
	check(map_peer(&m, vram_bdf, 2, 0, PAGE) == -EPERM, "but to no other device's BAR");
}

/* unprivileged: nothing is missing, so a user gets in, and no further than memory of its own. */
void case_unprivileged(char **arg)
{
	struct map m, n;
	u8 *at = mmap(NULL, 16 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *view;
	bool dmabufs = !access("/dev/udmabuf", R_OK);
	int fd = dmabufs ? udmabuf(4 * MIB, &view, false) : -1;

	become_user();
	nvme_open();
	check(!oh_get_info().missing, "a user gets in");
	check(map_user(&m, at, 16 * MIB) == -ENOMEM, "RLIMIT_MEMLOCK holds");
	check(!map_user(&m, at, 4 * MIB) && map_user(&n, at + 4 * MIB, 4 * MIB) == -ENOMEM, "for all mappings together");
	if (dmabufs)
		check(map_dmabuf(&n, fd, 0) == -ENOMEM && !unmap(&m) && !map_dmabuf(&n, fd, 0) && !unmap(&n),
		      "and for dma-bufs");
	else
		check(!unmap(&m), "what was mapped can be given back");
	check(map_peer(&n, vram_bdf, 2, 0, PAGE) == -EPERM, "no other device's BAR");
	check(!map_user(&m, at, 4 * MIB), "what was given back counts no more");
	try_buffer("a user's memory", &m, at);
}

static bool untouched(const u8 *at)
{
	return *at == 0x5a && !memcmp(at, at + 1, PAGE - 1);
}

/*
 * One mapping for reading and one for writing, of the same memory. The device may be able to read the second: the VT-d driver of
 * 6.1 and 6.12 has no write-only entries.
 */
static void check_directions(struct map *reads, struct map *writes, u8 *view)
{
	pattern(view, 1000, 8);
	check(!transfer(&io, true, 1000, 8, bus(reads, 0), 0) &&
	      !transfer(&io, false, 1000, 8, bus(&host_map, 8 * PAGE), 0) && has_pattern(host + 8 * PAGE, 1000, 8),
	      "memory mapped for reading is read");
	memset(view, 0x5a, PAGE);
	transfer(&io, false, 16, 8, bus(reads, 0), 0);
	check(untouched(view), "and not written");
	check(!transfer(&io, false, 16, 8, bus(writes, 0), 0) && has_pattern(view, 16, 8), "memory mapped for writing is written");
}

static void faults_of_memory(void)
{
	struct map reads, writes, gone;
	u8 *at = memory(2 * MIB);

	if (map_do(&reads, OH_MAP_USER, (struct oh_map){ .offset = (u64)(uintptr_t)at, .len = MIB, .flags = OH_MAP_READ }) ||
	    map_do(&writes, OH_MAP_USER, (struct oh_map){ .offset = (u64)(uintptr_t)at, .len = MIB, .flags = OH_MAP_WRITE }) ||
	    map_user(&gone, at + MIB, MIB))
		die("cannot map");
	check_directions(&reads, &writes, at);
	check(!transfer(&io, false, 16, 8, bus(&gone, 0), 0) && has_pattern(at + MIB, 16, 8), "a mapping is written");
	memset(at + MIB, 0x5a, PAGE);
	check(!unmap(&gone), "it is given back");
	transfer(&io, false, 16, 8, bus(&gone, 0), 0);
	check(untouched(at + MIB), "and not written any more");
}

/* Of the exporter the descriptor for reading alone. */
static void faults_of_buffer(const char *kind)
{
	struct map reads, writes;
	int readable, writable;
	u8 *view;

	if (!strcmp(kind, "udmabuf")) {
		readable = writable = udmabuf(MIB, &view, false);
	} else if (!strcmp(kind, "heap")) {
		readable = writable = dma_heap(MIB, &view);
	} else {
		unsigned int pins = strcmp(kind, "pinned") ? 0 : VRAMEXP_PINS;

		view = vramexp_open();
		readable = vramexp_export(pins | VRAMEXP_READ_ONLY);
		writable = vramexp_export(pins);
	}
	check(!map_dmabuf(&reads, readable, OH_MAP_READ) && !map_dmabuf(&writes, writable, OH_MAP_WRITE),
	      "a buffer can be mapped for reading, and for writing");
	check_directions(&reads, &writes, view);
	check(!unmap(&reads) && !unmap(&writes), "both can be given back");
	if (vramexp >= 0) {
		close(readable);
		close(writable);
		check(ioctl(vramexp, VRAMEXP_HELD) == 0, "and then the exporter has everything back");
	}
}

/*
 * faults user|udmabuf|heap|exporter|pinned: what the IOMMU keeps from the drive. A mapping for reading is not written, one
 * that was given back is not reached; the drive's model may report success all the same.
 */
void case_faults(char **arg)
{
	nvme_open();
	if (!strcmp(arg[0], "user"))
		faults_of_memory();
	else
		faults_of_buffer(arg[0]);
}

struct order {
	char path[96], text[32];
};
static int orders[2], done[2];

/* A process that stays root. */
static void keep_root(void)
{
	struct order order;

	if (pipe(orders) || pipe(done))
		die("pipe");
	if (!fork()) {
		close(orders[1]);
		while (read(orders[0], &order, sizeof(order)) == sizeof(order)) {
			write_file(order.path, order.text);
			if (write(done[1], "", 1) != 1)
				break;
		}
		_exit(0);
	}
	close(orders[0]);
	close(done[1]);
}

static void as_root(const char *path, const char *text)
{
	struct order order = {};
	char c;

	snprintf(order.path, sizeof(order.path), "%s", path);
	snprintf(order.text, sizeof(order.text), "%s", text);
	if (write(orders[1], &order, sizeof(order)) != sizeof(order) || read(done[0], &c, 1) != 1)
		die("cannot write '%s' to %s as root", text, path);
}

static bool isolation_stopped(void)
{
	struct oh_info info = oh_get_info();

	return info.stopped & OH_STOPPED_ISOLATION && !(info.flags & OH_INFO_DMA_ON) && !(config16(nvme_bdf, 4) & 4);
}

/*
 * loosened joined|lazy: a user has the device, and then what kept it from harm is gone: another device, so far removed from the
 * bus, joins its IOMMU group, or root makes the flush lazy, which the module only sees with the next call.
 */
void case_loosened(char **arg)
{
	bool joined = !strcmp(arg[0], "joined");
	struct oh_irqs irqs = { .fds = (u64)(uintptr_t)(s32[]){ -1 }, .count = 1 };
	struct pollfd p = { .events = POLLPRI };
	u8 *at = memory(2 * PAGE);
	char path[96];
	struct map m, n;

	keep_root();
	become_user();
	nvme_open();
	p.fd = oh;
	check(!oh_get_info().missing && !map_user(&m, at, PAGE), "a user gets in");
	if (joined) {
		as_root("/sys/bus/pci/rescan", "1");
		check(poll(&p, 1, 60000) == 1 && p.revents & POLLPRI, "a neighbour's arrival is told");
		check(isolation_stopped(), "and has stopped DMA");
	} else {
		snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/iommu_group/type", nvme_bdf);
		as_root(path, "DMA-FQ");
		check(!unmap(&m) && isolation_stopped(), "memory is given back only with DMA off");
		check(poll(&p, 1, 0) == 1 && p.revents & POLLPRI, "which is told");
	}
	check(map_user(&n, at + PAGE, PAGE) == -EPERM && call(oh, OH_IRQS, &irqs) == -EPERM, "no memory and no interrupts any more");
	check(!oh_reset() && oh_start(0) == -EPERM && isolation_stopped(), "and no DMA, also after a reset");
	check(oh_try_open(nvme_bdf) == -EPERM, "another user does not get in");
	if (!joined)
		return;
	check(!unmap(&m), "what was mapped can be given back");
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/remove", getenv("NVME2"));
	as_root(path, "1");
	check(!oh_reset() && !oh_start(0) && !nvme_up() && !transfer(&io, false, 16, 8, bus(&host_map, 8 * PAGE), 0) &&
	      has_pattern(host + 8 * PAGE, 16, 8), "when the neighbour has gone, the session can go on");
}
