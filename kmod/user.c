// SPDX-License-Identifier: GPL-2.0
/* OH_MAP_USER: memory of the calling process, pinned. */
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/swiotlb.h>
#include <linux/uaccess.h>
#include "compat.h"
#include "oh.h"

/* Pages pinned by one call, so that a signal is seen between two. */
#define OH_PIN_BATCH	(1ul << 15)

static void oh_unpin(struct sg_table *sgt, bool dirty)
{
	struct scatterlist *sg;
	int i;

	for_each_sgtable_sg(sgt, sg, i)
		unpin_user_page_range_dirty_lock(sg_page(sg), PAGE_ALIGN(sg->length) >> PAGE_SHIFT, dirty);
	sg_free_table(sgt);
}

/* Pins the pages and makes a table of them; the array of pages is needed for no longer. */
static int oh_pin(struct oh_mapping *m, u64 address, unsigned long pages)
{
	unsigned int gup = FOLL_LONGTERM | (m->dir == DMA_TO_DEVICE ? OH_PIN_READ : FOLL_WRITE);
	struct page **page = kvmalloc_array(pages, sizeof(*page), GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
	unsigned long got = 0;
	int r = 0;

	if (!page)
		return -ENOMEM;
	while (got < pages && r >= 0) {
		r = fatal_signal_pending(current) ? -EINTR :
		    pin_user_pages_fast(address + got * PAGE_SIZE, min(pages - got, OH_PIN_BATCH), gup, page + got);
		if (r > 0)
			got += r;
		else if (!r)
			r = -EFAULT;
	}
	if (r >= 0)
		r = sg_alloc_table_from_pages_segment(&m->user_memory.sgt, page, pages, 0, pages << PAGE_SHIFT,
						      UINT_MAX & PAGE_MASK, GFP_KERNEL_ACCOUNT);
	if (r && got)
		unpin_user_pages(page, got);
	kvfree(page);
	return r;
}

/*
 * Without translation the address is the memory's own. One that the device cannot reach would be bounced, or warned about
 * in the kernel's log, so it is refused before.
 */
static int oh_check_direct(struct oh_dev *d, struct sg_table *sgt, struct oh_map *a)
{
	struct device *dev = &d->pdev->dev;
	struct scatterlist *sg;
	u64 offset = 0;
	int i;

	if (oh_translated(d))
		return 0;
	for_each_sgtable_sg(sgt, sg, i) {
		if (sg_phys(sg) + sg->length - 1 > dma_get_mask(dev))
			return oh_fail(a, -ERANGE, OH_WHY_MASK, sg_phys(sg), offset, sg->length);
		if (is_swiotlb_force_bounce(dev))
			return oh_fail(a, -EIO, OH_WHY_BOUNCE, sg_phys(sg), offset, sg->length);
		offset += sg->length;
	}
	return 0;
}

/* With `lock` held, and the device there. */
static int oh_map_pinned(struct oh_mapping *m, struct oh_map *a, struct oh_runs *runs)
{
	struct sg_table *sgt = &m->user_memory.sgt;
	struct oh_dev *d = m->d;
	int r;

	r = oh_check_direct(d, sgt, a);
	if (r)
		return r;
	r = dma_map_sgtable(&d->pdev->dev, sgt, m->dir, OH_DMA_ATTRS);
	if (r)
		return r;
	r = oh_runs_from_sgt(d, runs, sgt, a, 0, a->len);
	if (!r)
		r = oh_runs_check(runs, a);
	if (!r)
		r = oh_mapping_add(m, a);
	if (r)
		dma_unmap_sgtable(&d->pdev->dev, sgt, m->dir, OH_DMA_ATTRS);
	return r;
}

int oh_map_user(struct oh_dev *d, struct oh_map *a, struct oh_runs *runs)
{
	struct oh_mapping *m;
	int r;

	if (oh_check_common(a, 0) || a->fd || a->domain || a->bus || a->devfn || a->bar)
		return -EINVAL;
	if (!a->len || !PAGE_ALIGNED(a->offset | a->len))
		return -EINVAL;
	if (a->offset + a->len < a->offset || !access_ok(u64_to_user_ptr(a->offset), a->len))
		return -EFAULT;
	/* More than there is cannot be pinned, and must not cost an array of that length first. */
	if (a->len >> PAGE_SHIFT > totalram_pages() || a->len >> PAGE_SHIFT > INT_MAX / sizeof(struct page *))
		return -ENOMEM;
	m = oh_mapping_new(d, OH_KIND_USER, a, a->len);
	if (IS_ERR(m))
		return PTR_ERR(m);
	r = oh_pin(m, a->offset, a->len >> PAGE_SHIFT);
	if (r)
		goto free;
	mutex_lock(&d->lock);
	r = d->gone ? -ENODEV : oh_map_pinned(m, a, runs);
	mutex_unlock(&d->lock);
	if (!r)
		return 0;
	oh_unpin(&m->user_memory.sgt, false);
free:
	oh_mapping_free(m);
	return r;
}

void oh_undo_user(struct oh_mapping *m)
{
	struct sg_table *sgt = &m->user_memory.sgt;

	dma_unmap_sgtable(&m->d->pdev->dev, sgt, m->dir, OH_DMA_ATTRS);
	oh_unpin(sgt, m->dir != DMA_TO_DEVICE);
}
