// SPDX-License-Identifier: GPL-2.0
/*
 * export KIND PROGRAM ARGUMENT...: runs another program, whose standard input is a socket. It gets a dma-buf there, a file to
 * map the same memory from, and where in that file it starts and how long it is.
 */
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include "test.h"

struct memory {
	u64 offset, len;	/* in the file */
	int fd[2];		/* the dma-buf and the file */
};

static struct memory make(const char *kind)
{
	struct memory m = { .len = 64 * MIB };
	u8 *view;

	if (!strcmp(kind, "udmabuf")) {
		m.fd[0] = m.fd[1] = udmabuf(m.len, &view);
		munmap(view, m.len);
	} else if (!strcmp(kind, "vfio")) {
		vfio_open(vram_bdf);
		m.fd[0] = vfio_export(0, m.len);
		if (m.fd[0] < 0)
			die("vfio-pci exports no dma-buf: %d", m.fd[0]);
		m.fd[1] = vfio_bar2_file(&m.offset, &m.len);
	} else {
		die("'%s' is no exporter: udmabuf, vfio", kind);
	}
	return m;
}

void case_export(char **arg)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(2 * sizeof(int))];
	} control = { .header = { CMSG_LEN(2 * sizeof(int)), SOL_SOCKET, SCM_RIGHTS } };
	struct memory m;
	struct iovec text = { &m, 2 * sizeof(u64) };
	struct msghdr message = {
		.msg_iov = &text, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control.room),
	};
	int pair[2];

	if (!arg[0] || !arg[1])
		die("export KIND PROGRAM ARGUMENT...");
	m = make(arg[0]);
	memcpy(CMSG_DATA(&control.header), m.fd, sizeof(m.fd));
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || sendmsg(pair[0], &message, 0) < 0 || dup2(pair[1], 0) < 0)
		die("cannot pass the memory on");
	execv(arg[1], arg + 1);
	die("cannot run %s", arg[1]);
}
