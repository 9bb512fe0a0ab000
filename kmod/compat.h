/* SPDX-License-Identifier: GPL-2.0 */
/* Where kernels from 6.1 on differ. HAVE_* come from Kbuild, which asks the headers: distributions port back. */
#ifndef OH_COMPAT_H
#define OH_COMPAT_H

#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/eventfd.h>
#include <linux/iommu.h>
#include <linux/mm.h>
#include <linux/pci.h>
#include <linux/version.h>

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
#define OH_IMPORT_DMA_BUF	MODULE_IMPORT_NS("DMA_BUF")
#else
#define OH_IMPORT_DMA_BUF	MODULE_IMPORT_NS(DMA_BUF)
#endif

#ifdef HAVE_INVALIDATE_MAPPINGS
#define oh_invalidate_op	invalidate_mappings
#else
#define oh_invalidate_op	move_notify
#endif

#ifdef HAVE_MAPPING_AT_ATTACH
#define OH_MAPPING_AT_ATTACH	true
#else
#define OH_MAPPING_AT_ATTACH	false
#endif

/* For static importers: exporters are called with the dma_resv held since 6.2, and without it before. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
#define oh_map_static		dma_buf_map_attachment_unlocked
#define oh_unmap_static		dma_buf_unmap_attachment_unlocked
#else
#define oh_map_static		dma_buf_map_attachment
#define oh_unmap_static		dma_buf_unmap_attachment
#endif

/*
 * For memory that the device only reads. Older kernels pin a page of a file's private mapping, or the page of zeros, as it is: the
 * process's next write goes to a copy, and the device still reads the first. A pin for writing makes the copy before.
 */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
#define OH_PIN_READ		0
#else
#define OH_PIN_READ		(FOLL_WRITE | FOLL_FORCE)
#endif

/* The device and the CPU see the memory at once, through no copy: newer kernels can be told that nothing else will do. */
#ifdef DMA_ATTR_REQUIRE_COHERENT
#define OH_DMA_ATTRS		DMA_ATTR_REQUIRE_COHERENT
#else
#define OH_DMA_ATTRS		0
#endif

static inline void oh_vm_flags_set(struct vm_area_struct *vma, unsigned long flags)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_set(vma, flags);
#else
	vma->vm_flags |= flags;
#endif
}

static inline void oh_eventfd_signal(struct eventfd_ctx *ctx)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
	eventfd_signal(ctx);
#else
	eventfd_signal(ctx, 1);
#endif
}

/* Can the device raise no other interrupts than its own? */
static inline bool oh_isolated_msi(struct device *dev, struct iommu_group *group)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	return iommu_group_has_isolated_msi(group);
#else
	return device_iommu_capable(dev, IOMMU_CAP_INTR_REMAP);
#endif
}

#endif
