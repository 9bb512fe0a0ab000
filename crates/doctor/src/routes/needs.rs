//! The requirements of routes, and whether a machine meets them.

use onehop_pci::Device;

use crate::check::bytes;
use crate::facts::cuda::Registers;
use crate::facts::drive::DriveFacts;
use crate::facts::place::capability;
use crate::fixes::{self, RELAXED, iommu_fix, is_driven, isolation_fix, translation_fix};
use crate::pair::{DevicePair, Passes, list};

const FOUR_GIB: u64 = 1 << 32;

/// The state of a need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NeedState {
    /// It was tried just now, and worked.
    Tried,
    /// It is present.
    Met,
    /// It is unknown.
    Unknown,
    /// It failed on similar machines.
    Doubtful,
    /// It is missing.
    Missing,
}

/// A need and its state.
pub(super) struct Need {
    pub state: NeedState,
    pub reason: String,
    pub fix: Option<String>,
}

impl Need {
    fn new(state: NeedState, reason: impl Into<String>) -> Self {
        Self { state, reason: reason.into(), fix: None }
    }

    fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }
}

/// Determines the needs of a GPU and a device.
pub(super) struct Needs<'a> {
    pub pair: &'a DevicePair<'a>,
    pub drive: Option<&'a DriveFacts>,
}

