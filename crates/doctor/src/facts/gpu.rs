//! GPUs and NVIDIA's kernel driver.

use onehop_pci::{Address, Bar, BarKind, Device, Resizable, Root, Tree};

use super::cuda::{Cuda, CudaGpu};
use super::version;

const NVIDIA: u16 = 0x10de;

/// Facts about NVIDIA's kernel driver.
#[derive(Clone, Debug, Default)]
pub struct Nvidia {
    /// Its version, such as 580.159.04.
    pub version: Option<String>,
    /// Whether it is the open flavour.
    pub open: Option<bool>,
    /// Settings in the driver's registry.
    pub registry: String,
    /// Related modules that are loaded: `nvidia_fs`, `nvidia_peermem`, `gdrdrv`.
    pub helpers: Vec<&'static str>,
    /// Whether its device files exist.
    pub device_files: bool,
}

impl Nvidia {
    pub(super) fn read(root: &Root) -> Self {
        let text = root.text("/proc/driver/nvidia/version").ok();
        let by_module = root.text("/sys/module/nvidia/version").ok().filter(|text| !text.is_empty());
        let params = root.text("/proc/driver/nvidia/params").unwrap_or_default();
        let registry = params.lines().find_map(|line| line.strip_prefix("RegistryDwords:"));
        Self {
            version: by_module.or_else(|| text.as_deref().and_then(version_in)),
            open: text.as_deref().and_then(flavour_in),
            registry: registry.unwrap_or_default().trim().trim_matches('"').to_owned(),
            helpers: ["nvidia_fs", "nvidia_peermem", "gdrdrv"]
                .into_iter()
                .filter(|name| root.exists(&format!("/sys/module/{name}")))
                .collect(),
            device_files: root.exists("/dev/nvidiactl"),
        }
    }

    /// The version as numbers.
    #[must_use]
    pub fn numbers(&self) -> Option<(u32, u32, u32)> {
        self.version.as_deref().map(version)
    }

    /// Whether a key of the registry has a value other than 0.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        let is_set = |entry: &str| {
            entry
                .trim()
                .split_once('=')
                .is_some_and(|(name, value)| name.trim() == key && value.trim() != "0")
        };
        self.registry.split(';').any(is_set)
    }
}

fn flavour_in(text: &str) -> Option<bool> {
    let open = text.contains("Open Kernel Module");
    (open || text.contains("Kernel Module")).then_some(open)
}

