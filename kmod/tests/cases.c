// SPDX-License-Identifier: GPL-2.0
/* What the module gives: mappings of every kind, checked with the bytes that the drive moves through them. */
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>
#include "test.h"
#include "vramexp.h"

int memfd_create(const char *name, unsigned int flags);

#define FILLED		1000	/* blocks with the pattern, from block 0 on */
#define WRITTEN		1000	/* the block that the tests write, with its pattern in the end */

static bool translated(void)
{
	return !(oh_get_info().missing & OH_MISSING_TRANSLATION);
}

/* fill DISK: the pattern, by the kernel's own driver, before the module has the drive. */
void case_fill(char **arg)
{
	u8 *at = memory(FILLED * BLOCK);
	int fd = open(arg[0], O_WRONLY);

	pattern(at, 0, FILLED);
	check(fd >= 0 && write(fd, at, FILLED * BLOCK) == FILLED * BLOCK && !fsync(fd), "the disk has the pattern");
	close(fd);
}

/* verify DISK: the kernel's own driver finds what was there, and what the tests wrote. */
void case_verify(char **arg)
{
	u8 *at = memory((FILLED + 8) * BLOCK);
	int fd = open(arg[0], O_RDONLY);
	bool read_all = fd >= 0 && read(fd, at, (FILLED + 8) * BLOCK) == (FILLED + 8) * BLOCK;

	check(read_all && has_pattern(at, 0, FILLED), "what was on the disk is there");
	check(read_all && has_pattern(at + WRITTEN * BLOCK, WRITTEN, 8), "what was written through the module is there");
	close(fd);
}

void try_buffer(const char *name, struct map *m, volatile u8 *view)
{
	volatile u64 *list = (volatile u64 *)(view + 0x30000);
	struct queue inside = { .sq = (void *)(view + 0x80000), .cq = (void *)(view + 0x82000),
				.sq_bus = bus(m, 0x80000), .cq_bus = bus(m, 0x82000), .id = 2, .depth = 64, .vector = -1 };
	double begun;
	u32 i, bad = 0;

	for (i = 0; i < 0x90000 / 8; i++)
		((volatile u64 *)view)[i] = 0;
	check(!transfer(&io, false, 24, 8, bus(m, 0x10000), 0) && has_pattern(view + 0x10000, 24, 8),
	      "%s: 4 KiB read into it", name);
	for (i = 1; i < 16; i++)
		list[i - 1] = bus(m, 0x40000 + i * PAGE);
	check(!transfer(&io, false, 128, 128, bus(m, 0x40000), bus(m, 0x30000)) && has_pattern(view + 0x40000, 128, 128),
	      "%s: 64 KiB read into it, by a PRP list inside", name);
	pattern(host + 9 * PAGE, 7777, 8);
	pattern(view + 0x60000, WRITTEN, 8);
	check(!transfer(&io, true, WRITTEN, 8, bus(&host_map, 9 * PAGE), 0) &&
	      !transfer(&io, true, WRITTEN, 8, bus(m, 0x60000), 0) &&
	      !transfer(&io, false, WRITTEN, 8, bus(&host_map, 9 * PAGE), 0) && has_pattern(host + 9 * PAGE, WRITTEN, 8),
	      "%s: written from it, and read back", name);
	check(!queue_create(&inside) && !transfer(&inside, false, 32, 8, bus(m, 0x11000), 0) &&
	      has_pattern(view + 0x11000, 32, 8), "%s: a read by queues inside it", name);
	begun = now();
	for (i = 0; i < 200; i++)
		bad += transfer(&inside, false, i % 64 * 8, 8, bus(m, 0x20000), 0) ||
		       !has_pattern(view + 0x20000, i % 64 * 8, 8);
	check(!bad, "%s: 200 reads by those queues, each checked", name);
	note("%s: %u runs, the first %llx of %llu KiB; %.0f us a read", name, m->a.nsegs, (ull)m->seg[0].addr,
	     (ull)m->seg[0].len >> 10, (now() - begun) / 200 * 1e6);
}

