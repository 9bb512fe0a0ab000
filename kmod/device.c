// SPDX-License-Identifier: GPL-2.0
/*
 * Bus mastering and reset. Whoever drives a device from user space owns its queues, so the only sure way to keep it from
 * memory is to take bus mastering away; then to reset it, so that it forgets the addresses it was given; and only then
 * may the memory go.
 */
#include <linux/iommu.h>
#include <linux/security.h>
#include <linux/slab.h>
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

/*
 * The firmware may name memory of its own that a device must always reach (RMRR, IVMD). The kernel's DMA domain, which the module
 * uses, maps it, and relaxable ranges too, which VFIO leaves out of its domains.
 */
static bool oh_has_direct(struct iommu_group *group)
{
	struct iommu_resv_region *region, *next;
	LIST_HEAD(regions);
	bool direct = iommu_get_group_resv_regions(group, &regions) < 0;

	list_for_each_entry_safe(region, next, &regions, list) {
		direct |= region->type == IOMMU_RESV_DIRECT || region->type == IOMMU_RESV_DIRECT_RELAXABLE;
		kfree(region);
	}
	return direct;
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
		if (oh_translated(d) && oh_has_direct(group))
			missing |= OH_MISSING_DIRECT;
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
		dev_warn_ratelimited(&d->pdev->dev, "transactions are still pending\n");
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

/*
 * The device may have lost its isolation since open(): a neighbour has joined its IOMMU group, or root has made the flush lazy,
 * which no notifier reports. So each call that gives the device more checks again, and so does OH_UNMAP before it frees memory.
 */
int oh_check_isolation(struct oh_dev *d)
{
	if ((READ_ONCE(d->privileged) && !security_locked_down(LOCKDOWN_PCI_ACCESS)) || !oh_missing(d))
		return 0;
	oh_stop(d, OH_STOPPED_ISOLATION);
	return -EPERM;
}

int oh_start(struct oh_dev *d, const struct oh_start *a)
{
	bool unreset = a->flags & OH_START_UNRESET;
	int r = 0;

	if (a->flags & ~OH_START_UNRESET || (unreset && oh_can_reset(d)))
		return -EINVAL;
	/* A neighbour that joins after this stops DMA, and changes the epoch. */
	r = oh_check_isolation(d);
	if (r)
		return r;
	mutex_lock(&d->master);
	if (d->shut) {
		r = -ENODEV;
	} else if (a->epoch != d->epoch) {
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
	/* A neighbour that joined since the check may have met the new epoch too early. */
	return r ?: oh_check_isolation(d);
}

/* A virtual function has no bit of its own for it. */
static bool oh_has_config(struct pci_dev *pdev)
{
	u16 command = 0;

	pci_read_config_word(pdev, PCI_COMMAND, &command);
	return pdev->is_virtfn || (!PCI_POSSIBLE_ERROR(command) && command & PCI_COMMAND_MEMORY);
}

/* What the device was given before it was bound, with bus mastering off. The core's own copy is used up by each reset. */
static void oh_restore_config(struct oh_dev *d)
{
	pci_load_saved_state(d->pdev, d->saved);
	pci_restore_state(d->pdev);
}

/*
 * After an error the kernel resets the bus above the device, and if it then finds that its recovery failed it leaves the
 * device without a configuration; each later reset would save and restore that. So it gets back what it had, the driver that
 * has it next too. The channel counts as frozen until then; from a permanent failure the kernel lets no device return, and
 * such a one does not answer here. With the device's lock held, as in all that changes the channel.
 */
bool oh_bring_back(struct oh_dev *d)
{
	if (!oh_has_config(d->pdev)) {
		oh_restore_config(d);
		if (!oh_has_config(d->pdev))
			return false;
		pci_warn(d->pdev, "the kernel's recovery left it without a configuration; it has that of before\n");
	}
	cmpxchg(&d->pdev->error_state, pci_channel_io_frozen, pci_channel_io_normal);
	return true;
}

/* The function that resets calls our reset_prepare(), which has to know that it was us. */
static int oh_reset_function(struct oh_dev *d, int (*reset)(struct pci_dev *))
{
	bool present;
	int r;

	/* Waiting for a device that is not there takes a minute. During another task's reset none seems to be there. */
	down(&d->config);
	present = pci_device_is_present(d->pdev);
	if (!present)
		oh_bars(d, true);
	up(&d->config);
	if (!present)
		return -EIO;
	WRITE_ONCE(d->resetter, current);
	r = reset(d->pdev);
	WRITE_ONCE(d->resetter, NULL);
	return r || oh_has_config(d->pdev) ? r : -EIO;
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
 * The end of a session: whatever happened before, the device reaches no memory when this returns 0. With `lock` held. -EAGAIN:
 * another task holds the device's lock, so the device cannot be reset, and memory stays mapped. `locked`: the caller holds the
 * device's lock, as remove() does; then never -EAGAIN.
 */
int oh_teardown(struct oh_dev *d, bool locked)
{
	int r = -EOPNOTSUPP;

	oh_quiesce(d);
	oh_irqs_free(d);
	if (READ_ONCE(d->touched) && oh_can_reset(d)) {
		/* The form with __ would not bring the configuration back. */
		r = oh_reset_function(d, locked ? pci_reset_function_locked : pci_try_reset_function);
		if (r == -EAGAIN && !locked)
			return r;
		if (r)
			dev_warn_ratelimited(&d->pdev->dev, "could not be reset (%d); bus mastering is off\n", r);
		/* Should the reset have brought an older command register back. */
		oh_quiesce(d);
	}
	if (!r)
		WRITE_ONCE(d->touched, false);
	oh_unmap_all(d);
	return 0;
}

/* Somebody resets the function: root through sysfs, or another function's driver. */
static void oh_reset_prepare(struct pci_dev *pdev)
{
	struct oh_dev *d = pci_get_drvdata(pdev);

	down(&d->config);
	if (READ_ONCE(d->resetter) != current)
		oh_stop(d, OH_STOPPED_RESET);
	oh_bars_resetting(d, true);
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

/* Whoever has started DMA again since the error was told is told once more. */
static pci_ers_result_t oh_slot_reset(struct pci_dev *pdev)
{
	struct oh_dev *d = pci_get_drvdata(pdev);

	oh_stop(d, OH_STOPPED_ERROR);
	down(&d->config);
	oh_restore_config(d);
	up(&d->config);
	return oh_has_config(pdev) ? PCI_ERS_RESULT_RECOVERED : PCI_ERS_RESULT_DISCONNECT;
}

static void oh_error_resume(struct pci_dev *pdev)
{
	oh_bars(pci_get_drvdata(pdev), false);
}

static void oh_reset_done(struct pci_dev *pdev)
{
	struct oh_dev *d = pci_get_drvdata(pdev);

	/* Nobody answers at the BARs of a device that has no configuration. */
	oh_bars(d, !oh_bring_back(d) || READ_ONCE(d->gone));
	up(&d->config);
	oh_bars_resetting(d, false);
}

/*
 * Reboot and kexec, with processes still running: the next kernel's memory must not be written. `lock` may be held for as long as
 * a reset takes, so only `master` is taken; no reset turns DMA on.
 */
void oh_shutdown(struct pci_dev *pdev)
{
	struct oh_dev *d = pci_get_drvdata(pdev);

	mutex_lock(&d->master);
	d->shut = true;
	mutex_unlock(&d->master);
	oh_quiesce(d);
}

const struct pci_error_handlers oh_error_handlers = {
	.error_detected = oh_error_detected,
	.slot_reset = oh_slot_reset,
	.resume = oh_error_resume,
	.reset_prepare = oh_reset_prepare,
	.reset_done = oh_reset_done,
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
