// SPDX-License-Identifier: GPL-2.0
/*
 * For tests: gives the pages of an ivshmem device's BAR2 to the kernel as a device's own, and maps them by /dev/vrampages.
 * Then whatever pins a program's pages, soft-RoCE too, takes them, which is as near as emulation comes to a GPU's memory
 * that a card may reach.
 */
#include <linux/memremap.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include "../compat.h"

static unsigned long skip;
module_param(skip, ulong, 0444);
MODULE_PARM_DESC(skip, "bytes at the start of the BAR that the kernel is not given");

static struct dev_pagemap *pages;

static int vrampages_mmap(struct file *file, struct vm_area_struct *vma)
{
	unsigned long first = PHYS_PFN(pages->range.start), have = PHYS_PFN(range_len(&pages->range));
	unsigned long count = vma_pages(vma), i;

	if (vma->vm_pgoff > have || count > have - vma->vm_pgoff)
		return -EINVAL;
	oh_vm_flags_set(vma, VM_MIXEDMAP | VM_DONTEXPAND);
	for (i = 0; i < count; i++) {
		struct page *page = pfn_to_page(first + vma->vm_pgoff + i);
		int err = vm_insert_page(vma, vma->vm_start + i * PAGE_SIZE, page);

		if (err)
			return err;
	}
	return 0;
}

static const struct file_operations fops = { .owner = THIS_MODULE, .mmap = vrampages_mmap };
static struct miscdevice misc = { .minor = MISC_DYNAMIC_MINOR, .name = "vrampages", .fops = &fops };

static int vrampages_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	void *mapped;
	int err;

	if (pages)
		return -EBUSY;
	err = pcim_enable_device(pdev);
	if (err)
		return err;
	pages = devm_kzalloc(&pdev->dev, sizeof(*pages), GFP_KERNEL);
	if (!pages)
		return -ENOMEM;
	pages->type = MEMORY_DEVICE_GENERIC;
	pages->range.start = pci_resource_start(pdev, 2) + skip;
	pages->range.end = pci_resource_end(pdev, 2);
	pages->nr_range = 1;
	mapped = devm_memremap_pages(&pdev->dev, pages);
	err = PTR_ERR_OR_ZERO(mapped);
	if (!err)
		err = misc_register(&misc);
	if (err)
		pages = NULL;
	return err;
}

static void vrampages_remove(struct pci_dev *pdev)
{
	misc_deregister(&misc);
	pages = NULL;
}

static const struct pci_device_id ids[] = { { PCI_DEVICE(0x1af4, 0x1110) }, { } };
static struct pci_driver vrampages_driver = {
	.name = "vrampages",
	.id_table = ids,
	.probe = vrampages_probe,
	.remove = vrampages_remove,
};
module_pci_driver(vrampages_driver);
MODULE_DESCRIPTION("An ivshmem BAR's pages, for tests");
MODULE_LICENSE("GPL");
