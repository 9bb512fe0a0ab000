/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT */
/*
 * What /dev/onehop-BDF takes: a PCI device driven from user space, with DMA addresses made by the kernel for that device.
 *
 * Every field named reserved, every flag without a name and every field that a command does not use must be zero: else
 * EINVAL. A structure is copied back where the command succeeds, and with ENOSPC, ERANGE, EMSGSIZE and EIO, so that
 * `why`, `bad_*` and `nsegs` can be read. docs/kernel-module.md says what each command promises.
 */
#ifndef ONEHOP_H
#define ONEHOP_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define OH_ABI	1

/* The offset to give mmap() for a BAR, to be added to an offset inside it. */
#define OH_BAR_OFFSET(bar)	((__u64)(bar) << 44)

/* oh_info.flags */
#define OH_INFO_RESET		1u	/* the function can be reset; if not, OH_RESET fails and OH_START needs OH_START_UNRESET */
#define OH_INFO_DMA_ON		2u	/* bus mastering is on */
#define OH_INFO_RESET_NEEDED	4u	/* OH_START will fail until OH_RESET succeeded */

/*
 * oh_info.missing: what keeps the device from being safe in the hands of an unprivileged user; 0 if nothing does. It may change
 * during a session. Then OH_START, OH_IRQS and the OH_MAP commands fail with EPERM, unless it was opened with CAP_SYS_RAWIO
 * and the kernel is not locked down.
 */
#define OH_MISSING_TRANSLATION	1u	/* no IOMMU domain translates the device's addresses: it reaches all memory */
#define OH_MISSING_STRICT	2u	/* the IOTLB is flushed lazily: the device reaches memory some time after OH_UNMAP */
#define OH_MISSING_ALONE	4u	/* other devices share its IOMMU group, or it has none */
#define OH_MISSING_MSI		8u	/* interrupts are not remapped: a DMA write can raise any interrupt */
#define OH_MISSING_DIRECT	16u	/* the firmware keeps memory of its own mapped for the device (RMRR, IVMD) */

/* oh_info.stopped: why bus mastering was taken away; cleared by OH_RESET, or by OH_START where there is no reset */
#define OH_STOPPED_REVOKED	1u	/* an exporter took a dma-buf back; its mapping is gone */
#define OH_STOPPED_PEER		2u	/* the device behind an OH_MAP_PEER mapping was removed; the mapping is gone */
#define OH_STOPPED_RESET	4u	/* somebody else reset the function */
#define OH_STOPPED_SUSPEND	8u	/* the machine slept */
#define OH_STOPPED_ERROR	16u	/* PCIe reported an error that is not corrected (AER) */
#define OH_STOPPED_ISOLATION	32u	/* something is missing now, which the session may not do without */

struct oh_info {
	__u32 abi;		/* out: OH_ABI */
	__u32 flags;		/* out: OH_INFO_* */
	__u32 missing;		/* out: OH_MISSING_* */
	__u32 stopped;		/* out: OH_STOPPED_* */
	__u32 epoch;		/* out: counts the times that DMA was stopped; OH_START wants it back */
	__u32 vectors;		/* out: interrupt vectors that OH_IRQS may set */
	__u16 vendor;		/* out */
	__u16 device;		/* out */
	__u32 class_code;	/* out: class, subclass, programming interface */
	__u32 mappings;		/* out: how many there are */
	__u32 mask_bits;	/* out: width of the DMA addresses, see OH_MASK */
	__u64 charged;		/* out: bytes that the mappings count against RLIMIT_MEMLOCK */
	__u64 bar_len[6];	/* out: bytes of each memory BAR that mmap() takes; 0 if there is none or it shares a page */
	__u64 reserved[8];
};

/* One run of addresses as the device sees them. */
struct oh_seg {
	__u64 addr;
	__u64 len;
};

