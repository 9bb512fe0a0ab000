// SPDX-License-Identifier: GPL-2.0
/*
 * onehop: gives one process a PCI device: its BARs, and addresses for its DMA that the kernel's own DMA API makes. It binds
 * by driver_override alone. docs/kernel-module.md has the rules; oh.h has the order of the locks.
 */
#include <linux/capability.h>
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/iommu.h>
#include <linux/module.h>
#include <linux/panic.h>
#include <linux/poll.h>
#include <linux/security.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include "compat.h"
#include "oh.h"

/* Longer than the kernel waits for a device that was reset, a minute. */
#define OH_END_SECONDS	120

LIST_HEAD(oh_devices);
DEFINE_MUTEX(oh_devices_lock);

static void oh_dev_free(struct kref *ref)
{
	struct oh_dev *d = container_of(ref, struct oh_dev, ref);

	xa_destroy(&d->maps);
	kfree(d->saved);
	kfree(d);
}

/* With `lock` held. */
static void oh_info(struct oh_dev *d, struct oh_info *a)
{
	unsigned int bar;

	*a = (struct oh_info){
		.abi = OH_ABI,
		.missing = oh_missing(d),
		.vectors = d->max_vectors,
		.vendor = d->pdev->vendor,
		.device = d->pdev->device,
		.class_code = d->pdev->class,
		.mappings = d->map_count,
		.mask_bits = d->mask_bits,
		.charged = d->charged << PAGE_SHIFT,
	};
	for (bar = 0; bar < PCI_STD_NUM_BARS; bar++)
		a->bar_len[bar] = oh_bar_len(d, bar);
	if (oh_can_reset(d))
		a->flags |= OH_INFO_RESET;
	mutex_lock(&d->master);
	if (d->dma_on)
		a->flags |= OH_INFO_DMA_ON;
	if (d->reset_needed)
		a->flags |= OH_INFO_RESET_NEEDED;
	a->stopped = d->stopped;
	a->epoch = d->epoch;
	mutex_unlock(&d->master);
}

/* With `lock` held. */
static int oh_set_mask(struct oh_dev *d, const struct oh_mask *a)
{
	int r;

	if (a->reserved || a->bits < 24 || a->bits > 64)
		return -EINVAL;
	if (d->map_count)
		return -EBUSY;
	r = dma_set_mask_and_coherent(&d->pdev->dev, DMA_BIT_MASK(a->bits));
	if (!r)
		d->mask_bits = a->bits;
	return r;
}

union oh_arg {
	struct oh_info info;
	struct oh_map map;
	struct oh_unmap unmap;
	struct oh_start start;
	struct oh_mask mask;
	struct oh_irqs irqs;
};

/* The commands that take `lock` here. */
static int oh_locked_ioctl(struct oh_dev *d, unsigned int cmd, union oh_arg *a)
{
	switch (cmd) {
	case OH_INFO:
		oh_info(d, &a->info);
		return 0;
	case OH_UNMAP:
		if (a->unmap.reserved)
			return -EINVAL;
		/* With a lazy flush the device could reach the memory after this; without DMA it does not. */
		oh_check_isolation(d);
		return oh_unmap(d, a->unmap.id);
	case OH_RESET:
		return oh_reset(d);
	case OH_START:
		return oh_start(d, &a->start);
	case OH_STOP:
		oh_quiesce(d);
		return 0;
	case OH_MASK:
		return oh_set_mask(d, &a->mask);
	default:
		return -ENOTTY;
	}
}

static void oh_unmap_unseen(struct oh_dev *d, u32 id)
{
	mutex_lock(&d->lock);
	if (!d->gone)
		oh_check_isolation(d);
	oh_unmap(d, id);	/* may be gone already: by remove(), or by somebody who guessed the id */
	mutex_unlock(&d->lock);
}

