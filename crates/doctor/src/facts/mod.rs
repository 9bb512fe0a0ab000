//! Facts about a machine, read through a [`Root`]. The checks judge them.

pub mod cuda;
pub mod cufile;
pub mod drive;
pub mod file;
pub mod gpu;
pub mod kernel;
mod links;
pub mod module;
pub mod nic;
pub mod nvml;
pub mod place;
pub mod vm;

use std::path::PathBuf;
use std::time::Duration;

use onehop_os::StopSignal;
use onehop_pci::{Address, Device, Result, Root, Tree};

use cuda::Cuda;
use cufile::Cufile;
use drive::DriveFacts;
use file::FileFacts;
use gpu::{GpuFacts, Nvidia};
use kernel::Kernel;
use module::Module;
use nic::{Nic, SdrFacts};
use nvml::Nvml;
use place::{Environment, MemoryFacts};
use vm::Virtual;

/// Time limit for NVML: ten times what most machines need.
const NVML_TIMEOUT: Duration = Duration::from_millis(400);

/// What to examine.
#[derive(Clone, Debug)]
pub struct FactsRequest {
    /// Files whose path to a drive is to be examined.
    pub files: Vec<PathBuf>,
    /// Time limit for CUDA; `None` to skip it.
    pub timeout: Option<Duration>,
    /// When set, the remaining files are not examined.
    pub stop: StopSignal,
}

impl Default for FactsRequest {
    fn default() -> Self {
        Self { files: Vec::new(), timeout: Some(Duration::from_millis(1500)), stop: StopSignal::default() }
    }
}

/// Facts about a machine.
pub struct Facts {
    /// Its PCI devices.
    pub tree: Tree,
    /// Its NVIDIA GPUs.
    pub gpus: Vec<GpuFacts>,
    /// Its NVMe drives.
    pub drives: Vec<DriveFacts>,
    /// Its RDMA devices.
    pub nics: Vec<Nic>,
    /// Its SDR boards.
    pub sdrs: Vec<SdrFacts>,
    /// NVIDIA's kernel driver.
    pub nvidia: Nvidia,
    /// What CUDA reports; `None` if it was not queried.
    pub cuda: Option<Cuda>,
    /// What NVML reports; `None` if it was not queried.
    pub nvml: Option<Nvml>,
    /// The kernel and the CPU.
    pub kernel: Kernel,
    /// Our kernel module.
    pub module: Module,
    /// Container, virtual machine, user.
    pub place: Environment,
    /// Whether it is a virtual machine.
    pub machine: Virtual,
    /// Memory and its limits.
    pub memory: MemoryFacts,
    /// NVIDIA's cuFile.
    pub cufile: Cufile,
    /// The requested files.
    pub files: Vec<FileFacts>,
}

impl Facts {
    /// Collects all facts.
    ///
    /// # Errors
    /// When the machine has PCI devices, but they cannot be listed.
    pub fn gather(root: &Root, request: &FactsRequest) -> Result<Self> {
        let tree = Tree::scan(root)?;
        let nvidia = Nvidia::read(root);
        let (drives, place) = (DriveFacts::all(root, &tree), Environment::read(root));
        let registers = if place.root { drive_to_map(&tree, &drives) } else { None };
        // Even if no GPU is visible: a sandbox may hide the bus but allow CUDA.
        let cuda =
            request.timeout.and_then(|timeout| root.answer("cuda", || cuda::query(timeout, registers)));
        let mut gpus = GpuFacts::all(root, &tree, cuda.as_ref());
        let names = || gpus.iter().map(|gpu| gpu.address.to_string()).collect();
        let timeout = request.timeout.filter(|_| !gpus.is_empty());
        let nvml =
            timeout.and_then(|all| root.answer("nvml", || nvml::query(names(), all.min(NVML_TIMEOUT))));
        for gpu in &mut gpus {
            gpu.mig |= nvml.as_ref().is_some_and(|nvml| nvml.has_mig(gpu.address));
        }
        Ok(Self {
            drives,
            nics: Nic::all(root, &tree),
            sdrs: SdrFacts::all(&tree),
            kernel: Kernel::read(root),
            machine: Virtual::read(root),
            module: Module::read(root, &tree),
            place,
            memory: MemoryFacts::read(root),
            cufile: Cufile::read(root),
            files: request
                .files
                .iter()
                .take_while(|_| !request.stop.is_set())
                .filter_map(|path| file::query(root, path))
                .collect(),
            gpus,
            tree,
            nvidia,
            cuda,
            nvml,
        })
    }

    /// Drives, RDMA cards and SDR boards on the PCI bus.
    #[must_use]
    pub fn peers(&self) -> Vec<Address> {
        let drives = self.drives.iter().filter_map(|drive| drive.address);
        let cards = self.nics.iter().filter_map(|nic| nic.address);
        drives.chain(cards).chain(self.sdrs.iter().map(|sdr| sdr.address)).collect()
    }

    /// The NVMe drive at an address.
    #[must_use]
    pub fn drive(&self, address: Address) -> Option<&DriveFacts> {
        self.drives.iter().find(|drive| drive.address == Some(address))
    }

    /// Whether one of these is a GPU.
    #[must_use]
    pub fn has_gpu(&self, addresses: &[Address]) -> bool {
        self.gpus.iter().any(|gpu| addresses.contains(&gpu.address))
    }

    /// The PCI device of a GPU, a drive or a card; `None` if the bus does not show it.
    #[must_use]
    pub fn device(&self, address: Address) -> Option<&Device> {
        self.tree.get(address)
    }
}

/// A drive whose registers can be mapped for a GPU without side effects: it is awake and has a driver.
fn drive_to_map(tree: &Tree, drives: &[DriveFacts]) -> Option<Address> {
    let awake = |address: &Address| {
        tree.get(*address)
            .is_some_and(|device| !device.is_asleep() && device.driver.as_deref() == Some("nvme"))
    };
    drives.iter().filter_map(|drive| drive.address).find(awake)
}

/// Parses a file that contains one number.
fn number<T: std::str::FromStr>(root: &Root, path: &str) -> Option<T> {
    root.text(path).ok()?.parse().ok()
}

/// The leading numbers of a version: `6.8.0-49-generic` is 6, 8, 0.
#[must_use]
pub fn version(text: &str) -> (u32, u32, u32) {
    let mut parts = text.trim().split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse().ok());
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}
