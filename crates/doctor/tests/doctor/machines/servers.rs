//! Servers.

use serde_json::json;

use super::compose::*;
use super::{GIB, MIB, base, cuda, cuda_gpu, identity, nvidia, nvme, works};

const XEON: (&str, u32, &str) = ("GenuineIntel", 6, "Intel(R) Xeon(R) Platinum 8480C");
const EPYC: (&str, u32, &str) = ("AuthenticAMD", 25, "AMD EPYC 9654 96-Core Processor");
const ROOT: &str = "0000:15:01.0";
const UP: &str = "0000:16:00.0";
const GPU: &str = "0000:18:00.0";
const DRIVE: &str = "0000:19:00.0";
const CARD: &str = "0000:1a:00.0";

/// A GPU, a drive and a network card behind one switch.
pub fn h100(about: &str, root: bool, acs: u16) -> Machine {
    let mut machine = base(about, XEON, "6.8.0-49-generic", root);
    let add = |machine: &mut Machine, function: Function| {
        let function = function.host("pci0000:15").node(0);
        machine.add(&if root { function } else { function.unprivileged() });
    };
    let port = |address, kind| {
        Function::port(address, (0x1000, 0xc030), kind).lanes((5, 16), (5, 16)).group(40, "DMA-FQ")
    };
    add(&mut machine, Function::new("0000:15:00.0", (0x8086, 0x09a2), 0x088000));
    add(&mut machine, Function::port(ROOT, (0x8086, 0x352a), ROOT_PORT).acs(ACS_ON).lanes((5, 16), (5, 16)));
    add(&mut machine, port(UP, UPSTREAM).under(&[ROOT]));
    for down in ["0000:17:00.0", "0000:17:01.0", "0000:17:02.0"] {
        add(&mut machine, port(down, DOWNSTREAM).under(&[ROOT, UP]).acs(acs));
    }
    // Without ACS at the switch's ports, the devices behind them share a group.
    let group = |alone: u32| if acs == 0 { 40 } else { alone };
    add(
        &mut machine,
        Function::new(GPU, (0x10de, 0x2330), 0x030200)
            .under(&[ROOT, UP, "0000:17:00.0"])
            .bar(0, 0xa800_0000, 16 * MIB, MEM32)
            .bar(2, 0x2200_0000_0000, 128 * GIB, PREF64)
            .bar(4, 0x2220_0000_0000, 32 * MIB, PREF64)
            .lanes((5, 16), (5, 16))
            .group(group(41), "DMA-FQ")
            .driver("nvidia"),
    );
    add(
        &mut machine,
        Function::new(DRIVE, (0x1e0f, 0x0013), 0x010802)
            .under(&[ROOT, UP, "0000:17:01.0"])
            .bar(0, 0xa900_0000, 32 << 10, MEM64)
            .lanes((4, 4), (4, 4))
            .group(group(42), "DMA-FQ")
            .driver("nvme"),
    );
    add(
        &mut machine,
        Function::new(CARD, (0x15b3, 0x1021), 0x020700)
            .under(&[ROOT, UP, "0000:17:02.0"])
            .bar(0, 0x2230_0000_0000, 32 * MIB, PREF64)
            .lanes((5, 16), (5, 16))
            .group(group(43), "DMA-FQ")
            .driver("mlx5_core"),
    );
    nvme(&mut machine, DRIVE, 0, "KIOXIA KCM7DRJE3T84", None);
    let port = "/sys/class/infiniband/mlx5_0";
    machine.link(&format!("{port}/device"), &format!("../../../{CARD}"));
    machine.file(&format!("{port}/ports/1/state"), "4: ACTIVE\n");
    machine.file(&format!("{port}/ports/1/link_layer"), "InfiniBand\n");
    machine.file(&format!("{port}/ports/1/rate"), "400 Gb/sec (4X NDR)\n");
    machine.there("/sys/class/iommu/dmar0").there("/sys/module/vfio_pci").there("/dev/vfio/vfio");
    nvidia(&mut machine, "580.159.04", true, "");
    cuda(&mut machine, 13000, &[cuda_gpu(GPU, "NVIDIA H100 80GB HBM3", 80, works())]);
    machine
}

pub fn h100_acs_on() -> Machine {
    let mut machine =
        h100("Xeon 8480C; H100, NVMe and ConnectX-7 behind one switch with ACS on; root", true, ACS_ON);
    identity(&mut machine, 0, 6);
    machine
}

pub fn h100_module() -> Machine {
    let mut machine = h100(
        "Xeon 8480C; H100, NVMe and ConnectX-7 behind one switch with ACS off, the kernel module onehop loaded; root",
        true,
        0,
    );
    identity(&mut machine, 0, 6);
    machine.there("/sys/module/onehop").there("/sys/module/nvidia_peermem");
    machine
}

