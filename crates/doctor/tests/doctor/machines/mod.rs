//! Composed machines, based on published data of similar ones. None was recorded on a real machine.

#[path = "../../../../pci/tests/common/compose.rs"]
pub mod compose;

mod desktops;
mod others;
pub mod rare;
pub mod servers;
pub mod unusual;

use compose::*;
use serde_json::{Value, json};

/// A machine and its file name.
pub type Named = (&'static str, fn() -> Machine);

/// All machines.
pub const ALL: [Named; 27] = [
    ("b550-rtx3090-before", desktops::b550_before),
    ("b550-rtx3090-after", desktops::b550_after),
    ("am5-rtx5090-rebar-off", desktops::am5_rebar_off),
    ("am5-rtx5090-rebar-on", desktops::am5_rebar_on),
    ("am5-rtx5090-static-bar1-misplaced", desktops::am5_misplaced),
    ("laptop-vmd-gpu-asleep", desktops::laptop),
    ("sdr-rtx4090-gen2x2-iommu-pt", desktops::sdr_identity),
    ("sdr-rtx4090-gen2x2-iommu-on", desktops::sdr_translating),
    ("h100-switch-acs-on", servers::h100_acs_on),
    ("h100-switch-acs-off-module", servers::h100_module),
    ("h100-switch-not-root", servers::h100_user),
    ("h100-mig", servers::h100_mig),
    ("h100-module-bound-strict", servers::h100_bound),
    ("epyc-two-sockets", servers::two_sockets),
    ("xeon-lockdown-proprietary", servers::lockdown),
    ("vm-a100-passthrough", others::vm),
    ("container-h100", others::container),
    ("server-no-gpu", others::no_gpu),
    ("old-driver-new-kernel", others::old_driver),
    ("thunderbolt-rtx4090", unusual::thunderbolt),
    ("arm-no-smmu", unusual::arm_smmu),
    ("nested-switch-shared-group", unusual::nested_switch),
    ("two-gpus-one-vfio", unusual::two_gpus),
    ("desktop-epyc-l4", rare::desktop_epyc),
    ("grace-hopper", rare::grace_hopper),
    ("vgpu-host", rare::vgpu_host),
    ("jetson-orin", rare::jetson),
];

pub const ROOT_CAPS: &str = "000001ffffffffff";
pub const GIB: u64 = 1 << 30;
pub const MIB: u64 = 1 << 20;

/// What every machine has: a CPU, a kernel, a user.
pub fn base(about: &str, cpu: (&str, u32, &str), kernel: &str, root: bool) -> Machine {
    let mut machine = Machine::new(about);
    let (vendor, family, name) = cpu;
    machine.file(
        "/proc/cpuinfo",
        &format!("vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: {name}\nflags\t\t: fpu msr\n"),
    );
    machine.file("/proc/sys/kernel/osrelease", &format!("{kernel}\n"));
    let (uid, caps) = if root { (0, ROOT_CAPS) } else { (1000, "0000000000000000") };
    machine.file("/proc/self/status", &format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{caps}\n"));
    machine.file(
        "/proc/self/limits",
        "Max locked memory         8388608              8388608              bytes     \n",
    );
    machine.file("/proc/sys/kernel/io_uring_disabled", "0\n");
    machine.file("/proc/sys/vm/max_map_count", "65530\n");
    machine.file("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    machine.there("/run/udev/data");
    machine.file("/proc/self/mountinfo", "1 0 0:30 / /proc rw - proc proc rw\n");
    options(
        &mut machine,
        kernel,
        &["PCI_P2PDMA", "VFIO", "VFIO_PCI", "VFIO_CONTAINER", "IO_URING", "MODULES"],
    );
    machine.answer("io_uring", json!({ "Ok": null }));
    machine
}

pub fn options(machine: &mut Machine, kernel: &str, on: &[&str]) {
    let text: String = on.iter().map(|name| format!("CONFIG_{name}=y\n")).collect();
    machine.file(&format!("/boot/config-{kernel}"), &text);
}

/// NVIDIA's kernel driver.
pub fn nvidia(machine: &mut Machine, version: &str, open: bool, registry: &str) {
    let flavour = if open { "Open Kernel Module" } else { "Kernel Module" };
    let line = format!("NVRM version: NVIDIA UNIX {flavour} for x86_64  {version}  Release Build\n");
    machine.file("/proc/driver/nvidia/version", &line);
    machine.file("/sys/module/nvidia/version", &format!("{version}\n"));
    machine.file("/proc/driver/nvidia/params", &format!("RegistryDwords: \"{registry}\"\n"));
    machine.there("/dev/nvidiactl");
}

/// CUDA's view of a GPU after its trials.
pub fn cuda_gpu(pci: &str, name: &str, gib: u64, dma_buf: Value) -> Value {
    let works = dma_buf.get("Ok").is_some();
    json!({
        "pci": pci, "name": name, "memory": gib * GIB - 400 * MIB, "compute": [8, 6], "gpudirect": works, "dma_buf_said": works,
        "ordering": "owner", "host_flush": true, "copy": { "Ok": null }, "dma_buf": dma_buf,
    })
}

pub fn works() -> Value {
    json!({ "Ok": null })
}

/// How GeForce boards refuse to export a dma-buf.
pub fn refused() -> Value {
    json!({ "Err": "exporting 2097152 bytes of GPU memory as a dma-buf: cuMemGetHandleForAddressRange failed with \
                    CUDA_ERROR_NOT_SUPPORTED (801)" })
}

pub fn cuda(machine: &mut Machine, version: i32, gpus: &[Value]) {
    machine.answer("cuda", json!({ "error": null, "version": version, "gpus": gpus }));
}

/// A drive's sysfs folder, as the nvme driver creates it; optionally mounted.
pub fn nvme(machine: &mut Machine, address: &str, number: u32, model: &str, mounted: Option<&str>) {
    let at = format!("/sys/bus/pci/devices/{address}/nvme/nvme{number}");
    machine.file(&format!("{at}/model"), &format!("{model}\n"));
    machine.file(&format!("{at}/state"), "live\n");
    machine.file(&format!("{at}/sqsize"), "1023\n");
    machine.file(&format!("{at}/queue_count"), "17\n");
    machine.there(&format!("{at}/nvme{number}n1"));
    let block = format!("/sys/class/block/nvme{number}n1");
    machine.file(&format!("{block}/size"), "1953525168\n");
    machine.file(&format!("{block}/dev"), &format!("259:{}\n", 2 * number));
    machine.file(&format!("{block}/queue/logical_block_size"), "512\n");
    machine.file(&format!("{block}/queue/max_hw_sectors_kb"), "512\n");
    if let Some(place) = mounted {
        machine.file(&format!("{block}/nvme{number}n1p1/partition"), "1\n");
        machine.file(&format!("{block}/nvme{number}n1p1/dev"), &format!("259:{}\n", 2 * number + 1));
        let row = format!("30 1 259:{} / {place} rw - ext4 /dev/nvme{number}n1p1 rw\n", 2 * number + 1);
        machine.file("/proc/self/mountinfo", &row);
    }
}

/// A drive's Identify data for root.
pub fn identity(machine: &mut Machine, number: u32, mdts: u8) {
    let answer = json!({ "Ok": { "mdts": mdts, "sgls": 0, "hmpre": 0, "vwc": true } });
    machine.answer(&format!("identify:nvme{number}"), answer);
}
