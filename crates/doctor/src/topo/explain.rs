//! The path of data from a device into GPU memory, with two copies through host memory and with one hop, and this
//! machine's addresses.

use std::fmt::Write;

use onehop_pci::{Address, Bar, Device, PathClass};
use serde::Serialize;

use super::short_name;
use crate::check::{bytes, rate};
use crate::facts::Facts;
use crate::pair::{DevicePair, Passes, list};

/// The two paths between a device and a GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// The device's name.
    pub device: String,
    /// Its address.
    pub device_address: Address,
    /// The GPU's name.
    pub gpu: String,
    /// Its address.
    pub gpu_address: Address,
    /// Their distance.
    pub class: Option<PathClass>,
    /// Bridges on the path.
    pub bridges: Vec<Address>,
    /// Those whose ACS redirects packets to the root complex.
    pub redirects: Vec<Address>,
    /// Bus addresses of the device's registers.
    pub registers: Option<Bar>,
    /// Bus addresses of the GPU's memory.
    pub window: Option<Bar>,
    /// The bus address at which the device reaches the first byte of GPU memory, as text.
    pub address_words: String,
    /// Whether transfers are forwarded.
    pub passes: String,
    /// The narrowest link, for display.
    pub limit: Option<String>,
}

/// Both paths for a device and a GPU; `None` if either is missing.
#[must_use]
pub fn explain(facts: &Facts, gpu: Address, device: Address) -> Option<Explanation> {
    let gpu = facts.gpus.iter().find(|known| known.address == gpu)?;
    let pair = DevicePair::new(facts, gpu, device)?;
    let passes = match pair.writes() {
        Passes::Expected(why) => format!("expected to get through: {why}"),
        Passes::Perhaps(why) => format!("untested: {why}"),
        Passes::Doubtful(why) => format!("doubtful: {why}"),
    };
    Some(Explanation {
        device: short_name(facts, pair.device),
        device_address: device,
        gpu: gpu.name.clone(),
        gpu_address: gpu.address,
        class: pair.path.as_ref().map(|path| path.class),
        bridges: pair.path.as_ref().map(|path| path.bridges().collect()).unwrap_or_default(),
        redirects: pair.redirecting().0,
        registers: pair.device.bar(0).filter(|bar| bar.assigned).copied(),
        window: gpu.window.filter(|bar| bar.assigned),
        address_words: address_words(facts, pair.device, gpu.window.as_ref()),
        passes,
        limit: pair.narrowest().map(|(most, _, at)| format!("{} at {at}", rate(most))),
    })
}

/// The address that the device puts on the bus: BAR1's, or one that the IOMMU translates to it.
fn address_words(facts: &Facts, device: &Device, window: Option<&Bar>) -> String {
    let Some(bar) = window.filter(|bar| bar.assigned) else {
        return "an unknown address (BAR1 is not visible)".into();
    };
    let at = format!("{:#x}", bar.start);
    match facts.tree.group_of(device).and_then(onehop_pci::IommuGroup::translates) {
        Some(true) => format!("an IOVA that the IOMMU translates to {at} + offset"),
        Some(false) => format!("{at} + offset (the IOMMU does not translate)"),
        None if facts.tree.groups.is_empty() => format!("{at} + offset (no IOMMU)"),
        None => format!("{at} + offset (no IOMMU group visible)"),
    }
}

impl Explanation {
    /// The path between the device and the GPU.
    pub(crate) fn path_text(&self) -> String {
        let class = self.class.map_or("an unknown path", PathClass::text);
        let mut words = class.to_owned();
        if !self.bridges.is_empty() {
            words = format!("{class}: {}", list(&self.bridges));
        }
        if !self.redirects.is_empty() && self.class.is_some_and(PathClass::below_root) {
            words.push_str("; access control redirects it through the root complex");
        }
        words
    }

    pub(crate) fn registers_text(&self) -> String {
        self.registers.map_or_else(|| "address unknown".into(), |bar| format!("{} at {bar}", bytes(bar.size)))
    }

    pub(crate) fn window_text(&self) -> String {
        self.window.map_or_else(|| "address unknown".into(), |bar| format!("{} at {bar}", bytes(bar.size)))
    }
}

/// Both paths as a drawing for a terminal.
#[must_use]
pub fn explain_text(explanation: &Explanation) -> String {
    let mut text = String::new();
    let Explanation { device, gpu, device_address, gpu_address, .. } = explanation;
    let _ = write!(
        text,
        "{device} ({device_address}) into {gpu} ({gpu_address})\n\n\
         Traditionally: two copies, through host memory\n\
         \n  {device}\n    │ 1. its DMA engine writes to host memory (pages of the kernel, or pinned ones)\n    ▼\n  \
         host memory ──── one more CPU copy if the page cache holds the file\n    │ 2. the GPU's copy engine \
         reads it, over the bus again\n    ▼\n  GPU memory\n\n\
         Directly: one hop\n\
         \n  {device}   registers (BAR0): {}\n    │ its DMA engine writes to {}\n    │ through {}\n    ▼\n  \
         {gpu}   BAR1: {}\n    = GPU memory, which BAR1 exposes: no second copy\n\n",
        explanation.registers_text(),
        explanation.address_words,
        explanation.path_text(),
        explanation.window_text()
    );
    let _ = writeln!(text, "BAR0 holds only registers and doorbells: no data passes through it.");
    let _ = writeln!(
        text,
        "A completion in a queue, which the CPU or GPU polls, reports the end; GPUs get no interrupts."
    );
    let _ = writeln!(text, "Peer-to-peer writes: {}", explanation.passes);
    if let Some(limit) = &explanation.limit {
        let _ = writeln!(text, "Limit: {limit}.");
    }
    text
}
