//! What NVML reports: maximum links, power. The query has a time limit, because the library may hang.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use onehop_gpu::cuda::{self, GpuHealth};
use onehop_pci::Address;
use serde::{Deserialize, Serialize};

/// What the library reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Nvml {
    /// Why NVML cannot be used.
    pub error: Option<String>,
    /// The requested GPUs that it lists.
    pub gpus: Vec<NvmlFacts>,
}

/// NVML's view of a GPU. Unknown values are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlFacts {
    /// Its PCI address.
    pub pci: String,
    /// The current link: generation and lanes. An idle GPU lowers its speed.
    pub link: (Option<u32>, Option<u32>),
    /// The best link that GPU and slot support.
    pub best_link: (Option<u32>, Option<u32>),
    /// Power draw and limit in milliwatts.
    pub power: (Option<u32>, Option<u32>),
    /// Performance state: 0 is active, 8 or more is idle.
    pub state: Option<u32>,
    /// Whether it is partitioned into MIG instances.
    #[serde(default)]
    pub mig: Option<bool>,
}

impl Nvml {
    /// Whether a GPU is partitioned into MIG instances.
    #[must_use]
    pub fn has_mig(&self, address: Address) -> bool {
        self.gpus.iter().any(|gpu| gpu.mig == Some(true) && gpu.pci.parse() == Ok(address))
    }
}

/// Queries these GPUs, with a time limit.
pub(super) fn query(gpus: Vec<String>, timeout: Duration) -> Nvml {
    let failed = |why: String| Nvml { error: Some(why), gpus: Vec::new() };
    let (sender, answer) = mpsc::channel();
    let thread = thread::Builder::new().name("nvml".into()).spawn(move || sender.send(query_all(&gpus)));
    if let Err(error) = thread {
        return failed(format!("cannot start a thread to query NVML: {error}"));
    }
    answer
        .recv_timeout(timeout)
        .unwrap_or_else(|_| failed(format!("NVML did not answer within {} ms", timeout.as_millis())))
}

fn query_all(gpus: &[String]) -> Nvml {
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