static int oh_map(struct oh_dev *d, unsigned int cmd, struct oh_map *a)
{
	struct oh_runs runs = {};
	int r;

	a->nsegs = a->id = a->why = 0;
	a->bad_addr = a->bad_offset = a->bad_len = 0;
	mutex_lock(&d->lock);
	r = d->gone ? -ENODEV : oh_check_isolation(d);
	mutex_unlock(&d->lock);
	if (r)
		return r;
	r = cmd == OH_MAP_USER ? oh_map_user(d, a, &runs) :
	    cmd == OH_MAP_DMABUF ? oh_map_dmabuf(d, a, &runs) : oh_map_peer(d, a, &runs);
	if (!r && copy_to_user(u64_to_user_ptr(a->segs), runs.seg, array_size(runs.count, sizeof(*runs.seg)))) {
		oh_unmap_unseen(d, a->id);
		r = -EFAULT;
	}
	kvfree(runs.seg);
	return r;
}

/* Does the caller get the structure back? */
static bool oh_answers(unsigned int cmd, int r)
{
	return _IOC_DIR(cmd) & _IOC_READ && (!r || r == -ENOSPC || r == -ERANGE || r == -EMSGSIZE || r == -EIO);
}

static long oh_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct oh_dev *d = file->private_data;
	void __user *user = (void __user *)arg;
	union oh_arg a = {};
	int r;

	if (_IOC_TYPE(cmd) != _IOC_TYPE(OH_INFO) || _IOC_SIZE(cmd) > sizeof(a))
		return -ENOTTY;
	if (_IOC_DIR(cmd) & _IOC_WRITE && copy_from_user(&a, user, _IOC_SIZE(cmd)))
		return -EFAULT;
	switch (cmd) {
	case OH_MAP_USER:
	case OH_MAP_DMABUF:
	case OH_MAP_PEER:
		r = oh_map(d, cmd, &a.map);
		break;
	case OH_IRQS:
		r = oh_irqs(d, &a.irqs);
		break;
	default:
		mutex_lock(&d->lock);
		r = d->gone ? -ENODEV : oh_locked_ioctl(d, cmd, &a);
		mutex_unlock(&d->lock);
	}
	if (oh_answers(cmd, r) && copy_to_user(user, &a, _IOC_SIZE(cmd))) {
		if (!r && cmd != OH_INFO)
			oh_unmap_unseen(d, a.map.id);
		r = -EFAULT;
	}
	return r;
}

static __poll_t oh_poll(struct file *file, poll_table *table)
{
	struct oh_dev *d = file->private_data;

	poll_wait(file, &d->wait, table);
	if (READ_ONCE(d->gone))
		return EPOLLHUP | EPOLLERR;
	return READ_ONCE(d->stopped) ? EPOLLPRI | EPOLLERR : 0;
}

/*
 * Takes no lock that is held for long, since all misc devices wait for one another's open(). So the device is not reset
 * here: OH_START refuses until OH_RESET has done it.
 */
static int oh_open(struct inode *inode, struct file *file)
{
	struct oh_dev *d = container_of(file->private_data, struct oh_dev, misc);
	u32 missing = oh_missing(d);

	/* The caller gets what the device reaches. On a kernel that is locked down even root may not have all memory. */
	if (missing && (!capable(CAP_SYS_RAWIO) || security_locked_down(LOCKDOWN_PCI_ACCESS)))
		return -EPERM;
	if (test_and_set_bit(0, &d->open))
		return -EBUSY;
	if (missing & OH_MISSING_TRANSLATION) {
		dev_warn_once(&d->pdev->dev, "opened without an IOMMU: its user reaches all memory; tainting the kernel\n");
		add_taint(TAINT_USER, LOCKDEP_STILL_OK);
	}
	WRITE_ONCE(d->privileged, ns_capable_noaudit(&init_user_ns, CAP_SYS_RAWIO));
	mutex_lock(&d->master);
	d->stopped = 0;
	d->reset_needed = true;
	mutex_unlock(&d->master);
	mutex_lock(&d->gate);
	d->mapping = file->f_mapping;
	mutex_unlock(&d->gate);
	kref_get(&d->ref);
	file->private_data = d;
	return 0;
}

