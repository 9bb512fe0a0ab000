// SPDX-License-Identifier: GPL-2.0
/* OH_IRQS: MSI-X or MSI vectors that signal event fds. */
#include <linux/eventfd.h>
#include <linux/interrupt.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include "compat.h"
#include "oh.h"

struct oh_vector {
	struct eventfd_ctx *eventfd;	/* NULL: nobody listens */
	int irq;			/* 0: not requested */
};

static void oh_read_msix(struct pci_dev *pdev, u32 *table, u16 *size)
{
	u16 control = 0;

	*table = 0;
	*size = 0;
	if (!pdev->msix_cap)
		return;
	pci_read_config_dword(pdev, pdev->msix_cap + PCI_MSIX_TABLE, table);
	pci_read_config_word(pdev, pdev->msix_cap + PCI_MSIX_FLAGS, &control);
	*size = control & PCI_MSIX_FLAGS_QSIZE;
}

/* Reads configuration space, so not while the function may be reset. */
void oh_vectors_look(struct oh_dev *d)
{
	int count = pci_msix_vec_count(d->pdev);

	if (count <= 0)
		count = pci_msi_vec_count(d->pdev);
	d->max_vectors = max(count, 0);
	oh_read_msix(d->pdev, &d->msix_table, &d->msix_size);
}

/*
 * The kernel asks the device where its table of vectors is, and writes there. All ones name the BAR of a virtual function, and an
 * offset beyond it. With `config` held.
 */
static bool oh_vectors_moved(struct oh_dev *d)
{
	u32 table;
	u16 size;

	if (READ_ONCE(d->pdev->error_state) != pci_channel_io_normal || !pci_device_is_present(d->pdev))
		return true;
	oh_read_msix(d->pdev, &table, &size);
	return table != d->msix_table || size != d->msix_size;
}

static irqreturn_t oh_interrupt(int irq, void *eventfd)
{
	oh_eventfd_signal(eventfd);
	return IRQ_HANDLED;
}

static void oh_vectors_free(struct oh_vector *vector, u32 count)
{
	u32 i;

	for (i = 0; i < count; i++) {
		if (vector[i].irq)
			free_irq(vector[i].irq, vector[i].eventfd);
		if (vector[i].eventfd)
			eventfd_ctx_put(vector[i].eventfd);
	}
	kvfree(vector);
}

/* The kernel turns the interrupt line on again, which nobody serves; another device may share it. */
static void oh_vectors_off(struct pci_dev *pdev)
{
	pci_free_irq_vectors(pdev);
	pci_intx(pdev, 0);
}

/* With `lock` and `config` held. */
static void oh_irqs_drop(struct oh_dev *d)
{
	if (!d->vectors)
		return;
	oh_vectors_free(d->vectors, d->vector_count);
	d->vectors = NULL;
	d->vector_count = 0;
	oh_vectors_off(d->pdev);
}

/* With `lock` held. Waits for the end of another task's reset. */
void oh_irqs_free(struct oh_dev *d)
{
	down(&d->config);
	oh_irqs_drop(d);
	up(&d->config);
}

static struct oh_vector *oh_vectors_get(const s32 *fd, u32 count)
{
	struct oh_vector *vector = kvcalloc(count, sizeof(*vector), GFP_KERNEL_ACCOUNT);
	u32 i;

	if (!vector)
		return ERR_PTR(-ENOMEM);
	for (i = 0; i < count; i++) {
		struct eventfd_ctx *eventfd;

		if (fd[i] == -1)
			continue;
		eventfd = eventfd_ctx_fdget(fd[i]);
		if (IS_ERR(eventfd)) {
			oh_vectors_free(vector, i);
			return ERR_CAST(eventfd);
		}
		vector[i].eventfd = eventfd;
	}
	return vector;
}

/* With `lock` and `config` held; takes the vectors over. -EIO leaves the old ones; after another error there are none. */
static int oh_irqs_set(struct oh_dev *d, struct oh_vector *vector, u32 count)
{
	u32 i;
	int r;

	if (oh_vectors_moved(d))
		return -EIO;
	oh_irqs_drop(d);
	r = pci_alloc_irq_vectors(d->pdev, count, count, PCI_IRQ_MSIX | PCI_IRQ_MSI);
	if (r < 0)
		return r;
	for (i = 0; i < count; i++) {
		int irq = pci_irq_vector(d->pdev, i);

		if (!vector[i].eventfd)
			continue;
		r = request_irq(irq, oh_interrupt, 0, d->name, vector[i].eventfd);
		if (r)
			goto undo;
		vector[i].irq = irq;
	}
	d->vectors = vector;
	d->vector_count = count;
	return 0;
undo:
	while (i--) {
		if (vector[i].irq)
			free_irq(vector[i].irq, vector[i].eventfd);
		vector[i].irq = 0;
	}
	oh_vectors_off(d->pdev);
	return r;
}

static int oh_irqs_replace(struct oh_dev *d, struct oh_vector *vector, u32 count)
{
	int r;

	down(&d->config);
	r = oh_irqs_set(d, vector, count);
	up(&d->config);
	return r;
}

int oh_irqs(struct oh_dev *d, const struct oh_irqs *a)
{
	struct oh_vector *vector = NULL;
	s32 *fd;
	int r = 0;

	if (a->reserved || (!a->count && a->fds))
		return -EINVAL;
	if (a->count > PCI_MSIX_FLAGS_QSIZE + 1)
		return -EINVAL;
	if (a->count) {
		fd = memdup_user(u64_to_user_ptr(a->fds), a->count * sizeof(*fd));
		if (IS_ERR(fd))
			return PTR_ERR(fd);
		vector = oh_vectors_get(fd, a->count);
		kfree(fd);
		if (IS_ERR(vector))
			return PTR_ERR(vector);
	}
	mutex_lock(&d->lock);
	if (d->gone)
		r = -ENODEV;
	else if (a->count > d->max_vectors)
		r = -EINVAL;
	else if (a->count)
		r = oh_check_isolation(d) ?: oh_irqs_replace(d, vector, a->count);
	else
		oh_irqs_free(d);
	mutex_unlock(&d->lock);
	if (r && vector)
		oh_vectors_free(vector, a->count);
	return r;
}
