//! GPUs: the driver, CUDA, results of trials.

use crate::check::{Check, CheckGroup, Status, bytes, rate};
use crate::facts::Facts;
use crate::facts::cuda::TIMED_OUT;
use crate::facts::gpu::{GpuFacts, is_assigned_to_guest};
use crate::facts::nvml::NvmlFacts;
use crate::facts::place::capability;
use crate::fixes::{self, PEER_OVERRIDE, RELOAD};

/// Checks that concern all GPUs.
pub(super) fn driver(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![present(facts)];
    checks.extend(others(facts));
    if !facts.gpus.is_empty() || facts.nvidia.version.is_some() {
        checks.extend([flavour(facts), cuda(facts), registers(facts), helpers(facts)]);
    }
    checks
}

fn present(facts: &Facts) -> Check {
    let why = "every route needs a GPU";
    if facts.gpus.is_empty() {
        return Check::new("gpu.present", CheckGroup::Gpu, Status::Info, "no NVIDIA GPU", why)
            .fix("Use the emulated GPU (-g emu); onehop demo shows it")
            .by("/sys/bus/pci/devices: vendor 0x10de, class 0x03");
    }
    let names: Vec<_> = facts.gpus.iter().map(|gpu| title(facts, gpu)).collect();
    let mut found = names.join(", ");
    if let Some(gpu) = facts.gpus.iter().find(|gpu| facts.device(gpu.address).is_none()) {
        return hidden(facts, gpu, &found, why);
    }
    let assigned =
        |device: &&onehop_pci::Device| is_assigned_to_guest(device) && !facts.has_gpu(&[device.address]);
    let assigned = facts.tree.devices.values().filter(assigned).count();
    if assigned > 0 {
        found = format!("{found}; {} for virtual machines", plural(assigned, "virtual function"));
    }
    Check::new("gpu.present", CheckGroup::Gpu, Status::Pass, found, why)
}

/// A GPU that CUDA reports, but the bus does not.
fn hidden(facts: &Facts, gpu: &GpuFacts, found: &str, why: &'static str) -> Check {
    let check =
        |status, words| Check::new("gpu.present", CheckGroup::Gpu, status, format!("{found}; {words}"), why);
    if gpu.is_integrated() {
        return check(Status::Info, "integrated with the CPU: it uses the CPU's memory and has no BAR")
            .fix("Load files by cpu/pinned; direct routes need a GPU on the PCI bus");
    }
    let check = check(Status::Warn, "CUDA shows it, the PCI bus does not");
    if facts.kernel.is_wsl() {
        return check.fix("Windows owns the GPU and the drives (WSL). Boot Linux itself for direct routes");
    }
    check.fix("Run where /sys shows the PCI bus. A sandbox or container hides it")
}

/// A GPU's display name, with its driver if that is not NVIDIA's.
fn title(facts: &Facts, gpu: &GpuFacts) -> String {
    let title = crate::routes::gpu_title(gpu);
    match facts.device(gpu.address).and_then(|device| device.driver.as_deref()) {
        Some(other) if other != "nvidia" => format!("{title}, bound to {other}"),
        _ => title,
    }
}

/// GPUs of other vendors.
fn others(facts: &Facts) -> Option<Check> {
    let other = |device: &&onehop_pci::Device| {
        // WSL's virtual GPU stands for one that CUDA reports.
        let by_wsl = device.driver.as_deref() == Some("dxgkrnl");
        device.vendor != 0x10de && matches!(device.class.kind(), 0x0300 | 0x0302 | 0x0380 | 0x1200) && !by_wsl
    };
    let found: Vec<_> = facts
        .tree
        .devices
        .values()
        .filter(other)
        .map(|device| format!("{} ({})", device.title(), device.address))
        .collect();
    (!found.is_empty()).then(|| {
        let why = "onehop uses GPUs through CUDA only";
        Check::new("gpu.others", CheckGroup::Gpu, Status::Info, found.join(", "), why)
    })
}

