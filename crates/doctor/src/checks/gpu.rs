//! GPUs: the driver, CUDA, what was tried.

use onehop_gpu::cuda::register_gap;

use crate::check::{Check, Group, Status, bytes, rate};
use crate::facts::Facts;
use crate::facts::cuda::LATE;
use crate::facts::gpu::{Gpu, is_lent};
use crate::facts::nvml::Health;
use crate::facts::place::capability;
use crate::routes::needs::PEER_OVERRIDE;

/// What holds for all GPUs.
pub(super) fn driver(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![present(facts)];
    checks.extend(others(facts));
    if !facts.gpus.is_empty() || facts.nvidia.version.is_some() {
        checks.extend([flavour(facts), cuda(facts), registers(facts), helpers(facts)]);
    }
    checks
}

fn present(facts: &Facts) -> Check {
    let why = "bytes can only go to a GPU that is there";
    if facts.gpus.is_empty() {
        return Check::new("gpu.present", Group::Gpu, Status::Info, "no NVIDIA GPU", why)
            .fix("Everything runs with the emulated GPU (-g emu), and says so; onehop demo shows it")
            .by("/sys/bus/pci/devices: vendor 0x10de, class 0x03");
    }
    let names: Vec<_> = facts.gpus.iter().map(|gpu| titled(facts, gpu)).collect();
    let mut found = names.join(", ");
    if let Some(gpu) = facts.gpus.iter().find(|gpu| facts.device(gpu.address).is_none()) {
        return hidden(facts, gpu, &found, why);
    }
    let lent = |device: &&onehop_pci::Device| is_lent(device) && !facts.has_gpu(&[device.address]);
    let lent = facts.tree.devices.values().filter(lent).count();
    if lent > 0 {
        found = format!("{found}; {} for virtual machines", plural(lent, "virtual function"));
    }
    Check::new("gpu.present", Group::Gpu, Status::Pass, found, why)
}

/// A GPU that CUDA shows, and the bus does not.
fn hidden(facts: &Facts, gpu: &Gpu, found: &str, why: &'static str) -> Check {
    let check =
        |status, words| Check::new("gpu.present", Group::Gpu, status, format!("{found}; {words}"), why);
    if gpu.in_the_chip() {
        return check(Status::Info, "a part of the processor's chip, with the processor's memory and no BAR")
            .fix("Load files by cpu/pinned; direct routes are for GPUs on the PCI bus");
    }
    let check = check(Status::Warn, "CUDA shows it, and the PCI bus does not");
    if facts.kernel.in_windows() {
        return check.fix("Windows has the GPU and the drives (WSL): start Linux itself for direct routes");
    }
    check.fix("Run where /sys shows the PCI bus: a sandbox or container hides the way to the GPU")
}

/// With the driver that has it, where that is not NVIDIA's.
fn titled(facts: &Facts, gpu: &Gpu) -> String {
    let title = crate::routes::gpu_title(gpu);
    match facts.device(gpu.address).and_then(|device| device.driver.as_deref()) {
        Some(other) if other != "nvidia" => format!("{title}, which the driver {other} has"),
        _ => title,
    }
}

/// GPUs of others, which CUDA does not drive.
fn others(facts: &Facts) -> Option<Check> {
    let other = |device: &&onehop_pci::Device| {
        // What WSL has in the place of a GPU is NVIDIA's by another way.
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
        let why = "onehop drives GPUs through CUDA; others are not used";
        Check::new("gpu.others", Group::Gpu, Status::Info, found.join(", "), why)
    })
}

