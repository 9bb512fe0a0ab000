//! Desktops and a laptop.

use super::compose::*;
use super::{GIB, MIB, base, cuda, cuda_gpu, identity, nvidia, nvme, options, refused};

const RYZEN: (&str, u32, &str) = ("AuthenticAMD", 25, "AMD Ryzen 7 5800X 8-Core Processor");
const AM5: (&str, u32, &str) = ("AuthenticAMD", 25, "AMD Ryzen 9 7950X 16-Core Processor");
const CORE: (&str, u32, &str) = ("GenuineIntel", 6, "13th Gen Intel(R) Core(TM) i7-13700H");
const GPU: &str = "0000:0a:00.0";
const DRIVE: &str = "0000:0b:00.0";

/// The machine that first showed that a GPU's posted writes reach an NVMe drive on a B550 board.
fn b550(about: &str, root: bool, window: u64) -> Machine {
    let mut machine = base(about, RYZEN, "6.17.0-14-generic", root);
    machine.file("/proc/cmdline", "amd_iommu=off\n");
    let hide = |function: Function| if root { function } else { function.unprivileged() };
    machine
        .add(&hide(Function::port("0000:00:03.1", (0x1022, 0x1483), ROOT_PORT).lanes((4, 16), (4, 16))))
        .add(&hide(Function::port("0000:00:03.4", (0x1022, 0x1483), ROOT_PORT).lanes((3, 4), (4, 4))))
        .add(&hide(
            Function::new(GPU, (0x10de, 0x2204), 0x030000)
                .under(&["0000:00:03.1"])
                .bar(0, 0xf600_0000, 16 * MIB, MEM32)
                .bar(1, if window > GIB { 0xd0_0000_0000 } else { 0xd000_0000 }, window, PREF64)
                .bar(3, 0xe000_0000, 32 * MIB, PREF64)
                .resizable(1, window.ilog2(), 26, 35)
                .lanes((1, 16), (4, 16))
                .with("boot_vga", "1\n")
                .driver("nvidia"),
        ));
    machine
}

fn sn530(root: bool) -> Function {
    let drive = Function::new(DRIVE, (0x15b7, 0x5009), 0x010802)
        .under(&["0000:00:03.4"])
        .bar(0, 0xfc80_0000, 16 << 10, MEM64)
        .lanes((3, 4), (3, 4));
    if root { drive } else { drive.unprivileged() }
}

pub fn b550_before() -> Machine {
    let mut machine = b550(
        "Ryzen 7 5800X, B550, RTX 3090, WD SN530; before changes: proprietary driver, small BAR1, not root",
        false,
        256 * MIB,
    );
    machine.add(&sn530(false).driver("nvme"));
    nvme(&mut machine, DRIVE, 0, "WDC WDS100T2B0C", None);
    machine.answer(
        "identify:nvme0",
        serde_json::json!({ "Err": "opening /dev/nvme0 failed: Permission denied (os error 13)" }),
    );
    nvidia(&mut machine, "590.48.01", false, "");
    cuda(&mut machine, 13010, &[cuda_gpu(GPU, "NVIDIA GeForce RTX 3090", 24, refused())]);
    machine
}

pub fn b550_after() -> Machine {
    let mut machine = b550(
        "Ryzen 7 5800X, B550, RTX 3090, WD SN530; after changes: open driver with PeerMappingOverride, ReBAR on, drive on vfio-pci without IOMMU, root",
        true,
        32 * GIB,
    );
    machine.add(&sn530(true).driver("vfio-pci").with("power/control", "on\n"));
    machine.file("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y\n");
    machine.there("/sys/module/vfio_pci").there("/dev/vfio/vfio").there("/dev/vfio/noiommu-0");
    nvidia(&mut machine, "590.48.01", true, "PeerMappingOverride=1;ForceP2P=0x11;RMForceP2PType=1");
    cuda(&mut machine, 13010, &[cuda_gpu(GPU, "NVIDIA GeForce RTX 3090", 24, refused())]);
    machine
}

