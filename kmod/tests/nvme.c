// SPDX-License-Identifier: GPL-2.0
/* A small NVMe driver over the module, to have a device whose DMA can be told where to go. */
#include <sys/mman.h>
#include "test.h"

#define REG_CAP		0x00
#define REG_CC		0x14
#define REG_CSTS	0x1c
#define REG_AQA		0x24
#define REG_ASQ		0x28
#define REG_ACQ		0x30
#define REG_DOORBELL	0x1000

volatile u8 *bar0;
u8 *host;
struct map host_map;
struct queue io;
static struct queue admin;
static u32 stride;
double patience = 5;

static u32 read32(u32 at) { return *(volatile u32 *)(bar0 + at); }
static u64 read64(u32 at) { return *(volatile u64 *)(bar0 + at); }
static void write32(u32 at, u32 value) { *(volatile u32 *)(bar0 + at) = value; }
static void write64(u32 at, u64 value) { *(volatile u64 *)(bar0 + at) = value; }

void pattern(volatile void *at, u64 lba, u32 blocks)
{
	volatile u64 *word = at;
	u32 b, k;

	for (b = 0; b < blocks; b++)
		for (k = 0; k < BLOCK / 8; k++)
			*word++ = (lba + b) * 0x9E3779B97F4A7C15ull + k;
}

bool has_pattern(const volatile void *at, u64 lba, u32 blocks)
{
	const volatile u64 *word = at;
	u32 b, k;

	for (b = 0; b < blocks; b++)
		for (k = 0; k < BLOCK / 8; k++)
			if (*word++ != (lba + b) * 0x9E3779B97F4A7C15ull + k)
				return false;
	return true;
}

void push(struct queue *q, struct sqe *c)
{
	volatile u64 *to = (volatile u64 *)&q->sq[q->tail];
	const u64 *from = (const u64 *)c;
	int i;

	c->cid = q->cid++;
	for (i = 0; i < 8; i++)
		to[i] = from[i];
	__sync_synchronize();
	q->tail = (q->tail + 1) % q->depth;
	write32(REG_DOORBELL + 2 * q->id * stride, q->tail);
}

int reap(struct queue *q, double seconds)
{
	volatile struct cqe *e = &q->cq[q->head];
	double end = now() + seconds;
	u16 status;

	while ((e->status & 1) != q->phase)
		if (now() > end)
			return -1;
	__sync_synchronize();
	status = e->status >> 1;
	if (++q->head == q->depth) {
		q->head = 0;
		q->phase ^= 1;
	}
	write32(REG_DOORBELL + (2 * q->id + 1) * stride, q->head);
	return status;
}

static int submit(struct queue *q, struct sqe *c)
{
	push(q, c);
	return reap(q, patience);
}

static struct sqe transfer_command(bool write, u64 lba, u32 blocks, u64 prp1, u64 prp2)
{
	return (struct sqe){ .opcode = write ? 1 : 2, .nsid = 1, .prp1 = prp1, .prp2 = prp2,
			     .cdw = { lba, lba >> 32, blocks - 1 } };
}

int transfer(struct queue *q, bool write, u64 lba, u32 blocks, u64 prp1, u64 prp2)
{
	struct sqe c = transfer_command(write, lba, blocks, prp1, prp2);

	return submit(q, &c);
}

void start_reads(const struct map *m, u64 offset, u32 count)
{
	u32 i;

	for (i = 0; i < count; i++) {
		struct sqe c = transfer_command(false, i * 8, 8, bus(m, offset + i * PAGE), 0);

		push(&io, &c);
	}
}

int queue_create(struct queue *q)
{
	u32 size = q->id | (u32)(q->depth - 1) << 16;
	struct sqe cq = { .opcode = 5, .prp1 = q->cq_bus, .cdw = { size, 1 } };
	struct sqe sq = { .opcode = 1, .prp1 = q->sq_bus, .cdw = { size, 1 | (u32)q->id << 16 } };
	int r;

	if (q->vector >= 0)
		cq.cdw[1] |= 2 | (u32)q->vector << 16;
	q->phase = 1;
	r = submit(&admin, &cq);
	return r ?: submit(&admin, &sq);
}

static int wait_ready(u32 ready)
{
	double end = now() + 5;

	while ((read32(REG_CSTS) & 1) != ready)
		if (now() > end)
			return -1;
	return 0;
}

/* The first eight pages of `host`: queues, and a page for identify. */
int nvme_up(void)
{
	struct sqe identify = { .opcode = 6, .nsid = 1, .prp1 = bus(&host_map, 4 * PAGE) };
	struct sqe queues = { .opcode = 9, .cdw = { 7, 7 | 7 << 16 } };

	write32(REG_CC, 0);
	if (wait_ready(0))
		return -1;
	memset(host, 0, 8 * PAGE);
	admin = (struct queue){ .sq = (void *)host, .cq = (void *)(host + PAGE), .sq_bus = bus(&host_map, 0),
				.cq_bus = bus(&host_map, PAGE), .depth = 32, .phase = 1 };
	write32(REG_AQA, 31 | 31 << 16);
	write64(REG_ASQ, admin.sq_bus);
	write64(REG_ACQ, admin.cq_bus);
	write32(REG_CC, 1 | 6 << 16 | 4 << 20);
	if (wait_ready(1))
		return -2;
	if (submit(&admin, &identify) || !*(u64 *)(host + 4 * PAGE))
		return -3;
	if (submit(&admin, &queues))
		return -4;
	io = (struct queue){ .sq = (void *)(host + 2 * PAGE), .cq = (void *)(host + 3 * PAGE),
			     .sq_bus = bus(&host_map, 2 * PAGE), .cq_bus = bus(&host_map, 3 * PAGE),
			     .id = 1, .depth = 64, .vector = -1 };
	return queue_create(&io) ? -5 : 0;
}

void nvme_open(void)
{
	int r;

	oh_open(nvme_bdf);
	r = oh_reset();
	if (r)
		die("OH_RESET: %d", r);
	bar0 = mmap(NULL, oh_get_info().bar_len[0], PROT_READ | PROT_WRITE, MAP_SHARED, oh, OH_BAR_OFFSET(0));
	if (bar0 == MAP_FAILED)
		die("cannot map BAR0");
	stride = 4 << (read64(REG_CAP) >> 32 & 15);
	host = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	r = map_user(&host_map, host, 2 * MIB);
	if (r)
		die("OH_MAP_USER: %d", r);
	r = oh_start(0);
	if (r)
		die("OH_START: %d", r);
	r = nvme_up();
	if (r)
		die("the drive does not come up: step %d", -r);
	r = transfer(&io, false, 16, 8, bus(&host_map, 8 * PAGE), 0);
	if (r || !has_pattern(host + 8 * PAGE, 16, 8))
		die("the drive does not read: status %x", r);
}