fn flavour(facts: &Facts) -> Check {
    let nvidia = &facts.nvidia;
    let why = "dma-bufs and giving registers to a GPU need NVIDIA's open kernel modules";
    let check = |status, found: String| {
        Check::new("gpu.driver", Group::Gpu, status, found, why).by("/proc/driver/nvidia/version")
    };
    let Some(version) = &nvidia.version else {
        // What works is there, whatever /proc and /sys hide.
        if facts.gpus.iter().any(|gpu| gpu.cuda.is_some()) {
            return check(
                Status::Unknown,
                "CUDA shows a GPU, so it is loaded; its version is not shown here".into(),
            )
            .fix("Run where /proc/driver/nvidia is shown, or ask nvidia-smi");
        }
        let nouveau = facts.kernel.has("nouveau");
        let found = if nouveau { "nouveau has the GPU" } else { "NVIDIA's kernel driver is not loaded" };
        return check(Status::Fail, found.into())
            .fix("Install NVIDIA's driver with the open kernel modules (nvidia-open)");
    };
    match nvidia.open {
        Some(true) => check(Status::Pass, format!("{version}, open kernel modules")),
        Some(false) if before_turing(facts) => {
            let found = format!(
                "{version}, proprietary kernel modules: there are no others for GPUs older than Turing"
            );
            check(Status::Info, found)
        }
        Some(false) => check(Status::Warn, format!("{version}, proprietary kernel modules"))
            .fix("Install the open flavour of the same version (nvidia-open; Turing or later)"),
        None => check(Status::Unknown, format!("{version}; it does not tell its flavour"))
            .fix("modinfo -F license nvidia: the open flavour says Dual MIT/GPL"),
    }
}

/// Whether all GPUs that told their generation are older than those that the open kernel modules drive.
fn before_turing(facts: &Facts) -> bool {
    let mut told = facts.gpus.iter().filter_map(|gpu| Some(gpu.cuda.as_ref()?.compute)).peekable();
    told.peek().is_some() && told.all(old)
}

fn old(compute: (i32, i32)) -> bool {
    compute != (0, 0) && compute < (7, 5)
}

fn cuda(facts: &Facts) -> Check {
    let why = "everything goes through the CUDA driver library";
    let check =
        |status, found: String| Check::new("gpu.cuda", Group::Gpu, status, found, why).by("libcuda, cuInit");
    match &facts.cuda {
        None => check(Status::Unknown, "nobody asked CUDA on this system".into())
            .fix("Record the system again with onehop doctor --record, on the machine itself"),
        Some(cuda) => match &cuda.error {
            Some(error) => check(Status::Fail, error.clone()).fix(cuda_fix(facts, error)),
            None if cuda.gpus.is_empty() && facts.gpus.iter().any(|gpu| gpu.mig) => {
                check(Status::Fail, "CUDA shows no GPU, and MIG is on: it needs an instance".into()).fix(
                    "nvidia-smi mig -lgi lists instances; nvidia-smi mig -cgi PROFILE -C makes one (root)",
                )
            }
            None if cuda.gpus.is_empty() => check(Status::Fail, "CUDA shows no GPU".into())
                .fix("Unset CUDA_VISIBLE_DEVICES, or give the container its GPUs (--gpus all)"),
            None => check(
                Status::Pass,
                format!(
                    "CUDA {}.{}, {} shown",
                    cuda.version / 1000,
                    cuda.version % 1000 / 10,
                    plural(cuda.gpus.len(), "GPU")
                ),
            ),
        },
    }
}

fn cuda_fix(facts: &Facts, error: &str) -> &'static str {
    if error.starts_with(LATE) {
        return "Ask again with a longer --patience: a GPU that sleeps, or a driver that is not kept loaded, takes seconds to wake \
                (nvidia-persistenced keeps it ready)";
    }
    if error.contains("(803)") {
        return "The kernel module that is loaded and libcuda are of different versions: restart after an upgrade, or unload the module \
                nvidia and load it again, which needs every program on the GPUs to end";
    }
    match (&facts.nvidia.version, facts.nvidia.device_files) {
        (None, _) => "Load NVIDIA's kernel driver first: see gpu.driver",
        (Some(_), false) => {
            "There is no /dev/nvidiactl: in a container give it the GPUs (--gpus all), on the host run nvidia-modprobe"
        }
        (Some(_), true) => {
            "Install libcuda of the same version as the kernel driver; what the error says comes first"
        }
    }
}

