// SPDX-License-Identifier: GPL-2.0
/* Where the tests get dma-bufs from, and other devices' memory. */
#include <fcntl.h>
#include <linux/memfd.h>
#include <linux/vfio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "test.h"
#include "vramexp.h"

int memfd_create(const char *name, unsigned int flags);
#ifndef F_ADD_SEALS
#define F_ADD_SEALS	1033
#define F_SEAL_SHRINK	2
#endif

int vramexp = -1;
static int vfio_device = -1, vfio_group = -1, vfio_container = -1;

static u8 *view_of(int fd, u64 len, u64 offset, const char *what)
{
	u8 *view = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);

	if (view == MAP_FAILED)
		die("cannot map %s", what);
	return view;
}

int udmabuf(u64 len, u8 **view, bool scattered)
{
	struct { u32 memfd, flags; u64 offset, size; } a = { .flags = 1, .size = len };
	int device = open("/dev/udmabuf", O_RDWR), memfd = memfd_create("buffer", MFD_ALLOW_SEALING), fd;

	if (device < 0 || memfd < 0 || ftruncate(memfd, len) || fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK))
		die("no udmabuf");
	*view = view_of(memfd, len, 0, "the memfd");
	/* Every other page first: neighbours lie apart, however tidy the free memory is. */
	for (u64 at = 0; scattered && at < 2 * len; at += 2 * PAGE)
		(*view)[at < len ? at : at - len + PAGE] = 0;
	a.memfd = memfd;
	fd = ioctl(device, _IOW('u', 0x42, a), &a);
	if (fd < 0)
		die("UDMABUF_CREATE");
	close(memfd);
	close(device);
	return fd;
}

int dma_heap(u64 len, u8 **view)
{
	struct { u64 len; u32 fd, fd_flags; u64 heap_flags; } a = { .len = len, .fd_flags = O_RDWR | O_CLOEXEC };
	int heap = open("/dev/dma_heap/system", O_RDONLY | O_CLOEXEC);

	if (heap < 0 || ioctl(heap, _IOWR('H', 0, a), &a))
		die("no dma-heap");
	close(heap);
	*view = view_of(a.fd, len, 0, "the heap's buffer");
	return a.fd;
}

u8 *sysfs_bar(const char *bdf, int bar)
{
	char path[96];
	struct stat st;
	u8 *view;
	int fd;

	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/enable", bdf);
	write_file(path, "1");
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/resource%d", bdf, bar);
	fd = open(path, O_RDWR | O_SYNC);
	if (fd < 0 || fstat(fd, &st))
		die("cannot open %s", path);
	view = view_of(fd, st.st_size, 0, path);
	close(fd);
	return view;
}

u8 *vramexp_open(void)
{
	vramexp = open("/dev/vramexp", O_RDWR | O_CLOEXEC);
	if (vramexp < 0)
		die("no /dev/vramexp");
	return view_of(vramexp, 4 * MIB, 0, "/dev/vramexp");
}

int vramexp_export(unsigned int flags)
{
	int fd = ioctl(vramexp, VRAMEXP_EXPORT, flags);

	if (fd < 0)
		die("VRAMEXP_EXPORT");
	return fd;
}

static u64 vfio_region(u32 index, u64 *size)
{
	struct vfio_region_info info = { .argsz = sizeof(info), .index = index };

	if (ioctl(vfio_device, VFIO_DEVICE_GET_REGION_INFO, &info))
		die("VFIO_DEVICE_GET_REGION_INFO");
	if (size)
		*size = info.size;
	return info.offset;
}

void vfio_open(const char *bdf)
{
	char path[96], link[256];
	ssize_t n;

	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/iommu_group", bdf);
	n = readlink(path, link, sizeof(link) - 1);
	if (n < 0)
		die("%s is in no IOMMU group", bdf);
	link[n] = 0;
	snprintf(path, sizeof(path), "/dev/vfio/%s", strrchr(link, '/') + 1);
	vfio_group = open(path, O_RDWR | O_CLOEXEC);
	vfio_container = open("/dev/vfio/vfio", O_RDWR | O_CLOEXEC);
	if (vfio_group < 0 || vfio_container < 0 || ioctl(vfio_group, VFIO_GROUP_SET_CONTAINER, &vfio_container) ||
	    ioctl(vfio_container, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU))
		die("no VFIO");
	vfio_device = ioctl(vfio_group, VFIO_GROUP_GET_DEVICE_FD, bdf);
	if (vfio_device < 0)
		die("VFIO_GROUP_GET_DEVICE_FD");
	vfio_memory(true);
}

/* Memory decoding, and bus mastering with it. */
void vfio_memory(bool on)
{
	u64 config = vfio_region(VFIO_PCI_CONFIG_REGION_INDEX, NULL);
	u16 command;

	if (pread(vfio_device, &command, 2, config + 4) != 2)
		die("cannot read the command register");
	command = on ? command | 6 : command & ~2;
	if (pwrite(vfio_device, &command, 2, config + 4) != 2)
		die("cannot write the command register");
}

/* The file that BAR2 can be mapped from, and where in it. */
int vfio_bar2_file(u64 *offset, u64 *len)
{
	*offset = vfio_region(2, len);
	return vfio_device;
}

u8 *vfio_bar2(u64 *len)
{
	u64 offset = vfio_region(2, len);

	return view_of(vfio_device, *len, offset, "BAR2 by VFIO");
}

/* VFIO_DEVICE_FEATURE_DMA_BUF, which older headers do not have: -errno where the kernel does not either. */
int vfio_export(u64 offset, u64 len)
{
	struct {
		u32 argsz, flags;
		u32 region, open_flags, more, ranges;
		u64 offset, len;
	} a = { sizeof(a), 1 << 16 | 11, 2, O_RDWR | O_CLOEXEC, 0, 1, offset, len };
	int fd = ioctl(vfio_device, VFIO_DEVICE_FEATURE, &a);

	return fd < 0 ? -errno : fd;
}

int vfio_reset(void)
{
	return call(vfio_device, VFIO_DEVICE_RESET, NULL);
}

void vfio_close(u8 *view, u64 len)
{
	munmap(view, len);
	close(vfio_device);
	close(vfio_group);
	close(vfio_container);
}