fn flavour(facts: &Facts) -> Check {
    let nvidia = &facts.nvidia;
    let why = "dma-bufs, and GPU access to device registers, need NVIDIA's open kernel modules";
    let check = |status, found: String| {
        Check::new("gpu.driver", CheckGroup::Gpu, status, found, why).by("/proc/driver/nvidia/version")
    };
    let Some(version) = &nvidia.version else {
        // If CUDA works, the driver is loaded, even if /proc and /sys hide it.
        if facts.gpus.iter().any(|gpu| gpu.cuda.is_some()) {
            return check(
                Status::Unknown,
                "CUDA shows a GPU, so it is loaded; its version is not visible here".into(),
            )
            .fix("Run where /proc/driver/nvidia is visible, or run nvidia-smi");
        }
        let nouveau = facts.kernel.has("nouveau");
        let found =
            if nouveau { "the GPU is bound to nouveau" } else { "NVIDIA's kernel driver is not loaded" };
        return check(Status::Fail, found.into())
            .fix("Install NVIDIA's driver with the open kernel modules (nvidia-open; Turing or later). It takes the GPU, and its displays, \
                  from nouveau");
    };
    match nvidia.open {
        Some(true) => check(Status::Pass, format!("{version}, open kernel modules")),
        Some(false) if before_turing(facts) => {
            let found =
                format!("{version}, proprietary kernel modules, the only ones for GPUs older than Turing");
            check(Status::Info, found)
        }
        Some(false) => check(Status::Warn, format!("{version}, proprietary kernel modules")).fix(format!(
            "Install the open kernel modules of the same version (nvidia-open; Turing or later){}",
            fixes::open_modules_cost(facts)
        )),
        None => check(Status::Unknown, format!("{version}, unknown flavour"))
            .fix("Run modinfo -F license nvidia: the open flavour prints Dual MIT/GPL"),
    }
}

/// Whether all GPUs of known generation are too old for the open kernel modules.
fn before_turing(facts: &Facts) -> bool {
    let known = |gpu: &&GpuFacts| gpu.cuda.as_ref().is_some_and(|cuda| cuda.compute != (0, 0));
    let mut known = facts.gpus.iter().filter(known).peekable();
    known.peek().is_some() && known.all(GpuFacts::before_turing)
}

fn cuda(facts: &Facts) -> Check {
    let why = "every route uses the CUDA driver library";
    let check = |status, found: String| {
        Check::new("gpu.cuda", CheckGroup::Gpu, status, found, why).by("libcuda, cuInit")
    };
    let with_mig = facts.gpus.iter().find(|gpu| gpu.mig).map(|gpu| gpu.address);
    match &facts.cuda {
        None => check(Status::Unknown, "CUDA was not queried on this system".into())
            .fix("Record the system again with onehop doctor --record, on the machine itself"),
        Some(cuda) => match &cuda.error {
            Some(error) => check(Status::Fail, error.clone()).fix(cuda_fix(facts, error)),
            None if cuda.gpus.is_empty() && with_mig.is_some() => {
                check(Status::Fail, "CUDA shows no GPU: MIG is on, and no instance is visible".into())
                    .fix(with_mig.map(fixes::mig_instance).unwrap_or_default())
            }
            None if cuda.gpus.is_empty() => check(Status::Fail, "CUDA shows no GPU".into())
                .fix("Unset CUDA_VISIBLE_DEVICES, or pass the GPUs to the container (--gpus all)"),
            None => check(
                Status::Pass,
                format!(
                    "CUDA {}.{}, {}",
                    cuda.version / 1000,
                    cuda.version % 1000 / 10,
                    plural(cuda.gpus.len(), "GPU")
                ),
            ),
        },
    }
}

fn cuda_fix(facts: &Facts, error: &str) -> String {
    if error.starts_with(TIMED_OUT) {
        return "Increase --patience. A sleeping GPU, or a driver that is not kept loaded, takes seconds to start \
                (nvidia-persistenced keeps it ready)"
            .into();
    }
    if error.contains("(803)") {
        return format!(
            "The loaded kernel module and libcuda have different versions. Reboot after an upgrade, or reload the module nvidia, \
             {RELOAD}"
        );
    }
    match (&facts.nvidia.version, facts.nvidia.device_files) {
        (None, _) => "Load NVIDIA's kernel driver first (see gpu.driver)",
        (Some(_), false) => {
            "/dev/nvidiactl is missing. In a container, pass the GPUs (--gpus all); on the host, run nvidia-modprobe"
        }
        (Some(_), true) => {
            "Fix what the error names, or install libcuda of the same version as the kernel driver"
        }
    }
    .into()
}