/* With `lock` held. False: another task holds the device's lock, and nothing was given back. */
static bool oh_try_end(struct oh_dev *d, bool last)
{
	if (d->gone)
		return true;
	if (oh_teardown(d, false) == -EAGAIN) {
		if (last)
			pci_warn(d->pdev, "could not be reset for %d s; it is busy until it is unbound\n", OH_END_SECONDS);
		return false;
	}
	oh_set_mask(d, &(struct oh_mask){ .bits = 64 });
	return true;
}

/*
 * Another task may hold the device's lock: for a moment (udev, sysfs), during a slow reset, or in remove(), which then ends the
 * session itself. No memory is given back before. If the lock is held for longer than that, something is broken: then false, and
 * everything stays as it is until remove().
 */
static bool oh_end(struct oh_dev *d)
{
	unsigned long end = jiffies + OH_END_SECONDS * HZ;
	bool ended, last;

	for (;;) {
		last = time_after(jiffies, end);
		mutex_lock(&d->lock);
		ended = oh_try_end(d, last);
		mutex_unlock(&d->lock);
		if (ended || last)
			return ended;
		msleep(20);
	}
}

static int oh_release(struct inode *inode, struct file *file)
{
	struct oh_dev *d = file->private_data;
	bool ended = oh_end(d);

	mutex_lock(&d->gate);
	d->mapping = NULL;
	mutex_unlock(&d->gate);
	if (ended)
		clear_bit_unlock(0, &d->open);
	kref_put(&d->ref, oh_dev_free);
	return 0;
}

static const struct file_operations oh_fops = {
	.owner = THIS_MODULE,
	.open = oh_open,
	.release = oh_release,
	.unlocked_ioctl = oh_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = oh_mmap,
	.poll = oh_poll,
};

/* In sysfs, for those whom open() refuses: what is missing, by name. */
static ssize_t onehop_missing_show(struct device *dev, struct device_attribute *attr, char *text)
{
	static const char * const name[] = { "translation", "strict", "alone", "msi", "direct" };
	u32 missing = oh_missing(dev_get_drvdata(dev));
	int i, at = 0;

	for (i = 0; i < ARRAY_SIZE(name); i++)
		if (missing & BIT(i))
			at += sysfs_emit_at(text, at, "%s%s", at ? " " : "", name[i]);
	return at + sysfs_emit_at(text, at, "%s\n", at ? "" : "nothing");
}
static DEVICE_ATTR_RO(onehop_missing);

static struct attribute *oh_attrs[] = { &dev_attr_onehop_missing.attr, NULL };
ATTRIBUTE_GROUPS(oh);

static struct oh_dev *oh_dev_new(struct pci_dev *pdev)
{
	struct oh_dev *d = kzalloc(sizeof(*d), GFP_KERNEL);

	if (!d)
		return NULL;
	d->pdev = pdev;
	d->mask_bits = 64;
	kref_init(&d->ref);
	mutex_init(&d->lock);
	mutex_init(&d->master);
	mutex_init(&d->gate);
	sema_init(&d->config, 1);
	init_waitqueue_head(&d->answers);
	init_waitqueue_head(&d->wait);
	xa_init_flags(&d->maps, XA_FLAGS_ALLOC1);
	snprintf(d->name, sizeof(d->name), "onehop-%s", pci_name(pdev));
	d->misc = (struct miscdevice){
		.minor = MISC_DYNAMIC_MINOR,
		.name = d->name,
		.fops = &oh_fops,
		.parent = &pdev->dev,
		.mode = 0600,
	};
	return d;
}

static void oh_save_limits(struct oh_dev *d)
{
	struct device *dev = &d->pdev->dev;

	d->before.mask = dma_get_mask(dev);
	d->before.coherent_mask = dev->coherent_dma_mask;
	d->before.max_segment = dma_get_max_seg_size(dev);
	d->before.boundary = dma_get_seg_boundary(dev);
}

