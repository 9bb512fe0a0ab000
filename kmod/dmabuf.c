// SPDX-License-Identifier: GPL-2.0
/*
 * OH_MAP_DMABUF: another driver's buffer, such as GPU memory. One way for all exporters, static and dynamic alike: their
 * calls are made with the buffer's dma_resv held, and the exporter can always take the buffer back.
 */
#include <linux/dma-buf.h>
#include <linux/dma-resv.h>
#include <linux/module.h>
#include "compat.h"
#include "oh.h"

OH_IMPORT_DMA_BUF;

/* How long an exporter may take to move or clear a buffer before it can be used. */
#define OH_FENCE_TIMEOUT	(10 * HZ)

static void oh_release_locked(struct oh_mapping *m)
{
	struct dma_buf_attachment *at = m->dmabuf.attachment;

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

/* With the dma_resv held: pin, map, wait, and look at the addresses. */
static int oh_acquire(struct oh_mapping *m, struct oh_map *a, struct oh_runs *runs, u64 len)
{
	struct dma_buf_attachment *at = m->dmabuf.attachment;
	struct sg_table *sgt;
	long left;
	int r;

	if (!(a->flags & OH_MAP_NOPIN)) {
		r = dma_buf_pin(at);	/* does nothing where the exporter has no pin */
		if (r)
			return r;
		m->dmabuf.pinned = true;
	}
	sgt = dma_buf_map_attachment(at, m->dir);
	if (IS_ERR(sgt))
		return PTR_ERR(sgt);
	m->dmabuf.sgt = sgt;
	/* The core waits for static importers only. */
	left = dma_resv_wait_timeout(at->dmabuf->resv, DMA_RESV_USAGE_KERNEL, true, OH_FENCE_TIMEOUT);
	if (left <= 0)
		return left ?: -ETIMEDOUT;
	r = oh_runs_from_sgt(m->d, runs, sgt, a, a->offset, len);
	return r ?: oh_runs_check(runs, a);
}

/* With `lock` held, and the device there. */
static int oh_attach(struct oh_mapping *m, struct dma_buf *buf, struct oh_map *a, struct oh_runs *runs, u64 len)
{
	struct dma_buf_attachment *at = dma_buf_dynamic_attach(buf, &m->d->pdev->dev, &oh_attach_ops, m);
	int r;

	if (IS_ERR(at))
		return PTR_ERR(at);
	dma_resv_lock(buf->resv, NULL);
	m->dmabuf.attachment = at;
	r = oh_acquire(m, a, runs, len);
	if (!r)
		r = oh_mapping_add(m, a);
	if (r)
		oh_release_locked(m);
	dma_resv_unlock(buf->resv);
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

	dma_resv_lock(buf->resv, NULL);
	oh_release_locked(m);
	dma_resv_unlock(buf->resv);
	dma_buf_detach(buf, at);
	dma_buf_put(buf);
}