/// Whether this driver can map a device's registers for a GPU under this kernel.
fn registers(facts: &Facts) -> Check {
    let why = "GPU threads can ring a drive's doorbells only if the driver maps its registers for them (cudaHostRegisterIoMemory)";
    let check = |status, found: String| Check::new("gpu.register_bar", CheckGroup::Gpu, status, found, why);
    let (nvidia, kernel) = (&facts.nvidia, facts.kernel.version());
    let mut trials = facts.gpus.iter().filter_map(|gpu| Some((gpu, gpu.cuda.as_ref()?.registers.as_ref()?)));
    let first = trials.next();
    let failed = first
        .into_iter()
        .chain(trials)
        .find_map(|(gpu, mapped)| Some((gpu, mapped, mapped.trial.as_ref().err()?)));
    if let Some((gpu, mapped, error)) = failed {
        let found = format!("mapping registers of {} for GPU {} failed: {error}", mapped.drive, gpu.address);
        return check(Status::Warn, found)
            .fix("Fix what the error names first; dmesg | grep NVRM shows more")
            .by("tried: cuMemHostRegister with IOMEMORY");
    }
    if let Some((_, mapped)) = first {
        let found = format!("a page of {}'s registers was mapped for the GPU and unmapped", mapped.drive);
        return check(Status::Pass, found).by("tried: cuMemHostRegister with IOMEMORY");
    }
    if let Some((gap, fix)) = fixes::registers(facts, before_turing(facts)) {
        return check(Status::Warn, gap).fix(fix);
    }
    let known = nvidia.numbers().is_some() && kernel != (0, 0);
    if !known {
        let loaded = nvidia.version.is_some() || facts.gpus.iter().any(|gpu| gpu.cuda.is_some());
        let found = if loaded {
            "driver or kernel version unknown"
        } else {
            "unknown: NVIDIA's driver is not loaded"
        };
        return check(Status::Unknown, found.into()).fix("See gpu.driver");
    }
    let admin = facts.place.can(capability::SYS_ADMIN) || nvidia.has("PeerMappingOverride");
    if !admin {
        return check(Status::Warn, "supported, for administrators only".into()).fix(PEER_OVERRIDE);
    }
    let version = nvidia.version.as_deref().unwrap_or("?");
    let found = format!("driver {version} supports it under kernel {}.{}", kernel.0, kernel.1);
    check(Status::Pass, found).by("known combinations of driver and kernel")
}

fn helpers(facts: &Facts) -> Check {
    let why = "nvidia_fs serves cuFile, nvidia_peermem RDMA without dma-bufs, gdrdrv the CPU; onehop needs none of them";
    let loaded = &facts.nvidia.helpers;
    let found =
        if loaded.is_empty() { "none loaded".into() } else { format!("{} loaded", loaded.join(", ")) };
    Check::new("gpu.helpers", CheckGroup::Gpu, Status::Info, found, why).by("/sys/module")
}

/// Checks that concern one GPU.
pub(super) fn checks(facts: &Facts, gpu: &GpuFacts) -> Vec<Check> {
    let mut checks: Vec<Check> =
        [mig(gpu), copy(gpu), dma_buf(facts, gpu), ordering(gpu), link(facts, gpu), power(facts, gpu)]
            .into_iter()
            .flatten()
            .collect();
    checks.extend(gpu.screen.then(|| {
        let why =
            "the driver reserves part of BAR1 for displays, and transfers to the console's GPU were seen to be lost";
        Check::new("gpu.screen", CheckGroup::Gpu, Status::Info, "a display is attached", why)
            .about(gpu.address)
            .fix("Attach displays to another GPU")
            .by("drm outputs: connected")
    }));
    checks
}

fn mig(gpu: &GpuFacts) -> Option<Check> {
    gpu.mig.then(|| {
        let why = "CUDA shows one instance of a partitioned GPU. All instances share BAR1, and direct routes into one are untested";
        let found = match &gpu.cuda {
            Some(cuda) => format!("MIG is on; CUDA shows an instance with {}: {}", bytes(cuda.memory), cuda.name),
            None => "MIG is on; CUDA shows no instance".into(),
        };
        Check::new("gpu.mig", CheckGroup::Gpu, Status::Info, found, why)
            .about(gpu.address)
            .fix(format!(
                "nvidia-smi -i {} -mig 0 (root) makes it one GPU again. This ends every program on it and deletes its instances",
                gpu.address
            ))
            .by("NVML, CUDA's device name")
    })
}

