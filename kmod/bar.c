// SPDX-License-Identifier: GPL-2.0
/*
 * BARs in user space. Pages come in by fault, so that they can be taken away at any moment (unbind, an error on the link)
 * without racing an mmap() that is under way; a touch after that is SIGBUS. During a reset they are away as well; a touch waits
 * for its end.
 */
#include <linux/fs.h>
#include <linux/mm.h>
#include "compat.h"
#include "oh.h"

#define BAR_SHIFT	(44 - PAGE_SHIFT)

/* Bytes that may be mapped: a BAR smaller than a page may share it with another device. */
u64 oh_bar_len(struct oh_dev *d, unsigned int bar)
{
	if (!(pci_resource_flags(d->pdev, bar) & IORESOURCE_MEM) || !PAGE_ALIGNED(pci_resource_start(d->pdev, bar)))
		return 0;
	return pci_resource_len(d->pdev, bar) & PAGE_MASK;
}

/*
 * A fault brings in all that lies in the same 2 MiB: who hands a mapping of doorbells to a GPU's driver needs the page
 * table filled, and must not have to touch each doorbell for it.
 */
static vm_fault_t oh_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct oh_dev *d = vma->vm_private_data;
	unsigned long from = max(vma->vm_start, ALIGN_DOWN(vmf->address, PMD_SIZE));
	unsigned long to = min(vma->vm_end, ALIGN_DOWN(vmf->address, PMD_SIZE) + PMD_SIZE);
	unsigned int bar = vma->vm_pgoff >> BAR_SHIFT;
	vm_fault_t r = VM_FAULT_SIGBUS;
	unsigned long at, pfn;

	mutex_lock(&d->gate);
	while (d->resetting) {
		mutex_unlock(&d->gate);
		/* Whoever is killed does not come back to the touch. */
		if (wait_event_killable(d->answers, !READ_ONCE(d->resetting)))
			return VM_FAULT_NOPAGE;
		mutex_lock(&d->gate);
	}
	if (d->bars_off)
		goto out;
	WRITE_ONCE(d->touched, true);
	pfn = (pci_resource_start(d->pdev, bar) >> PAGE_SHIFT) + (vma->vm_pgoff & (BIT(BAR_SHIFT) - 1));
	r = vmf_insert_pfn(vma, vmf->address, pfn + ((vmf->address - vma->vm_start) >> PAGE_SHIFT));
	for (at = from; at < to && r == VM_FAULT_NOPAGE; at += PAGE_SIZE)
		r = vmf_insert_pfn(vma, at, pfn + ((at - vma->vm_start) >> PAGE_SHIFT));
out:
	mutex_unlock(&d->gate);
	return r;
}

static const struct vm_operations_struct oh_vm_ops = { .fault = oh_fault };

int oh_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct oh_dev *d = file->private_data;
	u64 bar = vma->vm_pgoff >> BAR_SHIFT;
	u64 first = vma->vm_pgoff & (BIT(BAR_SHIFT) - 1);
	u64 pages = 0;

	if (!(vma->vm_flags & VM_SHARED) || bar >= PCI_STD_NUM_BARS)
		return -EINVAL;
	mutex_lock(&d->gate);
	if (!d->bars_off)
		pages = oh_bar_len(d, bar) >> PAGE_SHIFT;
	mutex_unlock(&d->gate);
	if (first >= pages || vma_pages(vma) > pages - first)
		return -EINVAL;
	/* A guest may have encrypted memory; a BAR never is. */
	vma->vm_page_prot = pgprot_decrypted(pgprot_noncached(vma->vm_page_prot));
	vma->vm_private_data = d;	/* the vma holds the file, and the file the device */
	vma->vm_ops = &oh_vm_ops;
	oh_vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP);
	return 0;
}

/* Takes the BARs away, or lets faults bring them back. */
void oh_bars(struct oh_dev *d, bool off)
{
	mutex_lock(&d->gate);
	d->bars_off = off;
	if (off && d->mapping)
		unmap_mapping_range(d->mapping, 0, 0, 1);
	mutex_unlock(&d->gate);
}

/*
 * While the function is reset it decodes no addresses. A touch then would be answered by nobody, which some machines take for
 * fatal; so it waits, and goes on afterwards.
 */
void oh_bars_resetting(struct oh_dev *d, bool resetting)
{
	mutex_lock(&d->gate);
	WRITE_ONCE(d->resetting, resetting);
	if (resetting && d->mapping)
		unmap_mapping_range(d->mapping, 0, 0, 1);
	mutex_unlock(&d->gate);
	if (!resetting)
		wake_up_all(&d->answers);
}
