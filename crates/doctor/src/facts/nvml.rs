//! NVML's report: maximum links, power. A hanging library does not block the doctor.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use onehop_gpu::cuda::{self, GpuHealth};
use onehop_pci::Address;
use serde::{Deserialize, Serialize};

/// The library's answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Nvml {
    /// Why there is no answer.
    pub error: Option<String>,
    /// The requested GPUs that it knows.
    pub gpus: Vec<NvmlFacts>,
}

/// NVML's view of a GPU. Unknown values are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlFacts {
    /// Its PCI address.
    pub pci: String,
    /// The present link: generation and lanes. An idle GPU slows it down.
    pub link: (Option<u32>, Option<u32>),
    /// The best link that GPU and slot support.
    pub best_link: (Option<u32>, Option<u32>),
    /// Present power and limit in milliwatts.
    pub power: (Option<u32>, Option<u32>),
    /// Performance state: 0 is active, 8 and more is idle.
    pub state: Option<u32>,
    /// Whether it is divided into MIG instances.
    #[serde(default)]
    pub mig: Option<bool>,
}

impl Nvml {
    /// Whether a GPU is divided into instances.
    #[must_use]
    pub fn divides(&self, address: Address) -> bool {
        self.gpus.iter().any(|gpu| gpu.mig == Some(true) && gpu.pci.parse() == Ok(address))
    }
}

/// Queries these GPUs, with a time limit.
pub(super) fn ask(gpus: Vec<String>, patience: Duration) -> Nvml {
    let failed = |why: String| Nvml { error: Some(why), gpus: Vec::new() };
    let (send, answer) = mpsc::channel();
    let started = thread::Builder::new().name("nvml".into()).spawn(move || send.send(all(&gpus)));
    if let Err(error) = started {
        return failed(format!("no thread could be started to ask it: {error}"));
    }
    answer
        .recv_timeout(patience)
        .unwrap_or_else(|_| failed(format!("it did not answer within {} ms", patience.as_millis())))
}

fn all(gpus: &[String]) -> Nvml {
    let library = match cuda::Nvml::load() {
        Ok(library) => library,
        Err(error) => return Nvml { error: Some(error.to_string()), gpus: Vec::new() },
    };
    let one = |pci: &String| Some(health(pci, &library.health(pci).ok()?));
    Nvml { error: None, gpus: gpus.iter().filter_map(one).collect() }
}

fn health(pci: &str, health: &GpuHealth) -> NvmlFacts {
    NvmlFacts {
        pci: pci.to_owned(),
        link: (health.link_generation, health.link_lanes),
        best_link: (health.max_link_generation, health.max_link_lanes),
        power: (health.power, health.power_limit),
        state: health.state,
        mig: health.mig,
    }
}
