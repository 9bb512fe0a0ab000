// SPDX-License-Identifier: GPL-2.0
/* The module's calls, as a program makes them. */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include "test.h"

#define ROOM	65536

int oh = -1;

int oh_try_open(const char *bdf)
{
	char path[64];
	int fd;

	snprintf(path, sizeof(path), "/dev/onehop-%s", bdf);
	fd = open(path, O_RDWR | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

void oh_open(const char *bdf)
{
	oh = oh_try_open(bdf);
	if (oh < 0) {
		errno = -oh;
		die("cannot open onehop-%s", bdf);
	}
}

struct oh_info oh_get_info(void)
{
	struct oh_info info = {};

	if (call(oh, OH_INFO, &info))
		die("OH_INFO");
	return info;
}

/* Another may hold the device's lock for a moment. */
int oh_reset(void)
{
	int r, tries = 0;

	do {
		r = call(oh, OH_RESET, NULL);
		if (r == -EAGAIN)
			usleep(10000);
	} while (r == -EAGAIN && tries++ < 100);
	return r;
}

int oh_start(u32 flags)
{
	struct oh_start a = { .flags = flags, .epoch = oh_get_info().epoch };

	return call(oh, OH_START, &a);
}

int map_do(struct map *m, unsigned long cmd, struct oh_map a)
{
	static struct oh_seg room[ROOM];
	int r;

	a.segs = (u64)(uintptr_t)room;
	a.room = a.room ?: ROOM;
	if (!(a.flags & (OH_MAP_READ | OH_MAP_WRITE)))
		a.flags |= OH_MAP_READ | OH_MAP_WRITE;
	r = call(oh, cmd, &a);
	m->a = a;
	m->seg = NULL;
	if (!r) {
		m->seg = malloc(a.nsegs * sizeof(*m->seg));
		memcpy(m->seg, room, a.nsegs * sizeof(*m->seg));
	}
	return r;
}

int map_user(struct map *m, void *at, u64 len)
{
	return map_do(m, OH_MAP_USER, (struct oh_map){ .offset = (u64)(uintptr_t)at, .len = len });
}

int map_dmabuf(struct map *m, int fd, u32 flags)
{
	return map_do(m, OH_MAP_DMABUF, (struct oh_map){ .fd = fd, .flags = flags });
}

int map_part(struct map *m, int fd, u64 offset, u64 len)
{
	return map_do(m, OH_MAP_DMABUF, (struct oh_map){ .fd = fd, .offset = offset, .len = len });
}

int map_peer(struct map *m, const char *bdf, u32 bar, u64 offset, u64 len)
{
	unsigned int domain, bus, slot, function;

	if (sscanf(bdf, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
		die("'%s' is no PCI address", bdf);
	return map_do(m, OH_MAP_PEER, (struct oh_map){
		.domain = domain, .bus = bus, .devfn = slot << 3 | function, .bar = bar, .offset = offset, .len = len });
}

int unmap(struct map *m)
{
	struct oh_unmap a = { .id = m->a.id };

	return call(oh, OH_UNMAP, &a);
}

/* What the device sees of the byte at `offset`. */
u64 bus(const struct map *m, u64 offset)
{
	u32 i;

	for (i = 0; i < m->a.nsegs; i++) {
		if (offset < m->seg[i].len)
			return m->seg[i].addr + offset;
		offset -= m->seg[i].len;
	}
	die("offset %llu is beyond the mapping", (ull)offset);
}

u8 *memory(u64 len)
{
	u8 *at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (at == MAP_FAILED)
		die("no memory");
	return at;
}
