//! The way of a byte from a device into GPU memory: with two copies through the host's memory, and with one hop. With this
//! machine's own addresses.

use std::fmt::Write;

use onehop_pci::{Address, Bar, Device, PathClass};
use serde::Serialize;

use super::short_name;
use crate::check::{bytes, rate};
use crate::facts::Facts;
use crate::pair::{Pair, Passes, list};

/// The two ways between a device and a GPU.
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
    /// How close they are.
    pub class: Option<PathClass>,
    /// Bridges on the way.
    pub bridges: Vec<Address>,
    /// Those of them whose access control sends packets up to the root complex.
    pub redirects: Vec<Address>,
    /// The device's registers on the bus.
    pub registers: Option<Bar>,
    /// The GPU's memory on the bus.
    pub window: Option<Bar>,
    /// What the device puts on the bus to reach the first byte of it, as far as it is known.
    pub address_words: String,
    /// Whether it gets through.
    pub passes: String,
    /// The narrowest link, for people.
    pub limit: Option<String>,
}

/// Both ways for a device and a GPU; none where either is not there.
#[must_use]
pub fn explain(facts: &Facts, gpu: Address, device: Address) -> Option<Explanation> {
    let gpu = facts.gpus.iter().find(|known| known.address == gpu)?;
    let pair = Pair::new(facts, gpu, device)?;
    let passes = match pair.writes() {
        Passes::Expected(why) => format!("expected to get through: {why}"),
        Passes::Perhaps(why) => format!("nobody has tried: {why}"),
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

/// What the device puts on the bus: BAR1's address itself, or one that the IOMMU turns into it.
fn address_words(facts: &Facts, device: &Device, window: Option<&Bar>) -> String {
    let Some(bar) = window.filter(|bar| bar.assigned) else {
        return "the GPU's BAR1 has no address that is told".into();
    };
    let at = format!("{:#x}", bar.start);
    match facts.tree.group_of(device).and_then(onehop_pci::Group::translates) {
        Some(true) => format!("an IOVA, which the IOMMU turns into {at} + offset"),
        Some(false) => format!("{at} + offset, as the IOMMU passes addresses on"),
        None if facts.tree.groups.is_empty() => format!("{at} + offset, as there is no IOMMU"),
        None => format!("{at} + offset, as no IOMMU group is shown for it"),
    }
}

impl Explanation {
    /// What the bytes pass in between.
    pub(crate) fn middle(&self) -> String {
        let class = self.class.map_or("a way that is not told", PathClass::text);
        let mut words = class.to_owned();
        if !self.bridges.is_empty() {
            words = format!("{class}: {}", list(&self.bridges));
        }
        if !self.redirects.is_empty() && self.class.is_some_and(PathClass::below_root) {
            words.push_str("; access control sends it up to the root complex and back");
        }
        words
    }

    pub(crate) fn registers_words(&self) -> String {
        self.registers
            .map_or_else(|| "no address is told".into(), |bar| format!("{} at {bar}", bytes(bar.size)))
    }

    pub(crate) fn window_words(&self) -> String {
        self.window.map_or_else(|| "no address is told".into(), |bar| format!("{} at {bar}", bytes(bar.size)))
    }
}

/// The drawing for a terminal.
#[must_use]
pub fn explain_text(way: &Explanation) -> String {
    let mut text = String::new();
    let Explanation { device, gpu, device_address, gpu_address, .. } = way;
    let _ = write!(
        text,
        "{device} ({device_address}) into {gpu} ({gpu_address})\n\n\
         traditionally: two copies, and the bytes cross host memory\n\
         \n  {device}\n    │ 1. its DMA engine writes to host memory (pages of the kernel, or pinned ones)\n    ▼\n  \
         host memory ──── the CPU copies once more if the file came through the page cache\n    │ 2. the GPU's copy engine \
         reads it, over the bus again\n    ▼\n  GPU memory\n\n\
         directly: one hop\n\
         \n  {device}   registers (BAR0): {}\n    │ its DMA engine writes to {}\n    │ through {}\n    ▼\n  \
         {gpu}   BAR1: {}\n    = GPU memory: BAR1 is a window on it, there is no second copy\n\n",
        way.registers_words(),
        way.address_words,
        way.middle(),
        way.window_words()
    );
    let _ = writeln!(text, "BAR0 holds registers and doorbells only: no payload passes through it.");
    let _ = writeln!(
        text,
        "The end is told by a completion in a queue, which CPU or GPU polls; nobody interrupts the GPU."
    );
    let _ = writeln!(text, "Does it get through? {}", way.passes);
    if let Some(limit) = &way.limit {
        let _ = writeln!(text, "No faster than {limit}.");
    }
    text
}