/// Whether this driver can give a device's registers to a GPU under this kernel.
fn registers(facts: &Facts) -> Check {
    let why = "GPU threads ring a drive's doorbells only if the driver gives them its registers (cudaHostRegisterIoMemory)";
    let check = |status, found: String| Check::new("gpu.register_bar", Group::Gpu, status, found, why);
    let (nvidia, kernel) = (&facts.nvidia, facts.kernel.version());
    let mut trials = facts.gpus.iter().filter_map(|gpu| Some((gpu, gpu.cuda.as_ref()?.registers.as_ref()?)));
    let first = trials.next();
    let failed = first
        .into_iter()
        .chain(trials)
        .find_map(|(gpu, shown)| Some((gpu, shown, shown.tried.as_ref().err()?)));
    if let Some((gpu, shown, error)) = failed {
        let found = format!("the GPU {} was shown registers of {}: {error}", gpu.address, shown.of);
        return check(Status::Warn, found)
            .fix("Mend what it names first; dmesg | grep NVRM says more")
            .by("tried: cuMemHostRegister with IOMEMORY");
    }
    if let Some((_, shown)) = first {
        let found = format!("a page of {}'s registers was given to the GPU, and taken back", shown.of);
        return check(Status::Pass, found).by("tried: cuMemHostRegister with IOMEMORY");
    }
    if let Some(gap) = register_gap(kernel, nvidia.numbers(), nvidia.open) {
        return check(Status::Warn, gap)
            .fix("Install NVIDIA's open kernel modules, 570.133.07 or later, and load them");
    }
    let known = nvidia.numbers().is_some() && kernel != (0, 0);
    if !known {
        let loaded = nvidia.version.is_some() || facts.gpus.iter().any(|gpu| gpu.cuda.is_some());
        let found = if loaded {
            "the versions of driver and kernel are not told"
        } else {
            "NVIDIA's driver is not loaded, so this cannot be told"
        };
        return check(Status::Unknown, found.into()).fix("See gpu.driver");
    }
    let admin = facts.place.can(capability::SYS_ADMIN) || nvidia.has("PeerMappingOverride");
    if !admin {
        return check(Status::Warn, "this driver can; it lets only administrators".into()).fix(PEER_OVERRIDE);
    }
    let version = nvidia.version.as_deref().unwrap_or("?");
    let found = format!("driver {version} can under kernel {}.{}", kernel.0, kernel.1);
    check(Status::Pass, found).by("known combinations of driver and kernel")
}

fn helpers(facts: &Facts) -> Check {
    let why = "nvidia_fs serves cuFile, nvidia_peermem RDMA without dma-bufs, gdrdrv the CPU; onehop needs none of them";
    let loaded = &facts.nvidia.helpers;
    let found =
        if loaded.is_empty() { "none loaded".into() } else { format!("{} loaded", loaded.join(", ")) };
    Check::new("gpu.helpers", Group::Gpu, Status::Info, found, why).by("/sys/module")
}

/// What holds for one GPU.
pub(super) fn checks(facts: &Facts, gpu: &Gpu) -> Vec<Check> {
    let mut checks: Vec<Check> =
        [mig(gpu), copy(gpu), dma_buf(gpu), ordering(gpu), link(facts, gpu), power(facts, gpu)]
            .into_iter()
            .flatten()
            .collect();
    checks.extend(gpu.screen.then(|| {
        let why =
            "the driver keeps part of BAR1 for screens, and moves to the console's GPU were seen to be lost";
        Check::new("gpu.screen", Group::Gpu, Status::Info, "a screen is attached", why)
            .about(gpu.address)
            .fix("Attach screens to another GPU")
            .by("drm outputs: connected")
    }));
    checks
}

