// SPDX-License-Identifier: GPL-2.0
/* How sessions end: whatever happens, no DMA reaches memory that was given back. */
#include <fcntl.h>
#include <pthread.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "test.h"
#include "vramexp.h"

#define READS	60

static void wait_for(pid_t pid, int *status)
{
	if (waitpid(pid, status, 0) != pid)
		die("waitpid");
}

static int reap_all(void)
{
	int done = 0;

	while (reap(&io, 0.02) >= 0)
		done++;
	return done;
}

/* How many completions come in this time, which is not enough for all. */
static int reap_for(double seconds)
{
	double end = now() + seconds;
	int done = 0;

	while (now() < end)
		done += reap(&io, 0.005) >= 0;
	return done;
}

/* inflight user|udmabuf close|kill: reads are under way when the session ends (the drive is a slow one). */
void case_inflight(char **arg)
{
	bool user = !strcmp(arg[0], "user"), killed = !strcmp(arg[1], "kill");
	int fd = -1, changed = 0, i, *done = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	u8 *view;
	double begun;
	pid_t pid;

	if (user)
		view = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	else
		fd = udmabuf(MIB, &view, false);
	/* The memory stays with this process, and the session is another's. */
	pid = fork();
	if (!pid) {
		struct map m;

		nvme_open();
		if (user ? map_user(&m, view, MIB) : map_dmabuf(&m, fd, 0))
			die("cannot map");
		start_reads(&m, 0, READS);
		*done = 1 + reap_for(0.1);
		while (killed)
			pause();
		_exit(0);
	}
	while (killed && !*(volatile int *)done && waitpid(pid, NULL, WNOHANG) != pid)
		usleep(1000);
	begun = now();
	if (killed)
		kill(pid, SIGKILL);
	wait_for(pid, NULL);
	note("%d of %d reads were done; the end took %.0f ms", *done - 1, READS, (now() - begun) * 1e3);
	check(*done && *done - 1 < READS, "reads were under way");
	memset(view, 0x5a, READS * PAGE);
	usleep(1500000);
	for (i = 0; i < READS; i++)
		changed += view[i * PAGE] != 0x5a;
	check(!changed, "nothing was written after the end (%d pages)", changed);
	check(!(config16(nvme_bdf, 4) & 4), "bus mastering is off");
	nvme_open();
	check(true, "the next session works");
}

/* A session that was stopped goes on. */
static void check_again(void)
{
	struct pollfd p = { .fd = oh, .events = POLLPRI };

	check(oh_start(0) == -EBUSY, "no start without a reset");
	check(!oh_reset() && !oh_start(0) && !nvme_up() && !transfer(&io, false, 16, 8, bus(&host_map, 8 * PAGE), 0) &&
	      has_pattern(host + 8 * PAGE, 16, 8), "after a reset everything works again");
	check(poll(&p, 1, 0) == 0, "and poll() is quiet");
}

static bool touch_is_sigbus(void)
{
	int status;
	pid_t pid = fork();

	if (!pid) {
		(void)*(volatile u32 *)bar0;
		_exit(0);
	}
	wait_for(pid, &status);
	return WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS;
}

/* Has DMA been stopped for this reason, does poll() tell, and does the drive really do nothing? */
static void check_stopped(u32 reason, const char *what)
{
	struct pollfd p = { .fd = oh, .events = POLLPRI };
	struct oh_info info = oh_get_info();

	check(info.stopped & reason && !(info.flags & OH_INFO_DMA_ON), "%s stops DMA", what);
	check(poll(&p, 1, 0) == 1 && p.revents & POLLPRI, "poll() tells of it");
	check(!(config16(nvme_bdf, 4) & 4), "bus mastering is off");
	/* What had been done before may still be told. */
	reap_all();
	patience = 0.3;
	memset(host + 8 * PAGE, 0, PAGE);
	check(transfer(&io, false, 16, 8, bus(&host_map, 8 * PAGE), 0) == -1 && !has_pattern(host + 8 * PAGE, 16, 8),
	      "a command after that does nothing");
	patience = 5;
	check_again();
}

