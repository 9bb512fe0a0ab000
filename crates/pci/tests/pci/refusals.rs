//! Refused drives on composed systems: the error names the reason and a fix.

use onehop_pci::{Root, open};

use crate::compose::*;

const DRIVE: &str = "0000:04:00.0";

/// A drive and a network card in one group, each below a switch port with these ACS controls.
fn shared(acs: Option<u16>) -> Root {
    let mut machine = Machine::new("a shared group");
    let ports = ["0000:00:01.0", "0000:01:00.0"];
    let port = |address| {
        let port = Function::port(address, (0x1000, 0xc030), DOWNSTREAM).under(&ports);
        match acs {
            Some(control) => port.acs(control),
            None => port,
        }
    };
    machine
        .add(&Function::port(ports[0], (0x8086, 1), ROOT_PORT).acs(ACS_ON))
        .add(&Function::port(ports[1], (0x1000, 0xc030), UPSTREAM).under(&ports[..1]))
        .add(&port("0000:02:00.0"))
        .add(&port("0000:02:01.0"))
        .add(
            &Function::new("0000:03:00.0", (0x8086, 0x1521), 0x020000)
                .under(&[ports[0], ports[1], "0000:02:00.0"])
                .driver("igb")
                .group(9, "DMA-FQ"),
        )
        .add(
            &Function::new(DRIVE, (0x144d, 0xa80a), 0x010802)
                .under(&[ports[0], ports[1], "0000:02:01.0"])
                .driver("nvme")
                .group(9, "DMA-FQ"),
        );
    machine
        .folder("/sys/kernel/iommu_groups/9/devices", &["0000:03:00.0", DRIVE])
        .there("/sys/bus/pci/drivers/vfio-pci");
    Root::recorded(machine.0)
}

fn refusal(root: &Root, name: &str) -> String {
    open(root, name.parse().unwrap()).err().unwrap().to_string()
}

#[test]
fn a_shared_group_names_the_devices_and_the_bridges() {
    for (acs, why) in [
        (Some(0), "0000:02:01.0 (its ACS is disabled)"),
        (Some(4), "0000:02:01.0 (its ACS has only ReqRedir)"),
    ] {
        let error = refusal(&shared(acs), DRIVE);
        assert!(error.contains("group 9 is not viable") && error.contains("0000:03:00.0 (igb)"), "{error}");
        assert!(error.contains(why) && !error.contains("0000:00:01.0"), "{error}");
    }
    let error = refusal(&shared(Some(ACS_ON)), DRIVE);
    assert!(error.contains("functions of one device"), "{error}");
    let error = refusal(&shared(None), DRIVE);
    assert!(error.contains("0000:02:01.0 ("), "{error}");
}

#[test]
fn a_missing_module_is_reported_with_its_source() {
    let error = refusal(&shared(Some(0)), "0000:04:00.0?via=kmod");
    assert!(error.contains("onehop is not loaded") && error.contains("docs/kernel-module.md"), "{error}");
}

#[test]
fn a_kernel_without_iommufd_is_reported_before_any_change() {
    let mut machine = Machine::new("a drive alone");
    machine
        .add(&Function::new(DRIVE, (0x144d, 0xa80a), 0x010802).driver("nvme").group(9, "DMA-FQ"))
        .folder("/sys/kernel/iommu_groups/9/devices", &[DRIVE])
        .there("/sys/bus/pci/drivers/vfio-pci");
    let error = refusal(&Root::recorded(machine.0), "0000:04:00.0?via=iommufd");
    assert!(error.contains("/dev/iommu") && error.contains("CONFIG_IOMMUFD"), "{error}");
}
