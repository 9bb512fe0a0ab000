/* SPDX-License-Identifier: GPL-2.0 */
/* What /dev/vramexp takes. The argument is the value itself. */
#ifndef VRAMEXP_H
#define VRAMEXP_H

#include <linux/ioctl.h>

#define VRAMEXP_EXPORT	_IO(0xEB, 0x70)	/* a new dma-buf's descriptor; flags below */
#define VRAMEXP_REVOKE	_IO(0xEB, 0x71)	/* takes the newest one back */
#define VRAMEXP_HELD	_IO(0xEB, 0x72)	/* pins and mappings that importers hold */

#define VRAMEXP_PINS		1	/* with pin and unpin: a dynamic exporter */
#define VRAMEXP_READ_ONLY	2	/* the descriptor is for reading */

#endif
