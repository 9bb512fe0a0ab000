// SPDX-License-Identifier: GPL-2.0
/*
 * Random calls, and calls whose allocations fail. The drive is left disabled, so nothing that is said here makes it do DMA.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "test.h"
#include "vramexp.h"

union request {
	u8 byte[256];
	struct oh_map map;
	struct oh_unmap unmap;
	struct oh_start start;
	struct oh_mask mask;
	struct oh_irqs irqs;
};

#define COUNT(array)	(sizeof(array) / sizeof((array)[0]))
#define AREA		(4 * MIB)

static u64 state;
static u64 known[12];		/* addresses and lengths that mean something */
static s32 fds[20];		/* what descriptor fields hold, and itself a table for OH_IRQS */
static struct oh_seg room[4096];

static u64 rnd(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

/* What a field may hold: something that means something, an edge, or any number. */
static u64 number(void)
{
	static const u64 edges[] = { 0, 1, 2, 3, 511, 512, PAGE - 1, PAGE, PAGE + 1, MIB, AREA, 1ull << 31, 0xffffffff,
				     1ull << 32, 1ull << 40, 1ull << 47, 1ull << 63, -PAGE, -1 };

	switch (rnd() % 5) {
	case 0:
		return edges[rnd() % COUNT(edges)];
	case 1:
		return rnd() >> rnd() % 64;
	default:
		return known[rnd() % COUNT(known)];
	}
}

static void random_map(struct oh_map *a, unsigned long cmd)
{
	*a = (struct oh_map){ .flags = 1 + rnd() % 3, .segs = (u64)(uintptr_t)room, .room = rnd() % COUNT(room) };
	if (rnd() % 8 == 0)
		a->flags |= rnd() % 16;
	if (a->flags & OH_MAP_CHUNKED)
		a->chunk = number();
	if (rnd() % 16 == 0)
		a->segs = number();
	switch (cmd) {
	case OH_MAP_USER:
		a->offset = number();
		a->len = number();
		break;
	case OH_MAP_DMABUF:
		a->fd = fds[rnd() % COUNT(fds)];
		a->offset = rnd() % 2 ? 0 : number();
		a->len = rnd() % 2 ? 0 : number();
		break;
	default:
		a->devfn = rnd() % 64;
		a->bar = rnd() % 7;
		a->offset = rnd() % 2 ? 0 : number();
		a->len = number();
	}
}

static unsigned long random_request(union request *a)
{
	static const unsigned long commands[] = { OH_INFO, OH_MAP_USER, OH_MAP_USER, OH_MAP_DMABUF, OH_MAP_DMABUF, OH_MAP_PEER,
						  OH_UNMAP, OH_UNMAP, OH_UNMAP, OH_START, OH_STOP, OH_MASK, OH_IRQS };
	unsigned long cmd = rnd() % 1024 ? commands[rnd() % COUNT(commands)] : OH_RESET;
	int flips;

	memset(a, 0, sizeof(*a));
	switch (cmd) {
	case OH_MAP_USER:
	case OH_MAP_DMABUF:
	case OH_MAP_PEER:
		random_map(&a->map, cmd);
		break;
	case OH_UNMAP:
		a->unmap.id = rnd() % 4 ? rnd() % 4096 : number();
		break;
	case OH_START:
		a->start = (struct oh_start){ .flags = rnd() % 3, .epoch = rnd() % 2 ? oh_get_info().epoch : rnd() % 64 };
		break;
	case OH_MASK:
		a->mask.bits = rnd() % 70;
		break;
	case OH_IRQS:
		a->irqs = (struct oh_irqs){ .fds = (u64)(uintptr_t)&fds[rnd() % 16], .count = rnd() % 4 };
		break;
	}
	for (flips = rnd() % 4 ? 0 : 1 + rnd() % 3; flips > 0; flips--)
		a->byte[rnd() % 160] ^= 1 << rnd() % 8;
	if (rnd() % 32 == 0)
		cmd ^= 1ul << rnd() % 32;
	return cmd;
}

/* What else can be done to the file. */
static void random_other(void)
{
	volatile u8 *bar;
	u64 len = (1 + rnd() % 8) * PAGE;

	switch (rnd() % 4) {
	case 0:
		bar = mmap(NULL, len, PROT_READ, rnd() % 8 ? MAP_SHARED : MAP_PRIVATE, oh,
			   rnd() % 4 ? OH_BAR_OFFSET(rnd() % 7) : number() & -PAGE & INT64_MAX);
		if (bar != MAP_FAILED) {
			(void)*(volatile u32 *)bar;
			munmap((void *)bar, len);
		}
		break;
	case 1:
		call(vramexp, VRAMEXP_REVOKE, NULL);
		break;
	case 2:
		/* The pages of a mapping go while it is there. */
		madvise((void *)(uintptr_t)known[0], AREA / 2, MADV_DONTNEED);
		break;
	case 3:
		close(oh_try_open(nvme_bdf));
		break;
	}
}

/* Everything that random calls need around them. */
static void surroundings(void)
{
	u8 *area = memory(AREA), *view, *read_only;
	unsigned int i;

	oh_open(nvme_bdf);
	vramexp_open();
	read_only = mmap(NULL, AREA, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (i = 0; i < COUNT(fds); i++)
		fds[i] = -1;
	fds[0] = vramexp_export(0);
	fds[1] = vramexp_export(VRAMEXP_PINS);
	fds[2] = vramexp_export(VRAMEXP_READ_ONLY);
	fds[3] = eventfd(0, 0);
	fds[4] = oh;
	if (!access("/dev/udmabuf", R_OK)) {
		fds[5] = udmabuf(MIB, &view, false);
		fds[6] = dma_heap(AREA, &view);
	}
	known[0] = (u64)(uintptr_t)area;
	known[1] = known[0] + MIB;
	known[2] = (u64)(uintptr_t)read_only;
	known[3] = known[0] + AREA - PAGE;
	for (i = 4; i < COUNT(known); i++)
		known[i] = PAGE << (i - 4) * 2 % 11;
}

/* Until the time is over; says how many calls succeeded. Forgets all mappings now and then, since only so many fit. */
static void fuzz_for(double seconds, u64 first, volatile u64 *calls, volatile u64 *good)
{
	double end = now() + seconds;
	union request a;
	unsigned long cmd;

	state = first * 0x9E3779B97F4A7C15ull | 1;
	while (now() < end) {
		cmd = random_request(&a);
		++*calls;
		if (rnd() % 16 == 0)
			random_other();
		else if (ioctl(oh, cmd, rnd() % 64 ? &a : (void *)(uintptr_t)number()) >= 0)
			++*good;
	}
}

/* fuzz SECONDS [SEED]: two processes call at random on one session; a third ends and begins sessions. */
void case_fuzz(char **arg)
{
	volatile u64 *counts = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	u64 first = arg[1] ? strtoull(arg[1], NULL, 0) : (u64)time(NULL);
	double end = now() + atof(arg[0]);
	int status, bad = 0, rounds = 0, i;
	pid_t pid[2];

	note("seed %llu", (ull)first);
	/* A session of at most eight seconds after the other, so that ends are tried too. */
	while (now() < end) {
		double left = end - now() < 8 ? end - now() : 8;

		surroundings();
		for (i = 0; i < 2; i++) {
			pid[i] = fork();
			if (!pid[i]) {
				fuzz_for(left, first + rounds * 2 + i, counts, counts + 1);
				_exit(0);
			}
		}
		for (i = 0; i < 2; i++) {
			waitpid(pid[i], &status, 0);
			/* A fault at an address that we made up is the fuzzer's own. */
			bad += !WIFEXITED(status);
		}
		for (i = 0; i < (int)COUNT(fds); i++)
			if (fds[i] >= 0)
				close(fds[i]);
		munmap((void *)(uintptr_t)known[0], AREA);
		munmap((void *)(uintptr_t)known[2], AREA);
		if (ioctl(vramexp, VRAMEXP_HELD))
			check(false, "the exporter's buffers are held after close");
		close(vramexp);
		rounds++;
	}
	note("%llu calls, of which %llu succeeded, in %d sessions", (ull)counts[0], (ull)counts[1], rounds);
	check(!bad, "no process was killed");
	check(counts[1] > 100, "many calls succeeded");
	nvme_open();
	check(true, "the drive works after it");
}

static int nth_file = -1;

/* The nth allocation of this thread from now on fails; 0: none. */
static void fail_nth(int n)
{
	char text[16];

	snprintf(text, sizeof(text), "%d", n);
	if (pwrite(nth_file, text, strlen(text), 0) < 0)
		die("this kernel injects no failures");
}

/* Has it failed? */
static bool has_failed(void)
{
	char text[16] = "";

	if (pread(nth_file, text, sizeof(text) - 1, 0) < 0)
		die("fail-nth");
	fail_nth(0);
	return atoi(text) == 0;
}

/* One call with its nth allocation failing, for every n that there is; what is left is what was there before. */
static void fail_each(const char *name, unsigned long cmd, const void *request, size_t size)
{
	union request a;
	int n, r, refused = 0;
	u32 before = oh_get_info().mappings;
	bool hit;

	for (n = 1; n < 2000; n++) {
		struct oh_unmap gone;

		memcpy(&a, request, size);
		fail_nth(n);
		r = call(oh, cmd, &a);
		hit = has_failed();
		refused += r < 0;
		gone = (struct oh_unmap){ .id = a.map.id };
		if (!r && cmd != OH_IRQS && call(oh, OH_UNMAP, &gone))
			check(false, "%s: cannot be given back", name);
		if (!hit)
			break;
	}
	check(n > 2 && n < 2000 && refused && !r, "%s: %d allocations failed in turn, %d calls with them", name, n - 1, refused);
	check(oh_get_info().mappings == before, "%s: nothing is left of the calls that failed", name);
}

/* fail mappings|interrupts: needs a kernel that makes allocations fail on request. */
void case_fail(char **arg)
{
	struct oh_map map = { .flags = 3, .segs = (u64)(uintptr_t)room, .room = COUNT(room) };
	struct oh_irqs irqs = { .fds = (u64)(uintptr_t)fds, .count = 4 };
	struct oh_map peer = map, buffer = map;
	unsigned int domain, bus, slot, function;

	surroundings();
	nth_file = open("/proc/thread-self/fail-nth", O_RDWR);
	if (!strcmp(arg[0], "interrupts")) {
		fds[0] = fds[1] = fds[2] = fds[3];
		fail_each("interrupts", OH_IRQS, &irqs, sizeof(irqs));
		return;
	}
	map.offset = known[0];
	map.len = MIB;
	fail_each("user memory", OH_MAP_USER, &map, sizeof(map));
	buffer.fd = fds[0];
	fail_each("exporter", OH_MAP_DMABUF, &buffer, sizeof(buffer));
	buffer.fd = fds[1];
	fail_each("exporter with pin", OH_MAP_DMABUF, &buffer, sizeof(buffer));
	buffer.fd = fds[5];
	fail_each("udmabuf", OH_MAP_DMABUF, &buffer, sizeof(buffer));
	if (sscanf(vram_bdf, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
		die("no VRAM");
	peer.domain = domain;
	peer.bus = bus;
	peer.devfn = slot << 3 | function;
	peer.bar = 2;
	peer.len = MIB;
	fail_each("peer", OH_MAP_PEER, &peer, sizeof(peer));
	check(oh_get_info().charged == 0, "nothing is charged");
}
