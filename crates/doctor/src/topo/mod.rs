//! The PCIe tree, and the path between two devices: as text, as SVG, and as an HTML page.

mod explain;
mod html;
mod svg;
mod text;

use onehop_pci::{Address, Bar, BarKind, Device, Tree};

use crate::check::bytes;
use crate::facts::Facts;

pub use explain::{Explanation, explain, explain_text};
pub use html::page;
pub use svg::picture;
pub use text::tree;

/// Why there is no path to explain; `None` if the system has both a device and a GPU.
#[must_use]
pub fn missing(facts: &Facts) -> Option<&'static str> {
    match (facts.gpus.is_empty(), facts.peers().is_empty()) {
        (true, true) => Some(
            "no path to explain: this system shows no NVIDIA GPU, and no NVMe drive, RDMA card or SDR board",
        ),
        (true, false) => Some("no path to explain: this system shows no NVIDIA GPU"),
        (false, true) => Some("no path to explain: this system shows no NVMe drive, RDMA card or SDR board"),
        (false, false) => None,
    }
}

/// One device of the drawn tree.
struct TreeLine<'a> {
    /// Its depth below its host bridge.
    depth: usize,
    device: &'a Device,
    /// Whether more devices follow at its own depth, and at each depth above.
    more: Vec<bool>,
}

/// The devices below a host bridge, in tree order. Irrelevant functions are left out unless `all`.
fn lines<'a>(tree: &'a Tree, host: &'a str, all: bool) -> Vec<TreeLine<'a>> {
    let mut lines = Vec::new();
    below(tree, host, None, &mut Vec::new(), all, &mut lines);
    lines
}

fn below<'a>(
    tree: &'a Tree,
    host: &'a str,
    bridge: Option<Address>,
    more: &mut Vec<bool>,
    all: bool,
    lines: &mut Vec<TreeLine<'a>>,
) {
    let devices: Vec<_> =
        tree.children(host, bridge).filter(|device| all || is_relevant(tree, device)).collect();
    for (at, device) in devices.iter().enumerate() {
        more.push(at + 1 < devices.len());
        lines.push(TreeLine { depth: more.len() - 1, device, more: more.clone() });
        below(tree, host, Some(device.address), more, all, lines);
        more.pop();
    }
}

/// Whether a device can be part of a route: a source or sink of data, or a bridge above one.
fn is_relevant(tree: &Tree, device: &Device) -> bool {
    let itself = matches!(device.class.base(), 0x01 | 0x02 | 0x03 | 0x0d | 0x11 | 0x12);
    let behind = tree.devices.values().any(|other| {
        other.parents.contains(&device.address)
            && matches!(other.class.base(), 0x01 | 0x02 | 0x03 | 0x0d | 0x11 | 0x12)
    });
    itself || behind
}

/// Memory BARs.
fn bars(device: &Device) -> Vec<&Bar> {
    device.bars.iter().filter(|bar| bar.kind == BarKind::Memory).collect()
}

fn bar_text(bar: &Bar) -> String {
    let kind = if bar.prefetchable { " prefetchable" } else { "" };
    format!("BAR{} {} at {bar}{kind}", bar.index, bytes(bar.size))
}

/// What is shown next to a device's name: link, group, node, driver.
fn remarks(tree: &Tree, device: &Device) -> Vec<String> {
    let mut words = Vec::new();
    let link = device.best_link();
    if let Some(now) = link.now() {
        let best =
            link.best().filter(|best| *best != now).map_or_else(String::new, |best| format!(" of {best}"));
        words.push(format!("{now}{best}"));
    }
    if let Some(number) = device.iommu_group {
        let kind = tree.groups.get(&number).and_then(|group| group.kind.clone());
        words.push(format!("group {number}{}", kind.map_or_else(String::new, |kind| format!(" {kind}"))));
    }
    words.extend(device.numa_node.map(|node| format!("node {node}")));
    words.extend(device.driver.clone());
    let acs = device.config.as_ref().and_then(|config| config.acs).filter(|acs| acs.redirects());
    words.extend(acs.map(|_| "ACS redirects".to_owned()));
    words.extend(device.is_asleep().then(|| "asleep".to_owned()));
    words.extend(device.physical_function.map(|owner| format!("virtual function of {owner}")));
    words
}

/// Names by address.
pub(crate) fn names(facts: &Facts) -> Vec<(String, String)> {
    let gpus = facts.gpus.iter().map(|gpu| (gpu.address, crate::routes::gpu_title(gpu)));
    let drives = facts.drives.iter().filter_map(|drive| {
        let name = drive.name.as_ref().map_or_else(String::new, |name| format!("{name} "));
        Some((drive.address?, format!("{name}{} ({})", drive.title(), drive.address?)))
    });
    let nics =
        facts.nics.iter().filter_map(|nic| Some((nic.address?, format!("{} ({})", nic.name, nic.address?))));
    let sdrs = facts.sdrs.iter().map(|sdr| (sdr.address, format!("uSDR ({})", sdr.address)));
    gpus.chain(drives).chain(nics).chain(sdrs).map(|(address, name)| (address.to_string(), name)).collect()
}

/// A device's name without its address.
fn short_name(facts: &Facts, device: &Device) -> String {
    let address = device.address.to_string();
    let known = names(facts).into_iter().find(|(at, _)| *at == address);
    known.map_or_else(|| device.title(), |(_, name)| name.replace(&format!(" ({address})"), ""))
}
