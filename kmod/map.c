// SPDX-License-Identifier: GPL-2.0
/* What all mappings share: ids, what they count against RLIMIT_MEMLOCK, and the list of runs, which is checked here. */
#include <linux/capability.h>
#include <linux/cred.h>
#include <linux/dma-map-ops.h>
#include <linux/sched/signal.h>
#include <linux/sched/user.h>
#include <linux/slab.h>
#include "oh.h"

#define OH_MAX_MAPPINGS	65536

/* As io_uring counts: by user, without the mmap_lock, which must not be taken under our locks. */
static int oh_charge(struct oh_mapping *m, unsigned long pages)
{
	unsigned long limit = capable(CAP_IPC_LOCK) ? ULONG_MAX : rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
	struct user_struct *user = get_uid(current_user());
	long old = atomic_long_read(&user->locked_vm);

	do {
		if ((unsigned long)old > limit || pages > limit - old) {
			free_uid(user);
			return -ENOMEM;
		}
	} while (!atomic_long_try_cmpxchg(&user->locked_vm, &old, old + pages));
	m->user = user;
	m->pages = pages;
	return 0;
}

struct oh_mapping *oh_mapping_new(struct oh_dev *d, enum oh_kind kind, const struct oh_map *a, u64 bytes)
{
	struct oh_mapping *m = kzalloc(sizeof(*m), GFP_KERNEL_ACCOUNT);
	int r;

	if (!m)
		return ERR_PTR(-ENOMEM);
	m->d = d;
	m->kind = kind;
	m->dir = !(a->flags & OH_MAP_WRITE) ? DMA_TO_DEVICE :
		 !(a->flags & OH_MAP_READ) ? DMA_FROM_DEVICE : DMA_BIDIRECTIONAL;
	if (bytes) {
		r = oh_charge(m, DIV_ROUND_UP_ULL(bytes, PAGE_SIZE));
		if (r) {
			kfree(m);
			return ERR_PTR(r);
		}
	}
	return m;
}

void oh_mapping_free(struct oh_mapping *m)
{
	if (m->user) {
		atomic_long_sub(m->pages, &m->user->locked_vm);
		free_uid(m->user);
	}
	kfree(m);
}

/* Makes a finished mapping one that OH_UNMAP finds. With `lock` held. */
int oh_mapping_add(struct oh_mapping *m, struct oh_map *a)
{
	struct oh_dev *d = m->d;
	int r;

	if (d->map_count >= OH_MAX_MAPPINGS)
		return -EMFILE;
	/* Cyclic, so that an id that was given back does not soon mean another mapping. */
	r = xa_alloc_cyclic(&d->maps, &m->id, m, XA_LIMIT(1, INT_MAX), &d->next_id, GFP_KERNEL_ACCOUNT);
	if (r < 0)
		return r;
	d->map_count++;
	d->charged += m->pages;
	a->id = m->id;
	return 0;
}

static void oh_mapping_remove(struct oh_mapping *m)
{
	struct oh_dev *d = m->d;

	xa_erase(&d->maps, m->id);
	d->map_count--;
	d->charged -= m->pages;
	switch (m->kind) {
	case OH_KIND_USER:
		oh_undo_user(m);
		break;
	case OH_KIND_DMABUF:
		oh_undo_dmabuf(m);
		break;
	case OH_KIND_PEER:
		oh_undo_peer(m);
		break;
	}
	oh_mapping_free(m);
}

int oh_unmap(struct oh_dev *d, u32 id)
{
	struct oh_mapping *m;

	lockdep_assert_held(&d->lock);
	m = xa_load(&d->maps, id);
	if (!m)
		return -ENOENT;
	oh_mapping_remove(m);
	return 0;
}

void oh_unmap_all(struct oh_dev *d)
{
	struct oh_mapping *m;
	unsigned long id;

	xa_for_each(&d->maps, id, m)
		oh_mapping_remove(m);
}