/* revoke HOW [inflight]: the exporter takes the buffer back. HOW: exporter, pinned, vfio-close, vfio-reset, vfio-memory */
void case_revoke(char **arg)
{
	bool vfio = !strncmp(arg[0], "vfio", 4), again;
	struct map m, second;
	u64 len = 0;
	u8 *view;
	int fd, r = 0;

	nvme_open();
	if (vfio) {
		vfio_open(vram_bdf);
		view = vfio_bar2(&len);
		fd = vfio_export(0, 4 * MIB);
	} else {
		view = vramexp_open();
		fd = vramexp_export(strcmp(arg[0], "pinned") ? 0 : VRAMEXP_PINS);
	}
	check(fd >= 0 && !map_dmabuf(&m, fd, 0), "the buffer can be mapped");
	check(!transfer(&io, false, 24, 8, bus(&m, 0), 0) && has_pattern(view, 24, 8), "the drive reads into it");
	if (arg[1]) {
		start_reads(&m, MIB, READS);
		r = reap_for(0.1);
		check(r < READS, "reads are under way (%d done)", r);
		r = 0;
	}
	if (!vfio)
		r = call(vramexp, VRAMEXP_REVOKE, NULL);
	else if (!strcmp(arg[0], "vfio-reset"))
		r = vfio_reset();
	else if (!strcmp(arg[0], "vfio-memory"))
		vfio_memory(false);
	else
		vfio_close(view, len);
	again = strcmp(arg[0], "vfio-close");
	check(!r, "it is taken back");
	check_stopped(OH_STOPPED_REVOKED, "a revocation");
	/* Without a pin an old kernel keeps the exporter's table until the end of the attachment. */
	if (!strcmp(arg[0], "pinned"))
		check(ioctl(vramexp, VRAMEXP_HELD) == 0, "nothing of it is held");
	if (!strcmp(arg[0], "vfio-memory"))
		vfio_memory(true);
	r = map_dmabuf(&second, fd, 0);
	if (again)
		check(!r && !transfer(&io, false, 32, 8, bus(&second, 0), 0) && has_pattern(view, 32, 8),
		      "the buffer can be mapped again");
	else
		check(r == -ENODEV, "the buffer of a device that is gone cannot be mapped again (%d)", r);
	check(!unmap(&m), "the dead mapping can be given back");
	if (!vfio)
		check(!unmap(&second) && ioctl(vramexp, VRAMEXP_HELD) == 0, "and then the exporter has everything back");
}

/* unbind: the driver is taken away while the session is open. */
void case_unbind(char **arg)
{
	struct pollfd p = { .fd = -1, .events = POLLIN };
	struct oh_info info;
	struct map m;

	nvme_open();
	p.fd = oh;
	if (map_user(&m, memory(MIB), MIB))
		die("cannot map");
	start_reads(&m, 0, READS);
	write_file("/sys/bus/pci/drivers/onehop/unbind", nvme_bdf);
	check(call(oh, OH_INFO, &info) == -ENODEV && call(oh, OH_RESET, NULL) == -ENODEV && unmap(&m) == -ENODEV &&
	      map_user(&m, host, PAGE) == -ENODEV, "all calls fail after it");
	check(poll(&p, 1, 0) == 1 && p.revents & POLLHUP, "poll() tells of it");
	check(!(config16(nvme_bdf, 4) & 4), "bus mastering is off");
	check(touch_is_sigbus(), "a touch of the BAR is SIGBUS");
	write_file("/sys/bus/pci/drivers_probe", nvme_bdf);
	close(oh);
	nvme_open();
	check(true, "after binding again everything works");
}

/* The kernel's log from here on. */
static int log_open(void)
{
	int log = open("/dev/kmsg", O_RDONLY | O_NONBLOCK);

	if (log < 0 || lseek(log, 0, SEEK_END) < 0)
		die("no /dev/kmsg");
	return log;
}

