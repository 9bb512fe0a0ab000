//! Unusual machines: enclosures, ARM, shared groups, devices in use, hidden or malformed data.

use serde_json::json;

use super::compose::*;
use super::{GIB, MIB, base, cuda, cuda_gpu, identity, nvidia, nvme, refused, servers, works};

pub fn intel_two_bridges() -> Machine {
    let cpu = ("GenuineIntel", 6, "Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz");
    let mut machine =
        base("Broadwell-EP: GPU and drive below different host bridges", cpu, "5.15.0-130-generic", true);
    machine
        .add(&Function::new("0000:00:00.0", (0x8086, 0x6f00), 0x060000).node(0))
        .add(
            &Function::port("0000:00:02.0", (0x8086, 0x6f04), ROOT_PORT)
                .node(0)
                .group(1, "identity")
                .lanes((3, 16), (3, 16)),
        )
        .add(
            &Function::new("0000:03:00.0", (0x10de, 0x1db6), 0x030200)
                .under(&["0000:00:02.0"])
                .bar(0, 0xc000_0000, 16 * MIB, MEM32)
                .bar(1, 0x380_0000_0000, 32 * GIB, PREF64)
                .lanes((3, 16), (3, 16))
                .node(0)
                .group(2, "identity")
                .driver("nvidia"),
        )
        .add(&Function::new("0000:80:00.0", (0x8086, 0x6f01), 0x060000).host("pci0000:80").node(1))
        .add(
            &Function::port("0000:80:02.0", (0x8086, 0x6f04), ROOT_PORT)
                .host("pci0000:80")
                .node(1)
                .group(3, "identity")
                .lanes((3, 8), (3, 8)),
        )
        .add(
            &Function::new("0000:83:00.0", (0x8086, 0x0953), 0x010802)
                .host("pci0000:80")
                .under(&["0000:80:02.0"])
                .bar(0, 0xd000_0000, 16 << 10, MEM64)
                .lanes((3, 4), (3, 4))
                .node(1)
                .group(4, "identity")
                .driver("nvme"),
        );
    nvme(&mut machine, "0000:83:00.0", 0, "INTEL SSDPEDMD400G4", None);
    identity(&mut machine, 0, 5);
    machine.there("/sys/class/iommu/dmar0").there("/sys/module/vfio_pci").there("/dev/vfio/vfio");
    nvidia(&mut machine, "535.183.01", false, "");
    let mut volta = cuda_gpu("0000:03:00.0", "Tesla V100-PCIE-32GB", 32, refused());
    volta["compute"] = json!([7, 0]);
    cuda(&mut machine, 12020, &[volta]);
    machine
}

