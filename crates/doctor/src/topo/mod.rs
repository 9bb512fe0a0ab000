//! The PCIe tree as a picture.

use crate::facts::Facts;

/// Names for addresses.
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