static bool log_has(int log, const char *text)
{
	char line[1024];
	bool found = false;
	ssize_t n;

	while ((n = read(log, line, sizeof(line) - 1)) > 0) {
		line[n] = 0;
		found |= !!strstr(line, text);
	}
	return found;
}

/* The first character of a file, or of /proc/PID/stat the state. */
static char first_of(const char *path, bool stat)
{
	char text[256] = "";
	char *end;
	int fd = open(path, O_RDONLY);

	if (fd < 0 || read(fd, text, sizeof(text) - 1) <= 0)
		die("cannot read %s", path);
	close(fd);
	end = strrchr(text, ')');
	return stat && end ? end[2] : *text;
}

static void wait_until(const char *path, bool stat, char want)
{
	double end = now() + 30;

	while (first_of(path, stat) != want) {
		if (now() > end)
			die("%s has no %c", path, want);
		usleep(10000);
	}
}

/*
 * stalled: an unbind holds the device's lock, and waits for the open() of another misc device, while the session's process ends,
 * which therefore cannot reset the device. Needs vramexp.
 */
void case_stalled(char **arg)
{
	static const char hold[] = "/sys/module/vramexp/parameters/hold_open";
	int log = log_open(), *mapped = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t session, opener, unbinder;
	char stat[32];
	int i;

	session = fork();
	if (!session) {
		nvme_open();
		*mapped = 1;
		for (;;)
			pause();
	}
	while (!*(volatile int *)mapped && waitpid(session, NULL, WNOHANG) != session)
		usleep(1000);
	check(*mapped && !pins_balanced(), "a session has memory");
	write_file(hold, "1");
	opener = fork();
	if (!opener)
		_exit(open("/dev/vramexp", O_RDWR) < 0);
	wait_until("/sys/module/vramexp/parameters/opening", false, '1');
	unbinder = fork();
	if (!unbinder) {
		write_file("/sys/bus/pci/drivers/onehop/unbind", nvme_bdf);
		_exit(0);
	}
	snprintf(stat, sizeof(stat), "/proc/%d/stat", unbinder);
	/* It may sleep like that for a moment before, too. */
	for (i = 0; i < 10; i++) {
		wait_until(stat, true, 'D');
		usleep(10000);
	}
	kill(session, SIGKILL);
	usleep(2500000);
	check(first_of(stat, true) == 'D', "an unbind has the device's lock, and the process was killed");
	check(!pins_balanced(), "its memory is kept for as long as the device was not reset");
	write_file(hold, "0");
	wait_for(opener, NULL);
	wait_for(unbinder, NULL);
	wait_for(session, NULL);
	check(pins_balanced(), "then it is given back");
	check(!log_has(log, "could not be reset"), "and the device was reset");
	write_file("/sys/bus/pci/drivers_probe", nvme_bdf);
	nvme_open();
	check(true, "the next session works");
}

/* foreign-reset: root resets the function by sysfs. */
void case_foreign_reset(char **arg)
{
	char path[96];

	nvme_open();
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/reset", nvme_bdf);
	write_file(path, "1");
	check_stopped(OH_STOPPED_RESET, "somebody else's reset");
}

static volatile bool looking = true;

/* Counts how often nobody answers. */
static void *look(void *silent)
{
	while (looking)
		*(volatile u64 *)silent += *(volatile u32 *)bar0 == UINT32_MAX;
	return NULL;
}

static double reset_ended;

static void *reset_by_root(void *path)
{
	write_file(path, "1");
	reset_ended = now();
	return NULL;
}

/*
 * irq-resets: OH_IRQS during another task's reset, which takes a tenth of a second, returns after the reset. On a busy machine
 * either end may be seen late, but not most of the time.
 */
