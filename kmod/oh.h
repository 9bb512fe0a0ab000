/* SPDX-License-Identifier: GPL-2.0 */
/* What the module's files share: the device, its mappings, and who may take which lock inside which. */
#ifndef OH_H
#define OH_H

#include <linux/dma-mapping.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/miscdevice.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/semaphore.h>
#include <linux/wait.h>
#include <linux/xarray.h>
#include "onehop.h"

/*
 * Locks, outermost first:
 *   oh_devices -> oh_dev.lock -> dma_resv of a buffer -> oh_dev.master
 *   oh_devices, oh_dev.lock -> the IOMMU group's mutex (oh_missing)
 *   oh_dev.lock -> oh_dev.config -> oh_dev.master
 *   mmap_lock -> oh_dev.gate
 * oh_dev.lock is never held while user memory is touched, so no page fault, however long its owner makes it last, keeps
 * remove() waiting. An exporter calls back with its dma_resv held: then only `master` may be taken.
 */
struct oh_dev {
	struct pci_dev *pdev;		/* valid until gone */
	struct miscdevice misc;
	struct list_head node;		/* in oh_devices */
	char name[40];
	struct kref ref;
	struct pci_saved_state *saved;	/* its configuration when it was bound */
	struct {
		u64 mask, coherent_mask;
		unsigned int max_segment;
		unsigned long boundary;
	} before;			/* its DMA limits when it was bound */
	u32 max_vectors;
	u32 msix_table;			/* where its table was, and how long, when it was bound */
	u16 msix_size;

	unsigned long open;		/* bit 0: somebody has it */
	bool privileged;		/* who opened it may have what the device reaches, whatever that is */

	struct mutex lock;		/* the fields down to `vector_count`, and pdev against remove() */
	bool gone;			/* the driver has let go of the device */
	struct xarray maps;		/* struct oh_mapping by id */
	u32 next_id;
	u32 map_count;
	u32 mask_bits;
	u64 charged;			/* pages */
	struct oh_vector *vectors;
	u32 vector_count;

	/*
	 * Held during every reset of the function, and while its interrupts change: the reset restores their configuration.
	 * Not a mutex, since a bus reset holds those of all devices on the bus.
	 */
	struct semaphore config;

	struct mutex master;		/* bus mastering, and why it is off */
	bool dma_on;
	bool reset_needed;
	bool shut;			/* the machine goes down: DMA stays off */
	u32 stopped;
	u32 epoch;
	struct task_struct *resetter;	/* who resets the function on our behalf */

	struct mutex gate;		/* BAR faults against those who take the BARs away */
	struct address_space *mapping;
	bool bars_off;
	bool resetting;			/* nobody answers at the BARs: faults wait */
	wait_queue_head_t answers;
	bool touched;			/* user space saw a BAR or turned DMA on since the last reset */

	wait_queue_head_t wait;
};

enum oh_kind { OH_KIND_USER, OH_KIND_DMABUF, OH_KIND_PEER };

struct oh_mapping {
	struct oh_dev *d;
	enum oh_kind kind;
	u32 id;
	enum dma_data_direction dir;
	/* what it counts against RLIMIT_MEMLOCK */
	struct user_struct *user;
	unsigned long pages;
	union {
		struct {
			struct sg_table sgt;
		} user_memory;
		struct {
			struct dma_buf_attachment *attachment;
			struct sg_table *sgt;	/* like pinned under the buffer's dma_resv; NULL once revoked */
			bool pinned;
		} dmabuf;
		struct {
			struct pci_dev *pdev;	/* NULL once it was removed */
			dma_addr_t addr;
			size_t len;
		} peer;
	};
};

/* A list of runs while it is checked; the caller copies it out. */
struct oh_runs {
	struct oh_seg *seg;
	u32 count;
	u32 room;
	u64 bytes;	/* what the runs hold so far */
};

extern struct list_head oh_devices;
extern struct mutex oh_devices_lock;

/* device.c: bus mastering, reset, and what the device may do */
void oh_quiesce(struct oh_dev *d);
void oh_stop(struct oh_dev *d, u32 reason);
int oh_start(struct oh_dev *d, const struct oh_start *a);
int oh_reset(struct oh_dev *d);
int oh_teardown(struct oh_dev *d, bool locked);
bool oh_translated(struct oh_dev *d);
u32 oh_missing(struct oh_dev *d);
int oh_check_isolation(struct oh_dev *d);
void oh_shutdown(struct pci_dev *pdev);
bool oh_can_reset(struct oh_dev *d);
bool oh_bring_back(struct oh_dev *d);
extern const struct pci_error_handlers oh_error_handlers;
extern const struct dev_pm_ops oh_pm_ops;

/* bar.c */
int oh_mmap(struct file *file, struct vm_area_struct *vma);
void oh_bars(struct oh_dev *d, bool off);
void oh_bars_resetting(struct oh_dev *d, bool resetting);
u64 oh_bar_len(struct oh_dev *d, unsigned int bar);

/* map.c: what all kinds of mappings share */
struct oh_mapping *oh_mapping_new(struct oh_dev *d, enum oh_kind kind, const struct oh_map *a, u64 bytes);
void oh_mapping_free(struct oh_mapping *m);
int oh_mapping_add(struct oh_mapping *m, struct oh_map *a);
void oh_mapping_drop(struct oh_mapping *m);
int oh_unmap(struct oh_dev *d, u32 id);
void oh_unmap_all(struct oh_dev *d);
int oh_check_common(const struct oh_map *a, u32 flags);
int oh_runs_alloc(struct oh_runs *runs, u32 room);
int oh_runs_from_sgt(struct oh_dev *d, struct oh_runs *runs, struct sg_table *sgt, struct oh_map *a, u64 offset, u64 len);
int oh_runs_add(struct oh_dev *d, struct oh_runs *runs, struct oh_map *a, u64 addr, u64 len);
int oh_runs_check(struct oh_runs *runs, struct oh_map *a);
int oh_fail(struct oh_map *a, int error, u32 why, u64 addr, u64 offset, u64 len);

/* user.c, dmabuf.c, peer.c: each makes a mapping and the list of its runs; `d->lock` must not be held */
int oh_map_user(struct oh_dev *d, struct oh_map *a, struct oh_runs *runs);
void oh_undo_user(struct oh_mapping *m);
int oh_map_dmabuf(struct oh_dev *d, struct oh_map *a, struct oh_runs *runs);
void oh_undo_dmabuf(struct oh_mapping *m);
int oh_map_peer(struct oh_dev *d, struct oh_map *a, struct oh_runs *runs);
void oh_undo_peer(struct oh_mapping *m);
extern struct notifier_block oh_bus_watch;

/* irq.c */
void oh_vectors_look(struct oh_dev *d);
int oh_irqs(struct oh_dev *d, const struct oh_irqs *a);
void oh_irqs_free(struct oh_dev *d);

#endif