/* A driver that asks for no other limits relies on those that it finds. */
static void oh_restore_limits(struct oh_dev *d)
{
	struct device *dev = &d->pdev->dev;

	if (dma_set_mask(dev, d->before.mask) || dma_set_coherent_mask(dev, d->before.coherent_mask))
		pci_warn(d->pdev, "its DMA masks could not be set back\n");
	dma_set_max_seg_size(dev, d->before.max_segment);
	dma_set_seg_boundary(dev, d->before.boundary);
}

static int oh_prepare(struct oh_dev *d)
{
	struct pci_dev *pdev = d->pdev;
	int r = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));

	if (r)
		return r;
	oh_vectors_look(d);
	/* PCI's defaults, 64 KiB and 4 GiB, would cut every list of addresses. */
	dma_set_max_seg_size(&pdev->dev, UINT_MAX);
	dma_set_seg_boundary(&pdev->dev, ULONG_MAX);
	pci_clear_master(pdev);
	pci_intx(pdev, 0);	/* nobody would serve it */
	r = pci_save_state(pdev);
	if (r)
		return r;
	d->saved = pci_store_saved_state(pdev);
	return d->saved ? 0 : -ENOMEM;
}

static int oh_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct oh_dev *d = oh_dev_new(pdev);
	int r;

	if (!d)
		return -ENOMEM;
	r = pci_enable_device_mem(pdev);
	if (r)
		goto put;
	r = pci_request_mem_regions(pdev, "onehop");
	if (r)
		goto disable;
	oh_save_limits(d);
	r = oh_prepare(d);
	if (r)
		goto restore;
	pci_set_drvdata(pdev, d);
	mutex_lock(&oh_devices_lock);
	list_add(&d->node, &oh_devices);
	mutex_unlock(&oh_devices_lock);
	r = misc_register(&d->misc);
	if (!r)
		return 0;
	mutex_lock(&oh_devices_lock);
	list_del(&d->node);
	mutex_unlock(&oh_devices_lock);
restore:
	oh_restore_limits(d);
	pci_release_mem_regions(pdev);
disable:
	pci_disable_device(pdev);
put:
	kref_put(&d->ref, oh_dev_free);
	return r;
}

/* Unbind or unplug. If the file is open all is torn down here, and the file stays as a shell. */
static void oh_remove(struct pci_dev *pdev)
{
	struct oh_dev *d = pci_get_drvdata(pdev);

	misc_deregister(&d->misc);
	mutex_lock(&oh_devices_lock);
	list_del(&d->node);
	mutex_unlock(&oh_devices_lock);
	mutex_lock(&d->lock);
	WRITE_ONCE(d->gone, true);
	oh_bars(d, true);
	oh_teardown(d, true);
	if (!oh_bring_back(d))
		pci_warn(pdev, "it does not answer; removing it and scanning the bus may bring it back\n");
	oh_restore_limits(d);
	mutex_unlock(&d->lock);
	wake_up_interruptible(&d->wait);
	pci_release_mem_regions(pdev);
	pci_disable_device(pdev);
	kref_put(&d->ref, oh_dev_free);
}

static const struct pci_device_id oh_no_ids[] = { { } };

static struct pci_driver oh_driver = {
	.name = "onehop",
	.id_table = oh_no_ids,
	.probe = oh_probe,
	.remove = oh_remove,
	.shutdown = oh_shutdown,
	.err_handler = &oh_error_handlers,
	.dev_groups = oh_groups,
	.driver.pm = pm_sleep_ptr(&oh_pm_ops),
};

static int __init oh_init(void)
{
	int r = bus_register_notifier(&pci_bus_type, &oh_bus_watch);

	if (r)
		return r;
	r = pci_register_driver(&oh_driver);
	if (r)
		bus_unregister_notifier(&pci_bus_type, &oh_bus_watch);
	return r;
}

static void __exit oh_exit(void)
{
	pci_unregister_driver(&oh_driver);
	bus_unregister_notifier(&pci_bus_type, &oh_bus_watch);
}

module_init(oh_init);
module_exit(oh_exit);
MODULE_DESCRIPTION("PCI devices driven from user space, with DMA to user memory, dma-bufs and other devices' BARs");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1");