/// An instance shares BAR1, link and copy engines with the others.
fn mig(gpu: &Gpu) -> Option<Check> {
    gpu.mig.then(|| {
        let why = "CUDA shows one instance of a divided GPU; BAR1 is all instances', and direct routes into one are untested";
        let found = match &gpu.cuda {
            Some(cuda) => format!("MIG is on; CUDA shows an instance with {}: {}", bytes(cuda.memory), cuda.name),
            None => "MIG is on, and CUDA shows no instance of it".into(),
        };
        Check::new("gpu.mig", Group::Gpu, Status::Info, found, why)
            .about(gpu.address)
            .fix(format!(
                "nvidia-smi -i {} -mig 0 (root) makes it one GPU again: every program on it and all of its instances end",
                gpu.address
            ))
            .by("NVML, CUDA's name of it")
    })
}

fn copy(gpu: &Gpu) -> Option<Check> {
    let why = "the route that works everywhere: pinned memory, then the GPU's copy engine (cpu/pinned)";
    let tried = gpu.cuda.as_ref()?.copy.as_ref();
    let check = |status, found: String| {
        Check::new("gpu.copy", Group::Gpu, status, found, why).about(gpu.address).by("tried")
    };
    Some(match tried {
        Some(Ok(())) => check(Status::Pass, "2 MiB copied into GPU memory and back, the same bytes".into()),
        Some(Err(error)) => {
            check(Status::Fail, error.clone()).fix("dmesg | grep -E 'NVRM|Xid' says more; then nvidia-smi")
        }
        None => check(Status::Unknown, "not tried".into()).fix("Ask again with a longer --patience"),
    })
}

fn dma_buf(gpu: &Gpu) -> Option<Check> {
    let cuda = gpu.cuda.as_ref()?;
    let why = "how drivers of other devices are given GPU memory";
    let check =
        |status, found: String| Check::new("gpu.dma_buf", Group::Gpu, status, found, why).about(gpu.address);
    Some(match &cuda.dma_buf {
        Some(Ok(())) => check(Status::Pass, "a dma-buf of 2 MiB was made".into()).by("tried: cuMemGetHandleForAddressRange"),
        Some(Err(error)) if old(cuda.compute) => {
            let found = format!("{error}: GPUs older than Turing make none");
            check(Status::Info, found).by("tried: cuMemGetHandleForAddressRange")
        }
        Some(Err(error)) if gpu.in_the_chip() => {
            let found = format!("{error}: there is no BAR that other devices could reach it by");
            check(Status::Info, found).by("tried: cuMemGetHandleForAddressRange")
        }
        Some(Err(error)) => check(Status::Warn, error.clone())
            .fix("Dma-bufs need the open kernel modules and a data centre or RTX professional GPU; GeForce boards make none")
            .by("tried: cuMemGetHandleForAddressRange"),
        None => {
            let said = if cuda.dma_buf_said { "CUDA says yes; not tried" } else { "CUDA says no; not tried" };
            check(Status::Unknown, said.into()).fix("Ask again with a longer --patience")
        }
    })
}

fn ordering(gpu: &Gpu) -> Option<Check> {
    let cuda = gpu.cuda.as_ref()?;
    let why = "whether a kernel that sees a completion also sees the data (GPU_DIRECT_RDMA_WRITES_ORDERING)";
    let check = |status, found: &str| {
        Check::new("gpu.ordering", Group::Gpu, status, found, why).about(gpu.address).by("CUDA attribute 118")
    };
    Some(match cuda.ordering.as_str() {
        "all" => check(Status::Pass, "writes of other devices are ordered for every CUDA device"),
        "owner" => check(Status::Pass, "writes of other devices are ordered for this GPU"),
        _ if cuda.host_flush => {
            check(Status::Warn, "not ordered: the host has to flush between completion and use")
                .fix("Let the CPU drive (cpu/direct); a running kernel cannot flush for itself")
        }
        _ => check(Status::Warn, "not ordered, and no way to flush").fix("Use cpu/pinned"),
    })
}

/// What NVML tells of a GPU.
fn health<'a>(facts: &'a Facts, gpu: &Gpu) -> Option<&'a Health> {
    facts.nvml.as_ref()?.gpus.iter().find(|health| health.pci.parse() == Ok(gpu.address))
}

