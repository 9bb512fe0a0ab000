// SPDX-License-Identifier: GPL-2.0
/*
 * Bus mastering and reset. Whoever drives a device from user space owns its queues, so the only sure way to keep it from
 * memory is to take bus mastering away; then to reset it, so that it forgets the addresses it was given; and only then
 * may the memory go.
 */
#include <linux/iommu.h>
#include "compat.h"
#include "oh.h"

bool oh_can_reset(struct oh_dev *d)
{
	return d->pdev->reset_methods[0];
}

bool oh_translated(struct oh_dev *d)
{
	struct iommu_domain *domain = iommu_get_domain_for_dev(&d->pdev->dev);

	return domain && (domain->type & __IOMMU_DOMAIN_PAGING);
}

/* Bridges do no DMA that a user of the device could ask for. */
static int oh_count_endpoint(struct device *dev, void *count)
{
	if (!dev_is_pci(dev) || !pci_is_bridge(to_pci_dev(dev)))
		++*(int *)count;
	return 0;
}

u32 oh_missing(struct oh_dev *d)
{
	struct device *dev = &d->pdev->dev;
	struct iommu_domain *domain = iommu_get_domain_for_dev(dev);
	struct iommu_group *group = iommu_group_get(dev);
	u32 missing = OH_MISSING_ALONE | OH_MISSING_MSI;
	int endpoints = 0;

	if (group) {
		iommu_group_for_each_dev(group, &endpoints, oh_count_endpoint);
		if (endpoints == 1)
			missing &= ~OH_MISSING_ALONE;
		if (oh_isolated_msi(dev, group))
			missing &= ~OH_MISSING_MSI;
		iommu_group_put(group);
	}
	if (!oh_translated(d))
		missing |= OH_MISSING_TRANSLATION;
	else if (domain->type == IOMMU_DOMAIN_DMA_FQ)
		missing |= OH_MISSING_STRICT;
	return missing;
}

/* With `master` held. */
static void oh_dma_off(struct oh_dev *d)
{
	pci_clear_master(d->pdev);
	d->dma_on = false;
}

static void oh_wait_pending(struct oh_dev *d)
{
	if (!pci_wait_for_pending_transaction(d->pdev))
		pci_warn(d->pdev, "transactions are still pending\n");
}

/* After this the device begins no DMA, and what it had begun has arrived. */
void oh_quiesce(struct oh_dev *d)
{
	mutex_lock(&d->master);
	oh_dma_off(d);
	mutex_unlock(&d->master);
	oh_wait_pending(d);
}

/* DMA ends for a reason that user space has to know. Callers may hold a dma_resv, or the device's lock. */
void oh_stop(struct oh_dev *d, u32 reason)
{
	mutex_lock(&d->master);
	d->stopped |= reason;
	d->epoch++;
	d->reset_needed = true;
	oh_dma_off(d);
	mutex_unlock(&d->master);
	oh_wait_pending(d);
	wake_up_interruptible(&d->wait);
}

int oh_start(struct oh_dev *d, const struct oh_start *a)
{
	bool unreset = a->flags & OH_START_UNRESET;
	int r = 0;

	if (a->flags & ~OH_START_UNRESET || (unreset && oh_can_reset(d)))
		return -EINVAL;
	mutex_lock(&d->master);
	if (a->epoch != d->epoch) {
		r = -EAGAIN;
	} else if (d->reset_needed && !unreset) {
		r = oh_can_reset(d) ? -EBUSY : -EOPNOTSUPP;
	} else {
		d->stopped = 0;
		d->reset_needed = false;
		WRITE_ONCE(d->touched, true);
		pci_set_master(d->pdev);
		d->dma_on = true;
	}
	mutex_unlock(&d->master);
	return r;
}

