/* SPDX-License-Identifier: GPL-2.0 */
/* What the module's tests share. They run in a guest, as root, on QEMU's devices, and print lines PASS and FAIL. */
#ifndef TEST_H
#define TEST_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../onehop.h"

typedef int32_t s32;
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef unsigned long long ull;

#define PAGE	4096ul
#define MIB	(1ul << 20)
#define BLOCK	512

/* test.c */
void check(bool ok, const char *format, ...) __attribute__((format(printf, 2, 3)));
void skip(const char *why);
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
int finish(void);
double now(void);
/* ioctl() that returns 0 or -errno */
int call(int fd, unsigned long cmd, void *arg);
void write_file(const char *path, const char *text);
/* A word of PCI configuration space, read by sysfs. */
u16 config16(const char *bdf, unsigned int at);
/* Has the kernel given back every page that was pinned? */
bool pins_balanced(void);

/* The drive and the module's file on it; `oh` where there is no drive. */
extern const char *nvme_bdf, *vram_bdf, *edu_bdf;

struct map {
	struct oh_map a;	/* as the kernel left it */
	struct oh_seg *seg;
};

/* device.c: the module's calls */
extern int oh;
int oh_try_open(const char *bdf);
void oh_open(const char *bdf);
struct oh_info oh_get_info(void);
int oh_reset(void);
int oh_start(u32 flags);
int map_do(struct map *m, unsigned long cmd, struct oh_map a);
int map_user(struct map *m, void *at, u64 len);
int map_dmabuf(struct map *m, int fd, u32 flags);
int map_part(struct map *m, int fd, u64 offset, u64 len);
int map_peer(struct map *m, const char *bdf, u32 bar, u64 offset, u64 len);
int unmap(struct map *m);
u64 bus(const struct map *m, u64 offset);
u8 *memory(u64 len);

/* nvme.c: a user-space driver, small and for one I/O queue pair at a time */
struct sqe { u8 opcode, flags; u16 cid; u32 nsid; u64 reserved, metadata, prp1, prp2; u32 cdw[6]; };
struct cqe { u32 dw0, dw1; u16 sq_head, sq_id, cid, status; };
struct queue {
	volatile struct sqe *sq;
	volatile struct cqe *cq;
	u64 sq_bus, cq_bus;
	u16 id, depth, tail, head, phase, cid;
	int vector;	/* of the completion queue; -1: no interrupts */
};
extern volatile u8 *bar0;
extern u8 *host;		/* 2 MiB of user memory, mapped as host_map; its first pages are the queues' */
extern struct map host_map;
extern struct queue io;
void nvme_open(void);		/* opens the device, resets it, starts DMA, maps `host` and brings the drive up */
int nvme_up(void);		/* after a reset: 0 if the drive is up again */
int queue_create(struct queue *q);
void push(struct queue *q, struct sqe *c);
int reap(struct queue *q, double seconds);	/* -1: nothing came */
int transfer(struct queue *q, bool write, u64 lba, u32 blocks, u64 prp1, u64 prp2);
void start_reads(const struct map *m, u64 offset, u32 count);	/* 4 KiB each, from block 0 on */
extern double patience;
/* The pattern that `fill` puts on the disk. */
void pattern(volatile void *at, u64 lba, u32 blocks);
bool has_pattern(const volatile void *at, u64 lba, u32 blocks);

/* memory.c: where dma-bufs come from */
int udmabuf(u64 len, u8 **view, bool scattered);
int dma_heap(u64 len, u8 **view);
u8 *sysfs_bar(const char *bdf, int bar);
extern int vramexp;
u8 *vramexp_open(void);
int vramexp_export(unsigned int flags);
void vfio_open(const char *bdf);
u8 *vfio_bar2(u64 *len);
int vfio_bar2_file(u64 *offset, u64 *len);
int vfio_export(u64 offset, u64 len);
void vfio_memory(bool on);
int vfio_reset(void);
void vfio_close(u8 *view, u64 len);

/* The cases: each gets what stands after its name. */
typedef void test_case(char **arg);
test_case case_fill, case_verify, case_door, case_user, case_udmabuf, case_heap, case_exporter, case_vfio, case_peer;
test_case case_loosened, case_shutdown, case_absent, case_mask, case_edu, case_irq, case_bounce, case_refused, case_unprivileged;
test_case case_inflight, case_revoke, case_unbind, case_foreign_reset, case_resets, case_suspend, case_peer_gone, case_faults;
test_case case_stalled, case_irq_resets, case_peer_memory, case_locked;
test_case case_cycles, case_stress, case_fuzz, case_fail, case_aer, case_export;

/* cases.c: everything that can be done with a buffer that the CPU sees too */
void try_buffer(const char *name, struct map *m, volatile u8 *view);

#endif