pub fn thunderbolt() -> Machine {
    let cpu = ("GenuineIntel", 6, "13th Gen Intel(R) Core(TM) i7-1360P");
    let mut machine = base("laptop with a GPU in a Thunderbolt enclosure", cpu, "6.11.0-19-generic", true);
    let explanation = ["0000:00:07.0", "0000:2c:00.0", "0000:2d:01.0"];
    machine
        .add(&Function::new("0000:00:00.0", (0x8086, 0xa706), 0x060000))
        .add(
            &Function::port("0000:00:07.0", (0x8086, 0xa76e), ROOT_PORT)
                .group(1, "DMA")
                .lanes((1, 4), (1, 4)),
        )
        .add(
            &Function::port("0000:2c:00.0", (0x8086, 0x15ef), UPSTREAM)
                .under(&explanation[..1])
                .group(2, "DMA")
                .lanes((1, 4), (1, 4))
                .with("removable", "removable\n"),
        )
        .add(
            &Function::port("0000:2d:01.0", (0x8086, 0x15ef), DOWNSTREAM)
                .under(&explanation[..2])
                .group(3, "DMA")
                .lanes((1, 4), (1, 4))
                .acs(ACS_ON)
                .with("removable", "removable\n"),
        )
        .add(
            &Function::new("0000:2e:00.0", (0x10de, 0x2684), 0x030000)
                .under(&explanation)
                .bar(0, 0x6000_0000, 16 * MIB, MEM32)
                .bar(1, 0x60_0000_0000, 256 * MIB, PREF64)
                .lanes((1, 4), (4, 16))
                .group(4, "DMA")
                .driver("nvidia")
                .resizable(1, 28, 26, 35)
                .with("removable", "removable\n"),
        )
        .add(
            &Function::port("0000:00:06.0", (0x8086, 0xa74d), ROOT_PORT)
                .group(5, "DMA")
                .lanes((4, 4), (4, 4)),
        )
        .add(
            &Function::new("0000:01:00.0", (0x144d, 0xa80c), 0x010802)
                .under(&["0000:00:06.0"])
                .bar(0, 0x7000_0000, 16 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .group(6, "DMA")
                .driver("nvme"),
        );
    nvme(&mut machine, "0000:01:00.0", 0, "Samsung SSD 990 PRO 2TB", Some("/"));
    identity(&mut machine, 0, 9);
    machine.there("/sys/class/iommu/dmar0").there("/sys/module/vfio_pci").there("/dev/vfio/vfio");
    nvidia(&mut machine, "570.133.07", true, "");
    cuda(&mut machine, 12080, &[cuda_gpu("0000:2e:00.0", "NVIDIA GeForce RTX 4090", 24, refused())]);
    machine
}

pub fn arm_smmu() -> Machine {
    let mut machine =
        base("Ampere Altra with an L40S; no SMMU in use", ("", 0, ""), "6.8.0-49-generic-64k", true);
    machine.file("/proc/cpuinfo", "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n");
    machine
        .add(
            &Function::port("0004:00:01.0", (0x1def, 0xe101), ROOT_PORT)
                .host("pci0004:00")
                .lanes((4, 16), (4, 16)),
        )
        .add(
            &Function::new("0004:01:00.0", (0x10de, 0x26b9), 0x030200)
                .host("pci0004:00")
                .under(&["0004:00:01.0"])
                .bar(0, 0x4000_0000, 16 * MIB, MEM32)
                .bar(1, 0x280_0000_0000, 64 * GIB, PREF64)
                .lanes((4, 16), (4, 16))
                .driver("nvidia"),
        )
        .add(
            &Function::port("000d:00:01.0", (0x1def, 0xe101), ROOT_PORT)
                .host("pci000d:00")
                .lanes((4, 4), (4, 4)),
        )
        .add(
            &Function::new("000d:01:00.0", (0x144d, 0xa80a), 0x010802)
                .host("pci000d:00")
                .under(&["000d:00:01.0"])
                .bar(0, 0x5000_0000, 16 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .driver("nvme"),
        );
    nvme(&mut machine, "000d:01:00.0", 0, "SAMSUNG MZQL23T8HCLS-00A07", None);
    identity(&mut machine, 0, 5);
    machine.file(
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.133.20  Release Build\n",
    );
    machine.file("/sys/module/nvidia/version", "570.133.20\n").there("/dev/nvidiactl");
    machine.file("/proc/driver/nvidia/params", "RegistryDwords: \"\"\n");
    cuda(&mut machine, 12080, &[cuda_gpu("0004:01:00.0", "NVIDIA L40S", 48, works())]);
    machine
}

pub fn nested_switch() -> Machine {
    let cpu = ("AuthenticAMD", 25, "AMD EPYC 7763 64-Core Processor");
    let mut machine = base(
        "a switch below a switch: the GPU below the inner, the drive below the outer",
        cpu,
        "6.8.0-49-generic",
        true,
    );
    let sw = |a: &str, kind| {
        Function::port(a, (0x11f8, 0x4052), kind)
            .host("pci0000:40")
            .lanes((4, 16), (4, 16))
            .node(2)
            .group(10, "DMA")
    };
    machine
        .add(
            &Function::port("0000:40:01.1", (0x1022, 0x1483), ROOT_PORT)
                .host("pci0000:40")
                .acs(ACS_ON)
                .lanes((4, 16), (4, 16))
                .node(2)
                .group(9, "DMA"),
        )
        .add(&sw("0000:41:00.0", UPSTREAM).under(&["0000:40:01.1"]))
        .add(&sw("0000:42:00.0", DOWNSTREAM).under(&["0000:40:01.1", "0000:41:00.0"]).acs(0))
        .add(&sw("0000:42:01.0", DOWNSTREAM).under(&["0000:40:01.1", "0000:41:00.0"]).acs(0))
        .add(&sw("0000:43:00.0", UPSTREAM).under(&["0000:40:01.1", "0000:41:00.0", "0000:42:00.0"]))
        .add(
            &sw("0000:44:00.0", DOWNSTREAM)
                .under(&["0000:40:01.1", "0000:41:00.0", "0000:42:00.0", "0000:43:00.0"])
                .acs(ACS_ON),
        )
        .add(
            &Function::new("0000:45:00.0", (0x10de, 0x20b5), 0x030200)
                .host("pci0000:40")
                .under(&["0000:40:01.1", "0000:41:00.0", "0000:42:00.0", "0000:43:00.0", "0000:44:00.0"])
                .bar(0, 0xa000_0000, 16 * MIB, MEM32)
                .bar(1, 0x200_0000_0000, 128 * GIB, PREF64)
                .lanes((4, 16), (4, 16))
                .node(2)
                .group(10, "DMA")
                .driver("nvidia"),
        )
        .add(
            &Function::new("0000:46:00.0", (0x1344, 0x51c3), 0x010802)
                .host("pci0000:40")
                .under(&["0000:40:01.1", "0000:41:00.0", "0000:42:01.0"])
                .bar(0, 0xb000_0000, 256 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .node(2)
                .group(10, "DMA")
                .driver("nvme"),
        );
    nvme(&mut machine, "0000:46:00.0", 0, "Micron_7450_MTFDKCC3T8TFR", None);
    identity(&mut machine, 0, 9);
    machine
        .there("/sys/class/iommu/ivhd0")
        .there("/sys/module/vfio_pci")
        .there("/dev/vfio/vfio")
        .there("/sys/module/nvidia_fs");
    nvidia(&mut machine, "550.144.03", true, "RMForceStaticBar1=1");
    cuda(&mut machine, 12040, &[cuda_gpu("0000:45:00.0", "NVIDIA A100 80GB PCIe", 80, works())]);
    machine
}

/// A drive with a live controller and no namespace; its link is below its maximum.
pub fn no_namespace() -> Machine {
    let mut machine = servers::h100("a drive without namespaces, link files that read Unknown", true, ACS_ON);
    machine.0.files.retain(|path, _| !path.contains("nvme0n1"));
    for (name, text) in [
        ("current_link_speed", "Unknown\n"),
        ("max_link_speed", "Unknown\n"),
        ("current_link_width", "0\n"),
        ("max_link_width", "255\n"),
    ] {
        machine.file(&format!("/sys/bus/pci/devices/0000:19:00.0/{name}"), text);
    }
    let bytes: Vec<u8> = {
        let mut b = vec![0u8; 4096];
        b[..4].copy_from_slice(&[0x0f, 0x1e, 0x13, 0]);
        b[4] = 6;
        b
    };
    machine
        .0
        .files
        .insert("/sys/bus/pci/devices/0000:19:00.0/config".into(), onehop_pci::Content::from_bytes(&bytes));
    machine.file("/sys/bus/pci/devices/0000:19:00.0/numa_node", "-1\n");
    identity(&mut machine, 0, 0);
    machine
}

pub fn garbage() -> Machine {
    let mut machine = servers::h100("garbage everywhere", true, ACS_ON);
    const GPU: &str = "0000:18:00.0";
    let dev = "/sys/bus/pci/devices";
    machine.file(&format!("{dev}/{GPU}/numa_node"), "");
    machine.file(&format!("{dev}/0000:19:00.0/class"), "");
    machine.file(&format!("{dev}/0000:1a:00.0/resource"), &"z".repeat(1 << 20));
    machine
        .0
        .files
        .insert(format!("{dev}/0000:17:00.0/config"), onehop_pci::Content::from_bytes(&[0xff; 4096]));
    machine
        .0
        .files
        .insert("/proc/cpuinfo".into(), onehop_pci::Content::from_bytes(&[0x80, 0xff, 0, 1, 2, 3]));
    machine.file("/proc/self/mountinfo", &("x ".repeat(600_000) + "\n"));
    machine.link("/sys/kernel/iommu_groups/41", "../iommu_groups/41");
    machine.link(&format!("{dev}/0000:17:02.0"), "../../../bus/pci/devices/0000:17:02.0");
    machine.denied(&format!("{dev}/{GPU}/resource"));
    machine.file("/sys/kernel/iommu_groups/42/type", "\u{0}\u{1}strange\n");
    machine.file("/proc/sys/kernel/osrelease", "\n");
    machine.file("/proc/driver/nvidia/version", "NVRM version: \u{fffd}\u{fffd}\n");
    machine
}

pub fn two_gpus() -> Machine {
    let cpu = ("AuthenticAMD", 26, "AMD Ryzen Threadripper PRO 9975WX 32-Cores");
    let mut machine =
        base("two RTX PRO 6000, one bound to vfio-pci for a virtual machine", cpu, "6.14.0-15-generic", true);
    for (n, host, drv) in [(0x41u32, "pci0000:40", "nvidia"), (0xc1, "pci0000:c0", "vfio-pci")] {
        let port = format!("0000:{:02x}:01.1", n - 1);
        machine.add(
            &Function::port(&port, (0x1022, 0x153a), ROOT_PORT)
                .host(host)
                .lanes((5, 16), (5, 16))
                .group(n, "DMA-FQ")
                .acs(ACS_ON),
        );
        machine.add(
            &Function::new(&format!("0000:{n:02x}:00.0"), (0x10de, 0x2bb1), 0x030000)
                .host(host)
                .under(&[&port])
                .bar(0, 0xa000_0000, 64 * MIB, MEM32)
                .bar(1, 0x200_0000_0000 * u64::from(n), 128 * GIB, PREF64)
                .lanes((5, 16), (5, 16))
                .group(n + 1, "DMA-FQ")
                .driver(drv),
        );
    }
    machine.add(
        &Function::port("0000:40:03.1", (0x1022, 0x153a), ROOT_PORT)
            .host("pci0000:40")
            .lanes((5, 4), (5, 4))
            .group(8, "DMA-FQ")
            .acs(ACS_ON),
    );
    machine.add(
        &Function::new("0000:42:00.0", (0x144d, 0xa810), 0x010802)
            .host("pci0000:40")
            .under(&["0000:40:03.1"])
            .bar(0, 0xb000_0000, 16 << 10, MEM64)
            .lanes((5, 4), (5, 4))
            .group(9, "DMA-FQ")
            .driver("nvme"),
    );
    nvme(&mut machine, "0000:42:00.0", 0, "Samsung SSD 9100 PRO 4TB", None);
    identity(&mut machine, 0, 9);
    machine.there("/sys/class/iommu/ivhd0").there("/sys/module/vfio_pci").there("/dev/vfio/vfio");
    nvidia(&mut machine, "575.57.08", true, "");
    cuda(
        &mut machine,
        12090,
        &[cuda_gpu("0000:41:00.0", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, works())],
    );
    machine
}

pub fn no_pci() -> Machine {
    let mut machine = base(
        "a sandbox without /sys/bus/pci, with a GPU that CUDA shows",
        ("GenuineIntel", 6, "Intel(R) Xeon(R) Platinum 8480C"),
        "4.4.0",
        true,
    );
    machine.0.files.retain(|path, _| !path.starts_with("/boot"));
    machine.answer(
        "io_uring",
        json!({ "Err": "io_uring_setup failed: Function not implemented (os error 38)" }),
    );
    cuda(&mut machine, 13000, &[cuda_gpu("0000:18:00.0", "NVIDIA H100 80GB HBM3", 80, refused())]);
    machine
}

pub fn mounts_garbage() -> Machine {
    let mut machine = servers::h100("a malformed mount table", true, 0);
    machine.file("/proc/self/mountinfo", &("x ".repeat(600_000) + "\n"));
    identity(&mut machine, 0, 6);
    machine
}