void case_irq_resets(char **arg)
{
	s32 fd[2] = { eventfd(0, EFD_NONBLOCK), eventfd(0, EFD_NONBLOCK) };
	struct oh_irqs a = { .fds = (u64)(uintptr_t)fd, .count = 2 };
	struct sqe read = { .opcode = 2, .nsid = 1, .cdw = { 16, 0, 7 } };
	struct pollfd ready = { .fd = fd[1], .events = POLLIN };
	pthread_t resetter;
	struct queue q;
	char path[96];
	int i, early = 0, r = 0;

	nvme_open();
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/reset", nvme_bdf);
	for (i = 0; i < 8; i++) {
		u32 epoch = oh_get_info().epoch;
		double ended;

		if (pthread_create(&resetter, NULL, reset_by_root, path))
			die("pthread_create");
		while (oh_get_info().epoch == epoch)
			;
		r |= call(oh, OH_IRQS, &a);
		ended = now();
		pthread_join(resetter, NULL);
		early += reset_ended - ended > 0.03;
	}
	check(!r, "interrupts are set up during eight resets of somebody else's");
	check(early < 4, "not before the reset has ended (%d times)", early);
	check(!oh_reset() && !oh_start(0) && !nvme_up(), "the drive comes up");
	q = (struct queue){ .sq = (void *)(host + 10 * PAGE), .cq = (void *)(host + 11 * PAGE), .sq_bus = bus(&host_map, 10 * PAGE),
			    .cq_bus = bus(&host_map, 11 * PAGE), .id = 2, .depth = 16, .vector = 1 };
	memset(host + 10 * PAGE, 0, 2 * PAGE);
	read.prp1 = bus(&host_map, 12 * PAGE);
	check(!queue_create(&q), "a queue with an interrupt");
	push(&q, &read);
	check(poll(&ready, 1, 5000) == 1, "which is signalled");
}

/* resets: nobody sees the BARs of a device that is being reset. */
void case_resets(char **arg)
{
	u64 silent = 0;
	pthread_t looker;
	bool done = true;
	int i;

	nvme_open();
	if (pthread_create(&looker, NULL, look, &silent))
		die("pthread_create");
	for (i = 0; i < 20; i++)
		done &= !oh_reset();
	looking = false;
	pthread_join(looker, NULL);
	check(done, "twenty resets under the eyes of a thread");
	check(!silent, "which is never left without an answer (%llu times)", (ull)silent);
	check(!oh_start(0) && !nvme_up(), "and the drive comes up");
}

/* suspend: all devices sleep and wake, by the kernel's own test of it. */
void case_suspend(char **arg)
{
	nvme_open();
	write_file("/sys/module/suspend/parameters/pm_test_delay", "0");
	write_file("/sys/power/pm_test", "devices");
	write_file("/sys/power/state", "freeze");
	check_stopped(OH_STOPPED_SUSPEND, "sleep");
}

static void aer_inject(const char *bdf)
{
	struct { u8 bus, dev, fn; u32 uncorrected, corrected, header[4], domain; } a = { .uncorrected = 1 << 4 };
	unsigned int domain, bus, dev, fn;
	int fd = open("/dev/aer_inject", O_WRONLY);

	if (fd < 0 || sscanf(bdf, "%x:%x:%x.%x", &domain, &bus, &dev, &fn) != 4)
		die("no aer_inject");
	a.bus = bus;
	a.dev = dev;
	a.fn = fn;
	a.domain = domain;
	if (write(fd, &a, sizeof(a)) != sizeof(a))
		die("aer_inject");
	close(fd);
}

/* What the kernel says at the end of its recovery of a port, in the log from here on. */
static bool recovered(int log)
{
	double since = now();
	char line[1024];
	ssize_t n;

	while (now() < since + 60) {
		n = read(log, line, sizeof(line) - 1);
		if (n <= 0) {
			usleep(20000);
			continue;
		}
		line[n] = 0;
		if (strstr(line, "device recovery successful"))
			return true;
		if (strstr(line, "device recovery failed"))
			return false;
	}
	die("the kernel's recovery has not ended within a minute");
}

static int set_irqs(void)
{
	s32 fd = eventfd(0, EFD_NONBLOCK);
	struct oh_irqs a = { .fds = (u64)(uintptr_t)&fd, .count = 1 };
	int r = call(oh, OH_IRQS, &a);

	close(fd);
	return r;
}

