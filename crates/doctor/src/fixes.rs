//! Fixes that several checks and routes recommend, each with its cost. A fix is withheld where it could disrupt a user.

use onehop_gpu::cuda::register_gap;
use onehop_pci::{Address, Device};

use crate::facts::Facts;
use crate::facts::drive::DriveFacts;
use crate::facts::gpu::GpuFacts;
use crate::pair::list;

/// The cost of reloading NVIDIA's kernel driver.
pub(crate) const RELOAD: &str = "which requires every program on the GPUs to end";
pub(crate) const RELAXED: &str = "Load the module onehop, which needs no BAR in user space (docs/kernel-module.md). Or boot with \
                                  iomem=relaxed: root's programs may then map registers and memory that drivers use, and \
                                  a mistake there overwrites them";
pub(crate) const PEER_OVERRIDE: &str = "Run as root. Or load the module nvidia with NVreg_RegistryDwords=\"PeerMappingOverride=1\", which requires \
                                        every program on the GPUs to end: every user of a GPU may then map other devices' \
                                        registers into it, and reach all memory that such a device reaches";
const VMD_OFF: &str = "disable VMD (also called RST or RAID mode) in the firmware setup, after a backup: its RAID sets become \
                       unreadable, and Windows may not boot";
/// The first driver that maps device registers for GPUs under every kernel.
const REGISTER_DRIVER: (u32, u32, u32) = (570, 133, 7);

/// A command that detaches the drive for a while, withheld if the drive is or may be in use.
pub(crate) fn unless_used(drive: &DriveFacts, command: String) -> String {
    match drive.may_be_in_use() {
        None => command,
        Some(users) => {
            format!("do not while it is or may be in use ({users}): free it first, or use another drive")
        }
    }
}

/// How to find out who uses a drive.
pub(crate) fn users_fix(facts: &Facts) -> &'static str {
    match (facts.place.known, facts.place.root) {
        (false, _) => "Mount /proc: without its mount table no drive is claimed",
        (true, false) => "Run doctor as root: other users' programs are hidden from you",
        (true, true) => {
            "Resolve the reason given. A container hides programs and devices: run doctor on the host, with /proc, /dev and \
             /sys/kernel/config mounted"
        }
    }
}

/// How to disable VMD, withheld if a drive behind any VMD is or may be in use: the firmware setup may have one switch
/// for all of them.
pub(crate) fn vmd_fix(facts: &Facts) -> String {
    let behind = |drive: &&DriveFacts| {
        drive.address.and_then(|at| facts.device(at)).is_some_and(|device| device.behind_vmd)
    };
    let used = facts
        .drives
        .iter()
        .filter(behind)
        .find_map(|drive| Some(format!("{}: {}", drive.address?, drive.may_be_in_use()?)));
    let how = used.map_or_else(
        || VMD_OFF.to_owned(),
        |used| {
            format!(
                "do not while a drive behind it is or may be in use ({used}): free it first, or use another drive"
            )
        },
    );
    format!("To reach it without VMD: {how}")
}

/// The fix for a drive whose IOMMU group contains the GPU, which VFIO would detach too.
const GPU_IN_GROUP: &str = "CUDA needs the GPU in this group: load the kernel module onehop, which claims a drive \
                                       without its group (docs/kernel-module.md), or move the drive to another slot";

/// What to do about other devices in a drive's IOMMU group. Devices that are or may be in use stay bound.
pub(crate) fn isolation_fix(facts: &Facts, others: &[Address]) -> String {
    if facts.has_gpu(others) {
        return GPU_IN_GROUP.into();
    }
    let free = |other: &Address| match facts.drive(*other) {
        Some(drive) => drive.may_be_in_use().is_none(),
        None => facts.device(*other).is_none_or(|device| !is_driven(device)),
    };
    let slot = "a slot of its own at the CPU, where bridges isolate devices";
    match others.iter().find(|other| !free(other)) {
        Some(used) => {
            format!("Move the drive to {slot}: {used} is or may be in use, and VFIO would detach it")
        }
        None => format!(
            "Bind {} to vfio-pci too, which detaches them from the kernel until they are released, or move the drive to {slot}",
            list(others)
        ),
    }
}

/// A device of this one's IOMMU group that is or may be in use. The group's type must then not be changed.
pub(crate) fn group_user(facts: &Facts, address: Address) -> Option<Address> {
    let in_use = |at: &Address| match facts.drive(*at) {
        Some(drive) => drive.may_be_in_use().is_some(),
        None => *at != address && facts.device(*at).is_some_and(is_driven),
    };
    let group = facts.device(address).and_then(|device| facts.tree.group_of(device))?;
    group.devices.iter().copied().find(in_use)
}

/// Whether the device has a driver that keeps VFIO from using its group.
pub(crate) fn is_driven(device: &Device) -> bool {
    device.driver.as_deref().is_some_and(|driver| !["vfio-pci", "pcieport", "pci-stub"].contains(&driver))
}

const IOMMU_OF_A_VM: &str =
    "A virtual machine has an IOMMU only if its host provides one (QEMU: -device intel-iommu)";
const TRANSLATES: &str = "DMA of every device is then translated, which costs some throughput";