/* door: what is refused at the door, and in which order things have to be asked for. */
void case_door(char **arg)
{
	struct oh_info info;
	struct oh_start start;

	oh_open(nvme_bdf);
	info = oh_get_info();
	check(info.abi == OH_ABI && info.vendor == 0x1b36 && info.device == 0x10 && info.class_code == 0x010802 &&
	      info.bar_len[0] >= 2 * PAGE && info.vectors > 1 && info.mask_bits == 64 && !info.mappings,
	      "OH_INFO tells what the device is");
	check(!(info.flags & OH_INFO_DMA_ON) && info.flags & OH_INFO_RESET && info.flags & OH_INFO_RESET_NEEDED,
	      "DMA is off at first");
	check(!(config16(nvme_bdf, 4) & 4), "and bus mastering with it");
	check(oh_try_open(nvme_bdf) == -EBUSY, "nobody else can open it");
	check(oh_start(0) == -EBUSY, "no start before the reset");
	check(oh_start(OH_START_UNRESET) == -EINVAL, "no start without a reset where there is one");
	check(!oh_reset() && !(config16(nvme_bdf, 4) & 4), "the reset leaves DMA off");
	start = (struct oh_start){ .epoch = info.epoch + 1 };
	check(call(oh, OH_START, &start) == -EAGAIN, "no start with another epoch");
	check(!oh_start(0) && config16(nvme_bdf, 4) & 4 && oh_get_info().flags & OH_INFO_DMA_ON, "then it starts");
	check(!call(oh, OH_STOP, NULL) && !(config16(nvme_bdf, 4) & 4), "and stops");
	check(!oh_start(0), "and starts again without a reset");
	check(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, oh, OH_BAR_OFFSET(0)) == MAP_FAILED, "no private mapping of a BAR");
	check(mmap(NULL, info.bar_len[0] + PAGE, PROT_READ, MAP_SHARED, oh, OH_BAR_OFFSET(0)) == MAP_FAILED &&
	      mmap(NULL, PAGE, PROT_READ, MAP_SHARED, oh, OH_BAR_OFFSET(0) + info.bar_len[0]) == MAP_FAILED &&
	      mmap(NULL, PAGE, PROT_READ, MAP_SHARED, oh, OH_BAR_OFFSET(6)) == MAP_FAILED &&
	      mmap(NULL, PAGE, PROT_READ, MAP_SHARED, oh, OH_BAR_OFFSET(70000)) == MAP_FAILED,
	      "no mapping beyond the BARs");
	close(oh);
	check(!(config16(nvme_bdf, 4) & 4), "bus mastering is off after close");
}

/* The device reads what the process writes after its page was mapped for reading, whatever page it was before. */
static void check_current(const char *name, u8 *at)
{
	struct map m;

	/* Only a read so far: others may have the page, too. */
	(void)*(volatile u8 *)at;
	if (map_do(&m, OH_MAP_USER, (struct oh_map){ .offset = (u64)(uintptr_t)at, .len = PAGE, .flags = OH_MAP_READ }))
		die("cannot map %s", name);
	pattern(at, WRITTEN, 8);
	pattern(host + 9 * PAGE, 7777, 8);
	check(!transfer(&io, true, WRITTEN, 8, bus(&host_map, 9 * PAGE), 0) &&
	      !transfer(&io, true, WRITTEN, 8, bus(&m, 0), 0) &&
	      !transfer(&io, false, WRITTEN, 8, bus(&host_map, 9 * PAGE), 0) && has_pattern(host + 9 * PAGE, WRITTEN, 8),
	      "%s, mapped for reading and then written: the drive reads what was written", name);
	unmap(&m);
}

static void try_reading(void)
{
	int fd = memfd_create("file", 0);
	u8 *at;

	at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	check_current("a page that was never written", at);
	if (fd < 0 || ftruncate(fd, PAGE))
		die("no memfd");
	at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	check_current("a private page of a file", at);
}