/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build …`
fn version_in(text: &str) -> Option<String> {
    let number = |word: &&str| word.contains('.') && word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    text.lines().next()?.split_whitespace().find(number).map(str::to_owned)
}

/// An NVIDIA GPU.
#[derive(Clone, Debug)]
pub struct GpuFacts {
    /// Its address.
    pub address: Address,
    /// Its name for display.
    pub name: String,
    /// Its ordinal in CUDA.
    pub ordinal: Option<usize>,
    /// CUDA's view of it.
    pub cuda: Option<CudaGpu>,
    /// The BAR through which devices reach its memory.
    pub window: Option<Bar>,
    /// Possible sizes of that BAR.
    pub resizable: Option<Resizable>,
    /// Whether a screen is attached, according to the kernel's outputs.
    pub screen: bool,
    /// Whether it is partitioned into MIG instances; CUDA shows one of them.
    pub mig: bool,
}

impl GpuFacts {
    pub(super) fn all(root: &Root, tree: &Tree, cuda: Option<&Cuda>) -> Vec<Self> {
        let by_cuda = |device: &Device| {
            cuda.is_some_and(|cuda| cuda.gpus.iter().any(|gpu| gpu.pci.parse() == Ok(device.address)))
        };
        let mine = |device: &&Device| is_nvidia(device) && (!is_assigned_to_guest(device) || by_cuda(device));
        let on_bus = tree.devices.values().filter(mine);
        let mut gpus: Vec<_> = on_bus.map(|device| Self::one(root, device, cuda)).collect();
        // A sandbox may hide the bus but allow CUDA.
        let shown = cuda.into_iter().flat_map(|cuda| cuda.gpus.iter().enumerate());
        let hidden: Vec<_> = shown.filter_map(|(ordinal, gpu)| Self::by_cuda_alone(ordinal, gpu)).collect();
        gpus.extend(hidden.into_iter().filter(|gpu| tree.get(gpu.address).is_none()));
        gpus
    }

    fn by_cuda_alone(ordinal: usize, gpu: &CudaGpu) -> Option<Self> {
        Some(Self {
            address: gpu.pci.parse().ok()?,
            name: gpu.name.clone(),
            ordinal: Some(ordinal),
            cuda: Some(gpu.clone()),
            window: None,
            resizable: None,
            screen: false,
            mig: is_instance(&gpu.name),
        })
    }

    fn one(root: &Root, device: &Device, cuda: Option<&Cuda>) -> Self {
        let found = cuda.and_then(|cuda| {
            cuda.gpus.iter().enumerate().find(|(_, gpu)| gpu.pci.parse() == Ok(device.address))
        });
        let information = root.text(&format!("/proc/driver/nvidia/gpus/{}/information", device.address));
        let by_driver = information.ok().and_then(|text| {
            let name = text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_owned();
            (!name.is_empty() && name != "Unknown").then_some(name)
        });
        // BAR1 if it is 64-bit; otherwise the largest memory BAR.
        let memory = |bar: &&Bar| bar.kind == BarKind::Memory && bar.prefetchable;
        let window = device.bar(1).filter(memory).or_else(|| device.largest_bar()).copied();
        let config = device.config.as_ref();
        Self {
            address: device.address,
            name: found.map(|(_, gpu)| gpu.name.clone()).or(by_driver).unwrap_or_else(|| device.title()),
            ordinal: found.map(|(ordinal, _)| ordinal),
            cuda: found.map(|(_, gpu)| gpu.clone()),
            resizable: window
                .and_then(|bar| config?.resizable.iter().find(|r| usize::from(r.bar) == bar.index).copied()),
            window,
            screen: screen(root, device.address),
            mig: found.is_some_and(|(_, gpu)| is_instance(&gpu.name)),
        }
    }

    /// Its memory in bytes, if CUDA reported it.
    #[must_use]
    pub fn memory(&self) -> Option<u64> {
        self.cuda.as_ref().map(|gpu| gpu.memory).filter(|bytes| *bytes > 0)
    }

    /// Whether it is integrated with the CPU (Tegra: Jetson, DRIVE, IGX). No discrete GPU has these compute
    /// capabilities.
    #[must_use]
    pub fn is_integrated(&self) -> bool {
        const TEGRA: [(i32, i32); 6] = [(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)];
        self.cuda.as_ref().is_some_and(|gpu| TEGRA.contains(&gpu.compute))
    }

    /// Whether it is known to be older than Turing: NVIDIA's open kernel modules do not drive it.
    #[must_use]
    pub fn before_turing(&self) -> bool {
        self.cuda.as_ref().is_some_and(|gpu| gpu.compute != (0, 0) && gpu.compute < (7, 5))
    }

    /// Whether the BAR covers all of its memory; `None` if unknown. With MIG, CUDA reports the memory of one instance,
    /// but the BAR belongs to the whole GPU.
    #[must_use]
    pub fn covers_all_memory(&self) -> Option<bool> {
        if self.mig {
            return None;
        }
        Some(self.window?.size >= self.memory()?)
    }
}

/// Whether this is an NVIDIA display controller.
pub(super) fn is_nvidia(device: &Device) -> bool {
    device.vendor == NVIDIA && device.class.base() == 3
}

/// Whether this is a virtual function of a GPU, which the host assigns to a virtual machine. CUDA on the host drives
/// the physical function.
pub(crate) fn is_assigned_to_guest(device: &Device) -> bool {
    is_nvidia(device) && device.physical_function.is_some()
}

/// Whether CUDA's name is that of a MIG instance: `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
fn is_instance(name: &str) -> bool {
    name.split(' ').any(|word| word == "MIG")
}

/// Whether an output of the card is connected.
fn screen(root: &Root, address: Address) -> bool {
    let drm = format!("/sys/bus/pci/devices/{address}/drm");
    let cards = root.list(&drm).unwrap_or_default();
    let outputs = cards.iter().filter(|name| name.starts_with("card")).flat_map(|card| {
        let names = root.list(&format!("{drm}/{card}")).unwrap_or_default();
        names.into_iter().filter(|name| name.starts_with("card")).map(move |name| format!("{card}/{name}"))
    });
    outputs
        .into_iter()
        .any(|at| root.text(&format!("{drm}/{at}/status")).is_ok_and(|word| word == "connected"))
}