/// How to enable this machine's IOMMU, and the boot option that limits translation to VFIO. AMD's is on by default.
fn iommu(facts: &Facts) -> (&'static str, &'static str) {
    match facts.kernel.cpu.vendor.as_str() {
        "GenuineIntel" => {
            ("Enable the IOMMU (VT-d) in the firmware setup, and boot with intel_iommu=on", "iommu=pt")
        }
        "AuthenticAMD" | "HygonGenuine" => (
            "Enable the IOMMU (AMD-Vi) in the firmware setup, and boot without amd_iommu=off and iommu=off",
            "iommu=pt",
        ),
        _ => ("Enable the IOMMU (on ARM the SMMU) in the firmware setup", "iommu.passthrough=1"),
    }
}

/// How to enable an IOMMU, for VFIO.
pub(crate) fn iommu_fix(facts: &Facts) -> String {
    if facts.machine.is_virtual() {
        return IOMMU_OF_A_VM.into();
    }
    let (enable, pass) = iommu(facts);
    format!("{enable}. {TRANSLATES}; with {pass}, only the DMA of devices under VFIO is")
}

/// How to make an IOMMU translate the addresses of a device.
pub(crate) fn translation_fix(facts: &Facts, device: Address) -> String {
    let (enable, pass) = iommu(facts);
    let boot = format!("without {pass} (iommu.passthrough=0 overrides the kernel's default). {TRANSLATES}");
    if facts.device(device).and_then(|device| facts.tree.group_of(device)).is_some() {
        return format!("Boot {boot}");
    }
    if facts.machine.is_virtual() {
        return IOMMU_OF_A_VM.into();
    }
    format!("{enable}. Boot {boot}")
}

/// How to get a larger BAR1.
pub(crate) fn rebar_fix(facts: &Facts, gpu: &GpuFacts) -> &'static str {
    match gpu.resizable {
        _ if facts.machine.is_virtual() => {
            "A virtual machine gets BAR1 from its host: enable Above 4G Decoding and Resizable BAR there, then pass the GPU \
             through again"
        }
        Some(_) => "Enable Above 4G Decoding and Resizable BAR (Smart Access Memory) in the firmware setup",
        None => {
            "If the GPU can resize its BAR (update its firmware), enable Above 4G Decoding and Resizable BAR in the firmware setup"
        }
    }
}

/// How to map the GPU's memory for a device: by a static BAR1, or by dma-bufs if the GPU exports them.
pub(crate) fn static_bar1_fix(gpu: &GpuFacts) -> String {
    if gpu.before_turing() {
        return "Use cpu/pinned: a GPU older than Turing exports no dma-bufs, and no static BAR1 of one is known"
            .into();
    }
    let exports = !matches!(gpu.cuda.as_ref().and_then(|gpu| gpu.dma_buf.as_ref()), Some(Err(_)));
    let module = if exports {
        ". Or load the module onehop, which imports dma-bufs (docs/kernel-module.md)"
    } else {
        ""
    };
    format!(
        "Load the module nvidia with NVreg_RegistryDwords=\"RMForceStaticBar1=1;RMForceDisableIomapWC=1\", {RELOAD}, and \
         run as root: VFIO can map a static BAR1{module}"
    )
}

/// Why this driver cannot map a drive's registers for the GPU, and the fix; `None` if it can. `old` means that the GPU
/// is older than Turing, which the open modules do not drive.
pub(crate) fn registers(facts: &Facts, old: bool) -> Option<(String, String)> {
    let (kernel, nvidia) = (facts.kernel.version(), &facts.nvidia);
    let gap = register_gap(kernel, nvidia.numbers(), nvidia.open)?;
    // The text after the colon recommends a driver; the fix below replaces it.
    let gap = gap.split_once(": install").map_or(&*gap, |(gap, _)| gap).to_owned();
    if !old {
        let fix =
            format!("Install NVIDIA's open kernel modules, 570.133.07 or later{}", open_modules_cost(facts));
        return Some((gap, fix));
    }
    if register_gap(kernel, Some(REGISTER_DRIVER), Some(false)).is_none() {
        let fix = format!("Install NVIDIA's driver 570.133.07 or later and load it, {RELOAD}");
        return Some((gap, fix));
    }
    let fix = "Use cpu/pinned. This GPU is older than Turing, which the open kernel modules do not drive, and the proprietary \
               ones map registers only under kernels before 6.12";
    Some((gap, fix.into()))
}

/// The cost of installing the open kernel modules.
pub(crate) fn open_modules_cost(facts: &Facts) -> String {
    let old: Vec<_> = facts.gpus.iter().filter(|gpu| gpu.before_turing()).map(|gpu| gpu.address).collect();
    let lost = if old.is_empty() {
        String::new()
    } else {
        format!(". They do not drive {}, older than Turing", list(&old))
    };
    format!(", and load them, {RELOAD}{lost}")
}

/// How to make a MIG instance, on one GPU.
pub(crate) fn mig_instance(gpu: Address) -> String {
    format!(
        "nvidia-smi mig -i {gpu} -lgi lists its instances, and nvidia-smi mig -i {gpu} -cgi PROFILE -C makes one (root; -lgip lists \
         the profiles). If it has one, set CUDA_VISIBLE_DEVICES to its UUID (nvidia-smi -L)"
    )
}