fn power(facts: &Facts, gpu: &Gpu) -> Option<Check> {
    let why = "a GPU at rest slows its link and its clocks; one at its power limit slows down under load";
    let check =
        |status, found: String| Check::new("gpu.power", Group::Gpu, status, found, why).about(gpu.address);
    if let Some(error) = facts.nvml.as_ref()?.error.as_ref() {
        return Some(check(Status::Info, format!("not told: {error}")));
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

/// The link by NVML, where the bus is hidden.
fn link_by_nvml(health: &Health, check: impl Fn(Status, String) -> Check) -> Option<Check> {
    let words =
        |(generation, lanes): (Option<u32>, Option<u32>)| Some(format!("Gen{} x{}", generation?, lanes?));
    let (now, best) = (words(health.link)?, words(health.best_link)?);
    if health.link.1 < health.best_link.1 {
        return Some(
            check(Status::Warn, format!("{now}, of {best}"))
                .fix("Seat the card again, take out adapters, or free lanes that another slot shares")
                .by("NVML"),
        );
    }
    if now == best {
        return Some(check(Status::Pass, now).by("NVML"));
    }
    let found = format!(
        "{now} now, {best} when it works: an idle GPU slows its link to save power, which is no fault"
    );
    Some(check(Status::Info, found).by("NVML"))
}

fn link(facts: &Facts, gpu: &Gpu) -> Option<Check> {
    let Some(device) = facts.device(gpu.address) else {
        let why = "no byte goes faster than the narrowest link on its way";
        let check =
            |status, found: String| Check::new("gpu.link", Group::Gpu, status, found, why).about(gpu.address);
        return link_by_nvml(health(facts, gpu)?, check);
    };
    let link = facts.link(device);
    let why = "no byte goes faster than the narrowest link on its way";
    let check =
        |status, found: String| Check::new("gpu.link", Group::Gpu, status, found, why).about(gpu.address);
    if device.is_asleep() {
        let found = "asleep: its link is down or slow until it is used, which is no fault";
        return Some(check(Status::Info, found.into()));
    }
    if let Some((found, by)) = facts.link_that_bounds_nothing(device) {
        return Some(check(Status::Info, found.into()).by(by));
    }
    let (Some(now), Some(best)) = (link.now(), link.best()) else {
        return Some(
            check(Status::Unknown, "not told".into())
                .fix("lspci -vv (root) shows LnkSta; in a virtual machine ask on the host"),
        );
    };
    let port = device.parents.last().and_then(|port| facts.tree.get(*port));
    let room = port.map(|port| port.best_link()).unwrap_or_default();
    let slot = room.max_width.filter(|lanes| Some(*lanes) < link.max_width);
    if link.width < link.max_width && facts.machine.is_virtual() {
        let found =
            format!("{now}, of {best}, as this virtual machine shows it, which need not be the real link");
        return Some(check(Status::Info, found).fix("Ask on the host: lspci -vv"));
    }
    if link.width < link.max_width {
        let fix = match slot {
            Some(lanes) => {
                format!("The slot has {lanes} lanes: use one with {}", link.max_width.unwrap_or(0))
            }
            None => "Seat the card again, take out adapters, or free lanes that another slot shares".into(),
        };
        return Some(
            check(Status::Warn, format!("{now}, of {best}"))
                .fix(fix)
                .by("current_link_width, max_link_width"),
        );
    }
    let most = link.max_rate().map(|r| format!(", {} at best", rate(r))).unwrap_or_default();
    if link.speed < link.max_speed {
        let found = format!(
            "{now} now, {best} when it works{most}: an idle GPU slows its link to save power, which is no fault"
        );
        return Some(check(Status::Info, found).by("current_link_speed, max_link_speed"));
    }
    Some(check(Status::Pass, format!("{now}{most}")))
}

pub(super) fn plural(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// A GPU's memory for people.
pub(super) fn memory(gpu: &Gpu) -> String {
    gpu.memory().map_or_else(|| "its memory".into(), |all| format!("{} of memory", bytes(all)))
}