/* user: memory of this process. */
void case_user(char **arg)
{
	struct map m, n;
	u8 *at = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *read_only;

	nvme_open();
	check(!map_user(&m, at, 8 * MIB), "8 MiB that were never touched can be mapped");
	try_buffer("user memory", &m, at);
	check(oh_get_info().charged == 10 * MIB && oh_get_info().mappings == 2, "they are counted");
	check(!unmap(&m) && unmap(&m) == -ENOENT, "a mapping can be given back once");
	check(map_user(&n, at + 1, PAGE) == -EINVAL && map_user(&n, at, 100) == -EINVAL && map_user(&n, at, 0) == -EINVAL,
	      "only whole pages");
	check(map_user(&n, (void *)PAGE, PAGE) == -EFAULT && map_user(&n, (void *)-PAGE, PAGE) == -EFAULT &&
	      map_user(&n, (void *)0x7fff00000000, 1ull << 47) == -EFAULT, "only memory that is there");
	check(map_user(&n, (void *)0x10000000, 1ull << 40) == -ENOMEM, "not more than the machine has");
	check(map_user(&n, (void *)bar0, PAGE) == -EFAULT, "no BAR");
	read_only = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	check(map_user(&n, read_only, PAGE) == -EFAULT &&
	      !map_do(&n, OH_MAP_USER, (struct oh_map){ .offset = (u64)(uintptr_t)read_only, .len = PAGE, .flags = OH_MAP_READ }),
	      "memory that may only be read can be mapped for reading alone");
	check(!unmap(&n), "and given back");
	try_reading();
	check(call(oh, OH_MAP_USER, &(struct oh_map){ .offset = (u64)(uintptr_t)at, .len = PAGE, .flags = 3, .segs = 8, .room = 1 })
	      == -EFAULT && oh_get_info().mappings == 1, "no mapping is left where its runs cannot be told");
	n.a = (struct oh_map){ .offset = (u64)(uintptr_t)at, .len = PAGE, .flags = 3 };
	check(call(oh, OH_MAP_USER, &n.a) == -ENOSPC && n.a.why == OH_WHY_ROOM && n.a.nsegs == 1,
	      "too little room: how much is wanted is told");
	at = memory(256 * MIB);
	check(!map_user(&m, at, 256 * MIB), "256 MiB can be mapped (%u runs)", m.a.nsegs);
	check(!unmap(&m), "and given back");
}

/* A dma-buf of 4 MiB of which the CPU has a view; the descriptor is closed as soon as it is mapped. */
static void try_dmabuf(const char *name, int fd, u8 *view)
{
	struct map m, part;
	u64 before = oh_get_info().charged;

	check(!map_dmabuf(&m, fd, 0) && m.a.len == 4 * MIB, "%s: can be mapped", name);
	check(oh_get_info().charged == before + 4 * MIB, "%s: is counted", name);
	check(map_part(&part, fd, 4 * MIB, 0) == -EINVAL && map_part(&part, fd, PAGE, 4 * MIB) == -EINVAL &&
	      map_part(&part, fd, -PAGE, 2 * PAGE) == -EINVAL, "%s: nothing beyond its end", name);
	check(!map_part(&part, fd, 5 * PAGE + 512, 7 * PAGE) && part.a.len == 7 * PAGE, "%s: a part can be mapped", name);
	memset(view, 0, 16 * PAGE);
	check(!transfer(&io, false, 40, 1, bus(&part, 0), 0) && has_pattern(view + 5 * PAGE + 512, 40, 1),
	      "%s: what is read into the part is in its place", name);
	check(!map_part(&part, fd, 4 * MIB - PAGE, 0) && part.a.len == PAGE, "%s: length 0 is all that follows", name);
	close(fd);
	try_buffer(name, &m, view);
	check(!unmap(&m) && !unmap(&part), "%s: can be given back", name);
}

