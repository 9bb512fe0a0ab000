//! RDMA cards and SDR boards.

use onehop_pci::Device;

use crate::check::{Check, CheckGroup, Status, bytes, rate};
use crate::facts::Facts;
use crate::facts::nic::{Nic, SdrFacts};
use crate::fixes::{group_user, translation_fix};
use crate::pair::DevicePair;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks: Vec<Check> = facts.nics.iter().flat_map(|nic| card(facts, nic)).collect();
    checks.extend(facts.sdrs.iter().flat_map(|sdr| board(facts, sdr)));
    checks
}

fn card(facts: &Facts, nic: &Nic) -> Vec<Check> {
    let why = "RDMA writes straight into GPU memory that is registered with the card";
    let Some(address) = nic.address else {
        let found = format!("{} is a software device: no DMA, no dma-bufs", nic.name);
        return vec![Check::new("nic.present", CheckGroup::Nic, Status::Info, found, why).about(&nic.name)];
    };
    let port = nic.port.as_deref().unwrap_or("port state unknown");
    let up = port.contains("ACTIVE");
    let status = if up { Status::Pass } else { Status::Warn };
    let title = facts.device(address).map(|device| device.title()).unwrap_or_default();
    let mut checks = vec![
        Check::new("nic.present", CheckGroup::Nic, status, format!("{} {title}: {port}", nic.name), why)
            .about(address)
            .fix_if(!up, "Plug in the cable, or start the subnet manager; ibstat shows more"),
    ];
    let distances: Vec<_> = facts
        .gpus
        .iter()
        .filter_map(|gpu| {
            let path = DevicePair::new(facts, gpu, address)?.path?;
            Some((path.class, format!("{} to GPU {}", path.class.name(), gpu.address)))
        })
        .collect();
    if let Some(nearest) = distances.iter().map(|(class, _)| *class).min() {
        let words: Vec<_> = distances.iter().map(|(_, words)| words.clone()).collect();
        let status = if nearest.below_root() { Status::Pass } else { Status::Info };
        let why = "a card behind the GPU's switch reaches it without the CPU's root complex";
        checks.push(
            Check::new("nic.distance", CheckGroup::Nic, status, words.join(", "), why).about(address).fix_if(
                !nearest.below_root(),
                "Use the card nearest to each GPU, or move it behind the same switch",
            ),
        );
    }
    checks
}

fn board(facts: &Facts, sdr: &SdrFacts) -> Vec<Check> {
    let Some(device) = facts.device(sdr.address) else { return Vec::new() };
    let check = |id, status, found: String, why| {
        Check::new(id, CheckGroup::Sdr, status, found, why).about(sdr.address)
    };
    let driver = device.driver.as_deref();
    let mut checks = vec![
        check(
            "sdr.present",
            if driver.is_some() { Status::Pass } else { Status::Warn },
            format!(
                "uSDR family, {:04x}:{:04x}, {}",
                device.vendor,
                device.device,
                driver.map_or("no driver".into(), |d| format!("driver {d}"))
            ),
            "samples arrive by DMA in 32 fixed buffers",
        )
        .fix_if(
            driver.is_none(),
            "Load usdr_pcie_uram for cpu/pinned, or bind the board to the module onehop",
        ),
    ];
    let link = device.best_link();
    if let (Some(now), Some(rate_now)) = (link.now(), link.rate()) {
        let samples = rate_now / 4.0 / 1e6;
        let narrow = link.width < link.max_width;
        let of =
            if narrow { format!(", maximum {}", link.best().unwrap_or_default()) } else { String::new() };
        let found = format!(
            "{now}{of}: {}, below {samples:.0} million 4-byte samples (ci16) per second",
            rate(rate_now)
        );
        let status = if narrow { Status::Warn } else { Status::Info };
        checks.push(
            check("sdr.link", status, found, "samples beyond the link's rate are lost")
                .fix_if(narrow, "Use a slot with all of the board's lanes, or reseat the board")
                .by("current_link_width, max_link_width"),
        );
    }
    checks.push(translation(facts, device));
    checks.extend(facts.gpus.iter().filter_map(|gpu| mask(facts, sdr, gpu)));
    checks
}

/// Whether the IOMMU translates the board's addresses.
fn translation(facts: &Facts, device: &Device) -> Check {
    let why = "a board with 32-bit bus addresses needs translation to reach memory above 4 GiB";
    let check = |status, found: String| {
        Check::new("sdr.iommu", CheckGroup::Sdr, status, found, why)
            .about(device.address)
            .by("/sys/kernel/iommu_groups")
    };
    let bits =
        device.dma_bits.map_or_else(String::new, |bits| format!("; its driver uses {bits}-bit addresses"));
    let Some(group) = facts.tree.group_of(device) else {
        return check(Status::Info, format!("no IOMMU: the board uses physical addresses{bits}"));
    };
    let kind = group.kind.as_deref().unwrap_or("unknown type");
    let number = device.iommu_group.unwrap_or_default();
    match group.translates() {
        Some(true) => check(Status::Pass, format!("group {number}, {kind}: translated{bits}")),
        Some(false) => check(Status::Info, format!("group {number}, {kind}: not translated{bits}")),
        None => check(Status::Unknown, format!("group {number}, {kind}{bits}"))
            .fix(format!("Run cat /sys/kernel/iommu_groups/{number}/type on the host")),
    }
}

fn mask(facts: &Facts, sdr: &SdrFacts, gpu: &crate::facts::gpu::GpuFacts) -> Option<Check> {
    let why = "the board has 32-bit bus addresses, and 32 buffers that are contiguous on the bus";
    let check = |status, found: String| {
        Check::new("sdr.mask", CheckGroup::Sdr, status, found, why).about(sdr.address)
    };
    let bar = gpu.window.filter(|bar| bar.assigned)?;
    let place = format!("BAR1 of GPU {}: {} at {:#x}", gpu.address, bytes(bar.size), bar.start);
    if bar.last() <= u64::from(u32::MAX) {
        return Some(check(Status::Pass, format!("{place}, below 4 GiB")));
    }
    let group = facts.device(sdr.address).and_then(|device| facts.tree.group_of(device));
    Some(match group.and_then(onehop_pci::IommuGroup::translates) {
        Some(true) => check(Status::Pass, format!("{place}; the IOMMU maps it below 4 GiB")),
        Some(false) => {
            let boot = translation_fix(facts, sdr.address);
            let fix = match group_user(facts, sdr.address) {
                None => format!(
                    "{boot}. Or, while no device of the board's group has a driver: echo DMA > \
                     /sys/bus/pci/devices/{}/iommu_group/type (root)",
                    sdr.address
                ),
                Some(_) => boot,
            };
            check(Status::Fail, format!("{place}; the IOMMU does not translate (identity)")).fix(fix)
        }
        None => check(Status::Fail, format!("{place}; no IOMMU translates"))
            .fix(translation_fix(facts, sdr.address)),
    })
}
