//! What a machine is, read through a [`Root`]: nothing is judged here.

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

use onehop_pci::{Address, Device, Result, Root, Tree};

use cuda::Cuda;
use cufile::Cufile;
use drive::Drive;
use file::FileFacts;
use gpu::{Gpu, Nvidia};
use kernel::Kernel;
use module::Module;
use nic::{Nic, Sdr};
use nvml::Nvml;
use place::{Memory, Place};
use vm::Virtual;

/// How long NVML may take: most machines' answers within a tenth of that.
const NVML: Duration = Duration::from_millis(400);

/// What to look at.
#[derive(Clone, Debug)]
pub struct FactsRequest {
    /// Files whose way to a drive is asked for.
    pub files: Vec<PathBuf>,
    /// How long CUDA may take to answer; none not to ask it.
    pub patience: Option<Duration>,
}

impl Default for FactsRequest {
    fn default() -> Self {
        Self { files: Vec::new(), patience: Some(Duration::from_millis(1500)) }
    }
}

/// A machine.
pub struct Facts {
    /// Its PCI devices.
    pub tree: Tree,
    /// Its GPUs that CUDA can drive.
    pub gpus: Vec<Gpu>,
    /// Its NVMe drives.
    pub drives: Vec<Drive>,
    /// Its RDMA devices.
    pub nics: Vec<Nic>,
    /// Its SDR boards.
    pub sdrs: Vec<Sdr>,
    /// NVIDIA's kernel driver.
    pub nvidia: Nvidia,
    /// What CUDA answered; none where nobody asked.
    pub cuda: Option<Cuda>,
    /// What NVML answered; none where nobody asked.
    pub nvml: Option<Nvml>,
    /// The kernel and the CPU.
    pub kernel: Kernel,
    /// Our kernel module.
    pub module: Module,
    /// Container, virtual machine, user.
    pub place: Place,
    /// Whether it is a virtual machine.
    pub machine: Virtual,
    /// Memory and its limits.
    pub memory: Memory,
    /// NVIDIA's library for files.
    pub cufile: Cufile,
    /// The files that were asked for.
    pub files: Vec<FileFacts>,
}

impl Facts {
    /// Looks at everything.
    ///
    /// # Errors
    /// When the machine has PCI devices and does not let us list them.
    pub fn gather(root: &Root, wish: &FactsRequest) -> Result<Self> {
        let tree = Tree::scan(root)?;
        let nvidia = Nvidia::read(root);
        let (drives, place) = (Drive::all(root, &tree), Place::read(root));
        let registers = if place.root { shown(&tree, &drives) } else { None };
        // Also where no GPU is seen: a sandbox may hide the bus and show CUDA.
        let cuda = wish.patience.and_then(|patience| root.answer("cuda", || cuda::ask(patience, registers)));
        let mut gpus = Gpu::all(root, &tree, cuda.as_ref());
        let names = || gpus.iter().map(|gpu| gpu.address.to_string()).collect();
        let patience = wish.patience.filter(|_| !gpus.is_empty());
        let nvml = patience.and_then(|all| root.answer("nvml", || nvml::ask(names(), all.min(NVML))));
        for gpu in &mut gpus {
            gpu.mig |= nvml.as_ref().is_some_and(|nvml| nvml.divides(gpu.address));
        }
        Ok(Self {
            drives,
            nics: Nic::all(root, &tree),
            sdrs: Sdr::all(&tree),
            kernel: Kernel::read(root),
            machine: Virtual::read(root),
            module: Module::read(root, &tree),
            place,
            memory: Memory::read(root),
            cufile: Cufile::read(root),
            files: wish.files.iter().filter_map(|path| file::ask(root, path)).collect(),
            gpus,
            tree,
            nvidia,
            cuda,
            nvml,
        })
    }

    /// The devices that bytes come from: drives, cards and boards of the bus.
    #[must_use]
    pub fn peers(&self) -> Vec<Address> {
        let drives = self.drives.iter().filter_map(|drive| drive.address);
        let cards = self.nics.iter().filter_map(|nic| nic.address);
        drives.chain(cards).chain(self.sdrs.iter().map(|sdr| sdr.address)).collect()
    }

    /// The NVMe drive at an address.
    #[must_use]
    pub fn drive(&self, address: Address) -> Option<&Drive> {
        self.drives.iter().find(|drive| drive.address == Some(address))
    }

    /// Whether one of these is a GPU.
    #[must_use]
    pub fn has_gpu(&self, addresses: &[Address]) -> bool {
        self.gpus.iter().any(|gpu| addresses.contains(&gpu.address))
    }

    /// The PCI device of a GPU, a drive or a card; none for what the bus does not show.
    #[must_use]
    pub fn device(&self, address: Address) -> Option<&Device> {
        self.tree.get(address)
    }
}

/// A drive whose registers a GPU can be shown without anything being changed: one that is awake and that its driver has.
fn shown(tree: &Tree, drives: &[Drive]) -> Option<Address> {
    let awake = |address: &Address| {
        tree.get(*address)
            .is_some_and(|device| !device.is_asleep() && device.driver.as_deref() == Some("nvme"))
    };
    drives.iter().filter_map(|drive| drive.address).find(awake)
}

/// A number in a small file.
fn number<T: std::str::FromStr>(root: &Root, path: &str) -> Option<T> {
    root.text(path).ok()?.parse().ok()
}

/// The first numbers of a version: `6.8.0-49-generic` is 6, 8, 0.
#[must_use]
pub fn version(text: &str) -> (u32, u32, u32) {
    let mut parts = text.trim().split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse().ok());
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}