/* What holds for every kind of mapping; `flags` are those that the kind knows besides the two directions. */
int oh_check_common(const struct oh_map *a, u32 flags)
{
	flags |= OH_MAP_READ | OH_MAP_WRITE | OH_MAP_CHUNKED;
	if (a->flags & ~flags || !(a->flags & (OH_MAP_READ | OH_MAP_WRITE)))
		return -EINVAL;
	if (!(a->flags & OH_MAP_CHUNKED) != !a->chunk)
		return -EINVAL;
	if (memchr_inv(a->reserved, 0, sizeof(a->reserved)))
		return -EINVAL;
	return 0;
}

int oh_fail(struct oh_map *a, int error, u32 why, u64 addr, u64 offset, u64 len)
{
	a->why = why;
	a->bad_addr = addr;
	a->bad_offset = offset;
	a->bad_len = len;
	return error;
}

int oh_runs_alloc(struct oh_runs *runs, u32 room)
{
	runs->room = max(room, 1u);
	runs->seg = kvmalloc_array(runs->room, sizeof(*runs->seg), GFP_KERNEL_ACCOUNT);
	return runs->seg ? 0 : -ENOMEM;
}

/*
 * Would the kernel have to copy, or to flush caches, between the device and the memory? Behind an IOMMU dma_need_sync() says
 * yes as soon as any driver was bounced; but there only untrusted devices (Thunderbolt) are.
 */
static bool oh_bounced(struct oh_dev *d, dma_addr_t addr)
{
	struct device *dev = &d->pdev->dev;

	if (oh_translated(d))
		return d->pdev->untrusted || !dev_is_dma_coherent(dev);
	return dma_need_sync(dev, addr);
}

/* Adds a run, joined to the one before where it continues it. */
int oh_runs_add(struct oh_dev *d, struct oh_runs *runs, struct oh_map *a, u64 addr, u64 len)
{
	struct oh_seg *last = runs->count ? &runs->seg[runs->count - 1] : NULL;

	if (addr + len - 1 < addr || addr + len - 1 > dma_get_mask(&d->pdev->dev))
		return oh_fail(a, -ERANGE, OH_WHY_MASK, addr, runs->bytes, len);
	if (oh_bounced(d, addr))
		return oh_fail(a, -EIO, OH_WHY_BOUNCE, addr, runs->bytes, len);
	if (last && last->addr + last->len == addr) {
		last->len += len;
	} else {
		if (WARN_ON_ONCE(runs->count == runs->room))
			return -EIO;
		runs->seg[runs->count++] = (struct oh_seg){ .addr = addr, .len = len };
	}
	runs->bytes += len;
	return 0;
}

/* The runs of [offset, offset + len) of what the table maps. Its entries may have no pages: only addresses are looked at. */
int oh_runs_from_sgt(struct oh_dev *d, struct oh_runs *runs, struct sg_table *sgt, struct oh_map *a, u64 offset, u64 len)
{
	struct scatterlist *sg;
	u64 at = 0;
	int i, r;

	r = oh_runs_alloc(runs, sgt->nents);
	if (r)
		return r;
	for_each_sgtable_dma_sg(sgt, sg, i) {
		u64 end = at + sg_dma_len(sg);
		u64 from = max(at, offset), to = min(end, offset + len);

		if (from < to) {
			r = oh_runs_add(d, runs, a, sg_dma_address(sg) + (from - at), to - from);
			if (r)
				return r;
		}
		at = end;
	}
	if (runs->bytes != len)
		return oh_fail(a, -EIO, OH_WHY_SHORT, 0, runs->bytes, len - runs->bytes);
	return 0;
}

/* Do the runs keep what the caller asked for? Tells how many there are, also if there is no room for them. */
int oh_runs_check(struct oh_runs *runs, struct oh_map *a)
{
	u64 offset = 0;
	u32 i;

	a->nsegs = runs->count;
	a->len = runs->bytes;
	for (i = 0; a->chunk && i + 1 < runs->count; i++) {
		u64 rest;

		offset += runs->seg[i].len;
		div64_u64_rem(offset, a->chunk, &rest);
		if (rest)
			return oh_fail(a, -EMSGSIZE, OH_WHY_CHUNK, runs->seg[i].addr + runs->seg[i].len - rest,
				       offset - rest, rest);
	}
	if (runs->count > a->room)
		return oh_fail(a, -ENOSPC, OH_WHY_ROOM, 0, 0, 0);
	return 0;
}
