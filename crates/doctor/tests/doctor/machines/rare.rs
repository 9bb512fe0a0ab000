//! Machines with misleading PCI data: meaningless links, assigned virtual functions, missing GPUs.

use serde_json::json;

use super::compose::*;
use super::{GIB, MIB, base, cuda, cuda_gpu, identity, nvidia, nvme, refused, works};

/// A port of a host bridge, in its own group.
fn root_port(address: &str, ids: (u16, u16), host: &str, best: (u16, u16), group: u32) -> Function {
    Function::port(address, ids, ROOT_PORT).host(host).lanes(best, best).group(group, "DMA").acs(ACS_ON)
}

pub fn desktop_epyc() -> Machine {
    let cpu = ("AuthenticAMD", 25, "AMD EPYC 4464P 12-Core Processor");
    let about = "an EPYC 4464P, which has a desktop die, with an L4 whose idle link is slow at both ends";
    let mut machine = base(about, cpu, "6.8.0-60-generic", true);
    let (host, port) = ("pci0000:00", (0x1022, 0x14db));
    machine
        .add(
            &Function::port("0000:00:01.1", port, ROOT_PORT)
                .lanes((1, 16), (5, 16))
                .group(11, "DMA")
                .acs(ACS_ON),
        )
        .add(
            &Function::new("0000:01:00.0", (0x10de, 0x27b8), 0x030200)
                .under(&["0000:00:01.1"])
                .bar(0, 0xf600_0000, 16 * MIB, MEM32)
                .bar(1, 0xfc_0000_0000, 32 * GIB, PREF64)
                .lanes((1, 16), (4, 16))
                .group(12, "DMA")
                .driver("nvidia"),
        )
        .add(&root_port("0000:00:01.2", port, host, (4, 4), 13))
        .add(
            &Function::new("0000:02:00.0", (0x144d, 0xa80a), 0x010802)
                .under(&["0000:00:01.2"])
                .bar(0, 0xf700_0000, 16 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .group(14, "DMA")
                .driver("nvme"),
        );
    nvme(&mut machine, "0000:02:00.0", 0, "Samsung SSD 980 PRO 1TB", None);
    identity(&mut machine, 0, 7);
    machine.there("/sys/class/iommu/ivhd0").there("/sys/module/vfio_pci").there("/dev/vfio/vfio");
    nvidia(&mut machine, "570.133.20", true, "");
    cuda(&mut machine, 12080, &[cuda_gpu("0000:01:00.0", "NVIDIA L4", 24, works())]);
    machine
}

pub fn grace_hopper() -> Machine {
    let mut machine = base(
        "a Grace Hopper: GPU and CPU connected by NVLink-C2C",
        ("", 0, ""),
        "6.8.0-1021-nvidia-64k",
        true,
    );
    machine.file("/proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n");
    machine.file("/sys/class/dmi/id/sys_vendor", "Supermicro\n");
    machine.file("/sys/class/dmi/id/product_name", "Server of one Grace Hopper\n");
    machine
        .add(&root_port("0009:00:00.0", (0x10de, 0x22b1), "pci0009:00", (1, 1), 5).node(0))
        .add(
            &Function::new("0009:01:00.0", (0x10de, 0x2342), 0x030200)
                .host("pci0009:00")
                .under(&["0009:00:00.0"])
                .bar(0, 0x6610_0200_0000, 16 * MIB, PREF64)
                .bar(2, 0x6620_0000_0000, 128 * GIB, PREF64)
                .lanes((1, 1), (5, 16))
                .node(0)
                .group(6, "DMA")
                .driver("nvidia"),
        )
        .add(&root_port("0004:00:00.0", (0x10de, 0x22b8), "pci0004:00", (4, 4), 7).node(0))
        .add(
            &Function::new("0004:01:00.0", (0x1344, 0x51c0), 0x010802)
                .host("pci0004:00")
                .under(&["0004:00:00.0"])
                .bar(0, 0x5500_0000, 256 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .node(0)
                .group(8, "DMA")
                .driver("nvme"),
        );
    nvme(&mut machine, "0004:01:00.0", 0, "Micron_7450_MTFDKBG960TFR", None);
    identity(&mut machine, 0, 6);
    machine.there("/sys/class/iommu/smmu3.0x0000000011000000").there("/sys/module/vfio_pci");
    machine.there("/dev/vfio/vfio");
    nvidia(&mut machine, "570.148.08", true, "");
    let mut gpu = cuda_gpu("0009:01:00.0", "NVIDIA GH200 480GB", 96, works());
    gpu["compute"] = json!([9, 0]);
    cuda(&mut machine, 12080, &[gpu]);
    machine
}

pub fn vgpu_host() -> Machine {
    let cpu = ("GenuineIntel", 6, "Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz");
    let about = "a host of virtual machines: an A30 and a drive, both with virtual functions";
    let mut machine = base(about, cpu, "5.14.0-503.el9.x86_64", true);
    let host = "pci0000:15";
    machine
        .add(&Function::new("0000:15:00.0", (0x8086, 0x09a2), 0x088000).host(host).node(0))
        .add(&root_port("0000:15:02.0", (0x8086, 0x347a), host, (4, 16), 30).node(0))
        .add(
            &Function::new("0000:17:00.0", (0x10de, 0x20b7), 0x030200)
                .host(host)
                .under(&["0000:15:02.0"])
                .bar(0, 0xa000_0000, 16 * MIB, MEM32)
                .bar(1, 0x2000_0000_0000, 32 * GIB, PREF64)
                .lanes((4, 16), (4, 16))
                .node(0)
                .group(31, "DMA")
                .driver("nvidia"),
        )
        .add(&root_port("0000:15:03.0", (0x8086, 0x347b), host, (4, 4), 40).node(0))
        .add(
            &Function::new("0000:18:00.0", (0x144d, 0xa824), 0x010802)
                .host(host)
                .under(&["0000:15:03.0"])
                .bar(0, 0xb000_0000, 32 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .node(0)
                .group(41, "DMA")
                .driver("nvme"),
        );
    let virtual_function = |number: u32, ids, class, port: &str, of: &str| {
        let address = format!("{}{number}", &of[..of.len() - 1]);
        let mut function = Function::new(&address, ids, class).host(host).under(&[port]).node(0);
        function = function.group(50 + number, "DMA").linked("physfn", &format!("../{of}"));
        if number == 5 { function.driver("vfio-pci") } else { function }
    };
    for number in [4, 5] {
        let start = 0x2100_0000_0000 + u64::from(number) * 4 * GIB;
        let function = virtual_function(number, (0x10de, 0x20b7), 0x030200, "0000:15:02.0", "0000:17:00.0")
            .bar(1, start, 4 * GIB, PREF64);
        machine.add(&function);
    }
    machine.add(&virtual_function(1, (0x144d, 0xa824), 0x010802, "0000:15:03.0", "0000:18:00.0").bar(
        0,
        0xb010_0000,
        32 << 10,
        MEM64,
    ));
    nvme(&mut machine, "0000:18:00.0", 0, "SAMSUNG MZWLJ3T8HBLS-00007", None);
    identity(&mut machine, 0, 9);
    machine.there("/sys/class/iommu/dmar0").there("/sys/module/vfio_pci").there("/dev/vfio/vfio");
    nvidia(&mut machine, "550.144.02", false, "");
    cuda(&mut machine, 12040, &[cuda_gpu("0000:17:00.0", "NVIDIA A30", 24, refused())]);
    machine
}

pub fn jetson() -> Machine {
    let mut machine =
        base("a Jetson AGX Orin: the GPU is integrated with the CPU", ("", 0, ""), "5.15.148-tegra", true);
    machine.file("/proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd42\n");
    let host = "pci0004:00";
    machine.add(&root_port("0004:00:00.0", (0x10de, 0x229c), host, (4, 4), 7)).add(
        &Function::new("0004:01:00.0", (0x144d, 0xa80a), 0x010802)
            .host(host)
            .under(&["0004:00:00.0"])
            .bar(0, 0x24_4000_0000, 16 << 10, MEM64)
            .lanes((4, 4), (4, 4))
            .group(8, "DMA")
            .driver("nvme"),
    );
    nvme(&mut machine, "0004:01:00.0", 0, "Samsung SSD 980 PRO 1TB", Some("/"));
    machine.there("/sys/class/iommu/smmu3.0x0000000012000000");
    let mut gpu = cuda_gpu("0000:00:00.0", "Orin", 64, refused());
    gpu["compute"] = json!([8, 7]);
    cuda(&mut machine, 12060, &[gpu]);
    machine
}

/// WSL, where Windows owns the GPU.
pub fn wsl() -> Machine {
    let cpu = ("GenuineIntel", 6, "13th Gen Intel(R) Core(TM) i7-13700K");
    let release = "5.15.167.4-microsoft-standard-WSL2";
    let mut machine = base("WSL with a GPU that only CUDA shows", cpu, release, false);
    machine.file("/proc/cpuinfo", "vendor_id\t: GenuineIntel\ncpu family\t: 6\nflags\t\t: fpu hypervisor\n");
    machine.0.files.retain(|path, _| !path.starts_with("/boot") && path != "/run/udev/data");
    machine
        .add(&Function::new("7a3f:00:00.0", (0x1414, 0x008e), 0x030200).host("pci7a3f:00").driver("dxgkrnl"));
    cuda(&mut machine, 12080, &[cuda_gpu("0000:01:00.0", "NVIDIA GeForce RTX 4070", 12, refused())]);
    machine
}

/// A QEMU virtual machine: its ports and drive report Gen1 x1, and the GPU less than its real link.
pub fn qemu() -> Machine {
    let cpu = ("GenuineIntel", 6, "Intel Xeon Processor (Cascadelake)");
    let mut machine = base("a QEMU guest with an emulated drive and a T4", cpu, "6.1.0-28-amd64", true);
    machine.file("/proc/cpuinfo", "vendor_id\t: GenuineIntel\ncpu family\t: 6\nflags\t\t: fpu hypervisor\n");
    machine
        .add(&root_port("0000:00:02.0", (0x1b36, 0x000c), "pci0000:00", (1, 1), 2))
        .add(
            &Function::new("0000:01:00.0", (0x10de, 0x1eb8), 0x030200)
                .under(&["0000:00:02.0"])
                .bar(1, 0x38_0000_0000, 256 * MIB, PREF64)
                .lanes((1, 1), (3, 16))
                .group(3, "DMA-FQ")
                .driver("nouveau"),
        )
        .add(
            &Function::new("0000:00:04.0", (0x1b36, 0x0010), 0x010802)
                .bar(0, 0xfe00_0000, 16 << 10, MEM64)
                .lanes((1, 1), (4, 4))
                .group(4, "DMA-FQ")
                .driver("nvme"),
        );
    nvme(&mut machine, "0000:00:04.0", 0, "QEMU NVMe Ctrl", None);
    machine.there("/sys/class/iommu/dmar0").there("/sys/module/nouveau");
    let error = "CUDA cannot be used: there is no CUDA driver (libcuda.so.1)";
    machine.answer("cuda", json!({ "error": error, "version": 0, "gpus": [] }));
    machine
}

/// Four switches at two sockets, each with two GPUs and two drives.
pub fn many() -> Machine {
    let cpu = ("GenuineIntel", 6, "Intel(R) Xeon(R) Platinum 8480C");
    let mut machine = base("eight GPUs and eight drives below four switches", cpu, "6.8.0-49-generic", true);
    let mut gpus = Vec::new();
    for switch in 0..4_u32 {
        let (bus, node) = (0x10 + switch * 0x20, (switch / 2).cast_signed());
        let host = format!("pci0000:{bus:02x}");
        let (root, up) = (format!("0000:{bus:02x}:01.0"), format!("0000:{:02x}:00.0", bus + 1));
        let port = |address: &str, kind| {
            Function::port(address, (0x1000, 0xc030), kind).host(&host).lanes((5, 16), (5, 16)).node(node)
        };
        machine.add(&port(&root, ROOT_PORT)).add(&port(&up, UPSTREAM).under(&[&root]));
        for place in 0..4_u32 {
            let (down, end) =
                (format!("0000:{:02x}:{place:02x}.0", bus + 2), format!("0000:{:02x}:00.0", bus + 3 + place));
            machine.add(&port(&down, DOWNSTREAM).under(&[&root, &up]).acs(0));
            let (ids, class) =
                if place < 2 { ((0x10de, 0x2335), 0x030200) } else { ((0x144d, 0xa826), 0x010802) };
            let function = Function::new(&end, ids, class).host(&host).under(&[&root, &up, &down]).node(node);
            if place < 2 {
                machine.add(&function.driver("nvidia"));
                gpus.push(cuda_gpu(&end, "NVIDIA H200", 141, works()));
            } else {
                machine.add(&function.driver("nvme"));
            }
        }
    }
    nvidia(&mut machine, "580.95.05", true, "");
    cuda(&mut machine, 13000, &gpus);
    machine
}
