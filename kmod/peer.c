// SPDX-License-Identifier: GPL-2.0
/*
 * OH_MAP_PEER: another PCI device's BAR, for where the exporter's policy refuses or there is no exporter. Nobody tells here
 * whether the machine forwards such DMA, nor who else uses the BAR: it is for root, who tries it with data.
 */
#include <linux/capability.h>
#include <linux/mm.h>
#include <linux/notifier.h>
#include <linux/security.h>
#include "oh.h"

#ifndef PAGES_PER_SUBSECTION
#define PAGES_PER_SUBSECTION	1ul
#endif

/* Has the kernel been given a page of the range as memory? Drivers give it a BAR's pages in whole subsections. */
static bool oh_is_memory(phys_addr_t at, u64 len)
{
	unsigned long pfn, last = PHYS_PFN(at + len - 1);

	for (pfn = PHYS_PFN(at); pfn <= last; pfn = ALIGN(pfn + 1, PAGES_PER_SUBSECTION))
		if (pfn_valid(pfn))
			return true;
	return false;
}

/* With `lock` held, and the device there. */
static int oh_map_bar(struct oh_mapping *m, struct oh_map *a, struct oh_runs *runs)
{
	struct pci_dev *peer = m->peer.pdev;
	struct device *dev = &m->d->pdev->dev;
	phys_addr_t at;
	int r;

	if (peer == m->d->pdev || !(pci_resource_flags(peer, a->bar) & IORESOURCE_MEM))
		return -EINVAL;
	if (a->offset > pci_resource_len(peer, a->bar) || a->len > pci_resource_len(peer, a->bar) - a->offset)
		return -EINVAL;
	at = pci_resource_start(peer, a->bar) + a->offset;
	if (!PAGE_ALIGNED(at))
		return -EINVAL;
	if (oh_is_memory(at, a->len))
		return -EBUSY;	/* its driver gave the BAR to the kernel as memory: there are dma-bufs for that */
	if (!oh_translated(m->d) && at + a->len - 1 > dma_get_mask(dev))
		return oh_fail(a, -ERANGE, OH_WHY_MASK, at, 0, a->len);
	r = oh_runs_alloc(runs, 1);
	if (r)
		return r;
	m->peer.addr = dma_map_resource(dev, at, a->len, m->dir, 0);
	r = dma_mapping_error(dev, m->peer.addr);
	if (r)
		return r;
	m->peer.len = a->len;
	r = oh_runs_add(m->d, runs, a, m->peer.addr, a->len);
	if (!r)
		r = oh_runs_check(runs, a);
	if (!r)
		r = oh_mapping_add(m, a);
	if (r)
		dma_unmap_resource(dev, m->peer.addr, a->len, m->dir, 0);
	return r;
}

int oh_map_peer(struct oh_dev *d, struct oh_map *a, struct oh_runs *runs)
{
	struct oh_mapping *m;
	int r;

	if (oh_check_common(a, 0) || a->fd || a->bar >= PCI_STD_NUM_BARS || !a->len || !PAGE_ALIGNED(a->offset | a->len))
		return -EINVAL;
	if (!capable(CAP_SYS_RAWIO) || security_locked_down(LOCKDOWN_PCI_ACCESS))
		return -EPERM;
	m = oh_mapping_new(d, OH_KIND_PEER, a, 0);
	if (IS_ERR(m))
		return PTR_ERR(m);
	mutex_lock(&d->lock);
	m->peer.pdev = pci_get_domain_bus_and_slot(a->domain, a->bus, a->devfn);
	r = d->gone || !m->peer.pdev ? -ENODEV : oh_map_bar(m, a, runs);
	mutex_unlock(&d->lock);
	if (r) {
		pci_dev_put(m->peer.pdev);
		oh_mapping_free(m);
	}
	return r;
}

void oh_undo_peer(struct oh_mapping *m)
{
	if (!m->peer.pdev)
		return;
	dma_unmap_resource(&m->d->pdev->dev, m->peer.addr, m->peer.len, m->dir, 0);
	pci_dev_put(m->peer.pdev);
	m->peer.pdev = NULL;
}

static void oh_lose_peer(struct oh_dev *d, struct device *lost)
{
	struct oh_mapping *m;
	unsigned long id;

	mutex_lock(&d->lock);
	xa_for_each(&d->maps, id, m) {
		if (m->kind != OH_KIND_PEER || !m->peer.pdev || &m->peer.pdev->dev != lost)
			continue;
		oh_stop(d, OH_STOPPED_PEER);
		oh_undo_peer(m);
	}
	mutex_unlock(&d->lock);
}

/*
 * A PCI device goes: its addresses may soon be another's. Until REMOVED_DEVICE it could still be found and mapped. Or one comes: the
 * IOMMU's driver, whose notifier was first, has put it into a group, or does so before a driver is bound.
 */
static int oh_bus_event(struct notifier_block *block, unsigned long event, void *dev)
{
	bool goes = event == BUS_NOTIFY_DEL_DEVICE || event == BUS_NOTIFY_REMOVED_DEVICE;
	bool comes = event == BUS_NOTIFY_ADD_DEVICE || event == BUS_NOTIFY_BIND_DRIVER;
	struct oh_dev *d;

	if (!goes && !comes)
		return NOTIFY_DONE;
	mutex_lock(&oh_devices_lock);
	list_for_each_entry(d, &oh_devices, node) {
		if (goes)
			oh_lose_peer(d, dev);
		else if (test_bit(0, &d->open))
			oh_check_isolation(d);
	}
	mutex_unlock(&oh_devices_lock);
	return NOTIFY_OK;
}

struct notifier_block oh_bus_watch = { .notifier_call = oh_bus_event };