void case_udmabuf(char **arg)
{
	struct map m;
	u8 *view;
	int fd, r;

	nvme_open();
	fd = udmabuf(4 * MIB, &view, true);
	try_dmabuf("udmabuf", fd, view);
	fd = udmabuf(4 * MIB, &view, true);
	check(!map_dmabuf(&m, fd, OH_MAP_NOPIN), "a udmabuf can be mapped without a pin");
	r = map_do(&m, OH_MAP_DMABUF, (struct oh_map){ .fd = fd, .flags = OH_MAP_CHUNKED, .chunk = MIB });
	if (translated())
		check(!r, "behind an IOMMU each MiB of a udmabuf is one run");
	else
		check(r == -EMSGSIZE && m.a.why == OH_WHY_CHUNK && m.a.bad_offset % MIB == 0 && m.a.bad_len < MIB && m.a.bad_len,
		      "without an IOMMU it is not, and where is told (chunk at %llu KiB, %llu KiB long)",
		      (ull)m.a.bad_offset >> 10, (ull)m.a.bad_len >> 10);
	check(map_dmabuf(&m, oh, 0) == -EINVAL && map_dmabuf(&m, 999, 0) == -EBADF, "only dma-bufs");
}

void case_heap(char **arg)
{
	u8 *view;
	int fd;

	nvme_open();
	fd = dma_heap(4 * MIB, &view);
	try_dmabuf("dma-heap", fd, view);
}

/* exporter: the test exporter's buffers, with and without a pin, and read-only ones. */
void case_exporter(char **arg)
{
	struct map m;
	u8 *view;
	int fd;

	nvme_open();
	view = vramexp_open();
	try_dmabuf("exporter without pin", vramexp_export(0), view);
	check(!oh_reset() && !oh_start(0) && !nvme_up(), "the drive can be reset and brought up again");
	try_dmabuf("exporter with pin", vramexp_export(VRAMEXP_PINS), view);
	fd = vramexp_export(VRAMEXP_READ_ONLY);
	check(map_dmabuf(&m, fd, 0) == -EACCES && !map_dmabuf(&m, fd, OH_MAP_READ),
	      "a buffer that is for reading cannot be mapped for writing");
	close(oh);
	munmap((void *)bar0, 4 * PAGE);
}

/* vfio: another device's BAR, by vfio-pci's dma-buf (7.0 and newer). */
void case_vfio(char **arg)
{
	u64 len;
	u8 *view;
	int fd;

	nvme_open();
	vfio_open(vram_bdf);
	view = vfio_bar2(&len);
	fd = vfio_export(0, 4 * MIB);
	if (fd == -ENOTTY) {
		skip("this kernel's vfio-pci exports no dma-bufs");
		return;
	}
	try_dmabuf("vfio-pci BAR", fd, view);
}

void case_peer(char **arg)
{
	struct map m;
	u8 *view = sysfs_bar(vram_bdf, 2);

	nvme_open();
	check(!map_peer(&m, vram_bdf, 2, 0, 4 * MIB), "another device's BAR can be mapped");
	try_buffer("peer BAR", &m, view);
	check(!unmap(&m), "and given back");
	check(!map_peer(&m, vram_bdf, 2, MIB, MIB), "a part of it too");
	check(!transfer(&io, false, 48, 8, bus(&m, PAGE), 0) && has_pattern(view + MIB + PAGE, 48, 8), "in its place");
	check(map_peer(&m, vram_bdf, 2, 0, 1ull << 40) == -EINVAL && map_peer(&m, vram_bdf, 5, 0, PAGE) == -EINVAL &&
	      map_peer(&m, vram_bdf, 9, 0, PAGE) == -EINVAL && map_peer(&m, vram_bdf, 2, 512, PAGE) == -EINVAL &&
	      map_peer(&m, vram_bdf, 2, -PAGE, 2 * PAGE) == -EINVAL, "nothing outside of a BAR");
	check(map_peer(&m, "0000:00:1e.7", 0, 0, PAGE) == -ENODEV, "no device that is not there");
	check(map_peer(&m, nvme_bdf, 0, 0, PAGE) == -EINVAL, "not the device's own BAR");
}

