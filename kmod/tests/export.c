// SPDX-License-Identifier: GPL-2.0
/*
 * export KIND PROGRAM ARGUMENT...: becomes another program, which inherits a dma-buf and a file to map the same memory from. Its
 * standard input is a pipe with their numbers, where in that file the memory starts, and how long it is.
 */
#include <sys/mman.h>
#include <unistd.h>
#include "test.h"

struct memory {
	u64 offset, len;	/* in the file */
	u32 fd[2];		/* the dma-buf and the file */
};

static struct memory make(const char *kind)
{
	struct memory m = { .len = 64 * MIB };
	int exported;
	u8 *view;

	if (!strcmp(kind, "udmabuf")) {
		m.fd[0] = m.fd[1] = udmabuf(m.len, &view, false);
		munmap(view, m.len);
	} else if (!strcmp(kind, "vfio")) {
		vfio_open(vram_bdf);
		exported = vfio_export(0, m.len);
		if (exported < 0)
			die("vfio-pci exports no dma-buf: %d", exported);
		m.fd[0] = exported;
		m.fd[1] = vfio_bar2_file(&m.offset, &m.len);
	} else {
		die("'%s' is no exporter: udmabuf, vfio", kind);
	}
	return m;
}

void case_export(char **arg)
{
	struct memory m;
	int ends[2];

	if (!arg[0] || !arg[1])
		die("export KIND PROGRAM ARGUMENT...");
	m = make(arg[0]);
	/* A duplicate is inherited, whatever it is of. */
	m.fd[0] = dup(m.fd[0]);
	m.fd[1] = dup(m.fd[1]);
	if (pipe(ends) || write(ends[1], &m, sizeof(m)) != sizeof(m) || dup2(ends[0], 0) < 0)
		die("cannot pass the memory on");
	execv(arg[1], arg + 1);
	die("cannot run %s", arg[1]);
}