fn am5(about: &str, start: u64, window: u64, registry: &str) -> Machine {
    let mut machine = base(about, AM5, "6.8.0-49-generic", true);
    machine
        .add(
            &Function::port("0000:00:01.1", (0x1022, 0x14db), ROOT_PORT)
                .lanes((5, 16), (5, 16))
                .group(3, "DMA-FQ"),
        )
        .add(
            &Function::port("0000:00:02.1", (0x1022, 0x14db), ROOT_PORT)
                .lanes((5, 4), (5, 4))
                .group(4, "DMA-FQ"),
        )
        .add(
            &Function::port("0000:00:02.2", (0x1022, 0x14db), ROOT_PORT)
                .lanes((4, 4), (5, 4))
                .group(5, "DMA-FQ"),
        )
        .add(
            &Function::new("0000:01:00.0", (0x10de, 0x2b85), 0x030000)
                .under(&["0000:00:01.1"])
                .bar(0, 0xd800_0000, 64 * MIB, MEM32)
                .bar(1, start, window, PREF64)
                .resizable(1, window.ilog2(), 28, 35)
                .lanes((5, 16), (5, 16))
                .group(12, "DMA-FQ")
                .driver("nvidia"),
        )
        .add(
            &Function::new("0000:02:00.0", (0x144d, 0xa80c), 0x010802)
                .under(&["0000:00:02.1"])
                .bar(0, 0xdc00_0000, 16 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .group(13, "DMA-FQ")
                .driver("nvme"),
        )
        .add(
            &Function::new("0000:03:00.0", (0x144d, 0xa80c), 0x010802)
                .under(&["0000:00:02.2"])
                .bar(0, 0xdc10_0000, 16 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .group(14, "DMA-FQ")
                .driver("nvme"),
        );
    nvme(&mut machine, "0000:02:00.0", 0, "Samsung SSD 990 PRO 2TB", Some("/"));
    nvme(&mut machine, "0000:03:00.0", 1, "Samsung SSD 990 PRO 2TB", None);
    identity(&mut machine, 0, 9);
    identity(&mut machine, 1, 9);
    machine.there("/sys/class/iommu/ivhd0").there("/sys/module/vfio_pci").there("/dev/vfio/vfio");
    nvidia(&mut machine, "580.95.05", true, registry);
    cuda(&mut machine, 13000, &[cuda_gpu("0000:01:00.0", "NVIDIA GeForce RTX 5090", 32, refused())]);
    machine
}

const STATIC: &str = "RMForceStaticBar1=1;RMForceDisableIomapWC=1";

pub fn am5_rebar_off() -> Machine {
    am5("Ryzen 9 7950X, AM5 board, RTX 5090, two drives; Resizable BAR off", 0xc000_0000, 256 * MIB, "")
}

pub fn am5_rebar_on() -> Machine {
    am5(
        "Ryzen 9 7950X, AM5 board, RTX 5090, two drives; Resizable BAR on, static BAR1 requested",
        0xf8_0000_0000,
        32 * GIB,
        STATIC,
    )
}

pub fn am5_misplaced() -> Machine {
    am5(
        "Ryzen 9 7950X, AM5 board, RTX 5090, two drives; static BAR1 requested, which the firmware placed 4 MiB past a 512 MiB boundary",
        0xf8_0040_0000,
        32 * GIB,
        STATIC,
    )
}

pub fn laptop() -> Machine {
    let mut machine = base(
        "laptop: Core i7-13700H, RTX 4060 asleep, system drive behind Intel VMD",
        CORE,
        "6.11.0-9-generic",
        false,
    );
    machine
        .add(
            &Function::new("0000:00:02.0", (0x8086, 0xa7a0), 0x030000)
                .bar(2, 0x40_0000_0000, 256 * MIB, PREF64)
                .driver("i915")
                .group(0, "DMA-FQ")
                .unprivileged(),
        )
        .add(&Function::port("0000:00:01.0", (0x8086, 0xa70d), ROOT_PORT).group(1, "DMA-FQ").unprivileged())
        .add(
            &Function::new("0000:01:00.0", (0x10de, 0x28e0), 0x030000)
                .under(&["0000:00:01.0"])
                .bar(0, 0x8300_0000, 16 * MIB, MEM32)
                .bar(1, 0x60_0000_0000, 8 * GIB, PREF64)
                .group(14, "DMA-FQ")
                .driver("nvidia")
                .asleep(),
        )
        .add(
            &Function::new("0000:00:0e.0", (0x8086, 0xa77f), 0x010400)
                .driver("vmd")
                .group(2, "DMA-FQ")
                .unprivileged(),
        )
        .add(
            &Function::new("10000:e1:00.0", (0x1c5c, 0x1959), 0x010802)
                .under(&["0000:00:0e.0", "pci10000:e0", "10000:e0:06.0"])
                .bar(0, 0x8200_0000, 16 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .driver("nvme")
                .unprivileged(),
        );
    machine.there("/sys/module/vmd").there("/sys/class/iommu/dmar0");
    nvme(&mut machine, "10000:e1:00.0", 0, "SKHynix_HFS001TEJ9X115N", Some("/"));
    nvidia(&mut machine, "565.57.01", true, "");
    machine
        .answer("cuda", serde_json::json!({ "error": "no answer within 1500 ms", "version": 0, "gpus": [] }));
    machine
}

fn sdr(about: &str, kind: &str) -> Machine {
    let mut machine =
        base(about, ("AuthenticAMD", 25, "AMD Ryzen 9 7900X 12-Core Processor"), "6.8.0-49-generic", true);
    machine
        .add(
            &Function::port("0000:00:01.1", (0x1022, 0x14db), ROOT_PORT)
                .lanes((4, 16), (5, 16))
                .group(1, kind),
        )
        .add(
            &Function::port("0000:00:02.1", (0x1022, 0x14db), ROOT_PORT).lanes((2, 2), (4, 4)).group(2, kind),
        )
        .add(
            &Function::new("0000:01:00.0", (0x10de, 0x2684), 0x030000)
                .under(&["0000:00:01.1"])
                .bar(0, 0xf600_0000, 16 * MIB, MEM32)
                .bar(1, 0x78_0000_0000, 32 * GIB, PREF64)
                .resizable(1, 35, 28, 35)
                .lanes((4, 16), (4, 16))
                .group(10, kind)
                .driver("nvidia"),
        )
        .add(
            &Function::new("0000:02:00.0", (0x10ee, 0x7045), 0x0d1000)
                .under(&["0000:00:02.1"])
                .bar(0, 0xfc00_0000, MIB, MEM32)
                .lanes((2, 2), (2, 2))
                .with("dma_mask_bits", "32\n")
                .group(11, kind)
                .driver("usdr"),
        );
    machine.there("/sys/class/iommu/ivhd0").there("/sys/module/onehop").there("/dev/nvidiactl");
    options(&mut machine, "6.8.0-49-generic", &["PCI_P2PDMA", "VFIO", "VFIO_PCI"]);
    nvidia(&mut machine, "580.95.05", true, "");
    cuda(&mut machine, 13000, &[cuda_gpu("0000:01:00.0", "NVIDIA GeForce RTX 4090", 24, refused())]);
    machine
}

pub fn sdr_identity() -> Machine {
    let mut machine = sdr(
        "RTX 4090, uSDR in a Gen2 x2 slot, kernel module onehop; the IOMMU does not translate (iommu=pt)",
        "identity",
    );
    machine.file("/proc/cmdline", "iommu=pt\n");
    machine
}

pub fn sdr_translating() -> Machine {
    sdr("RTX 4090, uSDR in a Gen2 x2 slot, kernel module onehop; the IOMMU translates", "DMA")
}