/* The function that resets calls our reset_prepare(), which has to know that it was us. */
static int oh_reset_function(struct oh_dev *d, int (*reset)(struct pci_dev *))
{
	int r;

	/* Waiting for a device that is not there takes a minute. */
	if (!pci_device_is_present(d->pdev))
		return -EIO;
	WRITE_ONCE(d->resetter, current);
	r = reset(d->pdev);
	WRITE_ONCE(d->resetter, NULL);
	return r;
}

int oh_reset(struct oh_dev *d)
{
	u32 epoch;
	int r;

	if (!oh_can_reset(d))
		return -EOPNOTSUPP;
	mutex_lock(&d->master);
	epoch = d->epoch;
	oh_dma_off(d);
	d->reset_needed = true;
	mutex_unlock(&d->master);
	oh_wait_pending(d);
	/* It takes the device's lock. "try", because remove() has that lock and waits for ours. */
	r = oh_reset_function(d, pci_try_reset_function);
	if (r)
		return r;
	mutex_lock(&d->master);
	if (epoch == d->epoch) {
		d->stopped = 0;
		d->reset_needed = false;
	} else {
		r = -EAGAIN;
	}
	mutex_unlock(&d->master);
	return r;
}

/*
 * The end of a session: whatever happened before, the device reaches no memory when this returns. With `lock` held. A close
 * that meets remove(), as when a process is killed and what watches over it unbinds the device, cannot reset; then memory
 * stays mapped until remove() has done it.
 */
void oh_teardown(struct oh_dev *d, int (*reset)(struct pci_dev *))
{
	int r = -EOPNOTSUPP;

	oh_quiesce(d);
	oh_irqs_free(d);
	if (READ_ONCE(d->touched) && oh_can_reset(d)) {
		r = oh_reset_function(d, reset);
		if (r == -EAGAIN && READ_ONCE(d->going))
			return;
		if (r)
			pci_warn(d->pdev, "could not be reset (%d); bus mastering is off\n", r);
		/* Should the reset have brought an older command register back. */
		oh_quiesce(d);
	}
	if (!r)
		WRITE_ONCE(d->touched, false);
	oh_unmap_all(d);
}

/* Somebody resets the function: root through sysfs, or another function's driver. */
static void oh_reset_prepare(struct pci_dev *pdev)
{
	struct oh_dev *d = pci_get_drvdata(pdev);

	if (READ_ONCE(d->resetter) != current)
		oh_stop(d, OH_STOPPED_RESET);
}

static pci_ers_result_t oh_error_detected(struct pci_dev *pdev, pci_channel_state_t state)
{
	struct oh_dev *d = pci_get_drvdata(pdev);

	pci_warn(pdev, "PCIe error, DMA stopped\n");
	oh_stop(d, OH_STOPPED_ERROR);
	if (state == pci_channel_io_normal)
		return PCI_ERS_RESULT_CAN_RECOVER;
	oh_bars(d, true);
	return state == pci_channel_io_perm_failure ? PCI_ERS_RESULT_DISCONNECT : PCI_ERS_RESULT_NEED_RESET;
}

static pci_ers_result_t oh_slot_reset(struct pci_dev *pdev)
{
	pci_restore_state(pdev);
	pci_save_state(pdev);	/* restoring used it up */
	pci_clear_master(pdev);
	return PCI_ERS_RESULT_RECOVERED;
}

static void oh_error_resume(struct pci_dev *pdev)
{
	oh_bars(pci_get_drvdata(pdev), false);
}

const struct pci_error_handlers oh_error_handlers = {
	.error_detected = oh_error_detected,
	.slot_reset = oh_slot_reset,
	.resume = oh_error_resume,
	.reset_prepare = oh_reset_prepare,
};

/*
 * Mappings and interrupts stay over a sleep; DMA does not, and comes back by OH_RESET and OH_START alone, since the device
 * has lost its queues. What the core saves and restores has bus mastering off.
 */
static int oh_suspend(struct device *dev)
{
	oh_stop(dev_get_drvdata(dev), OH_STOPPED_SUSPEND);
	return 0;
}

DEFINE_SIMPLE_DEV_PM_OPS(oh_pm_ops, oh_suspend, NULL);