fn copy(gpu: &GpuFacts) -> Option<Check> {
    let why = "the route that works everywhere: pinned memory, then the GPU's copy engine (cpu/pinned)";
    let trial = gpu.cuda.as_ref()?.copy.as_ref();
    let check = |status, found: String| {
        Check::new("gpu.copy", CheckGroup::Gpu, status, found, why).about(gpu.address).by("tried")
    };
    Some(match trial {
        Some(Ok(())) => check(Status::Pass, "2 MiB copied into GPU memory and back, bytes identical".into()),
        Some(Err(error)) => {
            check(Status::Fail, error.clone()).fix("Run dmesg | grep -E 'NVRM|Xid', then nvidia-smi")
        }
        None => check(Status::Unknown, "not tested".into()).fix("Increase --patience"),
    })
}

fn dma_buf(facts: &Facts, gpu: &GpuFacts) -> Option<Check> {
    let cuda = gpu.cuda.as_ref()?;
    let why = "lets drivers of other devices reach GPU memory";
    let check = |status, found: String| {
        Check::new("gpu.dma_buf", CheckGroup::Gpu, status, found, why).about(gpu.address)
    };
    Some(match &cuda.dma_buf {
        Some(Ok(())) => check(Status::Pass, "exported a 2 MiB dma-buf".into()).by("tried: cuMemGetHandleForAddressRange"),
        Some(Err(error)) if gpu.before_turing() => {
            let found = format!("{error}: GPUs older than Turing export none");
            check(Status::Info, found).by("tried: cuMemGetHandleForAddressRange")
        }
        Some(Err(error)) if gpu.is_integrated() => {
            let found = format!("{error}: this GPU has no BAR for other devices");
            check(Status::Info, found).by("tried: cuMemGetHandleForAddressRange")
        }
        Some(Err(error)) => check(Status::Warn, error.clone())
            .fix(match facts.nvidia.open {
                Some(true) => "Use a data-center or RTX professional GPU: GeForce boards export no dma-bufs".to_owned(),
                _ => format!(
                    "Install NVIDIA's open kernel modules{}. GeForce boards export no dma-bufs with them either",
                    fixes::open_modules_cost(facts)
                ),
            })
            .by("tried: cuMemGetHandleForAddressRange"),
        None => {
            let found = if cuda.dma_buf_reported { "CUDA reports support; not tested" } else { "CUDA reports no support; not tested" };
            check(Status::Unknown, found.into()).fix("Increase --patience")
        }
    })
}

fn ordering(gpu: &GpuFacts) -> Option<Check> {
    let cuda = gpu.cuda.as_ref()?;
    let why = "whether a kernel that sees a completion also sees the data (GPU_DIRECT_RDMA_WRITES_ORDERING)";
    let check = |status, found: &str| {
        Check::new("gpu.ordering", CheckGroup::Gpu, status, found, why)
            .about(gpu.address)
            .by("CUDA attribute 118")
    };
    Some(match cuda.ordering.as_str() {
        "all" => check(Status::Pass, "other devices' writes are ordered for all CUDA devices"),
        "owner" => check(Status::Pass, "other devices' writes are ordered for this GPU"),
        _ if cuda.host_flush => {
            check(Status::Warn, "not ordered: the host has to flush between completion and use")
                .fix("Use cpu/direct: a running kernel cannot flush for itself")
        }
        _ => check(Status::Warn, "not ordered, and no flush available").fix("Use cpu/pinned"),
    })
}

/// NVML's report about a GPU.
fn health<'a>(facts: &'a Facts, gpu: &GpuFacts) -> Option<&'a NvmlFacts> {
    facts.nvml.as_ref()?.gpus.iter().find(|health| health.pci.parse() == Ok(gpu.address))
}