/* oh_map.flags */
#define OH_MAP_READ	1u	/* the device may read the memory */
#define OH_MAP_WRITE	2u	/* the device may write the memory; at least one of the two is needed */
#define OH_MAP_NOPIN	4u	/* OH_MAP_DMABUF: the exporter may move the buffer, which revokes the mapping */
#define OH_MAP_CHUNKED	8u	/* each `chunk` bytes must be one run of addresses, else EMSGSIZE */

/* oh_map.why */
#define OH_WHY_ROOM	1u	/* ENOSPC: nsegs runs are needed, which is more than room */
#define OH_WHY_MASK	2u	/* ERANGE: the run at bad_offset, bad_addr lies beyond the DMA mask */
#define OH_WHY_CHUNK	3u	/* EMSGSIZE: the chunk at bad_offset ends after bad_len bytes of one run */
#define OH_WHY_BOUNCE	4u	/* EIO: at bad_offset the kernel would copy through another buffer, which nobody would sync */
#define OH_WHY_SHORT	5u	/* EIO: the exporter's list of addresses ends at bad_offset, before the range does */

/* For OH_MAP_USER, OH_MAP_DMABUF and OH_MAP_PEER. */
struct oh_map {
	__u32 flags;		/* in: OH_MAP_* */
	__s32 fd;		/* in, DMABUF */
	__u64 offset;		/* in: USER the address (whole pages); DMABUF and PEER the first byte in the buffer or BAR */
	__u64 len;		/* in: bytes (USER and PEER whole pages; DMABUF 0: to the end); out: bytes mapped */
	__u64 chunk;		/* in: with OH_MAP_CHUNKED */
	__u64 segs;		/* in: pointer to struct oh_seg[room] */
	__u32 room;		/* in */
	__u32 nsegs;		/* out: runs written, or wanted */
	__u32 id;		/* out: for OH_UNMAP */
	__u32 why;		/* out: OH_WHY_* */
	__u64 bad_addr;		/* out */
	__u64 bad_offset;	/* out: from the start of the mapped range */
	__u64 bad_len;		/* out */
	__u32 domain;		/* in, PEER: the other device */
	__u8 bus;
	__u8 devfn;
	__u16 bar;
	__u64 reserved[4];
};

struct oh_unmap {
	__u32 id;
	__u32 reserved;
};

/* oh_start.flags */
#define OH_START_UNRESET	1u	/* the caller has quieted a device that cannot be reset */

struct oh_start {
	__u32 flags;
	__u32 epoch;		/* in: oh_info.epoch as the caller knows it; another one is EAGAIN */
};

struct oh_mask {
	__u32 bits;		/* 24..64; from then on only addresses that narrow are given out. EBUSY while something is mapped */
	__u32 reserved;
};

struct oh_irqs {
	__u64 fds;		/* in: pointer to __s32[count], an eventfd or -1 for each vector */
	__u32 count;		/* in: 0 gives all of them back */
	__u32 reserved;
};

#define OH_INFO		_IOR(0xEB, 0x20, struct oh_info)
#define OH_MAP_USER	_IOWR(0xEB, 0x21, struct oh_map)	/* memory of the calling process */
#define OH_MAP_DMABUF	_IOWR(0xEB, 0x22, struct oh_map)	/* any exporter's buffer, or a part of it */
#define OH_MAP_PEER	_IOWR(0xEB, 0x23, struct oh_map)	/* another PCI device's BAR; CAP_SYS_RAWIO */
#define OH_UNMAP	_IOW(0xEB, 0x24, struct oh_unmap)
#define OH_RESET	_IO(0xEB, 0x25)				/* DMA off, function reset; leaves DMA off */
#define OH_START	_IOW(0xEB, 0x26, struct oh_start)	/* DMA on */
#define OH_STOP		_IO(0xEB, 0x27)				/* DMA off, and nothing on its way any more */
#define OH_MASK		_IOW(0xEB, 0x28, struct oh_mask)
#define OH_IRQS		_IOW(0xEB, 0x29, struct oh_irqs)	/* replaces the whole set */

#endif