impl Needs<'_> {
    /// CUDA drives the GPU.
    pub(super) fn cuda(&self) -> Need {
        let facts = self.pair.facts;
        let opened = self.pair.gpu.cuda.as_ref().and_then(|gpu| gpu.copy.as_ref());
        match (&facts.cuda, &self.pair.gpu.cuda, opened) {
            (_, _, Some(Ok(()))) => Need::new(NeedState::Tried, "CUDA opened the GPU"),
            (_, _, Some(Err(why))) => {
                Need::new(NeedState::Missing, format!("CUDA cannot use the GPU: {why}"))
                    .fix("See the check gpu.cuda")
            }
            (_, Some(_), None) => Need::new(NeedState::Unknown, "CUDA shows the GPU; it was not opened"),
            (Some(cuda), None, _) => match &cuda.error {
                Some(why) => Need::new(NeedState::Missing, format!("CUDA cannot use the GPU: {why}"))
                    .fix("See the check gpu.cuda"),
                None => self.hidden_gpu(),
            },
            (None, None, _) => Need::new(NeedState::Unknown, "CUDA was not queried"),
        }
    }

    /// CUDA works, but shows only other GPUs.
    fn hidden_gpu(&self) -> Need {
        let device = self.pair.gpu_device;
        if self.pair.gpu.mig {
            return Need::new(NeedState::Missing, "MIG is on, and CUDA shows no instance of this GPU")
                .fix(fixes::mig_instance(device.address));
        }
        match device.driver.as_deref() {
            Some("nvidia") => Need::new(NeedState::Missing, "CUDA does not show this GPU")
                .fix("Unset CUDA_VISIBLE_DEVICES, or pass this GPU to the container"),
            driver => {
                let has =
                    driver.map_or_else(|| "it has no driver".into(), |name| format!("it is bound to {name}"));
                Need::new(NeedState::Missing, format!("CUDA cannot use the GPU: {has}")).fix(format!(
                    "Bind it to NVIDIA's driver once it is unused: echo nvidia > \
                     /sys/bus/pci/devices/{0}/driver_override, unbind it, echo {0} > /sys/bus/pci/drivers_probe (root; its current user, such \
                     as a virtual machine, loses it)",
                    device.address
                ))
            }
        }
    }

    /// Bytes can be copied from pinned memory to the GPU.
    pub(super) fn copies(&self) -> Need {
        match self.pair.gpu.cuda.as_ref().and_then(|gpu| gpu.copy.as_ref()) {
            Some(Ok(())) => Need::new(
                NeedState::Tried,
                "copied 2 MiB from pinned memory into GPU memory and back, bytes identical",
            ),
            Some(Err(why)) => Need::new(NeedState::Missing, why.clone()),
            None => Need::new(NeedState::Unknown, "copying into GPU memory was not tested"),
        }
    }

    /// How to rebind the drive to the kernel's nvme driver.
    fn rebind_command(&self, driver: &str) -> String {
        let at = self.pair.device.address;
        let command = format!(
            "onehop drive unbind -d {at}, or echo nvme > /sys/bus/pci/devices/{at}/driver_override, \
             echo {at} > /sys/bus/pci/devices/{at}/driver/unbind, echo {at} > /sys/bus/pci/drivers_probe (root; this detaches it from \
             {driver})"
        );
        let command = self.drive.map_or(command.clone(), |drive| fixes::unless_used(drive, command));
        format!("To release it to the kernel: {command}")
    }

    /// The drive is bound to the kernel's nvme driver.
    pub(super) fn block_device(&self) -> Need {
        let driver = self.pair.device.driver.as_deref();
        let works = self.drive.is_some_and(|drive| !drive.namespaces.is_empty());
        match driver {
            Some("nvme") if works => Need::new(NeedState::Tried, "the kernel's driver serves the drive"),
            Some("nvme") => self.namespaces(),
            Some(other) => Need::new(NeedState::Missing, format!("the drive is bound to {other}"))
                .fix(self.rebind_command(other)),
            None => Need::new(NeedState::Missing, "the drive has no driver")
                .fix(format!("echo {} > /sys/bus/pci/drivers_probe (root)", self.pair.device.address)),
        }
    }

    /// The drive has a namespace, as far as known.
    pub(super) fn namespaces(&self) -> Need {
        let by_kernel = self.pair.device.driver.as_deref() == Some("nvme");
        if by_kernel && self.drive.is_some_and(|drive| drive.namespaces.is_empty()) {
            return Need::new(NeedState::Unknown, "the kernel's driver shows no namespace on the drive")
                .fix(format!(
                    "Create and attach a namespace: nvme list-ns, create-ns and attach-ns on {} (nvme-cli, root)",
                    self.drive
                        .and_then(|drive| drive.name.as_deref())
                        .map_or_else(|| "its controller".to_owned(), |name| format!("/dev/{name}"))
                ));
        }
        Need::new(NeedState::Met, "the drive has a namespace, as far as known")
    }

    /// cuFile is installed.
    pub(super) fn cufile(&self) -> Need {
        match &self.pair.facts.cufile.library {
            Some(_) => Need::new(
                NeedState::Unknown,
                "cuFile is a baseline for measurements; the check cufile.mode shows which path it would take",
            ),
            None => Need::new(NeedState::Missing, "libcufile was not found")
                .fix("Install NVIDIA's libcufile; only comparisons need it"),
        }
    }

    /// The device is in D0.
    pub(super) fn awake(&self) -> Need {
        let device = self.pair.device;
        if !device.is_asleep() {
            return Need::new(NeedState::Met, "the device is awake");
        }
        let state = device.power_state.clone().unwrap_or_else(|| "D3".into());
        Need::new(NeedState::Missing, format!("the device sleeps ({state}): its registers read as all ones"))
            .fix(format!(
                "echo on > /sys/bus/pci/devices/{}/power/control (root). This turns its power saving off",
                device.address
            ))
    }

    /// The drive has no other users.
    pub(super) fn not_used(&self) -> Need {
        match self.drive.and_then(|drive| drive.users.as_ref()) {
            None => Need::new(NeedState::Met, "nothing on the drive is in use"),
            Some(Ok(users)) => Need::new(NeedState::Missing, format!("the drive is in use: {users}"))
                .fix("Use another drive, or free this one first (never the drive that the system runs from)"),
            Some(Err(why)) => {
                let reason = format!("cannot determine who uses the drive: {why}");
                // A drive bound to vfio-pci or onehop: claiming it fails if it is in use. A drive of the nvme driver is
                // not claimed while its users are unknown.
                let state = if super::is_detached_from_kernel(self.pair) {
                    NeedState::Unknown
                } else {
                    NeedState::Missing
                };
                Need::new(state, reason).fix(fixes::users_fix(self.pair.facts))
            }
        }
    }

    /// The drive can be claimed, through VFIO or the kernel module onehop.
    pub(super) fn claimable(&self) -> Need {
        let (facts, device) = (self.pair.facts, self.pair.device);
        if let Some(bound) = facts.module.device(device.address) {
            return match bound.file {
                true => Need::new(NeedState::Met, "the drive is bound to the kernel module onehop"),
                false => Need::new(
                    NeedState::Missing,
                    "the drive is bound to the kernel module onehop, but its device file is missing",
                )
                .fix("See the check kernel.onehop_device"),
            };
        }
        if facts.module.loaded && facts.place.root && !device.behind_vmd {
            return Need::new(
                NeedState::Met,
                "the kernel module onehop is loaded, and root may bind the drive to it",
            );
        }
        if device.behind_vmd {
            return Need::new(
                NeedState::Missing,
                "the drive is behind Intel VMD, where no other driver can claim it",
            )
            .fix(fixes::vmd_fix(facts));
        }
        let Some(group) = facts.tree.group_of(device) else {
            if facts.place.root {
                return Need::new(
                    NeedState::Met,
                    "without an IOMMU, root may drive it by physical addresses as a last resort",
                );
            }
            return Need::new(
                NeedState::Missing,
                "no IOMMU, which VFIO needs; without one only root may drive it, by physical addresses",
            )
            .fix(iommu_fix(facts));
        };
        let others: Vec<_> = group
            .devices
            .iter()
            .copied()
            .filter(|other| *other != device.address && facts.device(*other).is_some_and(is_driven))
            .collect();
        if !others.is_empty() {
            return Need::new(
                NeedState::Missing,
                format!("its IOMMU group also holds {}, which VFIO would claim too", list(&others)),
            )
            .fix(isolation_fix(facts, &others));
        }
        if !facts.kernel.has("vfio_pci") && facts.kernel.option("CONFIG_VFIO_PCI") == Some(false) {
            return Need::new(NeedState::Missing, "this kernel has no vfio-pci")
                .fix("Use a kernel with CONFIG_VFIO_PCI");
        }
        if is_vfio(device) && facts.kernel.vfio_groups.contains(&device.iommu_group.unwrap_or(0).to_string())
        {
            return Need::new(NeedState::Met, "the drive is bound to vfio-pci");
        }
        if !facts.place.root {
            return Need::new(NeedState::Unknown, "binding the drive to vfio-pci needs root").fix(format!(
                "Run as root, or have root bind it and give you /dev/vfio/{}",
                device.iommu_group.unwrap_or_default()
            ));
        }
        Need::new(NeedState::Met, "VFIO can claim the drive")
    }

    /// The GPU can write the drive's doorbells.
    pub(super) fn doorbells(&self) -> Need {
        let (facts, nvidia) = (self.pair.facts, &self.pair.facts.nvidia);
        match self.pair.gpu.cuda.as_ref().and_then(|gpu| gpu.registers.as_ref()) {
            Some(Registers { drive, trial: Err(why) }) => {
                return Need::new(
                    NeedState::Missing,
                    format!("mapping registers of {drive} for the GPU failed: {why}"),
                )
                .fix("See the check gpu.register_bar");
            }
            Some(Registers { trial: Ok(()), .. }) => return self.gpu_writes(),
            None => {}
        }
        if let Some((why, fix)) = fixes::registers(facts, self.pair.gpu.before_turing()) {
            return Need::new(
                NeedState::Missing,
                format!("the drive's registers cannot be mapped for the GPU: {why}"),
            )
            .fix(fix);
        }
        if !facts.place.can(capability::SYS_ADMIN) && !nvidia.has("PeerMappingOverride") {
            return Need::new(
                NeedState::Missing,
                "only administrators may map another device's registers for a GPU",
            )
            .fix(fixes::PEER_OVERRIDE);
        }
        self.gpu_writes()
    }

    /// The GPU's writes reach the drive.
    fn gpu_writes(&self) -> Need {
        self.passes(self.pair.writes(), "the GPU's writes to the drive")
    }

    /// GPU memory can be mapped for the drive.
    pub(super) fn window(&self) -> Need {
        let (facts, gpu) = (self.pair.facts, self.pair.gpu);
        let dma_buf = gpu.cuda.as_ref().and_then(|gpu| gpu.dma_buf.as_ref());
        if facts.module.loaded {
            return match dma_buf {
                Some(Ok(())) => Need::new(
                    NeedState::Met,
                    "the module onehop can import the GPU's dma-bufs, and exporting one worked",
                ),
                Some(Err(why)) => Need::new(NeedState::Missing, format!("the GPU exports no dma-buf: {why}"))
                    .fix("Use a GPU and a driver that export dma-bufs, or a static BAR1 through VFIO (see the check gpu.static_bar1)"),
                None => Need::new(NeedState::Unknown, "exporting GPU memory as a dma-buf was not tested"),
            };
        }
        if gpu.mig {
            return Need::new(
                NeedState::Unknown,
                "MIG is on: it is unknown whether BAR1 shows this instance's memory",
            )
            .fix("See the check gpu.mig");
        }
        if gpu.covers_all_memory() == Some(false) {
            let size = gpu.window.map_or(0, |bar| bar.size);
            let reason =
                format!("BAR1 covers only {} of GPU memory, and direct routes need all of it", bytes(size));
            return Need::new(NeedState::Missing, reason).fix(fixes::rebar_fix(facts, gpu));
        }
        if !facts.nvidia.has("RMForceStaticBar1") {
            return Need::new(
                NeedState::Missing,
                "the drive cannot be given addresses of GPU memory: BAR1 is not static, and the kernel module onehop, which \
                 imports dma-bufs, is not loaded",
            )
            .fix(fixes::static_bar1_fix(gpu));
        }
        if !facts.place.root {
            return Need::new(NeedState::Unknown, "mapping BAR1 for the drive needs root").fix("Run as root");
        }
        if facts.kernel.locked() {
            return Need::new(NeedState::Missing, "lockdown forbids mapping BARs from user space")
                .fix(
                    "Sign and load the module onehop (docs/kernel-module.md). It needs no BAR in user space, and Secure Boot stays on",
                );
        }
        if facts.kernel.option("CONFIG_IO_STRICT_DEVMEM") == Some(true) {
            return Need::new(
                NeedState::Missing,
                "this kernel (IO_STRICT_DEVMEM) forbids mapping the BAR of a device that has a driver",
            )
            .fix(RELAXED);
        }
        Need::new(NeedState::Met, "BAR1 is static: VFIO can map it")
    }

    /// The device's writes reach GPU memory.
    pub(super) fn writes(&self) -> Need {
        self.passes(self.pair.writes(), "writes into GPU memory")
    }

    /// The device's reads of GPU memory get an answer.
    pub(super) fn reads(&self) -> Need {
        self.passes(self.pair.reads(), "reads from GPU memory")
    }

    fn passes(&self, passes: Passes, what: &str) -> Need {
        match passes {
            Passes::Expected(why) => Need::new(NeedState::Met, why),
            Passes::Perhaps(why) => Need::new(NeedState::Unknown, format!("{what}: {why}")),
            Passes::Doubtful(why) => Need::new(NeedState::Doubtful, format!("{what}: {why}")),
        }
    }

    /// The card has a driver.
    pub(super) fn card_driver(&self, kind: &str) -> Need {
        match (&self.pair.device.driver, kind) {
            (Some(_), "rdma") => Need::new(NeedState::Met, "the card has a verbs device"),
            (Some(driver), _) => Need::new(NeedState::Met, format!("the board is bound to {driver}")),
            (None, _) => Need::new(NeedState::Missing, "the board has no driver")
                .fix("Load its driver (usdr_pcie_uram)"),
        }
    }

    /// GPU memory can be registered with the card: by a dma-buf or by nvidia-peermem.
    pub(super) fn rdma_mapping(&self) -> Need {
        let (facts, gpu) = (self.pair.facts, self.pair.gpu);
        let peermem = facts.nvidia.helpers.contains(&"nvidia_peermem");
        match gpu.cuda.as_ref().and_then(|gpu| gpu.dma_buf.as_ref()) {
            Some(Ok(())) if facts.kernel.version() == (0, 0) => {
                Need::new(NeedState::Unknown, "kernel version unknown; verbs register dma-bufs from 5.12 on")
            }
            Some(Ok(())) if facts.kernel.version() >= (5, 12) => Need::new(
                NeedState::Met,
                "exporting a dma-buf worked, and verbs register dma-bufs from kernel 5.12 on",
            ),
            _ if peermem => Need::new(NeedState::Met, "nvidia-peermem is loaded"),
            Some(Err(why)) => Need::new(
                NeedState::Missing,
                format!("the GPU exports no dma-buf ({why}), and nvidia-peermem is not loaded"),
            )
            .fix("Run modprobe nvidia-peermem (root)"),
            Some(Ok(())) => Need::new(NeedState::Missing, "verbs register dma-bufs from kernel 5.12 on only")
                .fix("Run modprobe nvidia-peermem (root)"),
            None => Need::new(NeedState::Unknown, "exporting GPU memory as a dma-buf was not tested"),
        }
    }

    /// GPU memory can be mapped for the board, by the kernel module onehop.
    pub(super) fn sdr_mapping(&self) -> Need {
        let dma_buf = self.pair.gpu.cuda.as_ref().and_then(|gpu| gpu.dma_buf.as_ref());
        match (self.pair.facts.module.loaded, dma_buf) {
            (true, Some(Ok(()))) => Need::new(NeedState::Met, "the module onehop imports the GPU's dma-bufs"),
            (_, Some(Err(why))) => {
                Need::new(NeedState::Missing, format!("the GPU exports no dma-buf: {why}"))
                    .fix("Receive into pinned memory (cpu/pinned)")
            }
            (true, None) => Need::new(NeedState::Unknown, "exporting GPU memory as a dma-buf was not tested"),
            (false, _) => Need::new(
                NeedState::Missing,
                "the kernel module onehop, which maps GPU memory for the board, is not loaded",
            )
            .fix("Receive into pinned memory (cpu/pinned)"),
        }
    }

    /// The board's 32-bit addresses reach GPU memory.
    pub(super) fn mask(&self) -> Need {
        let pair = self.pair;
        let Some(bar) = pair.gpu.window.filter(|bar| bar.assigned) else {
            return Need::new(NeedState::Unknown, "the address of BAR1 is unknown");
        };
        if bar.last() < FOUR_GIB {
            return Need::new(NeedState::Met, "BAR1 lies below 4 GiB");
        }
        match pair.facts.tree.group_of(pair.device).and_then(onehop_pci::IommuGroup::translates) {
            Some(true) => Need::new(NeedState::Met, "the IOMMU maps BAR1 below 4 GiB for the board"),
            _ => Need::new(
                NeedState::Missing,
                format!(
                    "the board has 32-bit addresses, BAR1 lies at {:#x}, and no IOMMU translates",
                    bar.start
                ),
            )
            .fix(translation_fix(pair.facts, pair.device.address)),
        }
    }
}

fn is_vfio(device: &Device) -> bool {
    device.driver.as_deref() == Some("vfio-pci")
}