/* peer-memory BYTES: the kernel has been given the BAR as memory from there on. */
void case_peer_memory(char **arg)
{
	u64 from = strtoull(arg[0], NULL, 0);
	struct map m;

	oh_open(nvme_bdf);
	check(map_peer(&m, vram_bdf, 2, from, PAGE) == -EBUSY, "a BAR that is the kernel's memory is refused");
	check(map_peer(&m, vram_bdf, 2, from - PAGE, 2 * PAGE) == -EBUSY && map_peer(&m, vram_bdf, 2, 0, from + PAGE) == -EBUSY,
	      "a part of which one page is, too");
	check(!map_peer(&m, vram_bdf, 2, 0, from), "what lies before it can be mapped");
}

/* mask: narrower addresses. */
void case_mask(char **arg)
{
	struct oh_mask mask = { .bits = 32 };
	struct map m;
	u8 *at = memory(64 * MIB);
	u32 i;

	oh_open(nvme_bdf);
	check(call(oh, OH_MASK, &(struct oh_mask){ .bits = 65 }) == -EINVAL &&
	      call(oh, OH_MASK, &(struct oh_mask){ .bits = 8 }) == -EINVAL, "only masks that make sense");
	check(!call(oh, OH_MASK, &mask) && oh_get_info().mask_bits == 32, "addresses of 32 bits can be asked for");
	check(!map_user(&m, at, 64 * MIB), "memory can be mapped with them");
	for (i = 0; i < m.a.nsegs && m.seg[i].addr + m.seg[i].len <= 1ull << 32; i++)
		;
	check(i == m.a.nsegs, "all runs end below 4 GiB");
	check(call(oh, OH_MASK, &mask) == -EBUSY, "not while something is mapped");
	check(!unmap(&m) && !call(oh, OH_MASK, &(struct oh_mask){ .bits = 28 }), "28 bits can be asked for");
	if (translated()) {
		check(!map_user(&m, at, MIB) && m.seg[0].addr + m.seg[0].len <= 1 << 28, "behind an IOMMU, memory can be mapped");
	} else {
		int r = map_user(&m, at, 64 * MIB);

		check(r == -ERANGE && m.a.why == OH_WHY_MASK && m.a.bad_addr + m.a.bad_len > 1 << 28,
		      "without an IOMMU, memory beyond is refused by name (%llx)", (ull)m.a.bad_addr);
	}
	close(oh);
	oh_open(nvme_bdf);
	check(oh_get_info().mask_bits == 64, "who comes next has 64 again");
}

static bool line_off(void)
{
	return config16(nvme_bdf, 4) & 0x400;
}

/* irq: a completion that is told by an event fd. */
void case_irq(char **arg)
{
	s32 fd[3] = { eventfd(0, 0), -1, eventfd(0, EFD_NONBLOCK) }, bad[1] = { oh };
	struct queue q;
	struct sqe read = { .opcode = 2, .nsid = 1, .cdw = { 16, 0, 7 } };
	struct pollfd ready = { .fd = fd[2], .events = POLLIN };
	struct oh_irqs a = { .fds = (u64)(uintptr_t)fd, .count = 3 };
	u64 count;

	nvme_open();
	bad[0] = oh;
	check(line_off(), "the interrupt line is off");
	check(!call(oh, OH_IRQS, &a), "three vectors, one without a listener");
	q = (struct queue){ .sq = (void *)(host + 10 * PAGE), .cq = (void *)(host + 11 * PAGE), .sq_bus = bus(&host_map, 10 * PAGE),
			    .cq_bus = bus(&host_map, 11 * PAGE), .id = 2, .depth = 16, .vector = 2 };
	check(!queue_create(&q), "a queue with an interrupt");
	read.prp1 = bus(&host_map, 12 * PAGE);
	push(&q, &read);
	check(poll(&ready, 1, 5000) == 1 && eventfd_read(fd[2], &count) == 0 && count >= 1, "its completion signals the event fd");
	check(!reap(&q, 0.1) && has_pattern(host + 12 * PAGE, 16, 8), "and is there");
	check(call(oh, OH_IRQS, &(struct oh_irqs){ .fds = (u64)(uintptr_t)bad, .count = 1 }) == -EINVAL, "only event fds");
	push(&q, &read);
	check(poll(&ready, 1, 5000) == 1, "a refusal leaves the vectors as they were");
	check(call(oh, OH_IRQS, &(struct oh_irqs){ .fds = (u64)(uintptr_t)fd, .count = 4000 }) == -EINVAL &&
	      call(oh, OH_IRQS, &(struct oh_irqs){ .fds = 8, .count = 2 }) == -EFAULT, "no more than there are");
	check(!call(oh, OH_IRQS, &(struct oh_irqs){ .count = 0 }), "they can be given back");
	check(line_off(), "which leaves the interrupt line off");
	check(!call(oh, OH_IRQS, &a), "and asked for again");
	check(!oh_reset() && !oh_start(0) && !nvme_up(), "the drive comes up after a reset");
	q.tail = q.head = 0;
	memset(host + 10 * PAGE, 0, 2 * PAGE);
	while (!eventfd_read(fd[2], &count))
		;
	check(!queue_create(&q), "and its queue");
	push(&q, &read);
	check(poll(&ready, 1, 5000) == 1, "interrupts outlive the reset");
}

