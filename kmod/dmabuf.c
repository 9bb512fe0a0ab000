// SPDX-License-Identifier: GPL-2.0
/*
 * OH_MAP_DMABUF: another driver's buffer, such as GPU memory. One way for all exporters, static and dynamic alike: their
 * calls are made with the buffer's dma_resv held, and the exporter can always take the buffer back. The exception is in
 * oh_is_static_for().
 */
#include <linux/dma-buf.h>
#include <linux/dma-resv.h>
#include <linux/module.h>
#include "compat.h"
#include "oh.h"

OH_IMPORT_DMA_BUF;

/* How long an exporter may take to move or clear a buffer before it can be used. */
#define OH_FENCE_TIMEOUT	(10 * HZ)

/*
 * Older cores map a static exporter's buffer when a dynamic importer attaches to it, in both directions: the device could write
 * what it may only read. There a mapping in one direction attaches as a static importer. Such a mapping cannot be revoked; on those
 * kernels an exporter without a pin never moves its buffer.
 */
static bool oh_is_static_for(const struct oh_mapping *m, struct dma_buf *buf)
{
	return OH_MAPPING_AT_ATTACH && m->dir != DMA_BIDIRECTIONAL && !dma_buf_is_dynamic(buf);
}

static bool oh_is_static(const struct dma_buf_attachment *at)
{
	return !at->importer_ops;
}

/* A static mapping is nobody's but ours; any other is the exporter's, too. */
static void oh_lock_buffer(struct dma_buf_attachment *at)
{
	if (!oh_is_static(at))
		dma_resv_lock(at->dmabuf->resv, NULL);
}

static void oh_unlock_buffer(struct dma_buf_attachment *at)
{
	if (!oh_is_static(at))
		dma_resv_unlock(at->dmabuf->resv);
}

/* With the buffer locked. */
static void oh_release_locked(struct oh_mapping *m)
{
	struct dma_buf_attachment *at = m->dmabuf.attachment;

	if (oh_is_static(at)) {
		if (m->dmabuf.sgt)
			oh_unmap_static(at, m->dmabuf.sgt, m->dir);
		m->dmabuf.sgt = NULL;
		return;
	}
	dma_resv_assert_held(at->dmabuf->resv);
	if (m->dmabuf.sgt)
		dma_buf_unmap_attachment(at, m->dmabuf.sgt, m->dir);
	m->dmabuf.sgt = NULL;
	if (m->dmabuf.pinned)
		dma_buf_unpin(at);
	m->dmabuf.pinned = false;
}

/*
 * The exporter revokes or moves the buffer, and may wait without limit until it is unmapped: that happens here. It also
 * calls when there is nothing to revoke, for a buffer that comes back.
 */
static void oh_revoke(struct dma_buf_attachment *at)
{
	struct oh_mapping *m = at->importer_priv;

	if (!m->dmabuf.sgt)
		return;
	oh_stop(m->d, OH_STOPPED_REVOKED);
	oh_release_locked(m);
}

static const struct dma_buf_attach_ops oh_attach_ops = {
	.allow_peer2peer = true,
	.oh_invalidate_op = oh_revoke,
};

static int oh_wait_fences(struct dma_buf *buf)
{
	long left = dma_resv_wait_timeout(buf->resv, DMA_RESV_USAGE_KERNEL, true, OH_FENCE_TIMEOUT);

	return left > 0 ? 0 : left ?: -ETIMEDOUT;
}

/* Pin and map. */
static int oh_hold(struct oh_mapping *m, u32 flags)
{
	struct dma_buf_attachment *at = m->dmabuf.attachment;
	struct sg_table *sgt;
	int r;

	if (oh_is_static(at)) {
		/* The core waits, too, and without a limit. */
		r = oh_wait_fences(at->dmabuf);
		if (r)
			return r;
		sgt = oh_map_static(at, m->dir);
	} else {
		if (!(flags & OH_MAP_NOPIN)) {
			r = dma_buf_pin(at);	/* does nothing where the exporter has no pin */
			if (r)
				return r;
			m->dmabuf.pinned = true;
		}
		sgt = dma_buf_map_attachment(at, m->dir);
	}
	if (IS_ERR(sgt))
		return PTR_ERR(sgt);
	m->dmabuf.sgt = sgt;
	return 0;
}

/* With the buffer locked: hold it, wait, and look at the addresses. */
static int oh_acquire(struct oh_mapping *m, struct oh_map *a, struct oh_runs *runs, u64 len)
{
	int r = oh_hold(m, a->flags);

	if (!r)
		r = oh_wait_fences(m->dmabuf.attachment->dmabuf);
	if (!r)
		r = oh_runs_from_sgt(m->d, runs, m->dmabuf.sgt, a, a->offset, len);
	return r ?: oh_runs_check(runs, a);
}

/* With `lock` held, and the device there. */
static int oh_attach(struct oh_mapping *m, struct dma_buf *buf, struct oh_map *a, struct oh_runs *runs, u64 len)
{
	struct device *dev = &m->d->pdev->dev;
	struct dma_buf_attachment *at;
	int r;

	at = oh_is_static_for(m, buf) ? dma_buf_attach(buf, dev) : dma_buf_dynamic_attach(buf, dev, &oh_attach_ops, m);
	if (IS_ERR(at))
		return PTR_ERR(at);
	oh_lock_buffer(at);
	m->dmabuf.attachment = at;
	r = oh_acquire(m, a, runs, len);
	if (!r)
		r = oh_mapping_add(m, a);
	if (r)
		oh_release_locked(m);
	oh_unlock_buffer(at);
	if (r)
		dma_buf_detach(buf, at);
	return r;
}

/* Exporters and the core also answer with codes that are not for user space. */
static int oh_public_error(int r)
{
	return r == -ENOTSUPP ? -EOPNOTSUPP : r;
}

int oh_map_dmabuf(struct oh_dev *d, struct oh_map *a, struct oh_runs *runs)
{
	struct oh_mapping *m;
	struct dma_buf *buf;
	u64 len;
	int r;

	if (oh_check_common(a, OH_MAP_NOPIN) || a->domain || a->bus || a->devfn || a->bar)
		return -EINVAL;
	buf = dma_buf_get(a->fd);
	if (IS_ERR(buf))
		return PTR_ERR(buf);
	r = -EINVAL;
	if (a->offset >= buf->size)
		goto put;
	len = a->len ?: buf->size - a->offset;
	if (len > buf->size - a->offset)
		goto put;
	r = -EACCES;
	if ((a->flags & OH_MAP_WRITE) && !(buf->file->f_mode & FMODE_WRITE))
		goto put;
	/* All of the buffer is held, whatever part of it is asked for. */
	m = oh_mapping_new(d, OH_KIND_DMABUF, a, buf->size);
	r = PTR_ERR_OR_ZERO(m);
	if (r)
		goto put;
	mutex_lock(&d->lock);
	r = d->gone ? -ENODEV : oh_attach(m, buf, a, runs, len);
	mutex_unlock(&d->lock);
	if (!r)
		return 0;
	oh_mapping_free(m);
put:
	dma_buf_put(buf);
	return oh_public_error(r);
}

void oh_undo_dmabuf(struct oh_mapping *m)
{
	struct dma_buf_attachment *at = m->dmabuf.attachment;
	struct dma_buf *buf = at->dmabuf;

	oh_lock_buffer(at);
	oh_release_locked(m);
	oh_unlock_buffer(at);
	dma_buf_detach(buf, at);
	dma_buf_put(buf);
}
