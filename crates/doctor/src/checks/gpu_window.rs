//! The GPU's BAR1: its address, and how much GPU memory it exposes.

use crate::check::{Check, CheckGroup, Status, bytes};
use crate::checks::gpu::memory;
use crate::facts::Facts;
use crate::facts::gpu::GpuFacts;
use crate::fixes::{RELOAD, rebar_fix};

const FOUR_GIB: u64 = 1 << 32;
/// Alignment that a static BAR1 was observed to need.
const STATIC_ALIGN: u64 = 512 << 20;
/// Size of BAR1 without resizing.
const DEFAULT_BAR1: u64 = 256 << 20;

pub(super) fn checks(facts: &Facts, gpu: &GpuFacts) -> Vec<Check> {
    [size(facts, gpu), resizable(facts, gpu), static_layout(facts, gpu), memory_enabled(facts, gpu)]
        .into_iter()
        .flatten()
        .collect()
}

fn size(facts: &Facts, gpu: &GpuFacts) -> Option<Check> {
    let why = "other devices reach GPU memory only through BAR1";
    let check = |status, found: String| {
        Check::new("gpu.bar1", CheckGroup::Gpu, status, found, why).about(gpu.address).by("resource, row 1")
    };
    if gpu.is_integrated() {
        return None;
    }
    let Some(bar) = gpu.window else {
        return Some(
            check(Status::Unknown, "no memory BAR is visible".into())
                .fix("Run doctor on the host, or wake the GPU"),
        );
    };
    if !bar.assigned {
        return Some(
            check(Status::Fail, format!("{}, without an address from the firmware", bytes(bar.size)))
                .fix(rebar_fix(facts, gpu)),
        );
    }
    let place = format!("{} at {:#x}", bytes(bar.size), bar.start);
    let below = if bar.last() < FOUR_GIB { ", below 4 GiB" } else { "" };
    Some(match gpu.covers_all_memory() {
        Some(true) => check(Status::Pass, format!("{place}{below}, for {}", memory(gpu))),
        Some(false) => check(Status::Warn, format!("{place}{below}: covers only part of {}", memory(gpu)))
            .fix(rebar_fix(facts, gpu)),
        None if bar.size <= DEFAULT_BAR1 => {
            check(Status::Warn, format!("{place}{below}: small")).fix(rebar_fix(facts, gpu))
        }
        None if gpu.mig => check(
            Status::Info,
            format!("{place}{below}; MIG partitions the memory, and CUDA reports one instance's part"),
        ),
        None => check(Status::Info, format!("{place}{below}; the GPU's memory size is unknown")),
    })
}

fn resizable(facts: &Facts, gpu: &GpuFacts) -> Option<Check> {
    let why = "a BAR1 as large as GPU memory exposes all of it";
    let check = |status, found: String| {
        Check::new("gpu.rebar", CheckGroup::Gpu, status, found, why)
            .about(gpu.address)
            .by("PCI capability 0x15")
    };
    let can = gpu.resizable?;
    let (now, most) = (bytes(can.size), bytes(can.largest()));
    Some(if can.size >= can.largest() {
        check(Status::Pass, format!("{now}, the maximum"))
    } else if gpu.covers_all_memory() == Some(true) {
        check(Status::Pass, format!("{now}, enough for all of its memory (maximum {most})"))
    } else {
        check(Status::Warn, format!("{now}, maximum {most}")).fix(rebar_fix(facts, gpu))
    })
}

/// Whether BAR1 maps GPU memory statically.
fn static_layout(facts: &Facts, gpu: &GpuFacts) -> Option<Check> {
    let why = "with a static BAR1, VFIO can map GPU memory for a drive without a kernel module";
    let check = |status, found: String| {
        Check::new("gpu.static_bar1", CheckGroup::Gpu, status, found, why).about(gpu.address)
    };
    let bar = gpu.window.filter(|bar| bar.assigned)?;
    facts.nvidia.version.as_ref()?;
    // RMForceStaticBar1 is an option of NVIDIA's driver.
    let driver = facts.device(gpu.address).and_then(|device| device.driver.as_deref());
    driver.is_none_or(|driver| driver == "nvidia").then_some(())?;
    if !facts.nvidia.has("RMForceStaticBar1") {
        return Some(check(Status::Info, "not requested (a large BAR1 alone is not static)".into())
            .fix(format!(
                "Load the module nvidia with NVreg_RegistryDwords=\"RMForceStaticBar1=1;RMForceDisableIomapWC=1\", {RELOAD}"
            ))
            .by("/proc/driver/nvidia/params"));
    }
    if gpu.covers_all_memory() == Some(false) {
        return Some(
            check(Status::Warn, "requested, but BAR1 is smaller than GPU memory".into())
                .fix(rebar_fix(facts, gpu)),
        );
    }
    if !bar.start.is_multiple_of(STATIC_ALIGN) {
        let off = bytes(bar.start % STATIC_ALIGN);
        return Some(
            check(
                Status::Warn,
                format!(
                    "requested, but BAR1 starts {off} past a 512 MiB boundary, which the driver was seen to refuse"
                ),
            )
            .fix(if facts.machine.is_virtual() {
                "Change the memory layout of this virtual machine on its host, then run doctor again"
            } else {
                "Change the firmware's memory layout (Above 4G Decoding, another slot), then run doctor again"
            }),
        );
    }
    Some(
        check(Status::Pass, "requested, and BAR1 is aligned as required".into())
            .by("/proc/driver/nvidia/params: RegistryDwords"),
    )
}

fn memory_enabled(facts: &Facts, gpu: &GpuFacts) -> Option<Check> {
    let config = facts.device(gpu.address)?.config.as_ref()?;
    (!config.memory()).then(|| {
        let why = "a device with memory decoding disabled does not respond";
        Check::new(
            "gpu.memory_off",
            CheckGroup::Gpu,
            Status::Fail,
            "memory decoding is disabled in its command register",
            why,
        )
        .about(gpu.address)
        .fix("Load the GPU's driver, which enables it")
    })
}