/* edu: a device with 28-bit DMA addresses that cannot be reset. */
void case_edu(char **arg)
{
	volatile u8 *reg;
	struct map m, probe;
	u8 *at = memory(64 * PAGE);
	u32 i, page = 64;

	oh_open(edu_bdf);
	check(!(oh_get_info().flags & OH_INFO_RESET) && oh_reset() == -EOPNOTSUPP, "it cannot be reset");
	check(oh_start(0) == -EOPNOTSUPP && !(config16(edu_bdf, 4) & 4), "so DMA stays off");
	check(!oh_start(OH_START_UNRESET) && config16(edu_bdf, 4) & 4, "until somebody vouches for it");
	check(!call(oh, OH_MASK, &(struct oh_mask){ .bits = 28 }), "its mask can be set");
	reg = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, oh, OH_BAR_OFFSET(0));
	if (reg == MAP_FAILED)
		die("cannot map BAR0");
	for (i = 0; i < 64; i++) {
		int r = map_user(&probe, at + i * PAGE, PAGE);

		if (!r) {
			m = probe;
			page = i;
		} else if (r != -ERANGE || probe.a.why != OH_WHY_MASK) {
			check(false, "page %u: error %d, reason %u", i, r, probe.a.why);
		}
	}
	if (translated())
		check(page == 63, "behind an IOMMU every page can be mapped");
	if (page == 64) {
		check(oh_get_info().mappings == 0, "no page lies where it reaches");
		return;
	}
	pattern(at + page * PAGE, 3, 4);
	*(volatile u64 *)(reg + 0x80) = bus(&m, 0);
	*(volatile u64 *)(reg + 0x88) = 0x40000;
	*(volatile u64 *)(reg + 0x90) = 2048;
	*(volatile u64 *)(reg + 0x98) = 1;
	while (*(volatile u64 *)(reg + 0x98) & 1)
		usleep(1000);
	*(volatile u64 *)(reg + 0x80) = 0x40000;
	*(volatile u64 *)(reg + 0x88) = bus(&m, 2048);
	*(volatile u64 *)(reg + 0x98) = 3;
	while (*(volatile u64 *)(reg + 0x98) & 1)
		usleep(1000);
	check(has_pattern(at + page * PAGE + 2048, 3, 4), "its DMA reads and writes the page");
	close(oh);
	munmap((void *)reg, PAGE);
	check(!(config16(edu_bdf, 4) & 4), "DMA is off after close");
}

/* bounce: with swiotlb=force, all memory would be copied. */
void case_bounce(char **arg)
{
	struct map m;

	oh_open(nvme_bdf);
	check(map_user(&m, memory(MIB), MIB) == -EIO && m.a.why == OH_WHY_BOUNCE, "memory that would be copied is refused");
	check(oh_get_info().mappings == 0 && oh_get_info().charged == 0, "and nothing is left of it");
}
