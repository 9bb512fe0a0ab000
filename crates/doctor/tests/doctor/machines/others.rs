//! Virtual machines, containers, and machines that lack something.

use serde_json::json;

use super::compose::*;
use super::{GIB, MIB, base, cuda, cuda_gpu, identity, nvidia, nvme, servers, works};

pub fn vm() -> Machine {
    let cpu = ("AuthenticAMD", 25, "AMD EPYC 7763 64-Core Processor");
    let mut machine =
        base("a virtual machine with an A100 and a drive passed through", cpu, "6.8.0-1018-kvm", true);
    machine.file(
        "/proc/cpuinfo",
        "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel name\t: AMD EPYC 7763 64-Core Processor\nflags\t\t: fpu hypervisor\n",
    );
    machine.file("/sys/class/dmi/id/sys_vendor", "QEMU\n");
    machine.file("/sys/class/dmi/id/product_name", "Standard PC (Q35 + ICH9, 2009)\n");
    machine
        .add(
            &Function::new("0000:00:05.0", (0x10de, 0x20b2), 0x030200)
                .bar(0, 0xfc00_0000, 16 * MIB, MEM32)
                .bar(1, 0x20_0000_0000, 128 * GIB, PREF64)
                .lanes((4, 16), (4, 16))
                .driver("nvidia"),
        )
        .add(
            &Function::new("0000:00:06.0", (0x144d, 0xa824), 0x010802)
                .bar(0, 0xfd00_0000, 32 << 10, MEM64)
                .driver("nvme"),
        );
    nvme(&mut machine, "0000:00:06.0", 0, "SAMSUNG MZWLJ3T8HBLS-00007", None);
    identity(&mut machine, 0, 9);
    nvidia(&mut machine, "570.172.08", true, "");
    cuda(&mut machine, 12080, &[cuda_gpu("0000:00:05.0", "NVIDIA A100-SXM4-80GB", 80, works())]);
    machine
}

pub fn container() -> Machine {
    let mut machine = servers::h100(
        "a container on a server with an H100 behind a switch: no capabilities, no udev, /sys read-only",
        false,
        ACS_ON,
    );
    machine.there("/.dockerenv");
    machine.0.files.remove("/run/udev/data");
    let none = machine.0.files.keys().filter(|path| path.starts_with("/boot/")).cloned().collect::<Vec<_>>();
    none.iter().for_each(|path| drop(machine.0.files.remove(path)));
    machine.file(
        "/proc/self/mountinfo",
        "40 39 0:30 / / rw - overlay overlay rw\n41 40 0:31 / /sys ro,nosuid - sysfs sysfs ro\n",
    );
    machine
        .answer("io_uring", json!({ "Err": "io_uring_setup failed: Operation not permitted (os error 1)" }));
    machine.file("/proc/self/status", "Uid:\t0\t0\t0\t0\nCapEff:\t00000000a80425fb\n");
    machine.answer(
        "file:/models/a.safetensors",
        json!({ "path": "/models/a.safetensors", "fs": null, "direct_align": null, "direct": { "Ok": null },
                "places": { "Err": "/models/a.safetensors cannot be read block by block: it is on overlayfs: open the file of the layer below" } }),
    );
    machine
}

pub fn no_gpu() -> Machine {
    let cpu = ("AuthenticAMD", 25, "AMD EPYC 9354 32-Core Processor");
    let mut machine = base("a server with two drives and no GPU", cpu, "6.1.0-28-amd64", true);
    for (number, address) in [(0, "0000:01:00.0"), (1, "0000:02:00.0")] {
        machine.add(
            &Function::new(address, (0x144d, 0xa824), 0x010802)
                .bar(0, 0xb000_0000 + u64::from(number) * MIB, 32 << 10, MEM64)
                .lanes((4, 4), (4, 4))
                .group(number, "DMA-FQ")
                .driver("nvme"),
        );
        nvme(&mut machine, address, number, "SAMSUNG MZWLJ3T8HBLS-00007", None);
    }
    machine.there("/sys/class/iommu/ivhd0");
    machine.answer(
        "cuda",
        json!({ "error": "CUDA cannot be used: libcuda.so.1 was not found", "version": 0, "gpus": [] }),
    );
    machine
}

pub fn old_driver() -> Machine {
    let mut machine = servers::h100(
        "a server with an H100 behind a switch, an open driver older than 570.133.07, and a kernel newer than 6.12",
        true,
        ACS_ON,
    );
    machine.file("/proc/sys/kernel/osrelease", "6.14.0-15-generic\n");
    nvidia(&mut machine, "565.57.01", true, "");
    machine
}