pub fn h100_user() -> Machine {
    let mut machine = h100(
        "Xeon 8480C; H100, NVMe and ConnectX-7 behind one switch; not root, so access control is not readable",
        false,
        ACS_ON,
    );
    machine.answer(
        "identify:nvme0",
        json!({ "Err": "opening /dev/nvme0 failed: Permission denied (os error 13)" }),
    );
    machine
}

/// Partitioned into MIG instances; CUDA shows one.
pub fn h100_mig() -> Machine {
    let mut machine = h100(
        "Xeon 8480C; H100 with MIG on, NVMe and ConnectX-7 behind one switch with ACS on; root",
        true,
        ACS_ON,
    );
    identity(&mut machine, 0, 6);
    cuda(&mut machine, 13000, &[cuda_gpu(GPU, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, works())]);
    let health = json!({ "pci": GPU, "link": [5, 16], "best_link": [5, 16], "power": [75000, 700_000], "state": 0, "mig": true });
    machine.answer("nvml", json!({ "error": null, "gpus": [health] }));
    machine
}

/// An administrator has bound the drive to the kernel module onehop and made its IOMMU group strict.
pub fn h100_bound() -> Machine {
    let mut machine = h100(
        "Xeon 8480C; H100, NVMe and ConnectX-7 behind one switch; the drive is bound to the kernel module onehop, its group \
         is strict, and users may open it",
        false,
        ACS_ON,
    );
    machine.there("/sys/module/onehop").there(&format!("/dev/onehop-{DRIVE}"));
    let device = format!("/sys/bus/pci/devices/{DRIVE}");
    machine.file(&format!("{device}/onehop_missing"), "nothing\n");
    machine.link(&format!("{device}/driver"), "../../../../bus/pci/drivers/onehop");
    machine.file("/sys/kernel/iommu_groups/42/type", "DMA\n");
    // The kernel driver's block device is gone.
    let nvme = format!("{device}/nvme/");
    machine
        .0
        .files
        .retain(|path, _| !path.starts_with(&nvme) && !path.starts_with("/sys/class/block/nvme0n1"));
    machine
}

pub fn two_sockets() -> Machine {
    let mut machine =
        base("two EPYC 9654: the GPU on one socket, the drive on the other", EPYC, "6.1.0-28-amd64", true);
    machine
        .add(&Function::port("0000:00:01.1", (0x1022, 0x14ab), ROOT_PORT).node(0).group(1, "DMA"))
        .add(
            &Function::new("0000:01:00.0", (0x10de, 0x20b5), 0x030200)
                .under(&["0000:00:01.1"])
                .bar(0, 0xa000_0000, 16 * MIB, MEM32)
                .bar(1, 0x200_0000_0000, 128 * GIB, PREF64)
                .lanes((4, 16), (4, 16))
                .node(0)
                .group(2, "DMA")
                .driver("nvidia"),
        )
        .add(
            &Function::port("0000:80:01.1", (0x1022, 0x14ab), ROOT_PORT)
                .host("pci0000:80")
                .node(1)
                .group(3, "DMA"),
        )
        .add(
            &Function::new("0000:81:00.0", (0x144d, 0xa824), 0x010802)
                .host("pci0000:80")
                .under(&["0000:80:01.1"])
                .bar(0, 0xb000_0000, 32 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .node(1)
                .group(4, "DMA")
                .driver("nvme"),
        );
    nvme(&mut machine, "0000:81:00.0", 0, "SAMSUNG MZWLJ3T8HBLS-00007", None);
    identity(&mut machine, 0, 9);
    machine.there("/sys/class/iommu/ivhd0").there("/sys/module/vfio_pci").there("/dev/vfio/vfio");
    for node in 0..2 {
        let at = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB");
        machine.file(&format!("{at}/nr_hugepages"), "1024\n").file(&format!("{at}/free_hugepages"), "1000\n");
    }
    nvidia(&mut machine, "575.57.08", true, "RMForceStaticBar1=1;RMForceDisableIomapWC=1");
    cuda(&mut machine, 12090, &[cuda_gpu("0000:01:00.0", "NVIDIA A100 80GB PCIe", 80, works())]);
    machine
}

pub fn lockdown() -> Machine {
    let mut machine =
        h100("a Xeon server with Secure Boot (lockdown) and the proprietary driver", true, ACS_ON);
    machine.file("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n");
    machine.file("/proc/sys/kernel/osrelease", "6.12.9-200.fc41.x86_64\n");
    nvidia(&mut machine, "575.57.08", false, "RMForceStaticBar1=1");
    let refused =
        json!({ "Err": "cuMemGetHandleForAddressRange failed with CUDA_ERROR_NOT_SUPPORTED (801)" });
    cuda(&mut machine, 12090, &[cuda_gpu(GPU, "NVIDIA H100 80GB HBM3", 80, refused)]);
    machine
}