fn power(facts: &Facts, gpu: &GpuFacts) -> Option<Check> {
    let why = "an idle GPU lowers its link speed and clocks; at its power limit it slows down under load";
    let check = |status, found: String| {
        Check::new("gpu.power", CheckGroup::Gpu, status, found, why).about(gpu.address)
    };
    if let Some(error) = facts.nvml.as_ref()?.error.as_ref() {
        return Some(check(Status::Info, format!("unknown: {error}")));
    }
    let health = health(facts, gpu)?;
    let watts = |milli: u32| f64::from(milli) / 1e3;
    let mut words = Vec::new();
    match health.power {
        (Some(now), Some(most)) => words.push(format!("{:.0} W of {:.0} W", watts(now), watts(most))),
        (Some(now), None) => words.push(format!("{:.0} W", watts(now))),
        _ => {}
    }
    words.extend(health.state.map(|state| format!("performance state P{state}")));
    (!words.is_empty()).then(|| check(Status::Info, words.join(", ")).by("NVML"))
}

/// The link according to NVML, for a hidden bus.
fn link_by_nvml(health: &NvmlFacts, check: impl Fn(Status, String) -> Check) -> Option<Check> {
    let words =
        |(generation, lanes): (Option<u32>, Option<u32>)| Some(format!("Gen{} x{}", generation?, lanes?));
    let (now, best) = (words(health.link)?, words(health.best_link)?);
    if health.link.1 < health.best_link.1 {
        return Some(
            check(Status::Warn, format!("{now}, maximum {best}"))
                .fix("Reseat the card, remove adapters, or free lanes that another slot shares")
                .by("NVML"),
        );
    }
    if now == best {
        return Some(check(Status::Pass, now).by("NVML"));
    }
    let found = format!("{now} now, {best} under load: an idle GPU lowers its link speed to save power");
    Some(check(Status::Info, found).by("NVML"))
}

fn link(facts: &Facts, gpu: &GpuFacts) -> Option<Check> {
    let Some(device) = facts.device(gpu.address) else {
        let why = "the narrowest link on the path limits every route";
        let check = |status, found: String| {
            Check::new("gpu.link", CheckGroup::Gpu, status, found, why).about(gpu.address)
        };
        return link_by_nvml(health(facts, gpu)?, check);
    };
    let link = facts.link(device);
    let why = "the narrowest link on the path limits every route";
    let check = |status, found: String| {
        Check::new("gpu.link", CheckGroup::Gpu, status, found, why).about(gpu.address)
    };
    if device.is_asleep() {
        let found = "asleep: its link is down or slow until the GPU is used";
        return Some(check(Status::Info, found.into()));
    }
    if let Some((found, by)) = facts.why_link_sets_no_limit(device) {
        return Some(check(Status::Info, found.into()).by(by));
    }
    let (Some(now), Some(best)) = (link.now(), link.best()) else {
        return Some(
            check(Status::Unknown, "unknown".into())
                .fix("Run lspci -vv as root (LnkSta); in a virtual machine, run it on the host"),
        );
    };
    let port = device.parents.last().and_then(|port| facts.tree.get(*port));
    let port_link = port.map(|port| port.best_link()).unwrap_or_default();
    let slot = port_link.max_width.filter(|lanes| Some(*lanes) < link.max_width);
    if link.width < link.max_width && facts.machine.is_virtual() {
        let found =
            format!("{now}, maximum {best}, as this virtual machine shows it; the real link may differ");
        return Some(check(Status::Info, found).fix("Run lspci -vv on the host"));
    }
    if link.width < link.max_width {
        let fix = match slot {
            Some(lanes) => {
                format!("The slot has {lanes} lanes: use one with {}", link.max_width.unwrap_or(0))
            }
            None => "Reseat the card, remove adapters, or free lanes that another slot shares".into(),
        };
        return Some(
            check(Status::Warn, format!("{now}, maximum {best}"))
                .fix(fix)
                .by("current_link_width, max_link_width"),
        );
    }
    let most = link.max_rate().map(|r| format!(", up to {}", rate(r))).unwrap_or_default();
    if link.speed < link.max_speed {
        let found =
            format!("{now} now, {best} under load{most}: an idle GPU lowers its link speed to save power");
        return Some(check(Status::Info, found).by("current_link_speed, max_link_speed"));
    }
    Some(check(Status::Pass, format!("{now}{most}")))
}

pub(super) fn plural(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Formats a GPU's memory.
pub(super) fn memory(gpu: &GpuFacts) -> String {
    gpu.memory().map_or_else(|| "its memory".into(), |all| format!("{} of memory", bytes(all)))
}