/* Of the bus below a port, of which 0x7f is in no machine of the bed: then nothing below it answers, and all reads are ones. */
static u8 number_bus(const char *port, u8 number)
{
	char path[96];
	int fd;
	u8 old;

	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/config", port);
	fd = open(path, O_RDWR);
	if (fd < 0 || pread(fd, &old, 1, 0x19) != 1 || pwrite(fd, &number, 1, 0x19) != 1)
		die("cannot write %s", path);
	close(fd);
	return old;
}

/* absent PORT: the device below the port does not answer for a while. */
void case_absent(char **arg)
{
	u8 number;

	nvme_open();
	number = number_bus(arg[0], 0x7f);
	check(config16(nvme_bdf, 0) == 0xffff, "the device reads all ones");
	check(set_irqs() == -EIO, "its interrupts are left alone");
	check(oh_reset() == -EIO, "it cannot be reset");
	check(touch_is_sigbus(), "a touch of its BAR is SIGBUS");
	number_bus(arg[0], number);
	check_again();
	check(!set_irqs(), "with interrupts, too");
}

/* shutdown: what the kernel calls before a reboot or kexec. Needs vramexp. */
void case_shutdown(char **arg)
{
	nvme_open();
	write_file("/sys/module/vramexp/parameters/shutdown", nvme_bdf);
	check(!(config16(nvme_bdf, 4) & 4) && !(oh_get_info().flags & OH_INFO_DMA_ON), "the end of the machine stops DMA");
	check(oh_start(0) == -ENODEV && !oh_reset() && oh_start(0) == -ENODEV && !(config16(nvme_bdf, 4) & 4),
	      "for good, also after a reset");
	write_file("/sys/bus/pci/drivers/onehop/unbind", nvme_bdf);
	write_file("/sys/bus/pci/drivers_probe", nvme_bdf);
	close(oh);
	nvme_open();
	check(true, "bound again, it works");
}

/* The port reports a fatal error; how its recovery ends is what is expected. */
static void break_link(const char *port, bool lost)
{
	int log = log_open();

	aer_inject(port);
	check(recovered(log) == !lost, "the kernel's recovery %s", lost ? "fails" : "succeeds");
	check(lost == !(config16(nvme_bdf, 4) & 2), "and leaves the device %s its configuration", lost ? "without" : "with");
	close(log);
}

/*
 * aer PORT recovered|lost [idle]: PCIe reports a fatal error at the port above the device, of which the kernel brings the
 * device back, or does not. idle: while nobody has it.
 */
void case_aer(char **arg)
{
	bool lost = !strcmp(arg[1], "lost");
	struct pollfd p = { .events = POLLPRI };

	if (arg[2]) {
		break_link(arg[0], lost);
		return;
	}
	nvme_open();
	p.fd = oh;
	break_link(arg[0], lost);
	if (!lost) {
		check_stopped(OH_STOPPED_ERROR, "a fatal error");
		return;
	}
	check(oh_get_info().stopped & OH_STOPPED_ERROR && poll(&p, 1, 0) == 1 && p.revents & POLLPRI, "the error is told");
	check(set_irqs() == -EIO, "no interrupts of a device without its configuration");
	check(touch_is_sigbus(), "a touch of the BAR is SIGBUS");
	check_again();
}

/* peer-gone: the device whose BAR is mapped is removed. */
void case_peer_gone(char **arg)
{
	char path[96];
	struct map m;

	nvme_open();
	check(!map_peer(&m, vram_bdf, 2, 0, MIB), "the BAR can be mapped");
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/remove", vram_bdf);
	write_file(path, "1");
	check_stopped(OH_STOPPED_PEER, "the removal");
	check(!unmap(&m), "the dead mapping can be given back");
	check(map_peer(&m, vram_bdf, 2, 0, MIB) == -ENODEV, "and no new one made");
	write_file("/sys/bus/pci/rescan", "1");
	check(!map_peer(&m, vram_bdf, 2, 0, MIB), "until the device is back");
}
