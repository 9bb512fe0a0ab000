//! The checks. They judge collected facts, and read nothing from the system.

mod cufile;
mod drive;
mod file;
mod gpu;
mod gpu_window;
mod iommu;
mod kernel;
mod memory;
mod nic;
mod path;
mod place;

use onehop_pci::Address;

use crate::check::{Check, CheckGroup, Status};
use crate::diagnosis::Only;
use crate::facts::Facts;

/// All checks of a machine.
pub(crate) fn all(facts: &Facts, only: &Only) -> Vec<Check> {
    let wanted = |only: Option<Address>, address: Address| only.is_none_or(|only| only == address);
    let mut checks = place::checks(facts);
    checks.extend(bus(facts));
    checks.extend(gpu::driver(facts));
    for one in facts.gpus.iter().filter(|one| wanted(only.gpu, one.address)) {
        checks.extend(gpu::checks(facts, one));
        checks.extend(gpu_window::checks(facts, one));
    }
    checks.push(drive::found(facts));
    for one in facts.drives.iter().filter(|one| one.address.is_none_or(|at| wanted(only.device, at))) {
        checks.extend(drive::checks(facts, one));
    }
    checks.extend(nic::checks(facts));
    checks.extend(path::checks(facts, only));
    checks.extend(iommu::checks(facts));
    checks.extend(kernel::checks(facts));
    checks.extend(memory::checks(facts));
    checks.extend(file::checks(facts));
    checks.extend(cufile::checks(facts));
    checks
}

/// Files of the PCI bus that could not be parsed.
fn bus(facts: &Facts) -> Option<Check> {
    let of_devices = facts.tree.devices.values().flat_map(|device| &device.problems);
    let problems: Vec<_> = facts.tree.problems.iter().chain(of_devices).filter(|e| !e.is_denied()).collect();
    let first = problems.first()?;
    let found = format!(
        "{} invalid: {first}",
        if problems.len() == 1 {
            "1 system file is".into()
        } else {
            format!("{} system files are", problems.len())
        }
    );
    let mut check = Check::new(
        "pci.garbage",
        CheckGroup::Place,
        Status::Warn,
        found,
        "what the system reports about a device could not be parsed, so it counts as unknown",
    )
    .fix("Check the device with lspci -vvv. A device that reads as all ones has dropped off the bus; a cold start brings it back");
    check.evidence = problems.iter().take(20).map(ToString::to_string).collect();
    Some(check)
}
